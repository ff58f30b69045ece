"""A Trainer in a notebook: classes exist only in `__main__`, which has no file, and cells run inside an event loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from strata.launch.record.directory import DIRECTORY_VARIABLE

KERNEL = """
import asyncio, json, sys, __main__

async def kernel():
    for number, cell in enumerate(json.load(sys.stdin), start=1):
        exec(compile(cell, f"<ipython-input-{number}>", "exec"), __main__.__dict__)

asyncio.new_event_loop().run_until_complete(kernel())
"""
"""Runs cells as ipykernel does."""

DEFINITIONS = """
import threading

import torch
from torch import nn

from strata import Trainer
from strata.errors import InvalidArgument

torch.manual_seed(0)
x = torch.randn(100, 4)
y = (x.sum(1) > 0).float()

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return len(x)

    def __getitem__(self, row):
        return x[row], y[row]

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x).squeeze(1)

def share(predictions, targets):
    return float(((predictions > 0) == (targets > 0.5)).float().mean())

class Smoothed(Trainer):
    def training_step(self, module, batch):
        return self.loss(batch.call(module), batch.target * 0.9 + 0.05)
"""

TRAIN = """
trained = {}
for workers, batch_size in ((1, 20), (2, 10)):
    trainer = Smoothed(Network(), nn.BCEWithLogitsLoss(), "adam", {"share": share}, workers=workers, logs="none")
    result = trainer.fit(Rows(), valid=(x, y), epochs=2, batch_size=batch_size)
    trained[workers] = torch.nn.utils.parameters_to_vector(trainer.module.parameters())
    assert result.steps == 10
    assert result.history[-1]["valid_share"] == trainer.evaluate((x, y))["share"]
torch.testing.assert_close(trained[1], trained[2], rtol=0, atol=1e-6)
print("trained")
"""

REFUSED = """
lock = threading.Lock()

class Locked(Network):
    def forward(self, x):
        with lock:
            return super().forward(x)

def locked_loss(predictions, targets):
    with lock:
        return nn.functional.mse_loss(predictions, targets)

class LockedTrainer(Trainer):
    def training_step(self, module, batch):
        with lock:
            return super().training_step(module, batch)

for trainer in (
    Trainer(Locked(), nn.BCEWithLogitsLoss(), workers=2),
    Trainer(Network(), locked_loss, workers=2),
    LockedTrainer(Network(), nn.MSELoss(), workers=2),
):
    try:
        trainer.fit((x, y))
    except InvalidArgument as error:
        print(error)
"""


def run_cells(place: Path, *cells: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", KERNEL],
        input=json.dumps(cells),
        cwd=place,
        env={**os.environ, DIRECTORY_VARIABLE: str(place / "runs")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_classes_of_a_notebook_train_on_two_workers(tmp_path: Path) -> None:
    assert run_cells(tmp_path, DEFINITIONS, TRAIN) == "trained\n"


def test_code_of_a_notebook_that_cannot_be_pickled_is_named_with_the_cure(tmp_path: Path) -> None:
    module, loss, trainer = run_cells(tmp_path, DEFINITIONS, REFUSED).splitlines()

    reason = " cannot be pickled for the workers (TypeError: cannot pickle '_thread.lock' object); create objects"
    assert module.startswith("module=, a Locked," + reason)
    assert loss.startswith("loss=, a function," + reason)
    assert trainer.startswith("the LockedTrainer" + reason)
    assert "move the code into a file and import it" in module
