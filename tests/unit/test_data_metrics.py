"""Metrics, measured with a clock that the tests advance."""

from __future__ import annotations

import gc
import io
import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from rich.console import Console

from strata.clock import ManualClock
from strata.data.runtime import prometheus
from strata.data.runtime.metrics import (
    LoaderMetrics,
    LoaderRecorder,
    State,
    WorkerMetrics,
    WorkerRecorder,
    between,
    describe,
)


def recorder() -> tuple[WorkerRecorder, ManualClock]:
    clock = ManualClock()
    return WorkerRecorder(3, clock), clock


def loader(num_workers: int = 2) -> tuple[LoaderRecorder, ManualClock]:
    clock = ManualClock()
    return LoaderRecorder(num_workers, clock), clock


# -- a worker ----------------------------------------------------------------------------------------------------------


def test_every_second_is_counted_in_the_state_in_which_it_was_spent() -> None:
    worker, clock = recorder()
    clock.advance(100)  # off: counts nowhere
    worker.enter(State.IDLE)
    clock.advance(1)
    worker.enter(State.DECODE)
    clock.advance(5)
    worker.enter(State.BLOCKED)
    clock.advance(2)
    worker.enter(State.OFF)
    clock.advance(100)

    found = worker.snapshot()
    assert (found.idle_s, found.decode_s, found.blocked_s, found.busy_s) == (1, 5, 2, 5)
    assert found.utilisation == 5 / 8


@given(st.lists(st.tuples(st.sampled_from(State), st.integers(0, 1_000), st.booleans())))
def test_the_states_add_up_to_the_time_that_passed(steps: list[tuple[State, int, bool]]) -> None:
    worker, clock = recorder()
    passed_s = 0
    for state, seconds, looked in steps:
        worker.enter(state)
        clock.advance(seconds)
        passed_s += seconds if state is not State.OFF else 0
        if looked:
            assert worker.snapshot().alive_s == passed_s

    assert worker.snapshot().alive_s == passed_s


def test_a_snapshot_includes_the_current_state() -> None:
    worker, clock = recorder()
    worker.enter(State.DECODE)
    clock.advance(4)

    assert worker.snapshot().decode_s == 4
    assert worker.snapshot().decode_s == 4


