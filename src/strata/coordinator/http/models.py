"""The shapes of the HTTP API's answers; its OpenAPI description is made of these.

Lists come in one envelope: the items, how many there are in all, and where the next page begins. Data cursors of
checkpoints are bytes that only their writers understand, so the API tells their length and not their contents.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from strata.coordinator.state.events import CheckpointKind  # noqa: TC001 - read at run time
from strata.coordinator.state.membership import WorkerStateName  # noqa: TC001 - read at run time

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
    total: int = Field(description="How many fit the filters, on all pages.")
    limit: int
    offset: int
    next_offset: int | None = Field(description="Where the next page begins; null: this is the last.")


class Problem(Model):
    kind: str = Field(description="The error's name, the same as over gRPC.")
    message: str = Field(description="What is wrong, and what to do about it.")
    field: str = Field(description="The parameter at fault; empty: none in particular.")


class ErrorBody(Model):
    error: Problem


class Health(Model):
    status: Literal["ok", "refusing", "standby"]
    reason: str | None = Field(None, description="Why calls are refused, or where the leader is.")


class Job(Model):
    job_id: str
    generation: int
    reason: str = Field(description="Why this generation began, in words.")
    num_workers: int
    num_suspects: int = Field(description="Workers whose connection was lost and not yet renewed.")
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
    journal_bytes: int | None = Field(description="null: the journal could not be asked in time.")
    journal_damage: str | None = Field(description="What was found damaged at start.")
    journal_failure: str | None = Field(description="Why the journal cannot be written now.")
    token_file_problem: str | None = Field(description="Why the newest file of tokens is not used, but the one before.")
    num_jobs: int
    num_workers: int
    requests_per_s: float = Field(description="Over the last ten seconds.")
    jobs: list[StatusJob] = Field(description="The first 1,000; /api/jobs has them all.")


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
    silent_s: float = Field(description="Since it was last heard.")
    suspect: bool = Field(description="Its connection was lost and not yet renewed.")
    metrics: dict[str, float | None] = Field(description="The newest value of each; null: not a finite number.")
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
    data_cursor_bytes: int = Field(description="The length of its data cursor.")
    committed_at_s: float | None = Field(description="Seconds since 1970; null while it is open.")


class Barrier(Model):
    job_id: str
    barrier_id: str
    step: int
    state: BarrierState
    generation: int
    num_members: int
    num_arrived: int
    missing: list[str] = Field(description="Who has not come yet; the first 32.")
    waited_s: float | None = Field(description="Since the first came; null when it is released.")
    remaining_s: float | None = Field(description="Until it gives up; null when it is released.")


class EventLine(Model):
    seq: int
    at_s: float = Field(description="Seconds since 1970.")
    at: str = Field(description="The same, as ISO 8601 in UTC.")
    job_id: str
    kind: str
    words: str = Field(description="What happened and why.")
    reason: str | None = Field(description="The reason alone, where the event keeps one.")
    worker_id: str | None = Field(description="Whom it concerns, where that is one worker.")
    generation: int | None


class EventPage(Model):
    items: list[EventLine]
    limit: int
    after: int
    next_after: int = Field(description="Give this as `after` to go on; at the end, to ask for what has come since.")
    more: bool = Field(
        description="There may be more right away. A page can be short, even empty, and have more after it: one "
        "request looks at no more than 10,000 events."
    )
