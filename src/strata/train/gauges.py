"""What a context tells of itself without being asked, for those who watch the run: rows a second, and the save that is
under way. It is looked at by the thread beside training, about once a second, so that training pays nothing for it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from strata.clock import Clock, SystemClock
from strata.launch.environment import METRICS, NOT_SAVING

if TYPE_CHECKING:
    from collections.abc import Callable

WINDOW_S = 10.0
"""Rows are counted over so long: steps of seconds must not make the rate jump."""


class Saving(Protocol):
    """What is asked of a save."""

    @property
    def done(self) -> bool: ...
    @property
    def step(self) -> int: ...
    @property
    def progress(self) -> float: ...


class Gauges:
    """The training thread adds what there is to look at; another one looks."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.save: Saving | None = None
        """The last that was begun."""
        self.are_loaders_per_rank = False
        """Whether a loader's state is each rank's own."""
        self._now_s = (clock or SystemClock()).monotonic_s
        self._count_rows: list[Callable[[], int]] = []
        self._rows = _Rate()

    def add_rows(self, count: Callable[[], int]) -> None:
        """`count` says how many rows a loader has delivered so far."""
        self._count_rows.append(count)

    def look(self) -> dict[str, float]:
        """Metrics, as a heartbeat carries them."""
        found = {METRICS.saving_step: NOT_SAVING}
        save = self.save
        if save is not None and not save.done:
            found = {METRICS.saving_step: float(save.step), METRICS.saving_fraction: save.progress}
        if self.are_loaders_per_rank:
            found[METRICS.per_rank] = 1.0
        if self._count_rows:
            per_s = self._rows.after(sum(count() for count in tuple(self._count_rows)), self._now_s())
            if per_s is not None:
                found["rows_per_s"] = per_s
        return found


class _Rate:
    """Of a number that grows; one that was set back begins anew."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def after(self, number: int, now_s: float) -> float | None:
        """None before it is known."""
        if self._seen and number < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now_s, number))
        while len(self._seen) > 2 and now_s - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        since_s, before = self._seen[0]
        return (number - before) / (now_s - since_s) if now_s > since_s else None
