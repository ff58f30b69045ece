"""A logger whose package may wait for a disk or a server: it writes on a thread of its own.

The training thread only appends to a bounded queue. An error of the thread is raised by the next call, so that the
logger is dropped like any other that fails.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

log = logging.getLogger("strata.train.loggers")

FLUSH_S = 1.0
"""Reports are collected this long, then written together. A killed process loses about as much."""
CLOSE_S = 30.0
"""Longest time that the end of training waits for the last reports."""
MAX_REPORTS = 10_000
"""Reports in the queue; later ones are left out until the package catches up."""


@dataclass(frozen=True, slots=True)
class Report:
    step: int
    metrics: Mapping[str, float]
    at_s: float
    """Wall time."""


class Sink(Protocol):
    """Writes reports with another package. All methods are called by one thread, which may wait."""

    def open(self, step: int) -> None:
        """Called first, with the step of the first report: continue the run that this process belongs to, or begin
        one.
        """

    def write(self, reports: Sequence[Report]) -> None:
        """Write reports, without the steps that the run has already."""

    def close(self, *, is_failing: bool) -> None:
        """Called last, if it was opened."""


@dataclass(slots=True)
class Written:
    """The steps that are written already. What was written first stays: a restarted run, or a script that goes back,
    repeats some of them.
    """

    last_step: int = -1
    """Reports up to this step are not new."""
    newest: int = -1
    """The last one that was found new."""
    _before: int = -1
    """The step of the report before."""

    def new(self, reports: Sequence[Report]) -> list[Report]:
        """Return the reports that are not written yet. Several of one step belong together."""
        found = []
        for each in reports:
            if each.step < self._before:
                self.last_step = max(self.last_step, self.newest)
            self._before = each.step
            if each.step > self.last_step:
                self.newest = max(self.newest, each.step)
                found.append(each)
        return found


def begins_anew(step: int, *, first_step: int | None, attempt: int) -> bool:
    """Return whether a process whose first report is of `step` begins a run of its own, instead of continuing the one
    whose reports begin with `first_step`: nothing has restarted it, and it was not resumed from a checkpoint.
    """
    return first_step is None or (attempt == 0 and step <= first_step)


class BackgroundLogger:
    """A logger that hands reports to a sink."""

    def __init__(self, sink: Sink) -> None:
        self.is_failing = False
        self._sink = sink
        self._changed = threading.Condition()
        self._reports: deque[Report] = deque()
        self._is_writing = False
        self._is_closing = threading.Event()
        self._hurry = threading.Event()
        self._error: Exception | None = None
        self._num_left_out = 0
        self._thread: threading.Thread | None = None

    def start(self, step: int) -> None:
        if self._thread is None:
            name = f"strata-{type(self).__name__}"
            self._thread = threading.Thread(target=self._run, args=(step,), name=name, daemon=True)
            self._thread.start()
        self._raise_error()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._changed:
            self._raise_error()
            if len(self._reports) >= MAX_REPORTS:
                self._left_out()
                return
            self._reports.append(Report(step, dict(metrics), time.time()))
            self._changed.notify_all()

    def _left_out(self) -> None:
        if not self._num_left_out:
            log.warning(
                "%s is %d reports behind; the next ones are not logged until it catches up",
                type(self).__name__,
                MAX_REPORTS,
            )
        self._num_left_out += 1

    def flush(self, timeout_s: float = CLOSE_S) -> None:
        """Wait until everything is written.

        Raises:
            TimeoutError: It is not written in time.
        """
        self._hurry.set()
        with self._changed:
            is_done = self._changed.wait_for(lambda: self._error or not (self._reports or self._is_writing), timeout_s)
            self._hurry.clear()
            self._raise_error()
            if not is_done:
                raise TimeoutError(f"{len(self._reports)} reports were not written within {timeout_s:g} s")

    def close(self) -> None:
        """
        Raises:
            TimeoutError: Reports were not written in time. Their thread ends with the process.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._is_closing.set()
        self._hurry.set()
        with self._changed:
            self._changed.notify_all()
        thread.join(CLOSE_S)
        self._raise_error()
        if thread.is_alive():
            raise TimeoutError(f"its last reports were not written within {CLOSE_S:g} s")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self, step: int) -> None:
        try:
            self._sink.open(step)
            while self._write_next():
                pass
            self._sink.close(is_failing=self.is_failing)
        except Exception as error:  # noqa: BLE001 - a thread boundary: the next call raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _write_next(self) -> bool:
        """Write what has been collected; return whether more may follow."""
        with self._changed:
            self._changed.wait_for(lambda: self._reports or self._is_closing.is_set())
        self._hurry.wait(FLUSH_S)
        with self._changed:
            taken = list(self._reports)
            self._reports.clear()
            self._is_writing = True
        if taken:
            self._sink.write(taken)
        with self._changed:
            self._is_writing = False
            self._num_left_out = 0 if not self._reports else self._num_left_out
            self._changed.notify_all()
            return bool(self._reports) or not self._is_closing.is_set()
