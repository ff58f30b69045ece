"""The display of a run while it is active: a live view on a terminal, plain lines anywhere else.

`render` draws a `RunView` and knows no clock; a `Display` decides when to draw. A display neither ends the run nor
delays it: it stops drawing to a closed terminal, and continues later on a stopped one.

States, metrics and messages come from users' programs, so control characters are removed: see `strata.printing`.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import stat
import sys
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TextIO, cast

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from strata.coordinator.state.server_figures import figures_of, number_of, total
from strata.identity import process_counts
from strata.launch.environment import METRICS
from strata.launch.record.timeline import hours, in_words
from strata.printing import counted, in_bytes, log_line, printable
from strata.terminal import Console

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import rich.console
    from rich.console import ConsoleOptions, RenderableType, RenderResult

    from strata.clock import Clock
    from strata.coordinator.state.server_figures import ServerFigures
    from strata.coordinator.state.views import WorkerInfo
    from strata.launch.record.timeline import RunEvent

REFRESH_S = 0.25
PROGRESS_S = 10.0
"""Interval between two progress lines, where nothing can be redrawn."""
MAX_PENDING_LINES = 10_000
"""Lines that wait for a slow reader; the oldest are dropped and counted."""
MAX_DRAWN = 100
"""Lines of workers printed above the live view at once; drawing takes time that the run needs."""
LAST_WAIT_S = 1.0
"""Longest wait for a reader at the end."""
MAX_WORKERS_SHOWN = 16
_MIN_SHOWN = 4
_OTHER_LINES = 8
"""Lines of the rest of the view, and a few above it, on a small terminal."""
SILENT_S = 3.0
"""Time without a heartbeat after which a worker is highlighted."""
FIRST_METRICS = ("loss", "rows_per_s")
"""Metrics that are shown first; the others follow by name, as far as there is room."""
_MAX_STATE = 14
_MIN_METRIC = 8
_MAX_METRIC_NAME = 12
_METRIC_WIDTH = _MAX_METRIC_NAME + 2
_OTHERS_WIDTH = 52
"""Width of all columns except the metrics."""
_LABEL = 12
_RANKS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")
_COLORS = {
    "running": "green",
    "done": "green",
    "training": "green",
    "serving": "green",
    "failed": "red",
    "error": "red",
    "dead": "red",
    "ending": "yellow",
    "stopping": "yellow",
    "waiting": "yellow",
    "checkpointing": "cyan",
    "recovering": "cyan",
}
_EVENT_COLORS = {
    "failed": "red",
    "cause": "red",
    "hung": "red",
    "ending": "yellow",
    "waiting": "yellow",
    "stopping": "yellow",
    "scaling": "yellow",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    rank: int
    state: str
    step: int
    epoch: int
    metrics: Mapping[str, float]
    silent_s: float
    server: int | None = None
    """Its number, if it is a parameter server."""
    figures: ServerFigures | None = None
    """What a server has measured."""

    @classmethod
    def of(cls, rank: int, worker: WorkerInfo) -> WorkerView:
        return cls(
            rank=rank,
            state=worker.state,
            step=worker.step,
            epoch=worker.epoch,
            metrics={name: value for name, value in worker.metrics.items() if not METRICS.is_ours(name)},
            silent_s=worker.silent_s,
            server=number_of(worker.metrics),
            figures=figures_of(worker.metrics),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    name: str
    phase: str
    attempt: int
    world_size: int
    """Processes, with the parameter servers."""
    num_restarts: int
    max_restarts: int
    elapsed_s: float
    workers: Sequence[WorkerView]
    checkpoint: str
    """Such as `step 50, 0.8 s ago; saving step 100, 40%`."""
    last_event: str
    directory: str
    num_servers: int = 0

    @property
    def trainers(self) -> list[WorkerView]:
        """The workers that train."""
        return [each for each in self.workers if each.server is None]

    @property
    def servers(self) -> list[WorkerView]:
        return [each for each in self.workers if each.server is not None]


# -- rendering ---------------------------------------------------------------------------------------------------------


def render(view: RunView) -> RenderableType:
    return _Rendered(view)


@dataclass(frozen=True, slots=True)
class _Rendered:
    view: RunView

    def __rich_console__(self, console: rich.console.Console, options: ConsoleOptions) -> RenderResult:
        yield _header(self.view)
        view = self.view
        room = max(console.height - _OTHER_LINES, _MIN_SHOWN) if console.is_terminal else MAX_WORKERS_SHOWN
        if view.servers:
            room = max((room - 1) // 2, _MIN_SHOWN)  # half of the lines, without another heading
        if view.trainers:
            yield _workers(view.trainers, options.max_width, max_shown=min(room, MAX_WORKERS_SHOWN))
        if view.servers:
            yield server_table(view.servers, max_shown=min(room, MAX_WORKERS_SHOWN))
        yield from _footer(self.view, options.max_width)


def _header(view: RunView) -> RenderableType:
    line = Table.grid(expand=True, padding=(0, 2, 0, 0))
    line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    line.add_column(no_wrap=True, justify="right")
    facts = Text(" · ").join(
        [
            _colored(view.phase),
            Text(_num_workers(view)),
            Text(_restarts(view), style="yellow" if view.num_restarts else ""),
            Text(hours(view.elapsed_s)),
        ]
    )
    line.add_row(Text(f"run {printable(view.name)}", style="bold"), facts)
    return line


def _workers(workers: Sequence[WorkerView], width: int, *, max_shown: int) -> Table:
    shown, folded = fold(workers, max_shown=max_shown)
    names = metric_names(workers, max_names=max((width - _OTHERS_WIDTH) // _METRIC_WIDTH, len(FIRST_METRICS)))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    # Minimum widths keep the columns in place when a state changes.
    for heading, min_width in (("rank", 4), ("state", 13), ("step", 8), ("epoch", 5)):
        justify: Literal["left", "right"] = "left" if heading == "state" else "right"
        table.add_column(heading, justify=justify, min_width=min_width, no_wrap=True)
    for name in names:
        table.add_column(_metric_heading(name), justify="right", min_width=_MIN_METRIC, no_wrap=True)
    table.add_column("silent", justify="right", min_width=8, no_wrap=True)
    slow = len(shown) // 2 if folded else len(shown)
    for worker in shown[:slow]:
        table.add_row(*_cells(worker, names))
    if folded:
        steps = [worker.step for worker in folded]
        span = str(min(steps)) if min(steps) == max(steps) else f"{min(steps)} – {max(steps)}"
        table.add_row("…", Text(f"{len(folded):,} more", style="dim"), Text(span, style="dim"))
    for worker in shown[slow:]:
        table.add_row(*_cells(worker, names))
    return table


def _cells(worker: WorkerView, names: Sequence[str]) -> list[Text]:
    return [
        Text(str(worker.rank)),
        _colored(worker.state),
        Text(str(worker.step)),
        Text(str(worker.epoch)),
        *(_metric(name, worker.metrics.get(name)) for name in names),
        _silence(worker.silent_s),
    ]


def server_table(servers: Sequence[WorkerView], *, max_shown: int = MAX_WORKERS_SHOWN) -> Table:
    """Return a line per parameter server, with the columns for which something was measured."""
    shown, folded = fold(servers, max_shown=max_shown)
    if not folded:
        shown = sorted(shown, key=lambda each: each.server or 0)  # an elastic job may give its ranks another order
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("server", justify="right", no_wrap=True)
    table.add_column("state", min_width=13, no_wrap=True)
    table.add_column("step", justify="right", min_width=4, no_wrap=True)
    cells = {each.rank: server_cells(each.figures) for each in servers}
    headings = [name for name in SERVER_HEADINGS if any(cells[each.rank].get(name) for each in servers)]
    for name in (*headings, "silent"):
        table.add_column(name, justify="right", no_wrap=True)
    slow = len(shown) // 2 if folded else len(shown)
    for place, each in enumerate(shown):
        if folded and place == slow:
            table.add_row("…", Text(f"{len(folded):,} more", style="dim"))
        own = (Text(cells[each.rank].get(name, "")) for name in headings)
        table.add_row(str(each.server), _colored(_state(each)), str(each.step), *own, _silence(each.silent_s))
    return table


def _state(server: WorkerView) -> str:
    """Return `serving` where a worker would be training."""
    return "serving" if server.state == "TRAINING" else server.state


SERVER_HEADINGS = ("rows", "memory", "pulls/s", "pushes/s", "stale", "hits", "evicted")


def server_cells(figures: ServerFigures | None) -> dict[str, str]:
    """Return the measured figures of a server, by heading."""
    if figures is None:
        return {}
    found = {"rows": f"{figures.rows:,}", "memory": in_bytes(figures.bytes)}
    rates = {"pulls/s": figures.pulls_per_s, "pushes/s": figures.pushes_per_s}
    found |= {name: f"{rate:,.1f}" for name, rate in rates.items() if rate is not None}
    if figures.staleness is not None:
        found["stale"] = str(figures.staleness)
    if figures.hit_rate is not None:
        found["hits"] = f"{figures.hit_rate:.1%}"
    if figures.evicted:
        found["evicted"] = f"{figures.evicted:,}"
    return found


def fold(
    workers: Sequence[WorkerView], *, max_shown: int = MAX_WORKERS_SHOWN
) -> tuple[list[WorkerView], list[WorkerView]]:
    """Return all workers by rank; or, if there are too many, the slowest and the fastest, and the rest.

    Among workers of the same step, a silent one counts as slower. For how long does not matter: lines that move all the
    time cannot be read.
    """
    if len(workers) <= max_shown:
        return sorted(workers, key=lambda worker: worker.rank), []
    ordered = sorted(workers, key=lambda worker: (worker.step, worker.silent_s <= SILENT_S, worker.rank))
    half = max_shown // 2
    return [*ordered[:half], *ordered[-half:]], ordered[half:-half]


def metric_names(workers: Sequence[WorkerView], *, max_names: int) -> list[str]:
    """Return the names of reported metrics."""
    known = {name for worker in workers for name in worker.metrics}
    first = [name for name in FIRST_METRICS if name in known]
    return [*first, *sorted(known.difference(first))][:max_names]


def _metric_heading(name: str) -> Text:
    return Text(printable("rows/s" if name == "rows_per_s" else name, max_chars=_MAX_METRIC_NAME))


def _metric(name: str, value: float | None) -> Text:
    if value is None:
        return Text("")
    if not math.isfinite(value):
        return Text(str(value), style="red")
    return Text(f"{value:,.0f}" if name == "rows_per_s" and abs(value) < 1e9 else f"{value:.4g}")


def _silence(silent_s: float) -> Text:
    if not math.isfinite(silent_s):
        return Text("never", style="dim")
    words = f"{silent_s:.1f} s" if silent_s < 100 else hours(silent_s)
    return Text(words, style="red" if silent_s > SILENT_S else "")


def _colored(state: str) -> Text:
    """Return a state such as `LOADING_DATA` as colored text: `loading data`."""
    words = printable(state, max_chars=_MAX_STATE).lower().replace("_", " ")
    return Text(words, style=_COLORS.get(words, ""))


def _num_workers(view: RunView) -> str:
    return process_counts(view.world_size, view.num_servers)


def _restarts(view: RunView) -> str:
    return f"{view.num_restarts} of {counted(view.max_restarts, 'restart')}"


def _footer(view: RunView, width: int) -> list[Text]:
    room = max(width - _LABEL, 1)
    path = printable(view.directory)
    if len(path) > room:
        path = f"…{path[len(path) - room + 1 :]}"  # its end is more specific than its start
    rows = [("checkpoint", printable(view.checkpoint)), ("last event", printable(view.last_event)), ("directory", path)]
    return [
        Text(no_wrap=True, overflow="ellipsis").append(f"{what:<{_LABEL}}", style="dim").append(text)
        for what, text in rows
        if text
    ]


# -- displays ----------------------------------------------------------------------------------------------------------


class Display(Protocol):
    def show(self, view: RunView) -> None:
        """Show the current view. May be called at any rate."""
        ...

    def print_event(self, event: RunEvent) -> None:
        """Show an event."""
        ...

    def write(self, rank: int | None, lines: list[str], *, name: str = "") -> None:
        """Show lines of a worker's log; `rank` is None if there is only one worker. `name` replaces the rank in the
        prefix of the lines.
        """
        ...

    def close(self) -> None:
        """Stop, and leave the last view on the screen. May be called twice."""
        ...


def display_for(stream: TextIO, clock: Clock, quiet: bool = False, output: TextIO | None = None) -> Display:
    """Return the display for a stream. The output of workers goes to `output`, or to stdout."""
    if output is None:
        output = sys.stdout if sys.stdout is not None else Path(os.devnull).open("w")  # noqa: SIM115
    if quiet:
        return SilentDisplay(output)
    # Do not ask rich: with FORCE_COLOR, it takes a log file for a terminal.
    if stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown"):
        return LiveDisplay(stream, clock, output)
    return PlainDisplay(stream, clock, output)


class SilentDisplay:
    """Show only the output of workers."""

    def __init__(self, output: TextIO) -> None:
        self._output = _Output(output)

    def show(self, view: RunView) -> None:
        pass

    def print_event(self, event: RunEvent) -> None:
        pass

    def write(self, rank: int | None, lines: list[str], *, name: str = "") -> None:
        self._output.write(rank, lines, name=name)

    def close(self) -> None:
        self._output.close()


class LiveDisplay:
    """Show the view at the bottom of the terminal, redrawn at most four times a second, and events above it.

    It draws in the caller's thread, so that the caller may fork.
    """

    def __init__(self, stream: TextIO, clock: Clock, output: TextIO) -> None:
        self._outlet = _Outlet(stream)
        self._console = _Steady(file=cast("TextIO", self._outlet))
        # Lines of workers scroll above the view, unless they go to a file.
        self._output = None if output.isatty() else _Output(output)
        self._clock = clock
        self._since_s = clock.wall_s()
        self._drawn_s = -math.inf
        self._view: RunView | None = None
        self._pending: deque[Text] = deque(maxlen=MAX_PENDING_LINES)
        # Text printed to stderr, such as a warning, goes above the view, too. Text for stdout may be for a program.
        is_ours = stream is sys.stderr
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=is_ours)
        self._is_open = True

    def show(self, view: RunView) -> None:
        # The last event is right above; do not show it twice.
        self._view = replace(view, last_event="")
        if self._clock.monotonic_s() - self._drawn_s >= REFRESH_S:
            self._draw()

    def print_event(self, event: RunEvent) -> None:
        if event.what == "checkpoint":  # frequent, and the view shows the last one
            return
        self._pending.append(Text(in_words(event, self._since_s), style=_EVENT_COLORS.get(event.what, "")))
        self._draw()

    def write(self, rank: int | None, lines: list[str], *, name: str = "") -> None:
        if self._output is not None:
            self._output.write(rank, lines, name=name)
            return
        prefix = ("" if rank is None else f"[{name or rank}] ", rank_style(rank or 0))
        omitted = lines[:-MAX_DRAWN]
        if omitted:
            self._pending.append(Text(_omitted(len(omitted)), style="dim"))
        self._pending += [
            Text.assemble(prefix, Text.from_ansi(log_line(line, with_colours=True))) for line in lines[-MAX_DRAWN:]
        ]
        self._draw()

    def close(self) -> None:
        self._draw()
        self._give_up()
        if self._output is not None:
            self._output.close()

    def _draw(self) -> None:
        if not self._is_open:
            return
        try:
            while self._pending and self._outlet.drain():
                self._console.print(self._pending.popleft(), soft_wrap=True)
            if self._view is not None and self._outlet.drain():
                self._live.update(render(self._view))
                self._live.start()
                self._live.refresh()
                self._drawn_s = self._clock.monotonic_s()
        except (OSError, ValueError):  # the terminal is closed
            self._give_up()

    def _give_up(self) -> None:
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(OSError, ValueError):
                self._live.stop()
            self._outlet.close()


class PlainDisplay:
    """Print a line for each event, and a progress line every ten seconds."""

    def __init__(self, stream: TextIO, clock: Clock, output: TextIO) -> None:
        self._lines = _Lines(stream)
        self._output = _Output(output)
        self._clock = clock
        self._since_s = clock.wall_s()
        self._printed_s = clock.monotonic_s()

    def show(self, view: RunView) -> None:
        now_s = self._clock.monotonic_s()
        is_due = now_s - self._printed_s >= PROGRESS_S
        if is_due:
            self._printed_s = now_s
        self._lines.put([f"{hours(view.elapsed_s):>10}  {progress(view)}"] if is_due else [])
        self._output.flush()

    def print_event(self, event: RunEvent) -> None:
        self._lines.put([in_words(event, self._since_s)])

    def write(self, rank: int | None, lines: list[str], *, name: str = "") -> None:
        self._output.write(rank, lines, name=name)

    def close(self) -> None:
        self._output.close()
        self._lines.close()


def describe_checkpoint(last: tuple[int, float] | None, saving: Sequence[tuple[int, float]]) -> str:
    """Describe the last checkpoint and the save in progress.

    Args:
        last: Step of the last checkpoint, and its age in seconds.
        saving: For every rank, the step that it is saving (below 0: none) and the completed fraction. The slowest rank
            counts.
    """
    parts = [] if last is None else [f"step {last[0]}, {max(last[1], 0.0):.1f} s ago"]
    newest = max((step for step, _ in saving), default=-1)
    if newest > (-1 if last is None else last[0]):  # reports are up to a second old: it may be done
        parts.append(f"saving step {newest}, {min(done for step, done in saving if step == newest):.0%}")
    return "; ".join(parts)


def progress(view: RunView) -> str:
    """Return `running: step 120 (rank 3: 118), loss 0.25, 8,000 rows/s, 4 workers, checkpoint step 100, 2.1 s ago`."""
    parts = []
    workers = view.trainers
    if workers:
        fastest = max(workers, key=lambda worker: (worker.step, -worker.rank))
        slowest = min(workers, key=lambda worker: (worker.step, worker.rank))
        behind = f" (rank {slowest.rank}: {slowest.step})" if slowest.step < fastest.step else ""
        parts.append(f"step {fastest.step}{behind}")
        losses = [worker.metrics["loss"] for worker in workers if "loss" in worker.metrics]
        if losses:
            parts.append(f"loss {sum(losses) / len(losses):.4g}")
        rates = [worker.metrics["rows_per_s"] for worker in workers if "rows_per_s" in worker.metrics]
        if rates:
            parts.append(f"{_metric('rows_per_s', sum(rates))} rows/s")
    figures = total(each.figures for each in view.servers if each.figures is not None)
    held = "" if figures is None else f" ({describe_servers(figures)})"
    parts.append(f"{_num_workers(view)}{held}")
    if view.num_restarts:
        parts.append(_restarts(view))
    if view.checkpoint:
        parts.append(f"checkpoint {printable(view.checkpoint)}")
    return f"{_colored(view.phase)}: {', '.join(parts)}"


def describe_servers(figures: ServerFigures) -> str:
    """Return `50,000 rows, 5.2 MiB, 120 pulls/s, hit rate 93.1%`."""
    cells = server_cells(figures)
    parts = [f"{cells['rows']} rows", cells["memory"]]
    if figures.pulls_per_s is not None:
        parts.append(f"{cells['pulls/s']} pulls/s")
    if figures.hit_rate is not None:
        parts.append(f"hit rate {cells['hits']}")
    return ", ".join(parts)


def rank_style(rank: int) -> str:
    """Return the color of a rank's lines."""
    return _RANKS[rank % len(_RANKS)]


