"""Nodes that are disconnected from the coordinator in one or both directions, and packets that are late or lost.

Every test has its own network (`network.py`): real processes, the kernel's TCP, and a wire that drops packets silently.
Whatever happens, each worker ends in one of two states: it continues as if nothing had happened, or it was declared
dead once and knows it. And every shard is done once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from network import Network
from servers import DEADLINE_S, Child, CoordinatorProcess, until

from strata.coordinator.journal import open_journal
from strata.coordinator.state import events as e

HUB, CUT, SURVIVOR = "hub", "cut", "survivor"
NUM_SHARDS = 20_000
SHORT = {"lease_s": 2.0, "heartbeat_s": 0.2, "suspicion_s": 0.5, "tick_s": 0.02}
"""A disconnected worker dies soon, of silence."""
LONG = {**SHORT, "lease_s": 30.0, "suspicion_s": 1.5}
"""Longer than any outage in these tests."""
HANGUP_S = 5.0
"""Longer than a silent connection is kept open."""
EAGER = {"backoff_s": 0.01, "max_backoff_s": 0.1, "call_timeout_s": 2 * DEADLINE_S}


class Job:
    """A coordinator at the hub of a network, and the contents of its journal."""

    def __init__(self, network: Network, directory: Path, lease: dict[str, float]) -> None:
        self.network = network
        self._directory = directory
        hub = network.nodes[HUB]
        listen = f"{hub.host}:50051"
        self._coordinator = CoordinatorProcess(hub, directory, listen=listen, security={"insecure": True}, lease=lease)
        self._coordinator.start()

    def worker(self, worker_id: str, *, node: str = "", address: str = "") -> Child:
        child = self.network.nodes[node or worker_id].fork(
            "network_children:worker",
            address=address or self._coordinator.address,
            worker_id=worker_id,
            dataset_id="d",
            config=EAGER,
        )
        child.receive()
        return child

    def relay(self, node: str) -> str:
        """Its address; only usable at that node."""
        listen = f"unix:{self._directory}/relay.sock"
        settings = {"upstream": self._coordinator.address, "listen": listen, "client": EAGER}
        relay = self.network.nodes[node].fork("relay_children:relay", settings=settings)
        assert relay.receive()["grpc"] == listen
        return listen

    def start(self, workers: Iterable[Child], *, num_shards: int = NUM_SHARDS) -> None:
        """All workers send acks, and the acks are answered."""
        first, *others = workers
        first.ask(do="register", num_shards=num_shards)
        for worker in (first, *others):
            worker.ask(do="start")
        for worker in (first, *others):
            wait_more(worker)

    def events(self) -> list[e.Event]:
        journal = open_journal(str(self._coordinator.state), readonly=True)
        try:
            return [e.decode(record.payload) for record in journal.read(limit=1_000_000)]
        finally:
            journal.close()

    def deaths(self) -> list[tuple[str, str, str]]:
        """The worker, the cause, and the description."""
        return [(left.worker_id, left.cause, left.reason) for left in self.events() if isinstance(left, e.WorkerLeft)]

    def check_done_once(self, acked: list[int]) -> None:
        """Acknowledged shards are done, nothing is done twice, and nothing else is done."""
        done = Counter(i for event in self.events() if isinstance(event, e.ShardsDone) for i in event.indices)
        assert [index for index, times in done.items() if times > 1] == []
        assert [index for index, times in Counter(acked).items() if times > 1] == []
        assert [index for index in acked if not done[index]] == []


def look(worker: Child) -> dict[str, Any]:
    return worker.ask(do="look")


def members(worker: Child) -> dict[str, Any]:
    """Return the members as the coordinator reports them to this worker."""
    return worker.ask(do="members")


def wait_more(worker: Child, num: int = 20) -> None:
    goal = look(worker)["num_acked"] + num
    until(lambda: look(worker)["num_acked"] >= goal, f"{num} more acks are answered")


def stop(*workers: Child) -> list[int]:
    """The acks that they received answers to."""
    return [index for worker in workers for index in worker.ask(do="stop")["acked"]]


@pytest.fixture
def make_job(make_network: Callable[..., Network], tmp_path: Path) -> Callable[..., Job]:
    return lambda lease: Job(make_network(HUB, CUT, SURVIVOR), tmp_path, lease)


def cut_whole(network: Network) -> None:
    network.cut(CUT, HUB)


def cut_outgoing(network: Network) -> None:
    """Cut the node's outgoing packets; it still receives."""
    network.silence(CUT, HUB)


