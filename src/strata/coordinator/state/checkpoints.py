"""Global checkpoints: committed when every rank of the generation has reported its part as durable.

Either all ranks agree on a checkpoint or it does not exist: while one rank is missing, there is only an attempt, and a
change of membership ends the attempt. The newest committed checkpoints are remembered for `GetLatestCheckpoint` and
recovery.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from strata.coordinator.state import limits
from strata.coordinator.state.events import (
    CheckpointAborted,
    CheckpointAcked,
    CheckpointCommitted,
    CheckpointRecord,
    OpenCheckpoint,
)
from strata.errors import CheckpointMismatch, LimitExceeded

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from strata.coordinator.config import Limits
    from strata.coordinator.state.events import CheckpointKind, CheckpointSpec, RankAck
    from strata.coordinator.state.membership import Membership

RESTORABLE: tuple[CheckpointKind, ...] = ("FULL", "INCREMENTAL")
"""Kinds that contain everything a job needs to resume."""


@dataclass(frozen=True, slots=True)
class CheckpointProgress:
    committed: bool
    num_acked: int
    num_ranks: int


@dataclass(slots=True)
class Attempt:
    generation: int
    spec: CheckpointSpec
    acks: dict[str, RankAck] = field(default_factory=dict)
    num_bytes: int = 0
    """The size of hashes and metadata so far."""

    def add(self, worker_id: str, ack: RankAck) -> None:
        self.acks[worker_id] = ack
        self.num_bytes += _num_bytes(ack)


class Checkpoints:
    def __init__(self, job_id: str, *, limits: Limits) -> None:
        self.job_id = job_id
        self.attempts: dict[str, Attempt] = {}
        self.committed: dict[str, CheckpointRecord] = {}
        """By checkpoint id, oldest first."""
        self._limits = limits

    # -- decisions -------------------------------------------------------------------------------------------------

    def ack(self, membership: Membership, worker_id: str, spec: CheckpointSpec, ack: RankAck) -> list[CheckpointAcked]:
        """Return the acknowledgement, or nothing if this rank has already sent it."""
        self._check(spec, ack)
        record = self.committed.get(spec.checkpoint_id)
        attempt = self.attempts.get(spec.checkpoint_id)
        agreed = record.checkpoint if record else attempt.spec if attempt else None
        if agreed is not None and agreed != spec:
            raise CheckpointMismatch(
                f"checkpoint {spec.checkpoint_id!r} is {_described(agreed)}, but this rank reports {_described(spec)}; "
                "all ranks must agree, and an id may be used only once",
                field="checkpoint_id",
            )
        if record is not None or (attempt is not None and worker_id in attempt.acks):
            return []
        num_bytes = _num_bytes(ack) + (attempt.num_bytes if attempt else 0)
        if num_bytes > self._limits.max_checkpoint_bytes:
            raise LimitExceeded(
                f"hashes and metadata of checkpoint {spec.checkpoint_id!r} have {num_bytes} bytes over all ranks; "
                f"the limit is limits.max_checkpoint_bytes={self._limits.max_checkpoint_bytes}",
                field="metadata",
            )
        if attempt is None:
            limits.check_room(
                len(self.attempts),
                self._limits.max_open_checkpoints_per_job,
                "unfinished checkpoints",
                "max_open_checkpoints_per_job",
                field="checkpoint_id",
            )
        return [
            CheckpointAcked(
                job_id=self.job_id, generation=membership.generation, worker_id=worker_id, checkpoint=spec, ack=ack
            )
        ]

    def commit(self, membership: Membership, checkpoint_id: str, wall_s: float) -> list[CheckpointCommitted]:
        """Return the commit if every member has acknowledged."""
        attempt = self.attempts.get(checkpoint_id)
        if attempt is None or len(attempt.acks) < len(membership.members):
            return []
        acks = attempt.acks.values()
        metadata: dict[str, str] = {}
        hashes: dict[str, str] = {}
        for ack in acks:
            metadata |= ack.metadata
            hashes |= ack.hashes
        record = CheckpointRecord(
            checkpoint=attempt.spec,
            generation=attempt.generation,
            num_ranks=len(attempt.acks),
            size_bytes=sum(ack.size_bytes for ack in acks),
            hashes=hashes,
            model_hash=next((ack.model_hash for ack in acks if ack.model_hash), ""),
            metadata=metadata,
            data_cursor=next((ack.data_cursor for ack in acks if ack.data_cursor), b""),
            committed_at_s=wall_s,
        )
        return [CheckpointCommitted(job_id=self.job_id, record=record)]

    def abort_all(self, reason: str) -> list[CheckpointAborted]:
        return [
            CheckpointAborted(
                job_id=self.job_id, checkpoint_id=checkpoint_id, num_acked=len(attempt.acks), reason=reason
            )
            for checkpoint_id, attempt in self.attempts.items()
        ]

    def _check(self, spec: CheckpointSpec, ack: RankAck) -> None:
        limits.check_id(spec.checkpoint_id, "checkpoint_id")
        limits.check_count(spec.step, "step")
        limits.check_count(spec.epoch, "epoch")
        limits.check_text(spec.path, "path")
        limits.check_count(ack.size_bytes, "size_bytes")
        limits.check_text(ack.model_hash, "model_hash")
        limits.check_map_size(ack.hashes, "hashes", max_bytes=self._limits.max_metadata_bytes)
        limits.check_map_size(ack.metadata, "metadata", max_bytes=self._limits.max_metadata_bytes)
        if len(ack.data_cursor) > self._limits.max_metadata_bytes:
            raise LimitExceeded(
                f"data_cursor has {len(ack.data_cursor)} bytes; the limit is {self._limits.max_metadata_bytes}",
                field="data_cursor",
            )

    # -- reading ---------------------------------------------------------------------------------------------------

    def progress(self, checkpoint_id: str, membership: Membership) -> CheckpointProgress:
        record = self.committed.get(checkpoint_id)
        if record is not None:
            return CheckpointProgress(committed=True, num_acked=record.num_ranks, num_ranks=record.num_ranks)
        attempt = self.attempts.get(checkpoint_id)
        num_acked = len(attempt.acks) if attempt else 0
        return CheckpointProgress(committed=False, num_acked=num_acked, num_ranks=len(membership.members))

    def latest(self, kinds: Collection[CheckpointKind] = RESTORABLE) -> CheckpointRecord | None:
        """Return the checkpoint committed last, whatever its step: a job that was rolled back resumes from there."""
        return next((r for r in reversed(self.committed.values()) if r.checkpoint.type in kinds), None)

    # -- apply -----------------------------------------------------------------------------------------------------

    def apply_acked(self, event: CheckpointAcked) -> None:
        attempt = self.attempts.setdefault(event.checkpoint.checkpoint_id, Attempt(event.generation, event.checkpoint))
        attempt.add(event.worker_id, event.ack)

    def apply_committed(self, event: CheckpointCommitted) -> None:
        checkpoint_id = event.record.checkpoint.checkpoint_id
        self.attempts.pop(checkpoint_id, None)
        self.committed[checkpoint_id] = event.record
        excess = max(len(self.committed) - self._limits.max_checkpoints_per_job, 0)
        for dispensable in self._dispensable()[:excess]:
            del self.committed[dispensable]

    def _dispensable(self) -> list[str]:
        """Return the ids that may be dropped, oldest first: all but the newest, and the one that recovery would use."""
        latest = self.latest()
        keep = {next(reversed(self.committed)), latest.checkpoint.checkpoint_id if latest else ""}
        return [checkpoint_id for checkpoint_id in self.committed if checkpoint_id not in keep]

    def apply_aborted(self, event: CheckpointAborted) -> None:
        self.attempts.pop(event.checkpoint_id, None)

    # -- snapshot --------------------------------------------------------------------------------------------------

    def open_checkpoints(self) -> tuple[OpenCheckpoint, ...]:
        return tuple(
            OpenCheckpoint(generation=a.generation, checkpoint=a.spec, acks=dict(a.acks))
            for a in self.attempts.values()
        )

    def restore(self, committed: Iterable[CheckpointRecord], attempts: Iterable[OpenCheckpoint]) -> None:
        self.committed = {record.checkpoint.checkpoint_id: record for record in committed}
        for opened in attempts:
            attempt = self.attempts[opened.checkpoint.checkpoint_id] = Attempt(opened.generation, opened.checkpoint)
            for worker_id, ack in opened.acks.items():
                attempt.add(worker_id, ack)


def _num_bytes(ack: RankAck) -> int:
    return len(ack.data_cursor) + limits.map_size(ack.hashes) + limits.map_size(ack.metadata)


def _described(spec: CheckpointSpec) -> str:
    return f"{spec.type} of step {spec.step}, epoch {spec.epoch} at {spec.path}"
