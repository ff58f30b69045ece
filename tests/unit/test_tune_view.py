"""Snapshots of a study, its live table and its event lines, computed from the facts of its journal."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from strata.clock import ManualClock
from strata.launch.record.timeline import in_words
from strata.terminal import Console
from strata.tune import SearchSpace
from strata.tune.modes import MODES, mode_name
from strata.tune.search import Search
from strata.tune.snapshot import (
    as_plain,
    best_after,
    history,
    leading,
    series,
    snapshot,
    time_left,
    trial_snapshot,
    trial_snapshots,
)
from strata.tune.state import events as e
from strata.tune.state.actions import Ask
from strata.tune.state.trial import MAX_SERIES
from strata.tune.timeline import event_of
from strata.tune.view import StudyDisplay, progress, render, sparkline, view_of

HOSTILE = "\x1b]0;T\x07\x1b[2J\u202e\x9b31m\r\nFORGED[bold]X[/bold]"
SPACE = SearchSpace().add_float("x", min=0, max=1).add_categorical("kind", ["a", HOSTILE])


class Study:
    """A study whose events and clock a test controls."""

    def __init__(self, *, num_slots: int = 2, **changes: Any) -> None:
        values: dict[str, Any] = {"name": "sweep", "space": SPACE.to_dict(), "num_trials": 4, "max_failures": 1}
        self.search = Search(e.StudySpec(**values | changes))
        self.state = self.search.state
        self.now_s = 100.0
        self.words: list[str] = []
        self.do(e.Resized(num_slots=num_slots))

    def do(self, event: e.Event) -> None:
        handled = self.search.handle(event, now_s=self.now_s)
        assert not handled.ignored
        self.search.carried_out(handled.facts, now_s=self.now_s)
        events = [event_of(fact, self.state) for fact in handled.facts]
        self.words += [in_words(each, self.now_s).strip() for each in events if each is not None]
        for action in handled.actions:
            if isinstance(action, Ask):
                self.do(self.search.answer(action.trial))

    def of(self, kind: type, trial: int, **fields: Any) -> None:
        self.do(kind(trial=trial, lease=self.state.trials[trial].lease, **fields))

    def report(self, trial: int, step: int, *values: float | None) -> None:
        self.of(e.Reported, trial, step=step, values=values)

    def finish(self, trial: int, *values: float) -> None:
        self.of(e.Finished, trial, values=values)


# -- snapshots ---------------------------------------------------------------------------------------------------------


def test_a_snapshot_has_counts_times_and_the_best_trial_and_is_json() -> None:
    study = Study(scheduler="hyperband")
    study.now_s = 110.0
    study.report(0, 1, 0.5)
    study.of(e.Saved, 0, step=1, checkpoint="/c/1")
    study.finish(0, 0.25)
    study.of(e.Failed, 1, reason="ValueError: no")

    found = snapshot(study.state, now_s=120.0)

    assert found.counts == {"finished": 1, "pruned": 0, "failed": 1, "running": 2, "paused": 0, "queued": 0}
    assert (found.mode, found.is_ended, found.num_trials) == ("hyperband", False, 4)
    assert (found.began_at_s, found.active_s) == (100.0, 20.0)
    assert found.left_s == 20.0
    assert found.best is not None
    assert (found.best.number, found.best.values, found.best.checkpoint) == (0, {"loss": 0.25}, "/c/1")
    assert json.loads(json.dumps(as_plain(found)))["best"]["config"] == study.state.trials[0].config
    assert [each.state for each in trial_snapshots(study.state)] == ["finished", "failed", "running", "running"]


def test_time_without_a_driver_is_not_active_time() -> None:
    study = Study()
    study.now_s = 110.0
    study.report(0, 1, 0.5)
    study.now_s = 1_000.0
    handled = study.search.recover(now_s=1_000.0)
    assert handled.facts
    study.do(e.Resized(num_slots=2))
    study.now_s = 1_005.0
    study.report(0, 2, 0.5)

    assert snapshot(study.state).active_s == 15.0
    assert snapshot(study.state, now_s=1_010.0).active_s == 20.0


def test_the_time_left_is_unknown_before_the_first_trial_has_ended() -> None:
    counts = dict.fromkeys(("finished", "pruned", "failed", "running", "paused", "queued"), 0)
    assert time_left(counts, 10, 60.0) is None
    assert time_left(counts | {"pruned": 4, "paused": 1}, 10, 60.0) == 60.0
    assert time_left(counts | {"finished": 12}, 10, 60.0) == 0.0


def test_the_direction_decides_what_is_best() -> None:
    study = Study(directions=("max",))
    study.report(0, 1, 0.9)
    study.report(1, 1, 0.1)
    found = leading(study.state)
    assert found is study.state.trials[0]
    assert found is not None
    assert trial_snapshot(study.state, found).best == 0.9

    study.finish(1, 0.1)
    assert leading(study.state) is study.state.trials[1]  # a result counts more than a report


def test_the_history_has_one_entry_per_improvement() -> None:
    study = Study(num_slots=1)
    for number, value in enumerate([0.5, 0.7, 0.2, 0.1]):
        study.now_s += 1
        study.finish(number, value)

    found = history(study.state)

    assert found == [(1, 0.5), (3, 0.2), (4, 0.1)]
    assert [best_after(found, number) for number in (0, 1, 2, 3, 4, 100)] == [None, 0.5, 0.5, 0.2, 0.1, 0.1]


def test_a_series_is_bounded_and_has_the_last_report() -> None:
    study = Study(num_slots=1)
    for step in range(1, 2 * MAX_SERIES + 2):
        study.report(0, step, 1 / step)

    found = series(study.state, 0)

    assert len(found.steps) == len(found.values["loss"]) <= MAX_SERIES + 1
    assert (found.steps[-1], found.values["loss"][-1]) == (2 * MAX_SERIES + 1, 1 / (2 * MAX_SERIES + 1))
    assert json.loads(json.dumps(as_plain(found)))["trial"] == 0


def test_every_mode_is_recognized_from_its_parts() -> None:
    assert {mode_name(mode.sampler, mode.scheduler) for mode in MODES.values()} == set(MODES)
    assert mode_name("optuna/NSGAIISampler", "none") == "optuna/NSGAIISampler"
    assert mode_name("tpe", "asha") == "tpe with asha"


# -- events ------------------------------------------------------------------------------------------------------------


def test_every_outcome_of_a_trial_is_an_event_with_its_reason() -> None:
    study = Study(num_slots=1, max_failures=2)
    study.words.clear()
    study.report(0, 3, 0.5)
    study.of(e.Lost, 0, reason="killed by SIGKILL")
    study.of(e.Failed, 0, reason="ValueError: a")
    study.of(e.Failed, 0, reason="ValueError: b")
    study.finish(1, 0.25)
    study.finish(2, 0.5)

    lines = study.words

    assert lines[0] == "0.00 s  lost: the worker of trial 0: killed by SIGKILL"
    assert lines[1] == "0.00 s  resumed: trial 0 from the start"
    assert "0.00 s  retried: trial 0 failed: ValueError: a" in lines
    assert "0.00 s  failed: trial 0: ValueError: b" in lines
    assert any(line.startswith("0.00 s  best: trial 1, loss 0.25, x=") for line in lines)
    assert any(line.startswith("0.00 s  finished: trial 2, loss 0.5, x=") for line in lines)


def test_a_stop_says_for_whom_and_how_long_it_waits() -> None:
    waiting, idle = Study(), Study(num_slots=0)
    for study in (waiting, idle):
        study.do(e.StopRequested(reason="Ctrl-C", wait_s=30.0))

    assert any(line.endswith("stopping: Ctrl-C; no trial is running") for line in idle.words)
    assert waiting.words[-1].endswith(
        "stopping: Ctrl-C; waiting up to 30 s for 2 running trials to save at the next report (5 s without "
        "strata.init()); a second signal or --now ends the study at once"
    )


def test_a_pruned_trial_has_its_step_and_the_reason() -> None:
    study = Study(num_slots=1, scheduler="asha", scheduler_options={"kind": "stop", "min_step": 1, "eta": 2})
    study.report(0, 1, 0.1)
    study.finish(0, 0.1)
    study.report(1, 1, 0.9)
    study.of(e.Stopped, 1)

    assert any(" pruned: trial 1 at step 1, loss 0.9: " in f" {line}" for line in study.words)


# -- the table ---------------------------------------------------------------------------------------------------------


def drawn(study: Study, *, width: int = 100, is_running: bool = True) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, height=40, force_terminal=True, color_system=None, legacy_windows=False)
    console.print(render(view_of(study.state, "/runs/sweep", now_s=study.now_s, is_running=is_running)))
    return file.getvalue()


def test_the_table_has_running_trials_with_their_trend_the_best_and_failures() -> None:
    study = Study()
    for step in range(1, 9):
        study.report(0, step, 1.0 / step)
    study.of(e.Failed, 1, reason="ValueError: out of luck")
    study.now_s = 161.0

    shown = drawn(study)

    assert "study sweep · random" in shown
    assert "running · 1 of 4 trials · 0:01:01 · about 0:03:03 left" in shown
    assert "█▄▃▂▂▁▁▁" in shown
    assert "best so far trial 0, running: loss 0.125" in shown
    assert "failed      trial 1: ValueError: out of luck" in shown
    assert "1 failed" in shown
    assert progress(view_of(study.state, "", now_s=161.0)) == (
        "running: 1 of 4 trials, 2 running, 1 failed, best loss 0.125 (trial 0), about 0:03:03 left"
    )


@pytest.mark.parametrize("width", [20, 60, 200])
def test_hostile_text_fits_into_the_table_and_holds_no_control_characters(width: int) -> None:
    study = Study(name="sweep", metrics=(HOSTILE,), num_trials=6, num_slots=4)
    study.report(0, 1, 0.5)
    study.of(e.Failed, 1, reason=HOSTILE)

    shown = drawn(study, width=width)

    assert [c for c in shown if not c.isprintable() and c != "\n"] == []
    assert not any(line.lstrip().startswith("FORGED") for line in shown.split("\n"))
    assert all(cell_len(line) <= width for line in shown.split("\n"))


def test_the_last_table_of_a_study_has_no_time_left() -> None:
    study = Study(num_trials=1)
    study.finish(0, 0.5)

    shown = drawn(study)

    assert "done · 1 of 1 trial ·" in shown
    assert "left" not in shown


def test_the_last_table_of_an_interrupted_study_has_no_running_trials() -> None:
    study = Study()
    study.report(0, 1, 0.5)

    shown = drawn(study, is_running=False)

    assert "stopped · 0 of 4 trials · 0:00:00" in shown
    assert "trend" not in shown


@given(st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=50), st.integers(1, 30))
def test_a_sparkline_has_a_bar_per_value_and_fits(values: list[float | None], width: int) -> None:
    line = sparkline(values, width)

    assert len(line) == (min(len(values), width) if any(each is not None for each in values) else 0)
    assert set(line) <= set("▁▂▃▄▅▆▇█ ")


def test_a_sparkline_falls_with_its_values() -> None:
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁"
    assert sparkline([1, None, 1], 8) == "▁ ▁"
    assert sparkline(list(range(100)), 4)[-1] == "█"
    assert sparkline([], 8) == ""
    assert len(sparkline([-1.7e308, 1.7e308, math.pi], 8)) == 3


def test_where_nothing_can_be_redrawn_events_are_lines_and_progress_comes_every_ten_seconds() -> None:
    stream, clock = io.StringIO(), ManualClock()
    study = Study(num_slots=1)
    display = StudyDisplay("/runs/sweep", stream, clock)
    display.follow(study.search)

    study.report(0, 1, 0.5)
    assert stream.getvalue() == ""
    study.of(e.Failed, 0, reason=HOSTILE)
    clock.advance(10.0)
    study.report(1, 1, 0.5)
    display.close()

    failed, started, now = stream.getvalue().splitlines()
    assert "failed: trial 0: \\x1b]0;T" in failed
    assert "started: trial 1, x=" in started
    assert "running: 1 of 4 trials, 1 running, 1 failed, best loss 0.5 (trial 1)" in now
