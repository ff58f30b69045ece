"""The reference models on MovieLens 100k: which movies does a user rate 4 or better?"""

from __future__ import annotations

from strata.bench.contenders.models_data import movielens
from strata.bench.contenders.models_zoo import Problem, run
from strata.trainer.features import DenseFeat, SparseFeat, VarLenFeat

PROBLEM = Problem(
    name="movielens",
    label="liked",
    columns=(
        *map(SparseFeat, ("user", "item", "gender", "occupation")),
        VarLenFeat("genres", separator=" "),
        DenseFeat("age"),
        DenseFeat("year"),
    ),
    crosses=(("item", "gender"), ("item", "occupation")),
    towers=(("user", "gender", "occupation", "age"), ("item", "genres", "year")),
    num_rows=100_000,
    shares=(0.8, 0.1, 0.1),
    batch_size=512,
)

if __name__ == "__main__":
    run(PROBLEM, movielens)
