"""Workers and parameter servers at different nodes of a private network, whose packets are delayed, lost or cut off.

Synchronous training ends with the same bits, or a worker names the server for which it cannot wait any longer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import parameter_server_children as children
import pytest
from network import Network
from servers import DEADLINE_S, Child, until

pytestmark = pytest.mark.timeout(180)
SERVERS = {"server-0": "one", "server-1": "two"}
"""The node of each server."""
WORKERS = ("a", "b")
STEPS = 8


class Training:
    """Two servers and two synchronous workers, each at its own node."""

    def __init__(self, network: Network, place: Path, stall_s: float) -> None:
        self.network = network
        self.servers: dict[str, Child] = {}
        endpoints = {}
        for name, node in SERVERS.items():
            directory = place / name
            directory.mkdir()
            there = network.nodes[node]
            child = there.fork(
                "parameter_server_children:server",
                directory=str(directory),
                host=there.host,
                num_workers=len(WORKERS),
            )
            endpoints[name] = child.receive()["endpoint"]
            self.servers[name] = child
        self.workers = [
            network.nodes[node].fork(
                "parameter_server_children:worker", rank=rank, endpoints=endpoints, stall_s=stall_s
            )
            for rank, node in enumerate(WORKERS)
        ]
        assert [worker.receive() for worker in self.workers] == [{"step": 0}] * len(WORKERS)

    def begin(self, until_step: int, *, wait_s: float = DEADLINE_S, slow_s: float = DEADLINE_S) -> None:
        for worker in self.workers:
            worker.send(until=until_step, wait_s=wait_s, slow_s=slow_s)

    def ended(self) -> list[dict[str, Any]]:
        return [worker.receive(2 * DEADLINE_S) for worker in self.workers]

    def train(self, until_step: int) -> None:
        self.begin(until_step)
        for report in self.ended():
            assert report == {"step": until_step, "error": "", "logged": []}

    def check(self, steps: int) -> None:
        """All rows have the bits of training without a network."""
        found: dict[str, dict[int, bytes]] = {name: {} for name in children.WIDTHS}
        for server in self.servers.values():
            report = server.ask()
            assert report["step"] == steps
            for name, rows in report["rows"].items():
                found[name] |= {int(key): bytes.fromhex(row) for key, row in rows.items()}
        assert found == children.undisturbed(len(WORKERS), steps)


@pytest.fixture
def make_training(make_network: Callable[..., Network], tmp_path: Path) -> Callable[..., Training]:
    return lambda stall_s=2 * DEADLINE_S: Training(make_network(*SERVERS.values(), *WORKERS), tmp_path, stall_s)


def freeze(child: Child) -> None:
    """Stop a process, and wait until each of its threads has stopped."""
    child.freeze()
    stats = list(Path(f"/proc/{child.pid}/task").glob("*/stat"))
    until(lambda: all(each.read_text().rpartition(")")[2].split()[0] == "T" for each in stats), "all threads stop")


def test_delay_and_loss_change_no_bit_of_synchronous_training(make_training: Callable[..., Training]) -> None:
    training = make_training()
    training.train(1)
    for worker in WORKERS:
        for server in SERVERS.values():
            training.network.disturb(worker, server, delay_s=0.01, jitter_s=0.005, loss=0.05)

    training.train(STEPS)

    assert sum(training.network.num_lost(a, b) for a in WORKERS for b in SERVERS.values()) > 0
    training.check(STEPS)


@pytest.mark.parametrize("is_one_way", [False, True])
def test_a_cut_that_heals_in_time_changes_no_bit(make_training: Callable[..., Training], is_one_way: bool) -> None:
    training = make_training()
    training.train(2)
    source, target = ("two", "a") if is_one_way else ("a", "two")
    (training.network.silence if is_one_way else training.network.cut)(source, target)
    training.begin(STEPS)
    until(lambda: training.network.num_lost(source, target) >= 2, "packets are lost, and sent again")

    training.network.mend("a", "two")

    assert [report["error"] for report in training.ended()] == ["", ""]
    training.check(STEPS)


def test_a_server_that_is_cut_off_is_named_and_the_others_know_for_whom_they_wait(
    make_training: Callable[..., Training],
) -> None:
    training = make_training(stall_s=5.0)
    training.train(2)
    training.network.cut("a", "two")
    training.begin(STEPS)

    cut = training.workers[0].receive(2 * DEADLINE_S)

    assert cut["step"] == 2
    assert cut["error"].startswith("ConnectionLost: parameter server server-1: ")
    until(lambda: training.servers["server-0"].ask()["waits_for"] == [0], "the other worker waits for it")


def test_a_server_that_is_stopped_is_named_and_training_continues_with_it(
    make_training: Callable[..., Training],
) -> None:
    training = make_training()
    training.train(2)
    freeze(training.servers["server-0"])
    training.begin(STEPS, wait_s=2.0, slow_s=0.5)

    for report in training.ended():
        assert report["step"] == 2
        assert report["error"].startswith(
            "NotAnswered: parameter server server-0 has not answered a pull within 2 s; it may be stopped"
        )
        assert report["logged"] == ["parameter server server-0 has not answered a pull for 0.5 s; still waiting"]

    training.servers["server-0"].thaw()
    training.begin(STEPS)
    assert [report["error"] for report in training.ended()] == ["", ""]
    training.check(STEPS)
