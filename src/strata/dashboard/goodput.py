"""The ledger of a run: where its wall time went, multiplied by its ranks. Pure, in whole microseconds.

The dashboard keeps one `Life` per worker process: when it joined and left, by the clock of the coordinator, and the
newest `TimeUse` that it sent. `ledger` divides the time of each rank in each attempt among the categories. What is not
known is `unknown`, so the parts always add up to the whole: a worker that was killed takes its last second with it.

An attempt begins when the previous one failed or, if that is not known, when its first rank left for good. The time
until the first step of a rank is `starting` in the first attempt and after a resume, and `recovering` in all others.
The time between the end of a run and its resume does not count. Steps are computed twice if an earlier process of the
job had already made them; their computing time is counted where they are repeated.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import msgspec

from strata.coordinator.state.time_use import TimeUse  # noqa: TC001 - decoded at run time

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from strata.dashboard.sample import Sample, WorkerSample

Category = Literal["computing", "data", "checkpoint", "barriers", "starting", "recovering", "repeated", "unknown"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
MAX_LIVES = 20_000
"""Processes that are remembered; those that left first are forgotten first."""
_MICRO = 1_000_000


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a worker. Times are wall times of the coordinator."""

    job_id: str
    worker_id: str
    incarnation: int
    rank: int
    attempt: int
    joined_at_s: float
    is_join_known: bool = True
    """False if the coordinator was restarted since, without a history: then `joined_at_s` is when it was first seen."""
    left_at_s: float | None = None
    step: int = 0
    use: TimeUse | None = None
    use_at_s: float = 0.0
    """When `use` arrived."""
    known_step: int = 0
    """Last step that processes before this one had made."""
    repeated_s: float = 0.0
    """Computing time up to that step."""
    is_server: bool = False
    """It turned out to be a parameter server, which is not a rank: a script may divide roles at any time."""

    @property
    def key(self) -> str:
        return f"{self.job_id}/{self.worker_id}/{self.incarnation}"


class LifeChanges(NamedTuple):
    changed: list[Life]
    forgotten: list[str]
    """Keys of processes that are no longer remembered."""


