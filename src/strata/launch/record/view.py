"""What people see of a run while it runs: a live view on a terminal, plain lines anywhere else.

`render` makes the picture out of a `RunView` and knows no clock; a `Display` decides when it is drawn. None of them may
end the run or hold it up: a terminal that was closed is shown nothing from then on, and one that is stopped is shown it
later.

States, metrics and messages come from users' programs. They are printed, never obeyed: see `strata.printing`.
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

from strata.launch.record.timeline import hours, in_words
from strata.printing import counted, log_line, printable
from strata.terminal import Console

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import rich.console
    from rich.console import ConsoleOptions, RenderableType, RenderResult

    from strata.clock import Clock
    from strata.launch.record.timeline import RunEvent

REFRESH_S = 0.25
PROGRESS_S = 10.0
"""Between two lines that say how far a run is, where nothing can be drawn over."""
MAX_UNSAID = 10_000
"""Lines that wait for somebody to read; of more, the oldest are dropped, and counted."""
MAX_DRAWN = 100
"""Lines of workers that are printed above the live view in one go; drawing takes time that the run needs."""
LAST_WAIT_S = 1.0
"""For somebody to read the end."""
MAX_WORKERS_SHOWN = 16
_MIN_SHOWN = 4
_OTHER_LINES = 8
"""Of the view, and a few above it, on a terminal that is not high."""
SILENT_S = 3.0
"""A worker that was not heard of for longer is remarkable."""
FIRST_METRICS = ("loss", "rows_per_s")
"""What people look for; the others follow by name, as far as there is room."""
_MAX_STATE = 14
_MIN_METRIC = 8
_MAX_METRIC_NAME = 12
_METRIC_WIDTH = _MAX_METRIC_NAME + 2
_OTHERS_WIDTH = 52
"""Columns that all but the metrics take."""
_LABEL = 12
_RANKS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")
_COLOURS = {
    "running": "green",
    "done": "green",
    "training": "green",
    "failed": "red",
    "error": "red",
    "dead": "red",
    "ending": "yellow",
    "stopping": "yellow",
    "waiting": "yellow",
    "checkpointing": "cyan",
    "recovering": "cyan",
}
_EVENT_COLOURS = {
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    name: str
    phase: str
    attempt: int
    world_size: int
    num_restarts: int
    max_restarts: int
    elapsed_s: float
    workers: Sequence[WorkerView]
    checkpoint: str
    """As `step 50, 0.8 s ago; step 100 is being saved, 40%`."""
    last_event: str
    directory: str


# -- the picture -------------------------------------------------------------------------------------------------------


def render(view: RunView) -> RenderableType:
    return _Picture(view)


@dataclass(frozen=True, slots=True)
class _Picture:
    view: RunView

    def __rich_console__(self, console: rich.console.Console, options: ConsoleOptions) -> RenderResult:
        yield _header(self.view)
        if self.view.workers:
            room = max(console.height - _OTHER_LINES, _MIN_SHOWN) if console.is_terminal else MAX_WORKERS_SHOWN
            yield _workers(self.view, options.max_width, max_shown=min(room, MAX_WORKERS_SHOWN))
        yield from _footer(self.view, options.max_width)


def _header(view: RunView) -> RenderableType:
    line = Table.grid(expand=True, padding=(0, 2, 0, 0))
    line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    line.add_column(no_wrap=True, justify="right")
    facts = Text(" · ").join(
        [
            _coloured(view.phase),
            Text(_num_workers(view)),
            Text(_restarts(view), style="yellow" if view.num_restarts else ""),
            Text(hours(view.elapsed_s)),
        ]
    )
    line.add_row(Text(f"run {printable(view.name)}", style="bold"), facts)
    return line


def _workers(view: RunView, width: int, *, max_shown: int) -> Table:
    shown, folded = folding(view.workers, max_shown=max_shown)
    names = metric_names(view.workers, max_names=max((width - _OTHERS_WIDTH) // _METRIC_WIDTH, len(FIRST_METRICS)))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    # With the least widths, columns stay where they are when a worker does something else.
    for heading, min_width in (("rank", 4), ("state", 13), ("step", 8), ("epoch", 5)):
        justify: Literal["left", "right"] = "left" if heading == "state" else "right"
        table.add_column(heading, justify=justify, min_width=min_width, no_wrap=True)
    for name in names:
        table.add_column(_metric_heading(name), justify="right", min_width=_MIN_METRIC, no_wrap=True)
    table.add_column("heard of", justify="right", min_width=8, no_wrap=True)
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
        _coloured(worker.state),
        Text(str(worker.step)),
        Text(str(worker.epoch)),
        *(_metric(name, worker.metrics.get(name)) for name in names),
        _silence(worker.silent_s),
    ]


def folding(
    workers: Sequence[WorkerView], *, max_shown: int = MAX_WORKERS_SHOWN
) -> tuple[list[WorkerView], list[WorkerView]]:
    """All of them by rank; or, of too many, half of the lines for the slowest and half for the fastest, and the rest.

    Among those of the same step, one that has fallen silent is slower. How long it is silent does not count: lines
    that change places all the time cannot be read.
    """
    if len(workers) <= max_shown:
        return sorted(workers, key=lambda worker: worker.rank), []
    ordered = sorted(workers, key=lambda worker: (worker.step, worker.silent_s <= SILENT_S, worker.rank))
    half = max_shown // 2
    return [*ordered[:half], *ordered[-half:]], ordered[half:-half]


def metric_names(workers: Sequence[WorkerView], *, max_names: int) -> list[str]:
    """Those that some worker reports."""
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


def _coloured(state: str) -> Text:
    """`LOADING_DATA` reads better as `loading data`."""
    words = printable(state, max_chars=_MAX_STATE).lower().replace("_", " ")
    return Text(words, style=_COLOURS.get(words, ""))


def _num_workers(view: RunView) -> str:
    return counted(view.world_size, "worker")


def _restarts(view: RunView) -> str:
    return f"{view.num_restarts} of {counted(view.max_restarts, 'restart')}"


def _footer(view: RunView, width: int) -> list[Text]:
    room = max(width - _LABEL, 1)
    path = printable(view.directory)
    if len(path) > room:
        path = f"…{path[len(path) - room + 1 :]}"  # its end says more than its start
    told = [("checkpoint", printable(view.checkpoint)), ("last event", printable(view.last_event)), ("directory", path)]
    return [
        Text(no_wrap=True, overflow="ellipsis").append(f"{what:<{_LABEL}}", style="dim").append(text)
        for what, text in told
        if text
    ]


# -- showers -----------------------------------------------------------------------------------------------------------


class Display(Protocol):
    def show(self, view: RunView) -> None:
        """How it stands; may be called as often as one likes."""
        ...

    def print_event(self, event: RunEvent) -> None:
        """Something has happened."""
        ...

    def write(self, rank: int | None, lines: list[str]) -> None:
        """Lines that a worker has written, as they are in its log; without a rank where there is only one worker."""
        ...

    def close(self) -> None:
        """Nothing is shown any more; the last view stays. May be called twice."""
        ...


def display_for(stream: TextIO, clock: Clock, quiet: bool = False, output: TextIO | None = None) -> Display:
    """Who can show a run there. What workers write goes to `output`, or to stdout."""
    if output is None:
        output = sys.stdout if sys.stdout is not None else Path(os.devnull).open("w")  # noqa: SIM115
    if quiet:
        return SilentDisplay(output)
    # Not rich's own opinion: FORCE_COLOR makes it take a log file for a terminal.
    if stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown"):
        return LiveDisplay(stream, clock, output)
    return PlainDisplay(stream, clock, output)


class SilentDisplay:
    """Shows nothing but what workers write, and that only if somebody hands it over."""

    def __init__(self, output: TextIO) -> None:
        self._output = _Output(output)

    def show(self, view: RunView) -> None:
        pass

    def print_event(self, event: RunEvent) -> None:
        pass

    def write(self, rank: int | None, lines: list[str]) -> None:
        self._output.write(rank, lines)

    def close(self) -> None:
        self._output.close()


class LiveDisplay:
    """The view at the bottom of the terminal, drawn over at most four times a second, and above it what happened.

    It draws when it is called, by no thread of its own, so that who calls it may fork.
    """

    def __init__(self, stream: TextIO, clock: Clock, output: TextIO) -> None:
        self._outlet = _Outlet(stream)
        self._console = _Steady(file=cast("TextIO", self._outlet))
        # Workers' lines scroll above the view, unless they go elsewhere.
        self._output = None if output.isatty() else _Output(output)
        self._clock = clock
        self._since_s = clock.wall_s()
        self._drawn_s = -math.inf
        self._view: RunView | None = None
        self._unsaid: deque[Text] = deque(maxlen=MAX_UNSAID)
        # What is printed to stderr meanwhile, as by a warning, goes above the view, too. What goes to stdout may be
        # for a program.
        is_ours = stream is sys.stderr
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=is_ours)
        self._is_open = True

    def show(self, view: RunView) -> None:
        # Events stand right above; the last one need not stand there twice.
        self._view = replace(view, last_event="")
        if self._clock.monotonic_s() - self._drawn_s >= REFRESH_S:
            self._draw()

    def print_event(self, event: RunEvent) -> None:
        if event.what == "checkpoint":  # of which there are many; the view shows the last
            return
        self._unsaid.append(Text(in_words(event, self._since_s), style=_EVENT_COLOURS.get(event.what, "")))
        self._draw()

    def write(self, rank: int | None, lines: list[str]) -> None:
        if self._output is not None:
            self._output.write(rank, lines)
            return
        prefix = ("" if rank is None else f"[{rank}] ", rank_style(rank or 0))
        left_out = lines[:-MAX_DRAWN]
        if left_out:
            self._unsaid.append(Text(_left_out(len(left_out)), style="dim"))
        self._unsaid += [
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
            while self._unsaid and self._outlet.drain():
                self._console.print(self._unsaid.popleft(), soft_wrap=True)
            if self._view is not None and self._outlet.drain():
                self._live.update(render(self._view))
                self._live.start()
                self._live.refresh()
                self._drawn_s = self._clock.monotonic_s()
        except (OSError, ValueError):  # nobody looks any more
            self._give_up()

    def _give_up(self) -> None:
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(OSError, ValueError):
                self._live.stop()
            self._outlet.close()


class PlainDisplay:
    """A line for each event, and every ten seconds one that says how far the run is."""

    def __init__(self, stream: TextIO, clock: Clock, output: TextIO) -> None:
        self._lines = _Lines(stream)
        self._output = _Output(output)
        self._clock = clock
        self._since_s = clock.wall_s()
        self._told_s = clock.monotonic_s()

    def show(self, view: RunView) -> None:
        now_s = self._clock.monotonic_s()
        is_due = now_s - self._told_s >= PROGRESS_S
        if is_due:
            self._told_s = now_s
        self._lines.put([f"{hours(view.elapsed_s):>10}  {progress(view)}"] if is_due else [])
        self._output.flush()

    def print_event(self, event: RunEvent) -> None:
        self._lines.put([in_words(event, self._since_s)])

    def write(self, rank: int | None, lines: list[str]) -> None:
        self._output.write(rank, lines)

    def close(self) -> None:
        self._output.close()
        self._lines.close()


def describe_checkpoint(last: tuple[int, float] | None, saving: Sequence[tuple[int, float]]) -> str:
    """Of the last one its step and its age in seconds; and, for every rank, the step that it is saving (below 0: none)
    and how much of that is done. The slowest rank says how far a checkpoint is.
    """
    told = [] if last is None else [f"step {last[0]}, {max(last[1], 0.0):.1f} s ago"]
    newest = max((step for step, _ in saving), default=-1)
    if newest > (-1 if last is None else last[0]):  # what ranks say is up to a second old: it may be done
        told.append(f"step {newest} is being saved, {min(done for step, done in saving if step == newest):.0%}")
    return "; ".join(told)


def progress(view: RunView) -> str:
    """`running: step 120 (rank 3: 118), loss 0.25, 8,000 rows/s, 4 workers, checkpoint step 100, 2.1 s ago`."""
    told = []
    if view.workers:
        fastest = max(view.workers, key=lambda worker: (worker.step, -worker.rank))
        slowest = min(view.workers, key=lambda worker: (worker.step, worker.rank))
        behind = f" (rank {slowest.rank}: {slowest.step})" if slowest.step < fastest.step else ""
        told.append(f"step {fastest.step}{behind}")
        losses = [worker.metrics["loss"] for worker in view.workers if "loss" in worker.metrics]
        if losses:
            told.append(f"loss {sum(losses) / len(losses):.4g}")
        rates = [worker.metrics["rows_per_s"] for worker in view.workers if "rows_per_s" in worker.metrics]
        if rates:
            told.append(f"{_metric('rows_per_s', sum(rates))} rows/s")
    told.append(_num_workers(view))
    if view.num_restarts:
        told.append(_restarts(view))
    if view.checkpoint:
        told.append(f"checkpoint {printable(view.checkpoint)}")
    return f"{_coloured(view.phase)}: {', '.join(told)}"


def rank_style(rank: int) -> str:
    """The colour of a rank's lines."""
    return _RANKS[rank % len(_RANKS)]


