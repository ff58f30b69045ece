"""A following node, with orders in quick succession."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import AsyncIterator, Iterable, Sequence

import pytest

from strata.identity import Identity
from strata.launch.actions import Finish
from strata.launch.environment import WorkerSpec
from strata.launch.multi_node import Follower
from strata.launch.nodes.rendezvous import Member, Received
from strata.launch.protocol import (
    AnyMessage,
    KillWorkers,
    RunOver,
    SignalWorker,
    StartWorkers,
    WorkerExit,
    WorkersExited,
)

LEADER, ME = Member("a.1.x@10.0.0.1", 2), Member("b.1.x@10.0.0.2", 2)
KILLED = -signal.SIGKILL
WORKER_SPEC = WorkerSpec(
    identity=Identity(run="job", attempt=3, rank=0, world_size=4, local_rank=0, local_world_size=2, master_port=1),
    coordinator="leader:1",
    checkpoints="/k",
)


class FakeMeeting:
    """Delivers the leader's messages in batches."""

    def __init__(self) -> None:
        self.me = ME
        self.members = [LEADER, ME]
        self.is_out = False
        self.sent: list[AnyMessage] = []
        self.ended: asyncio.Queue[WorkerExit] = asyncio.Queue()
        self._coming: asyncio.Queue[list[Received]] = asyncio.Queue()

    def deliver(self, *messages: AnyMessage) -> None:
        self._coming.put_nowait([Received(LEADER.id, each) for each in messages])

    async def receive(self) -> list[Received]:
        return await self._coming.get()

    async def send(self, to: Sequence[str], message: AnyMessage) -> None:
        assert to == [LEADER.id]
        self.sent.append(message)
        for gone in message.exits if isinstance(message, WorkersExited) else ():
            self.ended.put_nowait(gone)


class FakeNode:
    """Like a real node: a worker that does not run yet cannot be killed."""

    def __init__(self) -> None:
        self.running: dict[int, WorkerSpec] = {}
        self.orders: list[object] = []
        self._exits: asyncio.Queue[WorkerExit] = asyncio.Queue()

    async def launch(self, workers: Sequence[WorkerSpec]) -> None:
        self.running |= {worker_spec.identity.rank: worker_spec for worker_spec in workers}

    async def next_exit(self) -> WorkerExit:
        return await self._exits.get()

    def kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if self.running.pop(rank, None) is not None:
                self._exits.put_nowait(WorkerExit(rank, KILLED))

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        if rank in self.running:
            self.orders.append((number, rank))

    async def close(self) -> None:
        self.orders.append("close")


@contextlib.asynccontextmanager
async def following(here: FakeMeeting, node: FakeNode) -> AsyncIterator[Follower]:
    follower = Follower(here, LEADER, node, lambda what, text: None, coordinator="own:1")  # type: ignore[arg-type]
    running = asyncio.create_task(follower.run())
    yield follower
    here.deliver(RunOver("done", "2 workers are done"))
    assert await running == Finish("done", "2 workers are done")


async def let_every_task_run() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_kill_right_after_the_launch_order_hits_its_workers() -> None:
    async def scene() -> None:
        here, node = FakeMeeting(), FakeNode()
        async with following(here, node):
            here.deliver(StartWorkers(WORKER_SPEC, ((2, 0), (3, 1))), KillWorkers(3, (2,)))
            assert await here.ended.get() == WorkerExit(2, KILLED, is_killed=True)
            assert sorted(node.running) == [3]
            here.deliver(KillWorkers(3, (2, 3)))
            assert await here.ended.get() == WorkerExit(3, KILLED)

    asyncio.run(scene())


def test_workers_find_the_coordinator_as_their_own_machine_does() -> None:
    async def scene() -> None:
        here, node = FakeMeeting(), FakeNode()
        async with following(here, node):
            here.deliver(StartWorkers(WORKER_SPEC, ((2, 0), (3, 1))))
            await let_every_task_run()
            assert WORKER_SPEC.coordinator == "leader:1"
            assert {worker_spec.coordinator for worker_spec in node.running.values()} == {"own:1"}

    asyncio.run(scene())


