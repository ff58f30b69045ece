"""The datasets of a job: the shards of each worker, what the last change of membership moved, and who waits for data.

`DatasetView.of` copies what it needs on the event loop; everything else is a pure function of that copy, so a dataset
of a million shards does not delay a heartbeat. Shards are shown by owner in the order of reading, several in one cell.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from strata.coordinator.state import events as e
from strata.coordinator.state import ring
from strata.printing import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from strata.coordinator.journal import Journal
    from strata.coordinator.state.membership import Membership
    from strata.coordinator.state.shards import Dataset
    from strata.dashboard.uses import Spent

MAX_CELLS = 120
"""Cells of one owner; above it, a cell stands for several shards."""
SCAN = 2_000
MAX_SCANNED = 20_000
"""Newest entries of the journal that are searched for the last move."""
WAIT_SHARE = 0.1
"""A rank waits for data if it spends this share of its time in `next()`; the loader's own warnings begin there, too."""
MAX_WAITS = 50

WaitCause = Literal["no_shards", "all_ranks", "some_ranks"]


class Owner(NamedTuple):
    worker_id: str
    rank: int
    """The rank that its launcher gave it, if any."""
    incarnation: int


@dataclass(frozen=True, slots=True)
class DatasetView:
    """A dataset at one moment."""

    dataset_id: str
    num_shards: int
    total_samples: int
    shuffle: bool
    seed: int
    epoch: int
    generation: int
    reason: str
    owners: NDArray[np.int64]
    done: NDArray[np.bool_]
    members: tuple[Owner, ...]

    @classmethod
    def of(cls, dataset: Dataset, membership: Membership) -> DatasetView:
        spec = dataset.spec
        return cls(
            dataset_id=spec.dataset_id,
            num_shards=spec.num_shards,
            total_samples=dataset.total_samples,
            shuffle=spec.shuffle,
            seed=spec.seed,
            epoch=dataset.epoch,
            generation=membership.generation,
            reason=membership.generation_reason,
            owners=dataset.owners.copy(),
            done=dataset.done.copy(),
            members=tuple(
                Owner(
                    each.worker_id,
                    rank if each.joined.launch_rank is None else each.joined.launch_rank,
                    each.incarnation,
                )
                for rank, each in membership.ranked()
            ),
        )


class OwnerRow(NamedTuple):
    """The shards of one worker; `owner` is None for those that wait for a worker."""

    owner: Owner | None
    num_shards: int
    num_done: int
    cells: list[int]
    """Finished shards in each cell, in the order of reading."""


class ShardMap(NamedTuple):
    rows: list[OwnerRow]
    num_rows: int
    shards_per_cell: int
    shards_of: list[int]
    """Shards of each member, in the order of ranks."""
    left_of: list[int]
    """Those of them that are not finished in this epoch."""
    num_waiting: int
    """Shards that no member owns."""


