"""Our clients against real coordinators that are killed, and real workers that are killed or frozen."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from servers import CALM, DEADLINE_S, EAGER_CLIENT, STRICT, Cable, CoordinatorProcess, Nursery, free_port, until

from strata.coordinator.client import AsyncCoordinatorClient, ClientConfig, CoordinatorClient, Worker
from strata.coordinator.client._sync import shared_loop
from strata.coordinator.config import CoordinatorConfig, LeaseConfig, Limits
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.coordinator.registry import DatasetRegistry
from strata.coordinator.state.events import ShardEntry
from strata.errors import (
    BarrierBroken,
    CoordinatorUnavailable,
    InvalidArgument,
    LimitExceeded,
    StaleGeneration,
    StaleIncarnation,
    UnknownDataset,
    UnknownWorker,
    WorkerExists,
)
from strata.v1 import session_pb2, types_pb2

T = TypeVar("T")

QUIET = CoordinatorConfig(state="memory", lease=LeaseConfig(lease_s=120.0, heartbeat_s=60.0, suspicion_s=60.0))
"""Heartbeats are so rare that every arrival must be a push."""


def on_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run asyncio code on the loop that every gRPC channel of this process shares."""
    return shared_loop().run(work)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture
def client(coordinator: CoordinatorProcess) -> Iterator[CoordinatorClient]:
    with CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client:
        yield client


@pytest.fixture
def quiet() -> Iterator[EmbeddedCoordinator]:
    with EmbeddedCoordinator(QUIET) as coordinator:
        yield coordinator


@pytest.fixture
def quiet_client(quiet: EmbeddedCoordinator) -> Iterator[CoordinatorClient]:
    with CoordinatorClient(quiet.address) as client:
        yield client


def num_arrived(coordinator: EmbeddedCoordinator) -> int:
    """The number of workers waiting at barriers, which is not visible on the wire."""
    assert coordinator._server is not None
    assert coordinator._server._engine is not None
    jobs = list(coordinator._server._engine.core.jobs.values())
    return sum(len(barrier.arrived) for job in jobs for barrier in list(job.barriers.open.values()))


# -- the coordinator dies ------------------------------------------------------------------------------------------


def test_a_call_made_while_the_coordinator_is_down_is_answered_when_it_is_back(
    coordinator: CoordinatorProcess, client: CoordinatorClient, pool: ThreadPoolExecutor
) -> None:
    worker = client.register_worker("w0")
    client.register_dataset("d", total_samples=100, shard_size=10)
    before = client.list_workers()
    coordinator.kill()
    asked = pool.submit(client.advance_epoch, "d", from_epoch=0)
    coordinator.start()
    assert asked.result(DEADLINE_S) == 1
    assert client.num_connections == 2
    after = client.list_workers()
    assert (after.generation, after.reason) == (before.generation, before.reason)
    assert [(w.worker_id, w.incarnation, w.rank) for w in after.workers] == [("w0", worker.incarnation, 0)]
    worker.heartbeat()
    assert worker.lost is None


def test_a_call_above_the_limit_is_refused_with_the_setting_and_the_session_survives(
    nursery: Nursery, tmp_path: Path
) -> None:
    coordinator = CoordinatorProcess(nursery, tmp_path, lease=CALM, limits={"max_message_bytes": 262_144})
    coordinator.start()
    long = [ShardEntry(shard_id=f"s{n}", uri="u" * 4_000) for n in range(100)]
    with CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client:
        with pytest.raises(LimitExceeded, match="max_message_bytes=262144 at the coordinator"):
            client.register_dataset("d", shards=long)
        assert client.register_dataset("d", shards=long[:10]) == 10
        assert client.num_connections == 1


