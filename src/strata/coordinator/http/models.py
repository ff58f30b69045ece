"""The models of the HTTP API's answers, from which its OpenAPI description is generated.

Lists have one envelope: the items, their total number, and the offset of the next page. The data cursor of a checkpoint
is opaque, so the API returns its length and not its contents.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from strata.coordinator.state.events import CheckpointKind  # noqa: TC001 - evaluated at run time
from strata.coordinator.state.membership import WorkerStateName  # noqa: TC001 - evaluated at run time

CheckpointState = Literal["committed", "open"]
BarrierState = Literal["open", "released"]
EventKind = Literal[
    "WorkerJoined",
    "WorkerLeft",
    "GenerationStarted",
    "DatasetRegistered",
    "ShardsAssigned",
    "ShardsDone",
    "EpochAdvanced",
    "BarrierReleased",
    "CheckpointAcked",
    "CheckpointCommitted",
    "CheckpointAborted",
    "CommandSent",
    "CommandsAcked",
    "NumbersSkipped",
    "JobDropped",
]

Item = TypeVar("Item", bound=BaseModel)


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Page(Model, Generic[Item]):
    items: list[Item]
    total: int = Field(description="The number of matching items on all pages.")
    limit: int
    offset: int
    next_offset: int | None = Field(description="The offset of the next page; null on the last page.")


class Problem(Model):
    kind: str = Field(description="The name of the error, the same as over gRPC.")
    message: str = Field(description="What is wrong, and how to fix it.")
    field: str = Field(description="The invalid parameter; empty if it is no single one.")


class ErrorBody(Model):
    error: Problem


class Health(Model):
    status: Literal["ok", "refusing", "standby"]
    reason: str | None = Field(None, description="Why calls are refused, or the address of the leader.")


class Job(Model):
    job_id: str
    generation: int
    reason: str = Field(description="Why this generation started.")
    num_workers: int
    num_suspects: int = Field(description="Workers that lost their connection and have not reconnected.")
    num_datasets: int
    num_open_barriers: int
    num_checkpoints: int
    checkpoint_id: str | None
    checkpoint_step: int | None


class StatusJob(Model):
    job_id: str
    generation: int
    num_workers: int
    num_datasets: int
    num_open_barriers: int


class Status(Model):
    version: str
    num_sessions: int
    journal_bytes: int | None = Field(description="The size of the journal; null if it did not respond in time.")
    journal_damage: str | None = Field(description="Damage found at startup.")
    journal_failure: str | None = Field(description="Why the journal cannot be written at present.")
    token_file_problem: str | None = Field(description="Why the newest token file is not used.")
    num_jobs: int
    num_workers: int
    requests_per_s: float = Field(description="Over the last 10 seconds.")
    jobs: list[StatusJob] = Field(description="The first 1,000; /api/jobs lists them all.")


class Worker(Model):
    job_id: str
    worker_id: str
    rank: int
    incarnation: int
    state: WorkerStateName
    step: int
    epoch: int
    capacity: float
    hostname: str
    silent_s: float = Field(description="Seconds since its last message.")
    suspect: bool = Field(description="It lost its connection and has not reconnected.")
    metrics: dict[str, float | None] = Field(description="The newest value of each; null if it is not finite.")
    launch_rank: int | None = Field(default=None, description="Rank that the launcher gave the process, if any.")
    attempt: int | None = Field(default=None, description="Number of earlier starts of the run's workers, if known.")


class Dataset(Model):
    job_id: str
    dataset_id: str
    num_shards: int
    total_samples: int
    epoch: int
    num_done: int
    complete: bool
    shuffle: bool
    seed: int


class Checkpoint(Model):
    job_id: str
    checkpoint_id: str
    state: CheckpointState = Field(description="open: some ranks have not acknowledged it yet.")
    type: CheckpointKind
    step: int
    epoch: int
    path: str
    generation: int
    num_acked: int
    num_ranks: int
    size_bytes: int
    model_hash: str
    hashes: dict[str, str]
    metadata: dict[str, str]
    data_cursor_bytes: int = Field(description="The size of its data cursor.")
    committed_at_s: float | None = Field(description="Seconds since 1970; null while it is open.")


class Barrier(Model):
    job_id: str
    barrier_id: str
    step: int
    state: BarrierState
    generation: int
    num_members: int
    num_arrived: int
    missing: list[str] = Field(description="Workers that have not arrived; the first 32.")
    waited_s: float | None = Field(description="Seconds since the first arrival; null once released.")
    remaining_s: float | None = Field(description="Seconds until it times out; null once released.")


class EventLine(Model):
    seq: int
    at_s: float = Field(description="Seconds since 1970.")
    at: str = Field(description="The same, as ISO 8601 in UTC.")
    job_id: str
    kind: str
    words: str = Field(description="What happened and why.")
    reason: str | None = Field(description="The reason alone, if the event has one.")
    worker_id: str | None = Field(description="The worker concerned, if it is a single one.")
    generation: int | None


class EventPage(Model):
    items: list[EventLine]
    limit: int
    after: int
    next_after: int = Field(description="Pass this as `after` to continue; at the end, to get newer events.")
    more: bool = Field(
        description="Whether more events may follow. A page may be short or even empty and still have more: one "
        "request reads at most 10,000 events."
    )
