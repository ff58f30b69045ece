"""Why a training loop waits for its data, and what to change.

Pure: the measurements of a window of time in, a diagnosis with its reason out. Only what the measurements show is
said; when they show nothing clear, nothing is.

The loop waits, and the workers
- have nothing to do        → there are too few units for them
- may not go on             → the bound on decoded bytes is too tight
- wait for bytes            → the storage is slow
- run the user's transform  → that is slow
- decode all the time       → decoding is what it costs
The loop does not wait, and the workers do → the loop is the slow one, as it should be.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from strata.data.runtime.metrics import between

if TYPE_CHECKING:
    from strata.data.runtime.metrics import LoaderMetrics, WorkerMetrics

WINDOW_S = 10.0
"""What is judged at a time: long against a block, short against an epoch."""
MIN_BATCHES = 10
"""In a window: with fewer, one slow file is all there is to see."""
WAITING_SHARE = 0.1
"""Of the loop's time. Below, a cure could make it faster by a ninth at the most: not worth a warning."""
NOT_WAITING_SHARE = 0.02
"""Of the loop's time: what handing over costs. Between the two, nobody is clearly the slow one."""
WASTED_SHARE = 0.3
"""Of the workers' time, idle or blocked, from which on that is the cause. One of three workers with nothing to do."""
BUSY_SHARE = 0.7
"""Of the workers' time, from which on they cannot give more: the rest is handing over."""
MAIN_SHARE = 0.5
"""Of the workers' busy time: what takes more than all else together is what to change."""
UNITS_PER_WORKER = 2
"""With fewer on a rank, one worker decodes the last unit of an epoch while the others have none."""
PAUSE_S = 60.0
"""Between two warnings."""


