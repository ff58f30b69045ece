"""The core against a simple model, through any order of calls, deaths, drains and crashes.

The model knows only the answers to callers and the drained events. Drained events are durable: a crash resets the model
to its last drain, and the core rebuilt from the journal must agree with it.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from strata.coordinator.config import CoordinatorConfig, LeaseConfig, Limits
from strata.coordinator.state import events as e
from strata.coordinator.state.barriers import BarrierEnded, Released, Ticket
from strata.coordinator.state.core import Core
from strata.coordinator.state.job import GenerationChanged, Job
from strata.coordinator.state.ring import load_bounds
from strata.errors import (
    BarrierMismatch,
    EpochMismatch,
    JobInUse,
    ShardNotLeased,
    StaleGeneration,
    StaleIncarnation,
    UnknownWorker,
    WorkerExists,
)

CONFIG = CoordinatorConfig(
    lease=LeaseConfig(step_timeout_s=12.0), limits=Limits(max_checkpoints_per_job=2, max_released_barriers_per_job=50)
)
WORKERS = tuple(f"w{num}" for num in range(5))

# Most of the time one job, so that its calls meet each other. Times are sums of powers of two, so that they add up.
jobs = st.sampled_from(["a", "a", "a", "b"])
workers = st.sampled_from(WORKERS)
picks = st.integers(0, len(WORKERS) - 1)
"""One of the members, by rank."""
datasets = st.sampled_from(["d0", "d0", "d1"])
names = st.sampled_from(["sync", "save"])
checkpoints = st.sampled_from(["c0", "c0", "c1", "c2"])


@dataclass
class Round:
    """One attempt at a barrier."""

    required: frozenset[str]
    named: frozenset[str]
    arrived: set[str] = field(default_factory=set)


@dataclass
class Model:
    """By job first; what a crash resets to the last drain."""

    generation: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    members: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    """Sealed: worker → incarnation, in the order of ranks."""
    living: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    """The same, according to the drained events."""
    incarnations: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    epoch: dict[tuple[str, str], int] = field(default_factory=dict)
    done: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    acks: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    committed: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    released: dict[Ticket, Round] = field(default_factory=dict)
    sent: dict[tuple[str, int], dict[str, int]] = field(default_factory=dict)
    """(job, command) → worker → the incarnation it was sent to; only what was drained."""
    carried_out: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    """(job, incarnation) → the newest command that it acknowledged."""


class Coordination(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1_000.0
        self.core = Core(CONFIG)
        self.core.resume(self.now_s)
        self.shadow = Core(CONFIG)
        """Sees only the journal."""
        self.journal: list[bytes] = []
        self.snapshots: list[tuple[bytes, int]] = [(e.encode_snapshot(()), 0)]
        """One per drain, with the number of events before it."""
        self.owners: dict[tuple[str, str], list[str]] = {}
        """(job, dataset) → the names of the owners at the last drain."""
        self.model = Model()
        self.durable = Model()
        self.rounds: dict[Ticket, Round] = {}
        self.over: dict[Ticket, list[Round]] = defaultdict(list)
        """Rounds that have ended and whose notice is not drained yet."""

    # -- helpers ---------------------------------------------------------------------------------------------------

    def job(self, job_id: str) -> Job | None:
        return self.core.jobs.get(job_id)

    def seat(self, job_id: str, pick: int) -> tuple[Job, str, int] | None:
        """Draw a job, one of its members, and the incarnation."""
        job = self.job(job_id)
        if job is None or not job.membership.members:
            return None
        member = list(job.membership.members.values())[pick % len(job.membership.members)]
        return job, member.worker_id, member.incarnation

    def fenced(self, job: Job, call) -> object | None:
        """Return the call's answer; while a change waits for its seal, an error that names the next generation."""
        if not job.membership.changes:
            return call(job.membership.generation)
        before = self.core.snapshot()
        with pytest.raises(StaleGeneration) as caught:
            call(job.membership.generation)
        assert caught.value.generation == job.membership.generation + 1
        assert self.core.snapshot() == before
        return None

    def register(self, job_id: str, worker_id: str, instance_id: str, takeover: bool = False) -> None:
        with self.core.job_or_new(job_id) as job:
            job.register_worker(
                worker_id, instance_id=instance_id, capacity=1.0, hostname="", takeover=takeover, now_s=self.now_s
            )

    # -- workers ---------------------------------------------------------------------------------------------------

    @initialize()
    def a_job_with_3_workers(self) -> None:
        for worker_id in WORKERS[:3]:
            self.register("a", worker_id, f"{worker_id}-1")
        self.core.job("a").register_dataset(e.DatasetSpec(dataset_id="d0", total_samples=31, shard_size=2))
        self.model.epoch["a", "d0"], self.model.done["a", "d0"] = 0, set()
        self.drain()

    @rule(job_id=jobs, worker_id=workers, process=st.integers(1, 3), takeover=st.booleans(), drain=st.booleans())
    def join(self, job_id: str, worker_id: str, process: int, takeover: bool, drain: bool) -> None:
        self.join_undrained(job_id, worker_id, process, takeover)
        if drain:
            self.drain()

    def join_undrained(self, job_id: str, worker_id: str, process: int, takeover: bool) -> None:
        instance_id = f"{worker_id}-{process}"
        job = self.job(job_id)
        standing = job.membership.members.get(worker_id) if job else None
        if standing is None:
            self.register(job_id, worker_id, instance_id, takeover)
            return
        before = self.core.snapshot()
        if standing.joined.instance_id == instance_id:
            self.register(job_id, worker_id, instance_id, takeover)
            assert self.core.snapshot() == before
            assert standing.suspect_since_s is None
        elif takeover or standing.suspect_since_s is not None:
            self.register(job_id, worker_id, instance_id, takeover)
            assert job.membership.members[worker_id].incarnation > standing.incarnation
        else:
            with pytest.raises(WorkerExists):
                self.register(job_id, worker_id, instance_id, takeover)
            assert self.core.snapshot() == before

    @rule(job_id=jobs, pick=picks)
    def leave(self, job_id: str, pick: int) -> None:
        if seat := self.seat(job_id, pick):
            job, worker_id, incarnation = seat
            job.deregister_worker(worker_id, incarnation, "")
            before = self.core.snapshot()
            job.deregister_worker(worker_id, incarnation, "")
            assert self.core.snapshot() == before

    @rule(job_id=jobs, pick=picks, training=st.booleans(), moves=st.booleans(), acks=st.booleans())
    def beat(self, job_id: str, pick: int, training: bool, moves: bool, acks: bool) -> None:
        seat = self.seat(job_id, pick)
        if seat is None:
            return
        job, worker_id, incarnation = seat
        member = job.membership.members[worker_id]
        theirs = [
            command_id
            for (of_job, command_id), to in self.model.sent.items()
            if of_job == job_id and to.get(worker_id) == incarnation
        ]
        if acks and theirs:
            self.model.carried_out[job_id, incarnation] = max(theirs)
        acked = self.model.carried_out[job_id, incarnation]
        beat = job.heartbeat(
            worker_id,
            incarnation,
            state="TRAINING" if training else "IDLE",
            step=member.step + moves,
            epoch=None,
            metrics={},
            acked_command_id=acked,
            now_s=self.now_s,
        )
        assert [c.command_id for c in beat.commands] == sorted(c for c in theirs if c > acked)
        assert (beat.generation, beat.num_workers) == (self.model.generation[job_id], len(self.model.members[job_id]))

    @rule(job_id=jobs)
    def all_beat(self, job_id: str) -> None:
        if job := self.job(job_id):
            for rank in range(len(job.membership.members)):
                self.beat(job_id, rank, training=True, moves=True, acks=False)

    @rule(job_id=jobs, pick=picks)
    def reset_connection(self, job_id: str, pick: int) -> None:
        if seat := self.seat(job_id, pick):
            job, worker_id, incarnation = seat
            job.membership.suspect(worker_id, incarnation, self.now_s)

    # -- time ------------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.125, 0.625, 2.0, 2.375, 2.5]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.core.tick(self.now_s)
        self.note_ended_rounds()

    @rule(seconds=st.sampled_from([3.0, 64.0, 2.0**20]))
    def we_stand_still(self, seconds: float) -> None:
        """No worker dies because the coordinator paused; suspects and silent workers keep their remaining time."""
        before = {job_id: list(job.membership.members) for job_id, job in self.core.jobs.items()}
        self.now_s += seconds
        self.core.tick(self.now_s)
        self.note_ended_rounds()
        assert {job_id: list(job.membership.members) for job_id, job in self.core.jobs.items()} == before

    @rule(seconds=st.sampled_from([1.0, 2.0**20]))
    def the_clock_looks_back(self, seconds: float) -> None:
        before = self.core.snapshot()
        self.core.tick(self.now_s - seconds)
        self.note_ended_rounds()
        assert self.core.snapshot() == before

    def note_ended_rounds(self) -> None:
        for ticket in list(self.rounds):
            job = self.core.jobs[ticket.job_id]
            if (ticket.barrier_id, ticket.step) not in job.barriers.open and ticket not in self.model.released:
                self.over[ticket].append(self.rounds.pop(ticket))

    # -- shards ----------------------------------------------------------------------------------------------------

    @rule(job_id=jobs, dataset_id=datasets, num_shards=st.integers(1, 40), shuffle=st.booleans())
    def register_dataset(self, job_id: str, dataset_id: str, num_shards: int, shuffle: bool) -> None:
        if (job_id, dataset_id) not in self.model.epoch:
            with self.core.job_or_new(job_id) as job:
                job.register_dataset(
                    e.DatasetSpec(dataset_id=dataset_id, total_samples=num_shards, shard_size=1, shuffle=shuffle)
                )
            self.model.epoch[job_id, dataset_id], self.model.done[job_id, dataset_id] = 0, set()

    @rule(job_id=jobs, pick=picks, dataset_id=datasets, num=st.integers(1, 16))
    def ack_shards(self, job_id: str, pick: int, dataset_id: str, num: int) -> None:
        seat = self.seat(job_id, pick)
        if seat is None or (job_id, dataset_id) not in self.model.epoch:
            return
        job, worker_id, incarnation = seat
        page = job.assigned_shards(worker_id, dataset_id=dataset_id, epoch=None, include_done=True, offset=0)
        indices = [shard.index for shard in page.shards][:num]
        epoch = self.model.epoch[job_id, dataset_id]
        if not indices:
            return

        def call(generation: int):
            return job.ack_shards(
                worker_id, incarnation, generation, dataset_id=dataset_id, epoch=epoch, indices=indices
            )

        if self.fenced(job, call):
            self.model.done[job_id, dataset_id] |= set(indices)

    @rule(job_id=jobs, pick=picks, dataset_id=datasets, wrong=st.sampled_from(["owner", "epoch"]))
    def ack_what_is_not_ones_own(self, job_id: str, pick: int, dataset_id: str, wrong: str) -> None:
        seat = self.seat(job_id, pick)
        if seat is None or (job_id, dataset_id) not in self.model.epoch or seat[0].membership.changes:
            return
        job, worker_id, incarnation = seat
        foreign = np.flatnonzero((job.shards.datasets[dataset_id].owners == incarnation) == (wrong == "epoch"))
        if foreign.size:
            before = self.core.snapshot()
            with pytest.raises(ShardNotLeased if wrong == "owner" else EpochMismatch):
                job.ack_shards(
                    worker_id,
                    incarnation,
                    job.membership.generation,
                    dataset_id=dataset_id,
                    epoch=self.model.epoch[job_id, dataset_id] + (wrong == "epoch"),
                    indices=[int(foreign[0])],
                )
            assert self.core.snapshot() == before

    @rule(job_id=jobs, dataset_id=datasets, require_complete=st.booleans())
    def advance_epoch(self, job_id: str, dataset_id: str, require_complete: bool) -> None:
        key = (job_id, dataset_id)
        if key not in self.model.epoch:
            return
        job, epoch = self.core.jobs[job_id], self.model.epoch[key]
        if require_complete and len(self.model.done[key]) < job.shards.datasets[dataset_id].spec.num_shards:
            with pytest.raises(EpochMismatch):
                job.advance_epoch(dataset_id, from_epoch=epoch, require_complete=True)
            return
        for _ in range(2):
            assert job.advance_epoch(dataset_id, from_epoch=epoch, require_complete=require_complete) == epoch + 1
        self.model.epoch[key], self.model.done[key] = epoch + 1, set()

    # -- barriers --------------------------------------------------------------------------------------------------

    @rule(
        job_id=jobs,
        pick=picks,
        name=names,
        others=st.one_of(st.just(frozenset()), st.frozensets(workers, max_size=2)),
        timeout_s=st.sampled_from([0.0, 1.0]),
    )
    def arrive(self, job_id: str, pick: int, name: str, others: frozenset[str], timeout_s: float) -> None:
        seat = self.seat(job_id, pick)
        if seat is None:
            return
        job, worker_id, incarnation = seat
        named = (others & job.membership.members.keys()) | {worker_id} if others else frozenset()
        required = named or frozenset(self.model.members[job_id])
        ticket = Ticket(job_id, job.membership.generation, name, 0, 0)

        def call(generation: int):
            return job.wait_barrier(
                worker_id,
                incarnation,
                generation,
                barrier_id=name,
                step=0,
                members=named,
                timeout_s=timeout_s,
                now_s=self.now_s,
            )

        agreed = self.model.released.get(ticket) or self.rounds.get(ticket)
        if agreed is not None and agreed.named != named and not job.membership.changes:
            with pytest.raises(BarrierMismatch):
                call(job.membership.generation)
            return
        answer = self.fenced(job, call)
        if isinstance(answer, Released):
            assert self.model.released[ticket].required == required
            assert answer == Released(ticket.generation, len(required))
        elif answer is not None:
            assert answer._replace(round=0) == ticket
            assert ticket not in self.model.released
            current = self.rounds.setdefault(ticket, Round(required, named))
            current.arrived.add(worker_id)
            # Released by the last arrival and not before.
            assert ((name, 0) in job.barriers.released) == (current.arrived == current.required)
            if current.arrived == current.required:
                self.model.released[ticket] = current

    @rule(job_id=jobs, name=names, num=picks)
    def many_arrive(self, job_id: str, name: str, num: int) -> None:
        """Draw the first ranks, or all."""
        if job := self.job(job_id):
            for rank in range(len(job.membership.members))[: num + 1]:
                self.arrive(job_id, rank, name, frozenset(), 0.0)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @rule(job_id=jobs, pick=picks, checkpoint_id=checkpoints)
    def notify_checkpoint(self, job_id: str, pick: int, checkpoint_id: str) -> None:
        seat = self.seat(job_id, pick)
        if seat is None:
            return
        job, worker_id, incarnation = seat

        def call(generation: int):
            return job.notify_checkpoint(
                worker_id,
                incarnation,
                generation,
                spec=e.CheckpointSpec(checkpoint_id=checkpoint_id, step=1, epoch=0, path="/c"),
                ack=e.RankAck(size_bytes=1),
                wall_s=0.0,
            )

        stood = checkpoint_id in job.checkpoints.committed
        progress = self.fenced(job, call)
        if progress is None:
            return
        acks = self.model.acks[job_id, checkpoint_id]
        if not stood:
            acks.add(worker_id)
            assert progress.committed == (acks == set(self.model.members[job_id]))
            assert progress.num_acked == len(acks)
        assert progress.committed or not stood
        if progress.committed and not stood:
            assert job.checkpoints.committed[checkpoint_id].size_bytes == len(acks)
            acks.clear()
            self.model.committed[job_id] = [*self.model.committed[job_id], checkpoint_id][-2:]

    @rule(job_id=jobs, checkpoint_id=checkpoints, num=picks)
    def many_notify(self, job_id: str, checkpoint_id: str, num: int) -> None:
        """Draw the first ranks, or all."""
        if job := self.job(job_id):
            for rank in range(len(job.membership.members))[: num + 1]:
                self.notify_checkpoint(job_id, rank, checkpoint_id)

    # -- commands --------------------------------------------------------------------------------------------------

    @rule(job_id=jobs, pick=picks, to_all=st.booleans(), request=st.sampled_from(["", "r0", "r1"]), drain=st.booleans())
    def send_command(self, job_id: str, pick: int, to_all: bool, request: str, drain: bool) -> None:
        seat = self.seat(job_id, pick)
        if seat is None:
            return
        job, worker_id, _ = seat
        known = job.commands.requests.get(request)
        to = [] if to_all else [worker_id]
        command_id, num_workers = job.send_command(to, "REBALANCE", reason="", args={}, request_id=request)
        assert command_id == (known or job.commands.last_id)
        assert num_workers == (len(job.membership.members) if to_all else 1)
        if drain:
            self.drain()

    # -- the end of a job ------------------------------------------------------------------------------------------

    @rule(job_id=jobs, force=st.booleans())
    def drop_job(self, job_id: str, force: bool) -> None:
        self.drain()
        job = self.job(job_id)
        if job is not None and job.membership.members and not force:
            with pytest.raises(JobInUse):
                self.core.drop_job(job_id, force=False, generation=0, reason="")
            return
        was_there = job is not None
        assert self.core.drop_job(job_id, force=force, generation=0, reason="") == was_there
        assert not self.core.drop_job(job_id, force=force, generation=0, reason="")
        for of_job in (self.model.epoch, self.model.done, self.model.acks, self.model.sent, self.model.carried_out):
            for key in [key for key in of_job if key[0] == job_id]:
                del of_job[key]
        self.model.committed.pop(job_id, None)
        for key in [key for key in self.owners if key[0] == job_id]:
            del self.owners[key]
        self.drain()

    # -- late calls ------------------------------------------------------------------------------------------------

    @rule(job_id=jobs, pick=picks, back=st.integers(1, 3))
    def call_of_another_generation(self, job_id: str, pick: int, back: int) -> None:
        if seat := self.seat(job_id, pick):
            job, worker_id, incarnation = seat
            before = self.core.snapshot()
            with pytest.raises(StaleGeneration) as caught:
                job.membership.fenced(worker_id, incarnation, job.membership.generation - back)
            assert caught.value.generation == job.membership.generation + bool(job.membership.changes)
            assert self.core.snapshot() == before

    @rule(job_id=jobs, worker_id=workers, oldest=st.booleans())
    def call_of_a_dead_process(self, job_id: str, worker_id: str, oldest: bool) -> None:
        job = self.job(job_id)
        if job is None:
            return
        living = {m.incarnation for m in job.membership.members.values()}
        gone = sorted(self.model.incarnations[job_id] - living)
        if gone:
            before = self.core.snapshot()
            incarnation = gone[0 if oldest else -1]
            with pytest.raises((StaleIncarnation, UnknownWorker)):
                job.ack_shards(worker_id, incarnation, job.membership.generation, dataset_id="d0", epoch=0, indices=[0])
            assert self.core.snapshot() == before

    # -- the journal -----------------------------------------------------------------------------------------------

    @rule()
    def drain(self) -> None:
        events, notices = self.core.drain()
        assert not self.core.has_news
        for event in events:
            payload = e.encode(event)
            again = e.decode(payload)
            assert again == event
            assert again.words()
            self.journal.append(payload)
            self.shadow.apply(again)
        self.check_ends([notice for notice in notices if isinstance(notice, BarrierEnded)])
        self.check_generations(events, [notice for notice in notices if isinstance(notice, GenerationChanged)])
        self.core.announce(notices)
        assert self.shadow.snapshot() == self.core.snapshot()
        for job_id in {"a", "b"} - self.core.jobs.keys():
            self.model.generation[job_id] = self.core.spent.generation
        self.check_successions()
        self.snapshots.append((e.encode_snapshot(self.core.snapshot()), len(self.journal)))
        self.durable = copy.deepcopy(self.model)

    def check_ends(self, ends: list[BarrierEnded]) -> None:
        """Every round ends once: released with all members, or broken with a missing worker or a new generation."""
        for end in ends:
            ticket = end.ticket._replace(round=0)
            waiting = self.over[ticket]
            current = waiting.pop(0) if waiting else self.rounds.pop(ticket)
            if isinstance(end.outcome, Released):
                assert current.arrived == current.required == self.model.released[ticket].required
                assert end.outcome == Released(end.ticket.generation, len(current.required))
            else:
                assert current.arrived != current.required
                assert current.arrived <= current.required
                assert end.outcome.generation in (end.ticket.generation, end.ticket.generation + 1)
                if end.outcome.generation == end.ticket.generation:
                    assert end.outcome.missing.keys() == current.required - current.arrived
        assert not any(self.over.values())

    def check_generations(self, events: list[e.Event], changes: list[GenerationChanged]) -> None:
        """One for a batch in which a worker joined or left, none otherwise."""
        changed = {event.job_id for event in events if isinstance(event, e.WorkerJoined | e.WorkerLeft | e.JobDropped)}
        assert sorted(change.job_id for change in changes) == sorted(changed)
        for event in events:
            living = self.model.living[event.job_id]
            if isinstance(event, e.WorkerJoined):
                assert event.incarnation not in self.model.incarnations[event.job_id]
                self.model.incarnations[event.job_id].add(event.incarnation)
                living[event.worker_id] = event.incarnation
            elif isinstance(event, e.WorkerLeft):
                assert living.pop(event.worker_id) == event.incarnation
            elif isinstance(event, e.JobDropped):
                assert event.num_workers == len(living)
                living.clear()
            elif isinstance(event, e.CommandSent):
                to = {worker_id: living[worker_id] for worker_id in event.worker_ids}
                self.model.sent[event.job_id, event.command.command_id] = to
            elif isinstance(event, e.CheckpointCommitted):
                assert event.record.num_ranks == len(self.model.members[event.job_id])
                assert event.record.generation == self.model.generation[event.job_id]
            elif isinstance(event, e.BarrierReleased):
                assert event.generation == self.model.generation[event.job_id]
        for change in changes:
            assert change.num_workers == len(self.model.living[change.job_id])
            assert change.generation == self.model.generation[change.job_id] + 1
            self.model.generation[change.job_id] = change.generation
            self.model.members[change.job_id] = dict(self.model.living[change.job_id])
            assert not any(ticket.job_id == change.job_id for ticket in self.rounds)
            for key in [key for key in self.model.acks if key[0] == change.job_id]:
                del self.model.acks[key]

    def check_successions(self) -> None:
        """While the same worker ids are members, whichever their processes, no shard moves."""
        for job_id, job in self.core.jobs.items():
            names = {m.incarnation: m.worker_id for m in job.membership.members.values()}
            for dataset_id, dataset in job.shards.datasets.items():
                owners = [names.get(owner, "") for owner in dataset.owners.tolist()]
                before = self.owners.get((job_id, dataset_id), owners)
                if set(before) == set(owners) == set(names.values()):
                    assert owners == before
                self.owners[job_id, dataset_id] = owners

    @rule(num_back=st.one_of(st.none(), st.integers(1, 4)))
    def crash(self, num_back: int | None) -> None:
        """What was not drained has not happened; arrivals are repeated. Restart from the beginning or a snapshot."""
        core, position = Core(CONFIG), 0
        if num_back is not None:
            payload, position = self.snapshots[max(-num_back, -len(self.snapshots))]
            core.restore(e.decode_snapshot(payload))
        for payload in self.journal[position:]:
            core.apply(e.decode(payload))
        core.resume(self.now_s)
        assert core.snapshot() == self.shadow.snapshot()
        assert not core.has_news
        self.core = core
        self.model = copy.deepcopy(self.durable)
        self.rounds.clear()
        self.over.clear()

    # -- invariants ------------------------------------------------------------------------------------------------

    @invariant()
    def generations_move_only_with_a_drain(self) -> None:
        for job_id, job in self.core.jobs.items():
            assert job.membership.generation == self.model.generation[job_id]
            if not job.membership.changes:
                living = {m.worker_id: m.incarnation for m in job.membership.members.values()}
                assert list(living.items()) == list(self.model.members[job_id].items())

    @invariant()
    def incarnations_ascend_with_the_ranks(self) -> None:
        for job in self.core.jobs.values():
            incarnations = [m.incarnation for _, m in job.membership.ranked()]
            assert incarnations == sorted(set(incarnations))
            assert all(job.membership.rank(m.worker_id) == rank for rank, m in job.membership.ranked())
            assert max(incarnations, default=0) <= job.membership.last_incarnation

    @invariant()
    def every_shard_has_one_owner_who_is_a_member_with_a_fair_load(self) -> None:
        for job in self.core.jobs.values():
            if job.membership.changes:
                continue
            members = job.membership.members.values()
            for dataset in job.shards.datasets.values():
                loads = [int((dataset.owners == m.incarnation).sum()) for m in members]
                if members:
                    assert sum(loads) == dataset.spec.num_shards
                    lo, hi = load_bounds(dataset.spec.num_shards, [m.joined.capacity for m in members])
                    assert (lo <= loads).all()
                    assert (loads <= hi).all()
                else:
                    assert not dataset.owners.any()

    @invariant()
    def what_is_done_is_what_was_acknowledged(self) -> None:
        for (job_id, dataset_id), done in self.model.done.items():
            dataset = self.core.jobs[job_id].shards.datasets[dataset_id]
            assert dataset.epoch == self.model.epoch[job_id, dataset_id]
            assert set(np.flatnonzero(dataset.done).tolist()) == done
            assert dataset.num_done == len(done)

    @invariant()
    def what_is_committed_is_what_all_acknowledged(self) -> None:
        for job_id, job in self.core.jobs.items():
            assert list(job.checkpoints.committed) == self.model.committed[job_id]
            attempts = {(job_id, name): set(attempt.acks) for name, attempt in job.checkpoints.attempts.items()}
            assert attempts == {key: acks for key, acks in self.model.acks.items() if acks and key[0] == job_id}

    @invariant()
    def what_is_released_had_everybody_there(self) -> None:
        for job_id, job in self.core.jobs.items():
            for (name, step), release in job.barriers.released.items():
                ticket = Ticket(job_id, job.membership.generation, name, step, 0)
                assert release.num_members == len(self.model.released[ticket].required)
                assert (name, step) not in job.barriers.open


pytestmark = pytest.mark.timeout(300)
"""Takes seconds; shrinking a failure takes a minute or two."""

TestCoordination = Coordination.TestCase
TestCoordination.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
