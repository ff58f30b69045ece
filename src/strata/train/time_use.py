"""Measure where the wall time of a training process goes, without any call in the script.

Only waits are measured: what they leave is computing. Most of them are rare (a save, a barrier), so a step that does
none of this costs one comparison. Loaders count the time inside `next()` themselves; the thread that sends heartbeats
reads their sums about once a second. Waits in collectives of torch come from `collectives.py`.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, Literal, get_args

from strata.clock import Clock, SystemClock
from strata.coordinator.state.time_use import TimeUse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)
Wait = Literal["data_s", "checkpoint_s", "barrier_s", "restore_s", "collective_s"]
_WAITS: tuple[Wait, ...] = get_args(Wait)
MAX_READS = 3
"""Reads of the sums until no wait has ended in between."""


class TimeUseMeter:
    """The sums of one process. They count from its first step: what precedes it is starting or recovering."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.is_begun = False
        self.is_collective_known: Callable[[], bool] = lambda: False
        """Whether waits in collectives are measured; another thread calls it."""
        self._now_s = (clock or SystemClock()).monotonic_s
        self._began_s = 0.0
        self._sums: dict[Wait, float] = dict.fromkeys(_WAITS, 0.0)
        self._sources: list[tuple[Wait, Callable[[], float]]] = []
        self._is_waiting: list[Callable[[], bool]] = []
        """Of sources: whether the training thread waits there now."""
        self._before: dict[Wait, float] = dict.fromkeys(_WAITS, 0.0)
        """Seconds of each wait before the first step."""
        self._depth = 0
        self._open: tuple[Wait, float] | None = None
        """The wait in progress and its beginning."""

    def add_source(
        self, wait: Wait, total_s: Callable[[], float], *, is_waiting: Callable[[], bool] | None = None
    ) -> None:
        """Add what is measured elsewhere; another thread calls `total_s`, which never decreases.

        `is_waiting`: whether the training thread waits there now, if other waits may lie inside that one.
        """
        self._sources.append((wait, total_s))
        if is_waiting is not None:
            self._is_waiting.append(is_waiting)

    def add(self, wait: Wait, seconds: float) -> None:
        """Add a wait of the training thread that has ended."""
        self._sums[wait] += seconds

    def begin(self) -> None:
        """The first step has ended."""
        self._before = self._totals()
        self._began_s = self._now_s()
        self.is_begun = True

    @contextlib.contextmanager
    def during(self, wait: Wait) -> Iterator[None]:
        """Count the body as a wait of the training thread. Inside another wait, it counts as that one."""
        if any(is_waiting() for is_waiting in self._is_waiting):
            yield
            return
        self._depth += 1
        began_s = self._now_s()
        if self._depth == 1:
            self._open = wait, began_s
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._open = None  # first, so that `read` never counts it twice
                self._sums[wait] += self._now_s() - began_s

    def read(self) -> TimeUse | None:
        """Return the sums, with a wait in progress; None before the first step."""
        if not self.is_begun:
            return None
        for _ in range(MAX_READS):
            is_open, totals = self._open, self._totals()
            if self._open is is_open:  # otherwise the totals may already have it
                break
        now_s = self._now_s()
        if is_open is not None:
            wait, began_s = is_open
            totals[wait] += max(now_s - max(began_s, self._began_s), 0.0)
        since: dict[Wait, float | None] = {wait: max(totals[wait] - self._before[wait], 0.0) for wait in _WAITS}
        if not self.is_collective_known():
            since["collective_s"] = None
        return TimeUse(measured_s=max(now_s - self._began_s, 0.0), **since)  # type: ignore[arg-type]  # others are numbers

    def _totals(self) -> dict[Wait, float]:
        totals = dict(self._sums)
        for source in tuple(self._sources):
            wait, total_s = source
            try:
                totals[wait] += total_s()
            except Exception:  # perhaps a loader of the user: neither training nor heartbeats may end with it
                log.exception("%s is no longer measured", wait)
                self._sources.remove(source)
        return totals


def data_wait(loader: Any) -> Callable[[], float] | None:
    """Return the seconds that a loader has been waited for, if it measures them.

    A loader of the user may have attributes of these names with another meaning, so only a number counts.
    """

    def of_loader() -> Any:
        return loader.waited_s

    def of_dataset() -> Any:
        return loader.dataset.get_metrics().consumer_wait_s

    for read in (of_loader, of_dataset):
        try:
            is_number = isinstance(read(), (int, float))
        except Exception as error:  # noqa: BLE001 - of the user's class
            log.debug("%s measures no waits: %s", type(loader).__name__, error)
            continue
        if is_number:
            return read
    return None