class Cause(enum.Enum):
    TOO_FEW_UNITS = "too few units"
    MEMORY_BOUND = "memory bound"
    SLOW_STORAGE = "slow storage"
    SLOW_TRANSFORM = "slow transform"
    SLOW_DECODE = "slow decode"
    SLOW_CONSUMER = "slow consumer"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """What a diagnosis needs to know of the loader."""

    num_units: int
    """Of the whole plan."""
    num_splits: int
    is_local: bool
    world_size: int = 1
    unit_name: str = "row group"
    worker_type: Literal["thread", "process"] = "thread"
    num_cpus: int | None = None
    """That this process may use; None: not known."""

    @property
    def units_per_rank(self) -> int:
        return -(-self.num_units // self.world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    cause: Cause
    found: str
    """With the numbers."""
    cure: str

    @property
    def is_warning(self) -> bool:
        """Otherwise all is well, and this is for those who want to know."""
        return self.cause is not Cause.SLOW_CONSUMER

    def __str__(self) -> str:
        return f"{self.found}; {self.cure}"


def diagnose(window: LoaderMetrics, facts: PlanFacts, *, num_workers: int) -> Diagnosis | None:
    """From what was measured in a window of time (`metrics.between`). None: all is well, or nothing is clear."""
    total = window.total
    if window.batches < MIN_BATCHES or window.elapsed_s <= 0 or total.alive_s <= 0:
        return None
    waiting = window.consumer_wait_s / window.elapsed_s
    idle, blocked = total.idle_s / total.alive_s, total.blocked_s / total.alive_s
    if waiting < WAITING_SHARE:
        if waiting <= NOT_WAITING_SHARE and idle + blocked >= WASTED_SHARE:
            return _slow_consumer(waiting, idle + blocked)
        return None
    found = f"the training loop waits for data {waiting:.0%} of its time"
    if idle >= WASTED_SHARE and facts.units_per_rank < UNITS_PER_WORKER * num_workers:
        return _too_few_units(found, idle, facts, num_workers)
    if blocked >= WASTED_SHARE:
        return _memory_bound(found, blocked, facts)
    if total.utilisation >= BUSY_SHARE:
        return _busy(found, total, facts, num_workers)
    return None


def _slow_consumer(waiting: float, resting: float) -> Diagnosis:
    return Diagnosis(
        cause=Cause.SLOW_CONSUMER,
        found=f"the training loop sets the pace: it waits for data {waiting:.0%} of its time, the workers for it "
        f"{resting:.0%} of theirs",
        cure="there is nothing to change in the loader",
    )


def _too_few_units(found: str, idle: float, facts: PlanFacts, num_workers: int) -> Diagnosis:
    unit, num = facts.unit_name, facts.units_per_rank
    per_rank = f", {num:,} on each of {facts.world_size} ranks," if facts.world_size > 1 else ""
    enough = UNITS_PER_WORKER * num_workers * facts.world_size
    fewer = f", or set num_workers={num}: more have nothing to do" if num < num_workers else ""
    return Diagnosis(
        cause=Cause.TOO_FEW_UNITS,
        found=f"{found}, and the workers have nothing to do {idle:.0%} of theirs: there are only "
        f"{_count(facts.num_units, unit)} ({_count(facts.num_splits, 'split')}){per_rank} for "
        f"{_count(num_workers, 'worker')}",
        cure=f"write the data with smaller {unit}s, {enough:,} of them at least{fewer}",
    )


def _memory_bound(found: str, blocked: float, facts: PlanFacts) -> Diagnosis:
    return Diagnosis(
        cause=Cause.MEMORY_BOUND,
        found=f"{found}, and {blocked:.0%} of the workers' time they may not decode further ahead, because what is "
        "decoded fills its bound",
        cure=f"allow more memory for decoded data, set a smaller shuffle_buffer_size, or write smaller "
        f"{facts.unit_name}s",
    )


def _busy(found: str, total: WorkerMetrics, facts: PlanFacts, num_workers: int) -> Diagnosis:
    """All workers work all the time: at what?"""
    at_work = f"{found}, and {_count(num_workers, 'worker')} work {total.utilisation:.0%} of theirs"
    transform, read = total.transform_s / total.busy_s, total.read_s / total.busy_s
    if transform > MAIN_SHARE:
        in_threads = facts.worker_type == "thread"
        return Diagnosis(
            cause=Cause.SLOW_TRANSFORM,
            found=f"{at_work}, {transform:.0%} of it in the transform",
            cure='set worker_type="process", so that transforms run side by side, or make the transform faster'
            if in_threads
            else f"{_more_workers(facts, num_workers)}make the transform faster",
        )
    if read > MAIN_SHARE:
        speed = f"{total.bytes_read / total.read_s / 1e6:,.1f} MB/s for each worker"
        return Diagnosis(
            cause=Cause.SLOW_STORAGE,
            found=f"{at_work}, {read:.0%} of it waiting for bytes ({speed})",
            cure=f"raise num_workers above {num_workers}, so that more is read at once, "
            + ("read fewer columns, or use a faster disk" if facts.is_local else "or make a local copy of the data"),
        )
    speed = f"{total.bytes_read / total.busy_s / 1e6:,.1f} MB/s read by each worker"
    return Diagnosis(
        cause=Cause.SLOW_DECODE,
        found=f"{at_work}, most of it decoding ({speed})",
        cure=f"{_more_workers(facts, num_workers)}read fewer columns (columns=)"
        + (
            ", or, if the storage is slow, make a local copy of the data"
            if not facts.is_local and total.read_s == 0
            else ""
        ),
    )


def _more_workers(facts: PlanFacts, num_workers: int) -> str:
    if facts.num_cpus is not None and num_workers >= facts.num_cpus:
        return f"all {_count(facts.num_cpus, 'CPU')} are in use, so get more of them, or "
    return f"raise num_workers above {num_workers}, or "


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class Lookout:
    """Looks at a loader now and then, and says what is new: at most one warning a minute, no cause twice an epoch."""

    def __init__(self, facts: PlanFacts, *, num_workers: int) -> None:
        self._facts = facts
        self._num_workers = num_workers
        self._before: LoaderMetrics | None = None
        self._looked_s = float("-inf")
        self._warned_s = float("-inf")
        self._epoch: int | None = None
        self._told: set[Cause] = set()
        """In this epoch."""

    def is_due(self, now_s: float) -> bool:
        """Whether to take a snapshot for `look`: to be asked at every batch, so it costs a comparison."""
        return now_s - self._looked_s >= WINDOW_S

    def look(self, metrics: LoaderMetrics, *, epoch: int, now_s: float) -> Diagnosis | None:
        """What to tell the user now; the window reaches back to the look before."""
        before, self._before, self._looked_s = self._before, metrics, now_s
        if epoch != self._epoch:
            self._epoch, self._told = epoch, set()
        if before is None:
            return None  # the first window would hold the start
        diagnosis = diagnose(between(before, metrics), self._facts, num_workers=self._num_workers)
        if diagnosis is None or diagnosis.cause in self._told:
            return None
        if diagnosis.is_warning:
            if now_s - self._warned_s < PAUSE_S:
                return None
            self._warned_s = now_s
        self._told.add(diagnosis.cause)
        return diagnosis
