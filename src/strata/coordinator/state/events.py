"""The events that make up the durable state of a job.

State changes only by applying an event, so replaying the journal gives the same state. Events record what happened, not
what to do: a newer version that decides differently cannot change past outcomes. Each event describes itself in words,
because people read journals when something has gone wrong.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np

from strata.errors import JournalDamaged
from strata.printing import counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

LeaveCause = Literal["deregistered", "lease", "connection", "hung", "replaced"]
CheckpointKind = Literal["FULL", "INCREMENTAL", "OPTIMIZER_ONLY", "MODEL_ONLY"]
CommandName = Literal["STOP", "REBALANCE", "CHECKPOINT_NOW", "DUMP_STACKS", "MESSAGE"]


class Fact(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind", omit_defaults=True):
    job_id: str

    @property
    def kind(self) -> str:
        return type(self).__name__

    def words(self) -> str:
        raise NotImplementedError(f"{self.kind} has no description")  # pragma: no cover - every event overrides it


FENCE_SHIFT = 32


def number_of(fence: int) -> int:
    """Return the incarnation in a fence."""
    return fence & ((1 << FENCE_SHIFT) - 1)


class WorkerJoined(Fact, frozen=True, kw_only=True):
    worker_id: str
    incarnation: int
    instance_id: str
    nonce: int = 0
    """Known only to this process and the coordinator, so that no other process can act for it."""
    capacity: float = 1.0
    hostname: str = ""
    is_watched: bool = False
    """Another process watches its steps."""
    launch_rank: int | None = None
    """Rank that the launcher gave this process."""
    attempt: int | None = None
    """Number of earlier starts of the run that this process belongs to."""

    @property
    def fence(self) -> int:
        """The value that its calls carry: the incarnation, with the nonce above it."""
        return self.nonce << FENCE_SHIFT | self.incarnation

    def words(self) -> str:
        where = f" on {self.hostname}" if self.hostname else ""
        return f"{self.worker_id} joined{where} (incarnation {self.incarnation})"


class WorkerLeft(Fact, frozen=True, kw_only=True):
    worker_id: str
    incarnation: int
    cause: LeaveCause
    reason: str
    nonce: int = 0

    @property
    def fence(self) -> int:
        return self.nonce << FENCE_SHIFT | self.incarnation

    def words(self) -> str:
        return f"{self.worker_id} left: {self.reason}"


class GenerationStarted(Fact, frozen=True, kw_only=True):
    generation: int
    num_workers: int
    reason: str

    def words(self) -> str:
        return f"generation {self.generation} with {counted(self.num_workers, 'worker')}: {self.reason}"


class NumbersSkipped(Fact, frozen=True, kw_only=True):
    generation: int
    incarnation: int

    def words(self) -> str:
        return f"the end of the journal was lost, so numbering continues after generation {self.generation}"


class JobDropped(Fact, frozen=True, kw_only=True):
    """The job is finished and deleted. Its numbers are not used again: see `SpentNumbers`."""

    generation: int
    incarnation: int
    command_id: int
    num_workers: int
    reason: str

    def words(self) -> str:
        who = f" while it had {counted(self.num_workers, 'worker')}" if self.num_workers else ""
        return f"the job was dropped{who}: {self.reason}"


class ShardEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One shard of an explicit list."""

    shard_id: str
    uri: str = ""
    num_samples: int = 0


class DatasetSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The definition of a dataset: a number of samples cut into equal shards, or an explicit list."""

    dataset_id: str
    total_samples: int = 0
    shard_size: int = 0
    shards: tuple[ShardEntry, ...] = ()
    shuffle: bool = False
    seed: int = 0

    @property
    def num_shards(self) -> int:
        return len(self.shards) or -(-self.total_samples // self.shard_size)


class DatasetRegistered(Fact, frozen=True, kw_only=True):
    dataset: DatasetSpec

    def words(self) -> str:
        order = f"shuffled by seed {self.dataset.seed}" if self.dataset.shuffle else "in order"
        return f"dataset {self.dataset.dataset_id} registered: {self.dataset.num_shards} shards, {order}"


class ShardsAssigned(Fact, frozen=True, kw_only=True):
    dataset_id: str
    generation: int
    num_workers: int
    num_moved: int
    moves: bytes
    """Packed pairs (shard index, incarnation of the new owner); see `pack_ints`."""

    def words(self) -> str:
        shards = f"{counted(self.num_moved, 'shard')} of {self.dataset_id}"
        if not self.num_workers:
            return f"{shards} {'waits' if self.num_moved == 1 else 'wait'} for a worker"
        return f"{shards} moved, assigned to {counted(self.num_workers, 'worker')}"


class ShardsDone(Fact, frozen=True, kw_only=True):
    dataset_id: str
    epoch: int
    worker_id: str
    indices: tuple[int, ...]

    def words(self) -> str:
        shown = ", ".join(map(str, self.indices[:5])) + (" …" if len(self.indices) > 5 else "")
        return (
            f"{self.worker_id} finished {len(self.indices)} shards of {self.dataset_id} in epoch {self.epoch}: {shown}"
        )


class EpochAdvanced(Fact, frozen=True, kw_only=True):
    dataset_id: str
    epoch: int
    num_done: int
    """Shards done in the previous epoch."""
    num_shards: int

    def words(self) -> str:
        return f"{self.dataset_id} entered epoch {self.epoch}; {self.num_done} of {self.num_shards} shards were done"


class BarrierReleased(Fact, frozen=True, kw_only=True):
    generation: int
    barrier_id: str
    step: int
    num_members: int
    named: str = ""
    """A digest of the members named by the callers; empty if all members were meant."""

    def words(self) -> str:
        workers = counted(self.num_members, "worker")
        return f"barrier {self.barrier_id}@{self.step} released {workers} of generation {self.generation}"


class CheckpointSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The properties of a checkpoint on which all ranks must agree."""

    checkpoint_id: str
    step: int
    epoch: int
    path: str
    type: CheckpointKind = "FULL"


