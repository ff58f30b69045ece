"""A study whose trials save after each step and record their starts. Tests kill its workers, machines and driver."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np

import strata
from strata import SearchSpace, TrainingOrchestrator

NUM_STEPS = 8
HELD_STEP = 7
"""With `--hold`, no trial makes this step before the file `hurry` exists, so none ends earlier than a test wants."""


class Counted:
    """A model that counts its steps."""

    def __init__(self):
        self.steps = np.zeros(1, dtype=np.int64)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps[:] = np.asarray(state["steps"])


class Train:
    def __init__(self, place, is_held):
        self.place = Path(place)
        self.is_held = is_held

    def __call__(self, config, trial):
        with strata.init(every=1, saver="thread") as ctx:
            model = Counted()
            progress = ctx.restore({"model": model})
            start = {"trial": trial.number, "rank": ctx.rank, "world_size": ctx.world_size, "step": progress.step}
            with (self.place / "starts.jsonl").open("a") as file:
                file.write(json.dumps({**start, "pid": os.getpid(), "run": ctx.identity.run}) + "\n")
            assert model.steps[0] == progress.step
            for step in range(progress.step + 1, NUM_STEPS + 1):
                if not (self.place / "hurry").exists():
                    time.sleep(0.2)
                while self.is_held and step == HELD_STEP and not (self.place / "hurry").exists():
                    time.sleep(0.02)
                model.steps += 1
                ctx.report(step=step, loss=config["x"] / step)
                ctx.maybe_checkpoint({"model": model})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--place", required=True)
    parser.add_argument("--coordinator")
    parser.add_argument("--mode", default="asha")
    parser.add_argument("--options", default='{"eta": 2, "min_step": 2}')
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--workers-per-trial", type=int, default=1)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--engine", default="local")
    parser.add_argument("--hold", action="store_true")
    given = parser.parse_args()
    study = TrainingOrchestrator(given.coordinator, hpt_mode=given.mode).tune(
        Train(given.place, given.hold),
        space=SearchSpace().add_float("x", min=0.1, max=1),
        num_trials=given.trials,
        workers=given.workers,
        workers_per_trial=given.workers_per_trial,
        nnodes=given.nnodes,
        engine=given.engine,
        name="sweep",
        options=json.loads(given.options),
    )
    print(study)