def test_a_worker_returns_to_the_previous_state_even_after_an_error() -> None:
    worker, clock = recorder()
    worker.enter(State.DECODE)

    def fails() -> None:
        with worker.during(State.TRANSFORM):
            clock.advance(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    clock.advance(1)

    found = worker.snapshot()
    assert (found.transform_s, found.decode_s) == (3, 1)


def test_a_measured_wait_is_subtracted_from_decoding() -> None:
    worker, clock = recorder()
    with worker.during(State.DECODE):
        clock.advance(5)
        worker.move(2, State.READ)

    found = worker.snapshot()
    assert (found.read_s, found.decode_s, found.busy_s) == (2, 3, 5)


def test_units_files_batches_and_errors_are_counted() -> None:
    worker, _ = recorder()
    worker.opened_file()
    worker.decoded_row_group(rows=10, bytes_read=100, bytes_decoded=400)
    worker.decoded_row_group(rows=5, bytes_read=50, bytes_decoded=200)
    worker.assembled(7)
    worker.failed()

    assert worker.snapshot() == WorkerMetrics(
        worker=3, rows=15, batches=7, units=2, files=1, errors=1, bytes_read=150, bytes_decoded=600
    )


def test_a_reset_zeroes_the_sums_and_keeps_the_state() -> None:
    worker, clock = recorder()
    worker.enter(State.DECODE)
    worker.decoded_row_group(rows=10, bytes_read=100, bytes_decoded=400)
    clock.advance(5)
    worker.reset()
    clock.advance(2)

    assert worker.snapshot() == WorkerMetrics(worker=3, decode_s=2)


def test_a_snapshot_from_another_thread_never_sees_half_a_row_group() -> None:
    worker, _ = recorder()
    stop, torn = threading.Event(), []

    def watch() -> None:
        while not stop.is_set():
            found = worker.snapshot()
            if not found.rows == found.units * 2 == found.bytes_read:
                torn.append(found)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(5_000):
        worker.decoded_row_group(rows=2, bytes_read=2, bytes_decoded=0)
    stop.set()
    watcher.join()

    assert torn == []
    assert worker.snapshot().units == 5_000


# -- a loader ----------------------------------------------------------------------------------------------------------


def two_batches(recorder: LoaderRecorder, clock: ManualClock) -> None:
    recorder.began()
    clock.advance(0.5)
    for wait_s in (2.0, 1.0):
        recorder.asked()
        clock.advance(wait_s)
        recorder.delivered(100)
        clock.advance(4)
    recorder.asked()
    recorder.ended()
    clock.advance(1_000)


def test_waiting_of_the_consumer_and_of_the_loader_are_separate() -> None:
    recorder, clock = loader()
    two_batches(recorder, clock)

    found = recorder.snapshot()
    assert (found.consumer_wait_s, found.consumer_busy_s, found.elapsed_s) == (3, 8, 11)
    assert (found.rows, found.batches, found.rows_per_s) == (200, 2, 200 / 11)
    assert found.first_batch_s == 2.5


def test_the_first_batch_of_every_epoch_is_timed() -> None:
    recorder, clock = loader()
    assert recorder.snapshot().first_batch_s is None
    two_batches(recorder, clock)
    recorder.began()
    recorder.asked()
    clock.advance(0.25)
    recorder.delivered(1)

    assert recorder.snapshot().first_batch_s == 0.25


def test_a_snapshot_includes_a_wait_in_progress() -> None:
    recorder, clock = loader()
    recorder.asked()
    clock.advance(30)

    assert recorder.snapshot().consumer_wait_s == 30
    clock.advance(1)
    assert recorder.snapshot().consumer_wait_s == 31


def test_padded_dropped_and_skipped_rows_are_in_the_log_line() -> None:
    recorder, clock = loader()
    two_batches(recorder, clock)
    recorder.delivered(100, padded_rows=7, skipped_rows=1_000)
    recorder.dropped(11)
    recorder.skipped_row_group()
    recorder.skipped_row_group()
    recorder.planned(1.5, skipped_files=3, skipped_units=4)
    recorder.buffered(3 << 20)
    recorder.buffered(1 << 20)

    found = recorder.snapshot()
    assert (found.padded_rows, found.dropped_rows, found.skipped_rows, found.skipped_units) == (7, 11, 1_000, 2)
    assert (found.buffered_bytes, found.peak_buffered_bytes) == (1 << 20, 3 << 20)
    assert found.log_line() == (
        "300 rows in 3 batches, 27 rows/s, read 0 B, decoded 0 B, 2 workers 0% busy, waited for data 3.0 of 11.0 s, "
        "at most 3.0 MiB buffered, 7 padded rows, 11 dropped rows, 1,000 skipped rows, 2 skipped row groups, "
        "3 files left out of the plan, 4 row groups left out of the plan"
    )


def test_a_reset_keeps_the_plan_and_the_current_buffer() -> None:
    recorder, clock = loader(1)
    recorder.planned(1.5, skipped_files=1)
    recorder.workers[0].decoded_row_group(rows=1, bytes_read=1, bytes_decoded=1)
    two_batches(recorder, clock)
    recorder.buffered(100)
    recorder.buffered(10)
    recorder.reset()

    assert recorder.snapshot() == LoaderMetrics(
        workers=(WorkerMetrics(worker=0),),
        plan_s=1.5,
        plan_skipped_files=1,
        buffered_bytes=10,
        peak_buffered_bytes=10,
        num_resets=1,
    )


def test_totals_are_the_sums_of_the_workers() -> None:
    recorder, clock = loader(2)
    for number, worker in enumerate(recorder.workers, 1):
        worker.decoded_row_group(rows=number, bytes_read=10 * number, bytes_decoded=100 * number)
        with worker.during(State.DECODE):
            clock.advance(number)

    total = recorder.snapshot().total
    assert (total.worker, total.rows, total.bytes_read, total.bytes_decoded) == (None, 3, 30, 300)
    assert (total.decode_s, total.utilisation) == (3, 1.0)


def test_the_difference_of_two_snapshots_is_what_happened_in_between() -> None:
    recorder, clock = loader(1)
    two_batches(recorder, clock)
    before = recorder.snapshot()
    recorder.workers[0].enter(State.DECODE)
    recorder.asked()
    clock.advance(6)
    recorder.delivered(50)
    recorder.workers[0].decoded_row_group(rows=50, bytes_read=5, bytes_decoded=5)

    window = between(before, recorder.snapshot())
    assert (window.rows, window.batches, window.consumer_wait_s, window.consumer_busy_s) == (50, 1, 6, 0)
    assert (window.workers[0].decode_s, window.workers[0].rows) == (6, 50)


def test_a_difference_across_a_reset_starts_at_the_reset() -> None:
    recorder, clock = loader(1)
    two_batches(recorder, clock)
    before = recorder.snapshot()
    recorder.reset()
    recorder.delivered(3)

    assert between(before, recorder.snapshot()).rows == 3


def test_metrics_are_json_with_the_derived_figures() -> None:
    recorder, clock = loader(2)
    two_batches(recorder, clock)
    with recorder.workers[1].during(State.DECODE):
        clock.advance(2)

    found = json.loads(json.dumps(recorder.snapshot().to_dict()))
    assert found["rows"] == 200
    assert found["rows_per_s"] == pytest.approx(200 / 11)
    assert [worker["utilisation"] for worker in found["workers"]] == [0.0, 1.0]
    assert found["total"]["busy_s"] == 2


def test_the_table_has_a_row_per_worker_and_a_total() -> None:
    recorder, clock = loader(2)
    recorder.workers[1].decoded_row_group(rows=12_345, bytes_read=3 << 30, bytes_decoded=5 << 20)
    with recorder.workers[1].during(State.DECODE):
        clock.advance(2)
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(describe(recorder.snapshot()))

    lines = [line.split("│")[1:-1] for line in console.export_text().splitlines() if line.startswith("│")]
    assert [line[0].strip() for line in lines] == ["0", "1", "all"]
    assert [cell.strip() for cell in lines[1]][1] == "12,345"
    assert [cell.strip() for cell in lines[1]][6:] == ["3.0 GiB", "5.0 MiB", "2.0 s", "0.0 s", "0.0 s", "100%"]


# -- Prometheus --------------------------------------------------------------------------------------------------------


class Loader:
    """The part of a loader that an export uses."""

    def __init__(self, rows: int) -> None:
        self.recorder, self.clock = loader(2)
        self.recorder.workers[1].decoded_row_group(rows=rows, bytes_read=64, bytes_decoded=256)

    def get_metrics(self) -> LoaderMetrics:
        return self.recorder.snapshot()


def scrape(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_a_scrape_returns_metrics_by_dataset_and_worker() -> None:
    registry, one = CollectorRegistry(), Loader(10)
    prometheus.register("clicks", one.get_metrics, registry)
    with one.recorder.workers[1].during(State.DECODE):
        one.clock.advance(3)
    one.recorder.asked()
    one.clock.advance(2)
    one.recorder.buffered(99)

    found = scrape(registry)
    assert found['strata_data_rows_total{dataset="clicks",worker="1"}'] == 10
    assert found['strata_data_read_bytes_total{dataset="clicks",worker="1"}'] == 64
    assert found['strata_data_worker_seconds_total{dataset="clicks",state="decode",worker="1"}'] == 3
    assert found['strata_data_consumer_seconds_total{dataset="clicks",state="waiting"}'] == 2
    assert found['strata_data_buffered_bytes{dataset="clicks"}'] == 99
    assert not [name for name in found if name.startswith("strata_data_first_batch_seconds")]  # there was none yet


def test_two_loaders_share_one_family_per_metric() -> None:
    registry, one, other = CollectorRegistry(), Loader(1), Loader(2)
    prometheus.register("train", one.get_metrics, registry)
    prometheus.register("eval", other.get_metrics, registry)

    text = generate_latest(registry).decode()
    assert text.count("# TYPE strata_data_rows_total counter") == 1
    assert 'strata_data_rows_total{dataset="train",worker="1"} 1.0' in text
    assert 'strata_data_rows_total{dataset="eval",worker="1"} 2.0' in text


def test_a_dropped_loader_is_freed_and_leaves_the_scrape() -> None:
    registry, one = CollectorRegistry(), Loader(1)
    prometheus.register("clicks", one.get_metrics, registry)
    assert scrape(registry)
    del one
    gc.collect()

    assert scrape(registry) == {}


def test_a_loader_of_the_same_name_replaces_the_first_which_cannot_unregister_it() -> None:
    registry, first, second = CollectorRegistry(), Loader(1), Loader(2)
    old = prometheus.register("clicks", first.get_metrics, registry)
    new = prometheus.register("clicks", second.get_metrics, registry)
    old.unregister()
    assert scrape(registry)['strata_data_rows_total{dataset="clicks",worker="1"}'] == 2

    new.unregister()
    new.unregister()
    assert scrape(registry) == {}


def test_plain_functions_are_held_until_they_are_unregistered() -> None:
    registry, metrics = CollectorRegistry(), LoaderMetrics(workers=(), rows=5)
    registration = prometheus.register("clicks", lambda: metrics, registry)
    gc.collect()
    assert scrape(registry)['strata_data_delivered_rows_total{dataset="clicks"}'] == 5

    registration.unregister()
    assert scrape(registry) == {}


def test_the_number_of_live_datasets_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    registry, loaders = CollectorRegistry(), [Loader(1) for _ in range(prometheus.MAX_DATASETS)]
    for number, one in enumerate(loaders):
        prometheus.register(f"dataset-{number}", one.get_metrics, registry)
    last = Loader(1)
    prometheus.register("one more", last.get_metrics, registry).unregister()
    assert "100 datasets export metrics, which is the limit, so 'one more' does not" in caplog.text
    prometheus.register("one more", last.get_metrics, registry)
    assert 'strata_data_rows_total{dataset="one more",worker="1"}' not in scrape(registry)

    del one, loaders[50]
    gc.collect()
    prometheus.register("one more", last.get_metrics, registry)
    assert scrape(registry)['strata_data_rows_total{dataset="one more",worker="1"}'] == 1
