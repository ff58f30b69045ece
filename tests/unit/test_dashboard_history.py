"""The history of the dashboard: rings, the store and its file."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.dashboard.history.file import DAMAGED, HistoryFile, path_beside
from strata.dashboard.history.rings import RESOLUTIONS, Bucket, Resolution, Ring, Series, merge_groups
from strata.dashboard.history.store import HistoryStore, SeriesKey
from strata.dashboard.sample import Spread, single, spread

NOW_S = 1_700_000_000
FINITE = st.floats(allow_nan=False, allow_infinity=False, width=64)
MODEST = st.floats(-1e9, 1e9)
SPREADS = st.lists(FINITE, min_size=1, max_size=5).map(spread)
STEPS = st.lists(st.tuples(st.integers(0, 700), SPREADS), max_size=60)
"""Seconds since the sample before, and a value."""


def series_of(values: list[tuple[int, Spread]]) -> tuple[Series, list[tuple[int, Spread]]]:
    """Return a series, and its samples with their times."""
    series, at_s, samples = Series(), NOW_S, []
    for passed_s, value in values:
        at_s += passed_s
        series.add(at_s, value)
        samples.append((at_s, value))
    return series, samples


def close(found: float, expected: float) -> bool:
    return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-3)


@given(STEPS)
def test_no_ring_exceeds_its_capacity_and_every_mean_lies_between_minimum_and_maximum(
    values: list[tuple[int, Spread]],
) -> None:
    series, _ = series_of(values)

    for ring in series.rings:
        buckets = list(ring.buckets())
        starts = [bucket.start_s for bucket in buckets]
        assert len(buckets) == len(ring) <= ring.resolution.capacity
        assert starts == sorted(set(starts))
        assert all(start_s % ring.resolution.interval_s == 0 for start_s in starts)
        assert all(bucket.min <= bucket.mean <= bucket.max for bucket in buckets)


@given(st.lists(st.tuples(st.integers(0, 700), MODEST.map(single)), max_size=60))
def test_a_bucket_is_what_its_samples_give(values: list[tuple[int, Spread]]) -> None:
    series, samples = series_of(values)

    for ring in series.rings:
        for bucket in ring.buckets():
            inside = [v for at_s, v in samples if bucket.start_s <= at_s < bucket.start_s + ring.resolution.interval_s]
            assert bucket.num == len(inside)
            assert bucket.min == min(value.min for value in inside)
            assert bucket.max == max(value.max for value in inside)
            assert close(bucket.mean, math.fsum(value.mean for value in inside) / len(inside))


@given(st.lists(MODEST.map(single), min_size=1, max_size=60))
def test_merging_the_seconds_of_a_minute_equals_the_minute(values: list[Spread]) -> None:
    series, _ = series_of([(0, values[0]), *((1, value) for value in values[1:])])
    seconds, minutes = series.rings[0], series.rings[2]

    for minute in minutes.buckets():
        inside = [each for each in seconds.buckets() if minute.start_s <= each.start_s < minute.start_s + 60]
        (merged,) = merge_groups(inside, len(inside))
        assert (merged.num, merged.min, merged.max) == (minute.num, minute.min, minute.max)
        assert close(merged.mean, minute.mean)


def test_a_spike_of_one_second_is_still_the_maximum_of_its_bucket_after_a_week() -> None:
    series = Series()
    series.add(NOW_S, Spread(1.0, 1.0, 99.0))
    for at_s in range(NOW_S + 600, NOW_S + 6 * 86_400, 600):
        series.add(at_s, single(1.0))

    _, points = series.points(since_s=0, until_s=2**32, max_points=2_000)

    assert points[0].max == 99.0
    assert max(point.max for point in points[1:]) == 1.0


def test_a_full_ring_drops_its_oldest_bucket() -> None:
    ring = Ring(Resolution(10, 3))
    for at_s in range(0, 100, 10):
        ring.add(Bucket(at_s, 1, float(at_s), float(at_s), float(at_s)))

    assert [bucket.start_s for bucket in ring.buckets()] == [70, 80, 90]
    assert [bucket.start_s for bucket in ring.buckets(since_s=85)] == [80, 90]
    assert [bucket.start_s for bucket in ring.buckets(since_s=70, until_s=80)] == [70, 80]


def test_a_clock_that_is_set_back_does_not_reorder_a_series() -> None:
    series = Series()
    for at_s in (NOW_S, NOW_S + 1, NOW_S - 3_600):
        series.add(at_s, single(1.0))

    assert [bucket.start_s for bucket in series.rings[0].buckets()] == [NOW_S, NOW_S + 1]
    assert [bucket.num for bucket in series.rings[0].buckets()] == [1, 2]


@given(STEPS, st.integers(2, 20))
def test_points_never_exceed_what_was_asked_for_and_keep_the_extremes(
    values: list[tuple[int, Spread]], max_points: int
) -> None:
    series, samples = series_of(values)

    interval_s, points = series.points(since_s=0, until_s=2**32, max_points=max_points)

    assert len(points) <= max_points
    assert (interval_s > 0) == bool(samples)
    if samples:
        assert min(point.min for point in points) == min(value.min for _, value in samples)
        assert max(point.max for point in points) == max(value.max for _, value in samples)


def test_a_young_series_is_shown_in_seconds_however_far_back_the_question_reaches() -> None:
    series = Series()
    for second in range(30):
        series.add(NOW_S + 599 + second, single(second))

    assert series.points(since_s=0, until_s=2**32, max_points=500)[0] == 1


def test_an_old_series_is_shown_in_the_finest_resolution_that_reaches_back() -> None:
    series = Series()
    for second in range(3_000):
        series.add(NOW_S + second, single(second))

    assert series.points(since_s=NOW_S + 2_900, until_s=2**32, max_points=500)[0] == 1
    assert series.points(since_s=NOW_S, until_s=2**32, max_points=500)[0] == 10
    assert series.points(since_s=NOW_S, until_s=2**32, max_points=100)[0] == 60


def test_the_store_forgets_the_series_that_was_updated_least_recently() -> None:
    store = HistoryStore(max_series=2)
    store.add("a", NOW_S, {"x": single(1.0)})
    store.add("b", NOW_S, {"x": single(1.0)})
    store.add("a", NOW_S + 1, {"x": single(2.0)})
    store.add("c", NOW_S + 2, {"x": single(3.0)})

    assert store.keys() == [SeriesKey("a", "x"), SeriesKey("c", "x")]
    assert store.keys("a") == [SeriesKey("a", "x")]
    assert store.take_changes().removed == [SeriesKey("b", "x")]


# -- the file ----------------------------------------------------------------------------------------------------------


def written(path: Path, store: HistoryStore) -> None:
    file = HistoryFile(path)
    file.load()
    file.write(store.take_changes())
    file.close()


def loaded(path: Path) -> HistoryStore:
    store, file = HistoryStore(), HistoryFile(path)
    store.restore(file.load())
    file.close()
    return store


def buckets_of(store: HistoryStore) -> list[list[Bucket]]:
    series = store.get("job", "metric:loss")
    assert series is not None
    return [list(ring.buckets()) for ring in series.rings[1:]]


def test_a_restarted_history_has_the_same_buckets_of_ten_seconds_and_longer(tmp_path: Path) -> None:
    store = HistoryStore()
    for second in range(1_000):
        store.add("job", NOW_S + second, {"metric:loss": Spread(0.5, second, 2_000.0)})
    written(tmp_path / "h.db", store)

    again = loaded(tmp_path / "h.db")

    assert buckets_of(again) == buckets_of(store)
    assert (tmp_path / "h.db").stat().st_mode & 0o777 == 0o600


def test_writing_again_replaces_the_bucket_that_was_open(tmp_path: Path) -> None:
    store, file = HistoryStore(), HistoryFile(tmp_path / "h.db")
    for second in range(25):
        store.add("job", NOW_S + second, {"metric:loss": single(second)})
        file.write(store.take_changes())
    file.close()

    assert store.take_changes().rows == []
    assert buckets_of(loaded(tmp_path / "h.db")) == buckets_of(store)


def test_the_file_holds_no_more_buckets_than_the_rings(tmp_path: Path) -> None:
    store, file = HistoryStore(), HistoryFile(tmp_path / "h.db")
    interval_s, capacity = RESOLUTIONS[1]
    for number in range(capacity + 50):
        store.add("job", NOW_S + number * interval_s, {"metric:loss": single(number)})
        file.write(store.take_changes())
    file.close()

    with sqlite3.connect(tmp_path / "h.db") as database:
        counts = dict(database.execute("SELECT interval_s, COUNT(*) FROM buckets GROUP BY interval_s").fetchall())
    assert counts[interval_s] == capacity
    assert all(counts[each.interval_s] <= each.capacity for each in RESOLUTIONS[1:])
    assert buckets_of(loaded(tmp_path / "h.db")) == buckets_of(store)


def test_series_that_the_store_forgot_leave_the_file(tmp_path: Path) -> None:
    store, file = HistoryStore(max_series=3), HistoryFile(tmp_path / "h.db")
    for number in range(20):
        store.add(f"job-{number}", NOW_S + number, {"x": single(1.0)})
        file.write(store.take_changes())
    file.close()

    assert [key.job_id for key in loaded(tmp_path / "h.db").keys()]  # noqa: SIM118 - not a dict == ["job-17", "job-18", "job-19"]


@pytest.mark.parametrize("content", [b"not a database", b"SQLite format 3\x00" + b"\xff" * 5_000])
def test_a_damaged_file_is_set_aside_and_the_history_starts_anew(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "h.db"
    path.write_bytes(content)

    file = HistoryFile(path)
    assert file.load() == []
    store = HistoryStore()
    store.add("job", NOW_S, {"metric:loss": single(1.0)})
    file.write(store.take_changes())
    file.close()

    assert (tmp_path / f"h.db{DAMAGED}").read_bytes() == content
    assert len(loaded(path)) == 1


def test_buckets_that_we_never_write_are_not_believed(tmp_path: Path) -> None:
    store = HistoryStore()
    store.add("job", NOW_S, {"metric:loss": single(1.0)})
    written(tmp_path / "h.db", store)
    with sqlite3.connect(tmp_path / "h.db") as database:
        database.execute("UPDATE buckets SET min = 5.0, max = -5.0")
    database.close()

    assert len(loaded(tmp_path / "h.db")) == 0
    assert (tmp_path / f"h.db{DAMAGED}").exists()


def test_the_history_of_a_newer_version_is_set_aside(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "h.db") as database:
        database.execute("PRAGMA user_version=99")
    database.close()

    assert len(loaded(tmp_path / "h.db")) == 0
    assert (tmp_path / f"h.db{DAMAGED}").exists()


def test_the_history_lies_beside_the_journal() -> None:
    assert path_beside(Path("/state/coordinator.db")) == Path("/state/coordinator.history.db")
    assert path_beside(Path("/state/journal")) == Path("/state/journal.history.db")
