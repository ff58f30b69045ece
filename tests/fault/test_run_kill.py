"""`strata run` with real workers that train together over gloo and are killed: every row is trained on exactly once per
epoch, and the weights are those of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from leftovers import nothing_is_left, processes_with
from runs import Run, write_rows
from servers import CoordinatorProcess, until

from strata.launch.control import Scale

EPOCHS = 2
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "data")


@pytest.fixture
def job(tmp_path: Path, data: Path) -> Iterator[Any]:
    """Create runs and remove them after the test."""
    made: list[Run] = []

    def make(*options: str, place: Path = tmp_path, script: Path | None = None) -> Run:
        made.append(Run(place, data, *options, script=script))
        return made[-1]

    with nothing_is_left(tmp_path):
        yield make
        for run in made:
            run.bury()


_undisturbed: dict[int, str] = {}


@pytest.fixture
def undisturbed(tmp_path: Path, job: Any) -> Any:
    """Return the digest of the weights after an undisturbed run."""

    def digest(num_workers: int) -> str:
        if num_workers not in _undisturbed:
            place = tmp_path / f"undisturbed-{num_workers}"
            place.mkdir()
            run = job("--workers", str(num_workers), place=place)
            run.start()
            assert run.wait()[0] == 0
            _undisturbed[num_workers] = checked(run, num_workers)
            assert [event["what"] for event in run.events()].count("started") == 1
        return _undisturbed[num_workers]

    return digest


def checked(run: Run, num_workers: int) -> str:
    """Check that every row was trained on once per epoch, on all ranks alike; return the digest of the weights."""
    results = run.results()
    assert [each["rank"] for each in results] == list(range(num_workers))
    assert [each["counts"] for each in results] == [[EPOCHS]] * num_workers
    digests = {each["digest"] for each in results}
    assert len(digests) == 1
    return digests.pop()


class Gate:
    """A gate at which workers wait, after a step that the test sets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.move(0)

    def move(self, step: int) -> None:
        draft = self.path.with_suffix(".new")
        draft.write_text(str(step))
        draft.replace(self.path)


@pytest.mark.parametrize("num_workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_killed_repeatedly_counts_every_row_once_and_ends_with_the_same_weights(
    job: Any, undisturbed: Any, num_workers: int, tmp_path: Path
) -> None:
    """Kill workers soon after a given step; a gate keeps them from running ahead."""
    rng = random.Random(num_workers)
    run = job("--workers", str(num_workers), "--max-restarts", "10")
    gate = Gate(tmp_path / "gate")
    run.start("--step-s", "0.05", "--gate", str(gate.path))
    for attempt in range(3):
        victim, more = rng.randrange(num_workers), rng.randrange(1, 14)
        if (num_workers, attempt) == (2, 0):
            victim, more = 1, 2  # before the first checkpoint, so the run starts from scratch
        start = int(run.wait_for(attempt, 0, r"restored (\d+)")[1])
        gate.move(start + more + 2)
        run.wait_for_step(attempt, start + more)
        run.kill(attempt, victim)
    gate.move(1_000)
    code, output = run.wait()
    assert code == 0, output
    assert checked(run, num_workers) == undisturbed(num_workers)
    assert {each["attempt"] for each in run.results()} == {3}
    what = [event["what"] for event in run.events()]
    assert what.count("failed") == 3
    assert what.count("chosen") >= what.count("restored") >= 1
    assert num_workers == 3 or run.found(1, 0, r"restored (\d+)")[1] == "0"


def test_scaling_up_and_down_in_the_middle_counts_every_row_once(job: Any, tmp_path: Path) -> None:
    run = job("--workers", "1:3")
    run.start("--step-s", "0.2", "--until", str(tmp_path / "hurry"))
    for attempt, num_workers in enumerate((2, 1, 3)):
        run.wait_for_step(attempt, int(run.wait_for(attempt, 0, r"restored (\d+)")[1]) + 4)
        run.ask(Scale(num_workers))
    refused = run.command("scale", run.name, "--servers", "2")
    assert refused.returncode == 2
    assert "the run has no parameter servers" in refused.stderr
    (tmp_path / "hurry").touch()
    refused = run.command("scale", run.name, "4")
    assert refused.returncode == 2
    assert "4 workers are outside 1:3" in refused.stderr or "is not active" in refused.stderr
    code, output = run.wait()
    assert code == 0, output
    checked(run, 3)
    assert [event["what"] for event in run.events()].count("failed") == 0


