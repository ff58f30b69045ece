"""A Trainer over batches by tokens: rows of all batches count alike, and a batch of one row is refused in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from strata import StructuredDataset, Trainer
from strata.errors import InvalidArgument
from strata.launch.record.directory import DIRECTORY_VARIABLE

NUM_ROWS = 60
OPTIONS: dict[str, Any] = {"batch_tokens": 60, "length_buckets": True, "sequences": "padded"}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "runs"))
    random = np.random.default_rng(0)
    ids = [random.integers(0, 20, length) for length in random.integers(1, 20, NUM_ROWS)]
    pq.write_table(pa.table({"ids": ids, "y": random.random(NUM_ROWS)}), tmp_path / "texts.parquet", row_group_size=16)
    return tmp_path / "texts.parquet"


class Texts(nn.Module):
    """The mean of the embeddings of a text's tokens, and a layer."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 4)
        self.rest = nn.Sequential(*between, nn.Linear(4, 1))

    def forward(self, ids: Any) -> Any:
        is_token = torch.arange(ids.values.shape[1]) < ids.lengths[:, None]
        summed = (self.embedding(ids.values) * is_token[..., None]).sum(1)
        return self.rest(summed / ids.lengths[:, None]).squeeze(-1)


def trainer(module: nn.Module, **arguments: Any) -> Trainer:
    kept = {"checkpoint_options": {"saver": "thread"}}  # starting a process would take most of a test
    return Trainer(module, optimizer=torch.optim.SGD, loss=nn.MSELoss(), **{**kept, **arguments})


def test_the_losses_of_training_and_validation_are_means_over_all_rows(path: Path) -> None:
    """Without learning, both are the loss of the first weights, whatever rows share a batch."""
    module = Texts()
    whole, _ = StructuredDataset.create_dataloader(path, batch_size=NUM_ROWS, sequences="padded")
    (batch,) = whole
    expected = nn.functional.mse_loss(module(batch["ids"]), batch["y"].float()).item()

    made = trainer(module, optimizer_args={"lr": 0.0}, accumulate=3)
    result = made.fit(path, label="y", valid=path, **OPTIONS)

    assert 1 < result.steps < NUM_ROWS / 3
    assert result.history[0]["loss"] == pytest.approx(expected, rel=1e-5)
    assert result.history[0]["valid_loss"] == pytest.approx(expected, rel=1e-5)
    assert made.evaluate(path)["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_batch_of_one_row_is_refused_before_the_first_step_of_a_batch_norm(path: Path) -> None:
    loader, dataset = StructuredDataset.create_dataloader(path, shuffle=True, **{**OPTIONS, "batch_tokens": 20})
    assert dataset.steps().fewest_rows == 1
    with pytest.raises(InvalidArgument, match=r"a batch of this epoch has one row, and BatchNorm needs two .*; raise "):
        trainer(Texts(nn.BatchNorm1d(4))).fit(loader, label="y")


def test_two_sizes_of_a_batch_are_refused(path: Path) -> None:
    with pytest.raises(InvalidArgument, match="batch_size= and batch_tokens= are both given"):
        trainer(Texts()).fit(path, label="y", batch_size=4, **OPTIONS)
