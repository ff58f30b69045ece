"""What a study gives after its trials: the best ones, importances, plots, files, warm starts; and callbacks."""

from __future__ import annotations

import csv
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from tune_studies import mixed_space, run_study

from strata.errors import ConfigError, RunFailed
from strata.tune import SearchSpace
from strata.tune.callbacks import MAX_ERRORS, Callbacks, StudyCallback
from strata.tune.modes import find_mode
from strata.tune.state import events as e
from strata.tune.study import Study
from strata.tune.warm_start import warm_start

TWO: dict[str, Any] = {"metrics": ("loss", "latency"), "directions": ("min", "min")}
STOPPING: dict[str, Any] = {"scheduler": "asha", "scheduler_options": {"kind": "stop", "eta": 3}}


@pytest.fixture(scope="module")
def study() -> Study:
    return run_study(num_trials=30)


@pytest.fixture(scope="module")
def two() -> Study:
    return run_study(num_trials=30, constraints=("latency <= 20",), **TWO)


# -- the best trials ---------------------------------------------------------------------------------------------------


def test_the_best_trials_are_the_front_of_those_that_meet_the_constraints(two: Study) -> None:
    front = two.best_trials
    good = [each for each in two.trials if two.is_feasible(each)]

    assert 2 <= len(front) < len(good) < len(two.trials)
    for trial in good:
        beaten = [
            each for each in good if each.values != trial.values and all(map(float.__le__, each.values, trial.values))
        ]
        assert (trial in front) == (not beaten)
    assert two.best in front


def test_a_study_in_which_no_trial_meets_the_constraints_has_no_best_one() -> None:
    study = run_study(num_trials=4, constraints=("latency <= 0",))

    with pytest.raises(RunFailed, match="no trial of study study meets latency <= 0"):
        _ = study.best
    assert study.best_trials == []


def test_several_objectives_are_pruned_by_dominance_and_no_trial_of_the_front_is_lost() -> None:
    whole = run_study(num_trials=40, **TWO)
    pruned = run_study(num_trials=40, **TWO, **STOPPING)
    front = {each.number for each in whole.best_trials}

    assert [each.config for each in pruned.trials] == [each.config for each in whole.trials]
    assert sum(each.state == "pruned" for each in pruned.trials) >= 5
    assert {each.number for each in pruned.trials if each.state == "finished"} >= front


# -- importances and plots ---------------------------------------------------------------------------------------------


def test_importances_find_the_parameters_that_matter(study: Study, two: Study) -> None:
    found = study.importances()

    assert sum(found.values()) == pytest.approx(1.0)
    assert set(found) == {"learning_rate", "layers", "optimizer", "momentum"}
    assert max(two.importances(objective="latency").items(), key=lambda each: each[1])[0] == "layers"
    with pytest.raises(ConfigError, match="objective='speed' is unknown; study study has loss"):
        study.importances(objective="speed")
    with pytest.raises(RunFailed, match="importances need 4 finished trials, and 2 trials of study finished"):
        run_study(num_trials=2).importances()


@pytest.fixture
def ax() -> Any:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    return figure.subplots()


def test_the_history_has_all_trials_and_the_best_so_far(study: Study, ax: Any) -> None:
    assert study.plot_history(ax=ax) is ax

    line = ax.get_lines()[0].get_ydata()
    assert list(line) == sorted(line, reverse=True)
    assert line[-1] == study.best.values[0]
    assert len(ax.collections[0].get_offsets()) == len(study.trials)


def test_bars_lines_and_axes_are_those_of_the_study(study: Study, two: Study, ax: Any) -> None:
    study.plot_importances(ax=ax)
    assert [each.get_text() for each in ax.get_yticklabels()] == list(study.importances())[::-1]

    parallel = study.plot_parallel_coordinates(ax=ax.figure.add_subplot())
    labels = [each.get_text() for each in parallel.get_xticklabels()]
    assert labels == ["loss", "learning_rate", "layers", "optimizer", "momentum"]
    assert len(parallel.collections[0].get_segments()) == len(study.trials)
    assert "unused" in {each.get_text() for each in parallel.texts}

    reports = run_study(num_trials=12, **STOPPING).plot_intermediate_values(ax=ax.figure.add_subplot())
    assert {each.get_label() for each in reports.collections} >= {"pruned", "finished"}

    front = two.plot_pareto(ax=ax.figure.add_subplot())
    offsets = {each.get_label(): len(each.get_offsets()) for each in front.collections}
    assert offsets["Pareto front"] == len(two.best_trials)
    assert sum(offsets.values()) == len(two.trials)