def cut_incoming(network: Network) -> None:
    """Cut the node's incoming packets; the hub still receives from it."""
    network.silence(HUB, CUT)


def until_missed(job: Job, onlooker: Child) -> None:
    """Some heartbeats are missing."""
    until(lambda: members(onlooker)["silent_s"][CUT] > 2 * LONG["heartbeat_s"], "heartbeats are missing")


def until_hung_up(job: Job, onlooker: Child) -> None:
    """Everything else that could end a connection has had the time to do so."""
    until(lambda: members(onlooker)["silent_s"][CUT] > HANGUP_S, "the node has been silent for long")


def until_noticed(job: Job, _: Child) -> None:
    """The node has dropped its connection and opens another."""
    connects = job.network.num_connects(CUT, HUB)
    until(lambda: job.network.num_connects(CUT, HUB) > connects, "the node opens another connection")


@pytest.mark.parametrize("cut", [cut_whole, cut_outgoing])
def test_a_silent_worker_dies_once_and_learns_it_when_the_network_returns(
    make_job: Callable[..., Job], cut: Callable[[Network], None]
) -> None:
    job = make_job(SHORT)
    lost, survivor = job.worker(CUT), job.worker(SURVIVOR)
    job.start([lost, survivor])
    before = members(survivor)
    cut(job.network)
    until(lambda: CUT not in members(survivor)["silent_s"], "it is declared dead")
    wait_more(survivor)
    assert look(lost)["lost"] == "", "the worker cannot know yet"
    until_noticed(job, survivor)
    job.network.mend(CUT, HUB)
    until(lambda: look(lost)["lost"] != "", "the worker learns that it was removed")
    report = look(lost)
    assert (report["lost"], "silent for" in report["why"]) == ("StaleIncarnation", True)
    wait_more(survivor)
    after = members(survivor)
    assert (after["generation"], list(after["silent_s"])) == (before["generation"] + 1, [SURVIVOR])
    assert [(worker_id, cause) for worker_id, cause, _ in job.deaths()] == [(CUT, "lease")]
    job.check_done_once(stop(lost, survivor))


def test_a_worker_that_receives_nothing_drops_its_connection_and_then_its_shards(
    make_job: Callable[..., Job],
) -> None:
    """A worker never holds shards unreachably: it is dead of silence, or of a connection that it dropped."""
    job = make_job(SHORT)
    lost, survivor = job.worker(CUT), job.worker(SURVIVOR)
    job.start([lost, survivor])
    before = members(survivor)
    cut_incoming(job.network)
    until(lambda: CUT not in members(survivor)["silent_s"], "it is declared dead")
    wait_more(survivor)
    job.network.mend(CUT, HUB)
    until(lambda: look(lost)["lost"] == "StaleIncarnation", "the worker learns that it was removed")
    wait_more(survivor)
    assert members(survivor)["generation"] == before["generation"] + 1
    ((worker_id, cause, _),) = job.deaths()
    assert (worker_id, cause in ("lease", "connection")) == (CUT, True)
    job.check_done_once(stop(lost, survivor))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cut", "wait", "num_connections"),
    [(cut_whole, until_missed, 1), (cut_whole, until_hung_up, 2), (cut_outgoing, until_noticed, 2)],
)
def test_an_outage_shorter_than_the_lease_is_only_a_pause(
    make_job: Callable[..., Job],
    cut: Callable[[Network], None],
    wait: Callable[[Job, Child], None],
    num_connections: int,
) -> None:
    """Calls in progress are answered once, on the old connection or on a new one."""
    job = make_job(LONG)
    late, survivor = job.worker(CUT), job.worker(SURVIVOR)
    job.start([late, survivor])
    before = members(survivor)
    cut(job.network)
    late.send(do="barrier", name="sync", timeout_s=2 * DEADLINE_S)  # it cannot arrive yet
    wait(job, survivor)
    survivor.send(do="barrier", name="sync", timeout_s=2 * DEADLINE_S)
    assert job.network.num_lost(CUT, HUB) > 0
    job.network.mend(CUT, HUB)
    assert [worker.receive()["kind"] for worker in (late, survivor)] == ["", ""]
    wait_more(late)
    wait_more(survivor)
    after = members(survivor)
    assert (after["generation"], list(after["silent_s"])) == (before["generation"], list(before["silent_s"]))
    assert look(late)["lost"] == ""
    assert look(late)["num_connections"] >= num_connections
    assert job.deaths() == []
    assert [type(event) for event in job.events()].count(e.BarrierReleased) == 1
    job.check_done_once(stop(late, survivor))


