"""The coordinator's end: the real engine and core on a simulated process, disk and network.

The disk takes time, may fail, and keeps what was committed. A connection delivers in order until it breaks; frames may
be repeated later, as by a client that did not receive the answer. Which worker uses which connection follows the rules
of `session.py`, because lost connections cause suspicion.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clockwork import Process, SimulatedLoop
from ledger import DATASET, JOB

from strata.clock import Clock
from strata.coordinator.config import CoordinatorConfig, JournalConfig, LeaseConfig
from strata.coordinator.journal import Entry, Loaded
from strata.coordinator.journal.memory import MemoryJournal
from strata.coordinator.serve.engine import Engine
from strata.coordinator.state import events as e
from strata.coordinator.state.barriers import Released, Ticket
from strata.coordinator.state.core import Core
from strata.coordinator.state.job import CommandQueued, GenerationChanged, Notice
from strata.errors import BarrierBroken, JournalError, JournalWriteFailed, StrataError

if TYPE_CHECKING:
    from clients import Node
    from simulation import World


@dataclass(slots=True)
class Call:
    number: int
    method: str
    args: dict[str, Any]
    fence: int = 0
    issued_s: float = 0.0


class Connection:
    """Ordered both ways until it is cut; each end learns of that in its own time."""

    def __init__(self, world: World, node: Node, server: Server) -> None:
        self.world = world
        self.node = node
        self.server = server
        self.session_id = node.session_id
        self.workers: dict[str, int] = {}
        self.cut = {"up": False, "down": False}
        self.open_at_server = False
        self._last_s = {"up": 0.0, "down": 0.0}

    def send(self, way: str, act: Callable[[], None], process: Process) -> None:
        world = self.world
        if self.cut[way]:
            return
        when_s = world.scheduler.now_s + world.delay_s(self.node)
        healed_s = self.node.partitions.get(way, 0.0)
        if healed_s > world.scheduler.now_s:
            if world.rng.random() < 0.5:
                self.cut[way] = True  # lost; nothing after it can arrive, and keepalive detects that
                self.reset()
                return
            when_s = healed_s + world.delay_s(self.node)  # retransmitted by TCP
        self._last_s[way] = when_s = max(when_s, self._last_s[way])
        world.scheduler.at(when_s, lambda: None if self.cut[way] else process.run(act), in_order=True)

    def reset(self, *, within_s: float = 4.0) -> None:
        """Notify both ends sooner or later; messages in transit are lost."""
        self.cut["up"] = self.cut["down"] = True
        rng, scheduler = self.world.rng, self.world.scheduler
        scheduler.after(rng.uniform(0, within_s), lambda: self.server.run(lambda: self.server.closed(self)))
        scheduler.after(rng.uniform(0, within_s), lambda: self.node.run(lambda: self.node.disconnected(self)))


class Disk(MemoryJournal):
    """Outlives every coordinator, and reports durable events to the ledger."""

    def __init__(self, world: World) -> None:
        super().__init__(world.config.journal)
        self._world = world
        self.failing_until_s = 0.0
        self.may_refuse_load = False

    @property
    def failing(self) -> bool:
        return self._world.scheduler.now_s < self.failing_until_s

    def load(self) -> Loaded:
        if self.failing and self.may_refuse_load and self._world.rng.random() < 0.5:
            raise JournalError("the simulated disk cannot be read")
        return super().load()

    def append(self, entries: Sequence[Entry], *, snapshot: bytes | None = None) -> int:
        last = super().append(entries, snapshot=snapshot)
        batch = [e.decode(entry.payload) for entry in entries]
        self._world.trace("durable", *(event.words() for event in batch))
        self._world.ledger.durable(batch)
        for event in batch:
            if isinstance(event, e.WorkerLeft):
                self._world.check_silence(event)
        return last

    def close(self) -> None:
        pass


class Server(Process):
    """One life of the coordinator."""

    def __init__(self, world: World) -> None:
        super().__init__(world.scheduler, clock_rate=world.rng.uniform(0.98, 1.02))
        self.world = world
        self.loop = SimulatedLoop(self, self._execute)
        self.engine = Engine(world.disk, world.config, self)
        self.links: dict[str, Connection] = {}
        self.speakers: dict[str, Connection] = {}
        self.trap = ""
        """The point in the next commit at which it dies."""
        self._num_cores = 0
        rebuild = self.engine._rebuild

        def rebuilt() -> None:
            rebuild()
            self._num_cores += 1
            world.ledger.compare(self.engine.core)

        self.engine._rebuild = rebuilt  # type: ignore[method-assign]
        self.engine.listeners.append(self._spread)

    def start(self) -> None:
        self.world.disk.may_refuse_load = False
        self.inside(self.engine.start)
        self.world.disk.may_refuse_load = True

    def inside(self, act: Callable[[], None]) -> None:
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self.loop)  # type: ignore[arg-type]
        try:
            act()
        finally:
            asyncio._set_running_loop(before)

    def die(self) -> None:
        self.alive = False
        for task in self.loop.tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine: Any = task.get_coro()
            if not coroutine.cr_running:
                coroutine.close()
        for connection in list(self.links.values()):
            connection.reset(within_s=0.2)
        self.world.trace("coordinator dies")

    # -- disk ------------------------------------------------------------------------------------------------------

    def _execute(self, function: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        rng = self.world.rng
        self.scheduler.after(
            rng.choice((0.001, 0.01, 0.05, 0.2)) * rng.random(), lambda: self._commit(function, future)
        )

    def _commit(self, function: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        """The disk is not a process: our pause does not stop it, and our death only if it comes earlier."""
        if not self.alive:
            return
        disk, rng = self.world.disk, self.world.rng
        error: JournalWriteFailed | None = None
        if self.trap == "before commit":
            self.world.crash_coordinator()
            return
        if disk.failing:
            error = JournalWriteFailed("the simulated disk is full")
        if error is None or rng.random() < 0.1:  # a commit whose answer was lost
            function()
        if self.trap == "after commit":
            self.world.crash_coordinator()
            return
        settle = (lambda: future.set_exception(error)) if error else (lambda: future.set_result(None))
        self.scheduler.after(rng.choice((0.0, 0.01, 0.1)) * rng.random(), lambda: self.run(settle))

    # -- sessions, as in session.py --------------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        if connection.cut["up"]:
            return
        before = self.links.get(connection.session_id)
        self.links[connection.session_id] = connection
        connection.open_at_server = True
        for worker_id, fence in before.workers.items() if before else ():
            self._speaks(connection, worker_id, fence)
        connection.send("down", lambda: connection.node.welcomed(connection), connection.node)

    def closed(self, connection: Connection) -> None:
        if not connection.open_at_server:
            return
        connection.open_at_server = False
        if self.links.get(connection.session_id) is connection:
            del self.links[connection.session_id]
        for worker_id, fence in connection.workers.items():
            if self.speakers.get(worker_id) is connection:
                del self.speakers[worker_id]
                self.world.ledger.suspected.add(fence)
                self.engine.suspect(JOB, worker_id, fence)

    def _speaks(self, connection: Connection, worker_id: str, fence: int) -> None:
        connection.workers[worker_id] = fence
        self.speakers[worker_id] = connection

    def receive(self, connection: Connection, call: Call) -> None:
        """Receive a frame, the first time or repeated."""
        place = Place(self)

        def done(answer: Any) -> None:
            if place.ticket is not None and isinstance(answer, Released | BarrierBroken):
                self.world.ledger.ended((id(self), place.core, place.ticket), type(answer).__name__)
            if not isinstance(answer, StrataError) and connection.open_at_server:
                self._track_workers(connection, call, answer)
            connection.send("down", lambda: connection.node.answered(call, answer), connection.node)

        submit = self.engine.call_volatile if call.method == "heartbeat" else self.engine.call
        submit(lambda core, clock: place.decide(core, clock, call), done)

    def _track_workers(self, connection: Connection, call: Call, answer: Any) -> None:
        worker_id = call.args.get("worker_id", "")
        if call.method == "register_worker":
            self._speaks(connection, worker_id, answer.fence)
        elif call.method == "heartbeat":
            self._speaks(connection, worker_id, call.fence)
        elif call.method == "deregister_worker":
            connection.workers.pop(worker_id, None)
            if self.speakers.get(worker_id) is connection:
                del self.speakers[worker_id]

    def _spread(self, notices: list[Notice]) -> None:
        for notice in notices:
            if isinstance(notice, GenerationChanged):
                for connection in dict.fromkeys(self.speakers.values()):
                    self._notify(connection, notice)
            elif isinstance(notice, CommandQueued) and notice.worker_id in self.speakers:
                self._notify(self.speakers[notice.worker_id], notice)

    def _notify(self, connection: Connection, notice: Notice) -> None:
        connection.send("down", lambda: connection.node.noticed(notice), connection.node)


@dataclass(slots=True)
class Place:
    """The point in the coordinator's life at which a call was decided."""

    server: Server
    ticket: Ticket | None = None
    core: int = field(default=0)

    def decide(self, core: Core, clock: Clock, call: Call) -> Any:
        world = self.server.world
        answer = DECIDE[call.method](core, clock, call)
        if call.fence in world.ledger.left and call.method != "deregister_worker":
            world.ledger.fail(f"{call.method} of {call.args} was carried out, though it is declared dead")
        if call.method == "heartbeat":
            world.last_beat_s[call.fence] = world.scheduler.now_s
        if isinstance(answer, Ticket):
            self.ticket, self.core = answer, self.server._num_cores
        return answer


