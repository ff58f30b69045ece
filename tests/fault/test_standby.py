"""A leader and its standby as real processes: killed, paused, stopped, and with a failing database.

Whatever happens, nothing acknowledged is lost, and the workers keep their identity.
"""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import grpc
import psycopg
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from postgres import PostgresServer
from servers import CALM, DEADLINE_S, EAGER_CLIENT, CommandLine, CoordinatorProcess, Nursery, free_port, until

from strata.cli.exit_codes import ExitCode
from strata.coordinator.client import ClientConfig, CoordinatorClient, Worker
from strata.coordinator.config import CoordinatorConfig
from strata.coordinator.journal import Record, open_journal
from strata.coordinator.state import events as e
from strata.coordinator.state.core import Core
from strata.errors import CoordinatorUnavailable, JournalError, NotLeader
from strata.v1 import calls_pb2, types_pb2

SERVICE = "strata.v1.Coordinator"
LEASE_S = 1.5
LEADERSHIP = {"leader_lease_s": LEASE_S, "poll_s": 0.02}
NUM_SHARDS = 100_000

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Pair:
    """A leader and its standby on one state."""

    def __init__(
        self, nursery: Nursery, directory: Path, state: str, *, leadership: Mapping[str, float] = LEADERSHIP
    ) -> None:
        settings = {"state": state, "lease": CALM, "leadership": dict(leadership)}
        self.state = state
        self.leader = CoordinatorProcess(nursery, directory, **settings)
        self.standby = CoordinatorProcess(nursery, directory, standby=True, **settings)
        self.addresses = f"{self.leader.address},{self.standby.address}"

    def start(self) -> None:
        self.leader.start()
        self.standby.start()

    def wait_taken_over(self) -> float:
        """Wait for the standby to lead; return how long that took."""
        start_s = time.monotonic()
        assert self.standby.child.receive()["leads"] is True
        return time.monotonic() - start_s

    def core(self) -> Core:
        journal = open_journal(self.state, readonly=True)
        try:
            loaded = journal.load()
        finally:
            journal.close()
        assert loaded.damage is None
        core = Core(CoordinatorConfig())
        core.restore(e.decode_snapshot(loaded.snapshot) if loaded.snapshot is not None else ())
        for record in loaded.records:
            core.apply(e.decode(record.payload))
        return core

    def records(self) -> list[Record]:
        journal = open_journal(self.state, readonly=True)
        try:
            return journal.read(limit=1_000_000)
        finally:
            journal.close()


class Load:
    """A worker that acknowledges shard after shard, and records which acks were answered."""

    def __init__(self, worker: Worker) -> None:
        self.acknowledged: list[int] = []
        self.failures: list[Exception] = []
        self._worker = worker
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        for shard in self._worker.shards("d"):
            while not self._stopping.is_set():
                try:
                    self._worker.ack([shard])
                except (CoordinatorUnavailable, JournalError) as error:
                    self.failures.append(error)
                else:
                    self.acknowledged.append(shard.index)
                    break
            if self._stopping.is_set():
                return

    def wait_more(self, num: int = 20) -> None:
        goal = len(self.acknowledged) + num
        try:
            until(lambda: len(self.acknowledged) >= goal, f"{num} more acks are answered")
        except AssertionError as error:
            self._stopping.set()  # otherwise it would continue after the test
            frames = sys._current_frames()
            where = {thread.name: frames.get(thread.ident or 0) for thread in threading.enumerate()}
            stacks = (f"{name}:\n{''.join(traceback.format_stack(at))}" for name, at in where.items() if at)
            error.add_note(f"{len(self.acknowledged)} were; refused: {self.failures[-3:]}\n" + "\n".join(stacks))
            raise

    def __enter__(self) -> Self:
        self._thread.start()
        self.wait_more()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def check_nothing_lost(self, core: Core) -> None:
        done = core.jobs["default"].shards.datasets["d"].done
        assert [index for index in self.acknowledged if not done[index]] == []
        assert int(done.sum()) <= len(self.acknowledged) + 1, "shards are done that were not acked"


