"""Local processes pass the contract, forked from a warm process or started cold; and have further tests."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from pathlib import Path

import psutil
import pytest
from workers_contract import DEADLINE_S, SLEEPS, Make, Stage, Watched, WorkersContract

from strata.launch.processes.base import Workers
from strata.launch.processes.local import LocalWorkers, warm_ahead
from strata.launch.protocol import NOT_STARTED, WorkerExit

LOOKS = "import json, os, sys; print(json.dumps([os.getppid(), 'preloaded_one' in sys.modules]))"


class TestWarm(WorkersContract):
    @pytest.fixture
    def make(self) -> Make:
        return LocalWorkers


class TestCold(WorkersContract):
    @pytest.fixture
    def make(self) -> Make:
        return lambda: LocalWorkers(preload=["torch"], is_warm=False)


class Preloading(Stage):
    """Workers with extra modules to preload."""

    def __init__(self, place: Path, **modules: str) -> None:
        for name, text in modules.items():
            (place / f"{name}.py").write_text(text)
        variables = {**os.environ, "PYTHONPATH": str(place)}
        super().__init__(lambda: LocalWorkers(preload=list(modules), variables=variables), place)

    def look(self) -> tuple[int, bool]:
        """Return a worker's parent, and whether the module was preloaded."""
        parent, found = json.loads(self.log().splitlines()[-1])
        return parent, found


def test_a_warm_worker_finds_what_was_preloaded_and_the_next_one_has_the_same_parent(tmp_path: Path) -> None:
    stage = Preloading(tmp_path, preloaded_one="", missing_one="import nonsense_that_is_not_there")
    looks = []

    async def act(workers: Workers) -> None:
        for _ in range(2):
            await workers.start([stage.order(LOOKS)])
            assert await workers.next_exit() == WorkerExit(0, 0)
            looks.append(stage.look())

    stage.act(act)
    assert looks[0] == looks[1]
    assert looks[0][1]


def test_when_the_warm_process_is_killed_its_workers_end_and_the_next_start_has_another(tmp_path: Path) -> None:
    stage = Preloading(tmp_path, preloaded_one="")

    async def act(workers: Workers) -> None:
        orders = [stage.order(f"{LOOKS}\n{SLEEPS}", rank=rank) for rank in range(2)]
        await workers.start(orders)
        await stage.wait_for_line("here", 0)
        await stage.wait_for_line("here", 1)
        watched = [Watched(workers.pid_of(rank) or 0) for rank in range(2)]
        parent = int(json.loads(stage.log().splitlines()[0])[0])
        os.kill(parent, signal.SIGKILL)
        exits = {await workers.next_exit() for _ in range(2)}
        assert exits == {WorkerExit(0, -9), WorkerExit(1, -9)}
        assert all(each.is_gone() for each in watched)
        for each in watched:
            each.end()

        await workers.start([stage.order(LOOKS)])
        assert await workers.next_exit() == WorkerExit(0, 0)
        assert stage.look()[0] != parent
        assert stage.look()[1]

    stage.act(act)


