"""Exact, resumable torch loaders over a user's map-style dataset. Imported only where torch is installed.

`map_loader` builds a `DataLoader`. `RowSampler` is for users who build one themselves; `adopt` then turns it into the
same thing. Torch prefetches ahead of the training loop, so neither the sampler nor a worker knows which batches were
delivered. The loader's iterator does, and advances the position.

The random generators that the dataset and `collate_fn` use are seeded for every batch, from the shuffle seed, the epoch
and the first position of the batch. Random numbers therefore do not depend on the number of workers or on where an
epoch was interrupted, and loading data does not change the generators of the training process.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import time
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from strata.data.order.map_rows import MapRows, Share
from strata.data.runtime.iterator import CLOSED
from strata.errors import InvalidArgument, PlanChanged, StrataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from strata.data.order.steps import Tail
    from strata.identity import Identity

_SEEDED = "the order and the seeds of the workers follow from shuffle_seed=; pass that instead"
_OWN_SAMPLER = (
    "the loader needs its own sampler to be exact; leave it out, or build the DataLoader yourself with "
    "sampler=ctx.sampler(dataset) and pass it to ctx.attach"
)
_CONTRADICTIONS = {
    "sampler": _OWN_SAMPLER,
    "batch_sampler": _OWN_SAMPLER,
    "generator": _SEEDED,
}


class RowSampler(DistributedSampler[Any]):
    """Assigns rows to a rank, for a `DataLoader` that is passed to `ctx.attach`."""

    def __init__(self, dataset: Any, *, ranks: Identity, shuffle: bool, shuffle_seed: int, tail: Tail) -> None:
        check_map_style(dataset)
        # Frameworks that shard loaders leave a DistributedSampler alone.
        super().__init__(dataset, num_replicas=ranks.world_size, rank=ranks.rank, shuffle=shuffle, seed=shuffle_seed)
        self.ranks = ranks
        self.tail: Tail = tail
        self.rows: MapRows | None = None
        """The rows of the loader that adopted this sampler."""

    def __iter__(self) -> Iterator[Any]:
        raise StrataError(
            "the loader of this sampler is not attached, so delivered rows are not counted; call ctx.attach(loader) "
            "before the loop. If a framework rebuilt the loader, configure it not to shard or replace samplers"
        )

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if self.rows is not None:
            self.rows.set_epoch(epoch)

    def adopted(self, *, batch_size: int, drop_last: bool) -> MapRows:
        if self.rows is not None:
            raise InvalidArgument(
                "this sampler already belongs to another loader; make one per loader with ctx.sampler", field="loader"
            )
        if drop_last and self.tail == "pad":
            raise InvalidArgument(
                "drop_last=True and tail='pad' contradict each other; remove one of them", field="tail"
            )
        self.rows = MapRows(
            len(self.dataset),  # type: ignore[arg-type]
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            batch_size=batch_size,
            shuffle=self.shuffle,
            shuffle_seed=self.seed,
            tail="drop" if drop_last else self.tail,
        )
        return self.rows


@functools.cache
def _counting(kind: Any) -> Any:
    """Return a subclass of a loader class that takes its batches from a `RowSampler` and keeps the position.

    It has this one base, so that the class of an existing loader can be set to it.
    """

    class Counting(kind):  # type: ignore[misc]
        has_global_state = True
        """`state_dict()` is the same on all ranks, and any number of ranks can load it."""
        map_rows: MapRows
        rows_delivered = 0
        """Rows that this rank delivered in total, for monitoring."""
        waited_s = 0.0
        """Seconds inside `next()` in total."""
        is_waited_for = False
        """Whether the caller is inside `next()`."""

        @property
        def position(self) -> tuple[int, int]:
            """The epoch, and the rows of it delivered so far on all ranks together."""
            return self.map_rows.epoch, self.map_rows.position

        @property
        def is_last(self) -> bool:
            """Whether the last delivered batch is the last one of its epoch."""
            return self.map_rows.is_last

        @property
        def num_batches_left(self) -> int:
            """Batches from the position to the end of the epoch, the same on every rank."""
            return self.map_rows.steps(self.map_rows.position).num_batches

        @property
        def _index_sampler(self) -> _Shares:
            return _Shares(self.map_rows)

        def __len__(self) -> int:
            """Return the batches of a whole epoch, the same on every rank."""
            return self.map_rows.steps().num_batches

        def __iter__(self) -> _Deliveries:
            if len(self.dataset) != self.map_rows.num_rows:
                raise PlanChanged(
                    f"the dataset had {self.map_rows.num_rows} rows when the loader was made, and has "
                    f"{len(self.dataset)} now; make a new loader when it changes"
                )
            number = self.map_rows.begin()
            return _Deliveries(self, number, super().__iter__())

        def _get_iterator(self) -> Any:
            """Return torch's iterator over a copy of this loader that seeds every batch."""
            seeded: Any = copy.copy(self)
            vars(seeded)["dataset"] = _Seeded(self.dataset, self.collate_fn)
            seeded.collate_fn = _identity
            seeded.worker_init_fn = functools.partial(_init_worker, self.worker_init_fn)
            seeded.generator = torch.Generator()
            seeded.generator.manual_seed(self.map_rows.epoch_seed)
            return super(Counting, seeded)._get_iterator()

        def set_epoch(self, epoch: int) -> None:
            self.map_rows.set_epoch(epoch)

        def state_dict(self) -> dict[str, Any]:
            """Return the position of the training loop, not that of the prefetching workers."""
            return self.map_rows.state_dict()

        def load_state_dict(self, state: Mapping[str, Any], *, on_change: str = "refuse") -> None:
            self.map_rows.load_state_dict(state, on_change=on_change)

    Counting.__name__ = Counting.__qualname__ = kind.__name__
    return Counting