@contextmanager
def two_workers(addresses: str) -> Iterator[tuple[CoordinatorClient, list[Worker]]]:
    with ExitStack() as stack:
        clients = [stack.enter_context(CoordinatorClient(addresses, config=EAGER_CLIENT)) for _ in range(2)]
        workers = [client.register_worker(f"w{n}") for n, client in enumerate(clients)]
        clients[0].register_dataset("d", total_samples=NUM_SHARDS, shard_size=1)
        for worker in workers:
            worker.wait_for_workers(2)
        yield clients[0], workers


def membership(client: CoordinatorClient) -> tuple[int, list[tuple[str, int]]]:
    """Return the generation and the incarnation of every worker."""
    members = client.list_workers()
    return members.generation, [(w.worker_id, w.incarnation) for w in members.workers]


def ask_alone(address: str) -> types_pb2.Error:
    """Return the error with which this coordinator refuses a unary call."""
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.unary_unary(
            f"/{SERVICE}/ListJobs",
            request_serializer=calls_pb2.ListJobsRequest.SerializeToString,
            response_deserializer=calls_pb2.ListJobsResponse.FromString,
        )
        with pytest.raises(grpc.RpcError) as refused:
            call(calls_pb2.ListJobsRequest(), timeout=DEADLINE_S)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    details = dict(refused.value.trailing_metadata() or ()).get("strata-error-bin", b"")
    return types_pb2.Error.FromString(details)


def health_of(address: str) -> int:
    """A coordinator that is gone serves no caller."""
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            return health_pb2_grpc.HealthStub(channel).Check(request, timeout=DEADLINE_S).status
        except grpc.RpcError:
            return NOT_SERVING


def term_of(postgres: PostgresServer, state: str) -> tuple[object, ...]:
    return postgres.sql("SELECT term, address FROM strata_leader", state)[0]


@pytest.fixture(params=["sqlite", "postgres"])
def pair(request: pytest.FixtureRequest, nursery: Nursery, tmp_path: Path) -> Pair:
    is_file = request.param == "sqlite"
    state = str(tmp_path / "c.db") if is_file else request.getfixturevalue("postgres").new_state()
    pair = Pair(nursery, tmp_path, state)
    pair.start()
    return pair


@pytest.fixture
def postgres_pair(postgres: PostgresServer, nursery: Nursery, tmp_path: Path) -> Pair:
    pair = Pair(nursery, tmp_path, postgres.new_state())
    pair.start()
    return pair


def test_a_standby_redirects_its_callers_to_the_leader_at_once(pair: Pair) -> None:
    until(lambda: pair.leader.address in ask_alone(pair.standby.address).message, "it names the leader")
    refusal = ask_alone(pair.standby.address)
    assert refusal.kind == "NotLeader"
    assert refusal.message == f"this coordinator is a standby; the leader is at {pair.leader.address}"
    assert (health_of(pair.leader.address), health_of(pair.standby.address)) == (SERVING, NOT_SERVING)
    impatient = ClientConfig(connect_timeout_s=2.0)
    with pytest.raises(NotLeader, match="pass the addresses of all coordinators"):
        CoordinatorClient(pair.standby.address, config=impatient).connect()
    with CoordinatorClient(f"{pair.standby.address},{pair.leader.address}") as client:
        assert client.list_jobs() == []


def test_a_killed_leader_is_replaced_and_nothing_is_lost(pair: Pair) -> None:
    with two_workers(pair.addresses) as (client, workers), ThreadPoolExecutor(2) as pool:
        before = membership(client)
        with Load(workers[0]) as load:
            # One worker has arrived when the leader dies; the other arrives at the new one.
            first: Future[None] = pool.submit(workers[1].barrier, "sync", timeout_s=DEADLINE_S)
            pair.leader.kill()
            pair.wait_taken_over()
            load.wait_more()
        workers[0].barrier("sync", timeout_s=DEADLINE_S)
        first.result(DEADLINE_S)
        assert membership(client) == before
        assert [worker.lost for worker in workers] == [None, None]
        assert health_of(pair.standby.address) == SERVING
    assert pair.standby.child.terminate() == 0
    load.check_nothing_lost(pair.core())


