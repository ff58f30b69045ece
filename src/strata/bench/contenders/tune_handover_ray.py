"""Ray Tune: from the report that stops a trial to the first line of the next one, on a running cluster."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from importlib import metadata, util
from typing import Any

from strata.bench.contenders.tune_handover_trial import run
from strata.bench.contenders.tune_marks import handovers_ms, read_lives

NUM_TRIALS, QUICK_TRIALS = 10, 4


def trial(config: dict[str, Any]) -> None:
    from ray import tune  # noqa: PLC0415

    run(config["marks_path"], lambda step, loss: tune.report({"loss": loss, "step": step}))


def main() -> None:
    from ray import tune  # noqa: PLC0415

    from strata.bench.contenders.trainer_ray import start_cluster  # noqa: PLC0415

    start_cluster()
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as directory:
        marks_path = f"{directory}/marks"
        tune.Tuner(
            trial,
            param_space={"x": tune.uniform(0.0, 1.0), "marks_path": marks_path},
            tune_config=tune.TuneConfig(
                metric="loss",
                mode="min",
                num_samples=QUICK_TRIALS if "--quick" in sys.argv else NUM_TRIALS,
                max_concurrent_trials=1,
                scheduler=tune.schedulers.ASHAScheduler(time_attr="step", grace_period=1, max_t=1_000),
            ),
            run_config=tune.RunConfig(storage_path=f"{directory}/kept", verbose=0),
        ).fit()
        found = handovers_ms(read_lives(marks_path))
    figures = {"ray_tune_stop_to_next_ms": statistics.median(found)}
    print(json.dumps({"figures": figures, "versions": {"ray": metadata.version("ray")}}))


if __name__ == "__main__":
    if util.find_spec("ray") is None:
        print(json.dumps({"not_installed": "ray"}))
    else:
        os.environ |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AIR_NEW_OUTPUT": "0"}
        main()
