"""A script with a Trainer, started by `strata run` on two nodes. A worker is killed, or a whole node; the weights, the
history and the scores are those of the same script with two local workers. So they are with a parameter server, which
one of the workers reaches over the network.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from leftovers import nothing_is_left
from runs import SCRIPTS, Run, fit_alone, trainer_results, write_rows
from servers import CoordinatorProcess, Nursery, until

pytestmark = pytest.mark.timeout(240)
SCRIPT = SCRIPTS / "train_trainer.py"
LEASE = {"lease_s": 10.0, "heartbeat_s": 0.2, "suspicion_s": 2.0, "tick_s": 0.02}
EPOCH_STEPS = 29
"""900 rows, in batches of 16 on each of two workers."""


class Nodes:
    """Two agents on this machine and the run that they share. Steps are slow until `hurry` is called."""

    def __init__(self, place: Path, data: Path, coordinator: str) -> None:
        self._place = place
        self._data = data
        self._coordinator = coordinator
        self.runs: list[Run] = []

    def start(self, *, servers: int = 0) -> list[Run]:
        """Start the run; the first node leads and has rank 0."""
        workers = str(2 + servers)
        for name in "ab":
            (self._place / name).mkdir()
            common = ("--nnodes", "2", "--workers", workers, "--coordinator", self._coordinator)
            checkpoints = str(self._place / "checkpoints")
            self.runs.append(Run(self._place / name, self._data, *common, "--checkpoints", checkpoints, script=SCRIPT))
        arguments = ("--data", str(self._data), "--out", str(self._place / "out"), "--servers", str(servers))
        for run in self.runs:
            run.start_plain(*arguments, "--step-s", "0.1", "--until", str(self._place / "hurry"))
            until(lambda run=run: (run.directory / "events.jsonl").exists(), "the node has joined")  # type: ignore[misc]
        return self.runs

    def hurry(self) -> None:
        (self._place / "hurry").touch()

    def finish(self) -> list[dict[str, Any]]:
        """Wait for the end; return the results of both ranks."""
        for run in self.runs:
            code, output = run.wait()
            assert code == 0, output
        return trainer_results(self._place / "out")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "data")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data: Path) -> dict[str, Any]:
    found = fit_alone(tmp_path_factory.mktemp("undisturbed"), data)
    assert found["steps"] == 2 * EPOCH_STEPS
    return found


@pytest.fixture
def nodes(nursery: Nursery, tmp_path: Path, data: Path) -> Iterator[Nodes]:
    coordinator = CoordinatorProcess(nursery, tmp_path, lease=LEASE)
    coordinator.start()
    made = Nodes(tmp_path, data, coordinator.address)
    with nothing_is_left(tmp_path):
        yield made
        for run in made.runs:
            run.bury()


@pytest.mark.slow
def test_a_worker_killed_on_one_of_two_nodes_changes_no_weight(nodes: Nodes, undisturbed: dict[str, Any]) -> None:
    a, b = nodes.start()
    b.wait_for_step(0, EPOCH_STEPS // 2, rank=1)
    b.kill(0, 1)
    b.wait_for_step(1, 1, rank=1)
    nodes.hurry()

    assert nodes.finish() == [undisturbed] * 2
    assert [event["attempt"] for event in a.events() if event["what"] == "failed"] == [0]


@pytest.mark.slow
def test_a_node_that_dies_and_comes_back_changes_no_weight(nodes: Nodes, undisturbed: dict[str, Any]) -> None:
    a, b = nodes.start()
    b.wait_for_step(0, EPOCH_STEPS // 2, rank=1)
    worker = b.pid(0, 1)
    b.agent.kill()
    with contextlib.suppress(ProcessLookupError):  # it may have died with its agent
        os.kill(worker, signal.SIGKILL)
    b.agent.communicate()
    until(lambda: any("only 1 of at least 2 workers" in event["text"] for event in a.events()), "the other node waits")
    nodes.hurry()
    b.resume()

    assert nodes.finish() == [undisturbed] * 2


@pytest.mark.slow
def test_a_parameter_server_on_another_node_is_reached_over_the_network(
    nodes: Nodes, tmp_path_factory: pytest.TempPathFactory, data: Path
) -> None:
    expected = fit_alone(tmp_path_factory.mktemp("alone"), data, "--servers", "1")
    a, b = nodes.start(servers=1)
    a.wait_for_step(0, EPOCH_STEPS // 2, rank=1)
    b.kill(0, 2)
    a.wait_for_step(1, 1, rank=1)
    nodes.hurry()

    assert nodes.finish() == [expected] * 3
    assert [event["attempt"] for event in a.events() if event["what"] == "failed"] == [0]
