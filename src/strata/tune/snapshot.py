"""What a study looks like at one moment, as plain values: for `strata studies --json`, the live table and a dashboard.

Everything is computed from the state of a study, which its journal leads to, and a time. Nothing here reads a file or a
clock. `as_plain` returns what JSON can represent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from strata.tune.modes import mode_name
from strata.tune.state.trial import TrialState  # noqa: TC001 - msgspec evaluates it

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.tune.state.study import StudyState
    from strata.tune.state.trial import Trial

STATES: tuple[TrialState, ...] = ("finished", "pruned", "failed", "running", "paused", "queued")


class TrialSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    state: TrialState
    config: dict[str, bool | int | float | str | None]
    values: dict[str, float | None]
    """Last values of the objectives and of the metrics in constraints, by name; empty if it has reported none."""
    best: float | None
    """Best value of the first objective that was reported."""
    is_feasible: bool
    """Its last values meet all constraints."""
    step: int | None
    num_starts: int
    slot: int | None
    num_slots: int
    """Slots that it takes: several if no other trial needs them, 0 if it does not run."""
    checkpoint: str
    checkpoint_step: int
    started_at_s: float | None
    ended_at_s: float | None
    duration_s: float | None
    """From its first start to its end, or to now."""
    reason: str
    donors: list[int]


class SeriesSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The reports of a trial, thinned to a bounded number."""

    trial: int
    steps: list[int]
    values: dict[str, list[float | None]]
    """By name, one per step."""


class StudySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    mode: str
    sampler: str
    scheduler: str
    options: dict[str, Any]
    metrics: list[str]
    directions: list[str]
    constraints: list[str]
    seed: int
    num_trials: int
    """Trials that the study may have."""
    num_known: int
    """Trials of other studies that a warm start has used."""
    counts: dict[str, int]
    """Trials by state."""
    num_slots: int
    is_ended: bool
    is_complete: bool
    """All trials have ended; otherwise the study can be continued."""
    reason: str
    """Why it has ended, or is being stopped."""
    began_at_s: float | None
    updated_at_s: float
    active_s: float
    """Time during which it ran."""
    left_s: float | None
    """Estimate of the time until its end; None if it does not run, or nothing is known yet."""
    best: TrialSnapshot | None
    """The finished trial with the best first objective, among those that meet all constraints."""
    pareto: list[int]
    """With several objectives: the finished trials that no other one dominates."""


def snapshot(state: StudyState, *, now_s: float | None = None) -> StudySnapshot:
    """Return a study as it is now.

    Args:
        now_s: Wall time; None if the study does not run, so that its time ended with its last fact.
    """
    spec, times, ended = state.spec, state.times, state.ended
    is_running = now_s is not None and ended is None
    active_s = times.active_s + (max((now_s or 0.0) - times.last_s, 0.0) if is_running and times.began_s else 0.0)
    counts: dict[str, int] = dict.fromkeys(STATES, 0)
    for trial in state.trials.values():
        counts[trial.state] += 1
    best = state.best
    return StudySnapshot(
        name=spec.name,
        mode=mode_name(spec.sampler, spec.scheduler),
        sampler=spec.sampler,
        scheduler=spec.scheduler,
        options=dict(spec.scheduler_options),
        metrics=list(spec.metrics),
        directions=list(spec.directions),
        constraints=list(spec.constraints),
        seed=spec.seed,
        num_trials=state.num_trials,
        num_known=state.num_known,
        counts=counts,
        num_slots=state.num_slots,
        is_ended=ended is not None,
        is_complete=ended is not None and ended.is_complete,
        reason=ended.reason if ended is not None else state.stop_reason,
        began_at_s=times.began_s,
        updated_at_s=times.last_s,
        active_s=active_s,
        left_s=time_left(counts, state.num_trials, active_s) if is_running else None,
        best=None if best is None else trial_snapshot(state, best),
        pareto=[each.number for each in state.pareto] if len(spec.metrics) > 1 else [],
    )


