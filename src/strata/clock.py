"""Injected time.

Code below the process boundary never calls `time.*`: it receives a `Clock`, which tests can advance. Leases and
deadlines use `monotonic_s`, which no administrator can set back; `wall_s` is for display only.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary start; never goes back."""
        ...

    def wall_s(self) -> float:
        """Return seconds since 1970; may jump."""
        ...


class SystemClock:
    # The functions themselves, without a wrapper: a server reads its clock several times in every call.
    monotonic_s = staticmethod(time.monotonic)
    wall_s = staticmethod(time.time)


class ManualClock:
    """A clock that advances only when a test calls `advance`."""

    def __init__(self, monotonic_s: float = 1_000.0, wall_s: float = 1_700_000_000.0) -> None:
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def wall_s(self) -> float:
        return self._wall_s

    def advance(self, seconds: float) -> None:
        self._monotonic_s += seconds
        self._wall_s += seconds
