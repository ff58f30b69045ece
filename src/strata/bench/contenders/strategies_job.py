"""Trains one model on one data set with each strategy, and reports its AUC on the test rows.

All strategies have the same rows, initial weights, optimizer and number of epochs. An asynchronous server applies the
gradients of each worker by themselves, so it makes as many updates per epoch as there are batches of all workers; a
synchronous one applies their mean.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from strata.bench.contenders.models_data import NotFetched, write_splits
from strata.bench.run import ROUND_VARIABLE
from strata.bench.strategies import (
    EMBEDDING_DIM,
    EPOCHS,
    HIDDEN,
    LEARNING_RATE,
    QUICK_ROWS,
    STRATEGIES,
    SYNC,
    WORKERS,
    auc_key,
    difference_key,
)
from strata.launch.record.directory import DIRECTORY_VARIABLE
from strata.trainer.features import Features
from strata.trainer.models import DeepFM
from strata.trainer.strategy import AllReduce, Hybrid, ParameterServer
from strata.trainer.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

    from strata.bench.contenders.models_zoo import Problem

TABLES = "*"
"""All embeddings, although they are small."""


def strategy_of(name: str) -> AllReduce | Hybrid | ParameterServer:
    made: dict[str, AllReduce | Hybrid | ParameterServer] = {
        SYNC: AllReduce(),
        "hybrid": Hybrid(sparse=ParameterServer(tables=TABLES)),
        "hybrid_async": Hybrid(sparse=ParameterServer(tables=TABLES, staleness=None)),
        "async": ParameterServer(tables=TABLES, staleness=None),
    }
    return made[name]


def measure(problem: Problem, directory: Path, *, seed: int, strategy: str) -> float:
    """Return the AUC on the test rows below `directory`."""
    features = Features.fit(str(directory / "train"), problem.columns, label=problem.label)
    torch.manual_seed(seed)
    trainer = Trainer(
        DeepFM(features.fields, embedding_dim=EMBEDDING_DIM, hidden=HIDDEN),
        nn.BCEWithLogitsLoss(),
        torch.optim.Adagrad,
        ["auc"],
        features=features,
        optimizer_args={"lr": LEARNING_RATE},
        strategy=strategy_of(strategy),
        workers=WORKERS,
        checkpoints=directory / f"checkpoints-{strategy}",
        checkpoint_options={"keep_count": 1},
        seed=seed,
        logs="none",
    )
    result = trainer.fit(
        str(directory / "train"),
        label=problem.label,
        valid=str(directory / "valid"),
        epochs=EPOCHS,
        batch_size=problem.batch_size // WORKERS,
        restore_best=True,
    )
    scored = Trainer(trainer.module, nn.BCEWithLogitsLoss(), metrics=["auc"], features=features)  # in this process
    found: float = scored.evaluate(str(directory / "test"), label=problem.label)["auc"]
    print(f"{strategy}: {found:.4f}, best epoch {result.best_epoch}", file=sys.stderr)
    return found


def run(problem: Problem, read: Callable[[], pa.Table], num_rows: int) -> None:
    """Print the figures of a round."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        table = read()
    except NotFetched as error:
        print(json.dumps({"not_fetched": str(error)}))
        return
    rows = int(os.environ.get("STRATA_BENCH_ROWS", QUICK_ROWS if "--quick" in sys.argv else num_rows))
    seed = int(os.environ.get(ROUND_VARIABLE, "0"))
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as name, contextlib.chdir(name):
        os.environ[DIRECTORY_VARIABLE] = str(Path(name) / "runs")
        write_splits(table, Path(name), num_rows=rows, shares=problem.shares, seed=seed)
        found = {each: measure(problem, Path(name), seed=seed, strategy=each) for each in STRATEGIES}
    figures = {auc_key(problem.name, each): auc for each, auc in found.items()}
    figures |= {difference_key(problem.name, each): auc - found[SYNC] for each, auc in found.items() if each != SYNC}
    print(json.dumps({"figures": figures}))
