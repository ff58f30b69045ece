"""Simulated worker processes that follow the rules of the real client.

A node is one process with one session and a worker or two. Its programs are generators: they yield a call and receive
the answer, or the error is thrown into them. Unanswered calls are repeated on every new connection, as in
`client/_link.py`; what a worker adopts, and when, follows `client/_worker.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from clockwork import Process
from network import Call, Connection

from strata.coordinator.state.barriers import Released
from strata.coordinator.state.events import number_of
from strata.coordinator.state.job import CommandQueued, GenerationChanged, Notice
from strata.errors import (
    BarrierBroken,
    CoordinatorUnavailable,
    EpochMismatch,
    JournalError,
    ShardNotLeased,
    StaleGeneration,
    StaleIncarnation,
    StrataError,
    UnknownJob,
    UnknownWorker,
    WorkerExists,
)

if TYPE_CHECKING:
    from simulation import World

Program = Generator[tuple[str, Any], Any, None]
LOST = (StaleIncarnation, UnknownWorker, UnknownJob)
TRY_AGAIN = (CoordinatorUnavailable, JournalError)
HEARTBEAT_S = 1.0
CALL_TIMEOUT_S = 30.0


class Node(Process):
    def __init__(self, world: World, name: str, worker_ids: list[str]) -> None:
        super().__init__(world.scheduler, clock_rate=world.rng.uniform(0.95, 1.05))
        self.world = world
        self.name = name
        self.session_id = f"{name}/{world.next_number()}"
        self.partitions: dict[str, float] = {}
        self.slowness = 1.0
        self.workers = [Worker(self, worker_id) for worker_id in worker_ids]
        self.superseded = False
        self._connection: Connection | None = None
        self._connected = False
        self._unanswered: dict[int, tuple[Call, Any]] = {}

    def start(self, *programs: Program) -> None:
        self._connect()
        for program in [*(w.program() for w in self.workers), *programs]:
            self._go(program, None)
        self.after(HEARTBEAT_S, self._beat_forever)

    def die(self) -> None:
        self.alive = False
        self.world.trace(self.name, "dies")
        if self._connection is not None:
            self._connection.reset(within_s=1.0)

    @property
    def connection(self) -> Connection | None:
        return self._connection

    # -- the session -----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        server = self.world.server
        if server is None or not server.alive:
            self.after(self.world.rng.uniform(0.05, 0.25), self._connect)
            return
        connection = self._connection = Connection(self.world, self, server)
        connection.send("up", lambda: server.opened(connection), server)
        self.after(4.0, lambda: self._give_up(connection))

    def _give_up(self, connection: Connection) -> None:
        if connection is self._connection and not self._connected:
            self.disconnected(connection)

    def welcomed(self, connection: Connection) -> None:
        if connection is not self._connection:
            return
        self._connected = True
        for call, _ in list(self._unanswered.values()):
            self._send(call)
        self._beat()

    def disconnected(self, connection: Connection) -> None:
        if connection is not self._connection:
            return
        connection.reset()
        self._connection, self._connected = None, False
        self.after(self.world.rng.uniform(0.0, 0.25), self._connect)

    def call(self, call: Call, then: Any, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._unanswered[call.number] = (call, then)
        if self._connected:
            self._send(call)
        self.after(timeout_s, lambda: self.answered(call, CoordinatorUnavailable("no answer in time")))

    def _send(self, call: Call) -> None:
        connection = self._connection
        assert connection is not None
        server = connection.server
        connection.send("up", lambda: server.receive(connection, call), server)
        if self.world.chance("duplicate", 0.05):

            def again() -> None:
                server = self.world.server
                if server is not None:
                    server.run(lambda: server.receive(connection, call))

            self.world.scheduler.after(self.world.rng.uniform(0, 3), again)

    def answered(self, call: Call, answer: Any) -> None:
        _, then = self._unanswered.pop(call.number, (None, None))
        if then is None:
            return
        self.world.received(self, call, answer)
        then(answer)

    def noticed(self, notice: Notice) -> None:
        if isinstance(notice, GenerationChanged):
            self.world.ledger.announced_generation(notice.generation)
            for worker in self.workers:
                worker.latest_generation = max(worker.latest_generation, notice.generation)
        elif isinstance(notice, CommandQueued):
            for worker in self.workers:
                if worker.worker_id == notice.worker_id and notice.previous_id <= worker.last_command_id:
                    worker.receive_commands([notice.command.command_id])

    # -- heartbeats ------------------------------------------------------------------------------------------------

    def _beat_forever(self) -> None:
        self._beat()
        self.after(HEARTBEAT_S, self._beat_forever)

    def _beat(self) -> None:
        for worker in self.workers:
            if worker.fence and worker.lost is None and not worker.leaving:
                worker.beat()

    # -- programs --------------------------------------------------------------------------------------------------

    def _go(self, program: Program, answer: Any) -> None:
        try:
            thrown = isinstance(answer, BaseException)
            kind, what = program.throw(answer) if thrown else program.send(answer)
        except StopIteration:
            return
        if kind == "sleep":
            self.after(what, lambda: self._go(program, None))
        else:
            self.call(what, lambda answer: self._go(program, answer))


class Worker:
    def __init__(self, node: Node, worker_id: str) -> None:
        self.node = node
        self.world = node.world
        self.worker_id = worker_id
        self.finished = False
        self.forget()

    def forget(self) -> None:
        self.fence = 0
        self.generation = self.latest_generation = 0
        self.lost: StrataError | None = None
        self.leaving = False
        self.last_command_id = self.acked_command_id = 0
        self.rounds: Counter[tuple[str, int]] = Counter()

    def beat(self) -> None:
        fence = self.fence
        call = self._call("heartbeat", worker_id=self.worker_id, acked_command_id=self.acked_command_id)

        def received(answer: Any) -> None:
            if self.fence != fence:
                return
            if isinstance(answer, LOST):
                self.lost = self.lost or answer
            elif not isinstance(answer, StrataError):
                self.latest_generation = max(self.latest_generation, answer.generation)
                self.receive_commands([c.command_id for c in answer.commands])

        self.node.call(call, received, timeout_s=5.0)

    def receive_commands(self, numbers: list[int]) -> None:
        for number in numbers:
            targets = self.world.ledger.commands.get(number, ())
            self.world.ledger.expect(self.worker_id in targets, f"command {number} was delivered before it was durable")
            if number > self.last_command_id:
                self.last_command_id = number
                self.world.ledger.received.add((self.worker_id, number))

    # -- the program -----------------------------------------------------------------------------------------------

    def program(self) -> Program:
        """Register, work through the epochs with the others, and leave; start over when declared dead."""
        while True:
            self.forget()
            try:
                yield from self._register()
                while (yield from self._epoch()):
                    pass
                yield from self._leave()
            except LOST as error:
                self.world.trace(self.worker_id, "is lost:", error.message)
                if self.node.superseded:
                    return
                yield "sleep", self.world.rng.uniform(0, 1)
            else:
                self.finished = True
                return

    def _register(self) -> Program:
        instance_id = f"{self.node.name}.{self.world.next_number()}"
        takeover = self.world.rng.random() < 0.5
        while True:
            call = self._call("register_worker", worker_id=self.worker_id, instance_id=instance_id, takeover=takeover)
            try:
                answer = yield "call", call
            except (WorkerExists, *TRY_AGAIN):
                yield "sleep", 0.3
                continue
            self.fence = answer.fence
            self.generation = self.latest_generation = answer.generation
            break
        total = self.world.num_shards * 10
        yield from self._until(self._call("register_dataset", total_samples=total, shard_size=10))

    def _epoch(self) -> Generator[tuple[str, Any], Any, bool]:
        """Make one pass, or as much of it as this generation allows; return False when all epochs are over."""
        rng = self.world.rng
        try:
            epoch = yield from self._until(self._call("list_datasets"))
            if epoch >= self.world.num_epochs:
                return False
            shards = yield from self._shards()
            while shards:
                now, shards = shards[:2], shards[2:]
                yield "sleep", rng.uniform(0.0, 0.4)
                self._carry_out_commands()
                yield from self._until(
                    self._call("ack_shards", fenced=True, epoch=now[0].epoch, indices=[s.index for s in now])
                )
            yield from self._barrier("epoch", epoch)
            yield from self._barrier("sync", None)
            name = f"e{epoch}-g{self.generation}"
            self.world.ledger.notified.add((name, self.generation, self.fence))
            yield from self._until(self._call("notify_checkpoint", fenced=True, checkpoint_id=name))
            yield from self._until(self._call("advance_epoch", from_epoch=epoch))
        except (StaleGeneration, BarrierBroken, ShardNotLeased, EpochMismatch):
            yield from self._refresh()
            yield "sleep", rng.uniform(0.0, 0.1)
        return True

    def _leave(self) -> Program:
        self.leaving = True
        yield from self._until(self._call("deregister_worker", worker_id=self.worker_id))

    def _shards(self) -> Generator[tuple[str, Any], Any, list[Any]]:
        page = yield from self._until(self._call("get_assigned_shards", worker_id=self.worker_id))
        while page.generation != self.generation:
            yield from self._refresh()
            if not self.world.refetch:
                break
            if page.generation != self.generation:
                page = yield from self._until(self._call("get_assigned_shards", worker_id=self.worker_id))
        for shard in page.shards:
            self.world.ledger.believe(self.generation, shard.epoch, shard.index, number_of(self.fence))
        return list(page.shards)

    def _refresh(self) -> Program:
        mine = yield from self._until(self._call("get_membership", worker_id=self.worker_id))
        self.generation = mine.generation
        self.latest_generation = max(self.latest_generation, mine.generation)

    def _barrier(self, name: str, step: int | None) -> Program:
        key = (name, self.generation)
        number = self.rounds[key] if step is None else step
        self.world.ledger.arrivals[self.generation, name, number].add(self.fence)
        yield from self._until(self._call("wait_barrier", fenced=True, barrier_id=name, step=number))
        if step is None:
            self.rounds[key] += 1

    def _carry_out_commands(self) -> None:
        self.acked_command_id = self.last_command_id

    # -- calls -----------------------------------------------------------------------------------------------------

    def _until(self, call: Call) -> Generator[tuple[str, Any], Any, Any]:
        """Repeat a call for as long as the coordinator cannot answer it."""
        while True:
            if self.lost is not None:
                raise self.lost
            try:
                return (yield "call", call)
            except TRY_AGAIN:
                yield "sleep", 0.2
                call = Call(self.world.next_number(), call.method, call.args, call.fence, self.world.scheduler.now_s)

    def _call(self, method: str, *, fenced: bool = False, **args: Any) -> Call:
        if fenced:
            args |= {"worker_id": self.worker_id, "generation": self.generation}
        needs_fence = fenced or method in ("heartbeat", "deregister_worker", "get_membership")
        fence = self.fence if needs_fence else 0
        return Call(self.world.next_number(), method, args, fence, self.world.scheduler.now_s)


def admin(world: World, worker_ids: list[str]) -> Program:
    """Send commands from time to time, and repeat each until it is answered."""
    for _ in range(world.rng.randint(0, 6)):
        yield "sleep", world.rng.choice((0.0, world.rng.uniform(0.2, 5)))
        request_id = f"r{world.next_number()}"
        targets = world.rng.sample(worker_ids, world.rng.randint(0, len(worker_ids)))
        while True:
            args = {"worker_ids": targets, "request_id": request_id}
            try:
                yield "call", Call(world.next_number(), "send_command", args, 0, world.scheduler.now_s)
            except TRY_AGAIN:
                yield "sleep", 0.2
                continue
            except StrataError:
                pass  # no workers
            break


def check_answer(world: World, call: Call, answer: Any) -> None:
    """Assert that what a client has just received is durable."""
    ledger, method, args = world.ledger, call.method, call.args
    if isinstance(answer, StrataError):
        _check_refusal(world, call, answer)
    elif method == "register_worker":
        joined = ledger.joined.get(answer.fence)
        mine = joined is not None and (joined.worker_id, joined.instance_id) == (args["worker_id"], args["instance_id"])
        ledger.expect(mine, f"{args} received {answer}, which is not durable")
        ledger.announced_generation(answer.generation)
    elif method == "heartbeat":
        ledger.announced_generation(answer.generation)
    elif method == "ack_shards":
        missing = set(args["indices"]) - ledger.done[args["epoch"]]
        ledger.expect(not missing, f"{args} was acknowledged, but {missing} are not done")
    elif method == "advance_epoch":
        ledger.expect(answer <= ledger.epoch, f"epoch {answer} was announced, but {ledger.epoch} is durable")
    elif method == "wait_barrier":
        key = (args["generation"], args["barrier_id"], args["step"])
        ledger.expect(
            isinstance(answer, Released) and key in ledger.released,
            f"{key} was announced as released, but is not durable",
        )
        ledger.released_seen.add(key)
        world.released_seen_s.setdefault(key, world.scheduler.now_s)
    elif method == "notify_checkpoint":
        name = args["checkpoint_id"]
        if answer.committed:
            ledger.expect(name in ledger.committed, f"{name} was announced as committed, but is not")
        else:
            key = (name, args["generation"], args["worker_id"])
            ledger.expect(key in ledger.checkpoint_acks, f"{key} was acknowledged, and is not durable")
    elif method == "send_command":
        ledger.expect(
            ledger.requests.get(args["request_id"]) == answer[0], f"{args} received {answer}, which is not durable"
        )
    elif method == "deregister_worker":
        ledger.expect(call.fence in ledger.left, f"{args} was deregistered, but is still a member")
    elif method in ("get_assigned_shards", "get_membership"):
        ledger.announced_generation(answer.generation)


def _check_refusal(world: World, call: Call, error: StrataError) -> None:
    ledger = world.ledger
    ledger.expect(type(error) is not StrataError, f"{call} stumbled: {error.message}")
    ledger.announced_generation(getattr(error, "generation", None) or 0)
    if isinstance(error, StaleIncarnation) and call.fence:
        ledger.expect(
            call.fence in ledger.left, f"{call.method} of {call.args} learnt that it is out, which is not durable"
        )
    if isinstance(error, BarrierBroken):
        key = (call.args["generation"], call.args["barrier_id"], call.args["step"])
        seen_s = world.released_seen_s.get(key)
        ledger.expect(
            seen_s is None or call.issued_s < seen_s, f"{key} broke for {call.args['worker_id']} after it was released"
        )