class Lives:
    """The processes of all jobs, from samples."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Processes] = defaultdict(_Processes)
        self._changed: set[tuple[str, str]] = set()
        """Job and key."""
        self._left: list[tuple[float, str, str]] = []
        """A heap of those that have left: when, job and key. One that returned is still in it."""
        self._forgotten: set[str] = set()
        self._num = 0

    def of_job(self, job_id: str) -> list[Life]:
        """Return the processes of ranks."""
        lives = self._jobs[job_id].lives.values() if job_id in self._jobs else ()
        return [life for life in lives if not life.is_server]

    def restore(self, lives: Iterable[Life]) -> None:
        """Add what an earlier coordinator has stored. A process that is still a member goes on."""
        for life in lives:
            if life.key not in self._jobs[life.job_id].lives:
                self._keep(life)
        self._forget()

    def take_changes(self) -> LifeChanges:
        """Return what has changed since the last call."""
        changed, self._changed = self._changed, set()
        forgotten, self._forgotten = self._forgotten, set()
        return LifeChanges([self._jobs[job_id].lives[key] for job_id, key in changed], sorted(forgotten))

    def put_back(self, changes: LifeChanges) -> None:
        """Return changes that could not be stored; the next call of `take_changes` has them again."""
        for life in changes.changed:
            if life.job_id in self._jobs and life.key in self._jobs[life.job_id].lives:
                self._changed.add((life.job_id, life.key))
        self._forgotten.update(changes.forgotten)
        self._forgotten.difference_update(key for _, key in self._changed)

    def update(self, sample: Sample) -> None:
        for job_id, processes in self._jobs.items():
            found = sample.jobs.get(job_id)
            present = {_key(job_id, worker) for worker in found.workers} if found is not None else set()
            for life in [processes.lives[key] for key in processes.open - present]:
                left_s = sample.monotonic_s if found is None else found.left_s.get(life.worker_id, sample.monotonic_s)
                left_at_s = sample.at_s - max(sample.monotonic_s - left_s, 0.0)
                self._put(msgspec.structs.replace(life, left_at_s=max(left_at_s, life.joined_at_s, life.use_at_s)))
        # New processes come last: they know the steps of those that have left in the same sample.
        for job in sample.jobs.values():
            for worker in job.workers:
                if not worker.is_server:
                    self._report(job.job_id, worker, sample)
                elif (server := self._find(job.job_id, worker)) is not None:
                    self._put(msgspec.structs.replace(server, is_server=True))
        self._forget()

    def _report(self, job_id: str, worker: WorkerSample, sample: Sample) -> None:
        processes = self._jobs[job_id]
        life = processes.lives.get(_key(job_id, worker))
        if life is None:
            joined_s = sample.monotonic_s if worker.joined_s is None else worker.joined_s
            life = Life(
                job_id=job_id,
                worker_id=worker.worker_id,
                incarnation=worker.incarnation,
                rank=worker.rank if worker.launch_rank is None else worker.launch_rank,
                attempt=worker.attempt or 0,
                joined_at_s=sample.at_s - max(sample.monotonic_s - joined_s, 0.0),
                is_join_known=worker.joined_s is not None,
                known_step=processes.last_step,
            )
        age_s = max(sample.monotonic_s - worker.time_use_at_s, 0.0)
        self._put(
            grown(
                life, step=worker.step, use=worker.time_use, use_at_s=sample.at_s - age_s, first_step=worker.first_step
            )
        )

    def _find(self, job_id: str, worker: WorkerSample) -> Life | None:
        return self._jobs[job_id].lives.get(_key(job_id, worker)) if job_id in self._jobs else None

    def _put(self, life: Life) -> None:
        if self._jobs[life.job_id].lives.get(life.key) != life:
            self._keep(life)
            self._changed.add((life.job_id, life.key))

    def _keep(self, life: Life) -> None:
        processes = self._jobs[life.job_id]
        self._num += life.key not in processes.lives
        processes.put(life)
        self._forgotten.discard(life.key)
        if life.left_at_s is not None:
            heapq.heappush(self._left, (life.left_at_s, life.job_id, life.key))

    def _forget(self) -> None:
        """Drop those that left first. Members stay: the coordinator bounds their number."""
        while self._num > MAX_LIVES and self._left:
            left_at_s, job_id, key = heapq.heappop(self._left)
            lives = self._jobs[job_id].lives if job_id in self._jobs else {}
            if key in lives and lives[key].left_at_s == left_at_s:
                del lives[key]
                self._num -= 1
                self._changed.discard((job_id, key))
                self._forgotten.add(key)
                if not lives:
                    del self._jobs[job_id]


class _Processes:
    """The processes of one job."""

    def __init__(self) -> None:
        self.lives: dict[str, Life] = {}
        self.open: set[str] = set()
        """Keys of those that have not left."""
        self.last_step = 0
        """The last step that a process which has left had made."""

    def put(self, life: Life) -> None:
        self.lives[life.key] = life
        if life.left_at_s is None:
            self.open.add(life.key)
        else:
            self.open.discard(life.key)
            self.last_step = max(self.last_step, 0 if life.is_server else life.step)


def _key(job_id: str, worker: WorkerSample) -> str:
    return f"{job_id}/{worker.worker_id}/{worker.incarnation}"


def grown(life: Life, *, step: int, use: TimeUse | None, use_at_s: float, first_step: int | None = None) -> Life:
    """Return a process after another report. Of a report that crosses the last known step, the part up to that step is
    repeated, in proportion to the steps. The first report counts from the first step of the process.
    """
    repeated_s = life.repeated_s
    before = life.step if life.use is not None else first_step
    if use is not None and before is not None and before < min(step, life.known_step):
        before_s = 0.0 if life.use is None else life.use.computing_s
        share = (min(step, life.known_step) - before) / (step - before)
        repeated_s += max(use.computing_s - before_s, 0.0) * share
    joined_at_s = life.joined_at_s
    if use is not None and not life.is_join_known:  # it has measured since before it was first seen
        joined_at_s = min(joined_at_s, use_at_s - use.measured_s)
    return msgspec.structs.replace(
        life,
        joined_at_s=joined_at_s,
        is_join_known=life.is_join_known or use is not None,
        step=max(step, life.step),
        use=use or life.use,
        use_at_s=use_at_s if use is not None else life.use_at_s,
        left_at_s=None,
        repeated_s=repeated_s,
    )


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one attempt, or of a whole run. They add up to `total_us`."""

    attempt: int | None
    """None for the run."""
    began_at_s: float
    ended_at_s: float
    num_ranks: int
    parts_us: dict[Category, int]

    @property
    def total_us(self) -> int:
        return sum(self.parts_us.values())

    @property
    def goodput(self) -> float | None:
        """The share of the time that was spent on computing steps for the first time; None without any time."""
        return self.parts_us["computing"] / self.total_us if self.total_us else None


class RunTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What the timeline of a run has: wall times by attempt. All may be empty."""

    started_at_s: dict[int, float] = {}
    """When the workers of attempts were started: before they joined."""
    failed_at_s: dict[int, float] = {}
    """When attempts failed: before the coordinator removed their workers."""
    finished_at_s: dict[int, float] = {}
    """When the run ended during an attempt. The attempt after that is a resume."""


def ledger(lives: Sequence[Life], *, now_s: float, times: RunTimes | None = None) -> list[LedgerEntry]:
    """Return one entry per attempt, in order; nothing without any process. The time between the end of a run and its
    resume belongs to none.
    """
    times = times or RunTimes()
    attempts: dict[int, list[Life]] = defaultdict(list)
    for life in lives:
        attempts[life.attempt].append(life)
    numbers = sorted(attempts)
    entries: list[LedgerEntry] = []
    began_s, is_start = min(times.started_at_s.values(), default=None), True
    for number, following in zip_longest(numbers, numbers[1:]):
        of_attempt = attempts[number]
        begin = _us(_beginning(of_attempt, began_s))
        if entries:
            earliest = _us(entries[-1].ended_at_s)
            begin = max(begin, earliest) if is_start else earliest
        finished_s = _finished(times, number, following)
        if following is None or finished_s is not None:
            end_s = _last_exit(of_attempt, now_s, finished_s)
        else:
            joined_s = min(life.joined_at_s for life in attempts[following])
            end_s = min(times.failed_at_s.get(number, _first_loss(of_attempt, joined_s)), joined_s)
        entries.append(_entry(number, of_attempt, begin, max(_us(end_s), begin), is_start=is_start))
        began_s, is_start = None if following is None else times.started_at_s.get(following), finished_s is not None
    return entries


def total(entries: Sequence[LedgerEntry]) -> LedgerEntry | None:
    """Return the sum over attempts."""
    if not entries:
        return None
    return LedgerEntry(
        attempt=None,
        began_at_s=entries[0].began_at_s,
        ended_at_s=entries[-1].ended_at_s,
        num_ranks=max(entry.num_ranks for entry in entries),
        parts_us={name: sum(entry.parts_us[name] for entry in entries) for name in CATEGORIES},
    )


def _beginning(lives: Sequence[Life], began_at_s: float | None) -> float:
    joined_s = min(life.joined_at_s for life in lives)
    return joined_s if began_at_s is None else min(began_at_s, joined_s)


def _first_loss(lives: Sequence[Life], default_s: float) -> float:
    """Return when the first rank left for good. A worker may have been restarted alone before."""
    last: dict[int, Life] = {}
    for life in sorted(lives, key=lambda each: each.joined_at_s):
        last[life.rank] = life
    return min((life.left_at_s for life in last.values() if life.left_at_s is not None), default=default_s)


def _last_exit(lives: Sequence[Life], now_s: float, finished_s: float | None) -> float:
    """Return when the last rank left: by the end of the run, or not yet."""
    left = [life.left_at_s for life in lives if life.left_at_s is not None]
    ended_s = max(left) if len(left) == len(lives) else now_s
    return ended_s if finished_s is None else min(ended_s, finished_s)


def _finished(times: RunTimes, number: int, following: int | None) -> float | None:
    """Return when the run ended between two attempts, or after the last one; None if it went on."""
    ends = (at_s for at, at_s in times.finished_at_s.items() if at >= number and (following is None or at < following))
    return min(ends, default=None)


def _us(seconds: float) -> int:
    return round(seconds * _MICRO)


def _entry(number: int, lives: Sequence[Life], begin: int, end: int, *, is_start: bool) -> LedgerEntry:
    ranks: dict[int, list[Life]] = defaultdict(list)
    for life in lives:
        ranks[life.rank].append(life)
    parts = dict.fromkeys(CATEGORIES, 0)
    for of_rank in ranks.values():
        _add_rank(parts, sorted(of_rank, key=lambda each: each.joined_at_s), begin, end, is_start=is_start)
    return LedgerEntry(
        attempt=number, began_at_s=begin / _MICRO, ended_at_s=end / _MICRO, num_ranks=len(ranks), parts_us=parts
    )


def _add_rank(parts: dict[Category, int], lives: Sequence[Life], begin: int, end: int, *, is_start: bool) -> None:
    """Divide the time of one rank. `place` never goes back and ends at `end`, so nothing is lost or counted twice."""
    place = begin
    for number, life in enumerate(lives):
        stop = end if life.left_at_s is None else _us(life.left_at_s)
        if number + 1 < len(lives):
            stop = min(stop, _us(lives[number + 1].joined_at_s))
        stop = min(max(stop, place), end)
        idle: Category = "starting" if is_start and not number else "recovering"
        _add_life(parts, life, place, stop, idle)
        place = stop
    parts["barriers"] += end - place  # it has left, and the others go on


def _add_life(parts: dict[Category, int], life: Life, begin: int, end: int, idle: Category) -> None:
    use = life.use
    if use is None:
        parts["unknown" if life.step > life.known_step else idle] += end - begin
        return
    measured_to = min(max(_us(life.use_at_s), begin), end)
    measured_from = min(max(_us(life.use_at_s - use.measured_s), begin), measured_to)
    parts[idle] += measured_from - begin
    parts["unknown"] += end - measured_to
    left = measured_to - measured_from
    waits: tuple[tuple[Category, float], ...] = (
        ("data", use.data_s),
        ("checkpoint", use.checkpoint_s),
        ("barriers", use.barrier_s + (use.collective_s or 0.0)),
        ("recovering", use.restore_s),
        ("repeated", life.repeated_s),
    )
    for name, seconds in waits:
        part = min(max(_us(seconds), 0), left)
        parts[name] += part
        left -= part
    parts["computing"] += left
