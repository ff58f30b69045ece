"""Finished jobs and large jobs, from clients and the command line."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from servers import EAGER_CLIENT, STRATA, CoordinatorProcess, until

from strata.coordinator.client import CoordinatorClient
from strata.coordinator.config import CoordinatorConfig, Limits
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.coordinator.replay import Replay
from strata.coordinator.serve.backend import EngineBackend
from strata.errors import JobInUse, StaleGeneration, UnknownJob


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many calls of each method reached the coordinator of this process."""
    counted: Counter[str] = Counter()
    submit = EngineBackend.submit

    def count(self: EngineBackend, method: Any, request: Any, done: Any) -> None:
        counted[method.name] += 1
        submit(self, method, request, done)

    monkeypatch.setattr(EngineBackend, "submit", count)
    return counted


@pytest.fixture
def small_pages(calls: Counter[str]) -> Iterator[CoordinatorClient]:
    config = CoordinatorConfig(state="memory", limits=Limits(max_workers_per_reply=4))
    with EmbeddedCoordinator(config) as coordinator, CoordinatorClient(coordinator.address) as client:
        yield client


def jobs(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([STRATA, "jobs", *args], capture_output=True, text=True, check=False)


def test_10_workers_are_listed_in_3_pages_of_4(small_pages: CoordinatorClient, calls: Counter[str]) -> None:
    for number in range(10):
        small_pages.register_worker(f"w{number}")
    members = small_pages.list_workers()
    assert [(w.worker_id, w.rank) for w in members.workers] == [(f"w{n}", n) for n in range(10)]
    assert (members.generation, calls["ListWorkers"]) == (10, 3)
    for page_size, num_pages in ((1, 10), (100, 3)):
        calls.clear()
        assert len(small_pages.list_workers(page_size=page_size).workers) == 10
        assert calls["ListWorkers"] == num_pages


def test_refresh_reads_the_workers_own_rank_not_the_list_of_all_workers(
    small_pages: CoordinatorClient, calls: Counter[str]
) -> None:
    first = small_pages.register_worker("w0")
    for number in range(1, 10):
        small_pages.register_worker(f"w{number}")
    standing = first.refresh()
    assert (standing.generation, standing.rank, standing.world_size) == (10, 0, 10)
    assert (first.generation, first.rank, first.world_size) == (10, 0, 10)
    first.wait_for_workers(10)
    assert (calls["ListWorkers"], calls["GetMembership"]) == (0, 2)


def test_a_dropped_job_is_gone_even_after_kill_9_and_its_workers_are_notified(coordinator: CoordinatorProcess) -> None:
    with (
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client,
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as boss,
    ):
        worker = client.register_worker("a", job_id="old")
        with pytest.raises(JobInUse, match="has 1 worker"):
            boss.drop_job("old")
        assert boss.drop_job("old", force=True, generation=worker.generation, reason="a mistake")
        until(lambda: worker.lost is not None, "the worker hears that its job is gone")
        assert isinstance(worker.lost, UnknownJob)
        with pytest.raises(UnknownJob):
            worker.refresh()
        coordinator.restart()
        assert boss.list_jobs() == []
        assert not boss.drop_job("old", force=True)
        again = boss.register_worker("a", job_id="old")
        assert (again.incarnation, again.rank, again.world_size) == (2, 0, 1)
        assert again.generation > worker.generation
        with pytest.raises(StaleGeneration, match="a new job of that name"):
            boss.drop_job("old", force=True, generation=worker.generation)
    with Replay(str(coordinator.state)) as story:
        events = [line.words for line in story.lines(job_id="old")]
    assert "the job was dropped while it had 1 worker: a mistake" in events


def test_jobs_are_listed_and_dropped_on_the_command_line(coordinator: CoordinatorProcess) -> None:
    at = ("--address", coordinator.address)
    assert jobs("ls", *at).stdout == f"no jobs at {coordinator.address}\n"
    with CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client:
        client.register_dataset("d", job_id="over", total_samples=10, shard_size=1)
        client.register_worker("a", job_id="busy")
        listed = jobs("ls", *at)
        assert [line.split() for line in listed.stdout.splitlines()[1:]] == [
            ["over", "0", "0", "1", "0"],
            ["busy", "1", "1", "0", "0"],
        ]
        refused = jobs("drop", "busy", *at)
        assert refused.returncode == 1
        assert "wait until all have left, or set force" in refused.stderr
        unknown = jobs("drop", "bussy", *at)
        assert (unknown.returncode, unknown.stdout) == (1, "")
        assert "has no job 'bussy'" in unknown.stderr
        assert jobs("drop", "over", *at).stdout == "dropped job over\n"
        assert jobs("drop", "busy", "--force", *at).stdout == "dropped job busy; 1 worker evicted\n"
    assert json.loads(jobs("ls", "--json", *at).stdout) == {"jobs": []}
