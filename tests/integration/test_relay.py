"""Relays in separate processes: what goes upstream, and what happens when a part of the chain dies."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import (
    CALM,
    DEADLINE_S,
    EAGER_CLIENT,
    STRATA,
    STRICT,
    Cable,
    Child,
    CoordinatorProcess,
    Nursery,
    command_line,
    free_port,
    until,
)

from strata.coordinator.client import AsyncCoordinatorClient, CoordinatorClient
from strata.coordinator.client._sync import shared_loop
from strata.coordinator.config import CoordinatorConfig, LeaseConfig
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.coordinator.serve.backend import EngineBackend
from strata.errors import StaleIncarnation
from strata.v1 import calls_pb2 as pb

PATIENT = {"backoff_s": 0.01, "max_backoff_s": 0.1}


class RelayProcess:
    """A relay that keeps its address across restarts."""

    def __init__(self, nursery: Nursery, upstream: str, **settings: Any) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._settings = {"upstream": upstream, "listen": self.address, "client": PATIENT, **settings}
        self._nursery = nursery
        self.child = self._start()

    def _start(self) -> Child:
        child = self._nursery.fork("relay_children:relay", settings=self._settings)
        assert child.receive() == {"grpc": self.address, "upstream": self._settings["upstream"]}
        return child

    def kill(self) -> None:
        self.child.kill()

    def restart(self) -> None:
        """Kill it with SIGKILL and start it again."""
        self.kill()
        self.child = self._start()


def workers(nursery: Nursery, address: str, *worker_ids: str) -> Child:
    child = nursery.fork("children:workers", address=address, worker_ids=list(worker_ids))
    assert sorted(child.receive()["incarnations"]) == sorted(worker_ids)
    return child


def meet(children: dict[str, Child], name: str) -> list[str]:
    """Let all workers wait at one barrier of the newest generation; return the kinds of their errors, empty without
    any.
    """
    for worker_id, child in children.items():
        assert child.ask(worker_id=worker_id, call="refresh")["kind"] == ""
    for worker_id, child in children.items():
        child.send(worker_id=worker_id, call="barrier", arguments={"name": name, "timeout_s": DEADLINE_S})
    return [kind for child in children.values() if (kind := child.receive()["kind"])]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """(method, worker) → the number of calls that reached the coordinator of this process."""
    counted: Counter[tuple[str, str]] = Counter()
    submit = EngineBackend.submit

    def count(self: EngineBackend, method: Any, request: Any, done: Any) -> None:
        counted[method.name, getattr(request, "worker_id", "")] += 1
        submit(self, method, request, done)

    monkeypatch.setattr(EngineBackend, "submit", count)
    return counted


@pytest.fixture
def counted_coordinator(calls: Counter[tuple[str, str]]) -> Iterator[EmbeddedCoordinator]:
    with EmbeddedCoordinator(CoordinatorConfig(state="memory", lease=LeaseConfig(**CALM))) as coordinator:
        yield coordinator


# -- upstream calls ------------------------------------------------------------------------------------------------


def test_a_barrier_of_8_local_workers_is_one_call_upstream(
    nursery: Nursery, counted_coordinator: EmbeddedCoordinator, calls: Counter[tuple[str, str]]
) -> None:
    relay = RelayProcess(nursery, counted_coordinator.address, fold_s=1.0)
    children = {f"w{n}": workers(nursery, relay.address, f"w{n}") for n in range(8)}
    for number in range(1, 4):
        assert meet(children, f"b{number}") == []
        assert sum(n for (method, _), n in calls.items() if method == "WaitBarrier") == number


def test_two_nodes_below_an_upper_relay_are_one_call(
    nursery: Nursery, counted_coordinator: EmbeddedCoordinator, calls: Counter[tuple[str, str]]
) -> None:
    upper = RelayProcess(nursery, counted_coordinator.address, fold_s=1.0)
    nodes = [RelayProcess(nursery, upper.address, fold_s=1.0) for _ in range(2)]
    children = {f"w{n}": workers(nursery, nodes[n % 2].address, f"w{n}") for n in range(4)}
    assert meet(children, "b") == []
    assert sum(n for (method, _), n in calls.items() if method == "WaitBarrier") == 1


def test_heartbeats_of_50_workers_go_upstream_once_per_interval(
    nursery: Nursery, counted_coordinator: EmbeddedCoordinator, calls: Counter[tuple[str, str]]
) -> None:
    relay = RelayProcess(nursery, counted_coordinator.address)
    fold_s = CALM["heartbeat_s"] / 2

    async def beat_for(seconds: float) -> tuple[int, float]:
        async with AsyncCoordinatorClient(relay.address, config=EAGER_CLIENT) as client:
            opened_s = time.monotonic()
            members = [await client.register_worker(f"w{n}") for n in range(50)]
            begun_s, num_sent = time.monotonic(), 0
            while time.monotonic() - begun_s < seconds:
                for member in members:
                    member.report(step=num_sent, loss=float(num_sent))
                await asyncio.gather(*(member.heartbeat() for member in members))
                num_sent += 1
            seen = (await client.list_workers()).workers
            assert {(w.step, w.metrics["loss"]) for w in seen} == {(num_sent - 1, float(num_sent - 1))}
            for member in members:
                await member.deregister()
            return num_sent, time.monotonic() - opened_s

    num_sent, elapsed_s = shared_loop().run(beat_for(1.5))
    most = max(n for (method, _), n in calls.items() if method == "Heartbeat")
    assert num_sent > 2 * elapsed_s / fold_s, "not a high rate"
    # Sent out of turn: a worker's first heartbeat, its first with a metric, and pending ones when the workers are
    # listed.
    assert most <= elapsed_s / fold_s + 1 + 3


def test_a_refused_heartbeat_reaches_its_worker(nursery: Nursery, coordinator: CoordinatorProcess) -> None:
    relay = RelayProcess(nursery, coordinator.address)
    with (
        CoordinatorClient(relay.address, config=EAGER_CLIENT) as client,
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as other,
    ):
        worker = client.register_worker("a")
        other.register_worker("a", takeover=True)
        until(lambda: worker.lost is not None, "the replaced worker learns that it is lost")
        assert isinstance(worker.lost, StaleIncarnation)


def test_commands_and_generations_are_pushed_through_two_relays(nursery: Nursery, tmp_path: Path) -> None:
    slow = {"lease_s": 120.0, "heartbeat_s": 50.0, "suspicion_s": 5.0}
    coordinator = CoordinatorProcess(nursery, tmp_path, lease={**slow, "step_timeout_s": 0.0})
    coordinator.start()
    upper = RelayProcess(nursery, coordinator.address)
    lower = RelayProcess(nursery, upper.address)
    with (
        CoordinatorClient(lower.address, config=EAGER_CLIENT) as client,
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as boss,
    ):
        worker = client.register_worker("a")
        worker.heartbeat()
        boss.register_worker("b")
        until(lambda: worker.latest_generation == 2, "the generation comes without a heartbeat")
        boss.send_command("CHECKPOINT_NOW", worker_ids=["a"], reason="now")
        taken: list[Any] = []
        until(lambda: bool(taken.extend(worker.take_commands()) or taken), "the command comes without a heartbeat")
        assert [(c.name, c.reason) for c in taken] == [("CHECKPOINT_NOW", "now")]
        worker.heartbeat()
        assert worker.take_commands() == []


def test_one_refused_arrival_does_not_affect_the_others(
    nursery: Nursery, counted_coordinator: EmbeddedCoordinator, calls: Counter[tuple[str, str]]
) -> None:
    relay = RelayProcess(nursery, counted_coordinator.address, fold_s=1.0)

    async def meet_badly() -> None:
        async with AsyncCoordinatorClient(relay.address, config=EAGER_CLIENT) as client:
            members = [await client.register_worker(name) for name in ("a", "b", "c")]
            generation = members[-1].generation
            requests = [
                pb.WaitBarrierRequest(
                    job_id="default", worker_id=m.worker_id, incarnation=m._fence, generation=generation, barrier_id="x"
                )
                for m in members
            ]
            good, requests[1].incarnation = requests[1].incarnation, 99
            waiting = [asyncio.create_task(client.call("wait_barrier", request)) for request in requests]
            with pytest.raises(StaleIncarnation, match="'b'"):
                await waiting[1]
            assert not waiting[0].done()
            assert not waiting[2].done()
            requests[1].incarnation = good
            assert (await client.call("wait_barrier", requests[1])).num_members == 3
            assert [(await waiting[n]).num_members for n in (0, 2)] == [3, 3]

    shared_loop().run(meet_badly())
    assert sum(n for (method, _), n in calls.items() if method == "WaitBarrier") == 1 + 3 + 1


# -- deaths --------------------------------------------------------------------------------------------------------


def test_the_death_of_a_relay_removes_its_workers_in_one_generation(
    nursery: Nursery, strict_coordinator: CoordinatorProcess
) -> None:
    relay = RelayProcess(nursery, strict_coordinator.address)
    with CoordinatorClient(strict_coordinator.address, config=EAGER_CLIENT) as client:
        outside = client.register_worker("outside")
        workers(nursery, relay.address, "a", "b", "c")
        workers(nursery, relay.address, "d")
        before = outside.refresh()
        assert before.world_size == 5
        relay.kill()
        until(lambda: outside.latest_generation > before.generation, "the relay's death is noticed")
        after = outside.refresh()
        assert after.generation == before.generation + 1
        assert [w.worker_id for w in client.list_workers().workers] == ["outside"]
        for worker_id in "abcd":
            assert f"{worker_id} left" in after.reason or worker_id in after.reason
        assert after.reason.count("connection lost") == 4


def test_no_worker_dies_if_a_relay_restarts_in_time(nursery: Nursery, coordinator: CoordinatorProcess) -> None:
    relay = RelayProcess(nursery, coordinator.address)
    children = {worker_id: workers(nursery, relay.address, worker_id) for worker_id in ("a", "b", "c")}
    with CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client:
        before = client.list_workers()
        relay.restart()
        assert meet(children, "after") == []
        until(lambda: not any(w.suspect for w in client.list_workers().workers), "the suspicion is lifted")
        assert client.list_workers().generation == before.generation


def test_no_worker_dies_if_the_relay_reconnects_in_time(nursery: Nursery, tmp_path: Path) -> None:
    port = free_port()
    strict_coordinator = CoordinatorProcess(nursery, tmp_path, lease=STRICT, frames=f"127.0.0.2:{port}")
    strict_coordinator.start()
    with Cable(strict_coordinator.address) as grpc_cable, Cable(f"127.0.0.2:{port}", port=port) as cable:
        relay = RelayProcess(nursery, grpc_cable.address)
        children = {worker_id: workers(nursery, relay.address, worker_id) for worker_id in ("a", "b", "c")}
        with CoordinatorClient(strict_coordinator.address, config=EAGER_CLIENT) as client:
            before = client.list_workers()
            cable.cut()
            assert meet(children, "after") == []
            until(lambda: not any(w.suspect for w in client.list_workers().workers), "the suspicion is lifted")
            assert client.list_workers().generation == before.generation


def test_a_killed_local_worker_is_declared_dead_alone_and_soon(
    nursery: Nursery, strict_coordinator: CoordinatorProcess
) -> None:
    upper = RelayProcess(nursery, strict_coordinator.address)
    relay = RelayProcess(nursery, upper.address)
    children = {worker_id: workers(nursery, relay.address, worker_id) for worker_id in ("a", "b", "c")}
    with CoordinatorClient(strict_coordinator.address, config=EAGER_CLIENT) as client:
        before = client.list_workers()
        children.pop("b").kill()
        killed_s = time.monotonic()
        until(lambda: len(client.list_workers().workers) < 3, "the death is noticed")
        took_s = time.monotonic() - killed_s
        after = client.list_workers()
        assert [w.worker_id for w in after.workers] == ["a", "c"]
        assert after.generation == before.generation + 1
        assert "b" in after.reason
        assert "connection lost" in after.reason, "the connection is the reason, not the silence"
        assert "its relay lost the connection to it" in after.reason
        assert took_s < STRICT["lease_s"] + 1.0
        assert meet(children, "after") == []


def test_workers_survive_a_restart_of_the_coordinator_behind_the_relay(
    nursery: Nursery, coordinator: CoordinatorProcess
) -> None:
    relay = RelayProcess(nursery, coordinator.address)
    children = {worker_id: workers(nursery, relay.address, worker_id) for worker_id in ("a", "b", "c")}
    assert meet(children, "before") == []
    coordinator.restart()
    assert meet(children, "after") == []
    with CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client:
        members = client.list_workers()
        assert [w.worker_id for w in members.workers] == ["a", "b", "c"]
        children.pop("a").kill()  # the relay's workers are tied to its new connection
        until(lambda: any(w.suspect for w in client.list_workers().workers), "the relay reports the lost connection")


def test_a_worker_that_moved_to_another_relay_is_not_suspect(nursery: Nursery, tmp_path: Path) -> None:
    coordinator = CoordinatorProcess(nursery, tmp_path, lease={"lease_s": 120.0, "heartbeat_s": 50.0})
    coordinator.start()  # beats are so rare that the client of the first relay sends none in between
    first, second = (RelayProcess(nursery, coordinator.address) for _ in range(2))
    with CoordinatorClient(second.address, config=EAGER_CLIENT) as elsewhere:
        with CoordinatorClient(first.address, config=EAGER_CLIENT) as client:
            worker = client.register_worker("a", instance_id="one-process")
            worker.heartbeat()
            moved = elsewhere.register_worker("a", instance_id="one-process")
            assert moved.incarnation == worker.incarnation
            moved.heartbeat()
        # The first relay reports the connection that the `with` has closed; the worker uses the second relay.
        for _ in range(50):
            assert [w.suspect for w in elsewhere.list_workers().workers] == [False]


# -- the command ---------------------------------------------------------------------------------------------------


def strata_relay(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([STRATA, "relay", *flags], capture_output=True, text=True, check=False, timeout=DEADLINE_S)


def test_the_command_serves_on_a_unix_socket_until_a_signal(embedded: EmbeddedCoordinator, tmp_path: Path) -> None:
    listen = f"unix:{tmp_path / 'relay.sock'}"
    flags = ("--upstream", embedded.address, "--listen", listen, "--json")
    with command_line(tmp_path, *flags, command="relay") as process:
        assert json.loads(process.line()) == {"grpc": listen, "upstream": embedded.address}
        with CoordinatorClient(listen, config=EAGER_CLIENT) as client:
            client.register_worker("a").deregister()
        process.terminate()
        assert process.ended() == (0, "")


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--upstream", "127.0.0.1:1", "--listen", "0.0.0.0:0"), 2, "without tokens and TLS"),
        (("--upstream", "nowhere"), 2, "is not an address"),
        (("--upstream", "127.0.0.1:50052"), 2, "would call itself"),
    ],
)
def test_the_command_refuses_invalid_settings(flags: tuple[str, ...], code: int, message: str) -> None:
    refused = strata_relay(*flags)
    assert (refused.returncode, message in refused.stderr) == (code, True), refused.stderr
