"""Benchmarks of Strata and of comparable systems (peers), measured in the same run on the same machine.

    strata bench NAME

A benchmark is a list of contenders: Strata and its peers. Every contender runs in a fresh process in each round, and
rounds are interleaved, so that a machine that slows down affects all contenders alike. `frame` turns samples into
figures and is pure, `run` starts the processes, `report` prints tables and JSON. `contenders/` has one module per
measured system. A benchmark may import everything except the command line, and nothing but the command line imports
this package.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.bench.frame import Benchmark

_HOMES = {
    "checkpoint": "strata.bench.checkpoint",
    "coordinator": "strata.bench.coordinator",
    "dashboard": "strata.bench.dashboard",
    "data": "strata.bench.data",
    "models": "strata.bench.models",
    "overhead": "strata.bench.overhead",
    "recovery": "strata.bench.recovery",
    "servers": "strata.bench.servers",
    "shards": "strata.bench.shards",
    "strategies": "strata.bench.strategies",
    "trainer": "strata.bench.trainer",
    "tune": "strata.bench.tune",
    "webdata": "strata.bench.webdata",
}
"""The module of each benchmark, which defines `BENCHMARK`; imported when the benchmark is requested."""


def names() -> list[str]:
    return sorted(_HOMES)


def get(name: str) -> Benchmark:
    if name not in _HOMES:
        nearest = difflib.get_close_matches(name, names(), n=1, cutoff=0.0)[0]
        raise InvalidArgument(
            f"unknown benchmark {name!r}; did you mean {nearest!r}? Benchmarks: {', '.join(names())}", field="name"
        )
    benchmark: Benchmark = importlib.import_module(_HOMES[name]).BENCHMARK
    return benchmark


def main(
    name: str,
    *,
    rounds: int | None = None,
    as_json: bool = False,
    quick: bool = False,
    only: Sequence[str] = (),
    settings: Sequence[str] = (),
) -> int:
    """Run a benchmark, print its figures and return the exit code: 1 if a contender failed.

    Args:
        settings: Values of the benchmark's `settings`, as NAME=VALUE.
    """
    from strata.bench.report import show  # noqa: PLC0415 (imports rich and psutil)
    from strata.bench.run import run_with_progress  # noqa: PLC0415

    benchmark = get(name).narrowed(only).with_settings(settings)
    outcome = run_with_progress(benchmark, rounds=rounds, quick=quick)
    show(benchmark, outcome, as_json=as_json)
    return 1 if outcome.failures else 0
