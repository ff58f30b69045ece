"""The agent that leads, with fake nodes and a fake coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strata.coordinator.state.membership import WorkerEvent
from strata.errors import ConfigError
from strata.launch import agent as agents
from strata.launch.actions import Finish
from strata.launch.agent import Agent
from strata.launch.environment import METRICS, NEEDED_WORLD_SIZE, STOPPED, WorkerSpec
from strata.launch.nodes.base import Nodes
from strata.launch.protocol import WorkerExit
from strata.launch.record.directory import RunDirectory
from strata.launch.spec import RunSpec, Size
from strata.launch.supervisor import Supervisor


class FakeCoordinator:
    """A fake client. Workers with a context join as soon as they run."""

    def __init__(self) -> None:
        self.workers: list[Any] = []
        self.sent: list[str] = []
        self.checkpoint: Any = None
        self.is_there = asyncio.Event()
        self.is_there.set()
        self.sends_notices = False
        self.notices: asyncio.Queue[None] = asyncio.Queue()
        self.num_looks = 0

    def join(self, rank: int, attempt: int = 0) -> None:
        worker = SimpleNamespace(
            worker_id=f"rank-{rank}",
            rank=7 - rank,  # the coordinator counts in the order in which they join
            launch_rank=rank,
            attempt=attempt,
            metrics={},
            events={},
            state="TRAINING",
            step=1,
            epoch=0,
            silent_s=0.0,
        )
        self.workers.append(worker)

    async def list_workers(self, *, job_id: str, watch: bool = False) -> Any:
        await self.is_there.wait()
        self.num_looks += watch
        return SimpleNamespace(workers=list(self.workers), is_watching=self.sends_notices)

    async def wait_notice(self, job_id: str, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.notices.get()
                return True
        return False

    async def latest_checkpoint(self, *, job_id: str) -> Any:
        return self.checkpoint

    async def send_command(self, name: str, **_: object) -> None:
        self.sent.append(name)


class FakeNode:
    def __init__(self, name: str, slots: int = 2) -> None:
        self.name = self.host = self.address = name
        self.slots = slots
        self.launched: list[tuple[int, int]] = []
        """Attempt and rank."""
        self.signalled: asyncio.Queue[int] = asyncio.Queue()
        self.dumped: asyncio.Queue[int] = asyncio.Queue()
        self.exits: asyncio.Queue[WorkerExit] = asyncio.Queue()

    async def free_port(self) -> int:
        return 1

    async def launch(self, workers: Sequence[WorkerSpec]) -> None:
        self.launched += [(worker_spec.identity.attempt, worker_spec.identity.rank) for worker_spec in workers]

    async def next_exit(self) -> WorkerExit:
        return await self.exits.get()

    def kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.end(rank, -signal.SIGKILL)

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        self.signalled.put_nowait(rank)

    async def dump_stacks(self, rank: int) -> None:
        self.dumped.put_nowait(rank)

    async def close(self) -> None: ...

    def end(self, rank: int, code: int) -> None:
        self.exits.put_nowait(WorkerExit(rank, code))


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "TICK_S", 0.001)
    monkeypatch.setattr(agents, "LOOK_S", 0.001)
    monkeypatch.setattr(agents, "LEAST_LOOK_S", 0.001)


@contextlib.asynccontextmanager
async def running(
    path: Path, coordinator: FakeCoordinator, nodes: Nodes, *, workers: str = "2"
) -> AsyncIterator[tuple[Agent, asyncio.Task[Finish]]]:
    spec = RunSpec(name="job", script="/train.py", directory="/", checkpoints="/k", workers=Size.parse(workers))
    display: Any = SimpleNamespace(print_event=lambda _: None, show=lambda _: None)
    client: Any = coordinator
    agent = Agent(spec, RunDirectory(path, spec), nodes, client, display, coordinator="c:1")
    run = asyncio.create_task(agent.run())
    await let_every_task_run()
    try:
        yield agent, run
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


async def let_every_task_run() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def test_a_stop_at_once_while_the_coordinator_keeps_the_start_waiting_is_not_lost(tmp_path: Path) -> None:
    async def scene() -> None:
        coordinator, node = FakeCoordinator(), FakeNode("a")
        coordinator.is_there.clear()
        async with running(tmp_path, coordinator, Nodes(node)) as (agent, run):
            agent.stop("strata stop", is_now=True)
            await let_every_task_run()
            coordinator.is_there.set()
            assert (await run).outcome == "stopped"
            assert node.launched == []

    asyncio.run(scene())


def test_the_agent_ticks_only_while_the_supervisor_waits_for_a_point_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        coordinator, node = FakeCoordinator(), FakeNode("a")
        async with running(tmp_path, coordinator, Nodes(node)) as (agent, run):
            ticks: list[float] = []
            tick = Supervisor.tick

            def count(supervisor: Supervisor, *, now_s: float) -> list[Any]:
                ticks.append(now_s)
                return tick(supervisor, now_s=now_s)

            monkeypatch.setattr(Supervisor, "tick", count)
            await until(lambda: coordinator.num_looks >= 20)  # as often as it would tick
            assert ticks == []
            agent.supervisor.grace_s = 0.0
            agent.stop("SIGTERM")
            assert (await run).reason == "SIGTERM; 2 of 2 workers had to be killed"
            assert ticks

    asyncio.run(scene())


@pytest.mark.parametrize("outcome", ["stopped", "done"])
def test_workers_that_exit_with_0_on_request_are_done_with_a_context_and_stopped_without_one(
    tmp_path: Path, outcome: str
) -> None:
    async def scene() -> None:
        coordinator, node = FakeCoordinator(), FakeNode("a")
        async with running(tmp_path, coordinator, Nodes(node)) as (agent, run):
            if outcome == "done":
                for rank in range(2):
                    coordinator.join(rank)
            agent.stop("SIGTERM")
            await let_every_task_run()
            assert coordinator.sent == ([] if outcome == "stopped" else ["STOP"])
            assert node.signalled.qsize() == (2 if outcome == "stopped" else 0)
            for rank in range(2):
                node.end(rank, 0)
            assert (await run).outcome == outcome

    asyncio.run(scene())


def test_workers_with_a_context_that_hear_a_signal_because_the_coordinator_forgot_them_can_be_done(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        coordinator, node = FakeCoordinator(), FakeNode("a")
        async with running(tmp_path, coordinator, Nodes(node)) as (agent, run):
            for rank in range(2):
                coordinator.join(rank)
            await asyncio.sleep(0.05)  # they are seen
            coordinator.workers.clear()
            agent.stop("SIGTERM")
            await node.signalled.get()
            for rank in range(2):
                node.end(rank, 0)
            assert (await run).outcome == "done"

    asyncio.run(scene())


def test_the_stacks_of_a_worker_are_dumped_on_its_node_and_a_rank_that_does_not_run_is_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        first, second = FakeNode("a"), FakeNode("b")
        async with running(tmp_path, FakeCoordinator(), Nodes(first, second)) as (agent, _):
            agent.dump_stacks(1)
            assert await second.dumped.get() == 1
            assert first.dumped.empty()
            with pytest.raises(ConfigError, match="rank=7 does not run now, ranks 0, 1 run; choose one that runs"):
                agent.dump_stacks(7)

    asyncio.run(scene())


def test_workers_leave_a_draining_node_even_if_they_do_not_need_to_shrink(tmp_path: Path) -> None:
    async def scene() -> None:
        coordinator, first, second = FakeCoordinator(), FakeNode("a"), FakeNode("b")
        nodes = Nodes(first, second)
        async with running(tmp_path, coordinator, nodes):
            assert (first.launched, second.launched) == ([(0, 0)], [(0, 1)])
            nodes.drain("b", "Ctrl-C")
            await first.signalled.get()
            first.end(0, STOPPED)
            second.end(1, STOPPED)
            await let_every_task_run()
            assert first.launched[1:] == [(1, 0), (1, 1)]
            assert second.launched == [(0, 1)]

    asyncio.run(scene())


def saved_by(num_workers: int) -> Any:
    """Return a checkpoint that only this world size can resume from."""
    metadata = {NEEDED_WORLD_SIZE: str(num_workers)}
    return SimpleNamespace(checkpoint=SimpleNamespace(step=3, path="/k/step-3"), metadata=metadata, committed_at_s=0.0)


def test_workers_with_a_per_rank_loader_are_not_scaled(tmp_path: Path) -> None:
    async def scene() -> None:
        coordinator, node = FakeCoordinator(), FakeNode("a", slots=4)
        async with running(tmp_path, coordinator, Nodes(node), workers="1:2") as (agent, _):
            coordinator.join(0)
            coordinator.join(1)
            coordinator.workers[1].metrics[METRICS.per_rank] = 1.0
            await until(lambda: agent.supervisor.only == 2)
            with pytest.raises(ConfigError, match="1 workers cannot resume from a checkpoint of 2 workers"):
                agent.scale(1)
            assert coordinator.sent == []
            status = RunDirectory(tmp_path, agent._spec).status
            assert status is not None
            assert status.only_workers == 2

    asyncio.run(scene())


def test_a_new_leader_starts_the_world_size_that_can_resume_from_the_last_checkpoint(tmp_path: Path) -> None:
    async def scene() -> None:
        coordinator, node = FakeCoordinator(), FakeNode("a", slots=4)
        coordinator.checkpoint = saved_by(3)
        async with running(tmp_path, coordinator, Nodes(node), workers="1:4"):
            assert node.launched == [(0, 0), (0, 1), (0, 2)]

    asyncio.run(scene())


def test_the_checkpoint_saved_for_a_scaling_decides_the_next_world_size(tmp_path: Path) -> None:
    """The request came before the agent knew that a loader is per rank."""

    async def scene() -> None:
        coordinator, node = FakeCoordinator(), FakeNode("a", slots=4)
        async with running(tmp_path, coordinator, Nodes(node), workers="1:2") as (agent, _):
            agent.scale(1)
            await node.signalled.get()
            node.end(0, STOPPED)
            await let_every_task_run()
            coordinator.checkpoint = saved_by(2)
            node.end(1, STOPPED)
            await until(lambda: len(node.launched) > 2)
            assert node.launched[2:] == [(1, 0), (1, 1)]

    asyncio.run(scene())


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.001)


def test_the_agent_looks_at_the_workers_when_a_notice_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "LOOK_WATCHING_S", 600.0)

    async def scene() -> None:
        coordinator, node = FakeCoordinator(), FakeNode("a")
        coordinator.sends_notices = True
        async with running(tmp_path, coordinator, Nodes(node)) as (agent, _):
            await until(lambda: coordinator.num_looks == 1)
            coordinator.join(0)
            coordinator.workers[0].step = 5
            await asyncio.sleep(0.05)
            assert (coordinator.num_looks, agent.supervisor.step) == (1, 0)
            coordinator.notices.put_nowait(None)
            await until(lambda: agent.supervisor.step == 5)
            assert coordinator.num_looks == 2

    asyncio.run(scene())


def test_events_of_rank_0_are_in_the_timeline_once_at_its_own_times(tmp_path: Path) -> None:
    async def scene() -> None:
        coordinator, node = FakeCoordinator(), FakeNode("a")
        async with running(tmp_path, coordinator, Nodes(node)):
            coordinator.join(0)
            coordinator.join(1)
            coordinator.workers[0].events = {
                "FIRST_STEP": WorkerEvent("FIRST_STEP", 1_002.5, 8),
                "RESTORED": WorkerEvent("RESTORED", 1_001.5, 7),
                "CHOSEN": WorkerEvent("CHOSEN", 1_001.0, 7),
            }
            looks = coordinator.num_looks
            await until(lambda: coordinator.num_looks > looks + 3)
        spec = RunSpec(name="job", script="/train.py", directory="/", checkpoints="/k", workers=Size.parse("2"))
        moments = ("chosen", "restored", "first_step")
        events = [event for event in RunDirectory(tmp_path, spec).events() if event.what in moments]
        assert [(event.what, event.at_s, event.step, event.text) for event in events] == [
            ("chosen", 1_001.0, 7, "checkpoint of step 7"),
            ("restored", 1_001.5, 7, "checkpoint of step 7"),
            ("first_step", 1_002.5, 8, "training continues"),
        ]

    asyncio.run(scene())


def test_events_of_a_worker_that_was_restarted_alone_are_in_the_timeline_once(tmp_path: Path) -> None:
    async def scene() -> None:
        coordinator, node = FakeCoordinator(), FakeNode("a")
        async with running(tmp_path, coordinator, Nodes(node)) as (agent, _):
            coordinator.join(0)
            coordinator.join(1)
            coordinator.workers[1].incarnation = 2
            coordinator.workers[1].events = {"FIRST_STEP": WorkerEvent("FIRST_STEP", 1_000.0, 1)}
            await until(lambda: 1 in agent._observed.workers)
            node.exits.put_nowait(WorkerExit(1, 1, is_alone=True))
            await until(lambda: len(node.launched) == 3)
            coordinator.workers.pop()
            coordinator.join(1)
            coordinator.workers[1].incarnation = 3
            coordinator.workers[1].events = {
                "FIRST_STEP": WorkerEvent("FIRST_STEP", 1_002.5, 8),
                "RESTORED": WorkerEvent("RESTORED", 1_001.5, 7),
            }
            looks = coordinator.num_looks
            await until(lambda: coordinator.num_looks > looks + 3)
        spec = RunSpec(name="job", script="/train.py", directory="/", checkpoints="/k", workers=Size.parse("2"))
        events = [event for event in RunDirectory(tmp_path, spec).events() if event.what in ("restored", "first_step")]
        assert [(event.what, event.rank, event.at_s, event.step, event.text) for event in events] == [
            ("restored", 1, 1_001.5, 7, "rank 1: checkpoint of step 7"),
            ("first_step", 1, 1_002.5, 8, "rank 1 continues"),
        ]

    asyncio.run(scene())
