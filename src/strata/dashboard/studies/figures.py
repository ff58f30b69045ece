"""What is shown of a study at one moment. Pure: a state in, bounded models out.

A study may have 100,000 trials with 1,000 kept reports each, so every list is paged or thinned, and says of how many it
is a choice.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypeVar

from strata.dashboard.studies import models as m
from strata.errors import InvalidArgument
from strata.tune.snapshot import snapshot, trial_snapshot
from strata.tune.timeline import value_in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from strata.dashboard.studies.source import StudyNow, StudySource
    from strata.tune.space.parameters import Parameter
    from strata.tune.state.study import StudyState
    from strata.tune.state.trial import Trial, TrialState

Item = TypeVar("Item")
Sort = Literal["trial", "state", "value", "step", "duration", "config"]

MAX_AXES = 12
MAX_LABELS = 12
"""Values of an axis that are named."""
MAX_ALLOWED = 200
"""Characters that describe the values of a parameter."""
STATES: tuple[TrialState, ...] = ("running", "paused", "queued", "finished", "pruned", "failed")


# -- the study ---------------------------------------------------------------------------------------------------------


def info(source: StudySource, now: StudyNow, *, may_command: bool = False) -> m.StudyInfo:
    state = now.state
    found = snapshot(state, now_s=now.now_s)
    front = best_numbers(now)
    best = state.best
    return m.StudyInfo(
        study=source.id,
        name=found.name,
        path=str(source.directory.path),
        version=now.version,
        state=now.run_state,
        is_running=now.now_s is not None,
        mode=found.mode,
        metrics=found.metrics,
        directions=found.directions,
        constraints=found.constraints,
        reported=list(state.objectives.names),
        seed=found.seed,
        num_trials=found.num_trials,
        num_known=found.num_known,
        counts={each: found.counts[each] for each in STATES},
        num_slots=found.num_slots,
        reason=found.reason,
        began_at_s=found.began_at_s,
        updated_at_s=found.updated_at_s,
        active_s=found.active_s,
        left_s=found.left_s,
        best=None if best is None else row(now, best, front),
        num_best=len(front),
        parameters=[
            m.StudyParameter(
                name=each.name,
                kind=each.kind,
                allowed=each.describe()[:MAX_ALLOWED],
                is_log=bool(getattr(each, "log", False)),
            )
            for each in now.space.parameters.values()
        ],
        may_command=may_command and now.now_s is not None,
    )


def best_numbers(now: StudyNow) -> frozenset[int]:
    """Return the Pareto front; with one objective, the best trial."""

    def compute() -> frozenset[int]:
        state = now.state
        best = state.best
        if len(state.spec.metrics) > 1:
            return frozenset(each.number for each in state.pareto)
        return frozenset(() if best is None else (best.number,))

    found: frozenset[int] = now.once("best", compute)
    return found


# -- the table ---------------------------------------------------------------------------------------------------------


def row(now: StudyNow, trial: Trial, front: Collection[int]) -> m.StudyTrial:
    found = trial_snapshot(now.state, trial, now_s=now.now_s)
    return m.StudyTrial(
        number=found.number,
        state=found.state,
        config=found.config,
        values={name: finite(value) for name, value in found.values.items()},
        is_feasible=found.is_feasible,
        is_best=found.number in front,
        step=found.step,
        num_starts=found.num_starts,
        slot=found.slot,
        num_slots=found.num_slots,
        started_at_s=found.started_at_s,
        ended_at_s=found.ended_at_s,
        duration_s=found.duration_s,
        reason=found.reason,
        checkpoint=found.checkpoint,
        checkpoint_step=found.checkpoint_step,
        donors=found.donors,
    )


def listed(
    now: StudyNow, *, state: TrialState | None, text: str, sort: Sort, name: str, is_descending: bool
) -> list[Trial]:
    """Return the trials that match, in an order. Those without a value come last in both directions.

    Args:
        text: In the number, the configuration or the reason.
        name: The metric or the parameter to sort by.

    Raises:
        InvalidArgument: There is no such metric or parameter.
    """
    value_of = _value_of(now, sort, name)

    def compute() -> list[Trial]:
        words = text.casefold()
        found = [
            each
            for each in now.state.trials.values()
            if (state is None or each.state == state) and (not words or words in _words(each))
        ]
        known = [(value, each) for each in found if (value := value_of(each)) is not None]
        numbers = sorted((pair for pair in known if not isinstance(pair[0], str)), key=lambda pair: pair[1].number)
        texts = sorted((pair for pair in known if isinstance(pair[0], str)), key=lambda pair: pair[1].number)
        ordered = [
            pair[1]
            for some in ((texts, numbers) if is_descending else (numbers, texts))
            for pair in sorted(some, key=lambda pair: pair[0], reverse=is_descending)
        ]
        with_value = {each.number for each in ordered}
        return ordered + sorted((each for each in found if each.number not in with_value), key=lambda each: each.number)

    result: list[Trial] = now.once(("listed", state, text, sort, name, is_descending), compute)
    return result


def _value_of(now: StudyNow, sort: Sort, name: str) -> Callable[[Trial], float | str | None]:
    study = now.state
    match sort:
        case "value":
            place = place_of(study, name)
            return lambda trial: finite(trial.values[place]) if trial.values else None
        case "config":
            if name not in now.space.parameters:
                raise InvalidArgument(
                    f"parameter {name[:200]!r} is unknown; the study has {', '.join(now.space.parameters)}",
                    field="name",
                )
            return lambda trial: _sortable(trial.config.get(name))
        case "state":
            return lambda trial: STATES.index(trial.state)
        case "step":
            return lambda trial: trial.step
        case "duration":
            return lambda trial: trial_snapshot(study, trial, now_s=now.now_s).duration_s
    return lambda trial: trial.number


def _sortable(value: m.ConfigValue) -> float | str | None:
    return float(value) if isinstance(value, bool | int | float) else value


def _words(trial: Trial) -> str:
    config = " ".join(f"{name}={value}" for name, value in trial.config.items())
    return f"{trial.number} {config} {trial.reason}".casefold()


def place_of(state: StudyState, metric: str) -> int:
    """Return the place of a metric in reports; of the first objective if the name is empty.

    Raises:
        InvalidArgument: Trials do not report it to the study.
    """
    names = state.objectives.names
    if not metric:
        return 0
    if metric not in names:
        raise InvalidArgument(f"metric {metric[:200]!r} is unknown; the study has {', '.join(names)}", field="metric")
    return names.index(metric)


def check_objective(state: StudyState, metric: str) -> None:
    """
    Raises:
        InvalidArgument: It is not empty and no objective.
    """
    if metric and metric not in state.spec.metrics:
        raise InvalidArgument(
            f"objective {metric[:200]!r} is unknown; the study has {', '.join(state.spec.metrics)}", field="metric"
        )


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _sign(state: StudyState, place: int) -> int:
    """Return 1 if lower is better; metrics of constraints have no direction and count as such."""
    directions = state.spec.directions
    return -1 if place < len(directions) and directions[place] == "max" else 1


# -- curves ------------------------------------------------------------------------------------------------------------


def curves(now: StudyNow, *, metric: str, chosen: Sequence[int], max_trials: int, max_points: int) -> m.StudyCurves:
    """Return the reports of some trials: those that are asked for, then running ones, then the best."""
    state, place = now.state, place_of(now.state, metric)
    reported = [each for each in state.trials.values() if each.values]
    wanted = {number: None for number in chosen if number in state.trials and state.trials[number].values}
    running = sorted((each.number for each in reported if each.state == "running"), reverse=True)
    best: list[int] = now.once(
        ("best first", place), lambda: [each.number for each in _best_first(reported, state, place)]
    )
    numbers = list(dict.fromkeys((*wanted, *running, *best)))[:max_trials]
    return m.StudyCurves(
        version=now.version,
        metric=state.objectives.names[place],
        items=[_curve(state.trials[number], place, max_points) for number in sorted(numbers)],
        num_trials=len(reported),
    )


def _best_first(trials: Collection[Trial], state: StudyState, place: int) -> list[Trial]:
    sign = _sign(state, place)

    def key(trial: Trial) -> tuple[float, int]:
        value = finite(trial.values[place])
        return (math.inf if value is None else sign * value), trial.number

    return sorted(trials, key=key)


def _curve(trial: Trial, place: int, max_points: int) -> m.StudyCurve:
    points = [(step, values[place]) for step, values in trial.series.points]
    if trial.step is not None and (not points or points[-1][0] < trial.step):
        points.append((trial.step, finite(trial.values[place])))  # the last one, which thinning may have left out
    points = thinned_curve(points, max_points)
    return m.StudyCurve(
        trial=trial.number,
        state=trial.state,
        steps=[step for step, _ in points],
        values=[value for _, value in points],
    )


def thinned_curve(points: Sequence[tuple[int, float | None]], max_points: int) -> list[tuple[int, float | None]]:
    """Return at most this number of points: the first, the last, and the extremes of each part between them, so that a
    spike stays visible.
    """
    if len(points) <= max_points:
        return list(points)
    inner = range(1, len(points) - 1)
    num_parts = max((max_points - 2) // 2, 1)
    kept = {0, len(points) - 1}
    for part in range(num_parts):
        among = inner[part * len(inner) // num_parts : (part + 1) * len(inner) // num_parts]
        known = [(value, at) for at in among if (value := points[at][1]) is not None]
        kept |= {min(known)[1], max(known)[1]} if known else set(among[:1])
    return [points[at] for at in sorted(kept)]


# -- results -----------------------------------------------------------------------------------------------------------


def history(now: StudyNow, *, metric: str, max_points: int) -> m.StudyHistory:
    """Return the results in the order in which trials ended, and the best so far."""
    state, place = now.state, place_of(now.state, metric)
    sign = _sign(state, place)
    ended: list[Trial] = now.once(
        "ended",
        lambda: sorted((each for each in state.trials.values() if each.is_over), key=lambda each: each.ended_s or 0.0),
    )
    results: list[m.StudyResult] = []
    best: list[m.StudyResult] = []
    for number, trial in enumerate(ended, start=1):
        value = finite(trial.values[place]) if trial.state == "finished" and trial.values else None
        if value is None:
            continue
        result = m.StudyResult(num_ended=number, trial=trial.number, value=value)
        results.append(result)
        is_better = not best or sign * value < sign * best[-1].value
        if is_better and state.objectives.is_feasible(trial):
            best.append(result)
    return m.StudyHistory(
        version=now.version,
        metric=state.objectives.names[place],
        direction="max" if sign < 0 else "min",
        num_ended=len(ended),
        results=spread(results, max_points),
        best=best if len(best) <= max_points else [*best[:1], *best[-(max_points - 1) :]],
    )


def spread(items: Sequence[Item], max_items: int) -> list[Item]:
    """Return at most this number of items, evenly chosen, with the first and the last."""
    if len(items) <= max_items:
        return list(items)
    if max_items == 1:
        return [items[-1]]
    return [items[place * (len(items) - 1) // (max_items - 1)] for place in range(max_items)]


def _finished(now: StudyNow, place: int) -> list[tuple[float, Trial]]:
    """Return finished trials with their values, the best first."""
    state = now.state
    trials = [each for each in state.trials.values() if each.state == "finished"]
    found: list[tuple[float, Trial]] = now.once(
        ("finished", place),
        lambda: [
            (value, each)
            for each in _best_first(trials, state, place)
            if (value := finite(each.values[place])) is not None
        ],
    )
    return found


def parallel(now: StudyNow, *, metric: str, chosen: Sequence[int], max_trials: int) -> m.StudyParallel:
    """Return finished trials as lines through their parameters: half of them the best, the others evenly chosen."""
    place = place_of(now.state, metric)
    finished = _finished(now, place)
    varying = [each for each in now.space.parameters.values() if each.num_values != 1]
    axes = varying[:MAX_AXES]
    wanted = [pair for pair in finished if pair[1].number in set(chosen)] if chosen else []
    num_best = max((max_trials - len(wanted)) // 2, 1)
    picked = [*wanted, *finished[:num_best], *spread(finished[num_best:], max(max_trials - len(wanted) - num_best, 1))]
    lines = {trial.number: (value, trial) for value, trial in picked}
    return m.StudyParallel(
        version=now.version,
        metric=now.state.objectives.names[place],
        direction="max" if _sign(now.state, place) < 0 else "min",
        axes=[_axis(each) for each in axes],
        num_axes=len(varying),
        items=[
            m.StudyLine(trial=number, value=value, positions=[_position(each, trial) for each in axes])
            for number, (value, trial) in lines.items()
        ],
        num_trials=len(finished),
    )


def _axis(parameter: Parameter) -> m.StudyAxis:
    num = parameter.num_values
    labels = [value_in_words(parameter.value(each)) for each in range(num)] if num and num <= MAX_LABELS else []
    return m.StudyAxis(
        name=parameter.name,
        low=value_in_words(parameter.at(0.0)),
        high=value_in_words(parameter.at(1.0 - 2**-53)),
        labels=labels,
    )


def _position(parameter: Parameter, trial: Trial) -> float | None:
    return parameter.unit(trial.config[parameter.name]) if parameter.name in trial.config else None


def pareto(now: StudyNow, *, x: str, y: str, max_points: int) -> m.StudyPareto:
    """Return two metrics of finished trials: the front first, then a choice of the others."""
    state = now.state
    names = state.objectives.names
    if len(names) < 2:
        raise InvalidArgument(f"study {state.spec.name} has one metric, {names[0]}; two are needed", field="x")
    place_x, place_y = place_of(state, x or names[0]), place_of(state, y or names[1])
    front = best_numbers(now)
    known = [
        (each, a, b)
        for each in state.trials.values()
        if each.state == "finished"
        and (a := finite(each.values[place_x])) is not None
        and (b := finite(each.values[place_y])) is not None
    ]
    best = spread([each for each in known if each[0].number in front], max_points)
    others = [each for each in known if each[0].number not in front]
    shown = [*spread(others, max_points - len(best)), *best] if len(best) < max_points else best
    return m.StudyPareto(
        version=now.version,
        x=names[place_x],
        y=names[place_y],
        items=[m.StudyPoint(trial=trial.number, x=a, y=b, is_best=trial.number in front) for trial, a, b in shown],
        num_trials=len(known),
    )