def map_loader(
    dataset: Any,
    *,
    ranks: Identity,
    batch_size: int = 1,
    shuffle: bool = False,
    shuffle_seed: int = 0,
    tail: Tail = "uneven",
    drop_last: bool = False,
    **options: Any,
) -> DataLoader[Any]:
    """Return a `torch.utils.data.DataLoader` with the state of a `StatefulDataLoader`.

    `options` are passed to `DataLoader`.

    Raises:
        InvalidArgument: The dataset is not map-style, or an option contradicts an exact order.
    """
    for name, why in _CONTRADICTIONS.items():
        if options.pop(name, None) is not None:
            raise InvalidArgument(f"{name}= is not supported: {why}", field=name)
    sampler = RowSampler(dataset, ranks=ranks, shuffle=shuffle, shuffle_seed=shuffle_seed, tail=tail)
    loader = DataLoader(dataset, batch_size=batch_size, drop_last=drop_last, sampler=sampler, **options)
    adopt(loader)
    return loader


def adopt(loader: Any) -> None:
    """Make a loader that was built with a `RowSampler` count what it delivers.

    Raises:
        InvalidArgument: An option of the loader makes that impossible.
    """
    sampler, batches = sampler_of(loader), loader.batch_sampler
    assert sampler is not None
    if hasattr(loader, "state_dict"):
        raise InvalidArgument(
            f"a {type(loader).__name__} keeps its own position; use torch's DataLoader with ctx.sampler",
            field="loader",
        )
    if not getattr(loader, "in_order", True):
        raise InvalidArgument(
            "in_order=False delivers batches in a different order every time; remove it", field="in_order"
        )
    if loader.generator is not None:
        raise InvalidArgument(f"generator= is not supported: {_SEEDED}", field="generator")
    if batches is None:
        raise InvalidArgument(
            "batch_size=None makes no batches to count; use batch_size=1 and collate_fn=lambda rows: rows[0]",
            field="batch_size",
        )
    if type(batches) is not BatchSampler:
        raise InvalidArgument(
            f"a custom batch sampler, a {type(batches).__name__}, cannot be counted; build the loader with "
            "batch_size=… and sampler=ctx.sampler(dataset)",
            field="batch_sampler",
        )
    if loader.dataset is not sampler.dataset:
        raise InvalidArgument(
            f"the loader reads a {type(loader.dataset).__name__}, but its sampler belongs to another dataset; make the "
            "sampler with the dataset of the loader",
            field="loader",
        )
    loader.map_rows = sampler.adopted(batch_size=batches.batch_size, drop_last=batches.drop_last)
    kind: Any = type(loader)
    loader.__class__ = _counting(kind)


def sampler_of(loader: Any) -> RowSampler | None:
    """Return the `RowSampler` of a loader, which may be its sampler, its batch sampler or the sampler of that."""
    batches = getattr(loader, "batch_sampler", None)
    candidates = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    return next((each for each in candidates if isinstance(each, RowSampler)), None)