def test_a_call_that_waits_is_refused_when_the_coordinator_comes_back_with_a_smaller_limit(
    nursery: Nursery, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    coordinator = CoordinatorProcess(nursery, tmp_path, lease=CALM)
    coordinator.start()
    long = [ShardEntry(shard_id=f"s{n}", uri="u" * 4_000) for n in range(100)]
    with CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client:
        coordinator.kill()
        waiting = pool.submit(client.register_dataset, "d", shards=long)
        until(lambda: client._client._link.num_unanswered == 1, "the call waits")
        coordinator.settings["limits"] = {"max_message_bytes": 262_144}
        coordinator.start()
        with pytest.raises(LimitExceeded, match="max_message_bytes=262144 at the coordinator"):
            waiting.result(DEADLINE_S)
        assert client.list_jobs() == []


def test_the_asyncio_client_retries_a_hundred_calls_in_progress(coordinator: CoordinatorProcess) -> None:
    async def scenario() -> None:
        async with AsyncCoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client:
            worker = await client.register_worker("w0")
            # Killed in a thread, so that calls are sent, and some answered, while it dies.
            killing = asyncio.get_running_loop().run_in_executor(None, coordinator.restart)
            registering = [client.register_dataset(f"d{n}", total_samples=10, shard_size=5, seed=n) for n in range(100)]
            assert await asyncio.gather(*registering) == [2] * 100
            await killing
            await worker.heartbeat()
            assert client.num_connections == 2
            assert worker.lost is None
            assert [d.dataset_id for d in await client.list_datasets()] == [f"d{n}" for n in range(100)]
            assert (await client.list_workers()).generation == worker.generation

    on_loop(scenario())


def test_a_barrier_survives_the_death_of_the_coordinator(
    coordinator: CoordinatorProcess, client: CoordinatorClient, pool: ThreadPoolExecutor
) -> None:
    """Arrivals are not durable: the reconnected session sends them again."""
    with CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as other:
        early, late = client.register_worker("w0"), other.register_worker("w1")
        early.refresh()
        waiting = pool.submit(early.barrier, "sync", timeout_s=DEADLINE_S)
        coordinator.restart()
        until(lambda: client.num_connections == other.num_connections == 2, "both clients are back")
        late.barrier("sync", timeout_s=DEADLINE_S)
        assert waiting.result(DEADLINE_S) is None


@pytest.mark.parametrize("frames", [True, False], ids=["bare", "gRPC"])
def test_a_session_whose_connection_was_cut_is_resumed_under_the_same_incarnation(
    nursery: Nursery, tmp_path: Path, pool: ThreadPoolExecutor, frames: bool
) -> None:
    port = free_port()
    coordinator = CoordinatorProcess(nursery, tmp_path, lease=CALM, frames=f"127.0.0.2:{port}")
    coordinator.start()
    with (
        Cable(coordinator.address) as grpc_cable,
        Cable(f"127.0.0.2:{port}", port=port) as bare_cable,
        CoordinatorClient(grpc_cable.address, config=replace(EAGER_CLIENT, frames=frames)) as client,
        CoordinatorClient(coordinator.address) as onlooker,
    ):
        cable = bare_cable if frames else grpc_cable
        worker, other = client.register_worker("w0"), onlooker.register_worker("w1")
        worker.refresh()
        waiting = pool.submit(worker.barrier, "sync", timeout_s=DEADLINE_S)
        cable.cut()
        until(lambda: client.num_connections == 2, "the client is back")
        worker.heartbeat()
        members = onlooker.list_workers()
        assert (members.generation, [(w.incarnation, w.suspect) for w in members.workers]) == (
            2,
            [(1, False), (2, False)],
        )
        onlooker.send_command("STOP", worker_ids=["w0"])
        until(lambda: bool(worker.take_commands()), "the new connection carries commands")
        other.barrier("sync", timeout_s=DEADLINE_S)
        assert waiting.result(DEADLINE_S) is None


# -- no coordinator ------------------------------------------------------------------------------------------------


def test_an_address_without_a_coordinator_fails_in_bounded_time_with_the_cure() -> None:
    address = f"127.0.0.1:{free_port()}"
    began_s = time.monotonic()
    with pytest.raises(CoordinatorUnavailable, match=r"`strata coordinator` starts one") as unavailable:
        CoordinatorClient(address, config=ClientConfig(connect_timeout_s=0.3)).connect()
    assert time.monotonic() - began_s < DEADLINE_S
    assert address in unavailable.value.message
    assert "within 0.3 s" in unavailable.value.message
    assert "refused" in unavailable.value.message


def test_a_registry_reports_a_missing_coordinator(tmp_path: Path) -> None:
    with pytest.raises(CoordinatorUnavailable, match="did not answer within"):
        DatasetRegistry(f"unix:{tmp_path}/nothing.sock", config=ClientConfig(connect_timeout_s=0.2))


def test_a_call_to_a_dead_coordinator_ends_in_bounded_time(coordinator: CoordinatorProcess) -> None:
    config = ClientConfig(call_timeout_s=0.5, backoff_s=0.01, max_backoff_s=0.1)
    with CoordinatorClient(coordinator.address, config=config) as client:
        coordinator.kill()
        with pytest.raises(CoordinatorUnavailable, match=r"did not answer within 0\.5 s"):
            client.list_jobs()
        coordinator.start()
        until(lambda: client.num_connections == 2, "the client is back")
        assert client.list_jobs() == []


def test_a_call_to_a_frozen_coordinator_ends_in_bounded_time(coordinator: CoordinatorProcess) -> None:
    with CoordinatorClient(coordinator.address, config=ClientConfig(call_timeout_s=0.5)) as client:
        coordinator.child.freeze()
        with pytest.raises(CoordinatorUnavailable, match="connected, but no answer"):
            client.list_jobs()
        coordinator.child.thaw()
        assert client.list_jobs() == []


@pytest.mark.parametrize("closed", [False, True])
def test_a_call_on_an_unconnected_client_explains_how_to_connect(closed: bool, embedded: EmbeddedCoordinator) -> None:
    client = CoordinatorClient(embedded.address)
    if closed:
        client.connect()
        client.close()
        client.close()
    with pytest.raises(CoordinatorUnavailable, match=r"use it in a `with` block or call connect\(\)"):
        client.list_jobs()
    assert client.num_connections == 0


def test_a_client_may_be_connected_twice_and_opened_again(embedded: EmbeddedCoordinator) -> None:
    client = CoordinatorClient(embedded.address)
    client.connect()
    with client:
        client.connect()
        assert (client.num_connections, client.list_jobs()) == (1, [])
    with client:
        assert client.list_jobs() == []


def test_closing_ends_the_calls_in_progress(
    quiet: EmbeddedCoordinator, quiet_client: CoordinatorClient, pool: ThreadPoolExecutor
) -> None:
    waiting = []
    with CoordinatorClient(quiet.address) as client:
        workers = [client.register_worker(f"w{n}") for n in range(3)]
        for worker in workers[:2]:
            worker.refresh()
            waiting.append(pool.submit(worker.barrier, "never", timeout_s=600.0, members=["w0", "w1", "w2"]))
            worker.refresh()
        workers[2].refresh()
        until(lambda: num_arrived(quiet) == 2, "two are waiting")
    for one in waiting:
        with pytest.raises(CoordinatorUnavailable, match="closed before the answer arrived"):
            one.result(DEADLINE_S)
    until(lambda: quiet_client.list_workers().workers[0].suspect, "its worker is suspect")


def test_ctrl_c_ends_the_call_and_leaves_the_client_usable(
    quiet: EmbeddedCoordinator, quiet_client: CoordinatorClient
) -> None:
    worker = quiet_client.register_worker("w0")
    quiet_client.register_worker("w1")
    worker.refresh()
    main = threading.main_thread().ident
    assert main is not None

    def press() -> None:
        until(lambda: num_arrived(quiet) == 1, "the barrier is waited for")
        signal.pthread_kill(main, signal.SIGINT)

    finger = threading.Thread(target=press)
    finger.start()
    with pytest.raises(KeyboardInterrupt):
        worker.barrier("never", timeout_s=600.0)
    finger.join()
    link = quiet_client._client._link
    assert link is not None
    until(lambda: not link._unanswered, "the call is given up")
    assert (quiet_client.num_connections, len(quiet_client.list_workers().workers)) == (1, 2)


def test_a_program_that_does_not_close_its_client_exits_cleanly(coordinator: CoordinatorProcess) -> None:
    program = (
        "from strata.coordinator.client import CoordinatorClient\n"
        f"client = CoordinatorClient({coordinator.address!r})\n"
        "client.connect()\n"
        "client.register_worker('w0')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


# -- notices -------------------------------------------------------------------------------------------------------


def test_a_stop_is_pushed_to_a_worker_at_once_and_not_repeated_after_its_ack(quiet_client: CoordinatorClient) -> None:
    worker = quiet_client.register_worker("w0")
    number = quiet_client.send_command("STOP", worker_ids=["w0"], reason="pruned", args={"save": "yes"})
    assert worker.wait_changed(DEADLINE_S)
    worker.heartbeat()  # the answer repeats it, since it was not taken yet
    (command,) = worker.take_commands()
    assert (command.command_id, command.name, command.reason, command.args) == (
        number,
        "STOP",
        "pruned",
        {"save": "yes"},
    )
    worker.heartbeat()
    assert worker.take_commands() == []
    assert not worker.wait_changed(0.05)


def test_commands_keep_their_order_and_reach_all_workers(quiet_client: CoordinatorClient) -> None:
    workers = [quiet_client.register_worker(f"w{n}") for n in range(3)]
    names = ["CHECKPOINT_NOW", "DUMP_STACKS", "MESSAGE", "REBALANCE", "STOP"]
    for name in names:
        quiet_client.send_command(name)  # type: ignore[arg-type]
    for worker in workers:
        received: list[str] = []

        def all_received(worker: Worker = worker, received: list[str] = received) -> bool:
            received += [command.name for command in worker.take_commands()]
            return len(received) >= len(names)

        until(all_received, "all commands arrive")
        assert received == names


def test_a_worker_that_misses_a_notice_receives_all_commands_in_order(quiet_client: CoordinatorClient) -> None:
    """The notice of a command may arrive before the answer to the registration has reached the program."""
    client = quiet_client._client
    key = ("default", "w0")
    worker = quiet_client.register_worker("w0")
    hidden = client._workers.pop(key)
    quiet_client.send_command("CHECKPOINT_NOW", worker_ids=["w0"])
    quiet_client.list_workers()  # the notice has passed: a stream keeps its order
    client._workers[key] = hidden
    quiet_client.send_command("STOP", worker_ids=["w0"])
    received: list[str] = []
    until(
        lambda: bool(received.extend(c.name for c in worker.take_commands()) or "STOP" in received), "both have arrived"
    )
    assert received == ["CHECKPOINT_NOW", "STOP"]


def test_a_command_survives_the_coordinator_and_is_received_once(
    coordinator: CoordinatorProcess, client: CoordinatorClient
) -> None:
    worker = client.register_worker("w0")
    client.send_command("STOP")
    coordinator.restart()
    until(lambda: client.num_connections == 2, "the client is back")
    worker.heartbeat()
    assert [command.name for command in worker.take_commands()] == ["STOP"]
    worker.heartbeat()
    coordinator.restart()
    worker.heartbeat()
    assert worker.take_commands() == []


def test_a_new_generation_is_pushed_and_must_be_adopted_before_fenced_calls(quiet_client: CoordinatorClient) -> None:
    first = quiet_client.register_worker("w0")
    quiet_client.register_dataset("d", total_samples=100, shard_size=10)
    shards = first.shards("d")
    quiet_client.register_worker("w1")
    assert first.wait_changed(DEADLINE_S)
    assert (first.generation, first.latest_generation, first.world_size) == (1, 2, 1)
    with pytest.raises(StaleGeneration, match="w1 joined") as stale:
        first.ack(shards[:1])
    assert stale.value.generation == 2
    assert len(first.shards("d")) == 5
    assert (first.generation, first.rank, first.world_size) == (2, 0, 2)
    assert first.ack(first.shards("d")).num_done == 5


def test_waiting_for_workers_ends_when_the_last_has_joined(
    quiet_client: CoordinatorClient, pool: ThreadPoolExecutor
) -> None:
    first = quiet_client.register_worker("w0")
    waiting = pool.submit(first.wait_for_workers, 4, timeout_s=DEADLINE_S)
    others = [quiet_client.register_worker(f"w{n}") for n in (1, 2, 3)]
    waiting.result(DEADLINE_S)
    assert (first.generation, first.rank, first.world_size) == (4, 0, 4)
    others[2].wait_for_workers(4)
    assert others[2].rank == 3


def test_waiting_for_workers_reports_how_many_joined_on_timeout(quiet_client: CoordinatorClient) -> None:
    worker = quiet_client.register_worker("w0")
    with pytest.raises(CoordinatorUnavailable, match=r"1 of 3 workers .* joined within 0\.1 s; start the others"):
        worker.wait_for_workers(3, timeout_s=0.1)


def test_a_notice_of_a_newer_version_is_skipped(
    quiet_client: CoordinatorClient, caplog: pytest.LogCaptureFixture
) -> None:
    quiet_client.register_worker("w0")
    link = quiet_client._client._link
    assert link is not None
    command = types_pb2.Command(command_id=1, kind=99)  # type: ignore[arg-type]
    queued = session_pb2.CommandQueued(job_id="default", worker_id="w0", command=command)
    link._handle_notice(session_pb2.Notice(command_queued=queued))
    link._handle_notice(session_pb2.Notice())
    assert "newer than this client" in caplog.text
    assert quiet_client.num_connections == 1


# -- invalid values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("total_samples", lambda c, w: c.register_dataset("e", total_samples=-1, shard_size=1)),
        ("shard_size", lambda c, w: c.register_dataset("e", total_samples=1, shard_size=2**64)),
        ("seed", lambda c, w: c.register_dataset("e", total_samples=1, shard_size=1, seed=-1)),
        ("num_samples", lambda c, w: c.register_dataset("e", shards=[ShardEntry(shard_id="s", num_samples=-1)])),
        ("dataset_id", lambda c, w: c.register_dataset(7, total_samples=1, shard_size=1)),
        ("from_epoch", lambda c, w: c.advance_epoch("d", from_epoch=-1)),
        ("epoch", lambda c, w: c.assigned_shards("w0", epoch=-1)),
        ("epoch", lambda c, w: w.shards("d", epoch=1.5)),
        ("capacity", lambda c, w: c.register_worker("w1", capacity="much")),
        ("capacity", lambda c, w: c.register_worker("w1", capacity=-1.0)),
        ("worker_id", lambda c, w: c.register_worker("a b")),
        ("step", lambda c, w: w.barrier("b", step=-1)),
        ("timeout_s", lambda c, w: w.barrier("b", timeout_s=-1.0)),
        ("step", lambda c, w: w.notify_checkpoint("c", step=-1, epoch=0, path="/c")),
        ("size_bytes", lambda c, w: w.notify_checkpoint("c", step=1, epoch=0, path="/c", size_bytes=-1)),
        ("step", lambda c, w: w.report(step=-1)),
        ("step", lambda c, w: w.report(step=2**64)),
        ("epoch", lambda c, w: w.report(epoch=-1)),
        ("state", lambda c, w: w.report(state="SLEEPING")),
        ("shards", lambda c, w: w.ack([])),
        ("args", lambda c, w: c.send_command("STOP", args={"k": 1})),
    ],
)
def test_an_invalid_argument_is_named_and_changes_nothing(
    field: str, call: Callable[[CoordinatorClient, Worker], Any], quiet_client: CoordinatorClient
) -> None:
    worker = quiet_client.register_worker("w0")
    quiet_client.register_dataset("d", total_samples=10, shard_size=1)
    with pytest.raises(InvalidArgument) as refused:
        call(quiet_client, worker)
    assert refused.value.field == field
    worker.heartbeat()
    assert (worker.lost, quiet_client.num_connections, quiet_client.list_workers().generation) == (None, 1, 1)
    assert [d.num_done for d in quiet_client.list_datasets()] == [0]