def _register_worker(core: Core, clock: Clock, call: Call) -> Any:
    with core.job_or_new(JOB) as job:
        return job.register_worker(
            **call.args, capacity=1.0, hostname="", now_s=clock.monotonic_s(), nonce=call.number & 0x7FFF
        )


def _register_dataset(core: Core, _clock: Clock, call: Call) -> Any:
    with core.job_or_new(JOB) as job:
        return job.register_dataset(e.DatasetSpec(dataset_id=DATASET, shuffle=True, **call.args))


def _heartbeat(core: Core, clock: Clock, call: Call) -> Any:
    return core.job(JOB).heartbeat(
        fence=call.fence, state=None, step=None, epoch=None, metrics={}, now_s=clock.monotonic_s(), **call.args
    )


def _wait_barrier(core: Core, clock: Clock, call: Call) -> Any:
    return core.job(JOB).wait_barrier(
        fence=call.fence, members=frozenset(), timeout_s=15.0, now_s=clock.monotonic_s(), **call.args
    )


def _notify_checkpoint(core: Core, clock: Clock, call: Call) -> Any:
    args = dict(call.args)
    name = args.pop("checkpoint_id")
    spec = e.CheckpointSpec(checkpoint_id=name, step=1, epoch=0, path=f"/{name}")
    return core.job(JOB).notify_checkpoint(fence=call.fence, spec=spec, ack=e.RankAck(), wall_s=clock.wall_s(), **args)


