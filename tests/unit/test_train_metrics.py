"""Metrics of a context: the row rate and the save in progress."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.clock import ManualClock
from strata.launch.environment import METRICS, NOT_SAVING
from strata.train.metrics import WINDOW_S, Gauges


@dataclass
class Save:
    step: int
    progress: float = 0.0
    done: bool = False


class Rows:
    """A loader's count."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> int:
        return self.number


def test_rows_a_second_are_those_of_all_loaders_over_the_last_seconds() -> None:
    clock, first, second = ManualClock(), Rows(), Rows()
    gauges = Gauges(clock)
    gauges.add_rows(first)
    gauges.add_rows(second)
    assert "rows_per_s" not in gauges.read(), "there is no earlier count to compare with"
    for _ in range(5):
        clock.advance(1.0)
        first.number += 100
        second.number += 20
        assert gauges.read()["rows_per_s"] == pytest.approx(120)
    for _ in range(int(WINDOW_S) - 1):
        clock.advance(1.0)
        assert 0 < gauges.read()["rows_per_s"] < 120
    for _ in range(5):
        clock.advance(1.0)
        rate = gauges.read()["rows_per_s"]
    assert rate == 0, "older counts are ignored"


def test_without_a_loader_there_is_no_row_rate() -> None:
    assert Gauges(ManualClock()).read() == {METRICS.saving_step: NOT_SAVING}


def test_counts_that_were_set_back_begin_anew() -> None:
    clock, rows = ManualClock(), Rows()
    gauges = Gauges(clock)
    gauges.add_rows(rows)
    rows.number = 1_000
    gauges.read()
    clock.advance(1.0)
    rows.number = 10  # reset_metrics()
    assert "rows_per_s" not in gauges.read()
    clock.advance(1.0)
    rows.number = 40
    assert gauges.read()["rows_per_s"] == pytest.approx(30)


@given(st.lists(st.tuples(st.floats(0.01, 5.0), st.integers(0, 1_000)), min_size=30, max_size=60))
def test_a_rate_is_never_below_the_slowest_nor_above_the_fastest_moment(
    moments: list[tuple[float, int]],
) -> None:
    clock, rows = ManualClock(), Rows()
    gauges = Gauges(clock)
    gauges.add_rows(rows)
    gauges.read()
    rates = []
    for seconds, number in moments:
        clock.advance(seconds)
        rows.number += number
        rates.append(number / seconds)
        assert min(rates) * 0.999 <= gauges.read()["rows_per_s"] <= max(rates) * 1.001


def test_a_save_in_progress_is_reported() -> None:
    gauges, save = Gauges(ManualClock()), Save(step=50)
    gauges.save = save
    save.progress = 0.25
    assert gauges.read() == {METRICS.saving_step: 50.0, METRICS.saving_fraction: 0.25}
    save.done = True
    assert gauges.read() == {METRICS.saving_step: NOT_SAVING}
