"""Figures of parameter servers: measured by the server, sent as metrics, and summed up for views."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.clock import ManualClock
from strata.coordinator.state.server_figures import SERVER, ServerFigures, figures_of, number_of, total
from strata.servers.clocks import Push
from strata.servers.meter import Meter
from strata.servers.server import Server
from strata.servers.state import Fence, ServerState
from strata.servers.table.table import TableSpec
from strata.transport.tokens import Guard

COUNTS = st.integers(0, 2**50)
FIGURES = st.builds(
    ServerFigures,
    rows=COUNTS,
    bytes=COUNTS,
    evicted=COUNTS,
    pulls_per_s=st.none() | st.floats(0, 1e9),
    pushes_per_s=st.none() | st.floats(0, 1e9),
    staleness=st.none() | st.integers(0, 1_000),
    hits=st.none() | COUNTS,
    misses=st.none() | COUNTS,
)


@given(FIGURES, st.integers(0, 4_095))
def test_figures_pass_unchanged_through_the_metrics_of_a_heartbeat(figures: ServerFigures, number: int) -> None:
    metrics = {SERVER: float(number), **figures.as_metrics()}

    assert figures_of(metrics) == figures
    assert number_of(metrics) == number
    assert figures_of(figures.as_metrics()) is None, "a worker may have metrics of the same names"


@given(st.lists(FIGURES, min_size=1, max_size=5))
def test_a_total_adds_what_was_measured_and_takes_the_largest_staleness(servers: list[ServerFigures]) -> None:
    found = total(servers)

    assert found is not None
    assert found.rows == sum(each.rows for each in servers)
    assert (found.hits is None) == all(each.hits is None for each in servers)
    assert found.staleness == max((each.staleness for each in servers if each.staleness is not None), default=None)
    assert found.hit_rate is None or 0 <= found.hit_rate <= 1
    assert total([]) is None


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_count_as_not_measured(wrong: float) -> None:
    assert number_of({SERVER: wrong}) is None
    assert figures_of({SERVER: 0.0, "rows": wrong, "bytes": 1.0, "evicted": 0.0}) is None


def test_a_meter_measures_rows_rates_the_spread_of_clocks_and_hits() -> None:
    specs = [
        TableSpec(name="in memory", width=2, max_rows=8),
        TableSpec(name="large", width=2, max_rows=8, memory_rows=2),
    ]
    state = ServerState(specs, num_workers=2, staleness=None, map_file=bytearray)
    server, clock = Server(state, guard=Guard(tuple)), ManualClock()
    meter = Meter([server], clock)
    first = meter.read()
    assert first["rows"] == first["evicted"] == first["staleness"] == first["hits"] == 0
    assert "pulls_per_s" not in first, "a rate needs two readings"

    fence, keys = Fence(0, 0, 0), np.arange(4, dtype=np.uint64)
    state.join(fence)
    for clock_of_worker in (1, 2, 3):
        push = Push(keys, np.ones((4, 2), np.float32))
        state.push(fence, clock_of_worker, {"in memory": push, "large": push})
        state.pull(fence, clock_of_worker, {"in memory": keys, "large": keys}, lambda _: None)
        server.num_pushes += 1
        server.num_pulls += 2
    clock.advance(2.0)
    found = meter.read()

    assert found["rows"] == 8
    assert found["bytes"] == sum(table.num_bytes for table in state.tables.values())
    assert (found["pulls_per_s"], found["pushes_per_s"]) == (3.0, 1.5)
    assert found["staleness"] == 3, "the other worker has pushed nothing"
    assert (found["hits"], found["misses"]) == (6, 6), "rows of the table without a file do not count"
    server.close()
