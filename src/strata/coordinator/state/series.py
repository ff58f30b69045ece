"""Time series of heartbeat metrics: the newest points of each, in a fixed amount of memory."""

from __future__ import annotations

from array import array


class Series:
    """The last `capacity` points of one metric, 16 bytes per point."""

    __slots__ = ("_capacity", "_next", "_steps", "_values")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._steps = array("q")
        self._values = array("d")
        self._next = 0

    def __len__(self) -> int:
        return len(self._values)

    def add(self, step: int, value: float) -> None:
        if len(self._values) < self._capacity:
            self._steps.append(step)
            self._values.append(value)
        else:
            self._steps[self._next] = step
            self._values[self._next] = value
        self._next = (self._next + 1) % self._capacity

    @property
    def last(self) -> float:
        return self._values[self._next - 1]

    def points(self) -> list[tuple[int, float]]:
        """Return (step, value) pairs, oldest first."""
        cut = self._next if len(self._values) == self._capacity else 0
        pairs = list(zip(self._steps, self._values, strict=True))
        return pairs[cut:] + pairs[:cut]
