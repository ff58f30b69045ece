"""The deciding part of a large study: 10,000 trials with 100 reports each on 64 simulated workers, with its journal.

The loss falls from trial to trial, so that ASHA compares at every rung and stops none: all reports are made.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import psutil

from strata.bench.contenders.tune_search import StrataSearch
from strata.tune import SearchSpace
from strata.tune.journal import StudyJournal

NUM_TRIALS, QUICK_TRIALS = 10_000, 300
NUM_REPORTS = 100
NUM_WORKERS = 64


def main() -> None:
    num_trials = QUICK_TRIALS if "--quick" in sys.argv else NUM_TRIALS
    space = SearchSpace().add_float("learning_rate", min=1e-5, max=1e-1, log=True).add_int("layers", min=1, max=8)
    memory = psutil.Process(os.getpid()).memory_info
    cpu_s: list[float] = []
    """Used after each hundred reports, that is per trial. Trials end in waves of 64, which would not divide a tenth."""
    with (
        tempfile.TemporaryDirectory(prefix="strata-bench-") as directory,
        StudyJournal(Path(directory) / "study.jsonl") as journal,
    ):
        before_bytes, began_s = memory().rss, time.process_time()
        study = StrataSearch(
            space, "asha", num_workers=NUM_WORKERS, num_trials=num_trials, options={"kind": "stop"}, journal=journal
        )
        num_reports = 0
        while running := [start for start, _ in iter(study.ask, None)]:
            for step in range(1, NUM_REPORTS + 1):
                for start in running:
                    study.report(start, step, 1.0 - start.trial / num_trials)
                    num_reports += 1
                    if num_reports % NUM_REPORTS == 0:
                        cpu_s.append(time.process_time() - began_s)
            for start in running:
                study.tell(start, 1.0 - start.trial / num_trials)
        all_s = time.process_time() - began_s
        used_bytes = memory().rss - before_bytes
    finished = sum(each.state == "finished" for each in study.search.state.trials.values())
    assert finished == num_trials, f"{finished} of {num_trials} trials have finished"
    tenth = num_trials // 10
    figures = {
        "scale_decision_us": all_s * 1e6 / (num_trials * (NUM_REPORTS + 1)),
        "scale_growth": (cpu_s[-1] - cpu_s[-1 - tenth]) / (cpu_s[2 * tenth] - cpu_s[tenth]),
        "scale_memory_kb": used_bytes / 1e3 / num_trials,
    }
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
