"""A Trainer over sampled neighborhoods: a dataset that builds whole batches and brings its own `collate_fn`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from strata import Trainer
from strata.trainer.graph import Graph, GraphSage, NeighborDataset
from tests.integration.trainer_models import weights

NUM_NODES, NUM_CLASSES = 300, 3


@pytest.fixture(autouse=True)
def _in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def planted(seeds: range, fanouts: tuple[int, ...] = (5, 3)) -> NeighborDataset:
    """Return a graph whose edges stay within classes, and features that are mostly noise."""
    random = np.random.default_rng(0)
    labels = np.arange(NUM_NODES) % NUM_CLASSES
    sources, targets = random.integers(0, NUM_NODES, (2, 20 * NUM_NODES))
    inside = labels[sources] == labels[targets]
    noise = random.normal(size=(NUM_NODES, NUM_CLASSES))
    return NeighborDataset(
        Graph.from_edges(sources[inside], targets[inside], NUM_NODES, undirected=True),
        np.arange(seeds.start, seeds.stop),
        labels=labels,
        features=(np.eye(NUM_CLASSES)[labels] + noise).astype(np.float32),
        fanouts=fanouts,
    )


def sage() -> GraphSage:
    torch.manual_seed(0)
    return GraphSage(NUM_CLASSES, NUM_CLASSES, hidden=(16,))


def trainer(module: nn.Module, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {"optimizer_args": {"lr": 0.02}, "metrics": ["accuracy"]}
    return Trainer(module, nn.CrossEntropyLoss(), torch.optim.Adam, **{**defaults, **options})


def test_a_graph_trains_without_naming_its_collate_fn_and_neighbors_decide_the_class() -> None:
    trained = trainer(sage())
    result = trained.fit(planted(range(240)), valid=planted(range(240, 300)), label="y", epochs=5, batch_size=32)

    assert result.history[-1]["valid_accuracy"] > 0.9
    assert result.steps == 5 * 8


def test_predictions_are_one_row_per_seed() -> None:
    assert trainer(sage()).predict(planted(range(10, 60)), batch_size=16).shape == (50, NUM_CLASSES)


def test_a_collate_fn_that_the_user_passes_replaces_that_of_the_dataset() -> None:
    seen = []

    def without_edges(batch: dict[str, Any]) -> dict[str, Any]:
        seen.append(batch["num_seeds"])
        return {**batch, "edge_index": batch["edge_index"][:, :0]}

    trainer(sage()).fit(planted(range(40)), label="y", batch_size=16, collate_fn=without_edges)

    assert seen == [16, 16, 8]


def test_a_run_that_resumes_within_an_epoch_samples_the_same_neighbors(tmp_path: Path) -> None:
    whole, parted = sage(), sage()
    options: dict[str, Any] = {"label": "y", "epochs": 2, "batch_size": 16}

    trainer(whole).fit(planted(range(100)), **options)
    places = {"checkpoints": tmp_path / "parted"}
    trainer(parted, **places).fit(planted(range(100)), max_steps=9, **options)
    again = sage()
    trainer(again, **places).fit(planted(range(100)), resume=True, **options)

    assert weights(again) == weights(whole)
    assert weights(parted) != weights(whole)
