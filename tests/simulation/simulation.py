"""A whole cluster in one thread, from one number: coordinator, disk, network, clocks, workers, and faults.

For a while faults occur at random; then they stop, and the job must finish within bounded time. What must never happen
is in `ledger.py`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clients import Node, admin, check_answer
from clockwork import Scheduler
from ledger import Ledger, Violation
from network import Call, Disk, Server, make_config

from strata.coordinator.state import events as e

FAULTS = (
    "coordinator crash",
    "crash in commit",
    "coordinator pause",
    "disk",
    "worker crash",
    "worker hang",
    "second process",
    "partition",
    "reset",
    "slow",
    "duplicate",
    "clock jump",
)
LIVENESS_S = 150.0
"""After the last fault, the job ends within this time."""
MAX_EVENTS = 400_000


@dataclass(frozen=True)
class Outcome:
    seed: int
    violation: str | None
    ended_s: float
    num_events: int
    num_faults: int
    num_generations: int
    num_answers: int


class World:
    def __init__(self, seed: int, *, tracing: bool = False, refetch: bool = True) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.scheduler = Scheduler(rng)
        self.ledger = Ledger()
        self.tracing = tracing
        self.refetch = refetch
        """Whether workers fetch their shards again when the membership changed between page and refresh."""
        self.config = make_config(rng.choice((1, 4, 20, 1_000)))
        self.disk = Disk(self)
        self.server: Server | None = None
        self.num_shards = rng.randint(4, 24)
        self.num_epochs = rng.randint(1, 3)
        self.kinds = {kind for kind in FAULTS if rng.random() < 0.6}
        self.faults_end_s = rng.uniform(5, 25)
        self.mean_gap_s = rng.choice((0.5, 1.5, 4.0))
        self.delays_s = rng.choice((0.001, 0.02, 0.15))
        self.last_beat_s: dict[int, float] = {}
        """By fence: when the coordinator last received a message."""
        self.stops: list[tuple[float, float]] = []
        """When and for how long the coordinator did not run, or (below 0) its clock jumped."""
        self.released_seen_s: dict[tuple[int, str, int], float] = {}
        self.num_faults = 0
        self._number = 0
        self.slots = [[f"w{slot}{letter}" for letter in "ab"[: rng.randint(1, 2)]] for slot in range(rng.randint(1, 5))]
        self.nodes: list[Node] = []
        self.old_nodes: list[Node] = []

    # -- for processes ---------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        self._number += 1
        return self._number

    @property
    def faulty(self) -> bool:
        return self.scheduler.now_s < self.faults_end_s

    def chance(self, kind: str, probability: float) -> bool:
        return self.faulty and kind in self.kinds and self.rng.random() < probability

    def delay_s(self, node: Node) -> float:
        return self.rng.uniform(0.0, self.delays_s) * node.slowness

    def received(self, node: Node, call: Call, answer: Any) -> None:
        self.ledger.num_answers += 1
        if call.method != "heartbeat":
            self.trace(node.name, call.method, call.args, "→", answer)
        check_answer(self, call, answer)

    def check_silence(self, left: e.WorkerLeft) -> None:
        """Assert that a lease expires only by silence while the coordinator was running."""
        last_s = self.last_beat_s.get(left.fence)
        if left.cause != "lease" or last_s is None:
            return
        now_s = self.scheduler.now_s  # a stop that has just started comes after the decision
        stopped_s = sum(min(seconds, now_s - when_s) for when_s, seconds in self.stops if when_s >= last_s)
        silent_s = now_s - last_s - stopped_s
        self.ledger.expect(
            silent_s > self.config.lease.lease_s * 0.85, f"{left.words()}, but it was silent for only {silent_s:.1f} s"
        )

    def trace(self, *fields: Any) -> None:
        if self.tracing:
            print(f"{self.scheduler.now_s:9.3f}", *fields)

    # -- the run ---------------------------------------------------------------------------------------------------

    def play(self) -> Outcome:
        try:
            self._start_coordinator()
            for slot in range(len(self.slots)):
                self._start_node(slot, 0.0)
            all_workers = [worker_id for worker_ids in self.slots for worker_id in worker_ids]
            admin_node = Node(self, "admin", [])
            admin_node.start(admin(self, all_workers))
            self._next_fault()
            self._run()
            self._check_end()
        except Violation as violation:
            self.ledger.violation = self.ledger.violation or str(violation)
        if self.server is not None:
            self.server.die()
        return Outcome(
            seed=self.seed,
            violation=self.ledger.violation,
            ended_s=self.scheduler.now_s,
            num_events=self.scheduler.num_events,
            num_faults=self.num_faults,
            num_generations=self.ledger.generation,
            num_answers=self.ledger.num_answers,
        )

    def _run(self) -> None:
        while not self._finished():
            self.scheduler.step()
            if self.ledger.violation:
                raise Violation(self.ledger.violation)
            if self.server is not None and any(task.done() for task in self.server.loop.tasks):
                self.ledger.fail("the coordinator's ticker has ended")
            late = self.scheduler.now_s > self.faults_end_s + LIVENESS_S or self.scheduler.num_events > MAX_EVENTS
            if late:
                waiting = [w.worker_id for node in self.nodes for w in node.workers if not w.finished]
                self.ledger.fail(f"{waiting} had not finished {LIVENESS_S} s after the last fault")

    def _finished(self) -> bool:
        return (
            not self.faulty
            and len(self.nodes) == len(self.slots)
            and all(worker.finished for node in self.nodes for worker in node.workers)
        )

    def _check_end(self) -> None:
        ledger = self.ledger
        ledger.expect(ledger.epoch == self.num_epochs, f"epoch {ledger.epoch} of {self.num_epochs} at the end")
        for epoch in range(self.num_epochs):
            ledger.expect(len(ledger.done[epoch]) == self.num_shards, f"epoch {epoch} is not whole")
        again = Server(self)
        again.start()
        ledger.compare(again.engine.core)
        again.die()

    # -- lives -----------------------------------------------------------------------------------------------------

    def _start_coordinator(self) -> None:
        self.trace("coordinator starts")
        self.server = Server(self)
        self.last_beat_s.clear()
        self.server.start()

    def crash_coordinator(self) -> None:
        server = self.server
        if server is None or not server.alive:
            return
        server.die()
        self.scheduler.after(self.rng.choice((0.05, 1.0, 4.0)) * self.rng.random(), self._start_coordinator)

    def _start_node(self, slot: int, delay_s: float) -> None:
        def start() -> None:
            node = Node(self, f"n{slot}.{self.next_number()}", self.slots[slot])
            self.trace(node.name, "starts")
            self.nodes.append(node)
            node.start()

        self.scheduler.after(delay_s, start)

    # -- faults ----------------------------------------------------------------------------------------------------

    def _next_fault(self) -> None:
        gap_s = self.rng.expovariate(1 / self.mean_gap_s)
        if self.scheduler.now_s + gap_s < self.faults_end_s and self.kinds:
            self.scheduler.after(gap_s, self._fault)

    def _fault(self) -> None:
        kind = self.rng.choice(sorted(self.kinds))
        happen: Callable[[], None] = getattr(self, f"_{kind.replace(' ', '_')}")
        self.trace("fault:", kind)
        self.num_faults += 1
        happen()
        self._next_fault()

    def _living(self) -> Server | None:
        return self.server if self.server is not None and self.server.alive else None

    def _node(self) -> Node | None:
        return self.rng.choice(self.nodes) if self.nodes else None

    def _coordinator_crash(self) -> None:
        self.crash_coordinator()

    def _crash_in_commit(self) -> None:
        if server := self._living():
            server.trap = self.rng.choice(("before commit", "after commit"))

    def _coordinator_pause(self) -> None:
        if server := self._living():
            seconds = self.rng.choice((0.5, 3.0, 12.0)) * self.rng.random()
            if self.scheduler.now_s >= server.paused_until_s:
                server.pause(seconds)
                if seconds > self.config.lease.lease_s * 0.55:
                    self.stops.append((self.scheduler.now_s, seconds))

    def _disk(self) -> None:
        self.disk.failing_until_s = self.scheduler.now_s + self.rng.uniform(0.05, 3)

    def _worker_crash(self) -> None:
        if node := self._node():
            self.nodes.remove(node)
            node.die()
            self._start_node(
                int(node.name[1 : node.name.index(".")]), self.rng.choice((0.05, 1.0, 8.0)) * self.rng.random()
            )

    def _worker_hang(self) -> None:
        if node := self._node():
            node.pause(self.rng.choice((1.0, 12.0)) * self.rng.random())

    def _second_process(self) -> None:
        """A second process of the same workers, while the first one lives on."""
        if node := self._node():
            self.nodes.remove(node)
            node.superseded = True
            self.old_nodes.append(node)
            self._start_node(int(node.name[1 : node.name.index(".")]), 0.0)

    def _partition(self) -> None:
        healed_s = self.scheduler.now_s + self.rng.choice((0.5, 3.0, 9.0)) * self.rng.random()
        ways = self.rng.choice((("up",), ("down",), ("up", "down")))
        for node in self.rng.sample(self.nodes, self.rng.randint(0, len(self.nodes))):
            for way in ways:
                node.partitions[way] = healed_s

    def _reset(self) -> None:
        if (node := self._node()) and node.connection:
            node.connection.reset(within_s=self.rng.choice((0.01, 4.0)))

    def _slow(self) -> None:
        if node := self._node():
            node.slowness = self.rng.choice((10.0, 100.0)) if node.slowness == 1.0 else 1.0
            self.scheduler.at(self.faults_end_s, lambda: setattr(node, "slowness", 1.0))

    def _duplicate(self) -> None:
        """Affects every frame; see `Node._send`."""

    def _clock_jump(self) -> None:
        if server := self._living():
            server.wall_offset_s += self.rng.uniform(-1e6, 1e6)
            leap_s = self.rng.choice((0.0, 1.0, 20.0)) * self.rng.random()
            server.clock_offset_s += leap_s
            self.stops.append((self.scheduler.now_s, -leap_s))


def simulate(seed: int, *, tracing: bool = False, refetch: bool = True, strict_refusals: bool = False) -> Outcome:
    logging.disable(logging.CRITICAL)
    try:
        return World(seed, tracing=tracing, refetch=refetch).play()
    finally:
        logging.disable(logging.NOTSET)
