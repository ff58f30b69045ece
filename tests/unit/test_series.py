"""A series: the newest points, in a fixed amount of memory."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.coordinator.state.series import Series


def test_a_new_series_is_empty() -> None:
    series = Series(4)
    assert len(series) == 0
    assert series.points() == []


def test_points_come_oldest_first() -> None:
    series = Series(4)
    for step in range(3):
        series.add(step, step / 2)
    assert series.points() == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert series.last == 1.0


@pytest.mark.parametrize("num", [4, 5, 7, 8, 9])
def test_a_series_of_4_drops_the_oldest_points_first(num: int) -> None:
    series = Series(4)
    for step in range(num):
        series.add(step, float(step))
        assert series.last == float(step)
    assert series.points() == [(step, float(step)) for step in range(num - 4, num)]
    assert len(series) == 4


def test_a_series_of_1_keeps_the_last_point() -> None:
    series = Series(1)
    for step in range(3):
        series.add(step, float(step))
        assert series.points() == [(step, float(step))]
        assert series.last == float(step)


def test_nan_and_infinity_are_kept() -> None:
    series = Series(2)
    series.add(0, math.nan)
    series.add(1, math.inf)
    assert math.isnan(series.points()[0][1])
    assert series.last == math.inf


@given(capacity=st.integers(1, 9), values=st.lists(st.floats(allow_nan=False), max_size=40))
def test_a_series_is_the_tail_of_what_was_added(capacity: int, values: list[float]) -> None:
    series = Series(capacity)
    for step, value in enumerate(values):
        series.add(step, value)
    assert series.points() == list(enumerate(values))[-capacity:]
