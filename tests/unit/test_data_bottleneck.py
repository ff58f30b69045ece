"""Bottleneck diagnosis from metrics alone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.data.runtime.bottleneck import (
    INTERVAL_S,
    MIN_BATCHES,
    PAUSE_S,
    Cause,
    Diagnosis,
    Lookout,
    PlanFacts,
    diagnose,
)
from strata.data.runtime.metrics import LoaderMetrics, WorkerMetrics

MANY = PlanFacts(num_row_groups=1_000, num_splits=100, is_local=True)
DECODING = {"decode_s": 10.0, "bytes_read": 1_000_000_000}


def window(*workers: dict[str, float], wait: float = 5.0, busy: float = 5.0, batches: int = 100) -> LoaderMetrics:
    """Return the metrics of ten seconds."""
    return LoaderMetrics(
        workers=tuple(WorkerMetrics(worker=n, **spent) for n, spent in enumerate(workers)),  # type: ignore[arg-type]
        batches=batches,
        consumer_wait_s=wait,
        consumer_busy_s=busy,
    )


def diagnosis(metrics: LoaderMetrics, facts: PlanFacts = MANY) -> Diagnosis:
    found = diagnose(metrics, facts, num_workers=len(metrics.workers))
    assert found is not None
    return found


def test_two_row_groups_leave_two_of_four_workers_without_work() -> None:
    idle = {"idle_s": 10.0}
    found = diagnosis(window(DECODING, DECODING, idle, idle), replace(MANY, num_row_groups=2, num_splits=1))

    assert found.cause is Cause.TOO_FEW_UNITS
    assert found.is_warning
    assert str(found) == (
        "the training loop waits for data 50% of its time, and the workers are idle 50% of theirs: there are only "
        "2 row groups (1 split) for 4 workers; write the data with at least 8 smaller row groups, or set "
        "num_workers=2, because more are idle"
    )


def test_row_groups_are_counted_per_rank() -> None:
    facts = replace(MANY, num_row_groups=20, world_size=4, row_group_name="stripe")
    found = diagnosis(window(*[{"decode_s": 6.0, "idle_s": 4.0}] * 4), facts)

    assert found.cause is Cause.TOO_FEW_UNITS
    assert "only 20 stripes (100 splits), 5 on each of 4 ranks, for 4 workers" in found.found
    assert found.cure == "write the data with at least 32 smaller stripes"


def test_idle_workers_with_enough_row_groups_get_no_diagnosis() -> None:
    assert diagnose(window({"idle_s": 10.0}, {"idle_s": 10.0}), MANY, num_workers=2) is None


def test_slow_storage_is_diagnosed_with_its_throughput() -> None:
    reading = {"read_s": 8.0, "decode_s": 2.0, "bytes_read": 40_000_000}
    found = diagnosis(window(reading, reading), replace(MANY, is_local=False))

    assert found.cause is Cause.SLOW_STORAGE
    assert "80% of it waiting for bytes (5.0 MB/s for each worker)" in found.found
    assert found.cure == "raise num_workers above 2 to read more in parallel, or copy the data to a local disk"
    assert "faster disk" in diagnosis(window(reading, reading)).cure


def test_workers_that_decode_all_the_time_are_too_few() -> None:
    found = diagnosis(window(DECODING, DECODING))

    assert found.cause is Cause.SLOW_DECODE
    assert "2 workers are busy 100% of theirs, most of it decoding (100.0 MB/s read by each worker)" in found.found
    assert found.cure == "raise num_workers above 2, or read fewer columns (columns=)"


def test_more_workers_than_cpus_are_not_advised() -> None:
    found = diagnosis(window(DECODING, DECODING), replace(MANY, num_cpus=2))

    assert found.cure == "add CPUs (all 2 are in use), or read fewer columns (columns=)"


def test_remote_data_without_read_times_may_be_slow_to_read_or_decode() -> None:
    assert "if the storage is slow" in diagnosis(window(DECODING), replace(MANY, is_local=False)).cure


def test_a_slow_transform_is_advised_to_use_processes() -> None:
    transforming = {"transform_s": 7.0, "decode_s": 3.0}
    found = diagnosis(window(transforming, transforming))

    assert found.cause is Cause.SLOW_TRANSFORM
    assert "70% of it in the transform" in found.found
    assert 'worker_type="process"' in found.cure
    in_processes = diagnosis(window(transforming, transforming), replace(MANY, worker_type="process"))
    assert in_processes.cure == "raise num_workers above 2, or make the transform faster"


def test_blocked_workers_while_the_loop_waits_need_more_memory() -> None:
    found = diagnosis(window(DECODING, {"blocked_s": 10.0}))

    assert found.cause is Cause.MEMORY_BOUND
    assert "the workers are blocked 50% of theirs" in found.found


def test_a_slow_training_loop_is_not_a_warning() -> None:
    found = diagnosis(window({"decode_s": 1.0, "blocked_s": 9.0}, wait=0.1, busy=9.9))

    assert found.cause is Cause.SLOW_CONSUMER
    assert not found.is_warning
    assert str(found) == (
        "the training loop is the limit: it waits for data 1% of its time, and the workers wait 90% of theirs; the "
        "loader needs no change"
    )


@pytest.mark.parametrize(
    "unclear",
    [
        window(DECODING, wait=0.9, busy=9.1),  # neither waits much
        window(DECODING, batches=MIN_BATCHES - 1),
        window({}),  # no worker ran
        window(DECODING, wait=0, busy=0),
    ],
)
def test_unclear_metrics_give_no_diagnosis(unclear: LoaderMetrics) -> None:
    assert diagnose(unclear, MANY, num_workers=1) is None


seconds = st.floats(0, 1_000, allow_nan=False)


@given(
    spent=st.lists(
        st.fixed_dictionaries(
            dict.fromkeys(("idle_s", "blocked_s", "read_s", "decode_s", "transform_s", "assemble_s"), seconds)
        ),
        max_size=4,
    ),
    wait=seconds,
    busy=seconds,
    num_row_groups=st.integers(1, 100),
)
def test_only_a_loop_that_waits_gets_a_warning(
    spent: list[dict[str, float]], wait: float, busy: float, num_row_groups: int
) -> None:
    metrics = window(*spent, wait=wait, busy=busy)
    found = diagnose(metrics, replace(MANY, num_row_groups=num_row_groups), num_workers=max(1, len(spent)))

    if found is not None:
        assert found.is_warning == (wait / (wait + busy) >= 0.1)


# -- over time ---------------------------------------------------------------------------------------------------------


class Run:
    """A loader that is diagnosed interval by interval."""

    def __init__(self) -> None:
        self.lookout = Lookout(MANY, num_workers=1)
        self.now_s = 0.0
        self.metrics = window({}, wait=0, busy=0, batches=0)

    def passes(self, epoch: int = 0, *, wait: float = 5.0, **spent: float) -> Cause | None:
        """Pass an interval in which the worker spent its time like this; return the diagnosed cause."""
        self.now_s += INTERVAL_S
        assert self.lookout.is_due(self.now_s)
        [before] = self.metrics.workers
        sums = {name: getattr(before, name) + seconds for name, seconds in spent.items()}
        self.metrics = msgspec.structs.replace(
            self.metrics,
            workers=(msgspec.structs.replace(before, **sums),),
            batches=self.metrics.batches + 100,
            consumer_wait_s=self.metrics.consumer_wait_s + wait,
            consumer_busy_s=self.metrics.consumer_busy_s + INTERVAL_S - wait,
        )
        found = self.lookout.look(self.metrics, epoch=epoch, now_s=self.now_s)
        assert not self.lookout.is_due(self.now_s)
        return found.cause if found else None


def test_the_first_interval_is_not_diagnosed() -> None:
    run = Run()

    assert run.passes(decode_s=10) is None
    assert run.passes(decode_s=10) is Cause.SLOW_DECODE


def test_each_cause_is_reported_once_an_epoch() -> None:
    run = Run()
    causes = [(epoch, run.passes(epoch, decode_s=10)) for epoch in (0, 1) for _ in range(20)]

    assert [(epoch, cause) for epoch, cause in causes if cause] == [(0, Cause.SLOW_DECODE), (1, Cause.SLOW_DECODE)]


def test_warnings_are_at_least_a_minute_apart() -> None:
    run = Run()
    moments_s = [
        run.now_s
        for number in range(60)
        if run.passes(number, **({"decode_s": 10.0} if number % 2 else {"transform_s": 10.0}))
    ]

    assert len(moments_s) > 5
    assert all(late - early >= PAUSE_S for early, late in itertools.pairwise(moments_s))


def test_information_about_a_slow_loop_does_not_delay_a_warning() -> None:
    run = Run()
    run.passes(wait=0.0, blocked_s=10)

    assert run.passes(wait=0.0, blocked_s=10) is Cause.SLOW_CONSUMER
    assert run.passes(decode_s=10) is Cause.SLOW_DECODE


def test_only_the_last_interval_counts() -> None:
    run = Run()
    for _ in range(50):
        run.passes(wait=0.5, decode_s=10)

    assert run.passes(transform_s=10) is Cause.SLOW_TRANSFORM
