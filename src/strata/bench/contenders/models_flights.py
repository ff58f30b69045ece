"""The reference models on 3 million flights: which of them arrive late?"""

from __future__ import annotations

from strata.bench.contenders.models_data import flights
from strata.bench.contenders.models_zoo import Problem, run
from strata.trainer.features import DenseFeat, SparseFeat

PROBLEM = Problem(
    name="flights",
    label="late",
    columns=(*map(SparseFeat, ("origin", "destination", "hour", "weekday", "month")), DenseFeat("distance")),
    crosses=(("origin", "destination"), ("origin", "hour")),
    towers=(("origin", "hour", "weekday", "month"), ("destination", "distance")),
    num_rows=500_000,
    shares=(0.6, 0.2, 0.2),
    batch_size=2048,
)

if __name__ == "__main__":
    run(PROBLEM, flights)
