"""The display of a study while it runs: a live table on a terminal, plain lines anywhere else.

`render` draws a `StudyView`, which is computed from the state of the study. A `StudyDisplay` observes the facts of a
study, and decides when to draw; it draws on the driver's thread, between two events, so no lock is needed. Names,
values and reasons come from users' programs, so control characters are removed: see `strata.printing`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from rich.table import Table
from rich.text import Text

from strata.clock import SystemClock
from strata.launch.record.screen import REFRESH_S, Lines, Screen, can_draw
from strata.launch.record.timeline import hours, in_words
from strata.printing import counted, printable
from strata.tune.snapshot import TrialSnapshot, leading, series, snapshot, trial_snapshot
from strata.tune.timeline import config_in_words, event_of, number_in_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import rich.console
    from rich.console import ConsoleOptions, RenderableType, RenderResult

    from strata.clock import Clock
    from strata.tune.search import Search
    from strata.tune.snapshot import StudySnapshot
    from strata.tune.state.events import Event
    from strata.tune.state.study import StudyState

PROGRESS_S = 10.0
"""Interval between two progress lines, where nothing can be redrawn."""
MAX_RUNNING_SHOWN = 16
_MIN_SHOWN = 3
_OTHER_LINES = 10
"""Lines of the rest of the view, and a few above it."""
NUM_FAILURES = 3
"""Failures that are shown with their reasons, the last ones."""
TREND_WIDTH = 20
MAX_LOAD = 0.05
"""Largest share of the driver's time for drawing; a study of 100,000 trials is drawn less often."""
_MAX_METRIC_NAME = 12
_LABEL = 12
_BARS = "▁▂▃▄▅▆▇█"
_COLORS = {
    "best": "bold green",
    "failed": "red",
    "retried": "yellow",
    "lost": "yellow",
    "expired": "yellow",
    "stopping": "yellow",
    "running": "green",
    "done": "green",
}
_LIVE = frozenset({"best", "failed", "retried", "lost", "expired", "continued", "stopping"})
"""Events that are printed above a live table; it shows the others itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyView:
    study: StudySnapshot
    best: TrialSnapshot | None
    """The best finished trial, or the best of the others before there is one."""
    running: Sequence[tuple[TrialSnapshot, Sequence[float | None]]]
    """Trials and their reports of the first objective."""
    failures: Sequence[TrialSnapshot]
    directory: str
    is_running: bool = True
    """Otherwise it has ended or was interrupted."""


def view_of(state: StudyState, directory: str, *, now_s: float, is_running: bool = True) -> StudyView:
    metric = state.spec.metrics[0]
    found = leading(state)
    failed = sorted(
        (each for each in state.trials.values() if each.state == "failed"), key=lambda each: each.ended_s or 0.0
    )
    return StudyView(
        study=snapshot(state, now_s=now_s if is_running else None),
        best=None if found is None else trial_snapshot(state, found, now_s=now_s),
        running=[
            (trial_snapshot(state, each, now_s=now_s), series(state, each.number).values[metric])
            for each in (state.running if is_running else ())
        ],
        failures=[trial_snapshot(state, each) for each in failed[-NUM_FAILURES:]],
        directory=directory,
        is_running=is_running,
    )


# -- rendering ---------------------------------------------------------------------------------------------------------


def render(view: StudyView) -> RenderableType:
    return _Rendered(view)


@dataclass(frozen=True, slots=True)
class _Rendered:
    view: StudyView

    def __rich_console__(self, console: rich.console.Console, options: ConsoleOptions) -> RenderResult:
        view = self.view
        room = max(console.height - _OTHER_LINES, _MIN_SHOWN) if console.is_terminal else MAX_RUNNING_SHOWN
        yield _header(view)
        if view.running:
            yield _running(view, max_shown=min(room, MAX_RUNNING_SHOWN))
        yield from _footer(view, options.max_width)


def _header(view: StudyView) -> RenderableType:
    study = view.study
    line = Table.grid(expand=True, padding=(0, 2, 0, 0))
    line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    line.add_column(no_wrap=True, justify="right")
    state = _state(view)
    parts = [Text(state, style=_COLORS.get(state, "yellow")), Text(_num_ended(study)), Text(hours(study.active_s))]
    if study.left_s is not None:
        parts.append(Text(f"about {hours(study.left_s)} left"))
    line.add_row(
        Text.assemble((f"study {printable(study.name)}", "bold"), f" · {printable(study.mode)}"),
        Text(" · ").join(parts),
    )
    return line


def _state(view: StudyView) -> str:
    if view.study.is_ended or not view.is_running:
        return "done" if view.study.is_complete else "stopped"
    return "stopping" if view.study.reason else "running"


def _num_ended(study: StudySnapshot) -> str:
    num_ended = sum(study.counts[each] for each in ("finished", "pruned", "failed"))
    return f"{num_ended:,} of {counted(study.num_trials, 'trial')}"


def _running(view: StudyView, *, max_shown: int) -> Table:
    metric = view.study.metrics[0]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    # Minimum widths keep the columns in place when a value changes.
    for heading, min_width in (("trial", 5), ("step", 6), (printable(metric, max_chars=_MAX_METRIC_NAME), 9)):
        table.add_column(Text(heading), justify="right", min_width=min_width, no_wrap=True)
    table.add_column("trend", min_width=TREND_WIDTH, no_wrap=True)
    table.add_column("time", justify="right", min_width=7, no_wrap=True)
    table.add_column("configuration", no_wrap=True, overflow="ellipsis")
    for trial, values in view.running[:max_shown]:
        table.add_row(
            Text(str(trial.number)),
            Text("" if trial.step is None else str(trial.step)),
            Text("" if not trial.values else number_in_words(trial.values[metric])),
            Text(sparkline(values, TREND_WIDTH), style="cyan"),
            Text("" if trial.duration_s is None else hours(trial.duration_s)),
            Text(config_in_words(trial.config)),
        )
    if len(view.running) > max_shown:
        table.add_row("…", Text(f"{len(view.running) - max_shown:,} more", style="dim"))
    return table


def _footer(view: StudyView, width: int) -> Iterator[Text]:
    study, best = view.study, view.best
    if best is not None:
        metric = study.metrics[0]
        value = best.values[metric] if best.state == "finished" else best.best
        where = "" if best.state == "finished" else f", {best.state}"
        text = f"trial {best.number}{where}: {metric} {number_in_words(value)}, {config_in_words(best.config)}"
        yield _row("best so far", text, style=_COLORS["best"])
    shown = [f"{number:,} {state}" for state, number in study.counts.items() if number and state != "running"]
    if shown:
        yield _row("trials", " · ".join(shown))
    for each in view.failures:
        yield _row("failed", f"trial {each.number}: {' '.join(each.reason.split())}", style=_COLORS["failed"])
    path, room = printable(view.directory), max(width - _LABEL, 1)
    # the end of a path is more specific than its start
    yield _row("directory", path if len(path) <= room else f"…{path[len(path) - room + 1 :]}")


def _row(label: str, text: str, *, style: str = "") -> Text:
    return (
        Text(no_wrap=True, overflow="ellipsis").append(f"{label:<{_LABEL}}", style="dim").append(printable(text), style)
    )


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return values as bars, the last one at the right; of several that share a bar, the last one counts."""
    known = [each for each in values if each is not None]
    if not known:
        return ""
    num_bars = min(len(values), width)
    chosen = [values[(place + 1) * len(values) // num_bars - 1] for place in range(num_bars)]
    low, high = min(known), max(known)
    # Halves, because the difference of two large numbers may be infinite; the half of the smallest number is 0.
    span = (high / 2 - low / 2) or 1.0
    heights = [None if each is None else (each / 2 - low / 2) / span for each in chosen]
    return "".join(" " if each is None else _BARS[round(each * (len(_BARS) - 1))] for each in heights)


def progress(view: StudyView) -> str:
    """Return `running: 12 of 100 trials, 2 running, 1 failed, best loss 0.031 (trial 7), about 0:02:30 left`."""
    study = view.study
    parts = [_num_ended(study)]
    parts += [f"{study.counts[each]:,} {each}" for each in ("running", "paused", "failed") if study.counts[each]]
    if view.best is not None:
        value = number_in_words(view.best.best)
        parts.append(f"best {printable(study.metrics[0])} {value} (trial {view.best.number})")
    if study.left_s is not None:
        parts.append(f"about {hours(study.left_s)} left")
    return f"{_state(view)}: {', '.join(parts)}"


# -- display -----------------------------------------------------------------------------------------------------------


class StudyDisplay:
    """Shows a study: `follow` it, then `close`. Belongs to the thread of the study's driver."""

    def __init__(self, directory: str, stream: TextIO, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock
        self._screen = Screen(stream, clock) if can_draw(stream) else None
        self._lines = Lines(stream) if self._screen is None else None
        self._state: StudyState | None = None
        self._since_s = clock.wall_s()
        self._next_s = 0.0
        self._progress_s = clock.monotonic_s() + PROGRESS_S
        self._timer: asyncio.TimerHandle | None = None

    def follow(self, search: Search) -> None:
        self._state = search.state
        self._since_s = self._clock.wall_s() - self._state.times.active_s
        search.observers.append(self.note)

    def note(self, facts: Sequence[Event]) -> None:
        """Show what has just happened."""
        assert self._state is not None
        events = [event for fact in facts if (event := event_of(fact, self._state)) is not None]
        if self._lines is not None and events:
            self._lines.put(in_words(event, self._since_s) for event in events)
        if self._screen is not None and (shown := [event for event in events if event.what in _LIVE]):
            self._draw()  # the table below a line must not contradict it
            self._screen.put(Text(in_words(each, self._since_s), style=_COLORS.get(each.what, "")) for each in shown)
        if self._timer is None:
            self._tick()

    def _tick(self) -> None:
        """Draw now and then, also while nothing happens."""
        self._draw()
        with contextlib.suppress(RuntimeError):  # before the driver's event loop runs
            loop = asyncio.get_running_loop()
            delay_s = max(self._next_s - self._clock.monotonic_s(), REFRESH_S)
            self._timer = loop.call_later(delay_s, self._tick)

    def _draw(self, *, is_last: bool = False) -> None:
        now_s = self._clock.monotonic_s()
        if self._state is None or (self._screen is None and now_s < self._progress_s):
            return
        view = view_of(self._state, self._directory, now_s=self._clock.wall_s(), is_running=not is_last)
        if self._screen is not None:
            self._screen.show(render(view))
        elif self._lines is not None:
            self._progress_s = now_s + PROGRESS_S
            self._lines.put([f"{hours(view.study.active_s):>10}  {progress(view)}"])
        took_s = self._clock.monotonic_s() - now_s
        self._next_s = now_s + took_s / MAX_LOAD

    def close(self) -> None:
        """Leave the last table on the screen."""
        if self._timer is not None:
            self._timer.cancel()
        if self._screen is not None:
            self._draw(is_last=True)
            self._screen.close()
        if self._lines is not None:
            self._lines.close()


class Silence:
    """Shows nothing."""

    def follow(self, search: Search) -> None:
        pass

    def close(self) -> None:
        pass


@contextlib.contextmanager
def shown(directory: Path, *, quiet: bool, stream: TextIO | None = None) -> Iterator[StudyDisplay | Silence]:
    """Show a study on stderr while it runs."""
    stream = sys.stderr if stream is None else stream
    if quiet or stream is None:  # a program without a terminal
        yield Silence()
        return
    display = StudyDisplay(str(directory), stream, SystemClock())
    try:
        yield display
    finally:
        display.close()
