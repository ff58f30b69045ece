"""The strategies on a sample of 3 million flights: which of them arrive late?"""

from __future__ import annotations

from strata.bench.contenders.models_data import flights
from strata.bench.contenders.models_flights import PROBLEM
from strata.bench.contenders.strategies_job import run

NUM_ROWS = 200_000

if __name__ == "__main__":
    run(PROBLEM, flights, NUM_ROWS)
