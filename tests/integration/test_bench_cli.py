"""The benchmarks run from the command line and print the JSON that programs read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from strata.bench.contenders import barrier_rounds

DEADLINE_S = 220
"""Enough for programs that take 15 s and start a dozen processes."""
pytestmark = pytest.mark.timeout(DEADLINE_S + 20)
KEYS = {
    "shards": {"assign_10k_ms", "shard_max_over_mean", "shard_moved_over_minimum"},
    "coordinator": {"requests_per_s", "unary_requests_per_s", "raw_unary_echo_per_s"},
    "recovery": {"recovery_s", "detection_s", "restore_s", "start_s"},
}
CONTENDERS = {
    "shards": [],
    "coordinator": ["--only", "strata", "--only", "grpc.aio echo"],
    "recovery": ["--only", "strata"],
}
"""The other contenders take too long for a test of the format."""


@pytest.mark.parametrize(
    "name", ["shards", *(pytest.param(name, marks=pytest.mark.slow) for name in ("coordinator", "recovery"))]
)
def test_a_benchmark_prints_one_json_object_of_measured_figures(name: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "strata.cli", "bench", name, "--quick", "--rounds", "1", "--json", *CONTENDERS[name]],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert set(found) == {"figures", "machine", "versions"}
    assert KEYS[name] <= set(found["figures"])
    for key, figure in found["figures"].items():
        value = figure["median"] if isinstance(figure, dict) else figure
        assert value > 0, key
    assert found["machine"]["cores"] >= 1
    assert found["versions"]["strata"]


def test_shards_stay_within_their_bounds_in_the_benchmark() -> None:
    """Bounds are asserted, not only printed."""
    ended = subprocess.run(
        [sys.executable, "-m", "strata.bench.contenders.shards_strata", "--quick"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    figures = json.loads(ended.stdout)["figures"]
    assert figures["shard_max_over_ceiling"] <= 1.0
    assert figures["shard_max_over_mean"] <= 1.05
    assert figures["shard_moved_over_minimum"] <= 1.2


def test_an_unknown_contender_is_refused_with_the_known_ones() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "strata.cli", "bench", "coordinator", "--only", "zookeeper"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 2
    assert "'zookeeper'" in ended.stderr
    assert "grpc.aio echo" in ended.stderr


def quick(module: str, cwd: Path, **environment: str) -> dict[str, dict[str, float]]:
    """Return the answer of a contender and check that it leaves nothing in its directory."""
    ended = subprocess.run(
        [sys.executable, "-m", f"strata.bench.contenders.{module}", "--quick"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        cwd=cwd,
        env={**os.environ, **environment},
    )
    assert ended.returncode == 0, ended.stderr
    assert not list(cwd.iterdir())
    report: dict[str, dict[str, float]] = json.loads(ended.stdout.splitlines()[-1])
    return report


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["coordinator_acks", "coordinator_barrier", "coordinator_detect", "coordinator_takeover"]
)
def test_a_slower_contender_measures(module: str, tmp_path: Path) -> None:
    figures = quick(module, tmp_path)["figures"]
    assert figures
    assert all(value > 0 for value in figures.values())


@pytest.mark.slow
def test_tls_and_a_token_are_measured_under_the_same_load(tmp_path: Path) -> None:
    figures = quick("coordinator_tls", tmp_path)["figures"]
    assert figures.keys() == {"tls_requests_per_s", "tls_unary_requests_per_s"}
    assert all(value > 0 for value in figures.values())


def test_barriers_on_relays_report_the_cpu_time_of_each_process(tmp_path: Path) -> None:
    """CPU is counted in hundredths of a second, so a short run may use none."""
    figures = quick("coordinator_barrier_1000", tmp_path)["figures"]
    assert figures.keys() == {
        "barrier_1000_p50_ms",
        "barrier_1000_p99_ms",
        "barrier_1000_server_cpu_ms",
        "barrier_1000_relays_cpu_ms",
        "barrier_1000_without_relays_p50_ms",
        "barrier_1000_without_relays_p99_ms",
        "barrier_1000_without_relays_server_cpu_ms",
    }
    assert 0 < figures["barrier_1000_p50_ms"] <= figures["barrier_1000_p99_ms"]
    assert 0 < figures["barrier_1000_without_relays_p50_ms"] <= figures["barrier_1000_without_relays_p99_ms"]


@pytest.mark.slow
def test_idle_workers_on_relays_stay_alive_and_only_the_coordinator_is_measured(tmp_path: Path) -> None:
    assert quick("coordinator_idle_relayed", tmp_path)["figures"].keys() == {"idle_1000_relayed_cpu_fraction"}


@pytest.mark.slow
def test_a_long_idle_run_reports_memory_growth(tmp_path: Path) -> None:
    figures = quick("coordinator_idle", tmp_path, STRATA_BENCH_IDLE_S="2")["figures"]
    grown_mb = figures["idle_1000_rss_mb"] - figures["idle_1000_rss_first_minute_mb"]
    assert figures["idle_1000_rss_growth_mb"] == pytest.approx(grown_mb)


@pytest.mark.slow
def test_a_short_idle_run_reports_no_memory_growth(tmp_path: Path) -> None:
    figures = quick("coordinator_idle", tmp_path, STRATA_BENCH_IDLE_S="")["figures"]
    assert figures.keys() == {"idle_1000_cpu_fraction", "idle_1000_rss_mb"}


@pytest.mark.parametrize("peer", ["etcd", "redis"])
def test_a_durable_peer_measures_and_ends_or_is_absent(peer: str, tmp_path: Path) -> None:
    report = quick(f"coordinator_{peer}", tmp_path)
    if "not_installed" in report:
        pytest.skip(f"{peer} is missing; run scripts/bench_packages.sh")
    assert all(value > 0 for value in report["figures"].values())
    assert report["versions"][peer]
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]


@pytest.mark.parametrize(("peer", "program"), [("etcd", "etcd"), ("redis", "redis-server")])
def test_a_missing_durable_peer_is_absent_without_failure(peer: str, program: str, tmp_path: Path) -> None:
    assert quick(f"coordinator_{peer}", tmp_path, PATH="") == {"not_installed": program}


def meet_in_processes(node: str) -> subprocess.CompletedProcess[str]:
    """Run barriers of 10 workers in 2 processes that cannot import Strata, as in the peers' environment."""
    program = f"""
import sys, time
sys.path.append({str(Path(barrier_rounds.__file__).parent)!r})
import barrier_rounds as rounds

def node(ranks, wait_for_all, num_rounds):
    {node}
    start_s = wait_for_all()
    times = [[(start_s + n + rank, start_s + n + 10) for rank in ranks] for n in range(num_rounds)]
    wait_for_all()
    return times

print(rounds.measure(node, 3, num_workers=10))
assert "strata" not in sys.modules
"""
    return subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def test_a_wait_is_counted_from_the_last_arrival_in_any_process() -> None:
    ended = meet_in_processes("pass")
    assert ended.returncode == 0, ended.stderr
    waits_s = json.loads(ended.stdout)
    assert len(waits_s) == 3 * 10
    assert waits_s == pytest.approx([1.0] * 30)


def test_a_process_that_dies_ends_the_measurement_with_its_last_output() -> None:
    ended = meet_in_processes("raise KeyError('lost')")
    assert ended.returncode != 0
    assert "KeyError: 'lost'" in ended.stderr
    assert "ended too early" in ended.stderr