def test_workers_start_cold_when_the_warm_process_dies_of_its_imports(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Preloading(tmp_path, preloaded_one="import os; os._exit(1)")

    async def act(workers: Workers) -> None:
        await workers.prepare()
        for _ in range(3):
            await workers.start([stage.order(LOOKS)])
            assert await workers.next_exit() == WorkerExit(0, 0)
            assert not stage.look()[1]

    stage.act(act)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2  # then it stops trying


def test_a_preloaded_module_that_starts_threads_is_left_out_and_the_others_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waits = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    stage = Preloading(tmp_path, threaded_one=waits, preloaded_one="", threaded_two=waits)

    assert stage.run(stage.order(LOOKS)) == {0: 0}
    assert stage.look()[1]
    assert "threaded_one starts threads" in caplog.text
    assert "threaded_two starts threads" in caplog.text


def test_a_worker_that_cannot_be_forked_has_a_special_exit_code_and_the_reason_in_its_log(tmp_path: Path) -> None:
    full = "import os\ndef fork(): raise BlockingIOError(11, 'no room for a process')\nos.fork = fork"
    stage = Preloading(tmp_path, preloaded_one=full)

    assert stage.run(stage.order(LOOKS), stage.order(LOOKS, rank=1)) == {0: NOT_STARTED, 1: NOT_STARTED}
    assert stage.log().startswith("strata: the worker could not be started: [Errno 11] no room for a process")


def test_when_the_warm_process_dies_all_exits_are_reported(tmp_path: Path) -> None:
    stage = Preloading(tmp_path, preloaded_one="import os\nos.fork = lambda: os._exit(1)")

    async def act(workers: Workers) -> None:
        for _ in range(2):
            await workers.start([stage.order(LOOKS), stage.order(LOOKS, rank=1)])
            exits = {await workers.next_exit() for _ in range(2)}
            assert exits == {WorkerExit(0, NOT_STARTED), WorkerExit(1, NOT_STARTED)}

    stage.act(act)
    assert stage.log(1).splitlines() == ["strata: the worker could not be started: its process has ended"] * 2


def test_a_worker_whose_interpreter_does_not_start_has_a_special_exit_code(tmp_path: Path) -> None:
    stage = Stage(lambda: LocalWorkers(is_warm=False), tmp_path)
    order = stage.order("print('never')", variables={"PYTHONHOME": "/nowhere"})

    assert stage.run(order) == {0: NOT_STARTED}
    assert stage.log().endswith("strata: the worker could not be started: its process has ended\n")
    assert "encodings" in stage.log()  # from Python's own error message


def test_generators_of_random_numbers_differ_between_workers(tmp_path: Path) -> None:
    stage = Stage(lambda: LocalWorkers(preload=["numpy.random", "random"]), tmp_path)
    text = "import random, sys; numpy = sys.modules['numpy']; print(random.random(), numpy.random.random())"

    assert stage.run(*(stage.order(text, rank=rank) for rank in range(3))) == {0: 0, 1: 0, 2: 0}
    assert len({number for rank in range(3) for number in stage.log(rank).split()}) == 6


def test_torch_from_the_warm_process_reduces_over_gloo_with_the_threads_that_are_asked_for(tmp_path: Path) -> None:
    stage = Stage(lambda: LocalWorkers(preload=["numpy", "torch"]), tmp_path)
    text = f"""
        import os, sys
        assert "torch" in sys.modules
        import torch, torch.distributed as dist
        assert torch.get_num_threads() == 3, torch.get_num_threads()
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=rank, world_size=2)
        value = (torch.ones(300, 300) @ torch.ones(300, 300)).sum() * (rank + 1)
        dist.all_reduce(value)
        print(int(value))
        dist.destroy_process_group()
    """
    orders = [
        stage.order(text, rank=rank, variables={**os.environ, "RANK": str(rank), "OMP_NUM_THREADS": "3"})
        for rank in range(2)
    ]

    codes = stage.run(*orders)

    assert (codes, stage.log(0), stage.log(1)) == ({0: 0, 1: 0}, "81000000\n", "81000000\n")


def test_a_signal_to_all_processes_leaves_it_to_the_agent_when_workers_end(tmp_path: Path) -> None:
    """At a shutdown, every process gets the signal; the workers must save first, so the warm process stays."""
    stage = Preloading(tmp_path, preloaded_one="")

    async def act(workers: Workers) -> None:
        await workers.start([stage.order(f"{LOOKS}\n{SLEEPS}")])
        await stage.wait_for_line("here")
        os.kill(int(json.loads(stage.log().splitlines()[0])[0]), signal.SIGTERM)
        await workers.start([stage.order("print('the host forks')", rank=1)])
        assert await workers.next_exit() == WorkerExit(1, 0)
        workers.kill([0])
        assert await workers.next_exit() == WorkerExit(0, -9, is_killed=True)

    stage.act(act)


def test_a_worker_killed_during_the_imports_ends_at_once(tmp_path: Path) -> None:
    stage = Preloading(tmp_path, preloaded_one="import time; time.sleep(600)")

    async def act(workers: Workers) -> None:
        starting = asyncio.create_task(workers.start([stage.order(SLEEPS), stage.order(SLEEPS, rank=1)]))
        await asyncio.sleep(0)
        workers.kill([0])
        await asyncio.sleep(0.01)
        assert not starting.done()
        workers.kill([1])
        async with asyncio.timeout(DEADLINE_S):
            await starting
        assert {await workers.next_exit(), await workers.next_exit()} == {
            WorkerExit(0, -9, is_killed=True),
            WorkerExit(1, -9, is_killed=True),
        }

    stage.act(act)


def test_a_process_that_was_warmed_ahead_forks_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "preloaded_one.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    stage = Stage(lambda: LocalWorkers(preload=["preloaded_one"]), tmp_path)

    others = _children()
    with warm_ahead(["preloaded_one"]):
        (host,) = _children() - others
        monkeypatch.setenv("ADDED", "by a library")
        assert stage.run(stage.order(LOOKS)) == {0: 0}

    assert json.loads(stage.log()) == [host, True]
    assert not psutil.pid_exists(host)


def test_a_process_that_was_warmed_ahead_in_another_environment_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(lambda: LocalWorkers(preload=["random"]), tmp_path)

    monkeypatch.setenv("CHANGED", "at first")
    others = _children()
    with warm_ahead(["random"]):
        (host,) = _children() - others
        monkeypatch.setenv("CHANGED", "later")
        assert stage.run(stage.order(LOOKS)) == {0: 0}
        assert json.loads(stage.log())[0] != host
        assert psutil.pid_exists(host)

    assert not psutil.pid_exists(host)


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}