def _left_out(number: int) -> str:
    return f"[strata: {counted(number, 'line is', 'lines are')} left out here; `strata logs` shows all]"


class _Lines:
    """Lines to a stream that may be read slowly, or not at all."""

    def __init__(self, stream: TextIO) -> None:
        self._outlet = _Outlet(stream)
        self._unsaid: deque[str] = deque()
        self._num_left_out = 0
        self._is_open = True

    def put(self, lines: Iterable[str]) -> None:
        if not self._is_open:
            return
        self._unsaid.extend(lines)
        try:
            while self._outlet.drain() and self._unsaid:
                if self._num_left_out:
                    self._unsaid.appendleft(_left_out(self._num_left_out))
                    self._num_left_out = 0
                self._outlet.write("".join(f"{self._unsaid.popleft()}\n" for _ in range(min(len(self._unsaid), 100))))
        except (OSError, ValueError):  # nobody reads any more
            self._is_open = False
            self._outlet.close()
        while len(self._unsaid) > MAX_UNSAID:
            self._unsaid.popleft()
            self._num_left_out += 1

    def close(self) -> None:
        self.put(())
        if self._is_open:
            self._is_open = False
            self._outlet.close()


class _Output:
    """What workers write, on the way to stdout: each line with its rank, and on a terminal with its colours."""

    def __init__(self, stream: TextIO) -> None:
        self._lines = _Lines(stream)
        self._is_terminal = stream.isatty()

    def write(self, rank: int | None, lines: Iterable[str]) -> None:
        prefix = "" if rank is None else f"[{rank}] "
        if prefix and self._is_terminal:
            prefix = typer.style(prefix, fg=rank_style(rank or 0))
        self._lines.put(f"{prefix}{log_line(line, with_colours=self._is_terminal)}" for line in lines)

    def flush(self) -> None:
        self._lines.put(())

    def close(self) -> None:
        self._lines.close()


class _Steady(Console):
    """Rich ends the process when a pipe breaks; a run goes on."""

    def on_broken_pipe(self) -> None:
        raise OSError("nobody reads it any more")


class _Outlet:
    """A stream that never waits for who reads it: what does not fit now is kept, and goes out with the next call.

    A terminal that was stopped with Ctrl-S, or a pager that nobody scrolls, must not hold up who watches the workers.
    """

    def __init__(self, stream: TextIO) -> None:
        self.encoding = stream.encoding or "utf-8"
        self._stream = stream
        self._fd = _reopened(stream)
        """None: the stream cannot be had without waiting; or, as a file, is never waited for."""
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
        """Whether all that was written is out."""
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
        """What is left goes out now, if somebody reads it soon."""
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


def _reopened(stream: TextIO) -> int | None:
    """The same terminal or pipe, opened once more: not to wait is a property that all who have it open would share."""
    try:
        fd = stream.fileno()
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISFIFO(mode) or os.isatty(fd)):
            return None
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, ValueError):  # no file at all, or one that may not be opened again
        return None
