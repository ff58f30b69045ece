"""Ray Tune: ASHA on two workers of a running cluster."""

from __future__ import annotations

import json
import os
import warnings
from importlib import metadata, util
from typing import Any

from strata.bench.contenders.tune_curve import Job, Training, measured
from strata.bench.tune import CURVE_WORKERS, ETA, MAX_EPOCHS


def train(config: dict[str, Any]) -> None:
    from ray import tune  # noqa: PLC0415

    job = config["job"]
    found = None
    for _, found in job.epochs(Training(config["config"], job.directory)):
        tune.report({"auc": found})
    if found is None:
        tune.report({"auc": 0.0})


def run(job: Job, configs: list[dict[str, Any]], seed: int) -> None:  # noqa: ARG001
    from ray import tune  # noqa: PLC0415

    class Reached(tune.Stopper):
        """Ends the study, because each remaining trial would take a second to start."""

        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:  # noqa: ARG002
            return job.reached.exists()

        def stop_all(self) -> bool:
            return job.reached.exists()

    tune.Tuner(
        tune.with_resources(train, {"cpu": 1}),
        param_space={"job": job, "config": tune.grid_search(configs)},
        tune_config=tune.TuneConfig(
            metric="auc",
            mode="max",
            max_concurrent_trials=CURVE_WORKERS,
            scheduler=tune.schedulers.ASHAScheduler(max_t=MAX_EPOCHS, grace_period=1, reduction_factor=ETA),
        ),
        run_config=tune.RunConfig(storage_path=f"{job.directory}/kept", verbose=0, stop=Reached()),
    ).fit()


def main() -> None:
    from strata.bench.contenders.trainer_ray import start_cluster  # noqa: PLC0415

    warnings.simplefilter("ignore")
    start_cluster()
    print(json.dumps({**measured("ray_tune_", run), "versions": {"ray": metadata.version("ray")}}))


if __name__ == "__main__":
    if util.find_spec("ray") is None:
        print(json.dumps({"not_installed": "ray"}))
    else:
        os.environ |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AIR_NEW_OUTPUT": "0"}
        main()