def _omitted(number: int) -> str:
    return f"[strata: {counted(number, 'line')} omitted; `strata logs` shows all]"


class _Lines:
    """Lines for a stream whose reader may be slow or absent."""

    def __init__(self, stream: TextIO) -> None:
        self._outlet = _Outlet(stream)
        self._pending: deque[str] = deque()
        self._num_omitted = 0
        self._is_open = True

    def put(self, lines: Iterable[str]) -> None:
        if not self._is_open:
            return
        self._pending.extend(lines)
        try:
            while self._outlet.drain() and self._pending:
                if self._num_omitted:
                    self._pending.appendleft(_omitted(self._num_omitted))
                    self._num_omitted = 0
                self._outlet.write("".join(f"{self._pending.popleft()}\n" for _ in range(min(len(self._pending), 100))))
        except (OSError, ValueError):  # the reader is gone
            self._is_open = False
            self._outlet.close()
        while len(self._pending) > MAX_PENDING_LINES:
            self._pending.popleft()
            self._num_omitted += 1

    def close(self) -> None:
        self.put(())
        if self._is_open:
            self._is_open = False
            self._outlet.close()


class _Output:
    """The output of workers on stdout: each line with its rank and, on a terminal, its colors."""

    def __init__(self, stream: TextIO) -> None:
        self._lines = _Lines(stream)
        self._is_terminal = stream.isatty()

    def write(self, rank: int | None, lines: Iterable[str], *, name: str = "") -> None:
        prefix = "" if rank is None else f"[{name or rank}] "
        if prefix and self._is_terminal:
            prefix = typer.style(prefix, fg=rank_style(rank or 0))
        self._lines.put(f"{prefix}{log_line(line, with_colours=self._is_terminal)}" for line in lines)

    def flush(self) -> None:
        self._lines.put(())

    def close(self) -> None:
        self._lines.close()


