"""One job: its members, shards, barriers, checkpoints and commands, joined.

The machines know nothing of each other; this is where a change of the membership deals the shards anew, breaks the
barriers and ends the unfinished checkpoints. Decisions come back from the machines as events, `_emit` applies them, and
the engine takes them to the journal; notices are what others must hear once that is done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from strata.coordinator.state import events as e
from strata.coordinator.state import limits as checks
from strata.coordinator.state.barriers import BarrierEnded, Barriers, Released, Ticket
from strata.coordinator.state.checkpoints import RESTORABLE, Checkpoints
from strata.coordinator.state.commands import Commands
from strata.coordinator.state.membership import MAX_FENCE, Membership
from strata.coordinator.state.shards import ShardBook
from strata.errors import JobInUse, StaleGeneration, StaleIncarnation, UnknownJob
from strata.printing import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from strata.coordinator.config import CoordinatorConfig
    from strata.coordinator.state.checkpoints import CheckpointProgress
    from strata.coordinator.state.membership import Member, WorkerEvent, WorkerStateName
    from strata.coordinator.state.shards import Shard

DEFAULT_JOB = "default"


@dataclass(frozen=True, slots=True)
class GenerationChanged:
    """To be told to every member once it is durable."""

    job_id: str
    generation: int
    num_workers: int
    reason: str


@dataclass(frozen=True, slots=True)
class CommandQueued:
    """To be told to its worker once it is durable."""

    job_id: str
    worker_id: str
    command: e.CommandRecord


@dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    """To be sent to those who watch the job once it is durable."""

    job_id: str
    checkpoint_id: str
    step: int


@dataclass(frozen=True, slots=True)
class WorkerEventReported:
    """To be sent to those who watch the job. Heartbeats are not durable, so this is not either."""

    job_id: str
    worker_id: str
    event: WorkerEvent


Notice = GenerationChanged | CommandQueued | BarrierEnded | CheckpointCommitted | WorkerEventReported


@dataclass(frozen=True, slots=True)
class Registration:
    fence: int
    generation: int
    rank: int
    world_size: int

    @property
    def incarnation(self) -> int:
        return e.number_of(self.fence)


class Beat(NamedTuple):
    generation: int
    num_workers: int
    commands: Sequence[e.CommandRecord]


@dataclass(frozen=True, slots=True)
class ShardPage:
    generation: int
    shards: list[Shard]
    next_offset: int


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a worker stands in the membership."""

    generation: int
    rank: int
    world_size: int
    reason: str


@dataclass(frozen=True, slots=True)
class Recovery:
    checkpoint: e.CheckpointRecord | None
    registration: Registration
    page: ShardPage
    reason: str


@dataclass(slots=True)
class Outbox:
    """What the jobs have decided and the engine has not yet taken."""

    events: list[e.Event] = field(default_factory=list)
    """Applied; to be made durable, in this order."""
    notices: list[Notice] = field(default_factory=list)
    """To be told when those events are durable."""
    unsealed: dict[str, Job] = field(default_factory=dict)
    """Jobs whose members have changed since their last generation."""