def test_an_invalid_report_does_not_kill_the_worker(
    quiet_client: CoordinatorClient, caplog: pytest.LogCaptureFixture
) -> None:
    """The refused report is dropped, and the next heartbeat, which follows at once, is empty."""
    caplog.set_level(logging.WARNING)
    worker = quiet_client.register_worker("w0")
    worker.report(**{"not a name": 1.0})
    on_loop(quiet_client._client._beat(worker._worker))
    assert quiet_client._client._beat_now.is_set() or "rejected the report" in caplog.text
    worker.heartbeat()
    worker.report(step=3, loss=0.5)
    worker.heartbeat()
    (seen,) = quiet_client.list_workers().workers
    assert (seen.step, seen.metrics) == (3, {"loss": 0.5})


def test_calls_too_large_for_one_frame_are_sent_in_several() -> None:
    limits = Limits(max_message_bytes=262_144)
    config = ClientConfig(max_message_bytes=262_144)

    async def scenario(address: str) -> None:
        async with AsyncCoordinatorClient(address, config=config) as client:
            shards = [ShardEntry(shard_id=f"s{n}", uri="u" * 1000) for n in range(100)]
            calls = [client.register_dataset(f"d{n}", shards=shards) for n in range(20)]
            assert await asyncio.gather(*calls) == [100] * 20
            with pytest.raises(LimitExceeded, match="send less at once"):
                await client.register_dataset("e", shards=shards * 3)
            assert client.num_connections == 1

    with EmbeddedCoordinator(CoordinatorConfig(state="memory", limits=limits)) as coordinator:
        on_loop(scenario(coordinator.address))


