"""`TrainingOrchestrator`: the calls of a worker, against a real coordinator, and functions on real workers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from leftovers import nothing_is_left
from servers import until

import strata
from strata import CheckpointManager, CoordinatorClient, TrainingOrchestrator
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.errors import ConfigError, NoCheckpoint, RunFailed, UnknownWorker
from strata.launch.nodes import ray_cluster
from strata.launch.record.directory import all_runs, open_run
from strata.train.function_run import STOP_AGAIN_S

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the directory of runs."""
    for name in ("RANK", "WORLD_SIZE", "STRATA_RUN", "STRATA_CHECKPOINT_EVERY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("STRATA_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    with nothing_is_left(tmp_path):
        yield tmp_path / "runs"


@pytest.fixture
def address() -> Iterator[str]:
    with EmbeddedCoordinator() as coordinator:
        yield coordinator.address


def together(*work: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(work)) as pool:
        return [each.result(60) for each in [pool.submit(one) for one in work]]


# -- the calls of a worker ---------------------------------------------------------------------------------------------


def test_a_single_worker_starts_a_coordinator_and_saves() -> None:
    with TrainingOrchestrator(checkpoints="ckpt", saver="thread").connect() as orchestrator:
        worker = orchestrator.register_worker("worker-01")
        assert (worker.rank, worker.world_size) == (0, 1)
        assert orchestrator.register_dataset("images", total_samples=100, shard_size=40) == 3
        read = []
        while (shard := orchestrator.get_shard("images")) is not None:
            read += range(shard.start, shard.end)
            assert orchestrator.heartbeat(step=len(read), epoch=0, loss=0.5) == []
            done = orchestrator.ack_shards([shard])
        assert sorted(read) == list(range(100))
        assert done.complete
        orchestrator.barrier("epoch-0", step=100)
        with pytest.raises(NoCheckpoint):
            orchestrator.load()
        orchestrator.save(b"weights", step=100, epoch=1).wait()
        assert orchestrator.load() == b"weights"
        orchestrator.deregister("done")
        with pytest.raises(UnknownWorker, match="call register_worker"):
            orchestrator.heartbeat()


def test_several_workers_share_the_data_meet_and_save_one_checkpoint(address: str) -> None:
    class Weights:
        value = np.zeros(3)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["value"]

    def orchestrator() -> TrainingOrchestrator:
        return TrainingOrchestrator(f"http://{address}", job_id="job", checkpoints="ckpt", saver="thread")

    with orchestrator() as one, orchestrator() as other, CoordinatorClient(address) as client:
        both = (one, other)
        for number, each in enumerate(both):
            each.register_worker(f"worker-{number}")
            each.register_dataset("images", total_samples=100, shard_size=10, shuffle=True)
        together(*(lambda each=each: each.barrier("begin") for each in both))  # type: ignore[misc]
        shards = [each.get_shards("images") for each in both]
        assert sorted(shard.index for found in shards for shard in found) == list(range(10))

        def save(each: TrainingOrchestrator) -> None:
            part = {"value": np.full(3, float(each.worker.rank))}
            each.save({"weights": part}, step=5).wait()

        together(*(lambda each=each: save(each) for each in both))  # type: ignore[misc]
        last = client.latest_checkpoint(job_id="job")
        assert last is not None
        assert last.checkpoint.step == 5

        client.send_command("STOP", job_id="job", reason="enough")
        assert [command.name for command in one.heartbeat(step=6)] == ["STOP"]

        weights = [Weights(), Weights()]
        pairs = zip(both, weights, strict=True)
        restoring = (lambda each=each, into=into: each.restore({"weights": into}) for each, into in pairs)
        assert [found.step for found in together(*restoring)] == [5, 5]
        assert [float(each.value[0]) for each in weights] == [0.0, 1.0]

        other.deregister("enough")  # the remaining worker is a new generation of one
        one.save({"weights": {"value": np.ones(3)}}, step=7).wait()
        assert one.load()["weights"]["value"].tolist() == [1, 1, 1]


def test_nothing_is_started_before_it_is_needed() -> None:
    num_threads = threading.active_count()
    orchestrator = TrainingOrchestrator("localhost:1")
    orchestrator.close()

    assert threading.active_count() == num_threads


# -- functions ---------------------------------------------------------------------------------------------------------


def rank_and(value: float, *, factor: float = 1.0) -> tuple[int, int, float]:
    with strata.init() as ctx:
        return ctx.rank, ctx.world_size, value * factor


def test_a_function_gives_its_results_in_the_order_of_the_ranks(runs: Path) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    found = TrainingOrchestrator().run(rank_and, 2.0, factor=3.0, workers=2, name="mine")

    assert found == [(0, 2, 6.0), (1, 2, 6.0)]
    assert signal.getsignal(signal.SIGTERM) is handler
    directory = open_run("mine")
    assert directory.status is not None
    assert directory.status.state == "done"
    assert not (directory.path / "call").exists()
    with pytest.raises(ConfigError, match="run mine already exists"):
        TrainingOrchestrator().run(rank_and, 1.0, name="mine")


def test_it_runs_from_another_thread_and_from_within_an_event_loop() -> None:
    """A notebook runs an event loop and cells in other threads."""
    orchestrator = TrainingOrchestrator()

    async def cell() -> list[Any]:
        return orchestrator.run(os.getenv, "RANK", workers=1)

    def elsewhere() -> list[Any]:
        return orchestrator.run(os.getenv, "WORLD_SIZE", workers=1)

    assert together(elsewhere) == [["1"]]
    assert asyncio.run(cell()) == ["0"]


def test_a_worker_that_is_killed_is_started_again_from_the_last_checkpoint() -> None:
    class Sum:
        total = 0

        def state_dict(self) -> dict[str, int]:
            return {"total": self.total}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.total = state["total"]

    def train(num_steps: int) -> tuple[int, int, int]:
        ctx = strata.init(every=2, saver="thread")
        numbers = Sum()
        start = step = ctx.restore({"sum": numbers}).step
        while step < num_steps:
            step += 1
            numbers.total += step
            ctx.report(step=step)
            save = ctx.maybe_checkpoint({"sum": numbers})
            if save is not None:
                save.wait()
            if step == 5 and ctx.attempt == 0 and ctx.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return start, numbers.total, ctx.attempt

    assert TrainingOrchestrator().run(train, 9, workers=2) == [(4, 45, 1), (4, 45, 1)]


def test_a_function_that_raises_fails_the_run_with_its_traceback() -> None:
    def train() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("row 7 is bad")
        threading.Event().wait()

    with pytest.raises(RunFailed) as failed:
        TrainingOrchestrator().run(train, workers=2, name="bad", max_restarts=0)
    lines = str(failed.value).splitlines()

    assert lines[0] == "run bad failed: rank 1: exit code 1: ValueError: row 7 is bad (no restarts allowed)"
    assert lines[1:3] == ["output of rank 1:", "Traceback (most recent call last):"]
    assert "in train" in lines[3]
    assert lines[-2] == "ValueError: row 7 is bad"
    assert lines[-1].startswith("logs: ")
    assert not [frame for frame in lines if "strata/train/function.py" in frame]


def test_a_worker_that_leaves_no_traceback_shows_the_end_of_its_log() -> None:
    def train() -> None:
        print("so far so good", flush=True)
        os._exit(3)

    with pytest.raises(RunFailed, match=r"rank 0: exit code 3[\s\S]*so far so good"):
        TrainingOrchestrator().run(train, workers=1, max_restarts=0)


def test_checkpoints_go_to_the_callers_directory(tmp_path: Path) -> None:
    def train() -> str:
        with strata.init(saver="thread") as ctx:
            ctx.checkpoint({"weights": b"w"}, step=1).wait()
            return os.environ["STRATA_CHECKPOINTS"]

    assert TrainingOrchestrator().run(train, workers=1, checkpoints="kept") == [str(tmp_path / "kept")]
    with CheckpointManager("kept") as kept:
        assert [saved.step for saved in kept.list()] == [1]


def test_what_cannot_run_leaves_no_run_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    orchestrator = TrainingOrchestrator()
    with pytest.raises(ConfigError, match="engine='spark' is unknown"):
        orchestrator.run(os.getpid, engine="spark")
    with pytest.raises(ConfigError, match="is invalid; pass a number"):
        orchestrator.run(os.getpid, workers="many")
    with pytest.raises(strata.StrataError, match="argument 1 of getenv, a lock,"):
        orchestrator.run(os.getenv, threading.Lock())
    monkeypatch.setattr(ray_cluster, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install .strata-runtime\[ray\]"):
        orchestrator.run(os.getpid, engine="ray")

    assert all_runs().found == []


def interrupted(script: Path, began: Path, num_times: int = 1) -> str:
    """Return the output of a program that gets Ctrl-C this often after its workers have started."""
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        until(lambda: began.exists() or process.poll() is not None, "its workers have started", deadline_s=90)
        for number in range(1, num_times + 1):
            process.send_signal(signal.SIGINT)
            if number < num_times:
                until(lambda: "saving a checkpoint first" in happened("endless"), "the interrupt has arrived")
        output, _ = process.communicate(timeout=90)
    finally:
        process.kill()
        process.communicate()
    return output


def happened(name: str) -> str:
    return "\n".join(event.text for event in open_run(name).events())


def test_ctrl_c_lets_the_workers_stop_and_is_an_interrupt_here(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import threading\n"
        "from strata import TrainingOrchestrator\n"
        "def train():\n"
        "    open('began', 'w').close()\n"
        "    threading.Event().wait()\n"
        "try:\n"
        "    TrainingOrchestrator().run(train, workers=1, name='endless')\n"
        "except KeyboardInterrupt as error:\n"
        "    print(error)\n"
    )

    assert interrupted(script, tmp_path / "began").startswith("run endless: Ctrl-C; the workers exited")


IN_LOOP = """
import asyncio, signal, threading
import strata

def train():
    ctx = strata.init(saver="thread")
    for step in range(1, 1000):
        ctx.report(step=step)
        ctx.maybe_checkpoint({"weights": b"w"})
        open("began", "w").close()
        threading.Event().wait(STEP_S)

async def main():
    return strata.TrainingOrchestrator().run(train, workers=1, name="endless")

try:
    RUN
except KeyboardInterrupt:
    print("interrupted")
"""
NOTEBOOK = "asyncio.new_event_loop().run_until_complete(main())"
"""Like a notebook's event loop, this one does not handle Ctrl-C."""


@pytest.mark.parametrize("run", ["asyncio.run(main())", NOTEBOOK])
def test_ctrl_c_in_an_event_loop_lets_the_workers_save_however_long_a_step_takes(tmp_path: Path, run: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(IN_LOOP.replace("RUN", run).replace("STEP_S", str(3 * STOP_AGAIN_S)))

    assert interrupted(script, tmp_path / "began").endswith("interrupted\n")
    assert "the workers have saved" in happened("endless")
    assert "killing the workers" not in happened("endless")


def test_the_second_ctrl_c_in_an_event_loop_waits_for_no_step(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(IN_LOOP.replace("RUN", "asyncio.run(main())").replace("STEP_S", "3600"))

    assert interrupted(script, tmp_path / "began", 2).endswith("interrupted\n")
    assert "killing the workers" in happened("endless")