def test_a_leader_that_is_stopped_hands_over_at_once(pair: Pair) -> None:
    with two_workers(pair.addresses) as (client, workers), Load(workers[0]) as load:
        before = membership(client)
        start_s = time.monotonic()
        assert pair.leader.child.terminate() == 0
        pair.wait_taken_over()
        assert time.monotonic() - start_s < LEASE_S, "it did not wait for the lease"
        load.wait_more()
        assert membership(client) == before
        assert load.failures == []
    assert pair.standby.child.terminate() == 0
    load.check_nothing_lost(pair.core())


def test_a_paused_leader_can_neither_write_nor_answer_when_it_resumes(
    postgres: PostgresServer, nursery: Nursery, tmp_path: Path
) -> None:
    pair = Pair(nursery, tmp_path, postgres.new_state())
    yaml = tmp_path / "coordinator.yaml"
    yaml.write_text("http: 'off'\nleadership: {leader_lease_s: 1.5, poll_s: 0.02}\nlease: {lease_s: 20.0}\n")
    old = CommandLine(tmp_path, "--listen", pair.leader.address, "--state", pair.state, "--json")
    try:
        assert old.addresses()["leads"] is True
        pair.standby.start()
        with two_workers(pair.addresses) as (client, workers), Load(workers[0]) as load:
            before = membership(client)
            assert term_of(postgres, pair.state) == (1, pair.leader.address)
            old.signal(signal.SIGSTOP)
            pair.wait_taken_over()
            assert term_of(postgres, pair.state) == (2, pair.standby.address)
            load.wait_more()
            with grpc.insecure_channel(pair.leader.address) as channel:
                calls = waiting_calls(channel)
                old.signal(signal.SIGCONT)
                # Either refused with an error, or cut off without one because it steps down: which is a race.
                assert {refusal(call) for call in calls} <= {
                    (grpc.StatusCode.UNAVAILABLE, "NotLeader"),
                    (grpc.StatusCode.UNAVAILABLE, ""),
                    (grpc.StatusCode.CANCELLED, ""),
                }
            code, errors = old.ended()
            assert code == ExitCode.STATE_BUSY
            assert "another coordinator leads" in errors
            assert "term 1 is over" in errors
            load.wait_more()
            assert membership(client) == before
            assert load.failures == []
    finally:
        old.close()
    assert term_of(postgres, pair.state) == (2, pair.standby.address)
    assert pair.standby.child.terminate() == 0
    core = pair.core()
    load.check_nothing_lost(core)
    assert set(core.jobs["default"].membership.members) == {"w0", "w1"}
    seqs = [record.seq for record in pair.records()]
    assert seqs == list(itertools.islice(itertools.count(seqs[0]), len(seqs)))


def test_a_paused_leader_stops_answering_by_its_own_clock(
    postgres: PostgresServer, nursery: Nursery, tmp_path: Path
) -> None:
    """While the database does not respond, the leader can only rely on its own clock."""
    pair = Pair(nursery, tmp_path, postgres.new_state())
    pair.start()
    pair.leader.child.freeze()
    pair.wait_taken_over()
    plain = pair.state.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(plain) as lock, grpc.insecure_channel(pair.leader.address) as channel:
        lock.execute("LOCK TABLE strata_leader IN ACCESS EXCLUSIVE MODE")
        calls = waiting_calls(channel)
        pair.leader.child.thaw()
        assert [refusal(call) for call in calls] == [(grpc.StatusCode.UNAVAILABLE, "NotLeader")] * 3
    assert pair.leader.child.wait_gone() != 0, "the database reports another leader"


def waiting_calls(channel: grpc.Channel) -> list[Any]:
    """They wait in the socket of a paused coordinator, and are the first thing that it sees when it resumes."""
    requests = (
        ("RegisterWorker", calls_pb2.RegisterWorkerRequest(worker_id="ghost", instance_id="g")),
        ("ListWorkers", calls_pb2.ListWorkersRequest()),
        ("Heartbeat", calls_pb2.HeartbeatRequest(worker_id="w0")),
    )
    return [
        channel.unary_unary(
            f"/{SERVICE}/{name}", request_serializer=request.SerializeToString, response_deserializer=bytes
        ).future(request, timeout=DEADLINE_S, wait_for_ready=False)
        for name, request in requests
    ]


