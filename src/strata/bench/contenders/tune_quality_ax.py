"""Ax: the regret of its default search, and the time to its next question. Runs in the peers' environment."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import statistics
import sys
import time
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
PROBLEMS = ("branin", "hartmann6")
NUM_TRIALS, QUICK_TRIALS = 40, 8
"""As many as the Gaussian process of Strata gets: `GP_TRIALS`."""


def search(problem: Any, *, seed: int, num_trials: int) -> tuple[float, float]:
    """Return the regret and the median time of a question, in milliseconds."""
    configs = importlib.import_module("ax.api.configs")
    client = importlib.import_module("ax.api.client").Client(random_seed=seed)
    client.configure_experiment(
        parameters=[
            configs.RangeParameterConfig(name=each.name, parameter_type="float", bounds=(each.low, each.high))
            for each in problem.parameters
        ]
    )
    client.configure_optimization(objective="-loss")
    best, asked_ms = float("inf"), []
    for _ in range(num_trials):
        began_s = time.perf_counter()
        ((trial, config),) = client.get_next_trials(max_trials=1).items()
        asked_ms.append((time.perf_counter() - began_s) * 1e3)
        loss = problem.loss(config)
        best = min(best, loss)
        client.complete_trial(trial_index=trial, raw_data={"loss": loss})
    return problem.regret(best), statistics.median(asked_ms)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    num_trials = QUICK_TRIALS if "--quick" in sys.argv else NUM_TRIALS
    seed = int(os.environ.get("STRATA_BENCH_ROUND", "0")) + int(os.environ.get("STRATA_BENCH_SEED", "0"))
    figures, asked = {}, []
    for problem in importlib.import_module("tune_problems").FUNCTIONS:
        if problem.name in PROBLEMS:
            regret, asked_ms = search(problem, seed=seed, num_trials=num_trials)
            figures[f"regret_ax_{problem.name}"] = regret
            asked.append(asked_ms)
    figures["ax_ask_ms"] = statistics.median(asked)
    print(json.dumps({"figures": figures, "versions": {"ax-platform": metadata.version("ax-platform")}}))


if __name__ == "__main__":
    if importlib.util.find_spec("ax") is None:
        print(json.dumps({"not_installed": "ax-platform"}))
    else:
        main()
