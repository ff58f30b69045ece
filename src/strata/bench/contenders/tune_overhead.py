"""What a study costs beside training: bookkeeping per trial, the time to a decision, and to the next trial."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from strata.bench.contenders.tune_handover_trial import run as run_handover
from strata.bench.contenders.tune_marks import Marks, handovers_ms, read_lives
from strata.bench.contenders.tune_problems import FUNCTIONS
from strata.bench.contenders.tune_search import OptunaSearch, StrataSearch, space_of
from strata.train.orchestrator import TrainingOrchestrator
from strata.tune import SearchSpace
from strata.tune.journal import StudyJournal

BLOCK = 25
"""Trials before the other system takes its turn."""
NUM_BLOCKS, QUICK_BLOCKS = 20, 3
NUM_EMPTY, QUICK_EMPTY = 60, 6
NUM_STOPPED, QUICK_STOPPED = 40, 6
NUM_REPORTS, QUICK_REPORTS = 1_500, 60
"""Pairs of reports of each of two trials that run at the same time."""
REPORT_PAUSE_S = 0.004


def bookkeeping(directory: Path, num_blocks: int) -> dict[str, float]:
    """Time trials of a study with its journal and of Optuna in memory, with the same sampler, in turns."""
    from optuna.samplers import RandomSampler  # noqa: PLC0415

    parameters = FUNCTIONS[0].parameters
    theirs = OptunaSearch(parameters, RandomSampler(seed=0))
    ours_ms, theirs_ms = [], []
    with StudyJournal(directory / "study.jsonl") as journal:
        ours = StrataSearch(
            space_of(parameters),
            RandomSampler(seed=0),
            num_workers=1,
            num_trials=BLOCK * (num_blocks + 1) + 1,
            journal=journal,
        )
        for _ in range(num_blocks + 1):
            began_s = time.perf_counter()
            for _ in range(BLOCK):
                asked = ours.ask()
                assert asked is not None
                ours.report(asked[0], 1, 1.0)
                ours.tell(asked[0], 1.0)
            turned_s = time.perf_counter()
            for _ in range(BLOCK):
                trial, _ = theirs.ask()
                trial.report(1.0, 1)
                theirs.tell(trial, 1.0)
            ours_ms.append((turned_s - began_s) * 1e3 / BLOCK)
            theirs_ms.append((time.perf_counter() - turned_s) * 1e3 / BLOCK)
    pairs = list(zip(ours_ms[1:], theirs_ms[1:], strict=True))  # the first block imports
    return {
        "trial_overhead_ms": statistics.median(our - their for our, their in pairs),
        "optuna_trial_ms": statistics.median(their for _, their in pairs),
    }


def one_parameter() -> SearchSpace:
    return SearchSpace().add_float("x", min=0.0, max=1.0)


def empty_trial(config: dict[str, Any], *, marks_path: str) -> float:
    Marks(marks_path)
    return float(config["x"])


def stopped_trial(config: dict[str, Any], trial: Any, *, marks_path: str) -> None:  # noqa: ARG001
    run_handover(marks_path, lambda step, loss: trial.report(step=step, loss=loss))


def reporting_trial(config: dict[str, Any], trial: Any, *, times_path: str, num_pairs: int) -> None:
    """Time pairs of reports: the second one returns once the first is answered."""
    found = []
    for pair in range(num_pairs):
        time.sleep(REPORT_PAUSE_S)
        began_s = time.perf_counter()
        trial.report(step=2 * pair, loss=float(config["x"]))
        trial.report(step=2 * pair + 1, loss=float(config["x"]))
        found.append((time.perf_counter() - began_s) * 1e3)
    np.save(f"{times_path}/{trial.number}.npy", np.array(found))


def processes(directory: Path, *, is_quick: bool) -> dict[str, float]:
    """Measure studies of real processes."""
    empty, stopped = str(directory / "empty"), str(directory / "stopped")
    TrainingOrchestrator(hpt_mode="random").tune(
        partial(empty_trial, marks_path=empty),
        space=one_parameter(),
        num_trials=QUICK_EMPTY if is_quick else NUM_EMPTY,
        workers=1,
    )
    starts_s = [each.started_s for each in read_lives(empty)]
    TrainingOrchestrator(hpt_mode="asha").tune(
        partial(stopped_trial, marks_path=stopped),
        space=one_parameter(),
        num_trials=QUICK_STOPPED if is_quick else NUM_STOPPED,
        workers=1,
        options={"kind": "stop"},
    )
    times = directory / "times"
    times.mkdir()
    TrainingOrchestrator(hpt_mode="median").tune(
        partial(reporting_trial, times_path=str(times), num_pairs=QUICK_REPORTS if is_quick else NUM_REPORTS),
        space=one_parameter(),
        num_trials=2,
        workers=2,
    )
    decisions_ms = np.concatenate([np.load(each) for each in times.iterdir()])
    return {
        "empty_trial_ms": statistics.median(np.diff(starts_s)) * 1e3,
        "stop_to_next_ms": statistics.median(handovers_ms(read_lives(stopped))),
        "report_decision_p50_ms": float(np.percentile(decisions_ms, 50)),
        "report_decision_p99_ms": float(np.percentile(decisions_ms, 99)),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    is_quick = "--quick" in sys.argv
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as name:
        os.environ["STRATA_RUNS_DIR"] = f"{name}/runs"
        figures = bookkeeping(Path(name), QUICK_BLOCKS if is_quick else NUM_BLOCKS)
        figures |= processes(Path(name), is_quick=is_quick)
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
