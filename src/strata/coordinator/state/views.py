"""The views of jobs, workers and datasets that clients receive."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strata.coordinator.state.events import CheckpointRecord
    from strata.coordinator.state.membership import WorkerEvent, WorkerEventName, WorkerStateName
    from strata.coordinator.state.shards import Shard
    from strata.coordinator.state.time_use import TimeUse


@dataclass(frozen=True, slots=True)
class JobInfo:
    job_id: str
    generation: int
    num_workers: int
    num_datasets: int
    checkpoint_step: int


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    worker_id: str
    incarnation: int
    rank: int
    state: WorkerStateName
    step: int
    epoch: int
    capacity: float
    hostname: str
    silent_s: float
    suspect: bool
    metrics: dict[str, float]
    launch_rank: int | None = None
    attempt: int | None = None
    events: dict[WorkerEventName, WorkerEvent] = field(default_factory=dict)
    """The newest event of each kind."""
    time_use: TimeUse | None = None


@dataclass(frozen=True, slots=True)
class MembershipInfo:
    generation: int
    reason: str
    workers: list[WorkerInfo]
    """Ordered by rank."""
    is_watching: bool = False
    """This client's session gets the job's notices."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A worker's place in the newest membership."""

    generation: int
    rank: int
    world_size: int
    reason: str
    """Why this generation started."""


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    dataset_id: str
    num_shards: int
    total_samples: int
    epoch: int
    num_done: int
    shuffle: bool
    seed: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a dataset in its epoch."""

    num_done: int
    num_shards: int

    @property
    def complete(self) -> bool:
        return self.num_done == self.num_shards


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """Everything that a worker needs to resume after a failure."""

    checkpoint: CheckpointRecord | None
    """None to start at step 0."""
    generation: int
    rank: int
    world_size: int
    shards: list[Shard]
    reason: str