def check_map_style(dataset: Any) -> None:
    """Check that a dataset has random access.

    Raises:
        InvalidArgument: It has no `__len__` or no `__getitem__`.
    """
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InvalidArgument(
            f"a {type(dataset).__name__} has no random access to rows; give it __len__ and __getitem__. Or pass a "
            "torchdata StatefulDataLoader over it to ctx.attach, which fixes the number of workers",
            field="dataset",
        )


class _Deliveries:
    """The iterator of one pass, which the training loop consumes."""

    def __init__(self, loader: Any, number: int, batches: Iterator[Any]) -> None:
        self._loader = loader
        self._number = number
        self._batches = batches
        self._num_delivered = 0
        self._num_batches = loader.map_rows.num_batches

    def __iter__(self) -> Self:
        return self

    def __len__(self) -> int:
        return int(self._num_batches)

    def __next__(self) -> Any:
        rows: MapRows = self._loader.map_rows
        if not rows.is_current(self._number):
            raise StrataError(CLOSED)
        self._loader.is_waited_for = True
        began_s = time.perf_counter()
        try:
            batch, num_rows = next(self._batches)
        except StopIteration:
            rows.ended()
            raise
        finally:
            self._loader.waited_s += time.perf_counter() - began_s
            self._loader.is_waited_for = False
        rows.delivered(self._num_delivered)
        self._num_delivered += 1
        self._loader.rows_delivered += num_rows
        return batch


class _Shares:
    """The batch sampler for torch: yields this rank's share of each batch."""

    def __init__(self, rows: MapRows) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Share]:
        return self._rows.shares()

    def __len__(self) -> int:
        return self._rows.num_batches


class _Seeded:
    """The dataset that torch's workers read. It also collates, so that `collate_fn` is seeded as well."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self._collate = collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, share: Share) -> tuple[Any, int]:
        if getattr(self.dataset, "draws_no_random_numbers", False):  # seeding would take longer than reading arrays
            return self._collate(self.dataset.__getitems__(share.indices)), len(share.indices)
        with _seeded(share.seed):
            if getattr(self.dataset, "__getitems__", None):
                found = self.dataset.__getitems__(share.rows)
            else:
                found = [self.dataset[row] for row in share.rows]
            return self._collate(found), len(share.indices)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the CPU generators of Python, numpy and torch; in the training process, restore them afterwards."""
    before = None
    if get_worker_info() is None:
        before = random.getstate(), _numpy_normal_state(), torch.default_generator.get_state()
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # missing in numpy's stubs
        np.random.set_bit_generator(_numpy_generator)  # type: ignore[attr-defined]
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        if before is not None:
            random.setstate(before[0])
            np.random.set_bit_generator(generator)  # type: ignore[attr-defined]
            if before[1] is not None:
                np.random.set_state(before[1])
            torch.default_generator.set_state(before[2])


_numpy_generator = np.random.MT19937()
"""Swapped in while a batch is read: copying a state back takes as long as seeding everything else."""


def _numpy_normal_state() -> Any:
    """Return numpy's state if it holds a normal value for the next call, which it keeps outside of the generator;
    otherwise None.

    numpy draws normal values in pairs, and swapping the generator drops the second one. Its state contains 624 words of
    the generator, and copying them takes ten times as long as seeding. An empty generator leaves only the rest. This
    uses two private names of numpy; a numpy without them pays for the copy.
    """
    if hasattr(_numpy_legacy, "_bit_generator"):
        generator, _numpy_legacy._bit_generator = _numpy_legacy._bit_generator, _no_words
        try:
            has_normal = _numpy_legacy.get_state(legacy=False)["has_gauss"]
        finally:
            _numpy_legacy._bit_generator = generator
        if not has_normal:
            return None
    state = np.random.get_state(legacy=False)
    return state if state["has_gauss"] else None


class _NoWords:
    """Stands in for numpy's generator while the rest of its state is read."""

    @property
    def state(self) -> dict[str, Any]:
        return {"bit_generator": "none"}


_no_words: Any = _NoWords()
_numpy_legacy: Any = getattr(np.random.mtrand, "_rand", None)
"""What the functions of np.random call."""


def _init_worker(init: Callable[[int], None] | None, worker: int) -> None:
    info = get_worker_info()
    if info is not None:  # users expect their own dataset here
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]  # frozen by torch
    if init is not None:
        init(worker)


def _identity(batch: Any) -> Any:
    return batch
