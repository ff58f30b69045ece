"""Ranks of an attempt find each other, even if members of the last attempt are left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from servers import DEADLINE_S, free_port, until

from strata.coordinator.client import AsyncCoordinatorClient, CoordinatorClient
from strata.coordinator.config import CoordinatorConfig, LeaseConfig, Limits
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.coordinator.relay.relay import RelayConfig, RelayServer
from strata.coordinator.state.membership import WorkerEvent
from strata.coordinator.state.views import MembershipInfo
from strata.errors import CoordinatorUnavailable, LimitExceeded, UnknownJob
from strata.identity import Identity
from strata.launch.environment import METRICS, WorkerSpec
from strata.train.agreement import Agreement
from strata.train.membership import JoinedMembership
from strata.train.metrics import MAX_METRICS
from strata.transport.credentials import ClientSecurity

QUICK = CoordinatorConfig(
    state="memory", lease=LeaseConfig(lease_s=20.0, heartbeat_s=0.2, suspicion_s=0.2, tick_s=0.02)
)
"""A closed connection counts at once; a busy machine does not."""


@pytest.fixture
def address() -> Iterator[str]:
    with EmbeddedCoordinator(QUICK) as coordinator:
        yield coordinator.address


def spec_of(rank: int, world_size: int, attempt: int, address: str) -> WorkerSpec:
    return WorkerSpec(
        identity=Identity(
            run="job",
            attempt=attempt,
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            master_port=1,
        ),
        coordinator=address,
        checkpoints="",
    )


def join(worker_spec: WorkerSpec) -> JoinedMembership:
    client = CoordinatorClient(worker_spec.coordinator)
    client.connect()
    return JoinedMembership(client, worker_spec.identity, Agreement())


def old_ones(address: str, number: int) -> CoordinatorClient:
    """Join as members of an earlier attempt."""
    client = CoordinatorClient(address)
    client.connect()
    for rank in range(number):
        client.register_worker(f"rank-{rank}", job_id="job")
    return client


def members(client: CoordinatorClient) -> list[str]:
    try:
        return [worker.worker_id for worker in client.list_workers(job_id="job").workers]
    except UnknownJob:  # no worker has joined yet
        return []


@pytest.mark.parametrize("num_before", [0, 2, 3, 5])
def test_a_rank_does_not_start_before_all_others_have_joined(address: str, num_before: int) -> None:
    before = old_ones(address, num_before)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(join, spec_of(0, 3, 1, address))
        before.close()  # killed: the coordinator notices it when the first new worker is already waiting
        with CoordinatorClient(address) as watching:
            until(lambda: members(watching) == ["rank-0"], "only the new one is left")
        assert not first.done()
        others = [pool.submit(join, spec_of(rank, 3, 1, address)) for rank in (1, 2)]
        joined = [each.result(DEADLINE_S) for each in (first, *others)]
        assert len({each.generation for each in joined}) == 1
        leaving = [pool.submit(each.leave, together=True) for each in joined]
        for each in leaving:
            each.result(DEADLINE_S)


@pytest.mark.parametrize(("steps", "together"), [((7, 7, 7), True), ((7, 7, 6), False)])
def test_ranks_come_to_an_end_together_if_they_made_the_same_steps(
    address: str, steps: tuple[int, ...], together: bool
) -> None:
    def end(membership: JoinedMembership, step: int) -> list[bool]:
        """Reach the end twice; the second time with one more step."""
        found = [membership.ends_together(step), membership.ends_together(step + 1)]
        membership.leave(together=together)  # as after a save: not while another rank is reading
        return found

    with ThreadPoolExecutor(3) as pool:
        joined = list(pool.map(join, [spec_of(rank, 3, 1, address) for rank in range(3)]))
        assert list(pool.map(end, joined, steps)) == [[together, together]] * 3


def test_a_rank_that_reads_late_finds_the_last_step_of_one_that_is_at_its_next_end(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [membership for membership, _ in two_ranks(address)]
    late, listed = ranks[0]._client, ranks[0]._client.list_workers
    is_first = iter([True])

    def is_rank_1_ahead() -> bool:
        (metrics,) = [each.metrics for each in listed(job_id="job").workers if each.worker_id == "rank-1"]
        return 9.0 in metrics.values()

    def list_workers(*, job_id: str) -> MembershipInfo:
        if next(is_first, False):
            until(is_rank_1_ahead, "rank 1 is at its next end")
        return listed(job_id=job_id)

    monkeypatch.setattr(late, "list_workers", list_workers)
    with ThreadPoolExecutor(2) as pool:
        ended = pool.map(lambda each: [each.ends_together(step) for step in (7, 9, 11)], ranks)
        assert list(ended) == [[True, True, True]] * 2
        list(pool.map(lambda each: each.leave(together=True), ranks))


def test_the_most_metrics_of_a_script_leave_room_for_all_of_ours(address: str) -> None:
    """The coordinator would refuse a whole heartbeat with one metric too many."""
    named = [value for name, value in vars(METRICS).items() if not name.startswith("_") and name != "is_ours"]
    ours = [name for value in named for name in ([value] if isinstance(value, str) else value)]
    membership = join(spec_of(0, 1, 0, address))
    membership.watch(lambda: {"rows_per_s": 1.0, **dict.fromkeys(ours, 1.0)})
    membership.report("TRAINING", 1, 0, {f"users-{number}": 1.0 for number in range(MAX_METRICS + 1)})
    with CoordinatorClient(address) as watching:

        def num_metrics() -> int:
            (worker,) = watching.list_workers(job_id="job").workers
            return len(worker.metrics)

        until(lambda: num_metrics() == MAX_METRICS + 1 + len(ours), "every metric arrives")
    membership.leave(together=False)


def test_the_end_does_not_wait_for_a_rank_that_has_left(address: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(join, [spec_of(rank, 2, 1, address) for rank in range(2)])
        ending = pool.submit(one.ends_together, 7)
        other.leave(together=False)
        assert not ending.result(DEADLINE_S)
        one.leave(together=False)


def test_metrics_may_have_any_name(address: str) -> None:
    membership = join(spec_of(0, 1, 0, address))
    membership.report("TRAINING", 7, 1, {"state": 1.0, "loss": 0.5})
    membership.worker.heartbeat()
    with CoordinatorClient(address) as watching:
        (worker,) = watching.list_workers(job_id="job").workers
    assert (worker.state, worker.step, worker.epoch) == ("TRAINING", 7, 1)
    assert (worker.metrics["state"], worker.metrics["loss"]) == (1.0, 0.5)
    membership.leave(together=False)


def test_a_restarted_coordinator_knows_ranks_and_attempts_and_gets_the_metrics_again(tmp_path: Path) -> None:
    """The journal contains ranks and attempts, but no metrics."""
    config = replace(QUICK, state=f"sqlite:///{tmp_path}/journal.db", lease=replace(QUICK.lease, suspicion_s=5.0))
    listen = f"127.0.0.1:{free_port()}"
    with EmbeddedCoordinator(config, listen=listen):
        membership = join(spec_of(0, 1, 7, listen))
        membership.watch(lambda: {"rows_per_s": 5.0, "loss": 1.0})
        membership.report("TRAINING", 3, 0, {"loss": 0.5})
    with EmbeddedCoordinator(config, listen=listen), CoordinatorClient(listen) as watching:
        (worker,) = watching.list_workers(job_id="job").workers
        assert (worker.launch_rank, worker.attempt) == (0, 7)

        def metrics() -> dict[str, float]:
            (worker,) = watching.list_workers(job_id="job").workers
            return dict(worker.metrics)

        until(lambda: "rows_per_s" in metrics(), "the coordinator gets the metrics again")
        found = metrics()
        assert found["rows_per_s"] == 5.0
        assert found.get("loss", 0.5) == 0.5, "a metric that the script reports takes precedence"
        membership.leave(together=False)


def two_ranks(address: str) -> Iterator[tuple[JoinedMembership, Agreement]]:
    """Join two ranks; return them in order. They wait for each other while they join."""
    agreements = [Agreement(), Agreement()]

    def join_as(rank: int) -> JoinedMembership:
        client = CoordinatorClient(address)
        client.connect()
        return JoinedMembership(client, spec_of(rank, 2, 0, address).identity, agreements[rank])

    with ThreadPoolExecutor(2) as pool:
        yield from zip(pool.map(join_as, range(2)), agreements, strict=True)


def steps_until_due(agreement: Agreement, step: int) -> int:
    """Train from this step on; return the step after which a save was due."""
    while not agreement.take_due(step, timeout_s=DEADLINE_S):
        step += 1
        assert step < 20_000, "the ranks agreed on no step"
        time.sleep(0.002)  # a step
    return step


def test_ranks_that_are_asked_to_save_agree_on_a_step_that_none_has_passed(address: str) -> None:
    """With time-based policies, rank 0 decides and asks all ranks."""
    ranks = list(two_ranks(address))
    for rank, (_, agreement) in enumerate(ranks):
        agreement.restored(10 * (rank + 1))
    ranks[0][0].ask_checkpoint("it is time")
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda rank: steps_until_due(ranks[rank][1], 10 * (rank + 1)), range(2)))
        assert ended[0] == ended[1] > 20
        list(pool.map(lambda each: each[0].leave(together=True), ranks))


def test_limits_that_a_coordinator_has_lost_are_sent_again(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that restarts after the ranks have published their limits has lost them: its journal lacks them."""
    ranks = list(two_ranks(address))
    forgetful, num_looks = ranks[1][0]._client, iter(range(1_000))
    listed = forgetful.list_workers

    def list_workers(*, job_id: str) -> MembershipInfo:
        found = listed(job_id=job_id)
        if next(num_looks) < 3:
            found = replace(found, workers=[replace(each, metrics={}) for each in found.workers])
        return found

    monkeypatch.setattr(forgetful, "list_workers", list_workers)
    ranks[1][0].ask_stop("SIGTERM")
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda rank: steps_until_due(ranks[rank][1], 5), range(2)))
        assert ended[0] == ended[1]
        assert next(num_looks) >= 4, "the first reads showed no limits"
        list(pool.map(lambda each: each[0].leave(together=True), ranks))


