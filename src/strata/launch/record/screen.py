"""What draws on a terminal or prints to a pipe while a program runs, and never delays that program.

`Screen` keeps a view at the bottom of a terminal, with lines above it; `Lines` prints lines anywhere else. A reader
that is slow, stopped with Ctrl-S or gone costs lines of the display, and no time. The views themselves are elsewhere.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import stat
import sys
from collections import deque
from typing import TYPE_CHECKING, TextIO, cast

import typer
from rich.live import Live

from strata.printing import counted, log_line
from strata.terminal import Console

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType
    from rich.text import Text

    from strata.clock import Clock

REFRESH_S = 0.25
MAX_PENDING_LINES = 10_000
"""Lines that wait for a slow reader; the oldest are dropped and counted."""
LAST_WAIT_S = 1.0
"""Longest wait for a reader at the end."""
_RANKS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")


def can_draw(stream: TextIO) -> bool:
    """Return whether a view can be drawn on this stream. Rich takes a log file for a terminal with FORCE_COLOR."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


class Screen:
    """A view at the bottom of a terminal, redrawn at most four times a second, and lines above it.

    It draws in the caller's thread, so that the caller may fork.
    """

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        self._outlet = _Outlet(stream)
        self._console = _Steady(file=cast("TextIO", self._outlet))
        self._clock = clock
        self._drawn_s = -math.inf
        self._view: RenderableType | None = None
        self._pending: deque[Text] = deque(maxlen=MAX_PENDING_LINES)
        # Text printed to stderr, such as a warning, goes above the view, too. Text for stdout may be for a program.
        is_ours = stream is sys.stderr
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=is_ours)
        self._is_open = True

    @property
    def is_open(self) -> bool:
        """Whether anything is still drawn: not after `close`, nor on a terminal that was closed."""
        return self._is_open

    def show(self, view: RenderableType) -> None:
        """Replace the view. May be called at any rate."""
        self._view = view
        if self._clock.monotonic_s() - self._drawn_s >= REFRESH_S:
            self._draw()

    def put(self, lines: Iterable[Text]) -> None:
        """Print lines above the view."""
        self._pending.extend(lines)
        self._draw()

    def close(self) -> None:
        """Stop, and leave the last view on the screen. May be called twice."""
        self._draw()
        self._give_up()

    def _draw(self) -> None:
        if not self._is_open:
            return
        try:
            while self._pending and self._outlet.drain():
                self._console.print(self._pending.popleft(), soft_wrap=True)
            if self._view is not None and self._outlet.drain():
                self._live.update(self._view)
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


def rank_style(rank: int) -> str:
    """Return the color of a rank's lines."""
    return _RANKS[rank % len(_RANKS)]


def omitted(number: int) -> str:
    """Return the line that replaces lines of workers."""
    return f"[strata: {counted(number, 'line')} omitted; `strata logs` shows all]"


class Lines:
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
                    self._pending.appendleft(omitted(self._num_omitted))
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


class Output:
    """The output of workers on stdout: each line with its rank and, on a terminal, its colors."""

    def __init__(self, stream: TextIO) -> None:
        self._lines = Lines(stream)
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