class RankAck(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's report on its part of a checkpoint."""

    size_bytes: int = 0
    hashes: dict[str, str] = {}
    model_hash: str = ""
    metadata: dict[str, str] = {}
    data_cursor: bytes = b""


class CheckpointAcked(Fact, frozen=True, kw_only=True):
    generation: int
    worker_id: str
    checkpoint: CheckpointSpec
    ack: RankAck

    def words(self) -> str:
        return f"{self.worker_id} wrote its {self.ack.size_bytes} bytes of checkpoint {self.checkpoint.checkpoint_id}"


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A checkpoint acknowledged by all ranks of its generation."""

    checkpoint: CheckpointSpec
    generation: int
    num_ranks: int
    size_bytes: int
    hashes: dict[str, str] = {}
    model_hash: str = ""
    metadata: dict[str, str] = {}
    data_cursor: bytes = b""
    committed_at_s: float = 0.0


class CheckpointCommitted(Fact, frozen=True, kw_only=True):
    record: CheckpointRecord

    def words(self) -> str:
        spec = self.record.checkpoint
        return (
            f"checkpoint {spec.checkpoint_id} ({spec.type}, step {spec.step}, epoch {spec.epoch}) "
            f"committed by {self.record.num_ranks} ranks at {spec.path}"
        )


class CheckpointAborted(Fact, frozen=True, kw_only=True):
    checkpoint_id: str
    num_acked: int
    reason: str

    def words(self) -> str:
        return f"checkpoint {self.checkpoint_id} aborted after {self.num_acked} acks: {self.reason}"


class CommandRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    command_id: int
    name: CommandName
    reason: str = ""
    args: dict[str, str] = {}


class CommandSent(Fact, frozen=True, kw_only=True):
    command: CommandRecord
    worker_ids: tuple[str, ...]
    request_id: str = ""

    def words(self) -> str:
        shown = ", ".join(self.worker_ids[:5]) + (" …" if len(self.worker_ids) > 5 else "")
        why = f": {self.command.reason}" if self.command.reason else ""
        return f"{self.command.name} sent to {counted(len(self.worker_ids), 'worker')} ({shown}){why}"


class CommandsAcked(Fact, frozen=True, kw_only=True):
    worker_id: str
    command_id: int

    def words(self) -> str:
        return f"{self.worker_id} acknowledged its commands up to {self.command_id}"


Event = (
    WorkerJoined
    | WorkerLeft
    | GenerationStarted
    | DatasetRegistered
    | ShardsAssigned
    | ShardsDone
    | EpochAdvanced
    | BarrierReleased
    | CheckpointAcked
    | CheckpointCommitted
    | CheckpointAborted
    | CommandSent
    | CommandsAcked
    | NumbersSkipped
    | JobDropped
)


class DatasetState(msgspec.Struct, frozen=True, kw_only=True):
    spec: DatasetSpec
    epoch: int
    owners: bytes
    done: bytes


class OpenCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    generation: int
    checkpoint: CheckpointSpec
    acks: dict[str, RankAck]


class PendingCommands(msgspec.Struct, frozen=True, kw_only=True):
    worker_id: str
    commands: tuple[CommandRecord, ...]


class JobSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The complete durable state of a job: the result of its events so far."""

    job_id: str
    generation: int
    generation_reason: str
    last_incarnation: int
    members: tuple[WorkerJoined, ...]
    departed: tuple[WorkerLeft, ...]
    datasets: tuple[DatasetState, ...]
    released: tuple[tuple[str, int, int, str], ...]
    checkpoints: tuple[CheckpointRecord, ...]
    open_checkpoints: tuple[OpenCheckpoint, ...]
    last_command_id: int
    commands: tuple[PendingCommands, ...]
    command_requests: dict[str, int]


class SpentNumbers(NamedTuple):
    """The highest numbers of all dropped jobs; a new job continues after them.

    A worker of a dropped job thus cannot be mistaken for one of a later job of the same name, and a relay that knows
    the old generations does not take the new ones for older. Nothing needs to be remembered per name.
    """

    generation: int = 0
    incarnation: int = 0
    command_id: int = 0


Snapshot = tuple[JobSnapshot | SpentNumbers, ...]
"""All jobs and, once one was dropped, the spent numbers."""

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
_snapshot_decoder = msgspec.json.Decoder(Snapshot)


def encode(event: Event) -> bytes:
    return _encoder.encode(event)


def decode(payload: bytes) -> Event:
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise JournalDamaged(
            f"cannot decode an event of the journal ({error}); it was written by a newer version, or edited"
        ) from error


def encode_snapshot(snapshot: Snapshot) -> bytes:
    return _encoder.encode(snapshot)


def decode_snapshot(payload: bytes) -> Snapshot:
    try:
        return _snapshot_decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise JournalDamaged(
            f"cannot decode the snapshot of the journal ({error}); it was written by a newer version, or edited"
        ) from error


def pack_ints(values: NDArray[np.int64]) -> bytes:
    """Pack integers: differences, then deflate; shard moves are mostly runs."""
    return zlib.compress(np.diff(values, prepend=np.int64(0)).astype("<i8").tobytes(), 1)


def unpack_ints(packed: bytes) -> NDArray[np.int64]:
    return np.cumsum(np.frombuffer(zlib.decompress(packed), dtype="<i8"), dtype=np.int64)
