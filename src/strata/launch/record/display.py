"""The displays of a run while it is active: a live view on a terminal, plain lines anywhere else.

A display decides when to draw a `RunView`. It neither ends the run nor delays it: it stops drawing to a closed
terminal, and continues later on a stopped one.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import stat
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO, cast

import typer
from rich.live import Live
from rich.text import Text

from strata.launch.record.timeline import hours, in_words
from strata.launch.record.view import progress, rank_style, render
from strata.printing import counted, log_line
from strata.terminal import Console

if TYPE_CHECKING:
    from collections.abc import Iterable

    from strata.clock import Clock
    from strata.launch.record.timeline import RunEvent
    from strata.launch.record.view import RunView

REFRESH_S = 0.25
PROGRESS_S = 10.0
"""Interval between two progress lines, where nothing can be redrawn."""
MAX_PENDING_LINES = 10_000
"""Lines that wait for a slow reader; the oldest are dropped and counted."""
MAX_DRAWN = 100
"""Lines of workers printed above the live view at once; drawing takes time that the run needs."""
LAST_WAIT_S = 1.0
"""Longest wait for a reader at the end."""
_EVENT_COLORS = {
    "failed": "red",
    "cause": "red",
    "hung": "red",
    "ending": "yellow",
    "waiting": "yellow",
    "stopping": "yellow",
    "scaling": "yellow",
}


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
