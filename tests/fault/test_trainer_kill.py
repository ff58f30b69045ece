"""A Trainer whose workers are killed ends with the weights and the history of one that was not disturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration.trainer_models import Killed, arrays, network, weights, without_timings

pytestmark = pytest.mark.usefixtures("run_directory")


def train(tmp_path: Path, kills: tuple[tuple[int | str, int], ...], **arguments: Any) -> tuple[list[float], Any]:
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