def test_a_plot_without_axes_has_a_figure_of_its_own(study: Study) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    ax = study.plot_history()

    assert ax.get_title() == "study: history"
    pyplot.close(ax.figure)


def test_plots_that_cannot_be_drawn_name_the_cure(study: Study, two: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="has one objective, loss; a Pareto front needs two"):
        study.plot_pareto()
    with pytest.raises(ConfigError, match="must be two names of loss, latency"):
        two.plot_pareto(objectives=["loss"])
    with pytest.raises(RunFailed, match="no trial of study study has a result to plot"):
        run_study(lambda *_: (None,), num_trials=2).plot_history()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ConfigError, match=r"a plot needs matplotlib, which is not installed; pip install '.*plots"):
        study.plot_history()


# -- tables and files --------------------------------------------------------------------------------------------------


def test_a_dataframe_has_a_row_per_trial_and_a_column_per_parameter(study: Study) -> None:
    frame = study.dataframe()

    assert len(frame) == 30
    assert {"number", "state", "loss", "config.momentum", "step", "duration_s", "reason", "checkpoint"} <= set(frame)
    assert frame.set_index("number").loc[study.best.number, "loss"] == study.best.values[0]


def test_every_kind_of_file_has_all_trials(study: Study, tmp_path: Path) -> None:
    with study.export(tmp_path / "a.csv").open() as file:
        table = list(csv.DictReader(file))
    content = json.loads(study.export(tmp_path / "a.JSON").read_bytes())
    parquet = pytest.importorskip("pyarrow.parquet").read_table(study.export(str(tmp_path / "a.parquet"))).to_pylist()

    losses = [each.values[0] for each in study.trials]
    assert [float(row["loss"]) for row in table] == [row["loss"] for row in parquet] == losses
    assert [each["config"] for each in content["trials"]] == [each.config for each in study.trials]
    assert content["trials"][0]["reports"][0].keys() == {"step", "loss"}
    assert SearchSpace.from_dict(content["space"]) == study.space
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.JSON", "a.csv", "a.parquet"]


def test_a_choice_between_text_and_numbers_is_text_in_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow.parquet")
    space = SearchSpace().add_categorical("mixed", ["a", 1, True, None])
    study = run_study(lambda *_: (0.5,), space=space, num_trials=8, sampler="grid")

    found = pyarrow.read_table(study.export(tmp_path / "a.parquet")).column("config.mixed").to_pylist()

    assert sorted(map(str, found)) == ["1", "None", "True", "a"]


