"""Studies with real processes, whose workers, machines and drivers are killed with SIGKILL. Afterwards no trial is
lost, none has two results, and every trial has continued from its checkpoint.

`tests/unit/test_tune_driver.py` kills simulated processes at every point of a study.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from leftovers import nothing_is_left
from ray_cluster import LOOPBACK_ONLY, ray_nodes
from runs import SCRIPTS
from servers import CoordinatorProcess, Nursery, until

from strata import CoordinatorClient, Study
from strata.tune.journal import JOURNAL, read_journal
from strata.tune.state import events as e

pytest.importorskip("cloudpickle")
pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
LEASE = {"lease_s": 10.0, "heartbeat_s": 0.2, "suspicion_s": 2.0, "tick_s": 0.02}
NUM_STEPS = 8
HELD_STEP = 7
NUM_EPOCHS = 40
"""Of the fit that is given the other worker, in growing_trainer.py."""
STEPS_PER_EPOCH = 16
"""Of that fit on one worker."""
DEADLINE_S = 120.0


class Sweep:
    """A study and the programs that run it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.path = place / "runs" / "sweep"
        self.programs: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, script: str = "sweep.py", **variables: str) -> subprocess.Popen[str]:
        program = subprocess.Popen(
            [sys.executable, str(SCRIPTS / script), "--place", str(self.place), *arguments],
            cwd=self.place,
            env={**os.environ, "STRATA_RUNS_DIR": str(self.place / "runs"), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.programs.append(program)
        return program

    def facts(self) -> list[e.Event]:
        try:
            return read_journal(self.path / JOURNAL)[0]
        except FileNotFoundError:
            return []

    def starts(self) -> list[dict[str, Any]]:
        """Return the starts of processes: trial, rank, restored step and process id."""
        try:
            lines = (self.place / "starts.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def step(self, trial: int) -> int:
        return max(
            (fact.step for fact in self.facts() if isinstance(fact, e.Reported) and fact.trial == trial), default=0
        )

    def wait_for_step(self, trial: int, step: int) -> None:
        self._until(lambda: self.step(trial) >= step, f"trial {trial} has reported step {step}")

    def wait_for_facts(self, kind: type[e.Fact], number: int) -> None:
        self._until(lambda: sum(isinstance(fact, kind) for fact in self.facts()) >= number, f"{number} {kind.__name__}")

    def _until(self, condition: Any, what: str) -> None:
        def is_so() -> bool:
            ended = [each for each in self.programs if each.poll() not in (None, -signal.SIGKILL)]
            assert not ended, ended[0].communicate()[0]
            return bool(condition())

        until(is_so, what, deadline_s=DEADLINE_S)

    def kill(self, trial: int, rank: int = 0) -> None:
        """Kill the last process of a rank."""
        pids = [each["pid"] for each in self.starts() if (each["trial"], each["rank"]) == (trial, rank)]
        os.kill(pids[-1], signal.SIGKILL)

    def hurry(self) -> None:
        """Let steps take no time from now on."""
        (self.place / "hurry").touch()

    def finish(self, *programs: subprocess.Popen[str]) -> None:
        for program in programs:
            output, _ = program.communicate(timeout=DEADLINE_S)
            assert program.returncode == 0, output

    def check(self, num_trials: int) -> Study:
        study = Study.load(self.path)
        assert [each.number for each in study.trials] == list(range(num_trials))
        assert all(each.is_over for each in study.trials), study
        results = Counter(fact.trial for fact in self.facts() if isinstance(fact, e.Finished))
        assert set(results.values()) == {1}
        for trial in study.trials:
            assert trial.state in ("finished", "pruned")
            if trial.state == "finished":
                assert trial.values == (trial.config["x"] / NUM_STEPS,)  # type: ignore[operator]
        return study

    def bury(self) -> None:
        for program in self.programs:
            with contextlib.suppress(ProcessLookupError):
                program.kill()
            program.communicate()


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Sweep]:
    made = Sweep(tmp_path)
    with nothing_is_left(tmp_path, but="*ray*"):  # logs of a cluster, and files of a killed actor
        yield made
        made.bury()


def test_workers_and_the_driver_die_and_trials_continue_from_their_checkpoints(sweep: Sweep) -> None:
    driver = sweep.start()
    sweep.wait_for_step(0, 2)
    sweep.kill(0)
    sweep.wait_for_facts(e.Lost, 1)
    sweep.wait_for_facts(e.StopSent, 1)
    driver.kill()
    driver.wait()
    sweep.hurry()
    sweep.finish(sweep.start())

    sweep.check(4)
    steps: dict[int, list[int]] = {}
    for each in sweep.starts():
        steps.setdefault(each["trial"], []).append(each["step"])
    assert any(restored[-1] >= 1 for restored in steps.values()), "trials resumed from their checkpoints"
    for restored in steps.values():
        assert restored == sorted(restored), "no trial went back"


def test_a_killed_rank_restarts_all_ranks_of_its_trial_from_the_checkpoint(sweep: Sweep) -> None:
    program = sweep.start(
        "--workers-per-trial", "2", "--workers", "1", "--trials", "2", "--mode", "random", "--options", "{}"
    )
    sweep.wait_for_step(0, 3)
    sweep.kill(0, rank=1)
    sweep.wait_for_facts(e.Lost, 1)
    sweep.hurry()
    sweep.finish(program)

    study = sweep.check(2)
    assert [each.lease for each in study.trials] == [2, 1]
    of_first = [each for each in sweep.starts() if each["trial"] == 0]
    assert sorted(each["rank"] for each in of_first) == [0, 0, 1, 1]
    assert {each["world_size"] for each in of_first} == {2}
    resumed = {each["step"] for each in of_first[2:]}
    assert len(resumed) == 1
    assert resumed.pop() >= 2


def test_a_freed_worker_joins_the_best_trial_which_trains_on_every_row_once_through_kills(sweep: Sweep) -> None:
    driver = sweep.start(script="growing.py")
    best = _trial_with(sweep, x=0.1)
    _wait_for_starts(sweep, 3)
    sweep.wait_for_step(best, sweep.starts()[-1]["step"] + 2)
    sweep.kill(best, rank=1)
    sweep.wait_for_facts(e.Lost, 1)
    _wait_for_starts(sweep, 5)
    sweep.wait_for_step(best, sweep.starts()[-1]["step"] + 2)
    driver.kill()
    driver.wait()
    again = sweep.start(script="growing.py")
    _wait_for_starts(sweep, 7)
    sweep.hurry()
    sweep.finish(again)

    study = Study.load(sweep.path)
    assert [each.state for each in study.trials] == ["finished", "finished"]
    leases = [fact for fact in sweep.facts() if isinstance(fact, e.Leased) and fact.trial == best]
    assert [1 + len(each.extra_slots) for each in leases] == [1, 2, 2, 2]
    stops = [fact for fact in sweep.facts() if isinstance(fact, e.StopSent)]
    assert [(each.trial, each.why) for each in stops] == [(best, "grow")]
    assert set(json.loads((sweep.place / "counts.json").read_text())) == {1}, "every row counts once"
    started = sweep.starts()
    assert [each["world_size"] for each in started] == [1, 2, 2, 2, 2, 2, 2]
    assert started[0]["step"] == 0
    assert started[1]["step"] == leases[1].step >= _last_step(sweep, best, lease=1), "it saved before it stopped"


def test_a_freed_worker_joins_the_best_fit_of_a_trainer_which_trains_on_every_row_once_per_epoch_through_kills(
    sweep: Sweep,
) -> None:
    driver = sweep.start(script="growing_trainer.py", STRATA_CHECKPOINT_EVERY="3")
    best = _trial_with(sweep, epochs=NUM_EPOCHS)
    _wait_for_starts(sweep, 3, best)
    sweep.wait_for_step(best, sweep.step(best) + 1)
    sweep.kill(best, rank=1)
    sweep.wait_for_facts(e.Lost, 1)
    _wait_for_starts(sweep, 5, best)
    sweep.wait_for_step(best, sweep.step(best) + 1)
    driver.kill()
    driver.wait()
    again = sweep.start(script="growing_trainer.py", STRATA_CHECKPOINT_EVERY="3")
    _wait_for_starts(sweep, 7, best)
    sweep.hurry()
    sweep.finish(again)

    study = Study.load(sweep.path)
    assert [each.state for each in study.trials] == ["finished", "finished"]
    leases = [fact for fact in sweep.facts() if isinstance(fact, e.Leased) and fact.trial == best]
    assert [1 + len(each.extra_slots) for each in leases] == [1, 2, 2, 2]
    stops = [fact for fact in sweep.facts() if isinstance(fact, e.StopSent)]
    assert [(each.trial, each.why) for each in stops] == [(best, "grow")]
    found = json.loads((sweep.place / "counts.json").read_text())
    assert found["epochs"] == NUM_EPOCHS
    assert set(found["counts"]) == {NUM_EPOCHS}, "every row counts once per epoch"
    reported = [fact.step for fact in sweep.facts() if isinstance(fact, e.Reported) and fact.trial == best]
    assert reported == list(range(1, NUM_EPOCHS + 1)), "every epoch is reported once"
    started = [each for each in sweep.starts() if each["trial"] == best]
    assert [each["world_size"] for each in started] == [1, 2, 2, 2, 2, 2, 2]
    assert started[0]["step"] == 0
    steps_before = _last_step(sweep, best, lease=1) * STEPS_PER_EPOCH
    assert started[1]["step"] == leases[1].step >= steps_before, "it saved before it stopped"


def _trial_with(sweep: Sweep, **config: Any) -> int:
    found: list[int] = []

    def is_known() -> bool:
        found[:] = [fact.trial for fact in sweep.facts() if isinstance(fact, e.Asked) and fact.config == config]
        return bool(found)

    sweep._until(is_known, f"a trial with {config}")
    return found[0]


def _wait_for_starts(sweep: Sweep, number: int, trial: int | None = None) -> None:
    def is_so() -> bool:
        return len([each for each in sweep.starts() if trial in (None, each["trial"])]) >= number

    sweep._until(is_so, f"{number} processes have restored")


def _last_step(sweep: Sweep, trial: int, lease: int) -> int:
    reports = (fact for fact in sweep.facts() if isinstance(fact, e.Reported))
    return max(fact.step for fact in reports if (fact.trial, fact.lease) == (trial, lease))


def test_a_machine_and_the_driver_die_and_the_others_continue(sweep: Sweep, nursery: Nursery, tmp_path: Path) -> None:
    coordinator = CoordinatorProcess(nursery, tmp_path, lease=LEASE)
    coordinator.start()
    common = ("--nnodes", "3", "--workers", "3", "--trials", "12", "--coordinator", coordinator.address)
    driver = sweep.start(*common)
    sweep.wait_for_facts(e.Leased, 1)
    second, third = sweep.start(*common), sweep.start(*common)
    for machine in (second, third):
        sweep._until(lambda: any(_agent(each["pid"]) == machine.pid for each in sweep.starts()), "it runs a trial")  # noqa: B023
    third.kill()
    third.wait()
    sweep._until(
        lambda: any(isinstance(fact, e.Lost) and fact.is_blameless for fact in sweep.facts()),
        "the trial of the lost machine is lost",
    )
    driver.kill()
    driver.wait()
    sweep.hurry()
    sweep.finish(second)

    sweep.check(12)
    lost = [fact for fact in sweep.facts() if isinstance(fact, e.Lost)]
    assert any("is lost" in fact.reason and fact.is_blameless for fact in lost)
    assert any(fact.reason == "the study was restarted" for fact in lost)


def test_a_coordinator_that_is_killed_twice_and_removes_a_trial_costs_a_study_no_trial(
    sweep: Sweep, nursery: Nursery, tmp_path: Path
) -> None:
    """A worker without its place at the coordinator exits and is lost, which is no failure of its configuration."""
    coordinator = CoordinatorProcess(nursery, tmp_path, lease=LEASE)
    coordinator.start()
    common = ("--nnodes", "2", "--workers", "4", "--trials", "4")
    program = sweep.start(*common, "--hold", "--coordinator", coordinator.address)
    sweep.wait_for_step(0, 1)
    coordinator.restart()
    sweep.wait_for_facts(e.StopSent, 1)
    coordinator.restart()
    sweep._until(lambda: any(sweep.step(trial) == HELD_STEP - 1 for trial in range(4)), "a trial is held")
    held = next(trial for trial in range(4) if sweep.step(trial) == HELD_STEP - 1)
    with CoordinatorClient(coordinator.address) as client:
        client.drop_job(f"sweep.{held}", force=True, reason="to test what follows")
    sweep._until(
        lambda: any(isinstance(fact, e.Lost) and "exit code 75" in fact.reason for fact in sweep.facts()),
        "the removed worker is lost",
    )
    sweep.hurry()
    sweep.finish(program)

    sweep.check(4)
    assert not [fact for fact in sweep.facts() if isinstance(fact, e.Failed)]


def test_a_node_of_a_ray_cluster_dies_and_its_trial_resumes_elsewhere(sweep: Sweep) -> None:
    """Not all trials fit, so other machines may join: trials report over TLS."""
    pytest.importorskip("ray")
    with ray_nodes() as ray:
        ray.have(1)
        common = ("--engine", "ray", "--workers", "3", "--mode", "random", "--options", "{}")
        program = sweep.start(*common, RAY_ADDRESS=ray.address, **LOOPBACK_ONLY)
        sweep.wait_for_step(0, 2)
        sweep.wait_for_step(1, 2)
        endpoint = json.loads((sweep.path / "call" / "driver.json").read_text())
        assert endpoint["address"].startswith("127.0.0.1:")
        assert endpoint["token"]
        killed = [each["trial"] for each in sweep.starts() if ray.kill_node_of(each["pid"])]
        assert len(killed) == 1
        sweep.wait_for_facts(e.Lost, 1)
        sweep.hurry()
        sweep.finish(program)

    sweep.check(4)
    (lost,) = [fact for fact in sweep.facts() if isinstance(fact, e.Lost)]
    assert lost.is_blameless
    assert [each["step"] for each in sweep.starts() if each["trial"] == killed[0]][1] >= 1


def _parent(pid: int) -> int:
    """Return the process that forked a worker: one per machine."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _agent(pid: int) -> int:
    return _parent(_parent(pid))
