"""The strategies on MovieLens 100k: which movies does a user rate 4 or better?"""

from __future__ import annotations

from strata.bench.contenders.models_data import movielens
from strata.bench.contenders.models_movielens import PROBLEM
from strata.bench.contenders.strategies_job import run

if __name__ == "__main__":
    run(PROBLEM, movielens, PROBLEM.num_rows)
