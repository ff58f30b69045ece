"""Several ranks, each a real process with its own saver, save together while some of them are killed: a checkpoint is
committed as a whole or not at all, the survivors learn which rank is missing, and the previous one stays the latest.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_children import is_state
from servers import DEADLINE_S, Child, Nursery, until

from strata import CheckpointManager
from strata.coordinator.config import CoordinatorConfig, LeaseConfig
from strata.coordinator.embedded import EmbeddedCoordinator

SIZE = 3
SHORT_S = 4.0
"""The timeout of a save in which a rank is missing."""
LONG_S = 600.0
"""A timeout that no test reaches: a result that arrives earlier did not come from the timeout."""
TWO_HOURS_S = 7_200.0
QUICK = CoordinatorConfig(state="memory", lease=LeaseConfig(lease_s=1.5, heartbeat_s=0.2, suspicion_s=0.2, tick_s=0.02))


class Rank:
    """The test's end of a rank."""

    def __init__(self, nursery: Nursery, place: Path, number: int, address: str = "") -> None:
        self.number = number
        self.child: Child = nursery.fork("rank_children:rank_of", place=str(place), rank=number, address=address)
        assert self.child.receive()["is_there"]
        self.savers: list[int] = []

    def send(self, what: str, **arguments: Any) -> None:
        self.child.send(do=what, arguments=arguments)

    def receive(self) -> dict[str, Any]:
        return self.child.receive()

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        self.send(what, **arguments)
        answer = self.receive()
        assert not answer["error"], answer
        return answer

    def signal_saver(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.savers[-1], number)

    def kill_all(self) -> None:
        """Kill the trainer and its saver; the saver was stopped before, so it has written nothing."""
        self.child.kill()
        self.signal_saver(signal.SIGKILL)


class Job:
    def __init__(self, nursery: Nursery, place: Path, address: str = "") -> None:
        self.place = place
        self.ranks = [Rank(nursery, place, number, address) for number in range(SIZE)]

    def open(self, session: str, timeout_s: float, **options: Any) -> None:
        for rank in self.ranks:
            rank.send("open", size=SIZE, session=session, timeout_s=timeout_s, **options)
        for rank in self.ranks:
            rank.savers.append(rank.receive()["saver"])

    def save(self, step: int) -> str:
        """Stage a save on all ranks; return the id of the checkpoint."""
        for rank in self.ranks:
            rank.send("save", step=step)
        ids = {rank.receive()["id"] for rank in self.ranks}
        assert len(ids) == 1
        return ids.pop()

    def wait(self, *, but: int | None = None) -> list[dict[str, Any]]:
        """Wait for the last save on every rank but the dead one; return their answers."""
        waiting = [rank for rank in self.ranks if rank.number != but]
        for rank in waiting:
            rank.send("wait")
        return [rank.receive() for rank in waiting]

    def commit(self, step: int) -> str:
        saved_id = self.save(step)
        assert self.wait() == [{"error": "", "id": saved_id, "num_ranks": SIZE}] * SIZE
        return saved_id

    def load(self) -> int:
        """Load on all ranks; return the step that they agree on."""
        for rank in self.ranks:
            rank.send("load")
        answers = [rank.receive() for rank in self.ranks]
        assert answers == [{"error": "", "step": answers[0].get("step")}] * SIZE
        return int(answers[0]["step"])

    def looks(self, *, but: int | None = None) -> list[dict[str, Any]]:
        return [rank.ask("look") for rank in self.ranks if rank.number != but]


@pytest.fixture
def jobs(nursery: Nursery) -> Iterator[Any]:
    """Create jobs whose savers end with the test, including savers that the test has stopped."""
    made: list[Job] = []

    def make(place: Path, address: str = "") -> Job:
        made.append(Job(nursery, place, address))
        return made[-1]

    yield make
    nursery.bury()
    for job in made:
        for rank in job.ranks:
            for pid in rank.savers:
                end(pid)


