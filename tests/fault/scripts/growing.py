"""A study of two trials that train data-parallel. One ends early; the other may continue on its worker, too, and counts
how often the model was trained on each row. The counts are saved with the model and written to counts.json at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import strata
from strata import SearchSpace, TrainingOrchestrator

NUM_ROWS = 320


class Train:
    def __init__(self, place):
        self.place = Path(place)

    def __call__(self, config, trial):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        counts = torch.zeros(NUM_ROWS, dtype=torch.int64)

        class Counts:
            def state_dict(self):
                return {"counts": counts}

            def load_state_dict(self, state):
                counts.copy_(state["counts"])

        with strata.init(every=1, saver="thread") as ctx:
            if config["x"] > 0.5:
                for step in (1, 2):
                    ctx.report(step=step, loss=config["x"])
                return
            dist.init_process_group("gloo")
            loader = ctx.dataloader(list(range(NUM_ROWS)), batch_size=4, shuffle=True)
            progress = ctx.restore({"counts": Counts()})
            start = {"trial": trial.number, "rank": ctx.rank, "world_size": ctx.world_size, "step": progress.step}
            with (self.place / "starts.jsonl").open("a") as file:
                file.write(json.dumps({**start, "pid": os.getpid()}) + "\n")
            step = progress.step
            for _ in ctx.epochs(1):
                for rows in loader:
                    if not (self.place / "hurry").exists():
                        time.sleep(0.1)
                    step += 1
                    seen = torch.zeros_like(counts).index_add_(0, rows, torch.ones_like(rows))
                    dist.all_reduce(seen)
                    counts.add_(seen)
                    ctx.report(step=step, loss=config["x"] / step)
                    ctx.maybe_checkpoint({"counts": Counts()})
            if ctx.rank == 0:
                (self.place / "counts.json").write_text(json.dumps(counts.tolist()))
            dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--place", required=True)
    given = parser.parse_args()
    study = TrainingOrchestrator(hpt_mode="grid").tune(
        Train(given.place),
        space=SearchSpace().add_float("x", values=[0.1, 0.9]),
        num_trials=2,
        workers=2,
        max_workers_per_trial=2,
        name="sweep",
    )
    print(study)
