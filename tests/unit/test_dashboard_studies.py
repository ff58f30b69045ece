"""What the dashboard shows of a study: order, bounds, and what a journal that grows leads to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tune_studies import mixed_space, quality, run_study

from strata.dashboard.studies import figures
from strata.dashboard.studies.source import Studies, StudyNow, StudySource, open_study
from strata.errors import InvalidArgument, JournalDamaged, RunFailed
from strata.launch.record.directory import RunDirectory, create
from strata.launch.spec import RunSpec, Size
from strata.tune.analysis import importances_of
from strata.tune.journal import JOURNAL, JournalFollower, StudyJournal
from strata.tune.space import SearchSpace
from strata.tune.state import events as e
from strata.tune.study import Study

TWO = {"metrics": ("loss", "latency"), "directions": ("min", "max")}


def now_of(study: Study, now_s: float | None = None) -> StudyNow:
    return StudyNow(study.state, study.space, "1-1", "done", now_s)


def listed(now: StudyNow, **arguments: Any) -> list[int]:
    defaults: dict[str, Any] = {"state": None, "text": "", "sort": "trial", "name": "", "is_descending": False}
    return [each.number for each in figures.listed(now, **defaults | arguments)]


# -- the table ---------------------------------------------------------------------------------------------------------


def test_trials_without_the_value_to_sort_by_come_last_in_both_directions() -> None:
    study = run_study(num_trials=12)
    now = now_of(study)
    momentum = {each.number: each.config["momentum"] for each in study.trials if "momentum" in each.config}
    without = [each.number for each in study.trials if each.number not in momentum]
    assert momentum
    assert without

    ascending = sorted(momentum, key=lambda number: momentum[number])
    assert listed(now, sort="config", name="momentum") == [*ascending, *without]
    assert listed(now, sort="config", name="momentum", is_descending=True) == [*ascending[::-1], *without]


def test_a_filter_finds_text_of_configurations_and_states_combine() -> None:
    study = run_study(num_trials=12, scheduler="asha", scheduler_options={"kind": "stop"})
    now = now_of(study)
    adam = [each.number for each in study.trials if each.config["optimizer"] == "adam"]
    pruned = [each.number for each in study.trials if each.state == "pruned"]
    assert pruned

    assert listed(now, text="Optimizer=ADAM") == adam
    assert listed(now, text="optimizer=adam", state="pruned") == [each for each in adam if each in pruned]
    assert listed(now, text="no such words") == []


@pytest.mark.parametrize(("sort", "name"), [("value", "accuracy"), ("config", "rate")])
def test_sorting_by_an_unknown_name_lists_the_known_ones(sort: str, name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"is unknown; the study has (loss|learning_rate)"):
        listed(now_of(run_study(num_trials=2)), sort=sort, name=name)


def test_a_row_marks_the_front_of_several_objectives_and_violated_constraints() -> None:
    study = run_study(num_trials=16, constraints=("latency <= 12",), **TWO)
    now = now_of(study)
    front = figures.best_numbers(now)
    rows = [figures.row(now, each, front) for each in study.trials]

    assert {each.number for each in rows if each.is_best} == {each.number for each in study.best_trials}
    assert {each.number for each in rows if not each.is_feasible} == {
        each.number for each in study.trials if each.values[1] is not None and each.values[1] > 12
    }
    assert not any(each.is_best and not each.is_feasible for each in rows)


# -- curves and results ------------------------------------------------------------------------------------------------


def test_a_thinned_curve_keeps_its_ends_and_its_spikes() -> None:
    points: list[tuple[int, float | None]] = [(step, 1.0) for step in range(1_000)]
    points[401] = (401, 99.0)
    points[777] = (777, -5.0)
    points[500] = (500, None)
    found = figures.thinned_curve(points, 50)

    assert len(found) <= 50
    assert {points[0], points[401], points[777], points[-1]} <= set(found)
    assert found == sorted(found)
    assert figures.thinned_curve(points[:50], 50) == points[:50]


def test_curves_are_those_that_are_asked_for_then_the_best() -> None:
    study = run_study(num_trials=20)
    now = now_of(study)
    by_loss = sorted(study.trials, key=lambda each: each.values[0] or math.inf)
    worst = by_loss[-1].number
    found = figures.curves(now, metric="", chosen=[worst, 10_000], max_trials=3, max_points=200)

    assert found.metric == "loss"
    assert found.num_trials == 20
    assert [each.trial for each in found.items] == sorted([worst, by_loss[0].number, by_loss[1].number])
    assert all(each.steps == list(range(1, 10)) for each in found.items)


def test_the_best_so_far_improves_in_the_direction_of_its_objective() -> None:
    study = run_study(num_trials=20, **TWO)
    for metric, sign in (("loss", 1), ("latency", -1)):
        found = figures.history(now_of(study), metric=metric, max_points=1_000)
        improved = [sign * each.value for each in found.best]
        assert improved == sorted(improved, reverse=True)
        assert len(set(improved)) == len(improved)
        assert improved[-1] == min(sign * each.value for each in found.results)
        assert len(found.results) == found.num_ended == 20


def test_lines_and_points_are_bounded_and_contain_the_best() -> None:
    study = run_study(num_trials=40, num_steps=1, **TWO)
    now = now_of(study)
    lines = figures.parallel(now, metric="", chosen=[study.trials[7].number], max_trials=10)
    points = figures.pareto(now, x="", y="", max_points=len(study.best_trials) + 2)

    assert len(lines.items) <= 10
    assert lines.num_trials == 40
    assert {7, study.best.number} <= {each.trial for each in lines.items}
    assert [each.name for each in lines.axes] == ["learning_rate", "layers", "optimizer", "momentum"], "epochs is fixed"
    assert lines.axes[2].labels == ["sgd", "adam"]
    assert all(each is None or 0 <= each <= 1 for line in lines.items for each in line.positions)
    assert {each.trial for each in points.items if each.is_best} == {each.number for each in study.best_trials}
    assert len(points.items) == len(study.best_trials) + 2
    with pytest.raises(InvalidArgument, match="has one metric, loss; two are needed"):
        figures.pareto(now_of(run_study(num_trials=1)), x="", y="", max_points=10)


def test_values_that_are_not_numbers_are_left_out() -> None:
    study = run_study(
        lambda config, step: (math.nan,) if config["layers"] > 4 else quality(config, step), num_trials=12
    )
    now = now_of(study)

    assert study.state.num_failed
    assert len(figures.history(now, metric="", max_points=100).results) == 12 - study.state.num_failed
    rows = [figures.row(now, each, ()) for each in study.trials if each.state == "failed"]
    assert all(each.values == {"loss": None} for each in rows)


# -- the journal -------------------------------------------------------------------------------------------------------


@pytest.fixture
def facts() -> list[e.Event]:
    found: list[e.Event] = []
    run_study(facts=found, num_trials=6)
    return found


@pytest.fixture
def directory(run_directory: Path) -> RunDirectory:
    return create(
        RunSpec(
            name="sweep",
            script="strata.tune.worker",
            is_module=True,
            workers=Size(1, 1),
            directory=str(run_directory),
            checkpoints=str(run_directory / "trials"),
        )
    )


def test_a_source_follows_a_journal_in_pieces_to_the_same_state(directory: RunDirectory, facts: list[e.Event]) -> None:
    source = StudySource(directory)
    with pytest.raises(InvalidArgument, match="has no journal in"), source.now():
        pass
    versions = []
    with StudyJournal(directory.path / JOURNAL) as journal:
        for begin in range(0, len(facts), 20):
            journal.append(facts[begin : begin + 20])
            with source.now() as now:
                versions.append(now.version)
    with source.now() as now:
        rows = [figures.row(now, each, ()) for each in now.state.trials.values()]
        again = now.version

    whole = now_of(Study.load(directory.path))
    assert rows == [figures.row(whole, each, ()) for each in whole.state.trials.values()]
    assert len(set(versions)) == len(versions), "every version is new"
    assert again == versions[-1]


def test_a_torn_line_is_read_once_it_is_whole_and_damage_before_it_is_an_error(
    tmp_path: Path, facts: list[e.Event]
) -> None:
    path = tmp_path / JOURNAL
    lines = [e.encode(each) + b"\n" for each in facts]
    path.write_bytes(b"".join(lines[:5]) + lines[5][:9])
    follower = JournalFollower(path)
    assert follower.read().facts == facts[:5]
    assert follower.read().facts == []
    with path.open("ab") as file:
        file.write(lines[5][9:])
    assert follower.read().facts == facts[5:6]
    with path.open("ab") as file:
        file.write(b"{damaged}\n" + lines[6])
    with pytest.raises(JournalDamaged, match=r"byte [\d,]+: .*restore the file"):
        follower.read()


def test_small_reads_lead_to_the_same_facts(tmp_path: Path, facts: list[e.Event]) -> None:
    (tmp_path / JOURNAL).write_bytes(b"".join(e.encode(each) + b"\n" for each in facts))
    follower = JournalFollower(tmp_path / JOURNAL)
    largest = max(len(e.encode(each)) + 1 for each in facts)
    found: list[e.Event] = []
    while (read := follower.read(largest)).facts:
        found += read.facts

    assert found == facts
    assert not read.is_more


def test_lines_that_a_full_disk_took_back_are_forgotten(directory: RunDirectory, facts: list[e.Event]) -> None:
    path = directory.path / JOURNAL
    lines = [e.encode(each) + b"\n" for each in facts]
    source = StudySource(directory)
    path.write_bytes(b"".join(lines))
    with source.now() as now:
        assert now.state.ended is not None
    path.write_bytes(b"".join(lines[:10]))
    with source.now() as now:
        assert now.state.ended is None
        shorter = now.version
    another = e.encode(msgspec.structs.replace(facts[9], at_s=0.25)) + b"\n"
    path.write_bytes(b"".join([*lines[:9], another, *lines[10:]]))
    with source.now() as now:
        assert now.version != shorter
        assert now.state.ended is not None


def test_importances_need_finished_trials_and_are_computed_once(
    directory: RunDirectory, facts: list[e.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("optuna")
    from strata.dashboard.studies import source as module

    calls: list[int] = []

    def counted(*given: Any) -> dict[str, float]:
        calls.append(len(given[-1]))
        return importances_of(*given)

    monkeypatch.setattr(module, "importances_of", counted)
    path = directory.path / JOURNAL
    lines = [e.encode(each) + b"\n" for each in facts]
    source = StudySource(directory)
    path.write_bytes(b"".join(lines[:6]))
    with pytest.raises(RunFailed, match="importances need 4 finished trials"):
        source.importances("loss")
    path.write_bytes(b"".join(lines))
    found, num_trials = source.importances("loss")
    assert (sum(found.values()), num_trials) == (pytest.approx(1.0), 6)
    assert source.importances("loss")[0] == found
    assert calls[-1] == 6
    assert len(calls) == 2


def test_a_study_is_opened_by_name_and_directory_and_other_places_are_not(
    directory: RunDirectory, facts: list[e.Event], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_study("sweep") is None, "it has no journal yet"
    with StudyJournal(directory.path / JOURNAL) as journal:
        journal.append(facts)
    by_name, by_path = open_study("swe"), open_study(str(directory.path))

    assert by_name is not None
    assert by_path is not None
    assert by_name.id == by_path.id
    assert [open_study(each) for each in ("nothere", "s3://bucket/sweep", str(directory.path / JOURNAL))] == [None] * 3
    studies = Studies([by_name])
    assert studies.get("") is studies.get(by_name.id) is by_name
    with pytest.raises(InvalidArgument, match=r"no study has the id '\.\./x'; /api/studies lists them"):
        studies.get("../x")
    with pytest.raises(InvalidArgument, match="no study is open; start `strata tune`"):
        Studies().get("")


def test_a_study_with_a_space_of_every_kind_is_described() -> None:
    space: SearchSpace = mixed_space()
    now = now_of(run_study(space=space, num_trials=3))

    class Place:
        id = "sweep-1"
        directory = type("Directory", (), {"path": Path("sweep")})()

    found = figures.info(Place(), now)  # type: ignore[arg-type] # what it needs of a source
    assert [(each.name, each.kind, each.is_log) for each in found.parameters] == [
        *(("learning_rate", "float", True), ("layers", "int", False), ("optimizer", "categorical", False)),
        *(("momentum", "float", False), ("epochs", "fixed", False)),
    ]
    assert found.best is not None
    assert (found.num_best, found.counts["finished"], found.is_running) == (1, 3, False)
