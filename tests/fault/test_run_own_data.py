"""`strata run` with the user's own datasets, which torch prefetches: killed and scaled, every row counts once. A
per-rank loader refuses another number of workers.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from leftovers import nothing_is_left
from runs import Run

from strata.errors import ConfigError
from strata.launch.control import Scale

EPOCHS = 2
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    made: list[Run] = []

    def make(*options: str, place: Path = tmp_path) -> Run:
        place.mkdir(exist_ok=True)
        made.append(Run(place, place, *options))
        return made[-1]

    with nothing_is_left(tmp_path, but="pymp-*"):  # temporary directories of killed multiprocessing workers
        yield make
        for run in made:
            run.bury()


def checked(run: Run, num_workers: int) -> str:
    """Check that every row was trained on once per epoch, on all ranks alike; return the digest of the weights."""
    results = run.results()
    assert [each["rank"] for each in results] == list(range(num_workers))
    assert [each["counts"] for each in results] == [[EPOCHS]] * num_workers
    digests = {each["digest"] for each in results}
    assert len(digests) == 1
    return digests.pop()


@pytest.mark.slow
def test_a_killed_run_with_prefetching_workers_ends_with_the_weights_of_an_undisturbed_one(
    job: Any, tmp_path: Path
) -> None:
    """Kill a worker in the first and in the second epoch; rows that were only prefetched do not count."""
    undisturbed = job("--workers", "2", place=tmp_path / "undisturbed")
    undisturbed.start("--own", "dataset")
    assert undisturbed.wait()[0] == 0
    run = job("--workers", "2")
    run.start("--own", "dataset", "--step-s", "0.05", "--until", str(tmp_path / "hurry"))
    for attempt, (step, victim) in enumerate(((12, 1), (38, 0))):
        run.wait_for_step(attempt, step)
        run.kill(attempt, victim)
    (tmp_path / "hurry").touch()
    code, output = run.wait()
    assert code == 0, output
    assert int(run.found(1, 0, r"restored (\d+)")[1]) >= 10
    assert int(run.found(2, 0, r"restored (\d+)")[1]) >= 35
    assert checked(run, 2) == checked(undisturbed, 2)


def test_with_more_and_fewer_workers_and_a_kill_every_row_of_an_own_loader_counts_once(
    job: Any, tmp_path: Path
) -> None:
    run = job("--workers", "1:3")
    run.start("--own", "sampler", "--step-s", "0.1", "--until", str(tmp_path / "hurry"))
    for attempt, num_workers in enumerate((1, 2)):
        run.wait_for_step(attempt, int(run.wait_for(attempt, 0, r"restored (\d+)")[1]) + 3)
        run.ask(Scale(num_workers))
    run.wait_for_step(2, int(run.wait_for(2, 0, r"restored (\d+)")[1]) + 7)
    run.kill(2, 1)
    (tmp_path / "hurry").touch()
    code, output = run.wait()
    assert code == 0, output
    checked(run, 2)


def test_a_per_rank_loader_refuses_another_number_of_workers_and_training_continues(job: Any, tmp_path: Path) -> None:
    """`strata scale` and `strata resume --workers` are refused; with its own number of workers, the run resumes."""
    run = job("--workers", "1:3")
    run.start("--own", "stateful", "--step-s", "0.2", "--until", str(tmp_path / "hurry"))
    run.wait_for_step(0, 6)
    refused = run.command("scale", run.name, "2")
    assert refused.returncode != 0
    assert "2 workers cannot resume from a checkpoint of 3 workers" in refused.stderr
    assert "ctx.dataloader(dataset" in refused.stderr
    with pytest.raises(ConfigError, match="is per rank"):
        run.ask(Scale(1))
    run.wait_for_step(0, 8)
    run.agent.send_signal(signal.SIGINT)
    assert run.wait()[0] == 130
    refused = run.command("resume", run.name, "--workers", "2")
    assert refused.returncode != 0
    assert "2 workers cannot resume from a checkpoint of 3 workers" in refused.stderr
    (tmp_path / "hurry").touch()
    run.resume("--workers", "1:3")
    code, output = run.wait()
    assert code == 0, output
    results = run.results()
    assert len(results) == 3
    # 900 rows in batches of 16 on 3 ranks: none is padded, and so each counts once
    assert [each["counts"] for each in results] == [[EPOCHS]] * 3
    assert [event["what"] for event in run.events()].count("started") == 2
