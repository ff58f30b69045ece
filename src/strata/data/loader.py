"""From a way to plan and what the user chose to a loader: what all kinds of datasets have in common."""

from __future__ import annotations

import importlib
import importlib.util
import json
import operator
import os
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from strata.clock import SystemClock
from strata.data.batch.delivery import Deliverer, Types
from strata.data.config import DEFAULT_BUFFER_ROWS, Delivery
from strata.data.plan.splits import parse_bytes
from strata.data.ranks import find_ranks, share
from strata.errors import DataError, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from strata.data.config import OnError, OutputFormat, WorkerType
    from strata.data.dataset import Dataset
    from strata.data.order.assignment import Strategy
    from strata.data.order.steps import Tail
    from strata.data.runtime.decoder import Recipe
    from strata.identity import Identity

MAX_DEFAULT_WORKERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `create_dataloader` of every kind of dataset takes; `StructuredDataset` explains it."""

    name: str
    batch_size: int
    shuffle: bool
    shuffle_seed: int
    shuffle_buffer_size: int | None
    split_bytes: int | str
    split_strategy: str | Strategy | None
    num_workers: int | None
    worker_type: WorkerType
    output_format: OutputFormat | None
    accelerator: Any
    rank: int | None
    num_ranks: int | None
    collate_fn: Callable[[Any], Any] | None
    transform: Callable[[Any], Any] | None
    strings: str | Mapping[str, str]
    string_width: int | None
    nulls: str | Mapping[str, Any] | None
    decimals: str | Mapping[str, str] | None
    vocabularies: Mapping[str, Any] | None
    max_vocabulary: int
    tail: Tail
    on_error: OnError
    lanes: int | None
    prefetch_bytes: int | str | None
    pin_memory: bool

    def delivery(self) -> Delivery:
        num_workers = default_num_workers() if self.num_workers is None else _whole("num_workers", self.num_workers)
        return Delivery(
            batch_size=_whole("batch_size", self.batch_size),
            shuffle=self.shuffle,
            shuffle_seed=_whole("shuffle_seed", self.shuffle_seed),
            shuffle_buffer_size=DEFAULT_BUFFER_ROWS
            if self.shuffle_buffer_size is None
            else _whole("shuffle_buffer_size", self.shuffle_buffer_size),
            split_strategy=self.split_strategy,
            num_workers=num_workers,
            worker_type=self.worker_type,
            output_format=self.output_format or ("torch" if has_torch() else "numpy"),
            tail=self.tail,
            on_error=self.on_error,
            lanes=self.lanes,
            lane_bytes=parse_bytes(self.split_bytes),
            prefetch_bytes=prefetch_budget(self.prefetch_bytes, self.split_bytes, num_workers),
            transform=self.transform,
            collate_fn=self.collate_fn,
        )

    def types(self, output_format: OutputFormat) -> Types:
        return Types(
            output_format=output_format,
            strings=self.strings,
            string_width=self.string_width,
            nulls=self.nulls,
            decimals=self.decimals,
            vocabularies=self.vocabularies,
            max_vocabulary=self.max_vocabulary,
        )


def create(kind: type[Any], plan: Callable[[Identity], Recipe], options: Options) -> tuple[Any, Any]:
    """A loader, and the dataset behind it, of this class.

    Where torch is installed, the loader is a DataLoader, and the dataset an IterableDataset as well.
    """
    clock = SystemClock()
    began_s = clock.monotonic_s()
    ranks = find_ranks(rank=options.rank, num_ranks=options.num_ranks, accelerator=options.accelerator)
    delivery = options.delivery()  # before anything is read: what is wrong here is known at once
    recipe = replace(plan(ranks), transform=delivery.transform)
    plan_s = clock.monotonic_s() - began_s  # without `import torch`, which the next line may bring
    deliverer = Deliverer(recipe, options.types(delivery.output_format), delivery, partial(share, ranks))
    if not has_torch():
        dataset = kind(recipe, deliverer, delivery, ranks, name=options.name, plan_s=plan_s)
        check_same(dataset)
        return importlib.import_module("strata.data.plain_loader").PlainLoader(dataset), dataset
    torch_loader = importlib.import_module("strata.data.torch")
    dataset = torch_loader.iterable(kind)(recipe, deliverer, delivery, ranks, name=options.name, plan_s=plan_s)
    check_same(dataset)
    loader = torch_loader.Loader(dataset, accelerator=options.accelerator, pin_memory=options.pin_memory)
    return loader, dataset


def check_same(dataset: Dataset) -> None:
    """That all ranks are about to read one order, with one code for a string, if they can ask each other.

    Raises:
        DataError: This rank and rank 0 see other files, or were given other settings.
    """
    mine = {**dataset.state_dict(), "batch_size": dataset.delivery.batch_size, "tail": dataset.delivery.tail}
    del mine["plan"]
    mine |= {f"the vocabulary of {name}": found.digest for name, found in dataset.vocabularies.items()}
    first = json.loads(share(dataset.ranks, lambda: json.dumps(mine).encode()))
    different = [name for name in {**mine, **first} if first.get(name) != mine.get(name)]
    if different:
        listed = ", ".join(f"{name} is {mine.get(name)!r} here and {first.get(name)!r} there" for name in different)
        raise DataError(
            f"rank {dataset.ranks.rank} and rank 0 would not read the same order: {listed}; give all ranks the same "
            "arguments and the same files"
        )


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _whole(name: str, value: Any) -> int:
    """Any kind of integer: numpy's as well."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise InvalidArgument(f"{name}={value!r} must be a whole number", field=name) from error


def default_num_workers() -> int:
    return min(MAX_DEFAULT_WORKERS, len(os.sched_getaffinity(0)))


def prefetch_budget(given: int | str | None, split_bytes: int | str, num_workers: int) -> int:
    """How much may be decoded ahead: half a split for each worker, and as much for what lanes hold."""
    if given is not None:
        return parse_bytes(given, field="prefetch_bytes")
    return parse_bytes(split_bytes) // 2 * (1 + max(1, num_workers))
