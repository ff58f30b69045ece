"""The benchmark of strategies at a small size, on made-up files in place of the downloads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_bench_models import DEADLINE_S, ROWS, place, write_flights

from strata.bench.contenders.strategies_job import strategy_of
from strata.bench.strategies import BENCHMARK, DATA_SETS, STRATEGIES, SYNC
from strata.train import AllReduce

__all__ = ["place"]
pytestmark = pytest.mark.timeout(DEADLINE_S + 20)


def test_every_strategy_is_compared_with_all_reduce_on_every_data_set() -> None:
    keys = {figure.key for figure in BENCHMARK.figures}

    assert keys == {f"auc_{data}_{each}" for data in DATA_SETS for each in STRATEGIES} | {
        f"auc_{data}_{each}_minus_{SYNC}" for data in DATA_SETS for each in STRATEGIES if each != SYNC
    }
    assert [name for name in STRATEGIES if strategy_of(name) == AllReduce()] == [SYNC]


@pytest.mark.slow
def test_every_strategy_is_measured_and_synchronous_servers_have_the_auc_of_all_reduce(place: Path) -> None:
    write_flights(place)
    command = ["bench", "strategies", "--quick", "--json", "--only", "flights", "--set", f"rows={ROWS}"]

    ended = subprocess.run(
        [sys.executable, "-m", "strata.cli", *command], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )

    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)["figures"]
    assert found.keys() == {figure.key for figure in BENCHMARK.figures if "flights" in figure.key}
    assert found["auc_flights_hybrid_minus_sync"] == 0.0
    assert all(0.0 < found[f"auc_flights_{each}"] <= 1.0 for each in STRATEGIES)
