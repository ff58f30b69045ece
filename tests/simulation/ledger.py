"""What is durable and what was answered, recorded independently of the state machines and compared with them at every
step.

The ledger folds the journal's events by its own rules, and rejects an event that should not occur. Every answer that a
client receives is checked against it: it must be durable by then. And a coordinator that has read its journal back must
have exactly the ledger's state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from strata.coordinator.state import events as e
from strata.coordinator.state.core import Core

JOB = "sim"
DATASET = "data"


class Violation(AssertionError):
    """A guarantee was violated."""


class Ledger:
    def __init__(self) -> None:
        self.violation: str | None = None
        self.generation = 0
        self.last_incarnation = 0
        self.members: dict[str, e.WorkerJoined] = {}
        self.joined: dict[int, e.WorkerJoined] = {}
        """By fence, ever."""
        self.left: dict[int, e.WorkerLeft] = {}
        """By fence, ever."""
        self.epoch = 0
        self.num_shards = 0
        self.owners: dict[int, int] = {}
        self.done: dict[int, set[int]] = defaultdict(set)
        """By epoch."""
        self.released: set[tuple[int, str, int]] = set()
        """(generation, barrier, step), ever."""
        self.attempts: dict[str, set[str]] = {}
        self.checkpoint_acks: set[tuple[str, int, str]] = set()
        self.committed: list[str] = []
        self.requests: dict[str, int] = {}
        self.commands: dict[int, tuple[str, ...]] = {}
        self.pending: dict[str, list[int]] = {}
        # what clients did and received
        self.arrivals: dict[tuple[int, str, int], set[int]] = defaultdict(set)
        """Fences of the workers that arrived at a barrier."""
        self.notified: set[tuple[str, int, int]] = set()
        """(checkpoint, generation, fence) that a client has reported."""
        self.received: set[tuple[str, int]] = set()
        """(worker, command)."""
        self.suspected: set[int] = set()
        """Fences whose connection was reset."""
        self.released_seen: set[tuple[int, str, int]] = set()
        self.outcomes: dict[Any, str] = {}
        """By ticket: how its barrier ended."""
        self.beliefs: dict[tuple[int, int, int], int] = {}
        """(generation, epoch, shard) → the incarnation that received it."""
        self.num_answers = 0
        self._fold: dict[type, Callable[[Any], None]] = {
            e.WorkerJoined: self._worker_joined,
            e.WorkerLeft: self._worker_left,
            e.GenerationStarted: self._generation_started,
            e.DatasetRegistered: self._dataset_registered,
            e.ShardsAssigned: self._shards_assigned,
            e.ShardsDone: self._shards_done,
            e.EpochAdvanced: self._epoch_advanced,
            e.BarrierReleased: self._barrier_released,
            e.CheckpointAcked: self._checkpoint_acked,
            e.CheckpointCommitted: self._checkpoint_committed,
            e.CheckpointAborted: self._checkpoint_aborted,
            e.CommandSent: self._command_sent,
            e.CommandsAcked: self._commands_acked,
        }

    def fail(self, what: str) -> None:
        self.violation = self.violation or what
        raise Violation(what)

    def expect(self, condition: bool, what: str) -> None:
        if not condition:
            self.fail(what)

    # -- the journal -----------------------------------------------------------------------------------------------

    def durable(self, batch: list[e.Event]) -> None:
        """Record that a batch is durable."""
        for event in batch:
            self._fold[type(event)](event)
        incarnations = {m.incarnation for m in self.members.values()}
        if self.num_shards and incarnations:
            orphans = [i for i, owner in self.owners.items() if owner not in incarnations]
            self.expect(not orphans, f"shards {orphans} have no owner in generation {self.generation}")

    def _worker_joined(self, event: e.WorkerJoined) -> None:
        self.expect(event.incarnation > self.last_incarnation, f"incarnation {event.incarnation} was given out twice")
        self.expect(event.worker_id not in self.members, f"{event.worker_id} joined while it is in")
        self.last_incarnation = event.incarnation
        self.members[event.worker_id] = self.joined[event.fence] = event

    def _worker_left(self, event: e.WorkerLeft) -> None:
        member = self.members.pop(event.worker_id, None)
        self.expect(member is not None and member.fence == event.fence, f"{event} left but was not in")
        if event.cause == "connection":
            self.expect(event.fence in self.suspected, f"{event.words()}, but its connection was never reset")
        self.left[event.fence] = event
        self.pending.pop(event.worker_id, None)

    def _generation_started(self, event: e.GenerationStarted) -> None:
        self.expect(event.generation > self.generation, f"generation {event.generation} began twice")
        self.expect(event.num_workers == len(self.members), f"{event} counts wrong")
        self.expect(not self.attempts, f"checkpoints {self.attempts} outlived their generation")
        self.generation = event.generation

    def _dataset_registered(self, event: e.DatasetRegistered) -> None:
        self.expect(not self.num_shards, "the dataset was registered twice")
        self.num_shards = event.dataset.num_shards
        self.owners = dict.fromkeys(range(self.num_shards), 0)

    def _shards_assigned(self, event: e.ShardsAssigned) -> None:
        indices, owners = np.split(e.unpack_ints(event.moves), 2)
        self.expect(len(set(indices.tolist())) == len(indices), "a shard was dealt twice in one deal")
        self.owners.update(zip(indices.tolist(), owners.tolist(), strict=True))

    def _shards_done(self, event: e.ShardsDone) -> None:
        done = self.done[event.epoch]
        self.expect(event.epoch == self.epoch, f"{event.words()}, but it is epoch {self.epoch}")
        self.expect(not done & set(event.indices), f"{event.words()}: done twice")
        mine = self.members[event.worker_id].incarnation
        self.expect(all(self.owners[i] == mine for i in event.indices), f"{event.words()}: not its own")
        done.update(event.indices)

    def _epoch_advanced(self, event: e.EpochAdvanced) -> None:
        self.expect(event.epoch == self.epoch + 1, f"epoch {event.epoch} follows {self.epoch}")
        self.expect(len(self.done[self.epoch]) == self.num_shards, f"epoch {self.epoch} ended short")
        self.epoch = event.epoch

    def _barrier_released(self, event: e.BarrierReleased) -> None:
        key = (event.generation, event.barrier_id, event.step)
        self.expect(event.generation == self.generation, f"{event.words()}, but {self.generation} stands")
        missing = [w for w, m in self.members.items() if m.fence not in self.arrivals[key]]
        self.expect(not missing, f"{event.words()}, but {missing} never arrived")
        self.expect(key not in self.released, f"{event.words()} twice")
        self.released.add(key)

    def _checkpoint_acked(self, event: e.CheckpointAcked) -> None:
        checkpoint_id = event.checkpoint.checkpoint_id
        fence = self.members[event.worker_id].fence
        reported = (checkpoint_id, event.generation, fence) in self.notified
        self.expect(reported and event.generation == self.generation, f"{event.words()}, which it did not report")
        self.attempts.setdefault(checkpoint_id, set()).add(event.worker_id)
        self.checkpoint_acks.add((checkpoint_id, event.generation, event.worker_id))

    def _checkpoint_committed(self, event: e.CheckpointCommitted) -> None:
        checkpoint_id = event.record.checkpoint.checkpoint_id
        acked = self.attempts.pop(checkpoint_id, set())
        self.expect(acked == set(self.members), f"{event.words()}, but only {sorted(acked)} have it")
        self.committed.append(checkpoint_id)

    def _checkpoint_aborted(self, event: e.CheckpointAborted) -> None:
        self.expect(event.checkpoint_id in self.attempts, f"{event.words()}, which was not open")
        del self.attempts[event.checkpoint_id]

    def _command_sent(self, event: e.CommandSent) -> None:
        number = event.command.command_id
        self.expect(number not in self.commands, f"command {number} was given out twice")
        self.expect(event.request_id not in self.requests, f"request {event.request_id} was carried out twice")
        self.requests[event.request_id] = number
        self.commands[number] = event.worker_ids
        for worker_id in event.worker_ids:
            self.pending.setdefault(worker_id, []).append(number)

    def _commands_acked(self, event: e.CommandsAcked) -> None:
        pending = self.pending.get(event.worker_id, [])
        for number in pending:
            has_it = (event.worker_id, number) in self.received
            self.expect(has_it or number > event.command_id, f"{event.words()}, but never received {number}")
        self.pending[event.worker_id] = [number for number in pending if number > event.command_id]

    # -- a restarted coordinator -----------------------------------------------------------------------------------

    def compare(self, core: Core) -> None:
        job = core.jobs.get(JOB)
        if job is None:
            self.expect(not self.joined and not self.num_shards, "the whole job is lost")
            return
        standing = {
            "generation": (job.membership.generation, self.generation),
            "last incarnation": (job.membership.last_incarnation, self.last_incarnation),
            "members": (
                {w: m.joined for w, m in job.membership.members.items()},
                self.members,
            ),
            "releases": (
                {(self.generation, *key) for key in job.barriers.released},
                {key for key in self.released if key[0] == self.generation},
            ),
            "attempts": ({name: set(a.acks) for name, a in job.checkpoints.attempts.items()}, self.attempts),
            "checkpoints": (list(job.checkpoints.committed), self.committed),
            "requests": (job.commands.requests, self.requests),
            "commands": (
                {w: [c.command_id for c in commands] for w, commands in job.commands.pending.items()},
                {w: numbers for w, numbers in self.pending.items() if numbers},
            ),
        }
        dataset = job.shards.datasets.get(DATASET)
        if dataset is not None or self.num_shards:
            assert dataset is not None, "the dataset is lost"
            standing["epoch"] = (dataset.epoch, self.epoch)
            standing["owners"] = (dict(enumerate(dataset.owners.tolist())), self.owners)
            standing["done"] = (set(np.flatnonzero(dataset.done).tolist()), self.done[self.epoch])
        for what, (found, meant) in standing.items():
            self.expect(found == meant, f"{what} read back as {found}, the journal has {meant}")

    # -- clients ---------------------------------------------------------------------------------------------------

    def announced_generation(self, generation: int) -> None:
        self.expect(
            generation <= self.generation, f"generation {generation} was announced, but {self.generation} is durable"
        )

    def believe(self, generation: int, epoch: int, index: int, incarnation: int) -> None:
        """Record that a worker takes this shard for its own in the generation that it has adopted."""
        other = self.beliefs.setdefault((generation, epoch, index), incarnation)
        self.expect(
            other == incarnation,
            f"shard {index} of epoch {epoch} is {other}'s and {incarnation}'s in generation {generation}",
        )

    def ended(self, ticket: Any, outcome: str) -> None:
        before = self.outcomes.setdefault(ticket, outcome)
        self.expect(before == outcome, f"barrier {ticket}: some received {before}, others {outcome}")
