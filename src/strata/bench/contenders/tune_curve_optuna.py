"""Optuna: its Hyperband on two processes that share a study in a journal file, as its documentation recommends."""

from __future__ import annotations

import json
import logging
import multiprocessing
import warnings
from importlib import metadata
from typing import Any

from strata.bench.contenders.tune_curve import Job, Training, measured, space
from strata.bench.tune import CURVE_WORKERS, ETA, MAX_EPOCHS
from strata.tune.space.parameters import Choice, Float

STUDY = "bench"


def open_study(job: Job, seed: int) -> Any:
    import optuna  # noqa: PLC0415
    from optuna.storages import JournalStorage  # noqa: PLC0415
    from optuna.storages.journal import JournalFileBackend  # noqa: PLC0415

    logging.getLogger("optuna").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    return optuna.create_study(
        study_name=STUDY,
        direction="maximize",
        storage=JournalStorage(JournalFileBackend(f"{job.directory}/study.log")),
        sampler=optuna.samplers.RandomSampler(seed=seed),
        pruner=optuna.pruners.HyperbandPruner(min_resource=1, max_resource=MAX_EPOCHS, reduction_factor=ETA),
        load_if_exists=True,
    )


def suggest(trial: Any) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name, parameter in space().parameters.items():
        match parameter:
            case Float():
                config[name] = trial.suggest_float(name, parameter.min, parameter.max, log=parameter.log)
            case Choice():
                config[name] = trial.suggest_categorical(
                    name, [parameter.value(at) for at in range(parameter.num_values)]
                )
    return config


def work(job: Job, num_trials: int, seed: int) -> None:
    """Run trials in this process until the study has enough."""
    import optuna  # noqa: PLC0415
    from optuna.study import MaxTrialsCallback  # noqa: PLC0415

    def objective(trial: Any) -> float:
        found = 0.0
        for epoch, found in job.epochs(Training(suggest(trial), job.directory)):
            trial.report(found, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
        return found

    ended = [each for each in optuna.trial.TrialState if each.is_finished()]  # not those that are only enqueued
    open_study(job, seed).optimize(objective, callbacks=[MaxTrialsCallback(num_trials, states=ended)])


def run(job: Job, configs: list[dict[str, Any]], seed: int) -> None:
    study = open_study(job, seed)
    for config in configs:
        study.enqueue_trial(config)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(job, len(configs), seed)) for _ in range(CURVE_WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        if worker.exitcode:
            raise RuntimeError(f"a worker exited with code {worker.exitcode}")


if __name__ == "__main__":
    print(json.dumps({**measured("optuna_", run), "versions": {"optuna": metadata.version("optuna")}}))
