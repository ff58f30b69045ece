"""One trial: its configuration, where it runs, what it has reported."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.tune.space.parameters import Config
    from strata.tune.state.events import StopWhy, Values

TrialState = Literal["queued", "running", "paused", "finished", "pruned", "failed"]
OVER: frozenset[TrialState] = frozenset({"finished", "pruned", "failed"})
MAX_SERIES = 1_000
"""Reports of a trial that are kept. Beyond that, every second one is dropped, and then only every second one is added;
the last one is always known.
"""


@dataclass(slots=True)
class Series:
    """Reported values by step, thinned to a bounded length. Numbers are packed: a study may keep millions."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    """All values of the first report, then those of the second, …; infinite if a value is not a number."""
    width: int = 1
    """Values of a report."""
    stride: int = 1
    num_reports: int = 0

    def add(self, step: int, values: Values) -> None:
        if self.num_reports % self.stride == 0:
            self.width = len(values)
            self.steps.append(step)
            self.values.extend(math.inf if each is None else each for each in values)
            if len(self.steps) > MAX_SERIES:
                self._keep(range(0, len(self.steps), 2))
                self.stride *= 2
        self.num_reports += 1

    def cut(self, step: int) -> None:
        """Forget reports after a step: the trial continues from there, in another way."""
        self._keep([index for index, each in enumerate(self.steps) if each <= step])
        self.num_reports = len(self.steps) * self.stride

    @property
    def points(self) -> list[tuple[int, Values]]:
        """Step and values of each report."""
        return [(step, self._at(index)) for index, step in enumerate(self.steps)]

    def _at(self, index: int) -> Values:
        found = self.values[index * self.width : (index + 1) * self.width]
        return tuple(each if math.isfinite(each) else None for each in found)

    def _keep(self, indices: Sequence[int]) -> None:
        self.values = array("d", (self.values[i * self.width + j] for i in indices for j in range(self.width)))
        self.steps = array("q", (self.steps[index] for index in indices))


@dataclass(slots=True)
class Trial:
    number: int
    config: Config
    is_given: bool = False
    state: TrialState = "queued"
    lease: int = 0
    """Number of its starts; what comes under an earlier lease is ignored."""
    slot: int | None = None
    """Where it runs."""
    extra_slots: tuple[int, ...] = ()
    """Further slots whose workers it has, because no other trial needs them."""
    stopping: StopWhy | None = None
    """It was asked to stop, for this reason."""
    reason: str = ""
    """Why it was stopped, paused or failed, in words."""
    step: int | None = None
    """Last step that was reported."""
    values: Values = ()
    """Objectives of the last report; of the result, once it has finished."""
    best: float = math.inf
    """Lowest loss of the first objective that was reported."""
    series: Series = field(default_factory=Series)
    checkpoint: str = ""
    checkpoint_step: int = 0
    checkpoint_world_size: int = 0
    """The only world size that can resume from it; 0: any."""
    num_failures: int = 0
    """Failures in a row without progress."""
    num_losses: int = 0
    """Lost workers in a row without progress."""
    lease_step: int | None = None
    """Last step before the current lease."""
    num_lease_reports: int = 0
    """Reports under the current lease."""
    is_growing: bool = False
    """It has stopped to continue with more slots."""
    is_narrow: bool = False
    """It has failed with more slots than one before it made progress, and gets no more again."""
    donors: list[int] = field(default_factory=list)
    """Trials whose checkpoints it has continued from."""
    origin: int = 0
    """Lease under which it last continued from another trial's checkpoint; 0: never."""
    started_s: float | None = None
    ended_s: float | None = None

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    @property
    def num_slots(self) -> int:
        """Slots that it takes; 0 if it does not run."""
        return 0 if self.slot is None else 1 + len(self.extra_slots)

    @property
    def has_progressed(self) -> bool:
        """Whether it has reported a new step under the current lease."""
        return self.step != self.lease_step
