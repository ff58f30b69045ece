"""Tuning with real processes: the snippet of the roadmap, pruning, failures, kills of workers and of the driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strata import SearchSpace, Study, TrainingOrchestrator
from strata.errors import ConfigError, InvalidArgument, RunFailed, StrataError
from strata.launch.record.directory import create
from strata.launch.spec import RunSpec
from strata.tune.call import resume
from strata.tune.journal import JOURNAL, read_journal

pytest.importorskip("cloudpickle")


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STRATA_RUNS_DIR", str(tmp_path / "runs"))
    return tmp_path / "runs"


def space() -> SearchSpace:
    found = SearchSpace()
    found.add_float("learning_rate", min=1e-5, max=1e-2, log=True)
    found.add_int("batch_size", values=[32, 64, 128])
    return found


def test_the_snippet_of_the_roadmap_finds_a_good_configuration(runs: Path) -> None:
    def my_train_fn(config: dict[str, Any], trial: Any) -> None:
        import math

        for step in range(1, 10):
            trial.report(step=step, loss=abs(math.log10(config["learning_rate"]) + 3) + 1 / step)

    orchestrator = TrainingOrchestrator(hpt_mode="hyperband")
    study = orchestrator.tune(my_train_fn, space=space(), num_trials=12, name="sweep")

    assert study.is_complete
    assert len(study.trials) == 12
    states = [each.state for each in study.trials]
    assert states.count("finished") >= 1
    assert states.count("pruned") >= 3
    assert study.best.values[0] == min(each.values[0] for each in study.trials if each.state == "finished")
    frame = study.dataframe()
    assert list(frame["state"]) == states
    assert {"loss", "config.learning_rate", "config.batch_size"} <= set(frame.columns)
    assert Study.load(runs / "sweep").best.config == study.best.config


def test_a_function_that_fails_hangs_nothing_and_is_marked_with_its_last_words() -> None:
    def train(config: dict[str, Any]) -> float:
        if config["batch_size"] == 128:
            raise ValueError("out of luck")
        return float(config["batch_size"])

    grid = SearchSpace().add_int("batch_size", values=[32, 64, 128])
    study = TrainingOrchestrator(hpt_mode="grid").tune(train, space=grid, num_trials=9, max_failures=1, workers=2)

    assert study.best.config == {"batch_size": 32}
    assert {each.config["batch_size"]: each.state for each in study.trials} == {
        32: "finished",
        64: "finished",
        128: "failed",
    }
    failed = next(each for each in study.trials if each.state == "failed")
    assert failed.reason == "ValueError: out of luck"


def test_a_killed_trial_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    marks = str(tmp_path / "marks")

    def train(config: dict[str, Any]) -> None:
        import os
        import signal
        from pathlib import Path

        import torch

        import strata

        ctx = strata.init(every=1)
        model = torch.nn.Linear(1, 1)
        progress = ctx.restore({"model": model})
        with Path(marks).open("a") as file:
            file.write(f"{progress.step}\n")
        for step in range(progress.step + 1, 7):
            ctx.report(step=step, loss=1.0 / step)
            save = ctx.maybe_checkpoint({"model": model})
            if step == 4 and progress.is_fresh:
                if save is not None:
                    save.wait()
                os.kill(os.getpid(), signal.SIGKILL)
        ctx.close()

    one = SearchSpace().add_float("x", min=0, max=1)
    study = TrainingOrchestrator(hpt_mode="random").tune(train, space=one, num_trials=1, workers=1)

    assert study.best.values == (1.0 / 6,)
    assert study.best.lease == 2
    assert Path(marks).read_text().split() == ["0", "4"]
    assert study.best_checkpoint


def test_a_promoted_trial_continues_from_its_checkpoint(tmp_path: Path) -> None:
    marks = str(tmp_path / "marks")

    def train(config: dict[str, Any]) -> None:
        from pathlib import Path

        import torch

        import strata

        ctx = strata.init(every=1000)
        model = torch.nn.Linear(1, 1)
        progress = ctx.restore({"model": model})
        with Path(marks).open("a") as file:
            file.write(f"{config['x']} {progress.step}\n")
        for step in range(progress.step + 1, 9):
            ctx.report(step=step, loss=config["x"] / step)
            ctx.maybe_checkpoint({"model": model})
        ctx.close()

    grid = SearchSpace().add_float("x", values=[1.0, 2.0])
    options = {"eta": 2, "min_step": 2}
    study = TrainingOrchestrator(hpt_mode="asha").tune(train, space=grid, num_trials=2, workers=1, options=options)

    assert study.best.config == {"x": 1.0}
    assert study.best.values == (1.0 / 8,)
    assert [each.state for each in study.trials].count("pruned") == 1
    starts = [line.split() for line in Path(marks).read_text().splitlines()]
    resumed = [int(step) for x, step in starts if x == "1.0"]
    assert resumed[0] == 0
    assert all(step >= 2 for step in resumed[1:])
    assert len(resumed) == study.best.lease


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"workers": 2}, {("GPU-a", "GPU-b"), ("MIG-c", "MIG-d")}),
        ({"workers": 2, "workers_per_trial": 2}, {("GPU-a", "GPU-b"), ("MIG-c", "MIG-d")}),
        ({"workers": 4}, {("GPU-a",), ("GPU-b",), ("MIG-c",), ("MIG-d",)}),
    ],
    ids=["two", "two of two ranks", "four"],
)
def test_trials_that_run_together_see_different_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, int], shown: set[tuple[str, ...]]
) -> None:
    """There is no GPU here, only the variable that CUDA reads."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,MIG-c,MIG-d")
    num_trials, num_ranks = arguments["workers"], arguments["workers"] * arguments.get("workers_per_trial", 1)

    def train(config: dict[str, Any], trial: Any) -> float:
        import os
        import time

        (tmp_path / f"{trial.number}-{trial.rank}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
        deadline_s = time.monotonic() + 50
        while len(list(tmp_path.glob("*-*"))) < num_ranks:  # all of them run at the same time
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        return 0.0

    study = TrainingOrchestrator().tune(train, space=space(), num_trials=num_trials, **arguments)  # type: ignore[arg-type]

    assert [each.state for each in study.trials] == ["finished"] * num_trials
    seen = {each.name: tuple(each.read_text().split(",")) for each in tmp_path.glob("*-*")}
    assert len(seen) == num_ranks
    assert set(seen.values()) == shown
    by_trial = {(name.partition("-")[0], devices) for name, devices in seen.items()}
    assert len(by_trial) == num_trials, "all ranks of a trial see the same devices"


def test_a_function_that_reports_through_a_context_and_never_saves_stops_at_its_next_report(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        import strata

        ctx = strata.init()
        for step in range(1, 30):
            ctx.report(step=step, loss=config["learning_rate"])
            with (tmp_path / f"{config['learning_rate']}").open("a") as file:
                file.write(f"{step}\n")
        ctx.close()

    study = TrainingOrchestrator(hpt_mode="asha").tune(train, space=space(), num_trials=4, workers=1)

    ranked = sorted(study.trials, key=lambda trial: trial.config["learning_rate"])
    assert (ranked[0].state, ranked[-1].state) == ("finished", "pruned")
    steps = (tmp_path / f"{ranked[-1].config['learning_rate']}").read_text().split()
    assert "29" not in steps


def test_a_trial_writes_everything_before_it_leaves_whether_it_is_pruned_or_returns(tmp_path: Path) -> None:
    """A trial exits without the teardown of modules, which takes longer than the start of the next trial."""

    def train(config: dict[str, Any], trial: Any) -> None:
        import atexit
        import sys
        import threading

        place = tmp_path / str(trial.number)
        place.mkdir()
        sys.left_open = (place / "open").open("w")  # type: ignore[attr-defined]
        sys.left_open.write("written")  # type: ignore[attr-defined]
        atexit.register((place / "atexit").write_text, "written")
        main = threading.current_thread()
        threading.Thread(target=lambda: (main.join(30), (place / "thread").write_text("written"))).start()
        print("printed", end="")
        for step in range(1, 4):
            trial.report(step=step, loss=config["x"] * trial.number)

    one = SearchSpace().add_float("x", values=[1.0, 2.0])
    study = TrainingOrchestrator(hpt_mode="asha").tune(
        train, space=one, num_trials=4, workers=1, options={"kind": "stop"}, seed=1
    )

    assert {each.state for each in study.trials} == {"finished", "pruned"}
    for trial in study.trials:
        place = tmp_path / str(trial.number)
        found = {name: (place / name).read_text() for name in ("open", "atexit", "thread")}
        assert set(found.values()) == {"written"}, (trial.state, found)
    logs = sorted((study.path / "logs").glob("*/rank-0.log"))
    assert ["printed" in each.read_text() for each in logs] == [True] * 4


def test_a_poor_member_of_a_population_continues_from_the_checkpoint_of_a_good_one(tmp_path: Path) -> None:
    marks = str(tmp_path / "marks")

    def train(config: dict[str, Any], trial: Any) -> None:
        import json
        from pathlib import Path

        import numpy as np

        import strata

        class Weights:
            """A model whose state names the trials that have trained it."""

            def __init__(self) -> None:
                self.trained_by = np.zeros(2, dtype=np.int64)

            def state_dict(self) -> dict[str, Any]:
                return {"trained_by": self.trained_by}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                self.trained_by[:] = np.asarray(state["trained_by"])

        ctx = strata.init(every=1, saver="thread")
        weights = Weights()
        progress = ctx.restore({"weights": weights})
        start = {"trial": trial.number, "step": progress.step, "by": weights.trained_by.tolist(), "x": config["x"]}
        with Path(marks).open("a") as file:
            file.write(json.dumps(start) + "\n")
        for step in range(progress.step + 1, 9):
            weights.trained_by[trial.number] += 1
            ctx.report(step=step, loss=config["x"])
            ctx.maybe_checkpoint({"weights": weights})
        ctx.close()

    grid = SearchSpace().add_float("x", min=0.1, max=10.0)
    grid.enqueue({"x": 0.5})
    grid.enqueue({"x": 8.0})
    options = {"interval": 2, "fraction": 0.5}
    study = TrainingOrchestrator(hpt_mode="pbt").tune(
        train, space=grid, num_trials=2, workers=1, options=options, name="population"
    )

    good, poor = study.trials
    assert [good.state, poor.state] == ["finished", "finished"]
    assert poor.donors
    assert set(poor.donors) == {0}
    starts = [json.loads(line) for line in Path(marks).read_text().splitlines()]
    copied = next(each for each in starts if each["trial"] == 1 and each["by"][0])
    assert copied["by"][0] == copied["step"], "the weights are those of the good trial at that step"
    assert copied["x"] != 8.0
    assert Path(study.best_checkpoint).is_dir()
    directories = sorted(each.name for each in (study.path / "trials" / "00001").iterdir())
    assert directories == [f"checkpoints-{poor.origin:03}"], "its earlier histories are removed"
    assert Study.load(study.path).trials[1].donors == poor.donors


def test_the_same_seed_and_one_worker_give_the_same_trials_and_results() -> None:
    def train(config: dict[str, Any], trial: Any) -> None:
        for step in range(1, 10):
            trial.report(step=step, loss=config["learning_rate"] * config["batch_size"] / step)

    def tune(seed: int) -> list[Any]:
        found = TrainingOrchestrator(hpt_mode="bohb").tune(train, space=space(), num_trials=8, workers=1, seed=seed)
        return [(each.config, each.state, each.step, each.values, each.lease) for each in found.trials]

    first = tune(3)

    assert first == tune(3)
    assert {state for _, state, *_ in first} == {"finished", "pruned"}


def test_an_optuna_sampler_object_is_a_mode() -> None:
    optuna = pytest.importorskip("optuna")

    def train(config: dict[str, Any]) -> float:
        return float(config["batch_size"])

    sampler = optuna.samplers.TPESampler(seed=1)
    study = TrainingOrchestrator(hpt_mode=sampler).tune(train, space=space(), num_trials=4, mode="max")

    assert study.best.values == (max(each.config["batch_size"] for each in study.trials),)


def test_a_study_whose_driver_was_killed_continues_and_no_trial_has_two_results(tmp_path: Path, runs: Path) -> None:
    script = tmp_path / "sweep.py"
    script.write_text(
        textwrap.dedent(
            """
            from strata import SearchSpace, TrainingOrchestrator

            def train(config, trial):
                for step in range(1, 4):
                    trial.report(step=step, loss=config["x"] + 1 / step)

            if __name__ == "__main__":
                space = SearchSpace().add_float("x", min=0, max=1)
                study = TrainingOrchestrator().tune(train, space=space, num_trials=8, workers=2, name="killed")
                print(study)
            """
        )
    )
    command = [sys.executable, str(script)]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    first = subprocess.Popen(command, cwd=elsewhere)
    journal = runs / "killed" / "study.jsonl"
    while first.poll() is None and (not journal.exists() or journal.read_text().count('"Finished"') < 2):
        time.sleep(0.01)  # until two results are durable
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    elsewhere.rmdir()

    subprocess.run(command, check=True, timeout=300, cwd=tmp_path)

    study = Study.load(runs / "killed")
    assert [each.state for each in study.trials] == ["finished"] * 8
    assert journal.read_text().count('"Finished"') == 8


def test_a_function_that_never_works_ends_the_study_with_the_cause() -> None:
    def train(config: dict[str, Any]) -> None:
        raise NameError("name 'modle' is not defined")

    with pytest.raises(RunFailed, match="the first 10 trials failed, the last with: NameError: name 'modle'"):
        TrainingOrchestrator().tune(train, space=space(), num_trials=50, max_failures=1, workers=4)


def test_invalid_arguments_are_refused_with_the_cure() -> None:
    tuner = TrainingOrchestrator(hpt_mode="best")
    with pytest.raises(ConfigError, match="hpt_mode='best' is unknown; use random, grid"):
        tuner.tune(print, space=space())
    with pytest.raises(ConfigError, match="space has no parameters"):
        tuner.tune(print, space=SearchSpace())
    with pytest.raises(ConfigError, match=r"space is a dict; build one with SearchSpace\(\)"):
        tuner.tune(print, space={"lr": [1, 2]})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"train_fn='train\.py' is not a function; pass one, or start a script"):
        tuner.tune("train.py", space=space())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="mode='up' is unknown; use 'min' or 'max'"):
        tuner.tune(print, space=space(), mode="up")


