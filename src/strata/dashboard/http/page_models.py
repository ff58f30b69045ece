"""The models of single pages of the dashboard: data, parameter servers, time of workers, checkpoints."""

from __future__ import annotations

from pydantic import Field

from strata.coordinator.http.models import Dataset, Model, Page
from strata.coordinator.state.events import CheckpointKind  # noqa: TC001 - evaluated at run time
from strata.dashboard.data import WaitCause  # noqa: TC001 - evaluated at run time
from strata.dashboard.stragglers import StragglerCause  # noqa: TC001 - evaluated at run time

# -- data --------------------------------------------------------------------------------------------------------------


class ShardOwner(Model):
    worker_id: str | None = Field(description="Null: these shards wait for a worker.")
    rank: int | None
    num_shards: int
    num_done: int = Field(description="Finished in this epoch.")
    num_gained: int | None = Field(description="Shards that the last move gave it; null without a recorded move.")
    cells: list[int] = Field(description="Finished shards of each cell, in the order of reading.")


class ShardMove(Model):
    at_s: float
    generation: int
    reason: str = Field(description="Why the generation began; empty if it is not recorded any more.")
    num_moved: int
    num_workers: int


class JobShards(Model):
    dataset: Dataset
    shards_per_cell: int = Field(description="The last cell of an owner may have fewer.")
    num_waiting: int = Field(description="Shards without an owner.")
    min_per_worker: int | None = Field(description="The fewest shards of a worker; null without workers.")
    mean_per_worker: float | None
    max_per_worker: int | None
    min_left: int | None = Field(description="The fewest unfinished shards of a worker.")
    max_left: int | None
    owners: Page[ShardOwner] = Field(description="By rank; before them the shards without an owner, if any.")
    last_move: ShardMove | None = Field(description="Null if the newest 20,000 entries of the journal have none.")


class RankDataWait(Model):
    worker_id: str
    rank: int
    share: float = Field(description="Of the last half minute, inside `next()` of the loader.")
    cause: WaitCause
    reason: str
    cure: str


class JobData(Model):
    job_id: str
    at_s: float
    datasets: list[Dataset] = Field(description="The first 100.")
    num_datasets: int
    shards: JobShards | None = Field(description="Of the dataset asked for, or else the first that is not finished.")
    waits: list[RankDataWait] = Field(description="Ranks that wait for data, longest first; at most 50.")
    num_waits: int
    num_measured: int = Field(description="Ranks that have measured the last half minute.")
    num_ranks: int


# -- parameter servers -------------------------------------------------------------------------------------------------


class ServerFigures(Model):
    """Null: not measured."""

    rows: int | None
    bytes: int | None = Field(description="Memory of the tables.")
    evicted: int | None = Field(description="Rows evicted since the server started.")
    pulls_per_s: float | None = Field(description="Over the last 10 seconds.")
    pushes_per_s: float | None
    staleness: int | None = Field(description="Steps between the fastest and the slowest worker.")
    hit_rate: float | None = Field(description="Share of the pulled rows that were in memory; null without a file.")


class Server(ServerFigures):
    number: int
    worker_id: str
    step: int = Field(description="Steps that all workers have pushed.")
    silent_s: float
    suspect: bool


class JobServers(Model):
    job_id: str
    total: ServerFigures | None = Field(description="Of all servers; null without any.")
    servers: Page[Server] = Field(description="By number.")


# -- time of workers ---------------------------------------------------------------------------------------------------


class RankStraggler(Model):
    worker_id: str
    rank: int
    cause: StragglerCause
    factor: float = Field(description="Its own time, without waiting for others, as a multiple of the median.")
    since_step: int | None
    line: str


class WorkerTime(Model):
    """Shares of the time between two reports; those of a moment add up to 1. The lists have one entry per report."""

    worker_id: str
    rank: int
    incarnation: int
    is_collective_known: bool = Field(description="False: waits in collectives of torch are part of computing.")
    ended_at_s: list[float] = Field(description="Seconds since 1970, oldest first.")
    computing: list[float]
    waiting: list[float] = Field(description="For data, in saves, and loading a checkpoint.")
    blocked: list[float] = Field(description="For other ranks: at barriers and in collectives, if these are measured.")


class JobTime(Model):
    job_id: str
    straggler: RankStraggler | None = Field(description="The rank that the others wait for; null without a verdict.")
    no_verdict: str = Field(description="Why there is no verdict; empty if there is one.")
    workers: Page[WorkerTime] = Field(description="By rank; those that have not measured anything have empty lists.")


# -- lineage of checkpoints --------------------------------------------------------------------------------------------


class CheckpointResume(Model):
    attempt: int
    at_s: float = Field(description="When rank 0 had loaded it.")


class CheckpointLine(Model):
    checkpoint_id: str
    type: CheckpointKind
    step: int
    epoch: int
    size_bytes: int = Field(description="What its ranks wrote.")
    generation: int
    num_ranks: int
    committed_at_s: float
    attempt: int | None = Field(description="The attempt that made it; null if that is not recorded.")
    resumed_by: list[CheckpointResume] = Field(description="Attempts that were started from it, in order.")


class JobLineage(Model):
    job_id: str
    is_recorded: bool = Field(description="False if this coordinator has no timeline of the job, and so no attempts.")
    checkpoints: Page[CheckpointLine] = Field(description="Newest first; those that the coordinator remembers.")
