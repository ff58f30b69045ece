"""The regret of Strata and of Optuna alone, with the same sampler, seeds and number of trials or worker-seconds."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import warnings
from importlib import metadata
from typing import TYPE_CHECKING, Any

from strata.bench.contenders import models_data
from strata.bench.contenders.tune_problems import FUNCTIONS, TABLES, Problem, table_problem
from strata.bench.contenders.tune_search import OptunaSearch, StrataSearch, lowest, space_of
from strata.bench.run import ROUND_VARIABLE
from strata.bench.tune import GP_PROBLEMS, GP_TRIALS, NUM_TRIALS, NUM_WORKERS, SEEDS, regret_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

QUICK_TRIALS = 12


def tpe(seed: int) -> Any:
    from optuna.samplers import TPESampler  # noqa: PLC0415

    return TPESampler(seed=seed)


def gp(seed: int) -> Any:
    from optuna.samplers import GPSampler  # noqa: PLC0415

    return GPSampler(seed=seed, deterministic_objective=False)  # as the mode "bayesian" creates it


def regrets(
    problem: Problem,
    mode: Callable[[int], object],
    sampler: Callable[[int], Any],
    *,
    seeds: Iterable[int],
    num_trials: int,
    num_workers: int = 1,
) -> tuple[float, float]:
    """Return the median regret of Strata and of Optuna. With several workers, worker-seconds limit both instead of
    trials: as many as the trials would take.
    """
    until_s = math.inf if num_workers == 1 else num_trials * problem.usual_cost_s / num_workers
    most = num_trials if num_workers == 1 else 3 * num_trials
    limits: dict[str, Any] = {"num_workers": num_workers, "num_trials": most, "until_s": until_s}
    ours, theirs = [], []
    space = space_of(problem.parameters)
    for seed in seeds:
        strata = StrataSearch(space, mode(seed), seed=seed, num_workers=num_workers, num_trials=most)
        ours.append(problem.regret(lowest(strata, problem, **limits)))
        theirs.append(problem.regret(lowest(OptunaSearch(problem.parameters, sampler(seed)), problem, **limits)))
    return statistics.median(ours), statistics.median(theirs)


def main() -> None:
    warnings.simplefilter("ignore")
    is_quick = "--quick" in sys.argv
    number = int(os.environ.get(ROUND_VARIABLE, "0")) + int(os.environ.get("STRATA_BENCH_SEED", "0"))
    seeds = [number] if is_quick else range(number * SEEDS, (number + 1) * SEEDS)
    try:
        tables = [table_problem(each, models_data.tables()) for each in TABLES]
    except models_data.NotFetched as error:
        print(f"without tables: {error}", file=sys.stderr)
        tables = []
    figures: dict[str, float] = {}
    in_trials, in_seconds = [], []
    for problem in (*FUNCTIONS, *tables):
        num_trials = QUICK_TRIALS if is_quick else NUM_TRIALS
        ours, theirs = regrets(problem, tpe, tpe, seeds=seeds, num_trials=num_trials)
        figures |= {regret_key("tpe", problem.name): ours, regret_key("optuna_tpe", problem.name): theirs}
        in_trials.append(ours / theirs)
        ours, theirs = regrets(problem, tpe, tpe, seeds=seeds, num_trials=num_trials, num_workers=NUM_WORKERS)
        figures |= {
            regret_key("tpe_workers", problem.name): ours,
            regret_key("optuna_tpe_workers", problem.name): theirs,
        }
        in_seconds.append(ours / theirs)
        if problem.name in GP_PROBLEMS:
            num_trials = QUICK_TRIALS if is_quick else GP_TRIALS
            ours, theirs = regrets(problem, lambda _: "bayesian", gp, seeds=seeds, num_trials=num_trials)
            figures |= {regret_key("gp", problem.name): ours, regret_key("optuna_gp", problem.name): theirs}
            in_trials.append(ours / theirs)
    figures["regret_over_optuna"] = statistics.geometric_mean(in_trials)
    figures["regret_per_worker_second_over_optuna"] = statistics.geometric_mean(in_seconds)
    print(json.dumps({"figures": figures, "versions": {"optuna": metadata.version("optuna")}}))


if __name__ == "__main__":
    main()
