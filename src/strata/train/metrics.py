"""Metrics that a context sends with its heartbeats: its own gauges, and those of the script that are valid.

A thread beside training reads the gauges about once a second, so training pays nothing for them.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from strata.clock import Clock, SystemClock
from strata.coordinator.state import limits
from strata.coordinator.state.server_figures import SERVER
from strata.errors import InvalidArgument
from strata.launch.environment import METRICS, NOT_SAVING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)
WINDOW_S = 10.0
"""Window of the row rate, so that steps of several seconds do not make it jump."""
MAX_METRICS = 18
"""Metrics of the script. The coordinator keeps 32 of a worker, and our own need up to 12."""


class SaveProgress(Protocol):
    """What the gauges need of a save."""

    @property
    def done(self) -> bool: ...
    @property
    def step(self) -> int: ...
    @property
    def progress(self) -> float: ...


class Gauges:
    """Row rate, save progress and what others measure. The training thread adds the sources, another reads them."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.save: SaveProgress | None = None
        """The save that was started last."""
        self.are_loaders_per_rank = False
        """Whether a loader's state is per rank."""
        self.server: int | None = None
        """Number of this parameter server; None on a worker."""
        self.layout = 0.0
        """See `METRICS.layout`; 0 if the number of servers has not changed in this attempt."""
        self._sources: list[Callable[[], Mapping[str, float]]] = []
        self.num_lost_updates = 0
        """Updates that this process, a parameter server, has lost by its restart."""
        self.num_moved_rows = 0
        """Rows that this server got from others when their number changed last."""
        self._now_s = (clock or SystemClock()).monotonic_s
        self._count_rows: list[Callable[[], int]] = []
        self._rows = Rate()

    def add_rows(self, count: Callable[[], int]) -> None:
        """Add a loader; `count` returns the number of rows that it has delivered."""
        self._count_rows.append(count)

    def add(self, source: Callable[[], Mapping[str, float]]) -> None:
        """Add a source of metrics; another thread calls it."""
        self._sources.append(source)

    def read(self) -> dict[str, float]:
        """Return the metrics for a heartbeat."""
        found = {METRICS.saving_step: NOT_SAVING}
        save = self.save
        if save is not None and not save.done:
            found = {METRICS.saving_step: float(save.step), METRICS.saving_fraction: save.progress}
        if self.are_loaders_per_rank:
            found[METRICS.per_rank] = 1.0
        if self.server is not None:
            found[SERVER] = float(self.server)
        if self.layout:
            found[METRICS.layout] = self.layout
            found[METRICS.moved_rows] = float(self.num_moved_rows)
        for source in tuple(self._sources):
            found |= source()
        if self.num_lost_updates:
            found[METRICS.lost_updates] = float(self.num_lost_updates)
        if self._count_rows:
            per_s = self._rows.after(sum(count() for count in tuple(self._count_rows)), self._now_s())
            if per_s is not None:
                found["rows_per_s"] = per_s
        return found


class Rate:
    """The rate of a growing number. One that was reset starts anew."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def after(self, number: int, now_s: float) -> float | None:
        """Return the rate, or None before it is known."""
        if self._seen and number < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now_s, number))
        while len(self._seen) > 2 and now_s - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        since_s, before = self._seen[0]
        return (number - before) / (now_s - since_s) if now_s > since_s else None


class ScriptMetrics:
    """Select the script's metrics that can be sent. The coordinator would refuse a whole heartbeat for one invalid
    number, and a run must not suffer from what it reports.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._dropped: set[str] = set()

    def select(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        found = {}
        for name, value in metrics.items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                self._drop(name, f"{type(value).__name__} is not a number")
                continue
            if not math.isfinite(number):
                self._drop(name, f"it is {number}")
            elif name in self.names or self._accept(name):
                found[name] = number
        return found

    def _accept(self, name: str) -> bool:
        try:
            limits.check_id(name, "metrics")
        except InvalidArgument as error:
            self._drop(name, str(error))
            return False
        if len(self.names) >= MAX_METRICS:
            self._drop(name, f"{MAX_METRICS} other metrics are reported already")
            return False
        self.names.add(name)
        return True

    def _drop(self, name: str, why: str) -> None:
        """Log once per name, and only a few times for a script that makes up names."""
        if name not in self._dropped and len(self._dropped) < MAX_METRICS:
            self._dropped.add(name)
            log.warning("metric %.60r is not shown: %s", name, why)