@pytest.mark.parametrize(
    ("mode", "arguments", "message"),
    [
        ("random", {"num_trials": 0}, "num_trials=0"),
        ("random", {"max_failures": 0}, "max_failures=0"),
        ("random", {"metric": ["loss", "loss"]}, "loss"),
        ("random", {"metric": "state"}, "'state' cannot be the name of a metric"),
        ("random", {"constraints": ["step <= 3"]}, "'step' cannot be the name of a metric"),
        ("asha", {"options": {"eta": 1}}, "eta=1"),
        ("asha", {"options": {"rungs": 3}}, "rungs"),
        ("random", {"warm_start": ["nothing"]}, "warm_start='nothing'"),
        ("grid", {"space": SearchSpace().add_float("x", min=0, max=1)}, "grid"),
    ],
)
def test_refused_arguments_leave_no_directory(runs: Path, mode: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(StrataError, match=message):
        TrainingOrchestrator(hpt_mode=mode).tune(print, **{"space": space(), "name": "sweep", **arguments})

    assert not runs.exists() or not list(runs.iterdir())


def test_a_function_that_cannot_be_pickled_leaves_no_directory(runs: Path) -> None:
    lock = threading.Lock()

    def train(config: dict[str, Any]) -> float:
        with lock:
            return 1.0

    with pytest.raises(InvalidArgument, match="cannot be pickled"):
        TrainingOrchestrator().tune(train, space=space(), name="sweep")

    assert not list(runs.iterdir())


KILLED_AT_ITS_START = """
    import os, signal, sys
    from strata import SearchSpace, TrainingOrchestrator
    from strata.tune.engine import Engine

    def train(config):
        return config["x"]

    if __name__ == "__main__":
        Engine.run = lambda self: os.kill(os.getpid(), signal.SIGKILL)
        space = SearchSpace().add_float("x", min=0, max=1)
        TrainingOrchestrator().tune(train, space=space, num_trials=2, workers=1, name="sweep")
"""


def returning_x() -> Callable[[dict[str, Any]], float]:
    return lambda config: float(config["x"])


@pytest.mark.parametrize("how", ["tune", "resume"])
def test_a_driver_killed_before_its_first_trial_leaves_a_study_that_can_be_continued(
    tmp_path: Path, runs: Path, how: str
) -> None:
    script = tmp_path / "sweep.py"
    script.write_text(textwrap.dedent(KILLED_AT_ITS_START))
    killed = subprocess.run([sys.executable, str(script)], timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert Study.load(runs / "sweep").trials == []

    if how == "tune":
        one = SearchSpace().add_float("x", min=0, max=1)
        study = TrainingOrchestrator().tune(returning_x(), space=one, num_trials=2, workers=1, name="sweep")
    else:
        study = resume("sweep", quiet=True)

    assert [each.state for each in study.trials] == ["finished"] * 2
    kinds = [type(fact).__name__ for fact in read_journal(study.path / JOURNAL)[0]]
    assert kinds[:3] == ["Opened", "Resized", "Asking"], "a new study recovers nothing"


@pytest.mark.parametrize("has_journal", [False, True])
def test_a_directory_without_a_first_fact_is_accepted_by_its_name_and_resume_names_the_cure(
    runs: Path, *, has_journal: bool
) -> None:
    """As a driver of an earlier version leaves it that was killed before it wrote its journal."""
    one = SearchSpace().add_float("x", min=0, max=1)
    arguments: dict[str, Any] = {"space": one, "num_trials": 1, "workers": 1, "name": "sweep"}
    TrainingOrchestrator().tune(returning_x(), **arguments)
    (runs / "sweep" / JOURNAL).unlink()
    if has_journal:
        (runs / "sweep" / JOURNAL).touch()
    with pytest.raises(ConfigError, match=r"study sweep was killed before it began.* call tune with name='sweep'"):
        resume("sweep")

    study = TrainingOrchestrator().tune(returning_x(), **arguments)

    assert [each.state for each in study.trials] == ["finished"]


def test_the_name_of_a_run_is_refused_for_a_study(runs: Path) -> None:
    create(RunSpec(name="sweep", script="train.py", directory=str(runs.parent), checkpoints="none"))

    with pytest.raises(ConfigError, match="run sweep already exists"):
        TrainingOrchestrator().tune(returning_x(), space=space(), name="sweep")
    assert [each.name for each in (runs / "sweep").iterdir()] == ["run.json"]


def test_ctrl_c_ends_a_study_with_one_line_that_names_how_to_continue(tmp_path: Path, runs: Path) -> None:
    script = tmp_path / "sweep.py"
    script.write_text(
        textwrap.dedent(
            """
            import time
            from strata import SearchSpace, TrainingOrchestrator

            def train(config, trial):
                for step in range(1, 5_000):
                    trial.report(step=step, loss=config["x"])
                    time.sleep(0.01)

            if __name__ == "__main__":
                space = SearchSpace().add_float("x", min=0, max=1)
                TrainingOrchestrator().tune(train, space=space, num_trials=8, workers=2, name="interrupted")
            """
        )
    )
    process = subprocess.Popen([sys.executable, str(script)], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    journal = runs / "interrupted" / "study.jsonl"
    while process.poll() is None and (not journal.exists() or '"Reported"' not in journal.read_text()):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=50)

    assert process.returncode == -signal.SIGINT
    assert errors.splitlines()[-1].endswith("call tune with name='interrupted' to continue it")
    assert "Traceback" not in errors


def test_a_trial_that_hangs_is_killed_and_the_sweep_goes_on(runs: Path) -> None:
    def train(config: dict[str, Any], trial: Any) -> None:
        import time

        trial.report(step=1, loss=config["x"])
        if config["x"] == 2.0:
            time.sleep(600)

    grid = SearchSpace().add_float("x", values=[1.0, 2.0, 3.0])
    study = TrainingOrchestrator(hpt_mode="grid").tune(
        train, space=grid, num_trials=3, workers=2, max_failures=1, report_timeout=8.0
    )

    assert {each.config["x"]: each.state for each in study.trials} == {1.0: "finished", 2.0: "failed", 3.0: "finished"}
    failed = next(each for each in study.trials if each.state == "failed")
    assert failed.reason == "it reported nothing for 8 s"


def test_constraints_callbacks_a_pruner_and_a_warm_start_in_one_study(runs: Path) -> None:
    optuna = pytest.importorskip("optuna")
    from strata.tune.callbacks import StudyCallback

    ended: list[int] = []

    class Recorder(StudyCallback):
        def on_trial_end(self, study: Study, trial: Any) -> None:
            ended.append(trial.number)

        def on_study_end(self, study: Study) -> None:
            raise ValueError("a callback must not end the study")

    def train(config: dict[str, Any], trial: Any) -> None:
        trial.report(step=1, latency=config["x"])  # once, and before the objective
        for step in range(2, 5):
            trial.report(step=step, loss=1 - config["x"] + 1 / step)

    one = SearchSpace().add_float("x", min=0, max=1)
    arguments: dict[str, Any] = {"space": one, "workers": 1, "constraints": ["latency <= 0.5"]}
    first = TrainingOrchestrator().tune(train, num_trials=4, name="first", **arguments)
    mode = (optuna.samplers.TPESampler(seed=1), optuna.pruners.ThresholdPruner(upper=1.4, n_warmup_steps=1))
    study = TrainingOrchestrator(hpt_mode=mode).tune(
        train, num_trials=6, warm_start=[first, "first", runs / "first"], callbacks=[Recorder()], **arguments
    )

    assert study.num_known == 12
    assert ended == [each.number for each in study.trials]
    for trial in study.trials:
        assert trial.state == ("pruned" if float(trial.config["x"] or 0) < 0.1 else "finished")
    assert all(each.values[1] <= 0.5 for each in study.best_trials)
    assert study.best.values[1] <= 0.5


def test_the_next_question_is_answered_while_trials_run(tmp_path: Path) -> None:
    """With two slots, a trial ends only once the sampler has answered the question that its own slot continues with."""
    optuna = pytest.importorskip("optuna")

    class Slow(optuna.samplers.GPSampler):  # type: ignore[misc]
        def sample_relative(self, study: Any, trial: Any, space: Any) -> Any:
            found = super().sample_relative(study, trial, space)
            (tmp_path / str(trial.number)).touch()
            return found

    def train(config: dict[str, Any], trial: Any) -> None:
        import time

        deadline_s = time.monotonic() + 40.0
        while trial.number < 2 and not (tmp_path / str(trial.number + 2)).exists():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"nobody asked for trial {trial.number + 2}")
            time.sleep(0.01)
        trial.report(step=1, loss=config["learning_rate"])

    from strata.tune.modes import find_mode

    assert find_mode("bayesian").ask_ahead == 1
    study = TrainingOrchestrator(hpt_mode=Slow(seed=1, n_startup_trials=0)).tune(
        train, space=space(), num_trials=4, workers=2, max_failures=1
    )

    assert [(trial.state, trial.reason) for trial in study.trials] == [("finished", "")] * 4
