"""Nodes whose trial processes are threads with a real connection to the driver, so that tests start and kill many of
them within milliseconds.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from strata.errors import CoordinatorUnavailable
from strata.launch.environment import STOPPED, WorkerSpec
from strata.launch.nodes.base import NodeLost
from strata.launch.nodes.shared import SharedNodes
from strata.launch.protocol import WorkerExit
from strata.tune import messages as m
from strata.tune.driver import Driver
from strata.tune.journal import JOURNAL, StudyJournal
from strata.tune.link import DriverLost, Link
from strata.tune.search import Search
from strata.tune.state import events as e
from strata.tune.state.actions import Finish
from strata.tune.state.study import StudyState


class Killed(Exception):
    pass


@dataclass
class Simulated:
    """A process of a trial: what a training function in it sees."""

    order: m.Order
    link: Link
    node: SimulatedNode
    is_killed: threading.Event = field(default_factory=threading.Event)

    def report(self, step: int, loss: float) -> None:
        self._check()
        if self.order.worker.identity.rank == 0:
            if self.link.answer() is not None:
                self._check()
                self.node.checkpoints[self.order.worker.checkpoints] = step - 1
                raise SystemExit(STOPPED)
            self.link.report(step, (loss,))

    @property
    def first_step(self) -> int:
        return self.node.checkpoints.get(self.order.worker.checkpoints, 0) + 1

    def save(self, step: int) -> None:
        """Save as a context does: its process may be dying, and the checkpoint still be committed."""
        self._check()
        self.link.settle()
        self.node.checkpoints[self.order.worker.checkpoints] = step

    def _check(self) -> None:
        if self.is_killed.is_set():
            raise Killed


class SimulatedNode:
    """A `Node`. `train` is called in a thread for each process."""

    def __init__(self, name: str, train: Callable[[Simulated], float | None], *, slots: int = 2) -> None:
        self.name = self.host = name
        self.address = "127.0.0.1"
        self.slots = slots
        self.endpoint: m.Endpoint | None = None
        self.checkpoints: dict[str, int] = {}
        """Last saved step by directory; share it between nodes to give them one file system."""
        self.on_hello: Callable[[SimulatedNode, WorkerSpec], None] = lambda node, spec: None
        self._train = train
        self._exits: asyncio.Queue[WorkerExit | NodeLost] = asyncio.Queue()
        self._running: dict[int, tuple[threading.Event, threading.Thread]] = {}
        self._is_lost = False

    async def free_port(self) -> int:
        return 1

    async def launch(self, workers: Sequence[WorkerSpec]) -> None:
        loop = asyncio.get_running_loop()
        for spec in workers:
            killed = threading.Event()
            thread = threading.Thread(target=self._process, args=(spec, killed, loop), daemon=True)
            self._running[spec.identity.rank] = killed, thread
            thread.start()

    def _process(self, spec: WorkerSpec, killed: threading.Event, loop: asyncio.AbstractEventLoop) -> None:
        code = self._exit_code(spec, killed)
        if killed.is_set():
            code = -signal.SIGKILL
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._ended, spec.identity.rank, code)

    def _exit_code(self, spec: WorkerSpec, killed: threading.Event) -> int:
        assert self.endpoint is not None
        link = Link(self.endpoint, m.Hello(launch=spec.identity.attempt, rank=spec.identity.rank), answer_s=2.0)
        try:
            order = link.begin()
            self.on_hello(self, spec)
            if order is None:
                return STOPPED
            process = Simulated(order, link, self, killed)
            result = self._train(process)
            if killed.is_set():
                return 1
            if order.worker.identity.rank == 0:
                link.finish(None if result is None else (result,))
        except SystemExit as ended:
            return int(ended.code or 0)
        except (Killed, DriverLost):
            return 1
        except Exception as error:  # noqa: BLE001 - as a training function may raise
            link.fail(str(error))
            return 1
        finally:
            link.close()
        return 0

    def _ended(self, rank: int, code: int) -> None:
        if self._running.pop(rank, None) is not None and not self._is_lost:
            self._exits.put_nowait(WorkerExit(rank, code))

    async def next_exit(self) -> WorkerExit:
        found = await self._exits.get()
        if isinstance(found, NodeLost):
            raise found
        return found

    def join(self) -> None:
        """Wait until the processes that run now have ended."""
        for _, thread in list(self._running.values()):
            thread.join(10.0)

    def kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank in self._running:
                self._running[rank][0].set()

    def die(self) -> None:
        """Lose the node with all its processes, as with its power."""
        self._is_lost = True
        for killed, _ in self._running.values():
            killed.set()
        self._exits.put_nowait(NodeLost("its power is off"))

    def send_signal(self, rank: int, number: signal.Signals) -> None: ...

    async def dump_stacks(self, rank: int) -> None: ...

    async def close(self) -> None:
        self.kill(list(self._running))
        await asyncio.to_thread(self.join)


class FakeCoordinator:
    """Records the jobs that are removed. `jobs`: what an earlier driver has left. `steps`: last saved step by job.
    `is_down`: no call succeeds.
    """

    def __init__(
        self, jobs: Sequence[str] = (), steps: Callable[[str], int] = lambda job: 0, *, is_down: bool = False
    ) -> None:
        self.dropped: list[str] = []
        self.num_refused = 0
        self._jobs = jobs
        self._steps = steps
        self._is_down = is_down

    def _check(self) -> None:
        if self._is_down:
            self.num_refused += 1
            raise CoordinatorUnavailable("nothing listens there")

    async def send_command(self, command: str, *, job_id: str, reason: str) -> None:
        assert command
        assert job_id
        assert reason
        self._check()

    async def latest_checkpoint(self, *, job_id: str) -> Any:
        self._check()
        step = self._steps(job_id)
        saved = SimpleNamespace(path=f"{job_id}/{step}", step=step)
        return SimpleNamespace(checkpoint=saved, metadata={}) if step else None

    async def drop_job(self, job_id: str, *, force: bool, reason: str) -> bool:
        assert force
        assert reason
        self._check()
        self.dropped.append(job_id)
        return True

    async def list_jobs(self) -> list[Any]:
        self._check()
        return [SimpleNamespace(job_id=each) for each in self._jobs]


class SimulatedStudy:
    """A study in a directory, which drivers run one after the other, as after a kill."""

    def __init__(self, directory: Path, spec: e.StudySpec, *, workers_per_trial: int = 1) -> None:
        self.directory = directory
        self.spec = spec
        self.workers_per_trial = workers_per_trial
        self.coordinator: FakeCoordinator | None = None
        self.old_jobs: list[str] = []
        self.nodes: SharedNodes | None = None
        self.driver: Driver | None = None
        self.steps: Callable[[str], int] = lambda job: 0
        """Last saved step of a job, as the coordinator knows it."""
        self.is_coordinator_down = False

    async def run(self, *nodes: SimulatedNode, num_slots: int = 2, host: str = "", **more: Any) -> Finish:
        """Run a driver to the end of the study. Cancel it to kill it: nothing remains but the journal."""
        with StudyJournal(self.directory / JOURNAL) as journal:
            facts = journal.load()
            recovered = None
            if facts:
                search = Search.replay(facts)
                recovered = search.recover()
            else:
                search = Search(self.spec)
                journal.append([e.Opened(spec=self.spec)])

            def publish(endpoint: m.Endpoint) -> None:
                for node in nodes:
                    node.endpoint = endpoint

            place = self.directory / f"place-{len(facts)}"
            place.mkdir()
            self.coordinator = FakeCoordinator(self.old_jobs, self.steps, is_down=self.is_coordinator_down)
            self.nodes = SharedNodes(*nodes)
            self.driver = driver = Driver(
                search,
                journal,
                self.nodes,
                self.coordinator,  # type: ignore[arg-type] # what the driver uses of it
                coordinator="unix:/none",
                directory=self.directory,
                num_slots=num_slots,
                workers_per_trial=self.workers_per_trial,
                **more,
            )
            try:
                return await driver.run(place, recovered, publish=publish, host=host)
            finally:
                await self.nodes.close()

    def facts(self) -> list[e.Event]:
        with StudyJournal(self.directory / JOURNAL) as journal:
            return journal.load()

    def state(self) -> StudyState:
        return Search.replay(self.facts()).state