@pytest.mark.slow
def test_a_stopped_run_saves_first_and_resumes_at_the_same_row_as_does_a_killed_one(
    job: Any, undisturbed: Any, tmp_path: Path
) -> None:
    """Stop a run with either signal, then with a signal to all its processes, as systemd and batch systems do; finally,
    kill its agent.
    """

    def signal_agent(number: signal.Signals) -> None:
        run.agent.send_signal(number)

    def signal_all(number: signal.Signals) -> None:
        for pid in processes_with(f"STRATA_RUNS_DIR={run.place}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    run = job("--workers", "2")
    run.start("--step-s", "0.2", "--until", str(tmp_path / "hurry"))
    restored = 0
    ways = [(signal.SIGINT, signal_agent), (signal.SIGTERM, signal_agent), (signal.SIGTERM, signal_all)]
    for attempt, (number, send) in enumerate(ways):
        run.wait_for_step(attempt, restored + 8)
        send(number)
        code, output = run.wait()
        assert code == 128 + number, output
        assert "the workers have saved" in output, output
        stopped_at = run.last_step(attempt, 0)
        run.resume()
        restored = int(run.wait_for(attempt + 1, 0, r"restored (\d+)")[1])
        assert restored == stopped_at + 1

    run.wait_for_step(3, restored + 6)
    workers = [run.pid(3, rank) for rank in range(2)]
    run.agent.kill()
    run.agent.communicate()
    until(lambda: not any(is_alive(pid) for pid in workers), "the workers are gone")
    assert "interrupted" in run.command("ps", "--all").stdout
    (tmp_path / "hurry").touch()
    run.resume()
    code, output = run.wait()
    assert code == 0, output
    assert checked(run, 2) == undisturbed(2)


@pytest.mark.slow
def test_a_standby_takes_over_from_a_killed_coordinator_without_disturbing_the_run(
    job: Any, undisturbed: Any, nursery: Any, tmp_path: Path
) -> None:
    settings = {"state": str(tmp_path / "shared.db"), "leadership": {"leader_lease_s": 1.5, "poll_s": 0.02}}
    leader = CoordinatorProcess(nursery, tmp_path, **settings)
    standby = CoordinatorProcess(nursery, tmp_path, standby=True, **settings)
    leader.start()
    standby.start()
    run = job("--workers", "2", "--coordinator", f"{leader.address},{standby.address}")
    run.start("--step-s", "0.2", "--until", str(tmp_path / "hurry"))
    run.wait_for_step(0, 12)
    leader.kill()
    assert standby.child.receive()["leads"] is True
    (tmp_path / "hurry").touch()
    code, output = run.wait()
    assert code == 0, output
    assert checked(run, 2) == undisturbed(2)
    assert [event["what"] for event in run.events()].count("started") == 1


def test_a_hung_worker_is_detected_reported_and_replaced(job: Any, undisturbed: Any) -> None:
    run = job("--workers", "2", "--step-timeout-s", "10")
    run.start("--hang-at", "12")
    assert run.wait()[0] == 0
    assert "time.sleep(3600)" not in run.text(1, 0)
    assert "train_rows.py" in run.text(0, 0).split("step 11")[-1], "its stacks are in its log"
    hung = [event["text"] for event in run.events() if event["what"] == "hung" and event["attempt"] == 0]
    assert len(hung) == 1
    assert "no step for" in hung[0]
    assert checked(run, 2) == undisturbed(2)


def test_a_worker_that_fails_on_its_own_input_stops_the_run_with_the_reason_first(job: Any) -> None:
    run = job("--workers", "2", "--max-restarts", "50")
    run.start("--fail-at", "13")
    code, output = run.wait()
    assert code == 1
    lines = output.splitlines()
    first = next(line for line in lines if "failed" in line)
    assert "rank 1: exit code 1: ValueError: row" in first
    assert "3 times in a row at the same step" in output
    assert "is bad" in output
    assert [event["what"] for event in run.events()].count("failed") == 3, run.events()


def test_a_script_for_torchrun_starts_unchanged(job: Any, tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "print('total', int(total), os.environ['LOCAL_RANK'], flush=True)\n"
    )
    run = job("--workers", "2", script=script)
    run.start_plain()
    assert run.wait()[0] == 0
    assert [run.text(0, rank) for rank in range(2)] == ["total 2 0\n", "total 2 1\n"]


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