class _Steady(Console):
    """A console that does not exit when a pipe breaks, as rich does: the run continues."""

    def on_broken_pipe(self) -> None:
        raise OSError("the reader is gone")


class _Outlet:
    """A stream that never waits for its reader: what does not fit is kept for the next call.

    A terminal that was stopped with Ctrl-S, or an idle pager, must not delay the agent.
    """

    def __init__(self, stream: TextIO) -> None:
        self.encoding = stream.encoding or "utf-8"
        self._stream = stream
        self._fd = _reopen(stream)
        """None: the stream cannot be opened without blocking, or is a file, which never blocks."""
        self._left = bytearray()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        self._left += text.encode(self.encoding, errors="backslashreplace")
        return len(text)

    def flush(self) -> None:
        self.drain()

    def drain(self) -> bool:
        """Write what is left; return whether everything is written."""
        if self._fd is None:
            text = self._left.decode(self.encoding)
            self._left.clear()
            self._stream.write(text)
            self._stream.flush()
        while self._left and self._fd is not None:
            try:
                num_bytes = os.write(self._fd, self._left)
            except BlockingIOError:
                return False
            del self._left[:num_bytes]
        return True

    def close(self) -> None:
        """Write what is left, if the reader takes it soon."""
        with contextlib.suppress(OSError, ValueError):
            poll = select.poll()
            while not self.drain() and self._fd is not None:
                poll.register(self._fd, select.POLLOUT)
                if not poll.poll(LAST_WAIT_S * 1_000):
                    break
        self._left.clear()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _reopen(stream: TextIO) -> int | None:
    """Open the same terminal or pipe again: otherwise all its users would share the non-blocking mode."""
    try:
        fd = stream.fileno()
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISFIFO(mode) or os.isatty(fd)):
            return None
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, ValueError):  # not a file, or one that cannot be opened again
        return None
