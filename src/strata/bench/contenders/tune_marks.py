"""Moments in the life of trials, written by the trials of any system and read by the contender that started them."""

from __future__ import annotations

import itertools
import math
import os
import time
import uuid
from pathlib import Path
from typing import NamedTuple


class Life(NamedTuple):
    """One process or call that ran a trial, without interruption."""

    started_s: float
    moments_s: list[float]
    """Of its marks after the start, which is the first."""

    @property
    def last_s(self) -> float:
        return self.moments_s[-1] if self.moments_s else self.started_s


class Marks:
    """A file to which every trial appends. A short line is written at once, so trials do not disturb each other."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._life = uuid.uuid4().hex
        self.add()

    def add(self) -> float:
        """Write this moment, and return it."""
        now_s = time.time()
        line = f"{self._life} {now_s!r}\n".encode()
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)
        return now_s


def read_lives(path: str) -> list[Life]:
    """Return what the trials wrote, in the order of their starts."""
    lives: dict[str, list[float]] = {}
    for line in Path(path).read_text(encoding="ascii").splitlines():
        life, moment_s = line.split()
        lives.setdefault(life, []).append(float(moment_s))
    return sorted(Life(moments[0], moments[1:]) for moments in lives.values())


def utilisation(lives: list[Life], *, num_workers: int, until_s: float = math.inf) -> float:
    """Return the share of the workers' time that trials used, from the first start to the last: after that, a worker
    without a trial has none to run. What follows `until_s` does not count.
    """
    counted = [each for each in lives if each.started_s < until_s]
    first_s, last_s = counted[0].started_s, min(until_s, counted[-1].started_s)
    used_s = sum(min(each.last_s, last_s) - each.started_s for each in counted)
    return used_s / (num_workers * (last_s - first_s))


def handovers_ms(lives: list[Life]) -> list[float]:
    """Return the times from the first mark of a trial to the start of the next, for trials that follow each other."""
    return [
        (after.started_s - before.moments_s[0]) * 1e3 for before, after in itertools.pairwise(lives) if before.moments_s
    ]