def test_delay_and_loss_kill_no_worker_and_every_ack_counts_once(make_job: Callable[..., Job]) -> None:
    """0.2 s each way and 5 % packet loss. A reconnect takes three round trips, so suspicion must be longer."""
    job = make_job({"suspicion_s": 4.0})
    job.network.disturb(CUT, HUB, delay_s=0.2, jitter_s=0.05, loss=0.05)
    survivor = job.worker(SURVIVOR)
    far = job.worker(CUT)
    job.start([survivor, far], num_shards=400)
    wait_more(far, 30)
    assert job.network.num_lost(CUT, HUB) + job.network.num_lost(HUB, CUT) > 0
    assert job.deaths() == []
    assert [look(worker)["lost"] for worker in (far, survivor)] == ["", ""]
    job.check_done_once(stop(far, survivor))


# -- relays --------------------------------------------------------------------------------------------------------


def node_of_three(job: Job) -> tuple[str, list[Child]]:
    address = job.relay(CUT)
    return address, [job.worker(worker_id, node=CUT, address=address) for worker_id in ("a", "b", "c")]


def test_a_disconnected_relay_loses_its_workers_in_one_generation_and_may_return(
    make_job: Callable[..., Job],
) -> None:
    job = make_job({**SHORT, "lease_s": 3.0, "heartbeat_s": 1.0})  # their last heartbeats lie up to one interval apart
    address, lost = node_of_three(job)
    survivor = job.worker(SURVIVOR)
    job.start([survivor, *lost])
    before = members(survivor)
    job.network.cut(CUT, HUB)
    until(lambda: list(members(survivor)["silent_s"]) == [SURVIVOR], "its workers are declared dead")
    wait_more(survivor)
    assert sorted((worker_id, cause) for worker_id, cause, _ in job.deaths()) == [
        ("a", "lease"),
        ("b", "lease"),
        ("c", "lease"),
    ]
    without = members(survivor)["generation"]
    assert without == before["generation"] + 1, "one failure, one generation"
    job.network.mend(CUT, HUB)
    for worker in lost:
        until(lambda worker=worker: look(worker)["lost"] == "StaleIncarnation", "each learns that it is out")
    again = job.worker("d", node=CUT, address=address)
    until(lambda: list(members(again)["silent_s"]) == [SURVIVOR, "d"], "the relay serves as before")
    assert members(survivor)["generation"] == without + 1
    assert len(job.deaths()) == len(lost)
    job.check_done_once(stop(survivor, *lost))


def test_a_relay_disconnected_for_less_than_the_lease_loses_no_worker(make_job: Callable[..., Job]) -> None:
    job = make_job(LONG)
    _, late = node_of_three(job)
    survivor = job.worker(SURVIVOR)
    job.start([survivor, *late])
    before = members(survivor)
    cut_whole(job.network)
    until_noticed(job, survivor)
    job.network.mend(CUT, HUB)
    for worker in late:
        wait_more(worker)
    after = members(survivor)
    assert (after["generation"], list(after["silent_s"])) == (before["generation"], list(before["silent_s"]))
    assert [look(worker)["num_connections"] for worker in late] == [1, 1, 1], "the workers did not notice the outage"
    assert job.deaths() == []
    job.check_done_once(stop(survivor, *late))
