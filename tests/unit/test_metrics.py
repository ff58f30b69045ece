"""The coordinator's metrics: what is counted, how it is rendered, and that all of it is documented."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from calls import num_calls
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from strata.clock import ManualClock
from strata.coordinator.http import exposition, models
from strata.coordinator.serve.metrics import BATCH_BOUNDS, MAX_RECENT_BARRIERS, Histogram, Metrics
from strata.coordinator.state import events as e
from strata.coordinator.state.series import Series
from strata.coordinator.state.server_figures import SERVER, ServerFigures

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def metrics(clock: ManualClock) -> Metrics:
    return Metrics(clock)


def fake_job(job_id: str, *states: str) -> Any:
    members = {
        str(i): SimpleNamespace(state=state, metrics={}, step=7, suspect_since_s=None) for i, state in enumerate(states)
    }
    return SimpleNamespace(
        job_id=job_id,
        announced=(3, len(states)),
        membership=SimpleNamespace(members=members),
        barriers=SimpleNamespace(open={}),
        checkpoints=SimpleNamespace(latest=lambda: None),
    )


def report(job: Any, member: int, server: int, figures: ServerFigures) -> None:
    """Let a member report as a parameter server."""
    for name, reading in {SERVER: float(server), **figures.as_metrics()}.items():
        series = job.membership.members[str(member)].metrics[name] = Series(4)
        series.add(1, reading)


def scrape(metrics: Metrics, *jobs: Any, journal_bytes: int | None = 10) -> dict[str, Any]:
    text = exposition.render(
        metrics,
        jobs=jobs,
        num_sessions=2,
        num_unannounced=1,
        journal_bytes=journal_bytes,
        refusing=False,
        leading=True,
        token_file_ok=True,
    ).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Any], sample: str, **labels: str) -> float:
    (found,) = [s.value for f in families.values() for s in f.samples if s.name == sample and s.labels == labels]
    return found


# -- counting ------------------------------------------------------------------------------------------------------


def test_a_histogram_includes_its_bounds_and_counts_larger_values_last() -> None:
    histogram = Histogram((1, 10))
    for number in (0.5, 1, 5, 10, 11):
        histogram.add(number)

    assert (histogram.counts, histogram.total, histogram.num) == ([2, 2, 1], 27.5, 5)


def test_the_rate_is_over_the_last_ten_seconds_only(metrics: Metrics, clock: ManualClock) -> None:
    stats = metrics.stats_of("Heartbeat")
    for _ in range(1_000):
        stats.answered(0.001)
    for _ in range(20):
        clock.advance(1.0)
        stats.answered(0.001)
        stats.refused("NOT_FOUND", 0.001)
        metrics.sample()

    assert metrics.calls_per_s() == pytest.approx(2.0)


def test_the_rate_soon_after_the_start_covers_the_time_since_then(metrics: Metrics, clock: ManualClock) -> None:
    assert metrics.calls_per_s() == 0.0
    metrics.stats_of("Heartbeat").answered(0.001)
    clock.advance(0.5)

    assert metrics.calls_per_s() == pytest.approx(2.0)


def test_a_barrier_counts_from_its_first_arrival_to_its_release(metrics: Metrics, clock: ManualClock) -> None:
    metrics.barrier_opened("a")
    clock.advance(0.25)
    metrics.barrier_ended("a", released=True)

    assert (metrics.barrier_s.num, metrics.barrier_s.total) == (1, pytest.approx(0.25))
    assert metrics.recent_barrier_s() == pytest.approx(0.25)


def test_a_broken_barrier_adds_no_latency(metrics: Metrics) -> None:
    metrics.barrier_opened("a")
    metrics.barrier_ended("a", released=False)

    assert (metrics.barrier_s.num, metrics.num_barriers_broken, metrics.recent_barrier_s()) == (0, 1, None)


def test_barriers_in_a_batch_that_failed_are_forgotten(metrics: Metrics) -> None:
    metrics.barrier_opened("a")
    metrics.commit_failed()
    metrics.barrier_ended("a", released=True)

    assert (metrics.barrier_s.num, metrics.num_commits_failed) == (0, 1)


def test_the_recent_latency_is_the_95th_percentile_of_a_minute_and_bounded(
    metrics: Metrics, clock: ManualClock
) -> None:
    for number in range(1, 101):
        metrics.barrier_opened(number)
        clock.advance(number / 1_000)
        metrics.barrier_ended(number, released=True)
    assert metrics.recent_barrier_s() == pytest.approx(0.095)

    clock.advance(61.0)
    assert metrics.recent_barrier_s() is None
    for number in range(3 * MAX_RECENT_BARRIERS):
        metrics.barrier_opened(number)
        metrics.barrier_ended(number, released=True)
    assert len(metrics._recent_barriers) == MAX_RECENT_BARRIERS
    assert metrics._opened_s == {}


def test_committed_events_are_counted_by_kind(metrics: Metrics) -> None:
    committed: list[e.Event] = [
        e.WorkerJoined(job_id="j", worker_id="a", incarnation=1, instance_id="x"),
        e.WorkerLeft(job_id="j", worker_id="b", incarnation=2, cause="hung", reason="stuck"),
        e.GenerationStarted(job_id="j", generation=1, num_workers=1, reason="a joined"),
        e.ShardsAssigned(job_id="j", dataset_id="d", generation=1, num_workers=1, num_moved=7, moves=b""),
        e.ShardsDone(job_id="j", dataset_id="d", epoch=0, worker_id="a", indices=(1, 2, 3)),
    ]
    metrics.committed(committed, seconds=0.004, num_bytes=500, snapshot=True)
    families = scrape(metrics)

    assert value(families, "strata_workers_joined_total") == 1
    assert value(families, "strata_workers_left_total", cause="hung") == 1
    assert value(families, "strata_lease_expiries_total", cause="hung") == 1
    assert value(families, "strata_lease_expiries_total", cause="lease") == 0
    assert value(families, "strata_generation_changes_total") == 1
    assert value(families, "strata_shards_moved_total") == 7
    assert value(families, "strata_shards_done_total") == 3
    assert value(families, "strata_journal_commit_seconds_sum") == pytest.approx(0.004)
    assert value(families, "strata_journal_commit_events_bucket", le="5") == 1
    assert value(families, "strata_journal_commit_events_bucket", le="2") == 0
    assert value(families, "strata_journal_commit_bytes_total") == 500
    assert value(families, "strata_journal_snapshots_total") == 1


# -- rendering -----------------------------------------------------------------------------------------------------


def test_calls_are_exported_by_method_and_status(metrics: Metrics) -> None:
    stats = metrics.stats_of("AckShards")
    stats.answered(0.002)
    stats.answered(0.02)
    stats.refused("ABORTED", 0.002)
    metrics.stats_of("Heartbeat")
    families = scrape(metrics)

    assert value(families, "strata_requests_total", method="AckShards", status="OK") == 2
    assert value(families, "strata_requests_total", method="AckShards", status="ABORTED") == 1
    assert value(families, "strata_request_seconds_count", method="AckShards") == 3
    assert value(families, "strata_request_seconds_bucket", method="AckShards", le="0.003") == 2
    assert len(families["strata_requests"].samples) == 2  # no methods that were never called


def test_bucket_bounds_round_trip(metrics: Metrics) -> None:
    samples = scrape(metrics)["strata_journal_commit_events"].samples
    bounds = [float(s.labels["le"]) for s in samples if s.name.endswith("_bucket")]

    assert bounds == [*BATCH_BOUNDS, float("inf")]


def test_at_most_100_jobs_are_named_and_the_rest_are_summed(metrics: Metrics) -> None:
    jobs = [fake_job(f"job-{i}", *["TRAINING"] * (i + 1)) for i in range(150)]
    workers = scrape(metrics, *jobs)["strata_workers"].samples

    assert len({s.labels["job"] for s in workers}) == 101
    assert sum(s.value for s in workers) == sum(range(1, 151))
    assert [s.value for s in workers if s.labels["job"] == "(others)"] == [sum(range(1, 51))]


def test_the_figures_of_parameter_servers_are_summed_over_a_job(metrics: Metrics) -> None:
    job = fake_job("hybrid", *["TRAINING"] * 3)
    report(job, 1, 0, ServerFigures(rows=100, bytes=1_000, evicted=0, staleness=0))
    report(job, 2, 1, ServerFigures(rows=40, bytes=1_000, evicted=0, staleness=1))
    families = scrape(metrics, job, fake_job("plain", "TRAINING"))

    assert value(families, "strata_servers", job="hybrid") == 2
    assert value(families, "strata_server_rows", job="hybrid") == 140
    assert value(families, "strata_server_staleness", job="hybrid") == 1
    assert families["strata_server_hits"].samples == [], "no table has a file"
    assert [s.labels["job"] for s in families["strata_servers"].samples] == ["hybrid"]


def test_a_gauge_without_a_measurement_is_absent(metrics: Metrics) -> None:
    families = scrape(metrics, journal_bytes=None)

    assert families["strata_barrier_latency_recent_seconds"].samples == []
    assert families["strata_journal_size_bytes"].samples == []


def test_the_global_registry_stays_empty(metrics: Metrics) -> None:
    scrape(metrics)

    assert [family.name for family in REGISTRY.collect() if family.name.startswith("strata")] == []


def test_counting_a_call_costs_three_calls() -> None:
    """The clock, the counter and the bucket search: this happens for every call of a coordinator."""
    metrics = Metrics()
    stats = metrics.stats_of("Heartbeat")
    assert num_calls(lambda: stats.answered(metrics.now_s())) == 3


# -- documents -----------------------------------------------------------------------------------------------------


def test_every_metric_is_documented_with_its_type_and_labels_and_nothing_else_is(metrics: Metrics) -> None:
    metrics.stats_of("Heartbeat").answered(0.001)
    metrics.barrier_opened("a")
    metrics.barrier_ended("a", released=True)
    job, everything = fake_job("j", "TRAINING", "TRAINING"), dict.fromkeys(ServerFigures.__struct_fields__, 1)
    report(job, 0, 0, ServerFigures(**everything))
    job.membership.members["1"].metrics["rows_per_s"] = Series(4)
    job.membership.members["1"].metrics["rows_per_s"].add(1, 640.0)
    committed = SimpleNamespace(checkpoint=SimpleNamespace(step=5), committed_at_s=1.0)
    job.checkpoints = SimpleNamespace(latest=lambda: committed)
    exported = {
        name: (
            family.type,
            {label for sample in family.samples for label in sample.labels} - {"le"},
        )
        for name, family in scrape(metrics, job).items()
    }
    rows = re.findall(r"^\| `(strata_\w+)` \| (\w+) \| (?:(.*?) )?\| .{10,} \|$", DOCUMENT.read_text(), re.MULTILINE)

    assert {name: (kind, set(re.findall(r"\w+", labels))) for name, kind, labels in rows} == exported


def test_the_api_knows_every_kind_of_event() -> None:
    assert set(get_args(models.EventKind)) == {kind.__name__ for kind in get_args(e.Event)}
