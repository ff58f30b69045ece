"""A Trainer whose workers are killed ends with the weights and the history of one that was not disturbed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strata import Trainer
from strata.train import Batch
from tests.integration.trainer_models import arrays, network, weights, without_timings

pytestmark = pytest.mark.usefixtures("run_directory")


class Killed(Trainer):
    """Each worker kills itself with -9 at some calls, once each."""

    marks = Path()
    kills: tuple[tuple[int, int], ...] = ()
    """(rank, number of the call in its process)"""
    calls = 0

    def training_step(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        self.calls += 1
        for rank, call in self.kills:
            mark = self.marks / f"killed-{rank}-{call}"
            if int(os.environ["RANK"]) == rank and self.calls == call and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(module, batch)


def train(tmp_path: Path, kills: tuple[tuple[int, int], ...], **arguments: Any) -> tuple[list[float], Any]:
    module = network(dropout=0.2, batch_norm=True)
    trainer = Killed(
        module, nn.BCEWithLogitsLoss(), torch.optim.Adam, ["auc"], workers=2, logs="none", max_restarts=5, **arguments
    )
    trainer.kills, trainer.marks = kills, tmp_path
    result = trainer.fit(arrays(200), valid=arrays(61, seed=1), epochs=3, batch_size=8, every=4)
    return weights(module), without_timings(result.history)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="plain"),
        pytest.param({"accumulate": 2, "ema": 0.9}, id="accumulated, averaged", marks=pytest.mark.slow),
    ],
)
def test_workers_killed_in_two_epochs_change_neither_weights_nor_history(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    undisturbed = train(tmp_path, (), **arguments)

    killed = train(tmp_path, ((1, 7), (0, 16)), **arguments)

    assert sorted(each.name for each in tmp_path.glob("killed-*")) == ["killed-0-16", "killed-1-7"]
    assert killed == undisturbed
