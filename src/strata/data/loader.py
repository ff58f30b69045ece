"""From a plan and a configuration to a loader: what all kinds of datasets share.

`create` is the last step of every `create_dataloader`. The loader is a torch `DataLoader` where torch is installed
(`torch.py`), and a `PlainLoader` otherwise.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from strata.clock import SystemClock
from strata.data.config import has_torch
from strata.data.ranks import find_ranks, share
from strata.data.runtime.sampling import make_deliverer
from strata.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from strata.data.config import LoaderConfig
    from strata.data.dataset import Dataset
    from strata.data.runtime.decoder import Recipe
    from strata.identity import Identity


def create(
    kind: type[Any],
    plan: Callable[[Identity], Recipe],
    config: LoaderConfig,
    *,
    rank: int | None,
    num_ranks: int | None,
    accelerator: Any,
    pin_memory: bool,
) -> tuple[Any, Any]:
    """Return a loader, and the dataset of class `kind` behind it.

    Where torch is installed, the loader is a `DataLoader`, and the dataset is an `IterableDataset` as well.
    """
    clock = SystemClock()
    began_s = clock.monotonic_s()
    ranks = find_ranks(rank=rank, num_ranks=num_ranks, accelerator=accelerator)
    recipe = replace(plan(ranks), transform=config.batch.transform, shared_bytes=config.runtime.shared_bytes)
    plan_s = clock.monotonic_s() - began_s  # without `import torch`, which the next line may trigger
    deliverer = make_deliverer(recipe, config, partial(share, ranks))
    if not has_torch():
        dataset = kind(recipe, deliverer, config, ranks, plan_s=plan_s)
        check_same(dataset)
        return PlainLoader(dataset), dataset
    torch_loader = importlib.import_module("strata.data.torch")
    dataset = torch_loader.iterable(kind)(recipe, deliverer, config, ranks, plan_s=plan_s)
    check_same(dataset)
    return torch_loader.Loader(dataset, accelerator=accelerator, pin_memory=pin_memory), dataset


def check_same(dataset: Dataset) -> None:
    """Check that all ranks will read one order and use the same vocabularies, if they can communicate.

    Raises:
        DataError: This rank sees other files than rank 0, or has other settings.
    """
    mine = {
        **dataset.state_dict(),
        "batch_size": dataset.config.order.batch_size,
        "tail": dataset.config.order.tail,
    }
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


class PlainLoader:
    """The loader that `create_dataloader` returns where torch is not installed: the same protocol, no base class."""

    has_global_state = True
    """`state_dict()` is the same on all ranks, and any number of ranks can load it."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return self.dataset.begin()

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and the rows of it delivered so far on all ranks together."""
        return self.dataset.epoch, self.dataset.position

    @property
    def is_last(self) -> bool:
        """Whether the last delivered batch is the last one of its epoch."""
        return self.dataset.position == self.dataset.plan.num_rows

    def set_epoch(self, epoch: int) -> None:
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, on_change: str = "refuse") -> None:
        self.dataset.load_state_dict(state, on_change=on_change)
