"""`strata bench shards`: dealing shards out to workers, how fast, how evenly, and how much of it moves."""

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
        Figure(key="reassign_10k_join_ms", title="one of 1,000 workers joins", unit="ms"),
        Figure(key="reassign_10k_leave_ms", title="one of 1,000 workers leaves", unit="ms"),
        Figure(key="assign_1m_ms", title="1,000,000 shards over 1,000 workers", unit="ms"),
        Figure(
            key="shard_max_over_mean",
            title="fullest worker over the mean",
            peers=("plain_ring_max_over_mean", "uhashring_max_over_mean"),
        ),
        Figure(key="shard_max_over_ceiling", title="fullest worker over its ceiling"),
        Figure(key="shard_moved_over_minimum", title="moved over the unavoidable, worst case"),
        Figure(key="plain_ring_ms", title="plain 150-node ring in numpy", unit="ms"),
        Figure(key="plain_ring_max_over_mean", title="plain 150-node ring"),
        Figure(key="uhashring_ms", title="uhashring", unit="ms"),
        Figure(key="uhashring_max_over_mean", title="uhashring"),
    ),
    notes=(
        "Times include everything: hashing shards and workers, building the ring, dealing out.",
        "Fullest over mean: at exactly 100 and 1,000 workers, after a fresh start and along a random history.",
        "Ceiling: max(⌈mean⌉, ⌊1.05 mean⌋), at every step of a random history of joins and leaves.",
        "Unavoidable: a leaver's shards, a joiner's floor; more where the bounds themselves force more.",
    ),
)
