"""Rungs: the trials that have reached one step of a bracket, and how many of the others are better than each.

With one objective, trials are in order, and that number is a trial's place. With several, it is the number of trials
that dominate it (the rank of Fonseca and Fleming, 1993): no trial that is best in some respect is ever stopped, so more
trials go on than with one objective. One that is added is compared with all others at once, in numpy.
"""

from __future__ import annotations

import abc
import math
from bisect import bisect_left, insort
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection

    from strata.tune.schedulers.base import Losses


class Rung(abc.ABC):
    def __init__(self, step: int) -> None:
        self.step = step
        self.promoted: set[int] = set()

    @property
    @abc.abstractmethod
    def num_trials(self) -> int: ...

    @abc.abstractmethod
    def add(self, trial: int, losses: Losses) -> None: ...

    @abc.abstractmethod
    def remove(self, trial: int) -> None:
        """Forget a trial that has failed."""

    @abc.abstractmethod
    def withdraw(self, trial: int) -> None:
        """Do not return a trial from `best` again; it still counts for others."""

    @abc.abstractmethod
    def rank(self, trial: int) -> int:
        """Return the number of trials that are better."""

    @abc.abstractmethod
    def best(self, num: int, among: Collection[int]) -> int | None:
        """Return the best trial among these that was not withdrawn, if fewer than `num` are better."""

    @abc.abstractmethod
    def describe(self, trial: int) -> str:
        """Return the rank of a trial in words."""

    def promote(self, trial: int) -> None:
        self.promoted.add(trial)
        self.withdraw(trial)


class OrderedRung(Rung):
    """One objective."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self._ranked: list[tuple[float, int]] = []
        """Loss and trial, the best first."""
        self._waiting: list[tuple[float, int]] = []
        """Those of them that may still be promoted, in the same order."""
        self._losses: dict[int, float] = {}

    @property
    def num_trials(self) -> int:
        return len(self._ranked)

    def add(self, trial: int, losses: Losses) -> None:
        loss = self._losses[trial] = losses[0]
        insort(self._ranked, (loss, trial))
        if loss < math.inf:
            insort(self._waiting, (loss, trial))

    def withdraw(self, trial: int) -> None:
        key = (self._losses.get(trial, math.inf), trial)
        at = bisect_left(self._waiting, key)
        if self._waiting[at : at + 1] == [key]:
            del self._waiting[at]

    def remove(self, trial: int) -> None:
        self.withdraw(trial)
        del self._ranked[self.rank(trial)]
        del self._losses[trial]
        self.promoted.discard(trial)

    def rank(self, trial: int) -> int:
        return bisect_left(self._ranked, (self._losses[trial], trial))

    def best(self, num: int, among: Collection[int]) -> int | None:
        for _, trial in self._waiting:
            if self.rank(trial) >= num:
                return None
            if trial in among:
                return trial
        return None

    def describe(self, trial: int) -> str:
        return f"place {self.rank(trial) + 1} of {self.num_trials} at step {self.step}"


class ParetoRung(Rung):
    """Several objectives."""

    def __init__(self, step: int, num_objectives: int) -> None:
        super().__init__(step)
        self._losses = np.empty((16, num_objectives))
        """One row per trial; NaN, which compares as false, once it was removed."""
        self._num_better = np.zeros(16, dtype=np.int64)
        self._is_waiting = np.zeros(16, dtype=bool)
        self._rows: dict[int, int] = {}
        self._trials: list[int] = []
        """By row."""

    @property
    def num_trials(self) -> int:
        return len(self._rows)

    def add(self, trial: int, losses: Losses) -> None:
        row = len(self._trials)
        if row == len(self._losses):
            self._losses = np.concatenate([self._losses, np.empty_like(self._losses)])
            self._num_better = np.concatenate([self._num_better, np.zeros_like(self._num_better)])
            self._is_waiting = np.concatenate([self._is_waiting, np.zeros_like(self._is_waiting)])
        new = np.array(losses) if max(losses) < math.inf else np.full(len(losses), math.inf)
        others = self._losses[:row]
        is_better = (others <= new).all(axis=1) & (others < new).any(axis=1)
        self._num_better[:row] += self._is_worse(others, new)
        self._num_better[row] = is_better.sum()
        self._losses[row] = new
        self._is_waiting[row] = max(losses) < math.inf
        self._rows[trial] = row
        self._trials.append(trial)

    def withdraw(self, trial: int) -> None:
        if trial in self._rows:
            self._is_waiting[self._rows[trial]] = False

    def remove(self, trial: int) -> None:
        self.withdraw(trial)
        row = self._rows.pop(trial)
        num = len(self._trials)
        self._num_better[:num] -= self._is_worse(self._losses[:num], self._losses[row])
        self._losses[row] = math.nan
        self.promoted.discard(trial)

    def rank(self, trial: int) -> int:
        return int(self._num_better[self._rows[trial]])

    def best(self, num: int, among: Collection[int]) -> int | None:
        used = slice(0, len(self._trials))
        rows = np.flatnonzero(self._is_waiting[used] & (self._num_better[used] < num))
        order = np.lexsort((rows, self._losses[rows, 0], self._num_better[rows]))
        return next((self._trials[row] for row in rows[order] if self._trials[row] in among), None)

    def describe(self, trial: int) -> str:
        return f"{self.rank(trial)} of {self.num_trials} trials dominate it at step {self.step}"

    @staticmethod
    def _is_worse(rows: np.ndarray, than: np.ndarray) -> np.ndarray:
        return np.asarray((than <= rows).all(axis=1) & (than < rows).any(axis=1))