def test_an_unknown_suffix_is_refused(study: Study, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.xls is unknown; use \.csv, \.json, \.parquet"):
        study.export(tmp_path / "a.xls")


# -- warm starts -------------------------------------------------------------------------------------------------------


def spec(**changes: Any) -> e.StudySpec:
    return e.StudySpec(**{"name": "new", "space": mixed_space().to_dict()} | changes)


def test_a_warm_start_takes_the_finished_trials_that_fit_and_counts_the_others(study: Study) -> None:
    narrow = SearchSpace.from_dict(mixed_space().to_dict() | {"constraints": ["layers <= 4"]})
    found = warm_start([study], spec(), narrow)
    fitting = [each for each in study.trials if int(each.config["layers"] or 0) <= 4]

    assert [each.config for each in found.known] == [each.config for each in fitting]
    assert [each.values for each in found.known] == [each.values for each in fitting]
    assert found.known[0].source == f"study/{fitting[0].number}"
    assert 0 < len(found.known) < 30
    assert str(found) == (
        f"warm start with {len(fitting)} trials; {30 - len(fitting)} finished trials of the given studies cannot be "
        f"used: {30 - len(fitting)} × it violates 'layers <= 4'"
    )


def test_a_warm_start_needs_the_same_metrics_and_directions(study: Study, two: Study) -> None:
    space = mixed_space()

    assert warm_start([study], spec(directions=("max",)), space).skipped == {"'loss' has the other direction": 30}
    assert warm_start([study], spec(**TWO), space).skipped == {"'latency' was not reported": 30}
    assert len(warm_start([two], spec(), space).known) == 30  # it has more than what is needed
    assert len(warm_start([study], spec(constraints=("latency <= 3",)), space).known) == 0
    assert len(warm_start([run_study(num_trials=12, **STOPPING)], spec(), space).known) < 12  # not the pruned ones


def test_a_study_that_does_not_exist_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_RUNS_DIR", str(tmp_path))
    for name in ("nothing", tmp_path / "nothing"):
        with pytest.raises(ConfigError, match="is neither the name nor the directory of a study"):
            warm_start([name], spec(), mixed_space())


# -- callbacks ---------------------------------------------------------------------------------------------------------


class Recorder(StudyCallback):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_trial_start(self, study: Study, trial: Any) -> None:
        self.calls.append(("start", trial.number))

    def on_trial_report(self, study: Study, trial: Any) -> None:
        self.calls.append(("report", trial.number))

    def on_trial_end(self, study: Study, trial: Any) -> None:
        self.calls.append(("end", trial.number))

    def on_study_end(self, study: Study) -> None:
        self.calls.append(("end", study.name))


class OnlyEnd(StudyCallback):
    num_calls = 0

    def on_trial_end(self, study: Study, trial: Any) -> None:
        self.num_calls += 1
        raise ValueError(f"trial {trial.number} is unlucky")


def test_callbacks_are_called_in_order_and_an_error_in_one_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    facts: list[e.Event] = []
    study = run_study(num_trials=12, num_slots=1, num_steps=2, facts=facts)
    first, second = OnlyEnd(), Recorder()
    callbacks = Callbacks([first, second], study)

    with caplog.at_level(logging.ERROR):
        for fact in facts:
            callbacks.note([fact])

    expected = [(what, trial) for trial in range(12) for what in ("start", "report", "report", "end")]
    assert second.calls == [*expected, ("end", "study")]
    assert first.num_calls == MAX_ERRORS
    assert len(caplog.records) == MAX_ERRORS
    assert caplog.records[0].message == "on_trial_end of OnlyEnd failed"
    assert "trial 0 is unlucky" in str(caplog.records[0].exc_info)
    assert caplog.records[-1].message == "on_trial_end of OnlyEnd failed; it is not called again"


# -- modes -------------------------------------------------------------------------------------------------------------


def test_a_mode_is_a_name_an_object_of_optuna_or_a_pair() -> None:
    optuna = pytest.importorskip("optuna")
    sampler, pruner = optuna.samplers.GPSampler(seed=1), optuna.pruners.MedianPruner()

    found = {
        each: (mode.sampler, mode.scheduler, mode.ask_ahead)
        for each in ("bohb", sampler, pruner, (sampler, pruner), ("bayesian", "asha"), ("random", pruner))
        for mode in [find_mode(each)]
    }
    assert list(found.values()) == [
        ("tpe", "hyperband", 0),
        ("optuna/GPSampler", "none", 1),
        ("tpe", "optuna/MedianPruner", 0),
        ("optuna/GPSampler", "optuna/MedianPruner", 1),
        ("gp", "asha", 1),
        ("random", "optuna/MedianPruner", 0),
    ]
    assert find_mode((sampler, pruner)).sampler_object is sampler
    assert find_mode(pruner).pruner_object is pruner


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("best", "hpt_mode='best' is unknown; use random"),
        (("tpe",), "must be a pair of a sampler and a scheduler, such as"),
        (("best", "asha"), "sampler 'best' is unknown; use random"),
        (("tpe", "pbt2"), "scheduler 'pbt2' is unknown; use none, asha, hyperband, median, pbt"),
        (("tpe", 3), "3 is not a pruner of Optuna; pass a pair"),
        (object(), "is neither a name nor a sampler or a pruner of Optuna; for both, pass a pair"),
    ],
)
def test_an_unknown_mode_is_refused_with_the_cure(mode: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_mode(mode)