# -- barriers ------------------------------------------------------------------------------------------------------


def test_eight_workers_in_eight_threads_pass_twenty_barriers_together(
    coordinator: CoordinatorProcess, pool: ThreadPoolExecutor
) -> None:
    passed: Counter[int] = Counter()
    lock = threading.Lock()

    def train(worker: Worker) -> None:
        for round_number in range(20):
            with lock:
                passed[round_number] += 1
            worker.barrier("step", timeout_s=DEADLINE_S)
            assert passed[round_number] == 8

    with (
        CoordinatorClient(coordinator.address) as one,
        CoordinatorClient(coordinator.address) as two,
    ):
        workers = [(one, two)[n % 2].register_worker(f"w{n}") for n in range(8)]
        for worker in workers:
            worker.wait_for_workers(8)
        for training in [pool.submit(train, worker) for worker in workers]:
            training.result(DEADLINE_S)
    assert set(passed.values()) == {8}


def test_an_elastic_barrier_is_entered_again_after_a_join(
    quiet: EmbeddedCoordinator, quiet_client: CoordinatorClient, pool: ThreadPoolExecutor
) -> None:
    first, second = quiet_client.register_worker("w0"), quiet_client.register_worker("w1")
    first.refresh()
    waiting = pool.submit(first.barrier, "sync", elastic=True, timeout_s=DEADLINE_S)
    until(lambda: num_arrived(quiet) == 1, "the first is there")
    third = quiet_client.register_worker("w2")
    others = [pool.submit(w.barrier, "sync", elastic=True, timeout_s=DEADLINE_S) for w in (second, third)]
    for one in (waiting, *others):
        one.result(DEADLINE_S)
    assert {w.generation for w in (first, second, third)} == {3}


