"""Bottleneck diagnosis: why a training loop waits for data, and what to change.

Pure: the metrics of an interval in, a diagnosis with its reason out. If the metrics show no clear cause, there is no
diagnosis.

The loop waits, and the workers
- are idle                  → there are too few row groups for them
- are blocked               → the limit on decoded bytes is too small
- wait for bytes            → the storage is slow
- run the user's transform  → the transform is slow
- decode all the time       → decoding is the limit
The loop does not wait, but the workers do → the loop is the limit, as it should be.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from strata.data.runtime.metrics import between

if TYPE_CHECKING:
    from strata.data.runtime.metrics import LoaderMetrics, WorkerMetrics

INTERVAL_S = 10.0
"""Length of an interval: long compared to a block, short compared to an epoch."""
MIN_BATCHES = 10
"""Minimum batches of an interval; with fewer, one slow file dominates."""
WAITING_SHARE = 0.1
"""Share of the loop's time spent waiting that deserves a warning: below it, a cure gains at most a ninth."""
NOT_WAITING_SHARE = 0.02
"""Share of the loop's time spent waiting that is only overhead. Between the two, neither side is clearly slow."""
WASTED_SHARE = 0.3
"""Share of the workers' time, idle or blocked, that counts as the cause: one of three workers without work."""
BUSY_SHARE = 0.7
"""Share of the workers' time, busy, at which they are saturated; the rest is overhead."""
MAIN_SHARE = 0.5
"""Share of the workers' busy time that makes an activity the main cost."""
ROW_GROUPS_PER_WORKER = 2
"""Row groups per worker below which one worker decodes the last of an epoch while the others are idle."""
PAUSE_S = 60.0
"""Minimum time between two warnings."""


