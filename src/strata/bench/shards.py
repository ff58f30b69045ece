"""`strata bench shards`: speed and balance of shard assignment, and how many shards move."""

from __future__ import annotations

from strata.bench.frame import Benchmark, Contender, Figure

BENCHMARK = Benchmark(
    name="shards",
    title="Shard assignment",
    contenders=(
        Contender(name="strata", module="strata.bench.contenders.shards_strata", usual_s=8.0),
        Contender(name="plain ring", module="strata.bench.contenders.shards_plain_ring", usual_s=2.0),
        Contender(name="uhashring", module="strata.bench.contenders.shards_uhashring", venv="peers", usual_s=5.0),
    ),
    figures=(
        Figure(
            key="assign_10k_ms",
            title="10,000 shards over 1,000 workers",
            unit="ms",
            peers=("plain_ring_ms", "uhashring_ms"),
        ),
        Figure(key="assign_10k_100_workers_ms", title="10,000 shards over 100 workers", unit="ms"),
        Figure(key="reassign_10k_join_ms", title="reassignment when one of 1,000 workers joins", unit="ms"),
        Figure(key="reassign_10k_leave_ms", title="reassignment when one of 1,000 workers leaves", unit="ms"),
        Figure(key="assign_1m_ms", title="1,000,000 shards over 1,000 workers", unit="ms"),
        Figure(
            key="shard_max_over_mean",
            title="most loaded worker / mean",
            peers=("plain_ring_max_over_mean", "uhashring_max_over_mean"),
        ),
        Figure(key="shard_max_over_ceiling", title="most loaded worker / its upper bound"),
        Figure(key="shard_moved_over_minimum", title="shards moved / minimum possible, worst case"),
        Figure(key="plain_ring_ms", title="plain ring, 150 virtual nodes, numpy", unit="ms"),
        Figure(key="plain_ring_max_over_mean", title="plain ring: most loaded worker / mean"),
        Figure(key="uhashring_ms", title="uhashring", unit="ms"),
        Figure(key="uhashring_max_over_mean", title="uhashring: most loaded worker / mean"),
    ),
    notes=(
        "Times include hashing of shards and workers, building the ring, and the assignment.",
        "Most loaded / mean: at 100 and 1,000 workers, after a fresh start and after random joins and leaves.",
        "Upper bound: max(⌈mean⌉, ⌊1.05 mean⌋), checked after each of many random joins and leaves.",
        "Minimum possible: a leaving worker's shards, or a joining worker's lower bound, plus what the bounds force.",
    ),
)