def test_a_rank_that_reads_late_finds_the_limit_of_one_that_is_at_the_next_command(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When all processes get SIGTERM, the agent and each rank request the same."""
    ranks = list(two_ranks(address))
    late, listed = ranks[0][0]._client, ranks[0][0]._client.list_workers
    is_first = iter([True])

    def is_rank_1_ahead() -> bool:
        at = {each.worker_id: each.metrics.get(METRICS.agree_command, -1.0) for each in listed(job_id="job").workers}
        return at["rank-1"] > at["rank-0"]

    def list_workers(*, job_id: str) -> MembershipInfo:
        if next(is_first, False):
            until(is_rank_1_ahead, "rank 1 is at the next command")
        return listed(job_id=job_id)

    monkeypatch.setattr(late, "list_workers", list_workers)
    ranks[1][0].ask_checkpoint("it is time")
    ranks[1][0].ask_stop("SIGTERM")
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda rank: steps_until_due(ranks[rank][1], 5), range(2)))
        assert ended[0] == ended[1]
        list(pool.map(lambda each: each[0].leave(together=True), ranks))


def test_a_request_that_could_not_be_sent_is_sent_later(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = CoordinatorClient(address)
    client.connect()
    agreement = Agreement()
    membership = JoinedMembership(client, spec_of(0, 1, 0, address).identity, agreement)
    send, num_tries = client.send_command, iter(range(1_000))

    def send_command(*arguments: Any, **named: Any) -> int:
        if next(num_tries) < 2:
            raise CoordinatorUnavailable("nobody answers")
        return send(*arguments, **named)

    monkeypatch.setattr(client, "send_command", send_command)
    membership.ask_stop("SIGTERM")
    steps_until_due(agreement, 0)
    assert next(num_tries) == 3
    membership.leave(together=False)


@pytest.mark.parametrize("has_relay", [False, True], ids=["direct", "relay"])
def test_a_client_that_watches_a_job_is_notified_of_members_events_and_checkpoints(has_relay: bool) -> None:
    async def scene(address: str) -> None:
        async with AsyncCoordinatorClient(address) as watching, AsyncCoordinatorClient(address) as training:
            worker = await training.register_worker("rank-3", job_id="job", launch_rank=3, attempt=2)
            found = await watching.list_workers(job_id="job", watch=True)
            assert found.is_watching
            assert not (await training.list_workers(job_id="job")).is_watching
            while await watching.wait_notice("job", 0.2):
                pass  # the worker may have joined a moment ago

            worker.report_event("RESTORED", at_s=12.5, step=4)
            await worker.heartbeat()
            assert await watching.wait_notice("job", 10.0)
            (seen,) = (await watching.list_workers(job_id="job", watch=True)).workers
            assert (seen.launch_rank, seen.attempt, seen.rank) == (3, 2, 0)
            assert seen.events == {"RESTORED": WorkerEvent("RESTORED", 12.5, 4)}

            await worker.refresh()
            await worker.notify_checkpoint("c1", step=5, epoch=0, path="/c1")
            assert await watching.wait_notice("job", 10.0)

            await training.register_worker("rank-1", job_id="job")
            assert await watching.wait_notice("job", 10.0)
            assert not await watching.wait_notice("another", 0.01)

    async def behind_relay(upstream: str) -> None:
        relay = RelayServer(RelayConfig(upstream=upstream, listen="127.0.0.1:0"), security=ClientSecurity())
        addresses = await relay.start()
        try:
            await scene(addresses.grpc)
        finally:
            await relay.stop()

    with EmbeddedCoordinator(QUICK) as coordinator:
        asyncio.run(behind_relay(coordinator.address) if has_relay else scene(coordinator.address))


def test_a_late_rank_receives_all_values_although_only_few_fit_into_a_queue(tmp_path: Path) -> None:
    """Every rank sends its values again at the same time: no rank may wait for room in a queue before it takes its own
    commands.
    """
    config = replace(QUICK, limits=Limits(max_pending_commands_per_worker=4))
    topics = ("a", "b", "c")
    with EmbeddedCoordinator(config, listen=f"unix:{tmp_path}/c.sock") as coordinator, ExitStack() as stack:
        ranks: list[JoinedMembership] = []
        for rank in range(4):
            client = stack.enter_context(CoordinatorClient(coordinator.address))
            identity = spec_of(rank, 4, 0, coordinator.address).identity
            ranks.append(JoinedMembership(client, identity, Agreement(), is_late=True))
            if rank == 3:
                break
            for topic in topics:
                until(lambda topic=topic: was_published(ranks[-1], topic), f"rank {rank} has published {topic}")
        for topic in topics:
            assert set(ranks[3].collect(topic, range(3), timeout_s=DEADLINE_S)) == {0, 1, 2}
        for each in ranks:
            each.leave(together=False)


def was_published(membership: JoinedMembership, topic: str) -> bool:
    try:
        membership.publish(topic, "value")
    except LimitExceeded:  # the queues are full
        return False
    return True