def end(pid: int) -> None:
    """Kill a saver whose trainer is dead; it exits by itself unless it is stopped."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        assert select.select([descriptor], [], [], DEADLINE_S)[0], f"process {pid} is still running"
    finally:
        os.close(descriptor)


def age(place: Path) -> None:
    then_s = time.time() - TWO_HOURS_S
    for path in sorted(place.rglob("*"), reverse=True):
        os.utime(path, (then_s, then_s))


def directories(place: Path) -> set[str]:
    """Return the directories of all checkpoints, including aborted ones."""
    return {path.name for path in place.glob("step-*")}


def saved_without(job: Job, victim: Rank, step: int) -> str:
    """Stage a save on all ranks, then kill the victim and its saver before the saver writes anything."""
    victim.signal_saver(signal.SIGSTOP)
    saved_id = job.save(step)
    victim.kill_all()
    return saved_id


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.timeout(120)
def test_a_rank_that_is_killed_before_its_part_aborts_the_save_for_all(
    jobs: Any, nursery: Nursery, tmp_path: Path, number: int
) -> None:
    job: Job = jobs(tmp_path)
    job.open("first", LONG_S)
    first = job.commit(1)
    job.open("second", SHORT_S)
    victim = job.ranks[number]
    given_up = saved_without(job, victim, 2)

    for answer in job.wait(but=number):
        assert answer["error"] == "CheckpointAborted"
        expected = "rank 0 did not commit within" if number == 0 else "rank 1 wrote no part within"
        assert expected in answer["message"]
        assert answer["took_s"] < DEADLINE_S
    assert job.looks(but=number) == [{"error": "", "steps": [1], "newest": 1}] * 2
    assert not (tmp_path / given_up / "manifest.json").exists()

    age(tmp_path)
    job.ranks[number] = Rank(nursery, tmp_path, number)
    job.open("third", LONG_S)
    assert job.load() == 1
    third = job.commit(3)
    assert job.looks() == [{"error": "", "steps": [1, 3], "newest": 3}] * SIZE
    assert directories(tmp_path) == {first, third}, "no leftovers"
    with CheckpointManager(str(tmp_path)) as manager:
        assert [one.num_ranks for one in manager.list()] == [SIZE, SIZE]
        manager.verify()


@pytest.mark.parametrize("number", [0, 1])
def test_the_staged_snapshot_of_a_killed_rank_is_still_committed(jobs: Any, tmp_path: Path, number: int) -> None:
    job: Job = jobs(tmp_path)
    job.open("first", LONG_S)
    job.commit(1)
    victim = job.ranks[number]
    victim.signal_saver(signal.SIGSTOP)
    saved_id = job.save(2)
    victim.child.kill()
    victim.signal_saver(signal.SIGCONT)

    assert job.wait(but=number) == [{"error": "", "id": saved_id, "num_ranks": SIZE}] * 2
    assert job.looks(but=number) == [{"error": "", "steps": [1, 2], "newest": 2}] * 2


@pytest.mark.parametrize("number", [0, 2])
def test_a_rank_whose_saver_is_killed_aborts_the_others_at_once(jobs: Any, tmp_path: Path, number: int) -> None:
    job: Job = jobs(tmp_path)
    job.open("first", LONG_S)
    job.commit(1)
    victim = job.ranks[number]
    victim.signal_saver(signal.SIGSTOP)
    job.save(2)
    victim.signal_saver(signal.SIGKILL)

    for rank, answer in zip(job.ranks, job.wait(), strict=True):
        assert answer["error"] == "CheckpointAborted"
        assert "the saver process has exited (killed by signal 9)" in answer["message"]
        assert rank is victim or f"rank {number} failed" in answer["message"]
    assert job.looks() == [{"error": "", "steps": [1], "newest": 1}] * SIZE
    job.commit(2)
    assert job.looks() == [{"error": "", "steps": [1, 2], "newest": 2}] * SIZE


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_whose_state_cannot_be_stored_aborts_the_others_at_once(jobs: Any, tmp_path: Path, number: int) -> None:
    job: Job = jobs(tmp_path)
    job.open("first", LONG_S)
    job.commit(1)
    for rank in job.ranks:
        rank.send("save", step=2, is_bad=rank.number == number)
    answers = [rank.receive() for rank in job.ranks]
    assert [each["error"] for each in answers] == ["InvalidArgument" if i == number else "" for i in range(SIZE)]
    assert "bad is a builtins.object" in answers[number]["message"]

    for answer in job.wait(but=number):
        assert answer["error"] == "CheckpointAborted"
        assert f"rank {number} failed: InvalidArgument: bad is a builtins.object" in answer["message"]
    job.commit(2)
    assert job.looks() == [{"error": "", "steps": [1, 2], "newest": 2}] * SIZE


@pytest.mark.parametrize("number", [0, 1])
def test_with_a_coordinator_a_death_is_known_long_before_the_timeout(jobs: Any, tmp_path: Path, number: int) -> None:
    with EmbeddedCoordinator(QUICK) as coordinator:
        job: Job = jobs(tmp_path, coordinator.address)
        job.open("first", LONG_S, has_coordinator=True)
        job.commit(1)
        given_up = saved_without(job, job.ranks[number], 2)

        for answer in job.wait(but=number):
            assert answer["error"] == "CheckpointAborted"
            assert f"w{number}" in answer["message"]
            assert answer["took_s"] < DEADLINE_S
        assert job.looks(but=number) == [{"error": "", "steps": [1], "newest": 1}] * 2
        assert not (tmp_path / given_up / "manifest.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("moment", ["claim", "part"])
@pytest.mark.timeout(120)
def test_whenever_ranks_are_killed_every_listed_checkpoint_is_whole(
    jobs: Any, nursery: Nursery, tmp_path: Path, moment: str, number: int
) -> None:
    """No process is stopped before the kill, so the save may have reached any point."""
    job: Job = jobs(tmp_path)
    job.open("start", LONG_S)
    committed = [job.commit(1)]
    job.open("again", SHORT_S)
    victim = job.ranks[number]
    saved_id = job.save(2)
    signs = [tmp_path / saved_id / name for name in (f"{moment}-{number:05d}.json", "manifest.json")]
    until(lambda: any(sign.exists() for sign in signs), f"the {moment} of rank {number}")
    victim.signal_saver(signal.SIGKILL)
    victim.child.kill()

    answers = job.wait(but=number)
    assert {each["error"] for each in answers} <= {"", "CheckpointAborted"}
    exists = (tmp_path / saved_id / "manifest.json").exists()
    assert exists or all(each["error"] for each in answers), "no rank reported a commit that did not happen"
    assert exists or moment == "claim" or number == 0, "a rank whose part exists is not missed"
    committed += [saved_id] * exists
    steps = [1, 2] if exists else [1]
    assert job.looks(but=number) == [{"error": "", "steps": steps, "newest": steps[-1]}] * 2

    age(tmp_path)
    job.ranks[number] = Rank(nursery, tmp_path, number)
    job.open("once more", LONG_S)
    assert job.load() == steps[-1]
    committed.append(job.commit(3))
    assert job.looks() == [{"error": "", "steps": [*steps, 3], "newest": 3}] * SIZE
    assert directories(tmp_path) == set(committed)


def test_a_single_rank_commits_its_staged_snapshot_without_its_trainer(nursery: Nursery, tmp_path: Path) -> None:
    """With a coordinator, too: a single rank has no other rank to agree with."""
    with EmbeddedCoordinator(QUICK) as coordinator:
        rank = Rank(nursery, tmp_path, 0, coordinator.address)
        rank.savers.append(rank.ask("open", size=1, session="", timeout_s=LONG_S, has_coordinator=True)["saver"])
        saver = os.pidfd_open(rank.savers[0])
        try:
            rank.signal_saver(signal.SIGSTOP)
            saved_id = rank.ask("save", step=2)["id"]
            rank.child.kill()
            rank.signal_saver(signal.SIGCONT)
            assert select.select([saver], [], [], DEADLINE_S)[0], "the saver has finished and exited"
        finally:
            os.close(saver)
    with CheckpointManager(str(tmp_path)) as manager:
        assert [one.id for one in manager.list()] == [saved_id]
        assert is_state(manager.load(), 0, 2)
