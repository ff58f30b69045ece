"""Runs on several machines, each with its own network namespace, TLS and a token for the coordinator. Nodes are
partitioned, killed and drained; the coordinator dies; packets are delayed and lost. Every row is trained on once per
epoch, and a Trainer ends with the weights of an undisturbed one.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from leftovers import nothing_is_left, processes_with
from network import Network
from runs import SCRIPTS, Run, fit_alone, trainer_results, write_rows
from servers import STRATA, CoordinatorProcess, until

pytestmark = pytest.mark.timeout(240)
HUB = "hub"
EPOCHS = 2
LEASE = {"lease_s": 10.0, "heartbeat_s": 0.2, "suspicion_s": 2.0, "tick_s": 0.02}
"""Long enough for three workers that import torch at the same time."""
CUT_S = 3.0
"""Duration of a cut, well within the lease."""


class Cluster:
    """Several machines, a coordinator at the hub, and one run on some of the machines."""

    def __init__(self, network: Network, place: Path, data: Path) -> None:
        self.network = network
        self._place = place
        self._data = data
        hub = network.nodes[HUB]
        self._certs = place / "certs"
        subprocess.run([STRATA, "certs", self._certs, "--host", hub.host], check=True, capture_output=True)
        security = {
            "certificate": f"{self._certs}/server.crt",
            "key": f"{self._certs}/server.key",
            "tokens": f"{self._certs}/tokens",
        }
        self.coordinator = CoordinatorProcess(hub, place, listen=f"{hub.host}:50051", security=security, lease=LEASE)
        self.coordinator.start()
        self.runs: dict[str, Run] = {}

    def run(self, node: str, *options: str, workers: str = "2", nnodes: int = 2, script: Path | None = None) -> Run:
        place = self._place / node
        place.mkdir(exist_ok=True)
        common = ("--nnodes", str(nnodes), "--workers", workers, "--coordinator", self.coordinator.address)
        made = Run(
            place,
            self._data,
            *(*common, "--checkpoints", str(self._place / "checkpoints"), "--max-restarts", "10", *options),
            script=script,
            prefix=self.network.nodes[node].prefix,
            STRATA_TLS_CA=f"{self._certs}/ca.crt",
            STRATA_TOKEN_FILE=f"{self._certs}/admin.token",
        )
        made.out = self._place / "out"
        self.runs[node] = made
        return made

    def start(self, *nodes: str, workers: str = "2", step_s: float = 0.2) -> list[Run]:
        """Start the run; the first machine leads. Steps take `step_s` until `hurry` is called."""
        made = [self.run(node, workers=workers, nnodes=len(nodes)) for node in nodes]
        for run in made:
            run.start("--step-s", str(step_s), "--until", str(self._place / "hurry"))
            self._await_joined(run)
        return made

    def start_trainer(self, *nodes: str, workers: str, arguments: tuple[str, ...]) -> list[Run]:
        """Start the script with a Trainer; the first machine leads. Steps are slow until `hurry` is called."""
        script = SCRIPTS / "train_trainer.py"
        made = [self.run(node, workers=workers, nnodes=len(nodes), script=script) for node in nodes]
        own = ("--data", str(self._data), "--out", str(self._place / "out"), *arguments)
        for run in made:
            run.start_plain(*own, "--step-s", "0.1", "--until", str(self._place / "hurry"))
            self._await_joined(run)
        return made

    def _await_joined(self, run: Run) -> None:
        until((run.directory / "events.jsonl").exists, "the node has joined")

    def hurry(self) -> None:
        """Let steps run without delay from now on."""
        (self._place / "hurry").touch()

    def check(self, num_workers: int) -> None:
        """Check that every row was trained on once per epoch, and that all ranks have the same weights."""
        results = self.runs[next(iter(self.runs))].results()
        assert [each["rank"] for each in results] == list(range(num_workers))
        assert [each["counts"] for each in results] == [[EPOCHS]] * num_workers
        assert len({each["digest"] for each in results}) == 1


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "data")


@pytest.fixture
def cluster(make_network: Any, tmp_path: Path, data: Path) -> Iterator[Cluster]:
    made = Cluster(make_network(HUB, "a", "b"), tmp_path, data)
    with nothing_is_left(tmp_path):
        yield made
        for run in made.runs.values():
            run.bury()


def whats(run: Run) -> list[str]:
    return [event["what"] for event in run.events()]


def texts(run: Run) -> str:
    return "\n".join(event["text"] for event in run.events())


def finish(*runs: Run) -> None:
    for run in runs:
        code, output = run.wait()
        assert code == 0, output


def test_a_remote_worker_and_the_coordinator_die_then_its_machine_leaves_and_every_row_counts_once(
    cluster: Cluster,
) -> None:
    a, b = cluster.start("a", "b", workers="1:2")
    b.wait_for_step(0, 4, rank=1)
    cluster.coordinator.restart()
    b.wait_for_step(0, 12, rank=1)
    b.kill(0, 1)
    b.wait_for_step(1, 16, rank=1)
    cluster.coordinator.restart()
    b.wait_for_step(1, 20, rank=1)
    assert whats(a).count("started") == 2, "only the death of the worker started a new attempt"
    assert all("restored" in run.text(1, rank) for rank, run in enumerate((a, b))), "each machine logs its own workers"

    b.agent.send_signal(signal.SIGTERM)
    code, output = b.wait()
    assert code == 128 + signal.SIGTERM, output
    assert "the run continues without this node" in output
    stopped_at = b.last_step(1, 1)
    assert int(a.wait_for(2, 0, r"restored (\d+)")[1]) >= stopped_at, "no step was repeated"
    b.resume()
    a.wait_for(3, 0, r"restored (\d+)")
    cluster.hurry()
    finish(a, b)
    cluster.check(2)
    assert [event["attempt"] for event in a.events() if event["what"] == "failed"] == [0]


@pytest.mark.slow
def test_a_partitioned_machine_rejoins_and_takes_over_when_the_leader_dies(cluster: Cluster) -> None:
    a, b = cluster.start("a", "b", workers="1:2")
    a.wait_for_step(0, 12)
    for other in (HUB, "a"):
        cluster.network.cut("b", other)
    a.wait_for_step(1, int(a.wait_for(1, 0, r"restored (\d+)")[1]) + 5)
    for other in (HUB, "a"):
        cluster.network.mend("b", other)
    restored = int(a.wait_for(2, 0, r"restored (\d+)")[1])
    assert "is lost: its agent is gone" in texts(a)
    assert "the coordinator has removed this node" in texts(b)
    b.wait_for_step(2, restored + 6, rank=1)
    started = [event["text"] for event in a.events() if event["what"] == "started"]
    assert [text.partition(" with ")[2].split()[0] for text in started] == ["2", "1", "2"]

    a.agent.kill()
    cluster.hurry()
    finish(b)
    cluster.check(1)
    assert "which led, is gone" in texts(b)
    assert int(b.found(3, 0, r"restored (\d+)")[1]) >= restored
    until(lambda: not processes_with(f"STRATA_RUNS_DIR={a.place}"), "its workers died with its agent")


@pytest.mark.slow
def test_below_the_minimum_a_run_waits_can_be_stopped_and_starts_when_all_nodes_have_joined(cluster: Cluster) -> None:
    a, b = cluster.start("a", "b")
    b.wait_for_step(0, 12, rank=1)
    b.agent.kill()
    b.agent.communicate()
    until(lambda: "only 1 of at least 2 workers can be placed; waiting up to 300 s" in texts(a), "it waits")
    a.agent.send_signal(signal.SIGINT)
    code, output = a.wait()
    assert code == 130, output
    cluster.hurry()
    for run in (a, b):
        run.resume()
    finish(a, b)
    cluster.check(2)


@pytest.mark.slow
def test_a_trainer_with_servers_on_another_machine_ends_with_the_same_bits_after_delay_loss_and_a_cut(
    cluster: Cluster, tmp_path: Path, data: Path
) -> None:
    strategy = ("--hybrid", "--servers", "2")
    expected = fit_alone(tmp_path / "alone", data, *strategy)
    network, links = cluster.network, ((HUB, "a"), (HUB, "b"), ("a", "b"))
    for one, other in links:
        network.disturb(one, other, delay_s=0.02, jitter_s=0.005, loss=0.02)
    a, b = cluster.start_trainer("a", "b", workers="4", arguments=strategy)
    a.wait_for_step(0, 12)
    num_lost, cut_s = network.num_lost("a", "b"), time.monotonic()
    for other in (HUB, "a"):
        network.cut("b", other)
    until(
        lambda: time.monotonic() - cut_s > CUT_S and network.num_lost("a", "b") >= num_lost + 2,
        "packets are lost, and sent again",
    )
    step = a.last_step(0, 0)
    for one, other in links:
        network.disturb(one, other, delay_s=0.02, jitter_s=0.005, loss=0.02)
    a.wait_for_step(0, step + 5)
    cluster.hurry()
    finish(a, b)

    assert trainer_results(tmp_path / "out") == [expected] * 4
    assert whats(a).count("started") == 1, "no process was restarted"
    assert num_lost > 0


def test_a_stop_where_the_run_is_led_stops_it_everywhere(cluster: Cluster) -> None:
    a, b = cluster.start("a", "b")
    b.wait_for_step(0, 12, rank=1)
    a.agent.send_signal(signal.SIGINT)
    for run in (a, b):
        code, output = run.wait()
        assert code == 130, output
        assert "the workers have saved" in output


def test_timeouts_that_do_not_fit_are_refused_at_the_start(cluster: Cluster) -> None:
    run = cluster.run("a", "--step-timeout-s", "9.5")
    run.start()
    code, output = run.wait()
    assert code == 2, output
    assert "--step-timeout-s 9.5 is not above the coordinator's lease of 10 s" in output