def _get_assigned_shards(core: Core, _clock: Clock, call: Call) -> Any:
    job = core.job(JOB)
    return lambda: job.assigned_shards(
        call.args["worker_id"], dataset_id=DATASET, epoch=None, include_done=False, offset=0
    )


def _get_membership(core: Core, _clock: Clock, call: Call) -> Any:
    return core.job(JOB).standing(call.args["worker_id"], call.fence)


def _list_datasets(core: Core, _clock: Clock, _call: Call) -> Any:
    return core.job(JOB).shards.dataset(DATASET).epoch


DECIDE: dict[str, Callable[[Core, Clock, Call], Any]] = {
    "register_worker": _register_worker,
    "register_dataset": _register_dataset,
    "heartbeat": _heartbeat,
    "wait_barrier": _wait_barrier,
    "notify_checkpoint": _notify_checkpoint,
    "get_assigned_shards": _get_assigned_shards,
    "get_membership": _get_membership,
    "list_datasets": _list_datasets,
    "ack_shards": lambda core, _at, call: core.job(JOB).ack_shards(fence=call.fence, dataset_id=DATASET, **call.args),
    "advance_epoch": lambda core, _at, call: core.job(JOB).advance_epoch(DATASET, require_complete=True, **call.args),
    "deregister_worker": lambda core, _at, call: core.job(JOB).deregister_worker(
        call.args["worker_id"], call.fence, "done"
    ),
    "send_command": lambda core, _at, call: core.job(JOB).send_command(
        name="CHECKPOINT_NOW", reason="", args={}, **call.args
    ),
}


def make_config(snapshot_every: int) -> CoordinatorConfig:
    return CoordinatorConfig(
        lease=LeaseConfig(heartbeat_s=1.0, suspicion_s=0.5, lease_s=5.0, tick_s=0.25),
        journal=JournalConfig(snapshot_every=snapshot_every, history_events=3),
    )
