"""A Trainer as new users call it: targets from functions, outputs of any form, options, exports, and wrong arguments."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from strata import Trainer
from strata.errors import InvalidArgument, StrataError
from strata.train import Batch, DenseFeat, EarlyStopping, Features, SparseFeat
from tests.integration.trainer_models import Regression, arrays, network, weights

LOSS = nn.BCEWithLogitsLoss()


@pytest.fixture(autouse=True)
def _in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trainer(module: nn.Module | None = None, loss: Any = LOSS, **arguments: Any) -> Trainer:
    defaults: dict[str, Any] = {"optimizer": torch.optim.SGD, "optimizer_args": {"lr": 0.1}}
    return Trainer(module or network(), loss, **{**defaults, **arguments})


def frame(rows: int = 40) -> pd.DataFrame:
    random = np.random.default_rng(0)
    a, b = random.normal(size=rows), random.normal(size=rows)
    return pd.DataFrame({"a": a, "b": b, "c": random.choice(list("xyz"), rows), "y": (a - b > 0).astype(np.int64)})


# -- early stopping ----------------------------------------------------------------------------------------------------


def test_a_number_of_epochs_is_enough_for_early_stopping() -> None:
    x, y = arrays(40)

    result = trainer().fit((x, y), valid=(x, 1 - y), epochs=9, batch_size=8, early_stopping=2)

    assert (len(result.history), result.best_epoch) == (3, 0)
    assert "not improved for 2 epochs" in result.stop_reason


def test_early_stopping_follows_the_training_loss_if_that_is_monitored() -> None:
    result = trainer(optimizer_args={"lr": 0.0}).fit(arrays(40), epochs=9, early_stopping=1, monitor="loss")

    assert len(result.history) < 9
