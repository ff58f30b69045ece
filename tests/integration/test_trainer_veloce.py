"""Scripts written for Veloce: its names and arguments work, and those without a counterpart are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strata.errors import ConfigError
from strata.train import (
    FTRL,
    AllReduce,
    Arch,
    HeterogeneousStrategy,
    NeuralNetTrainer,
    OptimizerStack,
    PSStrategy,
    UpdateStrategy,
)
from tests.integration.trainer_models import arrays, network, write_parquet


class TwoParts(nn.Module):
    def __init__(self, num_inputs: int, hidden: int) -> None:
        super().__init__()
        self.wide_model = nn.Linear(num_inputs, 1)
        self.deep_model = nn.Sequential(nn.Linear(num_inputs, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.wide_model(x) + self.deep_model(x)).squeeze(1)


def accuracy(predictions: torch.Tensor, targets: torch.Tensor) -> float:
    return float(((predictions > 0.5) == (targets > 0.5)).float().mean())


@pytest.fixture(autouse=True)
def _in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_script_with_all_arguments_of_veloce_trains() -> None:
    results = NeuralNetTrainer(
        module=TwoParts,
        module_params={"num_inputs": 2, "hidden": 8},
        dataset={"train": write_parquet(Path("train")), "validation": write_parquet(Path("valid"), rows=200, seed=1)},
        dataset_options={
            "label_column": "late",
            "label_column_dtype": torch.float,
            "feature_columns": ["a", "b"],
            "feature_column_dtypes": [torch.float] * 2,
        },
        epochs=3,
        batch_size=64,
        loss_fn=nn.BCELoss(),
        optimizer=OptimizerStack(
            {"cls": torch.optim.Adam, "args": {"lr": 0.02}, "model_key": "deep_model"},
            {"cls": FTRL, "args": {"lr": 0.3}, "model_key": "wide_model"},
        ),
        metric_fns=["auc", accuracy],
        heterogeneous_strategy=HeterogeneousStrategy(Arch.RingAllreduce, UpdateStrategy.Sync),
        num_workers=1,
        use_gpu=False,
        backend="torch",
        callbacks=["json", "tbx"],
        use_early_stopping=True,
        early_stopping_args={"patience": 2},
        checkpoint_options={"saver": "thread"},
    ).run()

    assert len(results) == 3
    assert results[-1]["valid_auc"] > 0.95
    assert results[-1]["valid_accuracy"] > 0.85
    assert len(Path("history.jsonl").read_text().splitlines()) == 3
    assert list(Path("tensorboard").glob("events*"))
    assert json.loads(Path("history.jsonl").read_text().splitlines()[-1])["valid_auc"] == results[-1]["valid_auc"]


def test_a_shared_validation_set_stops_training_early() -> None:
    rows = NeuralNetTrainer(
        network(),
        dataset=arrays(64),
        shared_validation_dataset=arrays(32, seed=1),
        loss_fn=nn.BCEWithLogitsLoss(),
        optimizer=torch.optim.SGD,
        optimizer_args={"lr": 0.0},
        epochs=9,
        use_early_stopping=True,
        use_static_graph=True,
        checkpoint_options={"saver": "thread"},
    ).run()

    assert len(rows) == 3, "the first epoch is the best, and two do not improve on it"
    assert "valid_loss" in rows[0]


def test_a_static_graph_is_an_option_of_all_reduce_and_servers_need_none() -> None:
    assert NeuralNetTrainer(network(), use_static_graph=True).trainer.strategy == AllReduce(static_graph=True)
    strategy = NeuralNetTrainer(network(), use_static_graph=True, heterogeneous_strategy=PSStrategy()).trainer.strategy
    assert strategy == PSStrategy().strategy()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "tensorflow"}, "backend='tensorflow' is unknown; use 'torch'"),
        ({"use_gpu": True}, "use_gpu=True, but torch finds no GPU; write use_gpu=False"),
        (
            {"ddp_options": {"bucket_cap_mb": 5}},
            r"ddp_options={'bucket_cap_mb': 5} have no counterpart; leave them out",
        ),
        ({"module_params": {"hidden": 3}}, "cannot be applied to an instance; pass the class"),
        ({"module": TwoParts, "module_params": {"width": 3}}, "do not fit TwoParts: .*width.*; pass the arguments"),
        ({"use_early_stopping": True, "early_stopping_args": {"delta": 0.1}}, "use patience, min_delta and monitor"),
        ({"heterogeneous_strategy": HeterogeneousStrategy("ps")}, "'ps' with 'sync' is unknown; use Arch.Ring"),
        ({"heterogeneous_strategy": PSStrategy("asynchronous")}, "with 'asynchronous' is unknown"),
    ],
)
def test_an_argument_without_a_counterpart_is_refused_with_the_cure(
    arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(ConfigError, match=message):
        NeuralNetTrainer(**{"module": network(), "loss_fn": nn.MSELoss(), **arguments})
