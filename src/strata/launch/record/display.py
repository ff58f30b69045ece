"""The displays of a run while it is active: a live view on a terminal, plain lines anywhere else.

A display decides when to draw a `RunView`. It neither ends the run nor delays it: it stops drawing to a closed
terminal, and continues later on a stopped one.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from rich.text import Text

from strata.launch.record.screen import Lines, Output, Screen, can_draw, omitted, rank_style
from strata.launch.record.timeline import hours, in_words, text_of
from strata.launch.record.view import progress, render
from strata.printing import log_line

if TYPE_CHECKING:
    from strata.clock import Clock
    from strata.launch.record.timeline import RunEvent
    from strata.launch.record.view import RunView

log = logging.getLogger(__name__)

PROGRESS_S = 10.0
"""Interval between two progress lines, where nothing can be redrawn."""
MAX_DRAWN = 100
"""Lines of workers printed above the live view at once; drawing takes time that the run needs."""
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
    if can_draw(stream):
        return LiveDisplay(stream, clock, output)
    return PlainDisplay(stream, clock, output)


class SilentDisplay:
    """Show only the output of workers."""

    def __init__(self, output: TextIO) -> None:
        self._output = Output(output)

    def show(self, view: RunView) -> None:
        pass

    def print_event(self, event: RunEvent) -> None:
        pass

    def write(self, rank: int | None, lines: list[str], *, name: str = "") -> None:
        self._output.write(rank, lines, name=name)

    def close(self) -> None:
        self._output.close()


class LoggingDisplay(SilentDisplay):
    """Show only the output of workers, and log a warning for each failure that a run survives."""

    def __init__(self, output: TextIO, name: str) -> None:
        super().__init__(output)
        self._name = name
        self._failure = ""
        """The failure that no restart has followed yet. The last one is raised, and is not logged."""

    def print_event(self, event: RunEvent) -> None:
        if event.what == "failed":
            self._failure = text_of(event)
        elif event.what in ("started", "restarted") and self._failure:
            log.warning("run %s: %s; %s: %s", self._name, self._failure, event.what, text_of(event))
            self._failure = ""


class LiveDisplay:
    """Show the view at the bottom of the terminal, and events and the output of workers above it."""

    def __init__(self, stream: TextIO, clock: Clock, output: TextIO) -> None:
        self._screen = Screen(stream, clock)
        # Lines of workers scroll above the view, unless they go to a file.
        self._output = None if output.isatty() else Output(output)
        self._since_s = clock.wall_s()

    def show(self, view: RunView) -> None:
        # The last event is right above; do not show it twice.
        self._screen.show(render(replace(view, last_event="")))

    def print_event(self, event: RunEvent) -> None:
        if event.what != "checkpoint":  # frequent, and the view shows the last one
            self._screen.put([Text(in_words(event, self._since_s), style=_EVENT_COLORS.get(event.what, ""))])

    def write(self, rank: int | None, lines: list[str], *, name: str = "") -> None:
        if self._output is not None:
            self._output.write(rank, lines, name=name)
            return
        prefix = ("" if rank is None else f"[{name or rank}] ", rank_style(rank or 0))
        shown = lines[-MAX_DRAWN:]
        drawn = [Text(omitted(len(lines) - len(shown)), style="dim")] if len(shown) < len(lines) else []
        drawn += [Text.assemble(prefix, Text.from_ansi(log_line(each, with_colours=True))) for each in shown]
        self._screen.put(drawn)

    def close(self) -> None:
        self._screen.close()
        if self._output is not None:
            self._output.close()


class PlainDisplay:
    """Print a line for each event, and a progress line every ten seconds."""

    def __init__(self, stream: TextIO, clock: Clock, output: TextIO) -> None:
        self._lines = Lines(stream)
        self._output = Output(output)
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
