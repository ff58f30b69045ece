"""A large study as one machine runs it: 10,000 trials with 100 reports each on 64 simulated workers.

This process is the driver with its coordinator and journal, as a call of `tune` is; the workers are in another one, and
report over the driver's socket. So the CPU time and the memory of this process are what a study costs beside training.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil

from strata.bench.contenders.tune_scale_workers import NUM_REPORTS, Exit, Order
from strata.coordinator.client import AsyncCoordinatorClient
from strata.coordinator.config import CoordinatorConfig
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.launch.nodes.base import NodeLost
from strata.launch.nodes.shared import SharedNodes
from strata.launch.protocol import WorkerExit
from strata.launch.run import LEASE
from strata.transport import sockets
from strata.tune import SearchSpace
from strata.tune.driver import Driver
from strata.tune.journal import JOURNAL, StudyJournal
from strata.tune.search import Search
from strata.tune.state import events as e

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterable, Sequence

    from strata.launch.environment import WorkerSpec
    from strata.tune.messages import Endpoint

NUM_TRIALS, QUICK_TRIALS = 10_000, 300
NUM_WORKERS = 64
MIN_FINISHED = 0.9
"""Share of the trials that make all their reports. Reports of trials that run at the same time may overtake each other,
so one of the first may be stopped."""
WORKERS = "strata.bench.contenders.tune_scale_workers"


class SimulatedNode:
    """A `Node` whose workers are tasks of one other process."""

    name = host = "simulated"
    address = "127.0.0.1"
    slots = NUM_WORKERS

    def __init__(self) -> None:
        self._endpoint: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._process: asyncio.subprocess.Process | None = None
        self._begun = asyncio.create_task(self._begin())

    def publish(self, endpoint: Endpoint) -> None:
        self._endpoint.set_result(endpoint.address)

    async def _begin(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", WORKERS, await self._endpoint),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return self._process

    async def free_port(self) -> int:
        return 1  # for torch, which is not used

    async def launch(self, workers: Sequence[WorkerSpec]) -> None:
        process = await asyncio.shield(self._begun)
        for each in workers:
            _send(process, Order(rank=each.identity.rank, launch=each.identity.attempt))

    async def next_exit(self) -> WorkerExit:
        process = await asyncio.shield(self._begun)
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise NodeLost("the process of the simulated workers has ended")
        found = msgspec.json.decode(line, type=Exit)
        return WorkerExit(found.rank, found.code)

    def kill(self, ranks: Iterable[int]) -> None:
        if self._process is not None:
            for rank in ranks:
                _send(self._process, Order(rank=rank, is_kill=True))

    def send_signal(self, rank: int, number: signal.Signals) -> None: ...

    async def dump_stacks(self, rank: int) -> None: ...

    async def close(self) -> None:
        self._begun.cancel()
        await asyncio.gather(self._begun, return_exceptions=True)
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def _send(process: asyncio.subprocess.Process, order: Order) -> None:
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(order) + b"\n")


@dataclass(frozen=True, slots=True)
class Moment:
    cpu_s: float
    """CPU time of this process until now."""
    rss_bytes: int


class Meter:
    """Observes the facts of a study: a moment per `NUM_REPORTS` reports, that is per trial. Trials end in waves, since
    all workers are equally fast; reports come all the time.
    """

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self._num_reports = 0
        self._process = psutil.Process()

    def note(self, facts: Sequence[e.Event]) -> None:
        for fact in facts:
            if isinstance(fact, e.Reported):
                if self._num_reports % NUM_REPORTS == 0:
                    self.moments.append(Moment(time.process_time(), self._process.memory_info().rss))
                self._num_reports += 1


def figures_of(moments: Sequence[Moment]) -> dict[str, float]:
    """Return the CPU time per trial in the first and the last tenth of a study, and its memory. The beginning and the
    end do not count: trials only start there, or only end.
    """
    tenth, inner = len(moments) // 10, moments[NUM_WORKERS:-NUM_WORKERS]
    added_bytes = inner[-1].rss_bytes - inner[tenth].rss_bytes
    return {
        "scale_driver_first_ms": (inner[tenth].cpu_s - inner[0].cpu_s) * 1e3 / tenth,
        "scale_driver_last_ms": (inner[-1].cpu_s - inner[-1 - tenth].cpu_s) * 1e3 / tenth,
        "scale_driver_memory_mb": moments[-1].rss_bytes / 1e6,
        "scale_driver_memory_kb": added_bytes / 1e3 / (len(inner) - 1 - tenth),
    }


async def run(directory: Path, place: Path, num_trials: int) -> Sequence[Moment]:
    """Run a study, and return what had been used by then, once per trial."""
    space = SearchSpace().add_float("learning_rate", min=1e-5, max=1e-1, log=True).add_int("layers", min=1, max=8)
    spec = e.StudySpec(
        name="bench",
        space=space.to_dict(),
        num_trials=num_trials,
        sampler="random",
        scheduler="asha",
        scheduler_options={"kind": "stop"},
    )
    config = CoordinatorConfig(state=str(directory / "coordinator"), lease=LEASE)
    with (
        StudyJournal(directory / JOURNAL) as journal,
        EmbeddedCoordinator(config, listen=f"unix:{place}/coordinator.sock") as coordinator,
    ):
        journal.append([e.Opened(spec=spec)])
        search, meter, node = Search(spec), Meter(), SimulatedNode()
        search.observers.append(meter.note)
        nodes = SharedNodes(node)
        async with AsyncCoordinatorClient(coordinator.address) as client:
            driver = Driver(
                search,
                journal,
                nodes,
                client,
                coordinator=coordinator.address,
                directory=directory,
                num_slots=NUM_WORKERS,
            )
            try:
                finish = await driver.run(place, None, publish=node.publish)
            finally:
                await nodes.close()
    assert finish.is_complete, finish.reason
    num_finished = sum(each.state == "finished" for each in search.state.trials.values())
    assert num_finished >= MIN_FINISHED * num_trials, f"{num_finished} of {num_trials} trials have finished"
    return meter.moments


def main() -> None:
    num_trials = QUICK_TRIALS if "--quick" in sys.argv else NUM_TRIALS
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as directory, sockets.place() as place:
        moments = asyncio.run(run(Path(directory), place.path, num_trials))
    print(json.dumps({"figures": figures_of(moments)}))


if __name__ == "__main__":
    main()
