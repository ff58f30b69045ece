"""Series of parameter servers: totals of what they report, and nothing that they did not measure."""

from __future__ import annotations

from strata.coordinator.state.server_figures import ServerFigures
from strata.dashboard.sample import JobSample, job_values, unit_of


def test_only_measured_figures_of_servers_become_series() -> None:
    figures = ServerFigures(rows=10, bytes=4_096, evicted=0, pulls_per_s=2.5, hits=3, misses=1)
    values = job_values(JobSample("j", 1, "", (), servers=figures), [])

    assert {name: value.mean for name, value in values.items()} == {
        "servers.rows": 10.0,
        "servers.bytes": 4_096.0,
        "servers.pulls_per_s": 2.5,
        "servers.hit_rate": 0.75,
    }
    assert [unit_of(name) for name in values] == ["", "bytes", "1/s", ""]


def test_a_job_without_servers_has_no_series_of_servers() -> None:
    assert job_values(JobSample("j", 1, "", ()), []) == {}
