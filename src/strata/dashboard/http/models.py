"""The models of the dashboard's answers and live messages, from which `web/` generates its types."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr

from strata.coordinator.http.models import EventLine, Model, Page
from strata.coordinator.state.membership import WorkerStateName  # noqa: TC001 - evaluated at run time
from strata.dashboard.goodput import Category  # noqa: TC001 - evaluated at run time
from strata.dashboard.health import FindingKind, Level  # noqa: TC001 - evaluated at run time
from strata.dashboard.sample import JobState  # noqa: TC001 - evaluated at run time
from strata.launch.record.recovery import MomentName  # noqa: TC001 - evaluated at run time

RoleName = Literal["reader", "worker", "admin"]
MAX_TOKEN_LENGTH = 1_024


# -- login -------------------------------------------------------------------------------------------------------------


class SessionInfo(Model):
    login_required: bool = Field(description="Whether the coordinator has tokens and the request has no valid one.")
    role: RoleName | None = Field(description="The role of the request; null if it must log in first.")
    version: str
    csrf_header: str = Field(description="Send this header with any value in requests that change something.")


class LoginRequest(Model):
    token: SecretStr = Field(min_length=1, max_length=MAX_TOKEN_LENGTH)


class LoginAnswer(Model):
    role: RoleName
    expires_s: float = Field(description="Seconds until the session ends.")


# -- overview ----------------------------------------------------------------------------------------------------------


class HealthFinding(Model):
    level: Level
    kind: FindingKind
    job_id: str = Field(description="Empty for the coordinator.")
    worker_id: str | None
    rank: int | None
    line: str


class HealthState(Model):
    level: Level
    line: str = Field(description="The most important finding; without one, what is well.")
    findings: list[HealthFinding] = Field(description="The most important first; at most 8.")
    num_findings: int


class SeriesValue(Model):
    min: float
    mean: float
    max: float
    unit: str


class JobSummary(Model):
    job_id: str
    state: JobState
    generation: int
    reason: str = Field(description="Why this generation started.")
    attempt: int | None = Field(description="Number of earlier starts of the run's workers, if known.")
    num_workers: int
    num_servers: int = Field(description="Parameter servers; they are not counted as workers.")
    num_suspects: int
    workers_by_state: dict[WorkerStateName, int]
    step: int | None = Field(description="The lowest step of all ranks; null without workers.")
    epoch: int | None
    data_fraction: float | None = Field(description="Shards done in this epoch, of all datasets; null without one.")
    steps_per_s: float | None
    rows_per_s: float | None
    checkpoint_id: str | None
    checkpoint_step: int | None
    checkpoint_age_s: float | None = Field(description="Seconds since the last checkpoint was committed.")
    health: HealthState


class OverviewJob(JobSummary):
    values: dict[str, SeriesValue] = Field(description="The newest values of its series; at most 24.")
    num_values: int = Field(description="The number of series; /api/series lists them.")


class CoordinatorFigures(Model):
    at_s: float
    requests_per_s: float = Field(description="Over the last 10 seconds.")
    barrier_p50_s: float | None = Field(description="Over the last minute; null if no barrier was released in it.")
    barrier_p99_s: float | None
    num_sessions: int
    num_jobs: int
    num_workers: int
    num_suspects: int
    workers_by_state: dict[WorkerStateName, int]


class RunEnd(Model):
    """The end of a run that is over."""

    state: str = Field(description="done, failed, stopped, or interrupted: its agent was killed.")
    reason: str
    began_at_s: float
    ended_at_s: float = Field(description="The time of the last record in its directory.")
    step: int
    num_restarts: int
    log_ranks: list[int] = Field(description="Ranks that have a log; at most 1,000.")
    missing: list[str] = Field(description="What its directory does not have, and what is therefore not shown.")


class Overview(CoordinatorFigures):
    cursor: str = Field(description="Pass this to /api/live to get what is newer.")
    version: str
    health: HealthState
    jobs: Page[OverviewJob] = Field(description="Jobs with workers first, then the newest.")
    ended: RunEnd | None = Field(description="The end of the run whose page this is; null while it is active.")


# -- history -----------------------------------------------------------------------------------------------------------


class SeriesInfo(Model):
    job_id: str = Field(description="Empty for the coordinator.")
    name: str
    unit: str
    last: SeriesValue
    last_at_s: float
    first_at_s: float


class SeriesPoints(Model):
    name: str
    unit: str
    interval_s: float = Field(description="The length of a bucket; 0 if the series is empty.")
    t: list[float] = Field(description="The start of each bucket. A gap is a time without values.")
    min: list[float]
    mean: list[float]
    max: list[float]


class History(Model):
    job_id: str
    cursor: str = Field(description="Pass this to /api/live to get what is newer.")
    series: list[SeriesPoints] = Field(description="In the order asked for; names without values have no points.")


# -- the run -----------------------------------------------------------------------------------------------------------


class RunInfo(Model):
    name: str
    min_workers: int
    max_workers: int
    num_workers: int | None = Field(description="Without parameter servers; null before the run has started.")
    may_command: bool = Field(description="Whether this session may stop and scale the run.")
    live_page: str | None = Field(
        description="On the page of a run that is over: where the run has its page if it was resumed, empty if it has "
        "none; null if it was not resumed."
    )


class WorkerLog(Model):
    rank: int
    attempt: int
    attempts: list[int] = Field(description="Attempts of which this rank has a log, oldest first.")
    lines: list[str] = Field(description="The end of the log, without control characters.")


class StopRequest(Model):
    is_now: bool = Field(default=False, description="Without saving a checkpoint first.")


class ScaleRequest(Model):
    workers: int = Field(ge=1, le=1 << 20)


class StacksRequest(Model):
    rank: int = Field(ge=0, le=1 << 20, description="The rank that the launcher gave the worker.")


# -- live --------------------------------------------------------------------------------------------------------------


class Hello(Model):
    cursor: str
    interval_s: float = Field(description="Seconds between two samples.")
    version: str


class Reset(Model):
    cursor: str
    reason: str


class JobChanged(Model):
    at_s: float
    job: JobSummary


class JobGone(Model):
    at_s: float
    job_id: str


class WorkerChange(Model):
    worker_id: str
    rank: int
    state: WorkerStateName
    suspect: bool
    step: int
    epoch: int
    incarnation: int
    attempt: int | None
    silent_s: float


class WorkersChanged(Model):
    at_s: float
    job_id: str
    changed: list[WorkerChange]
    gone: list[str] = Field(description="Workers that left.")
    is_complete: bool = Field(description="False if more workers changed than fit: load /api/workers again.")


class Points(Model):
    at_s: float
    job_id: str = Field(description="Empty for the coordinator.")
    values: dict[str, tuple[float, float, float]] = Field(description="Minimum, mean and maximum of each series.")


class NewEvents(Model):
    items: list[EventLine]
    is_complete: bool = Field(description="False if more events happened than fit: load /api/events again.")


class LiveEvents(Model):
    """The data of each event of `/api/live`, by the event's name."""

    hello: Hello
    reset: Reset
    health: HealthState
    coordinator: CoordinatorFigures
    job: JobChanged
    gone: JobGone
    workers: WorkersChanged
    points: Points
    events: NewEvents


