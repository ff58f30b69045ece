"""What workers write, shown while they run: new lines of the chosen ranks' logs, handed to whoever shows the run.

It reads the logs in the run's directory, as `strata logs --follow` does. So it is the same for workers of this machine
and of a cluster, and nothing that it does can hold them up.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from strata.errors import ConfigError
from strata.launch.record.log import LogReader

if TYPE_CHECKING:
    from strata.launch.record.directory import LogFile, RunDirectory
    from strata.launch.record.timeline import RunEvent
    from strata.launch.record.view import RunView, Shower

LOOK_S = 0.1
UNFINISHED_S = 10.0
"""After so long without a line, one that has no end yet is shown: a progress bar."""
MAX_BLOCKS = 4
"""Of a rank's log, in one look. Who writes more than that for long is shown in part."""
REST = "[strata: the rest of this attempt's output is in its log]"
Which = Literal["auto", "all", "rank0", "none"]
"""Whose output is shown. `auto` is that of rank 0."""


def which_of(text: str) -> Which:
    """
    Raises:
        ConfigError: It is not one of them.
    """
    for each in get_args(Which):
        if text == each:
            found: Which = each
            return found
    raise ConfigError(f"logs={text!r} is none of {', '.join(get_args(Which))}", field="logs")


@dataclass(slots=True)
class _Reading:
    reader: LogReader
    shown_s: float
    unfinished: str = ""


class Streaming:
    """A `Shower` that shows, before all else that it is given, what was written until then."""

    def __init__(self, directory: RunDirectory, shower: Shower, which: Which) -> None:
        self._directory = directory
        self._shower = shower
        self._which = which
        before = directory.status
        self._first_attempt = 0 if before is None else before.attempt + 1  # the others were shown when they ran
        self._readings: dict[LogFile, _Reading] = {}
        self._has_prefix = directory.spec.workers.at_most > 1

    def show(self, view: RunView) -> None:
        self.look()
        self._shower.show(view)

    def say(self, event: RunEvent) -> None:
        self.look()
        self._shower.say(event)

    def write(self, rank: int | None, lines: list[str]) -> None:
        self._shower.write(rank, lines)

    def close(self) -> None:
        self.look(is_last=True)
        self._shower.close()

    async def run(self) -> None:
        """Looks again and again, until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self, *, is_last: bool = False) -> None:
        if self._which == "none":
            return
        now_s = time.monotonic()
        found = [log for log in self._directory.logs(first_attempt=self._first_attempt) if self._is_wanted(log)]
        newest = max((log.attempt for log in found), default=self._first_attempt)
        for log in found:
            reading = self._readings.setdefault(log, _Reading(LogReader(log.path), now_s))
            is_over = is_last or log.attempt < newest
            num_blocks = 0
            for lines in reading.reader.lines(is_last_look=is_over, max_blocks=None if is_last else MAX_BLOCKS):
                self._write(log, lines)
                reading.shown_s = now_s
                num_blocks += 1
            if is_over and not is_last and num_blocks >= MAX_BLOCKS:  # the next attempt is not to wait for it
                self._write(log, [REST])
            if now_s - reading.shown_s > UNFINISHED_S and reading.reader.unfinished not in ("", reading.unfinished):
                reading.unfinished, reading.shown_s = reading.reader.unfinished, now_s
                self._write(log, [reading.unfinished])
        self._first_attempt = newest
        self._readings = {log: reading for log, reading in self._readings.items() if log.attempt == newest}

    def _write(self, log: LogFile, lines: list[str]) -> None:
        self._shower.write(log.rank if self._has_prefix else None, lines)

    def _is_wanted(self, log: LogFile) -> bool:
        return self._which == "all" or log.rank == 0
