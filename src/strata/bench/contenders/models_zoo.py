"""Trains every reference model on one data set with the same settings, and reports its AUC on the test rows.

A model trains until its AUC on the validation rows stops rising, and is tested with the weights of its best epoch. The
seed is the number of the round; the rows of the three splits are always the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from strata.bench.contenders.models_data import NotFetched, write_splits
from strata.bench.models import EMBEDDING_DIM, HIDDEN, LEARNING_RATE, MAX_EPOCHS, QUICK_ROWS, WEIGHT_DECAY
from strata.bench.run import ROUND_VARIABLE
from strata.trainer.features import Features
from strata.trainer.models import DLRM, FM, FNN, LR, PNN, DCNv2, DeepFM, TwoTower, WideDeep
from strata.trainer.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa

    from strata.trainer.features import DenseFeat, SparseFeat, VarLenFeat
    from strata.trainer.features.field import Field


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A data set and what is predicted."""

    name: str
    """Prefix of the figures."""
    label: str
    columns: tuple[SparseFeat | DenseFeat | VarLenFeat, ...]
    crosses: tuple[tuple[str, str], ...]
    """For the wide part of `WideDeep`, whose paper leaves them to the user."""
    towers: tuple[tuple[str, ...], tuple[str, ...]]
    """The fields of the two towers, whose vectors are multiplied."""
    num_rows: int
    shares: tuple[float, float, float]
    """Of the rows for training, validation and the test."""
    batch_size: int


def models(problem: Problem, fields: Sequence[Field]) -> dict[str, Callable[[], nn.Module]]:
    """Return a constructor for each model that starts from random weights."""
    deep: dict[str, Any] = {"embedding_dim": EMBEDDING_DIM, "hidden": HIDDEN}
    return {
        "lr": lambda: LR(fields),
        "fm": lambda: FM(fields, embedding_dim=EMBEDDING_DIM),
        "pnn_inner": lambda: PNN(fields, product="inner", **deep),
        "pnn_outer": lambda: PNN(fields, product="outer", **deep),
        "wide_deep": lambda: WideDeep(fields, crosses=problem.crosses, **deep),
        "deepfm": lambda: DeepFM(fields, **deep),
        "dcnv2": lambda: DCNv2(fields, **deep),
        "dlrm": lambda: DLRM(fields, bottom=HIDDEN[:1], **deep),
        "two_tower": lambda: TwoTower(
            fields,
            user=problem.towers[0],
            item=problem.towers[1],
            output_dim=HIDDEN[-1],
            normalize=False,
            temperature=1.0,
            **deep,
        ),
    }


def measure(problem: Problem, directory: Path, *, seed: int) -> dict[str, float]:
    """Return the AUC of each model on the test rows below `directory`."""
    features = Features.fit(str(directory / "train"), problem.columns, label=problem.label)
    found: dict[str, float] = {}
    trained: dict[str, nn.Module] = {}

    def train(name: str, make: Callable[[], nn.Module]) -> None:
        torch.manual_seed(seed)
        trainer = Trainer(
            make(),
            nn.BCEWithLogitsLoss(),
            torch.optim.AdamW,
            ["auc"],
            features=features,
            optimizer_args={"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY},
            checkpoints=directory / f"checkpoints-{name}",
            checkpoint_options={"keep_count": 1},
            seed=seed,
        )
        result = trainer.fit(
            str(directory / "train"),
            label=problem.label,
            valid=str(directory / "valid"),
            epochs=MAX_EPOCHS,
            batch_size=problem.batch_size,
            early_stopping=1,
        )
        found[name] = trainer.evaluate(str(directory / "test"))["auc"]
        trained[name] = trainer.module
        print(f"{name}: {found[name]:.4f}, {len(result.history)} epochs", file=sys.stderr)

    for name, make in models(problem, features.fields).items():
        train(name, make)
    fm: Any = trained["fm"]
    train("fnn", lambda: FNN.from_fm(fm, hidden=HIDDEN))
    return found


def run(problem: Problem, read: Callable[[], pa.Table]) -> None:
    """Print the figures of a round."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        table = read()
    except NotFetched as error:
        print(json.dumps({"not_fetched": str(error)}))
        return
    rows = int(os.environ.get("STRATA_BENCH_ROWS", QUICK_ROWS if "--quick" in sys.argv else problem.num_rows))
    seed = int(os.environ.get(ROUND_VARIABLE, "0"))
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as name, contextlib.chdir(name):
        write_splits(table, Path(name), num_rows=rows, shares=problem.shares)
        found = measure(problem, Path(name), seed=seed)
    print(json.dumps({"figures": {f"{problem.name}_auc_{model}": auc for model, auc in found.items()}}))