# -- goodput and recovery ----------------------------------------------------------------------------------------------


class GoodputEntry(Model):
    attempt: int | None = Field(description="Null for the whole run.")
    began_at_s: float
    ended_at_s: float
    num_ranks: int = Field(description="Of the run: the most ranks of an attempt.")
    total_s: float = Field(description="Wall time multiplied by ranks; the sum of the parts.")
    goodput: float | None = Field(description="The share of computing, without steps computed twice.")
    parts_s: dict[Category, float]


class Goodput(Model):
    job_id: str
    at_s: float
    run: GoodputEntry | None = Field(description="Null if no worker has joined yet.")
    attempts: list[GoodputEntry] = Field(description="The newest 200, in order.")
    num_attempts: int


class RecoveryMoment(Model):
    name: MomentName
    at_s: float | None = Field(description="Null if it did not happen, or has not happened yet.")
    after_s: float | None = Field(description="Since the detection.")


class RunRecovery(Model):
    failed_attempt: int
    attempt: int | None = Field(description="The attempt that followed; null if there was none.")
    rank: int | None
    cause: str
    generation: int | None
    step: int | None = Field(description="Step of the checkpoint that was loaded; null for a start without one.")
    first_step: int | None
    took_s: float | None = Field(description="From the detection to the first step.")
    moments: list[RecoveryMoment]
    last_lines: list[str] = Field(description="The end of the log of the worker that failed first.")


class Recoveries(Model):
    job_id: str
    is_recorded: bool = Field(description="False if this coordinator has no timeline of the job.")
    items: list[RunRecovery] = Field(description="The newest 200, newest first.")
    num_recoveries: int
