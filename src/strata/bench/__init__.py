"""Benchmarks: our figures beside those of others, measured in the same run on the same machine.

    strata bench NAME

Each benchmark is a list of contenders, ours and peers. Every contender runs in a fresh process each round, and the
rounds are interleaved, so that a machine that slows down slows down everybody. `frame` holds what is measured and how
samples become figures (pure), `run` the processes, `report` what people and programs read.
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
    "data": "strata.bench.data",
    "overhead": "strata.bench.overhead",
    "recovery": "strata.bench.recovery",
    "shards": "strata.bench.shards",
}
"""Where each benchmark is: a module with a `BENCHMARK`, imported when it is asked for."""


def names() -> list[str]:
    return sorted(_HOMES)


def get(name: str) -> Benchmark:
    if name not in _HOMES:
        nearest = difflib.get_close_matches(name, names(), n=1, cutoff=0.0)[0]
        raise InvalidArgument(
            f"there is no benchmark {name!r}; did you mean {nearest!r}? Known: {', '.join(names())}", field="name"
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
    """Run a benchmark, show its figures, and return the exit code: 1 if a contender failed.

    Settings are given as NAME=VALUE; see the `settings` of the benchmark.
    """
    from strata.bench.report import show  # noqa: PLC0415  rich and psutil are needed only here
    from strata.bench.run import run_with_progress  # noqa: PLC0415

    benchmark = get(name).narrowed(only).with_settings(settings)
    outcome = run_with_progress(benchmark, rounds=rounds, quick=quick)
    show(benchmark, outcome, as_json=as_json)
    return 1 if outcome.failures else 0
