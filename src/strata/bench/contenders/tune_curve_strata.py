"""Strata: ASHA with promotion on two workers; a promoted trial continues from its checkpoint."""

from __future__ import annotations

import json
import warnings
from functools import partial
from typing import Any

import torch

from strata.bench.contenders.tune_curve import Job, Training, measured, space
from strata.bench.tune import CURVE_WORKERS, ETA, MAX_EPOCHS
from strata.train.orchestrator import TrainingOrchestrator

SAVE_EVERY = 1_000_000
"""Epochs: a trial saves only when it is paused. A saver process would take longer to start than an epoch takes."""

PRELOAD = ("strata.bench.contenders.tune_curve", "strata.trainer.models", "strata.checkpoint.manager")
"""Imported once, in the process that trials are forked from."""


def run(job: Job, configs: list[dict[str, Any]], seed: int, *, mode: str) -> None:
    def train(config: dict[str, Any]) -> float:
        import strata  # noqa: PLC0415

        torch.set_num_threads(1)
        ctx = strata.init(every=SAVE_EVERY, saver="thread")
        training = Training(config, job.directory)
        state: dict[str, torch.nn.Module | torch.optim.Optimizer]
        state = {"model": training.model, "optimizer": training.optimizer}
        progress = ctx.restore(state)
        found = 0.0  # stays 0 if another trial has already reached the target
        for epoch, found in job.epochs(training, progress.step + 1):
            ctx.report(step=epoch, auc=found)
            ctx.maybe_checkpoint(state)
        ctx.close()
        return found

    train.preload = PRELOAD  # type: ignore[attr-defined]
    searched = space()
    for config in configs:
        searched.enqueue(config)
    TrainingOrchestrator(hpt_mode=mode).tune(
        train,
        space=searched,
        num_trials=len(configs),
        metric="auc",
        mode="max",
        workers=CURVE_WORKERS,
        seed=seed,
        options={"eta": ETA, "min_step": 1, "max_step": MAX_EPOCHS},
    )


def main(mode: str, prefix: str) -> None:
    warnings.simplefilter("ignore")
    print(json.dumps(measured(prefix, partial(run, mode=mode))))


if __name__ == "__main__":
    main("asha", "")