def time_left(counts: dict[str, int], num_trials: int, active_s: float) -> float | None:
    """Estimate the time until all trials have ended, from the time that the trials so far took.

    A paused trial counts as done: of those, few are resumed.
    """
    num_done = counts["finished"] + counts["pruned"] + counts["failed"] + counts["paused"]
    if not num_done or not active_s:
        return None
    return active_s * max(num_trials - num_done, 0) / num_done


def trial_snapshots(state: StudyState, *, now_s: float | None = None) -> list[TrialSnapshot]:
    """Return all trials, in the order of their numbers."""
    return [trial_snapshot(state, trial, now_s=now_s) for _, trial in sorted(state.trials.items())]


def trial_snapshot(state: StudyState, trial: Trial, *, now_s: float | None = None) -> TrialSnapshot:
    until_s = trial.ended_s if trial.ended_s is not None else now_s if now_s is not None else state.times.last_s
    return TrialSnapshot(
        number=trial.number,
        state=trial.state,
        config=dict(trial.config),
        values=dict(zip(state.objectives.names, trial.values, strict=True)) if trial.values else {},
        best=_value(state, trial.best),
        is_feasible=state.objectives.is_feasible(trial),
        step=trial.step,
        num_starts=trial.lease,
        slot=trial.slot,
        num_slots=trial.num_slots,
        checkpoint=trial.checkpoint,
        checkpoint_step=trial.checkpoint_step,
        started_at_s=trial.started_s,
        ended_at_s=trial.ended_s,
        duration_s=None if trial.started_s is None else max(until_s - trial.started_s, 0.0),
        reason=trial.reason,
        donors=list(trial.donors),
    )


def series(state: StudyState, number: int) -> SeriesSnapshot:
    """Return the reports of a trial."""
    trial = state.trials[number]
    points = list(trial.series.points)
    if trial.step is not None and trial.values and (not points or points[-1][0] < trial.step):
        points.append((trial.step, trial.values))  # the last one, which thinning may have left out
    return SeriesSnapshot(
        trial=number,
        steps=[step for step, _ in points],
        values={name: [values[place] for _, values in points] for place, name in enumerate(state.objectives.names)},
    )


def leading(state: StudyState) -> Trial | None:
    """Return the best finished trial; before there is one, the trial that has reported the best value."""
    found = state.best
    if found is not None:
        return found
    others = (each for each in state.trials.values() if each.state != "failed" and each.best < math.inf)
    return min(others, key=lambda each: (each.best, each.number), default=None)


def history(state: StudyState) -> list[tuple[int, float]]:
    """Return the best value of the first objective after each improvement, with the number of trials that had ended."""
    ended = sorted((each for each in state.trials.values() if each.is_over), key=lambda each: each.ended_s or 0.0)
    found: list[tuple[int, float]] = []
    best = math.inf
    for number, trial in enumerate(ended, start=1):
        is_result = trial.state == "finished" and state.objectives.is_feasible(trial)
        loss = state.objectives.losses(trial.values)[0] if is_result else math.inf
        if loss < best:
            best = loss
            found.append((number, trial.values[0] or 0.0))
    return found


def best_after(improvements: Sequence[tuple[int, float]], num_ended: int) -> float | None:
    """Return the best value once this number of trials had ended, from a `history`."""
    return next((value for number, value in reversed(improvements) if number <= num_ended), None)


def as_plain(value: StudySnapshot | TrialSnapshot | SeriesSnapshot) -> dict[str, Any]:
    """Return an object of JSON."""
    plain: dict[str, Any] = msgspec.to_builtins(value)
    return plain


def _value(state: StudyState, loss: float) -> float | None:
    """Return a loss as the objective that it was computed from."""
    if not math.isfinite(loss):
        return None
    return loss if state.spec.directions[0] == "min" else -loss
