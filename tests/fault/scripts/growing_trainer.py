"""A study of two fits of a Trainer. One ends early; the other may continue on its worker, too, and counts how often the
module was trained on each row. The counts are part of the module; at the end they are written to counts.json, with the
epochs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from strata import SearchSpace, Trainer

NUM_ROWS = 64
MANY_EPOCHS = 40


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("counts", torch.zeros(NUM_ROWS, dtype=torch.int64))

    def forward(self, row, x):
        if self.training:
            seen = torch.zeros_like(self.counts).index_add_(0, row, torch.ones_like(row))
            if dist.is_initialized():
                dist.all_reduce(seen)
            self.counts += seen
        return self.linear(x.unsqueeze(1)).squeeze(1)


class Observed(Trainer):
    place = Path()
    has_started = False

    def training_step(self, module, batch):
        ctx = self.context
        if not self.has_started:
            self.has_started = True
            torch.set_num_threads(1)
            trial = int(ctx.identity.run.rpartition(".")[2])
            start = {"trial": trial, "rank": ctx.rank, "world_size": ctx.world_size, "step": ctx.step}
            with (self.place / "starts.jsonl").open("a") as file:
                file.write(json.dumps({**start, "pid": os.getpid()}) + "\n")
        if not (self.place / "hurry").exists():
            time.sleep(0.1)
        return super().training_step(module, batch)


def rows():
    x = torch.linspace(-1.0, 1.0, NUM_ROWS)
    return {"row": torch.arange(NUM_ROWS), "x": x, "y": 3.0 * x + 1.0}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--place", type=Path, required=True)
    given = parser.parse_args()
    torch.manual_seed(0)
    trainer = Observed(Counting(), nn.MSELoss(), "sgd", optimizer_args={"lr": 0.001})
    trainer.place = given.place
    study = trainer.tune(
        SearchSpace().add_int("epochs", values=[1, MANY_EPOCHS]),
        rows(),
        label="y",
        valid=rows(),
        batch_size=4,
        num_trials=2,
        hpt_mode="grid",
        workers=2,
        max_workers_per_trial=2,
        name="sweep",
    )
    found = {"counts": trainer.module.counts.tolist(), "epochs": study.best.config["epochs"]}
    (given.place / "counts.json").write_text(json.dumps(found))