def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return the status, and the name of our error in it; empty for gRPC's own."""
    details = dict(call.trailing_metadata() or ()).get("strata-error-bin")
    return call.code(), types_pb2.Error.FromString(details).kind if details else ""


def test_a_leader_paused_for_less_than_its_lease_continues(postgres: PostgresServer, nursery: Nursery) -> None:
    """Its lease expired but was not taken: the term is still its own."""
    alone = CoordinatorProcess(nursery, Path(), state=postgres.new_state(), lease=CALM, leadership=LEADERSHIP)
    alone.start()
    with two_workers(alone.address) as (client, workers):
        before = membership(client)
        alone.child.freeze()
        until(
            lambda: postgres.sql("SELECT expires_at < now() FROM strata_leader", alone.settings["state"]) == [(True,)],
            "its lease has run out",
        )
        alone.child.thaw()
        assert membership(client) == before
        assert term_of(postgres, alone.settings["state"]) == (1, alone.address)
        assert [worker.lost for worker in workers] == [None, None]


def test_a_restarted_leader_waits_for_its_previous_lease(postgres: PostgresServer, nursery: Nursery) -> None:
    alone = CoordinatorProcess(nursery, Path(), state=postgres.new_state(), lease=CALM, leadership=LEADERSHIP)
    alone.start()
    with two_workers(alone.address) as (client, _):
        before = membership(client)
        alone.restart()
        assert membership(client) == before
    assert term_of(postgres, alone.settings["state"]) == (2, alone.address)


def test_a_second_leader_is_refused_while_the_first_renews(
    postgres: PostgresServer, postgres_pair: Pair, tmp_path: Path
) -> None:
    (tmp_path / "coordinator.yaml").write_text("http: 'off'\nleadership: {leader_lease_s: 1.5}\n")
    second = CommandLine(tmp_path, "--listen", f"127.0.0.1:{free_port()}", "--state", postgres_pair.state)
    try:
        code, errors = second.ended()
    finally:
        second.close()
    assert code == ExitCode.STATE_BUSY
    assert f"(at {postgres_pair.leader.address}); stop that coordinator" in errors
    assert "--standby" in errors


@pytest.mark.slow
def test_the_leader_survives_a_database_crash_under_load(postgres: PostgresServer, postgres_pair: Pair) -> None:
    pair = postgres_pair
    with two_workers(pair.addresses) as (client, workers):
        before = membership(client)
        with Load(workers[0]) as load:
            postgres.restart("immediate")
            load.wait_more()
        assert {type(error) for error in load.failures} <= {JournalError, *JournalError.__subclasses__()}
        assert membership(client) == before
        assert [worker.lost for worker in workers] == [None, None]
    load.check_nothing_lost(pair.core())


def test_the_leader_survives_a_database_outage_longer_than_the_lease(
    postgres: PostgresServer, postgres_pair: Pair
) -> None:
    """Health reports it meanwhile. Whichever of the two leads then, neither has to be restarted."""
    pair = postgres_pair
    with two_workers(pair.addresses) as (client, workers):
        before = membership(client)
        with Load(workers[0]) as load:
            postgres.stop("immediate")
            try:
                until(lambda: health_of(pair.leader.address) == NOT_SERVING, "the leader reports that it refuses calls")
                until(lambda: ask_alone(pair.leader.address).kind == "NotLeader", "its lease runs out")
            finally:
                postgres.go_on()
            load.wait_more()
        assert membership(client) == before
        until(
            lambda: SERVING in [health_of(process.address) for process in (pair.leader, pair.standby)],
            "one of them serves",
        )
    load.check_nothing_lost(pair.core())


def test_database_connections_cut_under_load_are_reestablished(postgres: PostgresServer, postgres_pair: Pair) -> None:
    pair = postgres_pair
    with two_workers(pair.addresses) as (client, workers):
        before = membership(client)
        with Load(workers[0]) as load:
            for _ in range(5):
                assert postgres.cut(pair.state) >= 1
                load.wait_more()
        assert {type(error) for error in load.failures} <= {JournalError, *JournalError.__subclasses__()}
        assert membership(client) == before
        until(lambda: health_of(pair.leader.address) == SERVING, "it is healthy again")
    assert term_of(postgres, pair.state) == (1, pair.leader.address)
    load.check_nothing_lost(pair.core())