def shard_map(view: DatasetView, *, limit: int, offset: int) -> ShardMap:
    """Return one page of owners with their shards; first, if there are any, the shards without an owner."""
    place = _places(view)
    counts = np.bincount(place + 1, minlength=len(view.members) + 1)
    num_done = np.bincount(place + 1, weights=view.done, minlength=len(view.members) + 1).astype(np.int64)
    per_cell = max(-(-int(counts.max()) // MAX_CELLS), 1)
    keys = ring.shard_keys(f"{view.dataset_id}#{view.epoch}", view.num_shards, view.seed) if view.shuffle else None
    wanted = list(range(0 if counts[0] == 0 else -1, len(view.members)))
    rows: list[OwnerRow] = []
    for member in wanted[offset : offset + limit]:
        indices = np.flatnonzero(place == member)
        if keys is not None:
            indices = indices[np.argsort(keys[indices], kind="stable")]
        starts = np.arange(0, len(indices), per_cell)
        done = np.add.reduceat(view.done[indices].astype(np.int64), starts) if len(indices) else starts
        owner = None if member < 0 else view.members[member]
        rows.append(OwnerRow(owner, len(indices), int(num_done[member + 1]), done.tolist()))
    return ShardMap(
        rows, len(wanted), per_cell, counts[1:].tolist(), (counts - num_done)[1:].tolist(), num_waiting=int(counts[0])
    )


def owned(view: DatasetView) -> dict[str, tuple[int, int]]:
    """Return how many shards each worker has, and how many of them are not finished."""
    place, num = _places(view), len(view.members)
    counts = np.bincount(place + 1, minlength=num + 1)[1:].tolist()
    left = np.bincount(place[~view.done] + 1, minlength=num + 1)[1:].tolist()
    return {each.worker_id: found for each, found in zip(view.members, zip(counts, left, strict=True), strict=True)}


def _places(view: DatasetView) -> NDArray[np.int64]:
    """Return the owner of each shard as a position in `members`, or -1."""
    incarnations = np.array([each.incarnation for each in view.members], dtype=np.int64)
    if not len(incarnations):
        return np.full(view.num_shards, -1, dtype=np.int64)
    order = np.argsort(incarnations)
    found = np.searchsorted(incarnations[order], view.owners).clip(max=len(incarnations) - 1)
    return np.where(incarnations[order][found] == view.owners, order[found], -1)


@dataclass(frozen=True, slots=True)
class Move:
    """An assignment of shards by the coordinator."""

    at_s: float
    generation: int
    reason: str
    """Why that generation began; empty if the journal no longer has it."""
    num_moved: int
    num_workers: int
    gained: dict[int, int]
    """Shards that each incarnation got."""


def last_move(journal: Journal, job_id: str, dataset_id: str, last_seq: int) -> Move | None:
    """Return the newest assignment of a dataset's shards; None if the newest entries of the journal have none.

    Blocks while it reads.
    """
    reasons: dict[int, str] = {}
    found: tuple[float, e.ShardsAssigned] | None = None
    end = last_seq
    while end > max(last_seq - MAX_SCANNED, 0):
        begin = max(end - SCAN, 0)
        for record in reversed(journal.read(after_seq=begin, limit=SCAN, job_id=job_id)):
            if record.seq > end or record.kind not in ("ShardsAssigned", "GenerationStarted"):
                continue
            event = e.decode(record.payload)
            if isinstance(event, e.GenerationStarted):
                reasons[event.generation] = event.reason
            elif isinstance(event, e.ShardsAssigned) and event.dataset_id == dataset_id and found is None:
                found = record.at_s, event
        if found is not None and found[1].generation in reasons:
            break
        end = begin
    if found is None:
        return None
    at_s, moved = found
    _, owners = np.split(e.unpack_ints(moved.moves), 2)
    gained = np.unique(owners, return_counts=True)
    return Move(
        at_s=at_s,
        generation=moved.generation,
        reason=reasons.get(moved.generation, ""),
        num_moved=moved.num_moved,
        num_workers=moved.num_workers,
        gained=dict(zip(*(each.tolist() for each in gained), strict=True)),
    )


# -- waits -------------------------------------------------------------------------------------------------------------


class RankData(NamedTuple):
    """What is known about the data of one rank."""

    worker_id: str
    rank: int
    spent: Spent | None
    """Its recent past; None if it has not measured enough."""
    num_shards: int | None
    """Its shards of the dataset that is shown; None without any."""
    num_left: int | None
    """Those that are not finished."""


class DataWait(NamedTuple):
    worker_id: str
    rank: int
    share: float
    """Of its recent time."""
    cause: WaitCause
    reason: str
    cure: str


_CURE_SLOW = (
    "Read the loader's bottleneck warning in the log, or loader.dataset.get_metrics(): use more decode threads "
    "(num_workers=) while cores are free, read fewer columns, raise prefetch_bytes=, or make a local copy of the data."
)
_CURE_ONE = (
    "Compare its host with the others: run `strata data bench` there. A slow disk, a busy CPU or larger row groups are "
    "the usual causes."
)
_CURE_SHARDS = "Use smaller shards (shard_size=), so that the end of an epoch is divided among all ranks."


def data_waits(ranks: Sequence[RankData]) -> list[DataWait]:
    """Return the ranks that wait for data, longest first; only measured waits count."""
    shares = {each.worker_id: each.spent.share(each.spent.data_s) for each in ranks if each.spent is not None}
    waiting = [each for each in ranks if shares.get(each.worker_id, 0.0) >= WAIT_SHARE]
    median = statistics.median(shares.values()) if shares else 0.0
    have_left = sum(bool(each.num_left) for each in ranks)
    is_common = 2 * len(waiting) > len(shares)
    found = [
        DataWait(each.worker_id, each.rank, shares[each.worker_id], *_cause(each, median, have_left, is_common, shares))
        for each in waiting
    ]
    return sorted(found, key=lambda each: (-each.share, each.rank))


def _cause(
    rank: RankData, median: float, num_with_shards: int, is_common: bool, shares: Mapping[str, float]
) -> tuple[WaitCause, str, str]:
    if rank.num_left == 0 and num_with_shards:
        words = (
            f"has finished all of its {counted(rank.num_shards or 0, 'shard')}" if rank.num_shards else "owns no shard"
        )
        others = "1 other worker has" if num_with_shards == 1 else f"{num_with_shards} other workers have"
        return "no_shards", f"{words}, while {others} some left", _CURE_SHARDS
    if is_common:
        who = "the only measured rank" if len(shares) == 1 else "most ranks"
        verb = "waits" if len(shares) == 1 else "wait"
        return "all_ranks", f"{who} {verb}: the loader delivers fewer batches than training takes", _CURE_SLOW
    return "some_ranks", f"the median of all ranks is {100 * median:.0f} %, so the cause is on this one", _CURE_ONE