class Job:
    def __init__(
        self, job_id: str, config: CoordinatorConfig, outbox: Outbox, spent: e.SpentNumbers | None = None
    ) -> None:
        """`spent`: its numbers begin after these, of jobs that were dropped."""
        self.job_id = job_id
        self.membership = Membership(job_id, lease=config.lease, limits=config.limits)
        self.shards = ShardBook(job_id, limits=config.limits)
        self.barriers = Barriers(job_id, limits=config.limits)
        self.checkpoints = Checkpoints(job_id, limits=config.limits)
        self.commands = Commands(job_id, limits=config.limits)
        if spent is not None:
            self.membership.generation = spent.generation
            self.membership.last_incarnation = spent.incarnation
            self.commands.last_id = spent.command_id
        self.announced = (self.membership.generation, 0)
        """Generation and number of workers that are durable: what heartbeats may tell."""
        self.announced_command_id = self.commands.last_id
        """The newest command that is durable, likewise."""
        self._outbox = outbox
        self._config = config
        self._now_s = 0.0
        self._is_dropped = False
        self._appliers: dict[type, Callable[..., None]] = {
            e.WorkerJoined: lambda event: self.membership.apply_joined(event, self._now_s),
            e.WorkerLeft: self._apply_left,
            e.GenerationStarted: self._apply_generation,
            e.DatasetRegistered: self.shards.apply_registered,
            e.ShardsAssigned: self.shards.apply_assigned,
            e.ShardsDone: self.shards.apply_done,
            e.EpochAdvanced: self.shards.apply_advanced,
            e.BarrierReleased: self.barriers.apply_released,
            e.CheckpointAcked: self.checkpoints.apply_acked,
            e.CheckpointCommitted: self.checkpoints.apply_committed,
            e.CheckpointAborted: self.checkpoints.apply_aborted,
            e.CommandSent: self.commands.apply_sent,
            e.CommandsAcked: self.commands.apply_acked,
            e.NumbersSkipped: self.membership.apply_skipped,
        }

    # -- workers ---------------------------------------------------------------------------------------------------

    def register_worker(
        self,
        worker_id: str,
        *,
        instance_id: str,
        capacity: float,
        hostname: str,
        takeover: bool,
        now_s: float,
        nonce: int = 0,
        is_watched: bool = False,
        launch_rank: int | None = None,
        attempt: int | None = None,
    ) -> Callable[[], Registration]:
        """The answer is taken after the seal: before it, the generation is not known."""
        self._now_s = now_s
        decided = self.membership.register(
            worker_id,
            instance_id=instance_id,
            capacity=capacity or 1.0,
            hostname=hostname,
            takeover=takeover,
            nonce=nonce,
            is_watched=is_watched,
            launch_rank=launch_rank,
            attempt=attempt,
        )
        self._emit(decided)
        member = self.membership.members[worker_id]
        member.last_seen_s = now_s
        member.suspect_since_s = None
        return lambda: self._registered(member)

    def _registered(self, member: Member) -> Registration:
        """After the seal. A worker that was replaced by then is told so: rank and shards are its successor's."""
        if self._is_dropped:
            raise UnknownJob(f"job {self.job_id!r} was dropped; register again to begin another", field="job_id")
        if member.worker_id in self.membership.members:
            self.membership.member(member.worker_id, member.joined.fence)
        return self.registration(member)

    def registration(self, member: Member) -> Registration:
        return Registration(
            fence=member.joined.fence,
            generation=self.membership.generation,
            rank=self.membership.rank(member.worker_id) if member.worker_id in self.membership.members else 0,
            world_size=len(self.membership.members),
        )

    def standing(self, worker_id: str, fence: int) -> Callable[[], Standing]:
        """Taken after the seal, like every generation; who is out is refused at once."""
        self.membership.member(worker_id, fence)
        return lambda: self._standing(worker_id, fence)

    def _standing(self, worker_id: str, fence: int) -> Standing:
        member = self.membership.member(worker_id, fence)
        return Standing(
            generation=self.membership.generation,
            rank=self.membership.rank(member.worker_id),
            world_size=len(self.membership.members),
            reason=self.membership.generation_reason,
        )

    def deregister_worker(self, worker_id: str, fence: int, reason: str) -> Callable[[], int]:
        self._emit(self.membership.deregister(worker_id, fence, reason))
        return lambda: self.membership.generation

    def heartbeat(
        self,
        worker_id: str,
        fence: int,
        *,
        state: WorkerStateName | None,
        step: int | None,
        epoch: int | None,
        metrics: Mapping[str, float],
        acked_command_id: int,
        now_s: float,
        events: Sequence[WorkerEvent] = (),
    ) -> Beat:
        """Of fence 0 it is only a look, which anybody may have: it neither reports nor keeps the lease."""
        member = self.membership.member(worker_id, fence)
        if fence:
            self.membership.beat(member, now_s, state=state, step=step, epoch=epoch, metrics=metrics, events=events)
            if events:
                self._outbox.notices += [WorkerEventReported(self.job_id, worker_id, event) for event in events]
        elif metrics or events or acked_command_id or (state, step, epoch) != (None, None, None):
            raise StaleIncarnation(
                "incarnation is 0, with which a heartbeat may look and not report; "
                "send the one that RegisterWorker answered",
                field="incarnation",
                generation=self.membership.generation,
            )
        commands: Sequence[e.CommandRecord] = ()
        if self.commands.pending:
            self._emit(self.commands.ack(worker_id, acked_command_id))
            pending = self.commands.pending.get(worker_id, ())
            commands = tuple(c for c in pending if c.command_id <= self.announced_command_id)
        return Beat(*self.announced, commands)

    def report_suspicion(self, worker_id: str, fence: int, reason: str, *, now_s: float) -> None:
        """Its relay lost the connection to it."""
        checks.check_text(reason, "reason")
        checks.check_count(fence, "incarnation", least=1, most=MAX_FENCE)
        self.membership.member(worker_id, fence)
        self.membership.suspect(worker_id, fence, now_s, reason)

    def send_command(
        self,
        worker_ids: Sequence[str],
        name: e.CommandName,
        *,
        reason: str,
        args: Mapping[str, str],
        request_id: str,
    ) -> tuple[int, int]:
        """The command's id, and to how many it went."""
        sent = self.commands.send(self.membership, worker_ids, name, reason=reason, args=args, request_id=request_id)
        self._emit(sent)
        for event in sent:
            self._outbox.notices += [CommandQueued(self.job_id, w, event.command) for w in event.worker_ids]
            return event.command.command_id, len(event.worker_ids)
        return self.commands.requests[request_id], len(set(worker_ids)) or len(self.membership.members)

    # -- shards ----------------------------------------------------------------------------------------------------

    def register_dataset(self, spec: e.DatasetSpec) -> tuple[int, int]:
        """Number of shards, and the epoch it is in."""
        for event in self.shards.register(spec):
            self._emit([event])
            self._emit(self.shards.assign(self.shards.datasets[spec.dataset_id], self.membership))
        dataset = self.shards.datasets[spec.dataset_id]
        return dataset.spec.num_shards, dataset.epoch

    def assigned_shards(
        self, worker_id: str, *, dataset_id: str, epoch: int | None, include_done: bool, offset: int
    ) -> ShardPage:
        member = self.membership.member(worker_id, 0)
        shards, next_offset = self.shards.owned(
            member.incarnation, dataset_id=dataset_id, epoch=epoch, include_done=include_done, offset=offset
        )
        return ShardPage(self.membership.generation, shards, next_offset)

    def ack_shards(
        self, worker_id: str, fence: int, generation: int, *, dataset_id: str, epoch: int, indices: Sequence[int]
    ) -> tuple[int, int]:
        """Shards done in this epoch, and in all."""
        member = self.membership.fenced(worker_id, fence, generation)
        self._emit(
            self.shards.ack(
                dataset_id, epoch=epoch, worker_id=worker_id, incarnation=member.incarnation, indices=indices
            )
        )
        dataset = self.shards.datasets[dataset_id]
        return dataset.num_done, dataset.spec.num_shards

    def advance_epoch(self, dataset_id: str, *, from_epoch: int, require_complete: bool) -> int:
        self._emit(self.shards.advance(dataset_id, from_epoch=from_epoch, require_complete=require_complete))
        return self.shards.datasets[dataset_id].epoch

    # -- barriers --------------------------------------------------------------------------------------------------

    def wait_barrier(
        self,
        worker_id: str,
        fence: int,
        generation: int,
        *,
        barrier_id: str,
        step: int,
        members: frozenset[str],
        timeout_s: float,
        now_s: float,
        others: Sequence[tuple[str, int]] = (),
    ) -> Released | Ticket:
        """The release, if it stands already; else what to wait for.

        `others`, with their fences, arrive in the same call: all of them, or, if one is refused, nobody.
        """
        config = self._config.barrier
        arriving = dict.fromkeys([worker_id, *(other for other, _ in others)])
        for arrival in ((worker_id, fence), *others):
            self.membership.fenced(*arrival, generation)
        wait_s = timeout_s and checks.check_number(timeout_s, "timeout_s", least=0.001, most=config.max_timeout_s)
        for worker in arriving:
            self.barriers.check(self.membership, worker, barrier_id, step, members)
        release = self.barriers.released.get((barrier_id, step))
        if release is not None:
            return Released(generation, release.num_members)
        deadline_s = now_s + (wait_s or config.timeout_s)
        for worker in arriving:
            ticket, released = self.barriers.arrive(
                self.membership, worker, barrier_id, step, members, now_s=now_s, deadline_s=deadline_s
            )
            if released:  # those who come after the last were counted before; they would open it anew
                break
        self._emit(released)
        self._outbox.notices += [BarrierEnded(ticket, Released(generation, event.num_members)) for event in released]
        return ticket

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def notify_checkpoint(
        self,
        worker_id: str,
        fence: int,
        generation: int,
        *,
        spec: e.CheckpointSpec,
        ack: e.RankAck,
        wall_s: float,
    ) -> CheckpointProgress:
        self.membership.fenced(worker_id, fence, generation)
        self._emit(self.checkpoints.ack(self.membership, worker_id, spec, ack))
        committed = self.checkpoints.commit(self.membership, spec.checkpoint_id, wall_s)
        self._emit(committed)
        if committed:
            self._outbox.notices.append(CheckpointCommitted(self.job_id, spec.checkpoint_id, spec.step))
        return self.checkpoints.progress(spec.checkpoint_id, self.membership)

    def latest_checkpoint(self, kinds: Sequence[e.CheckpointKind]) -> e.CheckpointRecord | None:
        return self.checkpoints.latest(kinds or RESTORABLE)

    def request_recovery(self, worker_id: str, fence: int) -> Recovery:
        member = self.membership.member(worker_id, fence)
        return Recovery(
            checkpoint=self.checkpoints.latest(),
            registration=self.registration(member),
            page=self.assigned_shards(worker_id, dataset_id="", epoch=None, include_done=False, offset=0),
            reason=self.membership.generation_reason,
        )

    # -- the end ---------------------------------------------------------------------------------------------------

    def drop(self, *, force: bool, generation: int, reason: str) -> e.JobDropped:
        """The job's end, to be applied by whoever holds it; those who wait at a barrier are told."""
        members = self.membership
        if generation not in (0, members.generation):
            raise StaleGeneration(
                f"job {self.job_id!r} is in generation {members.generation}, not {generation}: somebody came or went "
                "since you looked, or it is another job of that name; look again",
                field="generation",
                generation=members.generation,
            )
        if members.members and not force:
            raise JobInUse(
                f"job {self.job_id!r} has {counted(len(members.members), 'worker')} in it; wait until none is left, "
                "or set force",
                field="job_id",
                generation=members.generation,
            )
        self._is_dropped = True
        dropped = e.JobDropped(
            job_id=self.job_id,
            generation=members.generation + 1,
            incarnation=members.last_incarnation,
            command_id=self.commands.last_id,
            num_workers=len(members.members),
            reason=reason or "it is over",
        )
        members.generation, members.generation_reason = dropped.generation, dropped.words()
        self._outbox.notices += self.barriers.break_all(members, dict.fromkeys(members.members, dropped.words()))
        self._outbox.notices.append(GenerationChanged(self.job_id, dropped.generation, 0, dropped.words()))
        return dropped

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self, now_s: float, *, lenient: bool = False) -> None:
        """`lenient`: connections may have broken because of us, so a lost one counts no more than silence."""
        self._now_s = now_s
        self._emit(self.membership.sweep(now_s, lenient=lenient))
        if not self.membership.changes:  # else the seal breaks them all, and knows who left
            self._outbox.notices += self.barriers.expire(self.membership, now_s)

    def skip_numbers(self) -> None:
        """The journal's end was lost: what numbers were given out in it is not known, and none may be given twice."""
        self._emit(self.membership.skip())

    def seal(self) -> None:
        """Makes one generation of all changes since the last, and brings everything else in line with it."""
        leaving, successors = self.membership.leaving, self.membership.successors
        for started in self.membership.seal():
            ended = self.checkpoints.abort_all(f"generation {started.generation} began: {started.reason}")
            self._emit([*ended, started])
            for dataset in self.shards.datasets.values():
                self._emit(self.shards.assign(dataset, self.membership, successors))
            self._outbox.notices += self.barriers.break_all(self.membership, leaving)
            self._outbox.notices.append(
                GenerationChanged(self.job_id, started.generation, started.num_workers, started.reason)
            )

    # -- durable state ---------------------------------------------------------------------------------------------

    def _emit(self, decided: Iterable[e.Event]) -> None:
        for event in decided:
            self.apply(event)
            self._outbox.events.append(event)
        if self.membership.changes:
            self._outbox.unsealed[self.job_id] = self

    def apply(self, event: e.Event) -> None:
        self._appliers[type(event)](event)

    def _apply_left(self, event: e.WorkerLeft) -> None:
        self.membership.apply_left(event)
        self.commands.apply_left(event.worker_id)

    def _apply_generation(self, event: e.GenerationStarted) -> None:
        self.membership.apply_generation(event)
        self.barriers.apply_generation()

    def snapshot(self) -> e.JobSnapshot:
        members = self.membership
        return e.JobSnapshot(
            job_id=self.job_id,
            generation=members.generation,
            generation_reason=members.generation_reason,
            last_incarnation=members.last_incarnation,
            members=tuple(m.joined for m in members.members.values()),
            departed=tuple(members.departed.values()),
            datasets=self.shards.snapshot(),
            released=self.barriers.snapshot(),
            checkpoints=tuple(self.checkpoints.committed.values()),
            open_checkpoints=self.checkpoints.open_checkpoints(),
            last_command_id=self.commands.last_id,
            commands=self.commands.snapshot(),
            command_requests=dict(self.commands.requests),
        )

    def restore(self, snapshot: e.JobSnapshot) -> None:
        members = self.membership
        for joined in snapshot.members:
            members.apply_joined(joined, self._now_s)
        members.departed = {left.worker_id: left for left in snapshot.departed}
        members.changes.clear()
        members.generation = snapshot.generation
        members.generation_reason = snapshot.generation_reason
        members.last_incarnation = snapshot.last_incarnation
        self.shards.restore(snapshot.datasets)
        self.barriers.restore(snapshot.released)
        self.checkpoints.restore(snapshot.checkpoints, snapshot.open_checkpoints)
        self.commands.restore(snapshot.last_command_id, snapshot.commands, snapshot.command_requests)
