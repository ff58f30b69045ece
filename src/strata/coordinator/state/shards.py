"""Shard ownership and progress.

A dataset is cut into shards; each shard has one owner among the members, chosen by the ring (`ring.py`). Owners are
stored by incarnation. A worker that is replaced under its own id keeps its shards; any other change of membership moves
as few as possible. Progress is counted per epoch and is kept when a shard moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from strata.coordinator.state import limits, ring
from strata.coordinator.state.events import (
    DatasetRegistered,
    DatasetState,
    EpochAdvanced,
    ShardsAssigned,
    ShardsDone,
    pack_ints,
    unpack_ints,
)
from strata.errors import DatasetExists, EpochMismatch, InvalidArgument, LimitExceeded, ShardNotLeased, UnknownDataset

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from strata.coordinator.config import Limits
    from strata.coordinator.state.events import DatasetSpec
    from strata.coordinator.state.membership import Membership

NO_OWNER = 0
"""The owner of a shard while a job has no members; incarnations start at 1."""
MAX_EPOCH = 2**40


class Shard(NamedTuple):
    """A shard as its owner sees it. A tuple: a coordinator makes one for each shard of each answer."""

    dataset_id: str
    shard_id: str
    index: int  # type: ignore[assignment]  # overrides `tuple.index`, which is not used
    start: int
    end: int
    uri: str
    epoch: int
    done: bool


class Dataset:
    def __init__(self, spec: DatasetSpec) -> None:
        self.spec = spec
        self.epoch = 0
        self.keys = ring.shard_keys(spec.dataset_id, spec.num_shards, spec.seed)
        self.owners: NDArray[np.int64] = np.full(spec.num_shards, NO_OWNER, dtype=np.int64)
        self.done: NDArray[np.bool_] = np.zeros(spec.num_shards, dtype=np.bool_)
        self.num_done = 0
        self._starts = np.cumsum([0, *(s.num_samples for s in spec.shards)]) if spec.shards else None

    @property
    def total_samples(self) -> int:
        return int(self._starts[-1]) if self._starts is not None else self.spec.total_samples

    def shards(self, indices: NDArray[np.int64], *, epoch: int) -> list[Shard]:
        spec, dataset_id = self.spec, self.spec.dataset_id
        done = self.done[indices].tolist() if epoch == self.epoch else [False] * len(indices)
        if self._starts is not None:
            starts, ends = self._starts[indices].tolist(), self._starts[indices + 1].tolist()
            return [
                Shard(dataset_id, entry.shard_id, index, start, end, entry.uri, epoch, is_done)
                for index, start, end, is_done in zip(indices.tolist(), starts, ends, done, strict=True)
                for entry in (spec.shards[index],)
            ]
        size, total = spec.shard_size, spec.total_samples
        return [
            Shard(dataset_id, f"{dataset_id}-{i:06d}", i, i * size, min((i + 1) * size, total), "", epoch, is_done)
            for i, is_done in zip(indices.tolist(), done, strict=True)
        ]

    def indices_of(self, incarnation: int, *, epoch: int) -> NDArray[np.int64]:
        """Return all shards of this member, done or not, in the order to read them."""
        indices = np.flatnonzero(self.owners == incarnation)
        if self.spec.shuffle:
            order = ring.shard_keys(f"{self.spec.dataset_id}#{epoch}", self.spec.num_shards, self.spec.seed)[indices]
            indices = indices[np.argsort(order, kind="stable")]
        return indices


class ShardBook:
    """The datasets of one job."""

    def __init__(self, job_id: str, *, limits: Limits) -> None:
        self.job_id = job_id
        self.datasets: dict[str, Dataset] = {}
        self._limits = limits

    # -- decisions -------------------------------------------------------------------------------------------------

    def register(self, spec: DatasetSpec) -> list[DatasetRegistered]:
        """Return the registration, or nothing if it is already registered with these contents."""
        standing = self.datasets.get(spec.dataset_id)
        if standing is not None:
            if standing.spec == spec:
                return []
            raise DatasetExists(
                f"dataset {spec.dataset_id!r} is registered with different contents "
                f"({standing.spec.num_shards} shards, seed {standing.spec.seed}); choose another id for the new one",
                field="dataset_id",
            )
        self._check_spec(spec)
        limits.check_room(
            len(self.datasets),
            self._limits.max_datasets_per_job,
            "datasets in this job",
            "max_datasets_per_job",
            field="dataset_id",
        )
        return [DatasetRegistered(job_id=self.job_id, dataset=spec)]

    def _check_spec(self, spec: DatasetSpec) -> None:
        limits.check_id(spec.dataset_id, "dataset_id")
        limits.check_count(spec.seed, "seed", most=2**63 - 1)
        if spec.shards:
            if spec.total_samples or spec.shard_size:
                raise InvalidArgument("set either shards, or total_samples and shard_size, not both", field="shards")
            for shard in spec.shards:
                limits.check_id(shard.shard_id, "shards.shard_id")
                limits.check_text(shard.uri, "shards.uri")
                limits.check_count(shard.num_samples, "shards.num_samples")
            limits.check_count(sum(shard.num_samples for shard in spec.shards), "shards.num_samples")
            if len({shard.shard_id for shard in spec.shards}) != len(spec.shards):
                raise InvalidArgument("two shards have the same shard_id; make them distinct", field="shards.shard_id")
        else:
            limits.check_count(spec.total_samples, "total_samples", least=1)
            limits.check_count(spec.shard_size, "shard_size", least=1)
        if spec.num_shards > self._limits.max_shards_per_dataset:
            raise LimitExceeded(
                f"{spec.num_shards} shards are more than limits.max_shards_per_dataset="
                f"{self._limits.max_shards_per_dataset}; increase shard_size",
                field="shards" if spec.shards else "shard_size",
            )

    def assign(
        self, dataset: Dataset, members: Membership, successors: Mapping[int, int] | None = None
    ) -> list[ShardsAssigned]:
        """Return the moves that adapt a dataset to the members; nothing if none are needed.

        `successors` maps incarnations to those that replaced them and take over their shards.
        """
        incarnations = np.fromiter((m.incarnation for m in members.members.values()), dtype=np.int64)
        owners = dataset.owners
        if successors:
            owners = _succeeded(owners, successors)
        current = _positions(owners, incarnations)
        chosen = ring.assign(
            dataset.keys,
            workers=list(members.members),
            capacities=[m.joined.capacity for m in members.members.values()],
            current=current if (current >= 0).any() else None,
        )
        target = incarnations[chosen] if len(incarnations) else np.full_like(owners, NO_OWNER)
        moved = np.flatnonzero(target != dataset.owners)
        if not len(moved):
            return []
        return [
            ShardsAssigned(
                job_id=self.job_id,
                dataset_id=dataset.spec.dataset_id,
                generation=members.generation,
                num_workers=len(incarnations),
                num_moved=len(moved),
                moves=pack_ints(np.concatenate([moved, target[moved]])),
            )
        ]

    def ack(
        self, dataset_id: str, *, epoch: int, worker_id: str, incarnation: int, indices: Sequence[int]
    ) -> list[ShardsDone]:
        """Return the progress, or nothing if all of these shards are already done."""
        dataset = self.dataset(dataset_id)
        if not indices:
            raise InvalidArgument("indices is empty; pass the shards that are done", field="indices")
        if len(indices) > self._limits.max_shards_per_ack:
            raise LimitExceeded(
                f"{len(indices)} shards in one ack; send at most {self._limits.max_shards_per_ack}", field="indices"
            )
        self._check_epoch(dataset, epoch, "epoch")
        owners, done, num_shards = dataset.owners, dataset.done, dataset.spec.num_shards
        for index in indices:
            limits.check_count(index, "indices", most=num_shards - 1)
            if owners[index] != incarnation:
                raise ShardNotLeased(
                    f"shard {index} of {dataset_id!r} is not assigned to {worker_id}; fetch your shards again",
                    field="indices",
                )
        new = tuple(sorted({index for index in indices if not done[index]}))
        if not new:
            return []
        return [ShardsDone(job_id=self.job_id, dataset_id=dataset_id, epoch=epoch, worker_id=worker_id, indices=new)]

    def advance(self, dataset_id: str, *, from_epoch: int, require_complete: bool) -> list[EpochAdvanced]:
        """Return the new epoch, or nothing if another worker already advanced it."""
        dataset = self.dataset(dataset_id)
        limits.check_count(from_epoch, "from_epoch", most=MAX_EPOCH)
        if dataset.epoch == from_epoch + 1:
            return []
        self._check_epoch(dataset, from_epoch, "from_epoch")
        left = dataset.spec.num_shards - dataset.num_done
        if require_complete and left:
            raise EpochMismatch(
                f"epoch {from_epoch} of {dataset_id!r} has {left} unfinished shards; finish them, "
                "or do not set require_complete",
                field="require_complete",
            )
        return [
            EpochAdvanced(
                job_id=self.job_id,
                dataset_id=dataset_id,
                epoch=from_epoch + 1,
                num_done=dataset.num_done,
                num_shards=dataset.spec.num_shards,
            )
        ]

    def _check_epoch(self, dataset: Dataset, epoch: int, field: str) -> None:
        if epoch != dataset.epoch:
            raise EpochMismatch(
                f"{dataset.spec.dataset_id!r} is in epoch {dataset.epoch}, not {epoch}; fetch your shards again",
                field=field,
            )

    # -- reading ---------------------------------------------------------------------------------------------------

    def dataset(self, dataset_id: str) -> Dataset:
        dataset = self.datasets.get(dataset_id)
        if dataset is None:
            limits.check_id(dataset_id, "dataset_id")
            raise UnknownDataset(
                f"job {self.job_id!r} has no dataset {dataset_id!r}; register it first", field="dataset_id"
            )
        return dataset

    def owned(
        self, incarnation: int, *, dataset_id: str, epoch: int | None, include_done: bool, offset: int
    ) -> tuple[list[Shard], int]:
        """Return a page of a member's shards, and the offset of the next page (0 for none).

        Pages are cut before finished shards are removed, so that an ack between two pages does not shift them.
        """
        limits.check_count(offset, "offset")
        datasets: Iterable[Dataset] = [self.dataset(dataset_id)] if dataset_id else self.datasets.values()
        found: list[tuple[Dataset, int, NDArray[np.int64]]] = []
        for dataset in datasets:
            wanted = dataset.epoch if epoch is None else limits.check_count(epoch, "epoch", most=MAX_EPOCH)
            if wanted < dataset.epoch:
                raise EpochMismatch(
                    f"epoch {wanted} of {dataset.spec.dataset_id!r} is over; the current epoch is {dataset.epoch}",
                    field="epoch",
                )
            found.append((dataset, wanted, dataset.indices_of(incarnation, epoch=wanted)))
        page_end = offset + self._limits.max_shards_per_reply
        shards: list[Shard] = []
        position = 0
        for dataset, wanted, indices in found:
            first, last = max(offset - position, 0), max(page_end - position, 0)
            page = dataset.shards(indices[first:last], epoch=wanted)
            shards += [shard for shard in page if include_done or not shard.done]
            position += len(indices)
        return shards, page_end if position > page_end else 0

    def has_orphans(self, members: Membership) -> bool:
        """Whether a shard has no owner although there are members, which happens only if the journal lost its end."""
        incarnations = np.fromiter((m.incarnation for m in members.members.values()), dtype=np.int64)
        return bool(len(incarnations)) and any(
            (_positions(dataset.owners, incarnations) < 0).any() for dataset in self.datasets.values()
        )

    # -- apply -----------------------------------------------------------------------------------------------------

    def apply_registered(self, event: DatasetRegistered) -> None:
        self.datasets[event.dataset.dataset_id] = Dataset(event.dataset)

    def apply_assigned(self, event: ShardsAssigned) -> None:
        moves = unpack_ints(event.moves)
        indices, owners = np.split(moves, 2)
        self.datasets[event.dataset_id].owners[indices] = owners

    def apply_done(self, event: ShardsDone) -> None:
        dataset = self.datasets[event.dataset_id]
        dataset.done[list(event.indices)] = True
        dataset.num_done += len(event.indices)

    def apply_advanced(self, event: EpochAdvanced) -> None:
        dataset = self.datasets[event.dataset_id]
        dataset.epoch = event.epoch
        dataset.done[:] = False
        dataset.num_done = 0

    # -- snapshot --------------------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[DatasetState, ...]:
        return tuple(
            DatasetState(spec=d.spec, epoch=d.epoch, owners=pack_ints(d.owners), done=pack_ints(np.flatnonzero(d.done)))
            for d in self.datasets.values()
        )

    def restore(self, states: Iterable[DatasetState]) -> None:
        for state in states:
            dataset = self.datasets[state.spec.dataset_id] = Dataset(state.spec)
            dataset.epoch = state.epoch
            dataset.owners = unpack_ints(state.owners)
            done = unpack_ints(state.done)
            dataset.done[done] = True
            dataset.num_done = len(done)


def _positions(owners: NDArray[np.int64], incarnations: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return owners as positions among the members; -1 if the owner is gone. Incarnations are ascending."""
    if not len(incarnations):
        return np.full(len(owners), -1, dtype=np.int32)
    found = np.searchsorted(incarnations, owners).clip(max=len(incarnations) - 1)
    return np.where(incarnations[found] == owners, found, -1).astype(np.int32)


def _succeeded(owners: NDArray[np.int64], successors: Mapping[int, int]) -> NDArray[np.int64]:
    """Return the owners, with replaced incarnations mapped to their last successors."""
    last: dict[int, int] = {}
    for old in sorted(
        successors, reverse=True
    ):  # a successor's incarnation is higher, so its own successor is resolved
        last[old] = last.get(successors[old], successors[old])
    olds = np.array(sorted(last), dtype=np.int64)
    found = np.searchsorted(olds, owners).clip(max=len(olds) - 1)
    return np.where(olds[found] == owners, np.array([last[old] for old in olds.tolist()])[found], owners)