class Cause(enum.Enum):
    TOO_FEW_UNITS = "too few row groups"
    MEMORY_BOUND = "memory bound"
    SLOW_STORAGE = "slow storage"
    SLOW_TRANSFORM = "slow transform"
    SLOW_DECODE = "slow decode"
    SLOW_CONSUMER = "slow consumer"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """What a diagnosis needs to know about the loader."""

    num_row_groups: int
    """Row groups of the whole plan."""
    num_splits: int
    is_local: bool
    world_size: int = 1
    row_group_name: str = "row group"
    worker_type: Literal["thread", "process"] = "thread"
    num_cpus: int | None = None
    """CPUs that this process may use; None if unknown."""

    @property
    def row_groups_per_rank(self) -> int:
        return -(-self.num_row_groups // self.world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A cause, the numbers that show it, and the cure."""

    cause: Cause
    found: str
    cure: str

    @property
    def is_warning(self) -> bool:
        """Whether the loader is the limit; otherwise the diagnosis is only information."""
        return self.cause is not Cause.SLOW_CONSUMER

    def __str__(self) -> str:
        return f"{self.found}; {self.cure}"


def diagnose(interval: LoaderMetrics, facts: PlanFacts, *, num_workers: int) -> Diagnosis | None:
    """Diagnose the metrics of an interval (`metrics.between`). None if all is well or no cause is clear."""
    total = interval.total
    if interval.batches < MIN_BATCHES or interval.elapsed_s <= 0 or total.alive_s <= 0:
        return None
    waiting = interval.consumer_wait_s / interval.elapsed_s
    idle, blocked = total.idle_s / total.alive_s, total.blocked_s / total.alive_s
    if waiting < WAITING_SHARE:
        if waiting <= NOT_WAITING_SHARE and idle + blocked >= WASTED_SHARE:
            return _slow_consumer(waiting, idle + blocked)
        return None
    found = f"the training loop waits for data {waiting:.0%} of its time"
    if idle >= WASTED_SHARE and facts.row_groups_per_rank < ROW_GROUPS_PER_WORKER * num_workers:
        return _too_few_row_groups(found, idle, facts, num_workers)
    if blocked >= WASTED_SHARE:
        return _memory_bound(found, blocked, facts)
    if total.utilisation >= BUSY_SHARE:
        return _busy(found, total, facts, num_workers)
    return None


def _slow_consumer(waiting: float, resting: float) -> Diagnosis:
    return Diagnosis(
        cause=Cause.SLOW_CONSUMER,
        found=f"the training loop is the limit: it waits for data {waiting:.0%} of its time, and the workers wait "
        f"{resting:.0%} of theirs",
        cure="the loader needs no change",
    )


def _too_few_row_groups(found: str, idle: float, facts: PlanFacts, num_workers: int) -> Diagnosis:
    name, num = facts.row_group_name, facts.row_groups_per_rank
    per_rank = f", {num:,} on each of {facts.world_size} ranks," if facts.world_size > 1 else ""
    enough = ROW_GROUPS_PER_WORKER * num_workers * facts.world_size
    fewer = f", or set num_workers={num}, because more are idle" if num < num_workers else ""
    return Diagnosis(
        cause=Cause.TOO_FEW_UNITS,
        found=f"{found}, and the workers are idle {idle:.0%} of theirs: there are only "
        f"{_count(facts.num_row_groups, name)} ({_count(facts.num_splits, 'split')}){per_rank} for "
        f"{_count(num_workers, 'worker')}",
        cure=f"write the data with at least {enough:,} smaller {name}s{fewer}",
    )


def _memory_bound(found: str, blocked: float, facts: PlanFacts) -> Diagnosis:
    return Diagnosis(
        cause=Cause.MEMORY_BOUND,
        found=f"{found}, and the workers are blocked {blocked:.0%} of theirs, because decoded data fill the memory "
        "limit",
        cure=f"raise prefetch_bytes, lower shuffle_buffer_size, or write smaller {facts.row_group_name}s",
    )


def _busy(found: str, total: WorkerMetrics, facts: PlanFacts, num_workers: int) -> Diagnosis:
    """Diagnose saturated workers by what they do most."""
    busy = "is" if num_workers == 1 else "are"
    at_work = f"{found}, and {_count(num_workers, 'worker')} {busy} busy {total.utilisation:.0%} of theirs"
    transform, read = total.transform_s / total.busy_s, total.read_s / total.busy_s
    if transform > MAIN_SHARE:
        in_threads = facts.worker_type == "thread"
        return Diagnosis(
            cause=Cause.SLOW_TRANSFORM,
            found=f"{at_work}, {transform:.0%} of it in the transform",
            cure='set worker_type="process", so that transforms run in parallel, or make the transform faster'
            if in_threads
            else f"{_more_workers(facts, num_workers)}make the transform faster",
        )
    if read > MAIN_SHARE:
        speed = f"{total.bytes_read / total.read_s / 1e6:,.1f} MB/s for each worker"
        return Diagnosis(
            cause=Cause.SLOW_STORAGE,
            found=f"{at_work}, {read:.0%} of it waiting for bytes ({speed})",
            cure=f"raise num_workers above {num_workers} to read more in parallel, "
            + ("read fewer columns, or use a faster disk" if facts.is_local else "or copy the data to a local disk"),
        )
    speed = f"{total.bytes_read / total.busy_s / 1e6:,.1f} MB/s read by each worker"
    return Diagnosis(
        cause=Cause.SLOW_DECODE,
        found=f"{at_work}, most of it decoding ({speed})",
        cure=f"{_more_workers(facts, num_workers)}read fewer columns (columns=)"
        + (
            ", or, if the storage is slow, copy the data to a local disk"
            if not facts.is_local and total.read_s == 0
            else ""
        ),
    )


def _more_workers(facts: PlanFacts, num_workers: int) -> str:
    if facts.num_cpus is not None and num_workers >= facts.num_cpus:
        return f"add CPUs (all {facts.num_cpus} are in use), or "
    return f"raise num_workers above {num_workers}, or "


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class Lookout:
    """Diagnoses a loader at intervals and reports what is new: one warning a minute, each cause once an epoch."""

    def __init__(self, facts: PlanFacts, *, num_workers: int) -> None:
        self._facts = facts
        self._num_workers = num_workers
        self._before: LoaderMetrics | None = None
        self._looked_s = float("-inf")
        self._warned_s = float("-inf")
        self._epoch: int | None = None
        self._reported: set[Cause] = set()
        """Causes reported in this epoch."""

    def is_due(self, now_s: float) -> bool:
        """Return whether it is time for `look`. Called at every batch, so it costs only a comparison."""
        return now_s - self._looked_s >= INTERVAL_S

    def look(self, metrics: LoaderMetrics, *, epoch: int, now_s: float) -> Diagnosis | None:
        """Return what to report to the user; the interval starts at the previous call."""
        before, self._before, self._looked_s = self._before, metrics, now_s
        if epoch != self._epoch:
            self._epoch, self._reported = epoch, set()
        if before is None:
            return None  # the first interval would include the start
        diagnosis = diagnose(between(before, metrics), self._facts, num_workers=self._num_workers)
        if diagnosis is None or diagnosis.cause in self._reported:
            return None
        if diagnosis.is_warning:
            if now_s - self._warned_s < PAUSE_S:
                return None
            self._warned_s = now_s
        self._reported.add(diagnosis.cause)
        return diagnosis