def test_a_barrier_that_is_not_elastic_breaks_on_a_join(
    quiet: EmbeddedCoordinator, quiet_client: CoordinatorClient, pool: ThreadPoolExecutor
) -> None:
    first = quiet_client.register_worker("w0")
    quiet_client.register_worker("w1")
    first.refresh()
    waiting = pool.submit(first.barrier, "sync", timeout_s=DEADLINE_S)
    until(lambda: num_arrived(quiet) == 1, "the first is there")
    quiet_client.register_worker("w2")
    with pytest.raises(BarrierBroken, match=r"generation 3 started: w2 joined") as broken:
        waiting.result(DEADLINE_S)
    assert (broken.value.generation, broken.value.missing) == (3, {})


def test_a_killed_member_breaks_the_barrier_at_once_with_the_reason(
    nursery: Nursery, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    """The lease would be 20 s; the reset connection is detected."""
    coordinator = CoordinatorProcess(nursery, tmp_path, lease={**CALM, "suspicion_s": 0.2})
    coordinator.start()
    with CoordinatorClient(coordinator.address) as client:
        survivors = [client.register_worker(f"w{n}") for n in range(4)]
        victim = nursery.fork("children:workers", address=coordinator.address, worker_ids=["victim"])
        victim.receive()
        for worker in survivors:
            worker.wait_for_workers(5)
        waiting = [pool.submit(worker.barrier, "sync", timeout_s=DEADLINE_S) for worker in survivors[:3]]
        victim.kill()
        for one in waiting:
            with pytest.raises(BarrierBroken) as broken:
                one.result(DEADLINE_S)
            assert broken.value.missing == {"victim": "connection lost and not restored within 0.2 s"}
            assert broken.value.generation == 6
        assert survivors[3].refresh().generation == 6


def test_a_member_killed_while_waiting_breaks_the_barrier_too(
    nursery: Nursery, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    coordinator = CoordinatorProcess(nursery, tmp_path, lease={**CALM, "suspicion_s": 0.2})
    coordinator.start()
    with CoordinatorClient(coordinator.address) as client:
        worker = client.register_worker("w0")
        client.register_worker("w1")
        victim = nursery.fork("children:workers", address=coordinator.address, worker_ids=["victim"])
        victim.receive()
        victim.send(worker_id="victim", call="barrier", arguments={"name": "sync"})
        worker.wait_for_workers(3)
        waiting = pool.submit(worker.barrier, "sync", timeout_s=DEADLINE_S)
        victim.kill()
        with pytest.raises(BarrierBroken) as broken:
            waiting.result(DEADLINE_S)
        assert list(broken.value.missing) == ["victim"]


# -- lost workers --------------------------------------------------------------------------------------------------


def test_a_worker_frozen_past_its_lease_learns_that_it_is_lost(
    strict_coordinator: CoordinatorProcess, nursery: Nursery
) -> None:
    frozen = nursery.fork("children:workers", address=strict_coordinator.address, worker_ids=["w0"])
    frozen.receive()
    with CoordinatorClient(strict_coordinator.address) as client:
        frozen.freeze()
        until(lambda: not client.list_workers().workers, "it is declared dead")
        assert "w0 left: silent for" in client.list_workers().reason
        frozen.thaw()
        for call, arguments in (("barrier", {"name": "sync"}), ("heartbeat", {}), ("recover", {}), ("refresh", {})):
            answer = frozen.ask(worker_id="w0", call=call, arguments=arguments)
            assert answer["kind"] == "StaleIncarnation", call
            assert "register again" in answer["message"]
        until(lambda: "StaleIncarnation" in frozen.ask(worker_id="w0", call="take_commands")["lost"], "it is lost")
        assert client.list_workers().workers == []


def test_a_second_process_is_refused_while_the_first_lives_unless_it_takes_over(
    coordinator: CoordinatorProcess, nursery: Nursery, client: CoordinatorClient
) -> None:
    first = nursery.fork("children:workers", address=coordinator.address, worker_ids=["w0"])
    assert first.receive()["incarnations"] == {"w0": 1}
    with pytest.raises(WorkerExists, match="set takeover to replace it"):
        client.register_worker("w0")
    successor = client.register_worker("w0", takeover=True)
    assert (successor.incarnation, successor.generation) == (2, 2)
    assert first.ask(worker_id="w0", call="heartbeat")["kind"] == "StaleIncarnation"
    successor.heartbeat()


# -- the dataset registry ------------------------------------------------------------------------------------------


def test_a_registry_assigns_datasets_with_an_embedded_coordinator() -> None:
    with DatasetRegistry() as registry:
        assert (registry.active_workers, registry.datasets, registry.current_epoch()) == ([], [], 0)
        registry.register_worker("worker-01")
        registry.register_worker("worker-02", capacity=1.0)
        assert registry.register_dataset("imagenet", total_samples=1_000, shard_size=100, shuffle=True, seed=42) == 10
        registry.register_dataset("files", shards=[ShardEntry(shard_id=f"f{n}", uri=f"{n}.tar") for n in range(4)])
        assert registry.active_workers == ["worker-01", "worker-02"]
        assert registry.datasets == ["imagenet", "files"]

        mine = registry.get_assigned_shards(worker_id="worker-01", dataset_id="imagenet")
        theirs = registry.get_assigned_shards(worker_id="worker-02", dataset_id="imagenet", epoch=None)
        assert {s.shard_id for s in mine + theirs} == {f"imagenet-{n:06d}" for n in range(10)}
        assert len(mine) == len(theirs) == 5
        assert len(registry.get_assigned_shards(worker_id="worker-01")) == 5 + 2

        assert registry.ack_shards("worker-01", mine[:2]).num_done == 2
        assert registry.get_assigned_shards("worker-01", "imagenet") == mine[2:]
        coming = registry.get_assigned_shards("worker-01", "imagenet", epoch=1)
        assert {s.index for s in coming} == {s.index for s in mine}
        assert [s.index for s in coming] != [s.index for s in mine]

        assert registry.advance_epoch("imagenet") == 1
        assert (registry.current_epoch("imagenet"), registry.current_epoch("files"), registry.current_epoch()) == (
            1,
            0,
            1,
        )
        assert registry.get_assigned_shards("worker-01", "imagenet") == coming
        registry.remove_worker("worker-02")
        assert registry.active_workers == ["worker-01"]
        assert len(registry.get_assigned_shards("worker-01", "imagenet")) == 10


def test_a_registry_refuses_unknown_workers_and_datasets() -> None:
    with DatasetRegistry() as registry:
        registry.register_worker("worker-01")
        with pytest.raises(UnknownWorker, match="which has worker-01"):
            registry.remove_worker("worker-02")
        with pytest.raises(UnknownWorker, match="register it first"):
            registry.get_assigned_shards("worker-02")
        with pytest.raises(UnknownDataset, match="register it first"):
            registry.advance_epoch("imagenet")
        with pytest.raises(WorkerExists):
            registry.register_worker("worker-01")


def test_workers_live_as_long_as_their_registry_and_no_longer(strict_coordinator: CoordinatorProcess) -> None:
    with CoordinatorClient(strict_coordinator.address) as client:
        with DatasetRegistry(f"http://{strict_coordinator.address}") as registry:
            registry.register_worker("worker-01")
            time.sleep(STRICT["lease_s"] * 1.5)  # idle for longer than the lease
            assert registry.active_workers == ["worker-01"]
            assert client.list_workers().generation == 1
        until(lambda: not client.list_workers().workers, "its workers are gone")
        assert "connection lost" in client.list_workers().reason


def test_the_assignment_survives_the_death_of_the_coordinator(coordinator: CoordinatorProcess) -> None:
    with DatasetRegistry(coordinator.address, config=EAGER_CLIENT) as registry:
        names = [f"worker-{n}" for n in range(5)]
        for name in names:
            registry.register_worker(name)
        registry.register_dataset("imagenet", total_samples=10_007, shard_size=10, shuffle=True, seed=7)
        registry.advance_epoch("imagenet")
        registry.ack_shards("worker-3", registry.get_assigned_shards("worker-3")[:50])
        before = {name: registry.get_assigned_shards(name) for name in names}
        coordinator.restart()
        assert {name: registry.get_assigned_shards(name) for name in names} == before
        assert sum(map(len, before.values())) == 1_001 - 50
        assert (registry.current_epoch(), registry.active_workers) == (1, names)


def test_a_lost_worker_of_a_registry_is_named_and_may_be_registered_again(
    coordinator: CoordinatorProcess, client: CoordinatorClient
) -> None:
    with DatasetRegistry(coordinator.address) as registry:
        worker = registry.register_worker("worker-01")
        client.register_worker("worker-01", takeover=True).deregister()
        until(lambda: worker.lost is not None, "the registry knows it")
        with pytest.raises(StaleIncarnation, match=r"'worker-01' was lost .* register it again"):
            registry.remove_worker("worker-01")
        registry.register_worker("worker-01")
        assert registry.active_workers == ["worker-01"]
