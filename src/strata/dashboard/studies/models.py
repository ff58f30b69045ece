"""The models of what the dashboard shows of studies, from which `web/` generates its types."""

from __future__ import annotations

from pydantic import Field

from strata.coordinator.http.models import Model
from strata.tune.space.parameters import Kind  # noqa: TC001 - evaluated at run time
from strata.tune.state.events import MAX_TRIALS
from strata.tune.state.trial import TrialState  # noqa: TC001 - evaluated at run time

ConfigValue = bool | int | float | str | None


class StudyRef(Model):
    study: str = Field(description="Its id, for the other requests.")
    name: str


class StudyList(Model):
    items: list[StudyRef]


class StudyTrial(Model):
    number: int
    state: TrialState
    config: dict[str, ConfigValue]
    values: dict[str, float | None] = Field(
        description="Last values of the objectives and of the metrics in constraints; empty without a report. Null if "
        "not a finite number."
    )
    is_feasible: bool = Field(description="Whether its last values meet all constraints.")
    is_best: bool = Field(description="The best finished trial; with several objectives, one on the Pareto front.")
    step: int | None = Field(description="The last step that was reported.")
    num_starts: int
    slot: int | None
    num_slots: int
    started_at_s: float | None
    ended_at_s: float | None
    duration_s: float | None = Field(description="From its first start to its end, or to now.")
    reason: str = Field(description="Why it was stopped, paused, queued again or failed.")
    checkpoint: str
    checkpoint_step: int
    donors: list[int] = Field(description="Trials whose checkpoints it has continued from.")


class StudyParameter(Model):
    name: str
    kind: Kind
    allowed: str = Field(description="The allowed values in words.")
    is_log: bool


class StudyInfo(Model):
    study: str
    name: str
    path: str
    version: str = Field(description="Changes with every fact of the journal.")
    state: str = Field(description="State of its driver: running, done, stopped, failed, interrupted, …")
    is_running: bool
    mode: str
    metrics: list[str] = Field(description="The objectives.")
    directions: list[str]
    constraints: list[str]
    reported: list[str] = Field(description="The objectives and the metrics in constraints.")
    seed: int
    num_trials: int = Field(description="Trials that the study may have.")
    num_known: int = Field(description="Trials of other studies that a warm start has used.")
    counts: dict[TrialState, int]
    num_slots: int
    reason: str = Field(description="Why it has ended, or is being stopped.")
    began_at_s: float | None
    updated_at_s: float
    active_s: float
    left_s: float | None = Field(description="Estimate; null if it does not run, or nothing is known yet.")
    best: StudyTrial | None
    num_best: int = Field(description="Trials on the Pareto front; with one objective, at most 1.")
    parameters: list[StudyParameter]
    may_command: bool = Field(description="Whether this session may stop trials and let them start again.")


class TrialOrderRequest(Model):
    study: str = Field(default="", max_length=128, description="Id of the study; the first one by default.")
    number: int = Field(ge=0, le=MAX_TRIALS, description="The trial.")


class StudyCurve(Model):
    trial: int
    state: TrialState
    steps: list[int]
    values: list[float | None]


class StudyCurves(Model):
    version: str
    metric: str
    items: list[StudyCurve] = Field(description="Thinned; the smallest and largest values are kept.")
    num_trials: int = Field(description="Trials that have reported, of which the items are a choice.")


class StudyResult(Model):
    num_ended: int = Field(description="Number of trials that had ended with this one.")
    trial: int
    value: float


class StudyHistory(Model):
    version: str
    metric: str
    direction: str
    num_ended: int
    results: list[StudyResult] = Field(description="Results of finished trials, thinned.")
    best: list[StudyResult] = Field(description="Each improvement by a trial that meets all constraints.")


class StudyAxis(Model):
    name: str
    low: str = Field(description="The value at the lower end, in words.")
    high: str
    labels: list[str] = Field(description="All values, if there are few; they divide the axis into equal parts.")


class StudyLine(Model):
    trial: int
    positions: list[float | None] = Field(
        description="From 0 to 1 on each axis; null where the parameter does not apply."
    )
    value: float


class StudyParallel(Model):
    version: str
    metric: str
    direction: str
    axes: list[StudyAxis]
    num_axes: int = Field(description="Parameters that can vary, of which the axes are the first.")
    items: list[StudyLine] = Field(description="Finished trials, the best ones and a choice of the others.")
    num_trials: int


class StudyPoint(Model):
    trial: int
    x: float
    y: float
    is_best: bool = Field(description="No other trial dominates it in all objectives.")


class StudyPareto(Model):
    version: str
    x: str
    y: str
    items: list[StudyPoint]
    num_trials: int


class StudyImportance(Model):
    name: str
    importance: float = Field(description="Share of the whole; all of them add up to 1.")


class StudyImportances(Model):
    items: list[StudyImportance] = Field(description="The largest first.")
    num_trials: int = Field(description="Finished trials from which they were computed.")
    problem: str = Field(description="Why there are none; empty if there are.")
