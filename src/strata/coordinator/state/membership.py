"""The members of a job and their leases.

Every change of membership is a new *generation*. Changes collect until `seal` makes one generation of them, so that the
loss of a whole rack is one change. A member is identified by its name (`worker_id`), its process (`instance_id`), and
its *incarnation*: a number that no other member of the job ever had, which distinguishes a process that was declared
dead from its successor. The calls of a worker carry its *fence*: the incarnation together with a random number that
only this process knows, so that no other process can act for it.

Three conditions end a membership without an action of the worker: silence longer than the lease, a reset connection
that was not restored in time, and a step counter that does not move while the worker reports that it is training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from strata.coordinator.state import limits
from strata.coordinator.state.events import GenerationStarted, NumbersSkipped, WorkerJoined, WorkerLeft, number_of
from strata.coordinator.state.series import Series
from strata.errors import StaleGeneration, StaleIncarnation, UnknownWorker, WorkerExists

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from strata.coordinator.config import LeaseConfig, Limits
    from strata.coordinator.state.events import LeaveCause
    from strata.coordinator.state.time_use import TimeUse

WorkerStateName = Literal["INITIALIZING", "IDLE", "LOADING_DATA", "TRAINING", "CHECKPOINTING", "RECOVERING", "ERROR"]

WorkerEventName = Literal["CHOSEN", "RESTORED", "FIRST_STEP"]

MAX_DEPARTED = 1_000
"""Departed incarnations remembered, to give a late caller the reason."""
MAX_REASONS_IN_WORDS = 4
MAX_SUSPECT_REASON = 200
"""Characters; the loss of a rack should fit into one line."""
GATHERING = 1.0
"""Heartbeats that the death of a silent worker may be delayed, to combine it with others that fell silent at the same
time: their last heartbeats may be this far apart."""
GATHERING_SUSPECTS = 0.5
"""The same for workers whose connections were lost, as a fraction of the suspicion: a busy coordinator notices the loss
of hundreds of connections one after the other."""
SKIPPED_NUMBERS = 1_000_000
MAX_FENCE = 2**63 - 1


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """A moment in the life of a worker process, by its own clock."""

    kind: WorkerEventName
    at_s: float
    step: int = 0


@dataclass(slots=True)
class Member:
    """A current member. Only `joined` is durable; the rest comes from its heartbeats."""

    joined: WorkerJoined
    last_seen_s: float
    progress_s: float
    """When its step last changed, or it last did something other than training."""
    joined_s: float | None = None
    """None if that was before a restart of the coordinator."""
    suspect_since_s: float | None = None
    suspect_reason: str = ""
    """The reason reported with the suspicion, if any."""
    state: WorkerStateName = "INITIALIZING"
    step: int = 0
    epoch: int = 0
    metrics: dict[str, Series] = field(default_factory=dict)
    events: dict[WorkerEventName, WorkerEvent] = field(default_factory=dict)
    """The newest event of each kind."""
    time_use: TimeUse | None = None
    """The newest that it has measured."""
    time_use_at_s: float = 0.0
    """When that arrived."""

    @property
    def worker_id(self) -> str:
        return self.joined.worker_id

    @property
    def incarnation(self) -> int:
        return self.joined.incarnation


class Membership:
    def __init__(self, job_id: str, *, lease: LeaseConfig, limits: Limits) -> None:
        self.job_id = job_id
        self.generation = 0
        self.generation_reason = "no worker has joined yet"
        self.last_incarnation = 0
        self.members: dict[str, Member] = {}
        """By worker id, in the order of joining, which is the order of ranks and of incarnations."""
        self.changes: list[str] = []
        """Descriptions of the changes since the last seal."""
        self.successors: dict[int, int] = {}
        """Old incarnation → new one, for worker ids that joined again since the last seal."""
        self.leaving: dict[str, str] = {}
        """Worker id → reason, for workers that left since the last seal."""
        self.departed: dict[str, WorkerLeft] = {}
        """The last incarnation to leave, for each worker id that is not a member now."""
        self.left_s: dict[str, float] = {}
        """When the last incarnation to leave did so, by worker id; not durable."""
        self._ranks: dict[str, int] | None = None
        """Computed on first use after a change."""
        self._lease = lease
        self._limits = limits

    # -- decisions: return events, change nothing ------------------------------------------------------------------

    def register(
        self,
        worker_id: str,
        *,
        instance_id: str,
        capacity: float,
        hostname: str,
        takeover: bool,
        nonce: int = 0,
        is_watched: bool = False,
        launch_rank: int | None = None,
        attempt: int | None = None,
    ) -> list[WorkerLeft | WorkerJoined]:
        """Return nothing if this process is already a member; else the events of its joining, and of its predecessor's
        leaving.
        """
        limits.check_id(worker_id, "worker_id")
        limits.check_id(instance_id, "instance_id")
        limits.check_text(hostname, "hostname")
        limits.check_number(capacity, "capacity", least=1e-3, most=1e6)
        events: list[WorkerLeft | WorkerJoined] = []
        standing = self.members.get(worker_id)
        if standing is not None:
            if standing.joined.instance_id == instance_id:
                return []
            if not takeover and standing.suspect_since_s is None:
                raise WorkerExists(
                    f"worker_id={worker_id!r} is in use by a live process (incarnation {standing.incarnation}); "
                    f"choose another id, set takeover to replace it, or wait {self._lease.lease_s} s after it dies",
                    field="worker_id",
                )
            events.append(self._left(standing, "replaced", "replaced by another process of the same id"))
        else:
            limits.check_room(
                len(self.members),
                self._limits.max_workers_per_job,
                "workers in this job",
                "max_workers_per_job",
                field="worker_id",
            )
        events.append(
            WorkerJoined(
                job_id=self.job_id,
                worker_id=worker_id,
                incarnation=self.last_incarnation + 1,
                instance_id=instance_id,
                nonce=nonce,
                capacity=capacity,
                hostname=hostname,
                is_watched=is_watched,
                launch_rank=launch_rank,
                attempt=attempt,
            )
        )
        return events

    def deregister(self, worker_id: str, fence: int, reason: str) -> list[WorkerLeft]:
        """Return the event of leaving, or nothing if this incarnation has already left."""
        limits.check_text(reason, "reason")
        gone = self.departed.get(worker_id)
        if worker_id not in self.members and gone is not None and gone.fence == fence:
            return []
        member = self.member(worker_id, fence)
        limits.check_count(fence, "incarnation", least=1, most=MAX_FENCE)
        return [self._left(member, "deregistered", reason or "it deregistered")]

    def sweep(self, now_s: float, *, lenient: bool = False) -> list[WorkerLeft]:
        """Return the workers that are dead by now, with reasons; `lenient` ignores lost connections."""
        dead = [left for member in self.members.values() if (left := self._verdict(member, now_s, lenient))]
        return [] if dead and self._should_wait(dead, now_s) else dead

    def _should_wait(self, dead: Sequence[WorkerLeft], now_s: float) -> bool:
        """Whether other workers will soon be dead for the same reason: those of one node, whose last heartbeats differ,
        or whose connections were lost one after the other. Waiting for them makes one generation of one failure.
        """
        lease, members = self._lease, self.members.values()
        causes = {left.cause for left in dead}
        if causes == {"lease"}:
            limit_s, patience_s = lease.lease_s, lease.heartbeat_s * GATHERING
            ages_s = [now_s - member.last_seen_s for member in members]
        elif causes == {"connection"}:
            limit_s, patience_s = lease.suspicion_s, lease.suspicion_s * GATHERING_SUSPECTS
            ages_s = [now_s - member.suspect_since_s for member in members if member.suspect_since_s is not None]
        else:
            return False
        return max(ages_s) <= limit_s + patience_s and any(limit_s - patience_s < age <= limit_s for age in ages_s)

    def skip(self) -> list[NumbersSkipped]:
        """Skip far enough that no number is used twice, whatever was lost."""
        return [
            NumbersSkipped(
                job_id=self.job_id,
                generation=self.generation + SKIPPED_NUMBERS,
                incarnation=self.last_incarnation + SKIPPED_NUMBERS,
            )
        ]

    def seal(self) -> list[GenerationStarted]:
        """Return one generation for all changes since the last one."""
        if not self.changes:
            return []
        return [
            GenerationStarted(
                job_id=self.job_id,
                generation=self.generation + 1,
                num_workers=len(self.members),
                reason=self._changes_in_words(),
            )
        ]

    def _changes_in_words(self) -> str:
        words = "; ".join(self.changes[:MAX_REASONS_IN_WORDS])
        more = len(self.changes) - MAX_REASONS_IN_WORDS
        return f"{words}; and {more} more" if more > 0 else words

    def _verdict(self, member: Member, now_s: float, lenient: bool) -> WorkerLeft | None:
        lease = self._lease
        silent_s = now_s - member.last_seen_s
        if silent_s > lease.lease_s:
            return self._left(member, "lease", f"silent for {silent_s:.1f} s, lease {lease.lease_s} s")
        suspect_since_s = None if lenient else member.suspect_since_s
        if suspect_since_s is not None and now_s - suspect_since_s > lease.suspicion_s:
            why = f" ({member.suspect_reason})" if member.suspect_reason else ""
            reason = f"connection lost and not restored within {lease.suspicion_s} s{why}"
            return self._left(member, "connection", reason)
        if lease.step_timeout_s and member.state == "TRAINING" and not member.joined.is_watched:
            stuck_s = now_s - member.progress_s
            if stuck_s > lease.step_timeout_s:
                reason = f"hung at step {member.step} for {stuck_s:.1f} s, limit {lease.step_timeout_s} s"
                return self._left(member, "hung", reason)
        return None

    def _left(self, member: Member, cause: LeaveCause, reason: str) -> WorkerLeft:
        return WorkerLeft(
            job_id=self.job_id,
            worker_id=member.worker_id,
            incarnation=member.incarnation,
            nonce=member.joined.nonce,
            cause=cause,
            reason=reason,
        )

    # -- fencing ---------------------------------------------------------------------------------------------------

    def member(self, worker_id: str, fence: int) -> Member:
        """Return the member if it has this incarnation; 0 matches any."""
        member = self.members.get(worker_id)
        if member is not None and fence in (0, member.joined.fence):
            return member
        gone = self.departed.get(worker_id)
        if member is not None or (gone is not None and gone.fence == fence):
            why = gone.reason if gone is not None and gone.fence == fence else "another process uses its id"
            raise StaleIncarnation(
                f"incarnation {number_of(fence)} of worker {worker_id!r} is out: {why}; register again",
                field="incarnation",
                generation=self.generation,
            )
        limits.check_id(worker_id, "worker_id")
        raise UnknownWorker(
            f"job {self.job_id!r} has no worker {worker_id!r}; register it first, or again if it was declared dead",
            field="worker_id",
        )

    def fenced(self, worker_id: str, fence: int, generation: int) -> Member:
        """Return the member if the caller knows the newest membership.

        A generation ends with the first change, not only with the seal, so that a worker that left is not counted. The
        error names the generation that the seal will start, because it is sent after the seal.
        """
        if fence == 0:
            raise StaleIncarnation("incarnation is 0; send the one returned by RegisterWorker", field="incarnation")
        member = self.member(worker_id, fence)
        if self.changes or generation != self.generation:
            current = self.generation + bool(self.changes)
            reason = self._changes_in_words() if self.changes else self.generation_reason
            raise StaleGeneration(
                f"generation {generation} is over, the current one is {current} ({reason}); "
                "fetch your shards again and retry with the new generation",
                field="generation",
                generation=current,
            )
        return member

    # -- volatile state --------------------------------------------------------------------------------------------

    def beat(
        self,
        member: Member,
        now_s: float,
        *,
        state: WorkerStateName | None,
        step: int | None,
        epoch: int | None,
        metrics: Mapping[str, float],
        events: Sequence[WorkerEvent] = (),
        time_use: TimeUse | None = None,
    ) -> None:
        if metrics:
            self._check_metrics(member, metrics)
        if step is not None:
            limits.check_count(step, "step")
        if epoch is not None:
            limits.check_count(epoch, "epoch")
        member.last_seen_s = max(member.last_seen_s, now_s)
        member.suspect_since_s = None
        if state is not None and state != member.state:
            member.state = state
            member.progress_s = now_s
        if step is not None and step != member.step:
            member.step = step
            member.progress_s = now_s
        if epoch is not None:
            member.epoch = epoch
        for event in events:
            member.events[event.kind] = event
        if time_use is not None:
            member.time_use, member.time_use_at_s = time_use, now_s
        if not metrics:
            return
        for name, value in metrics.items():
            series = member.metrics.get(name)
            if series is None:
                series = member.metrics[name] = Series(self._limits.max_points_per_series)
            series.add(member.step, value)

    def _check_metrics(self, member: Member, metrics: Mapping[str, float]) -> None:
        new = [name for name in metrics if name not in member.metrics]
        for num, name in enumerate(new, start=len(member.metrics)):
            limits.check_id(name, "metrics")
            limits.check_room(
                num, self._limits.max_series_per_worker, "metrics", "max_series_per_worker", field="metrics"
            )

    def suspect(self, worker_id: str, fence: int, now_s: float, reason: str = "") -> None:
        """Mark a worker as suspect: its connection was reset, so it may be dead or reconnecting."""
        member = self.members.get(worker_id)
        if member is not None and member.joined.fence == fence and member.suspect_since_s is None:
            member.suspect_since_s = now_s
            member.suspect_reason = reason[:MAX_SUSPECT_REASON]

    def excuse(self, seconds: float, now_s: float) -> None:
        """Do not count a pause of the coordinator as silence of the workers."""
        for member in self.members.values():
            member.last_seen_s = min(member.last_seen_s + seconds, now_s)
            member.progress_s = min(member.progress_s + seconds, now_s)
            if member.suspect_since_s is not None:
                member.suspect_since_s = min(member.suspect_since_s + seconds, now_s)

    def renew_all(self, now_s: float) -> None:
        """Renew every lease after a restart, so that workers have time to reconnect."""
        for member in self.members.values():
            member.last_seen_s = member.progress_s = now_s
            member.joined_s = None  # the journal has no monotonic times
            member.suspect_since_s = None

    def end(self) -> None:
        """Forget the members, without a new generation: it would be none that any of them has seen."""
        self.members.clear()
        self._ranks = None

    def ranked(self) -> Iterator[tuple[int, Member]]:
        return enumerate(self.members.values())

    def rank(self, worker_id: str) -> int:
        if self._ranks is None:
            self._ranks = {worker_id: rank for rank, worker_id in enumerate(self.members)}
        return self._ranks[worker_id]

    # -- apply -----------------------------------------------------------------------------------------------------

    def apply_joined(self, event: WorkerJoined, now_s: float) -> None:
        gone = self.departed.pop(event.worker_id, None)
        if gone is not None:
            self.successors[gone.incarnation] = event.incarnation
        self.members[event.worker_id] = Member(event, last_seen_s=now_s, progress_s=now_s, joined_s=now_s)
        self.last_incarnation = event.incarnation
        self._ranks = None
        self.changes.append(event.words())

    def apply_left(self, event: WorkerLeft, now_s: float) -> None:
        self.left_s.pop(event.worker_id, None)
        self.left_s[event.worker_id] = now_s
        while len(self.left_s) > MAX_DEPARTED:
            del self.left_s[next(iter(self.left_s))]
        del self.members[event.worker_id]
        self._ranks = None
        self.departed.pop(event.worker_id, None)
        self.departed[event.worker_id] = event
        while len(self.departed) > MAX_DEPARTED:
            del self.departed[next(iter(self.departed))]
        self.changes.append(event.words())
        self.leaving[event.worker_id] = event.reason

    def apply_skipped(self, event: NumbersSkipped) -> None:
        self.generation = event.generation
        self.last_incarnation = event.incarnation
        self.changes.append(event.words())

    def apply_generation(self, event: GenerationStarted) -> None:
        self.generation = event.generation
        self.generation_reason = event.reason
        self.changes.clear()
        self.successors = {}
        self.leaving = {}
