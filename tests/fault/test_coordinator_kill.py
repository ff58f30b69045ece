"""A coordinator is killed with SIGKILL at every point where a fact becomes durable: nothing acknowledged is lost.

A fixed scenario runs through real clients. A run without a kill counts how often the coordinator reaches each point and
records the result. The scenario then runs again for every point and count, with a coordinator that dies there. The
facts acknowledged by then must be in its journal; another coordinator starts; the clients retry unanswered calls; and
the result must be the same.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from killable_coordinator import RUNNING, STARTING
from servers import CALM, DEADLINE_S, EAGER_CLIENT, STRICT, CoordinatorProcess, Nursery, until

from strata.coordinator.client import CoordinatorClient, Worker
from strata.coordinator.config import CoordinatorConfig
from strata.coordinator.journal import open_journal
from strata.coordinator.state import events as e
from strata.coordinator.state.core import Core
from strata.coordinator.state.job import Job

NUM_WORKERS = 3
SETTINGS = {
    # No heartbeats except those of the scenario, so that every run is the same.
    "lease": {"lease_s": 120.0, "heartbeat_s": 60.0, "suspicion_s": 60.0, "tick_s": 0.02},
    "journal": {"snapshot_every": 7, "history_events": 5},
}
JOBS = 2
"""Concurrent runs."""


def fold(state: Path, scratch: Path) -> Core:
    """Return the state that a coordinator would load, read from a copy so that reading changes nothing."""
    scratch.mkdir()
    for file in state.parent.glob(f"{state.name}*"):
        if not file.name.endswith((".lock", "-shm")):
            shutil.copy(file, scratch)
    journal = open_journal(str(scratch / state.name))
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


def comparable(core: Core) -> Any:
    """Return the state without values that differ between runs: wall-clock times and random names."""
    jobs = msgspec.to_builtins(core.snapshot())
    for job in jobs:
        for record in job["checkpoints"]:
            record.pop("committed_at_s", None)
        for worker in (*job["members"], *job["departed"]):
            worker.pop("nonce", None)
        job["command_requests"] = sorted(job["command_requests"].values())
    return jobs


@dataclass
class Scenario:
    """The scenario, and the facts acknowledged so far."""

    address: str
    facts: list[tuple[str, Callable[[Job], bool]]] = field(default_factory=list)

    def play(self) -> None:
        with ExitStack() as stack:
            clients = [
                stack.enter_context(CoordinatorClient(self.address, config=EAGER_CLIENT)) for _ in range(NUM_WORKERS)
            ]
            pool = stack.enter_context(ThreadPoolExecutor(NUM_WORKERS))
            workers = [self._register(client, f"w{n}") for n, client in enumerate(clients)]
            clients[0].register_dataset("d", total_samples=120, shard_size=10, shuffle=True, seed=3)
            self._know("the dataset", lambda job: job.shards.datasets["d"].spec.num_shards == 12)
            for worker in workers:
                worker.refresh()
            for worker in workers[:2]:
                self._ack(worker, 2)
            self._barrier(pool, workers, "start")
            for worker in workers:
                self._checkpoint(worker, "c1", step=10)
            self._command(clients[0], workers[1])
            self._advance(clients[1], from_epoch=0)
            self._ack(workers[2], 1)
            workers[2].deregister("done")
            self._know("w2 has left", lambda job: "w2" not in job.membership.members)
            for worker in workers[:2]:
                worker.refresh()
                self._ack(worker, 3)
            self._barrier(pool, workers[:2], "end")
            for worker in workers[:2]:
                self._checkpoint(worker, "c2", step=20)
            # An acknowledged command gets no answer, so the acknowledgement is repeated if it was lost.
            workers[1].heartbeat()

    def _know(self, what: str, check: Callable[[Job], bool]) -> None:
        self.facts.append((what, check))

    def _register(self, client: CoordinatorClient, worker_id: str) -> Worker:
        worker = client.register_worker(worker_id, instance_id=f"process-of-{worker_id}")
        incarnation, generation = worker.incarnation, worker.generation

        def check(job: Job) -> bool:
            member = job.membership.members.get(worker_id)
            if member is None:
                return job.membership.generation > generation  # it has left in the meantime
            return member.incarnation == incarnation and job.membership.generation >= generation

        self._know(f"{worker_id} is a member", check)
        return worker

    def _ack(self, worker: Worker, num: int) -> None:
        shards = worker.shards("d")[:num]
        progress = worker.ack(shards)

        def check(job: Job) -> bool:
            dataset = job.shards.datasets["d"]
            over = dataset.epoch > shards[0].epoch
            return over or (all(dataset.done[s.index] for s in shards) and dataset.num_done >= progress.num_done)

        self._know(f"{worker.worker_id} has done {[s.index for s in shards]}", check)

    def _barrier(self, pool: ThreadPoolExecutor, workers: list[Worker], name: str) -> None:
        def arrive(worker: Worker) -> None:
            worker.barrier(name, step=1, timeout_s=DEADLINE_S)
            generation = worker.generation
            self._know(
                f"{worker.worker_id} was released from {name}",
                lambda job: job.membership.generation > generation or (name, 1) in job.barriers.released,
            )

        for arriving in [pool.submit(arrive, worker) for worker in workers]:
            arriving.result(2 * DEADLINE_S)

    def _checkpoint(self, worker: Worker, checkpoint_id: str, *, step: int) -> None:
        progress = worker.notify_checkpoint(checkpoint_id, step=step, epoch=0, path=f"/{checkpoint_id}", size_bytes=7)

        def check(job: Job) -> bool:
            if checkpoint_id in job.checkpoints.committed:
                return True
            attempt = job.checkpoints.attempts.get(checkpoint_id)
            return not progress.committed and attempt is not None and worker.worker_id in attempt.acks

        self._know(f"{worker.worker_id} wrote {checkpoint_id}", check)

    def _command(self, client: CoordinatorClient, worker: Worker) -> None:
        number = client.send_command("CHECKPOINT_NOW", worker_ids=[worker.worker_id], reason="now")
        self._know("the command was sent", lambda job: job.commands.last_id == number)
        received: list[int] = []

        def has_arrived() -> bool:
            worker.heartbeat()
            received.extend(command.command_id for command in worker.take_commands())
            return bool(received)

        until(has_arrived, "the command arrives")
        assert received == [number]
        worker.heartbeat()

    def _advance(self, client: CoordinatorClient, *, from_epoch: int) -> None:
        epoch = client.advance_epoch("d", from_epoch=from_epoch)
        assert epoch == from_epoch + 1
        self._know(f"epoch {epoch}", lambda job: job.shards.datasets["d"].epoch >= epoch)


def killable(nursery: Nursery, directory: Path, run: str = "killable_coordinator:serve") -> CoordinatorProcess:
    directory.mkdir(exist_ok=True)
    return CoordinatorProcess(nursery, directory, run=run, listen=f"unix:{directory}/c.sock", **SETTINGS)


@dataclass(frozen=True)
class Undisturbed:
    counts: dict[str, int]
    end: Any


@pytest.fixture(scope="module")
def undisturbed(_nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    directory = tmp_path_factory.mktemp("undisturbed")
    process = killable(_nursery, directory)
    child = process.start()
    scenario = Scenario(process.address)
    scenario.play()
    child.signal(15)
    counts = child.receive()["counts"]
    assert child.wait_gone() == 0
    return Undisturbed(counts, comparable(fold(process.state, directory / "end")))


def play_disturbed(nursery: Nursery, directory: Path, point: str, nth: int) -> Any:
    """Return the result of a scenario in which the coordinator dies once."""
    process = killable(nursery, directory)
    process.start(point=point, nth=nth)
    scenario = Scenario(process.address)
    with ThreadPoolExecutor(1) as pool:
        playing = pool.submit(scenario.play)
        try:
            assert process.child.wait_gone() == -9
            acknowledged = list(scenario.facts)
            core = fold(process.state, directory / "at-death")
            lost = [what for what, check in acknowledged if not check(core.jobs["default"])]
            assert lost == [], f"lost at {point} {nth}"
        finally:
            process.start()
        playing.result(2 * DEADLINE_S)
    assert process.child.terminate() == 0
    return comparable(fold(process.state, directory / "end"))


def test_the_scenario_without_a_kill_reaches_every_point(undisturbed: Undisturbed) -> None:
    assert set(undisturbed.counts) == {*STARTING, *RUNNING}
    num_commits = undisturbed.counts["before commit"]
    assert num_commits == undisturbed.counts["after commit"] == undisturbed.counts["before answers"] >= 15
    assert undisturbed.counts["before snapshot"] == undisturbed.counts["after snapshot"] >= 3
    (job,) = undisturbed.end
    assert [m["worker_id"] for m in job["members"]] == ["w0", "w1"]
    assert [c["checkpoint"]["checkpoint_id"] for c in job["checkpoints"]] == ["c1", "c2"]
    assert (job["generation"], job["last_command_id"], job["commands"]) == (4, 1, ())


@pytest.mark.slow
@pytest.mark.parametrize("point", RUNNING)
def test_a_kill_at_any_point_loses_nothing_acknowledged_and_gives_the_same_result(
    point: str, undisturbed: Undisturbed, nursery: Nursery, tmp_path: Path
) -> None:
    times = range(1, undisturbed.counts[point] + 1)

    def play(nth: int) -> Any:
        return play_disturbed(nursery, tmp_path / str(nth), point, nth)

    with ThreadPoolExecutor(JOBS) as pool:
        ends = dict(zip(times, pool.map(play, times), strict=True))
    assert [nth for nth, end in ends.items() if end != undisturbed.end] == []


@pytest.mark.parametrize("point", STARTING)
def test_a_kill_during_startup_does_not_change_the_state(
    point: str, undisturbed: Undisturbed, nursery: Nursery, tmp_path: Path
) -> None:
    process = killable(nursery, tmp_path)
    process.start()
    Scenario(process.address).play()
    process.kill()
    for _ in range(3):
        dying = nursery.fork("killable_coordinator:serve", settings=process.settings, point=point, nth=1)
        assert dying.wait_gone() == -9
    process.start()
    assert process.child.terminate() == 0
    assert comparable(fold(process.state, tmp_path / "end")) == undisturbed.end


def test_a_deregistration_without_an_answer_may_be_repeated(nursery: Nursery, tmp_path: Path) -> None:
    process = CoordinatorProcess(
        nursery, tmp_path, run="killable_coordinator:serve", **{**SETTINGS, "journal": {"snapshot_every": 1}}
    )
    process.start(point="before answers", nth=3)
    with CoordinatorClient(process.address, config=EAGER_CLIENT) as client, ThreadPoolExecutor(1) as pool:
        client.register_worker("w0")
        leaving = pool.submit(client.register_worker("w1").deregister)
        assert process.child.wait_gone() == -9
        process.start()
        leaving.result(DEADLINE_S)
        assert [w.worker_id for w in client.list_workers().workers] == ["w0"]


def test_a_release_received_by_half_of_the_members_holds_for_the_others(nursery: Nursery, tmp_path: Path) -> None:
    """Released workers continue and do not come back, so only the durable release can free the others."""
    process = killable(nursery, tmp_path, "killable_coordinator:serve_partial_release")
    process.start(num_released=2)
    with ExitStack() as stack:
        clients = [stack.enter_context(CoordinatorClient(process.address, config=EAGER_CLIENT)) for _ in range(4)]
        pool = stack.enter_context(ThreadPoolExecutor(4))
        workers = [client.register_worker(f"w{n}") for n, client in enumerate(clients)]
        for worker in workers:
            worker.wait_for_workers(4)
        waiting: list[Future[None]] = [pool.submit(w.barrier, "sync", timeout_s=2 * DEADLINE_S) for w in workers]
        until(lambda: sum(one.done() for one in waiting) == 2, "two workers are released")
        process.kill()
        assert sum(one.done() for one in waiting) == 2
        assert ("sync", 0) in fold(process.state, tmp_path / "at-death").jobs["default"].barriers.released
        process.start(num_released=99)
        for one in waiting:
            one.result(DEADLINE_S)
        assert {worker.refresh().generation for worker in workers} == {4}
        assert {client.num_connections for client in clients} == {2}


def test_a_coordinator_frozen_for_longer_than_the_lease_declares_no_worker_dead(
    strict_coordinator: CoordinatorProcess,
) -> None:
    with CoordinatorClient(strict_coordinator.address, config=EAGER_CLIENT) as client:
        workers = [client.register_worker(f"w{n}") for n in range(3)]
        before = client.list_workers()
        strict_coordinator.child.freeze()
        time.sleep(STRICT["lease_s"] * 1.3)
        strict_coordinator.child.thaw()
        client.register_dataset("d", total_samples=1, shard_size=1)
        until(
            lambda: all(w.silent_s < STRICT["heartbeat_s"] * 2 for w in client.list_workers().workers),
            "every worker sends heartbeats again",
        )
        after = client.list_workers()
        assert (after.generation, after.reason) == (before.generation, before.reason)
        assert [w.incarnation for w in after.workers] == [worker.incarnation for worker in workers]
        assert [worker.lost for worker in workers] == [None] * 3


def test_forty_workers_of_one_killed_session_are_one_generation(nursery: Nursery, tmp_path: Path) -> None:
    process = CoordinatorProcess(nursery, tmp_path, lease={**CALM, "suspicion_s": 0.2})
    process.start()
    with CoordinatorClient(process.address) as client:
        onlooker = client.register_worker("onlooker")
        node = nursery.fork("children:workers", address=process.address, worker_ids=[f"w{n:02d}" for n in range(40)])
        assert len(node.receive()["incarnations"]) == 40
        onlooker.wait_for_workers(41)
        before = onlooker.generation
        node.kill()
        until(lambda: len(client.list_workers().workers) == 1, "the forty workers are gone")
        after = client.list_workers()
        assert after.generation == before + 1
        assert "connection lost and not restored within 0.2 s" in after.reason
        assert "and 36 more" in after.reason


@pytest.fixture(autouse=True)
def _no_leftovers(nursery: Nursery) -> Iterator[None]:
    """Kill every child before its directory is deleted."""
    yield
    nursery.bury()
