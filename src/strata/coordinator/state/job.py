"""One job: its members, shards, barriers, checkpoints and commands, combined.

The state machines do not know each other. When the membership changes, this module reassigns the shards, breaks the
barriers and aborts unfinished checkpoints. The machines return decisions as events; `_emit` applies them, the engine
writes them to the journal, and notices are sent to workers once that is done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from strata.coordinator.state import events as e
from strata.coordinator.state import limits
from strata.coordinator.state.barriers import BarrierEnded, Barriers, Released, Ticket
from strata.coordinator.state.checkpoints import RESTORABLE, Checkpoints
from strata.coordinator.state.commands import Commands
from strata.coordinator.state.membership import MAX_FENCE, Membership
from strata.coordinator.state.shards import ShardBook
from strata.coordinator.state.views import Standing
from strata.errors import JobInUse, StaleGeneration, StaleIncarnation, UnknownJob
from strata.printing import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from strata.coordinator.config import CoordinatorConfig
    from strata.coordinator.state.checkpoints import CheckpointProgress
    from strata.coordinator.state.membership import Member, WorkerEvent, WorkerStateName
    from strata.coordinator.state.shards import Shard
    from strata.coordinator.state.time_use import TimeUse

DEFAULT_JOB = "default"


@dataclass(frozen=True, slots=True)
class GenerationChanged:
    """Sent to every member once it is durable."""

    job_id: str
    generation: int
    num_workers: int
    reason: str


@dataclass(frozen=True, slots=True)
class CommandQueued:
    """Sent to its worker once it is durable."""

    job_id: str
    worker_id: str
    command: e.CommandRecord
    previous_id: int = 0
    """The command that was pending for this worker before; 0: none."""


@dataclass(frozen=True, slots=True)
class CheckpointAnnounced:
    """Sent to sessions that watch the job, once it is durable."""

    job_id: str
    checkpoint_id: str
    step: int


@dataclass(frozen=True, slots=True)
class WorkerEventReported:
    """Sent to sessions that watch the job. Not durable, because heartbeats are not."""

    job_id: str
    worker_id: str
    event: WorkerEvent


Notice = GenerationChanged | CommandQueued | BarrierEnded | CheckpointAnnounced | WorkerEventReported


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
class Recovery:
    checkpoint: e.CheckpointRecord | None
    registration: Registration
    page: ShardPage
    reason: str


@dataclass(slots=True)
class Outbox:
    """Decisions of the jobs that the engine has not taken yet."""

    events: list[e.Event] = field(default_factory=list)
    """Applied; to be made durable, in this order."""
    notices: list[Notice] = field(default_factory=list)
    """To be sent once those events are durable."""
    unsealed: dict[str, Job] = field(default_factory=dict)
    """Jobs whose members have changed since their last generation."""


class Job:
    def __init__(
        self, job_id: str, config: CoordinatorConfig, outbox: Outbox, spent: e.SpentNumbers | None = None
    ) -> None:
        """Create the job; its numbers start after `spent`, those of dropped jobs."""
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
        """The durable generation and number of workers, which heartbeats may report."""
        self.announced_command_id = self.commands.last_id
        """The newest durable command."""
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
        """Register a worker. The answer is computed after the seal, because the generation is unknown before it."""
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
        """Return the registration after the seal. A worker that was replaced by then gets an error: its successor has
        rank and shards.
        """
        if self._is_dropped:
            raise UnknownJob(f"job {self.job_id!r} was dropped; register again to create a new one", field="job_id")
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
        """Return the standing after the seal, as for every generation; raise at once if the worker is no longer a
        member.
        """
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
        time_use: TimeUse | None = None,
    ) -> Beat:
        """Process a heartbeat. With fence 0 it only reads, which any caller may do: it neither reports nor renews the
        lease.
        """
        member = self.membership.member(worker_id, fence)
        if fence:
            self.membership.beat(
                member, now_s, state=state, step=step, epoch=epoch, metrics=metrics, events=events, time_use=time_use
            )
            if events:
                self._outbox.notices += [WorkerEventReported(self.job_id, worker_id, event) for event in events]
        elif metrics or events or acked_command_id or (state, step, epoch, time_use) != (None, None, None, None):
            raise StaleIncarnation(
                "incarnation is 0, with which a heartbeat may read but not report; "
                "send the one returned by RegisterWorker",
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
        """Mark a worker as suspect because its relay lost the connection to it."""
        limits.check_text(reason, "reason")
        limits.check_count(fence, "incarnation", least=1, most=MAX_FENCE)
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
        """Return the id of the command and the number of its recipients."""
        sent = self.commands.send(self.membership, worker_ids, name, reason=reason, args=args, request_id=request_id)
        self._emit(sent)
        for event in sent:
            self._outbox.notices += [
                CommandQueued(self.job_id, w, event.command, self.commands.previous_id(w)) for w in event.worker_ids
            ]
            return event.command.command_id, len(event.worker_ids)
        return self.commands.requests[request_id], len(set(worker_ids)) or len(self.membership.members)

    # -- shards ----------------------------------------------------------------------------------------------------

    def register_dataset(self, spec: e.DatasetSpec) -> tuple[int, int]:
        """Return the number of shards, and the current epoch."""
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
        """Return the number of shards done in this epoch, and the total."""
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
        """Return the release, if it is already recorded, or the ticket to wait for.

        `others`, with their fences, arrive in the same call: all of them, or, if one is rejected, none.
        """
        config = self._config.barrier
        arriving = dict.fromkeys([worker_id, *(other for other, _ in others)])
        for arrival in ((worker_id, fence), *others):
            self.membership.fenced(*arrival, generation)
        wait_s = timeout_s and limits.check_number(timeout_s, "timeout_s", least=0.001, most=config.max_timeout_s)
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
            if released:  # the remaining arrivals were counted before; they would reopen it
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
            self._outbox.notices.append(CheckpointAnnounced(self.job_id, spec.checkpoint_id, spec.step))
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
        """Return the end of the job, for the core to apply; callers waiting at a barrier are notified."""
        members = self.membership
        if generation not in (0, members.generation):
            raise StaleGeneration(
                f"job {self.job_id!r} is in generation {members.generation}, not {generation}: its members changed "
                "since you read it, or it is a new job of that name; read it again",
                field="generation",
                generation=members.generation,
            )
        if members.members and not force:
            raise JobInUse(
                f"job {self.job_id!r} still has {counted(len(members.members), 'worker')}; wait until all have left, "
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
            reason=reason or "it is finished",
        )
        members.generation, members.generation_reason = dropped.generation, dropped.words()
        self._outbox.notices += self.barriers.break_all(members, dict.fromkeys(members.members, dropped.words()))
        self._outbox.notices.append(GenerationChanged(self.job_id, dropped.generation, 0, dropped.words()))
        return dropped

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self, now_s: float, *, lenient: bool = False) -> None:
        """Check leases and deadlines; with `lenient`, connections may be lost because of us, so a lost one counts as
        silence.
        """
        self._now_s = now_s
        self._emit(self.membership.sweep(now_s, lenient=lenient))
        if not self.membership.changes:  # else the seal breaks them all, and knows which workers left
            self._outbox.notices += self.barriers.expire(self.membership, now_s)

    def skip_numbers(self) -> None:
        """Skip numbers after the end of the journal was lost: those in it are unknown, and none may be used twice."""
        self._emit(self.membership.skip())

    def seal(self) -> None:
        """Combine all changes since the last generation into a new one, and adapt everything else to it."""
        leaving, successors = self.membership.leaving, self.membership.successors
        for started in self.membership.seal():
            ended = self.checkpoints.abort_all(f"generation {started.generation} started: {started.reason}")
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
        self.membership.apply_left(event, self._now_s)
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
