"""Plots of a study with matplotlib. Each draws on given axes, or on those of a new figure, and returns them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.errors import ConfigError, RunFailed
from strata.tune import analysis
from strata.tune.packages import require
from strata.tune.space.parameters import Choice

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from strata.tune.space.parameters import Parameter
    from strata.tune.state.trial import Trial
    from strata.tune.study import Study

MAX_LINES = 2_000
"""Lines of a plot; of more trials, the best are drawn."""
DECADES = 100.0
"""Positive values whose largest and smallest differ by more than this factor have a logarithmic axis."""
MAX_CHOICES = 12
"""Choices of a parameter that are labelled one by one."""
BLUE, GRAY, RED, DARK = "#3b6fb6", "#b5b9c0", "#c8473d", "#1c2b45"
UNUSED = -0.12
"""Height of a parameter that does not apply; the axis is from 0 to 1."""
_CURE = "pip install 'strata-runtime[plots]'"


def history(study: Study, objective: str | None, ax: Any) -> Any:
    index, name = _objective(study, objective)
    points = [(each, each.values[index]) for each in study.trials if each.values and each.values[index] is not None]
    finished = [(trial, value) for trial, value in points if trial.state == "finished"]
    _check_any(study, finished)
    ax = _axes(ax, (7, 4))
    groups = {
        "pruned": ([each for each in points if each[0].state == "pruned"], {"color": GRAY, "s": 14}),
        "violates a constraint": (
            [each for each in finished if not study.is_feasible(each[0])],
            {"facecolors": "none", "edgecolors": BLUE, "s": 22, "linewidths": 1},
        ),
        "finished": ([each for each in finished if study.is_feasible(each[0])], {"color": BLUE, "s": 22}),
    }
    for label, (found, style) in groups.items():
        if found:
            ax.scatter([trial.number for trial, _ in found], [value for _, value in found], label=label, **style)
    good = groups["finished"][0]
    if good:
        accumulate = np.minimum.accumulate if study.directions[index] == "min" else np.maximum.accumulate
        best = accumulate([float(value or 0.0) for _, value in good])
        numbers = [trial.number for trial, _ in good] + [len(study.trials) - 1]
        ax.step(numbers, [*best, best[-1]], where="post", color=DARK, linewidth=1.6, label="best so far")
    _scale(ax.set_yscale, [value for _, value in points])
    ax.set(title=f"{study.name}: history", xlabel="trial", ylabel=_label(study, index, name))
    return _finished(ax, has_legend=True)


def importances(study: Study, objective: str | None, ax: Any) -> Any:
    found = analysis.importances(study, objective)
    ax = _axes(ax, (7, max(1.6, 0.42 * len(found) + 1.1)))
    names, values = list(found)[::-1], list(found.values())[::-1]
    bars = ax.barh(names, values, color=BLUE, height=0.62)
    ax.bar_label(bars, [f"{each:.2f}" for each in values], padding=4, color=DARK)
    ax.set(title=f"{study.name}: importances", xlabel=f"importance for {objective or ' and '.join(study.metrics)}")
    ax.set_xlim(0, max(values) * 1.14)
    _finished(ax)
    ax.grid(visible=False, axis="y")
    return ax


def intermediate_values(study: Study, objective: str | None, ax: Any) -> Any:
    lines = require("matplotlib.collections", "this plot", _CURE)
    index, name = _objective(study, objective)
    curves = {
        trial.number: [(step, values[index]) for step, values in trial.series.points if values[index] is not None]
        for trial in study.trials
    }
    shown = [trial for trial in _best_first(study, index, study.trials) if curves[trial.number]][:MAX_LINES]
    _check_any(study, shown)
    ax = _axes(ax, (7, 4))
    styles: dict[str, dict[str, Any]] = {
        "pruned": {"colors": GRAY, "linewidths": 0.9},
        "failed": {"colors": RED, "linewidths": 0.9, "alpha": 0.7},
        "running": {"colors": BLUE, "linewidths": 0.9, "linestyles": "dashed"},
        "finished": {"colors": BLUE, "linewidths": 1.1, "alpha": 0.8},
    }
    for order, (state, style) in enumerate(styles.items(), start=2):
        found = [curves[trial.number] for trial in shown if _drawn_as(trial) == state]
        if found:
            ax.add_collection(lines.LineCollection(found, label=state, zorder=order, **style))
            ends = [curve[0] for curve in found if len(curve) == 1]  # a line needs two points
            if ends:
                ax.scatter(*zip(*ends, strict=True), s=9, color=style["colors"], zorder=order)
    best = next((trial for trial in shown if trial.state == "finished"), None)
    if best is not None:
        ax.plot(
            *zip(*curves[best.number], strict=True),
            color=DARK,
            linewidth=2.0,
            zorder=9,
            label=f"trial {best.number}, the best",
        )
    ax.autoscale_view()
    values = [value for trial in shown for _, value in curves[trial.number]]
    _scale(ax.set_yscale, [each for each in values if each is not None])
    ax.set(title=f"{study.name}: reports", xlabel="step", ylabel=_label(study, index, name))
    return _finished(ax, has_legend=True)


def parallel_coordinates(study: Study, objective: str | None, ax: Any) -> Any:
    lines = require("matplotlib.collections", "this plot", _CURE)
    colors = require("matplotlib.colors", "this plot", _CURE)
    cm = require("matplotlib.cm", "this plot", _CURE)
    index, name = _objective(study, objective)
    shown = _best_first(study, index, [each for each in study.trials if each.state == "finished"])[:MAX_LINES]
    _check_any(study, shown)
    parameters = {key: each for key, each in study.space.parameters.items() if each.num_values != 1}
    ax = _axes(ax, (max(5.0, 1.5 * len(parameters) + 2.5), 4.2))
    values = [float(each.values[index] or 0.0) for each in shown]
    low, high = min(values), max(values)
    is_log = low > 0 and high / low > DECADES
    norm = (colors.LogNorm if is_log else colors.Normalize)(low, high if high > low else low + 1.0)
    is_min = study.directions[index] == "min"
    scale = cm.ScalarMappable(norm, "viridis" if is_min else "viridis_r")  # the best are dark
    paths = [
        [(0.0, float(norm(value)))]
        + [
            (float(at), parameter.unit(trial.config[key]) if key in trial.config else UNUSED)
            for at, (key, parameter) in enumerate(parameters.items(), start=1)
        ]
        for trial, value in zip(shown, values, strict=True)
    ]
    paths, shades = paths[::-1], scale.to_rgba(values[::-1])  # the best on top
    widths = [1.1] * (len(paths) - 1) + [2.4]
    ax.add_collection(lines.LineCollection(paths, colors=shades, linewidths=widths, alpha=0.75))
    has_gaps = any(height < 0 for path in paths for _, height in path)
    bottom = UNUSED if has_gaps else 0.0
    for at, parameter in enumerate(parameters.values(), start=1):
        ax.axvline(at, color=DARK, linewidth=0.8, zorder=3)
        for height, text in _ticks(parameter):
            _tick(ax, at, height, text)
        if parameter.when and has_gaps:
            _tick(ax, at, bottom, "unused")
    ax.axvline(0, color=DARK, linewidth=0.8, zorder=3)
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        _tick(ax, 0, part, f"{norm.inverse(part):.3g}")
    ax.set(title=f"{study.name}: configurations", xlim=(-0.15, len(parameters) + 0.45), ylim=(bottom - 0.04, 1.04))
    ax.set_xticks(range(len(parameters) + 1), [name, *parameters])
    ax.tick_params(length=0)
    ax.set_yticks([])
    for side in ax.spines.values():
        side.set_visible(False)
    return ax


def pareto(study: Study, objectives: Sequence[str], ax: Any) -> Any:
    if len(study.metrics) < 2:
        raise ConfigError(f"study {study.name} has one objective, {study.metrics[0]}; a Pareto front needs two")
    names = tuple(objectives) or study.metrics[:2]
    if len(names) != 2:
        raise ConfigError(
            f"objectives={list(names)} must be two names of {', '.join(study.metrics)}", field="objectives"
        )
    x, y = (analysis.index_of(study, name) for name in names)
    finished = [each for each in study.trials if each.state == "finished"]
    _check_any(study, finished)
    feasible = [each for each in finished if study.is_feasible(each)]
    front = _front(study, feasible, x, y)
    numbers = {each.number for each in front}
    ax = _axes(ax, (6, 4.5))
    _scatter(ax, [each for each in feasible if each.number not in numbers], x, y, "dominated", color=GRAY, s=22)
    _scatter(
        ax,
        [each for each in finished if not study.is_feasible(each)],
        *(x, y, "violates a constraint"),
        facecolors="none",
        edgecolors=RED,
        s=22,
    )
    if front:
        where = "post" if study.directions[x] == study.directions[y] == "min" else "pre"
        if study.directions[x] == study.directions[y]:
            points = [(each.values[x], each.values[y]) for each in front]
            ax.step(*zip(*points, strict=True), where=where, color=BLUE, linewidth=1.2, alpha=0.6)
        _scatter(ax, front, x, y, "Pareto front", color=BLUE, s=34, zorder=4)
    for index, scale in ((x, ax.set_xscale), (y, ax.set_yscale)):
        _scale(scale, [each.values[index] for each in finished if each.values[index] is not None])
    ax.set(title=f"{study.name}: Pareto front", xlabel=_label(study, x, names[0]), ylabel=_label(study, y, names[1]))
    return _finished(ax, has_legend=True)


# -- parts -------------------------------------------------------------------------------------------------------------


def _axes(ax: Any, size: tuple[float, float]) -> Any:
    if ax is not None:
        return ax
    pyplot = require("matplotlib.pyplot", "a plot", _CURE)
    return pyplot.subplots(figsize=size, layout="constrained")[1]


def _finished(ax: Any, *, has_legend: bool = False) -> Any:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(visible=True, color="#e4e6ea", linewidth=0.7)
    ax.set_axisbelow(True)
    if has_legend and ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize="small")
    return ax


def _objective(study: Study, objective: str | None) -> tuple[int, str]:
    name = study.metrics[0] if objective is None else objective
    return analysis.index_of(study, name), name


def _label(study: Study, index: int, name: str) -> str:
    return f"{name} ({'lower' if study.directions[index] == 'min' else 'higher'} is better)"


def _check_any(study: Study, trials: Sequence[Any]) -> None:
    if not trials:
        raise RunFailed(f"no trial of study {study.name} has a result to plot")


def _scale(set_scale: Any, values: Sequence[Any]) -> None:
    if values and min(values) > 0 and max(values) / min(values) > DECADES:
        set_scale("log")


def _best_first(study: Study, index: int, trials: Iterable[Trial]) -> list[Trial]:
    sign = 1.0 if study.directions[index] == "min" else -1.0

    def key(trial: Trial) -> tuple[bool, float, int]:
        value = trial.values[index] if trial.values else None
        return trial.state != "finished", sign * value if value is not None else math.inf, trial.number

    return sorted(trials, key=key)


def _drawn_as(trial: Trial) -> str:
    return trial.state if trial.state in ("finished", "failed", "pruned") else "running"


def _ticks(parameter: Parameter) -> list[tuple[float, str]]:
    """Return the heights of labels on the axis of a parameter, and their texts."""
    num_values = parameter.num_values
    if num_values is not None and (isinstance(parameter, Choice) or num_values <= MAX_CHOICES):
        every = math.ceil(num_values / MAX_CHOICES)
        values = [parameter.value(each) for each in range(0, num_values, every)]
        return [(parameter.unit(each), _text(each)) for each in values]
    return [(part, _text(parameter.at(min(part, 1.0 - 2**-53)))) for part in (0.0, 0.25, 0.5, 0.75, 1.0)]


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)[:16]


def _tick(ax: Any, at: float, height: float, text: str) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8}
    ax.text(at + 0.04, height, text, va="center", fontsize="small", color=DARK, bbox=box, zorder=4)


def _scatter(ax: Any, trials: Sequence[Trial], x: int, y: int, label: str, **style: Any) -> None:
    if trials:
        ax.scatter([each.values[x] for each in trials], [each.values[y] for each in trials], label=label, **style)


def _front(study: Study, trials: Sequence[Trial], x: int, y: int) -> list[Trial]:
    """Return the trials that no other one dominates in two objectives, from the left to the right."""
    losses = {
        each.number: tuple(
            (value or 0.0) if study.directions[at] == "min" else -(value or 0.0)
            for at, value in ((x, each.values[x]), (y, each.values[y]))
        )
        for each in trials
    }
    best = math.inf
    front: list[Trial] = []
    for trial in sorted(trials, key=lambda each: losses[each.number]):
        if losses[trial.number][1] < best:
            front.append(trial)
            best = losses[trial.number][1]
    return sorted(front, key=lambda each: each.values[x] or 0.0)
