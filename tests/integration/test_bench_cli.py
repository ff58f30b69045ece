"""The benchmarks run from the command line and keep the shape that programs read."""

import json
import subprocess
import sys

import pytest

KEYS = {
    "shards": {"assign_10k_ms", "shard_max_over_mean", "shard_moved_over_minimum"},
    "coordinator": {"requests_per_s", "unary_requests_per_s", "raw_unary_echo_per_s"},
}
CONTENDERS = {"shards": [], "coordinator": ["--only", "strata", "--only", "grpc.aio echo"]}
"""The others take too long for a test of the shape."""


@pytest.mark.parametrize("name", sorted(KEYS))
def test_the_last_line_of_a_benchmark_is_one_object_of_measured_figures(name: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "strata.cli", "bench", name, "--quick", "--rounds", "1", "--json", *CONTENDERS[name]],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert set(found) == {"figures", "machine", "versions"}
    assert KEYS[name] <= set(found["figures"])
    for key, figure in found["figures"].items():
        value = figure["median"] if isinstance(figure, dict) else figure
        assert value > 0, key
    assert found["machine"]["cores"] >= 1
    assert found["versions"]["strata"]


def test_shards_stay_within_their_bounds_in_the_benchmark_too() -> None:
    """What is a bound and not a speed is asserted, not only printed."""
    ended = subprocess.run(
        [sys.executable, "-m", "strata.bench.contenders.shards_strata", "--quick"],
        capture_output=True,
        text=True,
        timeout=55,
        check=True,
    )
    figures = json.loads(ended.stdout)["figures"]
    assert figures["shard_max_over_ceiling"] <= 1.0
    assert figures["shard_max_over_mean"] <= 1.05
    assert figures["shard_moved_over_minimum"] <= 1.2


def test_a_contender_that_is_not_there_is_named_with_those_that_are() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "strata.cli", "bench", "coordinator", "--only", "etcd"],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert ended.returncode == 2
    assert "'etcd'" in ended.stderr
    assert "grpc.aio echo" in ended.stderr


@pytest.mark.parametrize("module", ["coordinator_barrier", "coordinator_detect", "coordinator_takeover"])
def test_a_slower_contender_measures(module: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", f"strata.bench.contenders.{module}", "--quick"],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])["figures"]
    assert figures
    assert all(value > 0 for value in figures.values())
