"""A fit whose tables torchrec shards ends, after kills, with the weights of an undisturbed one and of one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strata.train import AllReduce, Hybrid, TorchRec
from tests.integration.trainer_models import Killed, weights, without_timings

pytestmark = pytest.mark.usefixtures("run_directory")


def train(
    tmp_path: Path, strategy: Any, workers: int, kills: tuple[tuple[int | str, int], ...] = ()
) -> tuple[Any, Any]:
    from tests.integration.torchrec_models import Bags, visits  # imports torchrec, which is slow

    module = Bags()
    trainer = Killed(
        module,
        nn.BCEWithLogitsLoss(),
        partial(torch.optim.Adagrad, lr=0.05),
        ["auc"],
        strategy=strategy,
        workers=workers,
        logs="none",
    )
    trainer.kills, trainer.marks = kills, tmp_path
    size = 32 // workers
    result = trainer.fit(visits(203), label="clicked", valid=visits(61, seed=1), epochs=2, batch_size=size, every=3)
    return weights(module), without_timings(result.history)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_workers_with_shards_that_are_killed_change_neither_weights_nor_history(tmp_path: Path) -> None:
    strategy = Hybrid(sparse=TorchRec(min_bytes=0))
    alone, _ = train(tmp_path, AllReduce(), 1)
    undisturbed = train(tmp_path, strategy, 2)

    killed = train(tmp_path, strategy, 2, ((1, 5), (0, 4)))

    assert len(list(tmp_path.glob("killed-*"))) == 2
    assert killed == undisturbed
    assert undisturbed[0] == pytest.approx(alone, abs=1e-6)
