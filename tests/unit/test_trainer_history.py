"""The history of a fit: the best epoch, and when to stop."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.errors import InvalidArgument
from strata.trainer.history import EarlyStopping, History, Result

numbers = st.floats(-1e6, 1e6, allow_nan=False)


def filled(values: list[float], *, better: str = "higher", stopping: EarlyStopping | None = None) -> History:
    history = History("valid_auc", better, early_stopping=stopping)  # type: ignore[arg-type]
    for value in values:
        if history.stop_reason:
            break
        history.add({"valid_auc": value})
    return history


def test_training_stops_when_the_best_value_is_patience_epochs_old() -> None:
    history = filled([0.5, 0.7, 0.6, 0.65, 0.69, 0.9], stopping=EarlyStopping(patience=3))

    assert (history.num_epochs, history.best_epoch, history.best_value) == (5, 1, 0.7)
    assert history.stop_reason == "valid_auc has not improved for 3 epochs; best 0.7"


def test_an_epoch_better_than_the_previous_but_not_than_the_best_is_no_improvement() -> None:
    assert filled([0.7, 0.1, 0.2, 0.3], stopping=EarlyStopping(patience=3)).stop_reason


def test_a_change_below_min_delta_is_no_improvement() -> None:
    history = filled([0.70, 0.705, 0.708], stopping=EarlyStopping(patience=2, min_delta=0.01))

    assert history.best_epoch == 0
    assert history.stop_reason


def test_nan_is_worse_than_any_number() -> None:
    assert filled([math.nan, 0.2, math.nan]).best_epoch == 1


@given(st.lists(numbers, min_size=1, max_size=20), st.sampled_from(["lower", "higher"]))
def test_the_best_epoch_is_the_first_with_the_best_value(values: list[float], better: str) -> None:
    best = max(values) if better == "higher" else min(values)

    assert filled(values, better=better).best_epoch == values.index(best)


@given(st.lists(numbers, min_size=1, max_size=12), st.integers(0, 11), st.integers(1, 4))
def test_a_restored_history_decides_as_an_uninterrupted_one(values: list[float], cut: int, patience: int) -> None:
    stopping = EarlyStopping(patience=patience)
    whole = filled(values, stopping=stopping)
    first = filled(values[:cut], stopping=stopping)
    resumed = History("valid_auc", "higher", early_stopping=stopping)
    resumed.load_state_dict(first.state_dict())
    for value in values[first.num_epochs :]:
        if resumed.stop_reason:
            break
        resumed.add({"valid_auc": value})

    assert resumed.state_dict() == whole.state_dict()


def test_an_unknown_key_and_invalid_settings_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="monitor='valid_auc' is not in the history; it has loss"):
        History("valid_auc", "higher").add({"loss": 1.0})
    with pytest.raises(InvalidArgument, match="patience=0 must be a whole number, at least 1"):
        EarlyStopping(patience=0)


@pytest.mark.parametrize(
    "wrong", [{"patience": "3"}, {"patience": True}, {"min_delta": "0"}, {"min_delta": -1.0}, {"monitor": 3}]
)
def test_a_setting_of_early_stopping_with_a_wrong_type_is_refused(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(InvalidArgument, match=f"{name}={value!r} must be"):
        EarlyStopping(**wrong)


@given(values=st.lists(st.one_of(numbers, st.just(math.nan)), min_size=1, max_size=30), most=st.integers(1, 5))
def test_a_bounded_history_keeps_the_newest_rows_and_the_best_of_them(values: list[float], most: int) -> None:
    history = History("loss", "lower", max_rows=most)
    for value in values:
        history.add({"loss": value})

    assert history.num_epochs == len(values)
    assert len(history.rows) == min(len(values), most)
    kept = [row["loss"] for row in history.rows if not math.isnan(row["loss"])]
    assert not kept or history.best_value == min(kept)
    restored = History("loss", "lower", max_rows=most)
    restored.load_state_dict(history.state_dict())
    assert (restored.num_epochs, restored.best_epoch) == (history.num_epochs, history.best_epoch)


def result_of(rows: list[dict[str, float]], *, best_epoch: int, **more: Any) -> Result:
    return Result(
        history=rows,
        steps=20,
        best_epoch=best_epoch,
        monitor="valid_auc",
        best=None,
        checkpoints="/runs/a",
        timings={"total_s": 12.34},
        **more,
    )


def test_a_printed_result_is_a_table_of_epochs_with_the_best_marked() -> None:
    rows = [{"epoch": 0, "step": 10, "valid_auc": 0.51234}, {"epoch": 1, "step": 20, "valid_auc": 0.5}]

    assert str(result_of(rows, best_epoch=0, stop_reason="max_steps=20 reached")) == (
        "epoch  step  valid_auc\n"
        "    0    10     0.5123  best\n"
        "    1    20        0.5\n"
        "20 steps in 12.3 s, max_steps=20 reached\n"
        "checkpoints: /runs/a"
    )


def test_a_printed_result_shows_the_newest_epochs_and_the_best_one() -> None:
    rows: list[dict[str, float]] = [{"epoch": number, "loss": 1 / (number + 1)} for number in range(50)]

    shown = str(result_of(rows, best_epoch=3)).splitlines()

    assert [line.split()[0] for line in shown[1:-2]] == ["3", *map(str, range(40, 50))]
    assert shown[1].endswith("best")
    assert str(result_of([], best_epoch=-1)).splitlines() == ["20 steps in 12.3 s", "checkpoints: /runs/a"]