def test_a_signal_right_after_the_launch_order_ends_workers_that_have_not_started() -> None:
    async def scene() -> None:
        here, node = FakeMeeting(), FakeNode()
        async with following(here, node):
            here.deliver(StartWorkers(WORKER_SPEC, ((2, 0), (3, 1))), SignalWorker(3, 2, signal.SIGTERM))
            assert await here.ended.get() == WorkerExit(2, -signal.SIGTERM, is_killed=True)
            here.deliver(SignalWorker(3, 3, signal.SIGTERM))
            await let_every_task_run()
            assert node.orders == [(signal.SIGTERM, 3)]

    asyncio.run(scene())


@pytest.mark.parametrize("attempt", [2, 4])
def test_a_kill_of_another_attempt_is_ignored(attempt: int) -> None:
    async def scene() -> None:
        here, node = FakeMeeting(), FakeNode()
        async with following(here, node):
            here.deliver(StartWorkers(WORKER_SPEC, ((2, 0),)), KillWorkers(attempt, (2,)))
            await let_every_task_run()
            assert (sorted(node.running), here.sent) == ([2], [])

    asyncio.run(scene())


def test_a_worker_that_is_started_again_alone_leaves_the_others_running() -> None:
    async def scene() -> None:
        here, node = FakeMeeting(), FakeNode()
        async with following(here, node):
            here.deliver(StartWorkers(WORKER_SPEC, ((2, 0), (3, 1))))
            await let_every_task_run()
            node._exits.put_nowait(WorkerExit(3, KILLED, is_alone=True))
            assert await here.ended.get() == WorkerExit(3, KILLED, is_alone=True)
            again = dataclasses.replace(WORKER_SPEC, identity=dataclasses.replace(WORKER_SPEC.identity, incarnation=1))
            here.deliver(StartWorkers(again, ((3, 1),)))
            await let_every_task_run()
            assert sorted(node.running) == [2, 3]
            assert node.running[3].identity.incarnation == 1
            here.deliver(KillWorkers(3, (2, 3)))
            assert {(await here.ended.get()).rank for _ in range(2)} == {2, 3}

    asyncio.run(scene())


def test_a_run_that_ends_right_after_the_launch_order_starts_no_worker() -> None:
    async def scene() -> None:
        here, node = FakeMeeting(), FakeNode()
        async with following(here, node):
            here.deliver(StartWorkers(WORKER_SPEC, ((2, 0),)), RunOver("done", "2 workers are done"))
        assert node.running == {}
        assert node.orders == ["close"]

    asyncio.run(scene())


def test_of_workers_that_fail_together_the_first_report_the_end_of_their_logs() -> None:
    async def scene() -> None:
        here, node = FakeMeeting(), FakeNode()
        async with following(here, node):
            here.deliver(StartWorkers(WORKER_SPEC, ((1, 0), (2, 1), (3, 2))))
            await let_every_task_run()
            for rank in (1, 2, 3):
                node._exits.put_nowait(WorkerExit(rank, 1, "ValueError: bad", ("Traceback", "ValueError: bad")))
            ends = [(await here.ended.get()).log_end for _ in range(3)]
            assert ends == [("Traceback", "ValueError: bad"), ("Traceback", "ValueError: bad"), ()]

    asyncio.run(scene())


def test_workers_of_several_jobs_end_under_their_own_attempts() -> None:
    async def scene() -> None:
        here, node = FakeMeeting(), FakeNode()
        later = dataclasses.replace(WORKER_SPEC, identity=dataclasses.replace(WORKER_SPEC.identity, attempt=4))
        async with following(here, node):
            here.deliver(StartWorkers(WORKER_SPEC, ((0, 0),)), StartWorkers(later, ((1, 0),)))
            await let_every_task_run()
            here.deliver(KillWorkers(4, (0,)), KillWorkers(3, (0,)))
            assert await here.ended.get() == WorkerExit(0, KILLED)
            assert sorted(node.running) == [1], "a later job runs on"
            here.deliver(KillWorkers(4, (1,)))
            await here.ended.get()
        ended = [message for message in here.sent if isinstance(message, WorkersExited)]
        assert [(each.attempt, each.exits[0].rank) for each in ended] == [(3, 0), (4, 1)]

    asyncio.run(scene())
