"""Render the coordinator's metrics for Prometheus.

Each scrape uses a new registry without Prometheus's own process metrics: everything exported was measured here. Labels
are bounded: methods, statuses, causes and directions are fixed sets, and only the largest jobs are named.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from strata._version import __version__
from strata.coordinator.serve.metrics import EXPIRY_CAUSES
from strata.coordinator.state.server_figures import SERVER, figures_of, total

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from prometheus_client.core import Metric

    from strata.coordinator.serve.metrics import Histogram, Metrics
    from strata.coordinator.state.job import Job

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
MAX_JOBS = 100
"""Jobs with their own label; the rest are summed up."""
ROWS_PER_S = "rows_per_s"
"""The metric under which a loader reports."""
OTHER_JOBS = "(others)"
"""No job can have this name."""


def render(
    metrics: Metrics,
    *,
    jobs: Collection[Job],
    num_sessions: int,
    num_unannounced: int,
    journal_bytes: int | None,
    refusing: bool,
    leading: bool,
    token_file_ok: bool | None,
) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    scrape = _Scrape(metrics, jobs, num_sessions, num_unannounced, journal_bytes, refusing, leading, token_file_ok)
    registry.register(scrape)
    return generate_latest(registry)


@dataclass(frozen=True, slots=True, eq=False)
class _Scrape(Collector):
    metrics: Metrics
    jobs: Collection[Job]
    num_sessions: int
    num_unannounced: int
    journal_bytes: int | None
    refusing: bool
    leading: bool
    token_file_ok: bool | None

    def describe(self) -> Iterable[Metric]:
        return ()  # else the registry would collect once at registration

    def collect(self) -> Iterator[Metric]:
        yield _gauge("strata_build_info", "The running version; always 1.", 1, version=__version__)
        yield _gauge("strata_refusing", "1 while calls are refused because the journal fails.", int(self.refusing))
        yield _gauge("strata_leading", "1 while this coordinator leads.", int(self.leading))
        tokens = GaugeMetricFamily("strata_token_file_ok", "0 while the token file is invalid. Absent without a file.")
        if self.token_file_ok is not None:
            tokens.add_metric((), int(self.token_file_ok))
        yield tokens
        yield from self._calls()
        yield from self._sessions()
        yield from self._barriers()
        yield from self._journal()
        yield from self._membership()
        yield from self._now()

    def _calls(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "strata_requests", "Calls answered, by method and gRPC status.", labels=("method", "status")
        )
        seconds = HistogramMetricFamily(
            "strata_request_seconds", "Time from arrival to answer, by method.", labels=("method",)
        )
        for method, stats in sorted(self.metrics.calls.items()):
            for status, num in [("OK", stats.num_ok), *sorted(stats.num_by_refusal.items())]:
                if num:
                    requests.add_metric((method, status), num)
            if stats.num:
                seconds.add_metric((method,), _buckets(stats.seconds), stats.seconds.total)
        yield requests
        yield seconds
        yield _gauge(
            "strata_coordinator_rps",
            "Calls answered per second over the last 10 s: coordinator-rps for an autoscaler.",
            self.metrics.calls_per_s(),
        )

    def _sessions(self) -> Iterator[Metric]:
        m = self.metrics
        yield _gauge("strata_sessions", "Open sessions.", self.num_sessions)
        yield _counter("strata_sessions_opened", "Sessions opened.", m.num_sessions_opened)
        yield _counter(
            "strata_sessions_dropped", "Sessions closed because the client did not read.", m.num_sessions_dropped
        )
        frames = HistogramMetricFamily(
            "strata_frame_bytes", "Size of session frames, by direction.", labels=("direction",)
        )
        frames.add_metric(("in",), _buckets(m.frames_in), m.frames_in.total)
        frames.add_metric(("out",), _buckets(m.frames_out), m.frames_out.total)
        yield frames

    def _barriers(self) -> Iterator[Metric]:
        m = self.metrics
        yield _histogram("strata_barrier_latency_seconds", "Time from first arrival to announced release.", m.barrier_s)
        recent = GaugeMetricFamily(
            "strata_barrier_latency_recent_seconds",
            "95th percentile of the last 60 s: barrier-latency for an autoscaler. Absent if none was released.",
        )
        recent_s = m.recent_barrier_s()
        if recent_s is not None:
            recent.add_metric((), recent_s)
        yield recent
        yield _counter("strata_barriers_broken", "Barriers that ended without a release.", m.num_barriers_broken)
        num_open = sum(len(job.barriers.open) for job in self.jobs)
        yield _gauge("strata_barriers_open", "Barriers that are waiting.", num_open)

    def _journal(self) -> Iterator[Metric]:
        m = self.metrics
        yield _histogram("strata_journal_commit_seconds", "Duration of commits.", m.commit_s)
        yield _histogram("strata_journal_commit_events", "Events per commit.", m.commit_events)
        yield _counter("strata_journal_commit_bytes", "Bytes of events and snapshots committed.", m.num_commit_bytes)
        yield _counter("strata_journal_commit_failures", "Failed commits.", m.num_commits_failed)
        yield _counter("strata_journal_snapshots", "Snapshots written.", m.num_snapshots)
        size = GaugeMetricFamily("strata_journal_size_bytes", "Size of the journal. Absent if unknown.")
        if self.journal_bytes is not None:
            size.add_metric((), self.journal_bytes)
        yield size

    def _membership(self) -> Iterator[Metric]:
        m = self.metrics
        yield _counter("strata_workers_joined", "Workers that joined.", m.num_joined)
        left = CounterMetricFamily("strata_workers_left", "Workers that left, by cause.", labels=("cause",))
        for cause, num in m.num_left_by_cause.items():
            left.add_metric((cause,), num)
        yield left
        expiries = CounterMetricFamily("strata_lease_expiries", "Workers declared dead, by cause.", labels=("cause",))
        for cause in EXPIRY_CAUSES:
            expiries.add_metric((cause,), m.num_left_by_cause[cause])
        yield expiries
        yield _counter("strata_generation_changes", "Generations started, over all jobs.", m.num_generations)
        yield _counter("strata_shards_moved", "Shards that got a first or new owner.", m.num_shards_moved)
        yield _counter("strata_shards_done", "Shards acknowledged.", m.num_shards_done)
        yield _counter("strata_checkpoints_committed", "Checkpoints acknowledged by all ranks.", m.num_checkpoints)

    def _now(self) -> Iterator[Metric]:
        yield _gauge("strata_jobs", "Number of jobs.", len(self.jobs))
        yield _gauge("strata_unannounced", "Answers that wait for a commit.", self.num_unannounced)
        workers = GaugeMetricFamily(
            "strata_workers", f"Workers by state; the {MAX_JOBS} largest jobs.", labels=("job", "state")
        )
        generations = GaugeMetricFamily("strata_generation", "The current generation, same jobs.", labels=("job",))
        by_size = sorted(self.jobs, key=lambda job: -len(job.membership.members))
        progress, servers = _Progress(), _Servers()
        others: Counter[str] = Counter()
        for place, job in enumerate(by_size):
            states: Counter[str] = Counter(member.state for member in job.membership.members.values())
            if place >= MAX_JOBS:
                others += states
                continue
            generations.add_metric((job.job_id,), job.announced[0])
            progress.add(job)
            servers.add(job)
            for state, num in sorted(states.items()):
                workers.add_metric((job.job_id, state), num)
        for state, num in sorted(others.items()):
            workers.add_metric((OTHER_JOBS, state), num)
        yield workers
        yield generations
        yield from progress.families
        yield from servers.families


class _Progress:
    """How far jobs are: their steps, rows and checkpoints. Parameter servers report no progress of their own."""

    def __init__(self) -> None:
        self._step = _of_job("strata_step", "The lowest step of all ranks, same jobs.")
        self._rows_per_s = _of_job("strata_rows_per_s", "Rows per second that the loaders of all ranks report.")
        self._suspects = _of_job("strata_workers_suspect", "Workers whose connection is lost, same jobs.")
        self._checkpoint_step = _of_job("strata_checkpoint_step", "Step of the checkpoint committed last.")
        self._checkpoint_time = _of_job("strata_checkpoint_time_seconds", "When it was committed, since 1970.")

    def add(self, job: Job) -> None:
        members = job.membership.members.values()
        ranks = [member for member in members if SERVER not in member.metrics]
        label = (job.job_id,)
        if ranks:
            self._step.add_metric(label, min(member.step for member in ranks))
            self._suspects.add_metric(label, sum(member.suspect_since_s is not None for member in members))
        rows = [member.metrics[ROWS_PER_S].last for member in ranks if ROWS_PER_S in member.metrics]
        if rows and math.isfinite(total_rows := sum(rows)):
            self._rows_per_s.add_metric(label, total_rows)
        if (latest := job.checkpoints.latest()) is not None:
            self._checkpoint_step.add_metric(label, latest.checkpoint.step)
            self._checkpoint_time.add_metric(label, latest.committed_at_s)

    @property
    def families(self) -> list[Metric]:
        return [self._step, self._rows_per_s, self._suspects, self._checkpoint_step, self._checkpoint_time]


class _Servers:
    """The parameter servers of jobs, as they report themselves."""

    def __init__(self) -> None:
        self._num = GaugeMetricFamily("strata_servers", "Parameter servers, same jobs.", labels=("job",))
        texts = {
            "rows": "Rows of the tables of all servers of a job.",
            "bytes": "Memory of the tables of all servers of a job.",
            "evicted": "Rows evicted since the servers started.",
            "pulls_per_s": "Pulls per second, at all servers of a job.",
            "pushes_per_s": "Pushes per second, at all servers of a job.",
            "staleness": "Steps between the fastest and the slowest worker.",
            "hits": "Rows pulled from memory, of tables of which a part is in a file.",
            "misses": "Rows pulled from files.",
        }
        self._by_figure = {
            name: GaugeMetricFamily(f"strata_server_{name}", text, labels=("job",)) for name, text in texts.items()
        }

    def add(self, job: Job) -> None:
        reported = [
            {name: series.last for name, series in member.metrics.items()}
            for member in job.membership.members.values()
            if SERVER in member.metrics
        ]
        if not reported:
            return
        self._num.add_metric((job.job_id,), len(reported))
        found = total(each for each in map(figures_of, reported) if each is not None)
        for name, value in ({} if found is None else found.as_metrics()).items():
            self._by_figure[name].add_metric((job.job_id,), value)

    @property
    def families(self) -> list[Metric]:
        return [self._num, *self._by_figure.values()]


def _of_job(name: str, help_text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_text, labels=("job",))


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(name, help_text, value=value)


def _gauge(name: str, help_text: str, value: float, **labels: str) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family


def _histogram(name: str, help_text: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(name, help_text)
    family.add_metric((), _buckets(histogram), histogram.total)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [*(f"{bound:g}" if bound < 1e5 else str(int(bound)) for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
