"""Progress of long saves and loads: a bar on a terminal, or a callback.

The bar is drawn on stderr, only if it is a terminal, so that logs and pipes stay clean, and only after a second, so
that short work shows nothing. Any thread may count bytes; a callback is called at most ten times a second, one call at
a time, and never twice with the same value.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.clock import SystemClock
from strata.lifecycle import renewed
from strata.storage import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TextIO

    from rich.progress import Progress as Bar

    from strata.clock import Clock

log = logging.getLogger(__name__)

SHOWN_AFTER_S = 1.0
"""Shorter work shows no bar."""
EVERY_S = 0.1
_NUM_SAMPLES = 30
"""The throughput is that of the last few seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of a transfer, passed to `on_progress`."""

    words: str
    """What is being done, such as "saving step-…"."""
    done_bytes: int
    total_bytes: int | None
    """None: unknown."""
    bytes_per_s: float
    """Throughput of the last few seconds."""

    @property
    def fraction(self) -> float | None:
        return min(self.done_bytes / self.total_bytes, 1.0) if self.total_bytes else None


@contextmanager
def watching(
    words: str,
    num_bytes: int | None,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    show: bool | None = None,
    clock: Clock | None = None,
) -> Iterator[Watch]:
    """Yield a `Watch` for a transfer of `num_bytes` that shows a bar or calls `on_progress`.

    `show`: a bar on a terminal (True), none (False), or one unless `on_progress` is given (None).

    `on_progress` is called in the threads that do the work. If it raises, the error is logged and it is not called
    again: a save does not fail because of its progress display.
    """
    wanted = show if show is not None else on_progress is None
    bar = _new_bar(sys.stderr) if wanted and _is_terminal(sys.stderr) else None
    counter = ProgressCounter(words, num_bytes, on_progress, bar, clock)
    timer = threading.Timer(SHOWN_AFTER_S, counter.show)
    timer.name, timer.daemon = "strata-progress", True
    if bar is not None:
        timer.start()
    try:
        yield Watch(counter.advance)
        counter.finish()
    finally:
        if bar is not None:
            timer.cancel()
            timer.join()
            bar.stop()


class ProgressCounter:
    """Counts bytes from any thread and reports them now and then."""

    def __init__(
        self,
        words: str,
        num_bytes: int | None,
        on_progress: Callable[[Progress], None] | None,
        bar: Bar | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._words = words
        self._total = num_bytes
        self._on_progress = on_progress
        self._bar = bar
        self._clock = clock or SystemClock()
        self._lock = renewed(threading.RLock())  # the callback may transfer bytes itself
        self._done = 0
        self._num_reported = -1
        self._samples = deque([(self._clock.monotonic_s(), 0)], maxlen=_NUM_SAMPLES)
        self._task = bar.add_task(words, total=num_bytes, speed="") if bar is not None else None

    def advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            now_s = self._clock.monotonic_s()
            if now_s - self._samples[-1][0] >= EVERY_S:
                self._report(now_s)

    def show(self) -> None:
        assert self._bar is not None
        self._bar.start()

    def finish(self) -> None:
        with self._lock:
            if self._done != self._num_reported:
                self._report(self._clock.monotonic_s())

    def _report(self, now_s: float) -> None:
        since_s, before = self._samples[0]
        self._samples.append((now_s, self._done))
        self._num_reported = self._done
        speed = (self._done - before) / (now_s - since_s) if now_s > since_s else 0.0
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, speed=f"{speed / (1 << 20):,.0f} MiB/s")
        if self._on_progress is None:
            return
        event = Progress(words=self._words, done_bytes=self._done, total_bytes=self._total, bytes_per_s=speed)
        try:
            self._on_progress(event)
        except Exception:
            log.exception("on_progress failed while %s; it will not be called again", self._words)
            self._on_progress = None


def _is_terminal(stream: TextIO) -> bool:
    """Return whether the stream is a terminal. Rich may be configured to treat a pipe as one."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # no stream, or a closed one
        return False


def _new_bar(stream: TextIO) -> Bar | None:
    """Return a bar, or None if the terminal cannot move the cursor."""
    from rich.console import Console  # noqa: PLC0415 - only a terminal needs rich
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    console = Console(file=stream)
    if console.is_dumb_terminal:
        return None
    words, speed = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[speed]}")
    columns = (words, BarColumn(), DownloadColumn(binary_units=True), speed, TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, refresh_per_second=1 / EVERY_S)
