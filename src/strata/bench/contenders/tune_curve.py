"""The learning-curve problem of `strata bench tune`: DeepFM on MovieLens 100k, the same loop for every system.

A system gets the same random configurations in the same order, and decides which of them train on. The target is an
AUC on the validation rows. Once a trial has reached it, the others end at their next epoch.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from strata.bench.contenders.models_data import NotFetched, movielens
from strata.bench.contenders.tune_marks import Marks, read_lives, utilisation
from strata.bench.run import ROUND_VARIABLE
from strata.bench.tune import (
    CURVE_TRIALS,
    CURVE_WORKERS,
    FIRST_CURVE_SEED,
    MAX_EPOCHS,
    NUM_ROWS,
    QUICK_TARGET_AUC,
    TARGET_AUC,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from strata.tune import SearchSpace

SPARSE = ("user", "item", "gender", "occupation")
TRAIN_SHARE = 0.8
QUICK_TRIALS = 9


class Training:
    """One trial: a model and its optimizer. An epoch is a function of the configuration and of the epochs before."""

    def __init__(self, config: dict[str, Any], directory: str) -> None:
        import torch  # noqa: PLC0415 - a warm process has imported it

        from strata.trainer.features.field import FIRST_ID, Field  # noqa: PLC0415
        from strata.trainer.models import DeepFM  # noqa: PLC0415

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._ids = torch.from_numpy(np.load(f"{directory}/ids.npy"))
        self._labels = torch.from_numpy(np.load(f"{directory}/labels.npy"))
        self._num_train = int(len(self._labels) * TRAIN_SHARE)
        dim = int(config["embedding_dim"])
        largest = (self._ids.max(dim=0).values + 1).tolist()
        fields = [
            Field(name=name, kind="sparse", num_ids=max(num, FIRST_ID), embedding_dim=dim)
            for name, num in zip(SPARSE, largest, strict=True)
        ]
        hidden = (int(config["hidden"]), int(config["hidden"]))
        self.model = DeepFM(fields, embedding_dim=dim, hidden=hidden, dropout=config["dropout"])
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config["learning_rate"], weight_decay=config["weight_decay"]
        )
        self._batch_size = int(config["batch_size"])

    def epoch(self, number: int) -> float:
        """Train for an epoch; return the AUC on the validation rows."""
        import torch  # noqa: PLC0415

        order = torch.randperm(self._num_train, generator=torch.Generator().manual_seed(number))
        self.model.train()
        for rows in torch.split(order, self._batch_size):
            self.optimizer.zero_grad()
            logits = self.model({"sparse": self._ids[rows]})
            loss: Any = torch.nn.functional.binary_cross_entropy_with_logits(logits, self._labels[rows])
            loss.backward()
            self.optimizer.step()
        self.model.eval()
        with torch.no_grad():
            logits = self.model({"sparse": self._ids[self._num_train :]})
        return auc(logits.numpy(), self._labels[self._num_train :].numpy())


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the area under the ROC curve; 0.5 for scores that are no numbers. Ties are too rare to count."""
    if not np.isfinite(scores).all():
        return 0.5
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores, kind="stable")] = np.arange(1, len(scores) + 1)
    positive = labels > 0.5
    num = int(positive.sum())
    return float((ranks[positive].sum() - num * (num + 1) / 2) / (num * (len(labels) - num)))


class Job:
    """What trials of every system share: paths, so that it can be pickled."""

    def __init__(self, directory: str, target_auc: float) -> None:
        self.directory = directory
        self.target_auc = target_auc

    @property
    def marks_path(self) -> str:
        return f"{self.directory}/marks"

    @property
    def reached(self) -> Path:
        return Path(self.directory) / "reached"

    def epochs(self, training: Training, first: int = 1) -> Iterator[tuple[int, float]]:
        """Train, and yield each epoch with its AUC, until the last epoch or until any trial has reached the target."""
        marks = Marks(self.marks_path)
        for number in range(first, MAX_EPOCHS + 1):
            if self.reached.exists():
                return
            found = training.epoch(number)
            now_s = marks.add()
            if found >= self.target_auc and not self.reached.exists():
                partial = self.reached.with_suffix(f".{os.getpid()}")
                partial.write_text(repr(now_s), encoding="ascii")
                partial.replace(self.reached)
            yield number, found


def space() -> SearchSpace:
    from strata.tune import SearchSpace  # noqa: PLC0415

    return (
        SearchSpace()
        .add_float("learning_rate", min=1e-5, max=3e-2, log=True)
        .add_float("weight_decay", min=1e-5, max=1.0, log=True)
        .add_float("dropout", min=0.0, max=0.6)
        .add_int("embedding_dim", values=[4, 8, 16, 32])
        .add_int("hidden", values=[16, 32, 64, 128])
        .add_int("batch_size", values=[128, 256, 512])
    )


def configurations(seed: int, num: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "learning_rate": float(np.exp(rng.uniform(np.log(1e-5), np.log(3e-2)))),
            "weight_decay": float(10 ** rng.uniform(-5, 0)),
            "dropout": float(rng.uniform(0.0, 0.6)),
            "embedding_dim": int(rng.choice([4, 8, 16, 32])),
            "hidden": int(rng.choice([16, 32, 64, 128])),
            "batch_size": int(rng.choice([128, 256, 512])),
        }
        for _ in range(num)
    ]


def prepare(directory: Path) -> None:
    """Write the rows as arrays: a random sample, the same in every round.

    Raises:
        NotFetched: The data set is not available.
    """
    table = movielens()
    rows = np.random.default_rng(0).permutation(len(table))[:NUM_ROWS]
    codes = [pc.dictionary_encode(table[name]).combine_chunks() for name in SPARSE]
    ids = np.stack([(each.indices if isinstance(each, pa.DictionaryArray) else each).to_numpy() for each in codes], 1)
    np.save(directory / "ids.npy", ids[rows].astype(np.int64) + 2)  # 0 and 1 are for missing and unknown values
    np.save(directory / "labels.npy", table["liked"].to_numpy()[rows].astype(np.float32))


def seed_of(variables: Mapping[str, str]) -> int:
    """Return the seed of this round, never one with which the benchmark was adjusted."""
    return FIRST_CURVE_SEED + int(variables.get(ROUND_VARIABLE, "0")) + int(variables.get("STRATA_BENCH_SEED", "0"))


def measured(prefix: str, run: Callable[[Job, list[dict[str, Any]], int], None]) -> dict[str, Any]:
    """Return the answer of a contender whose `run(job, configurations, seed)` tunes on two workers."""
    is_quick = "--quick" in sys.argv
    seed = seed_of(os.environ)
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as name:
        os.environ["STRATA_RUNS_DIR"] = f"{name}/runs"
        try:
            prepare(Path(name))
        except NotFetched as error:
            return {"not_fetched": str(error)}
        job = Job(name, QUICK_TARGET_AUC if is_quick else TARGET_AUC)
        began_s = time.time()
        run(job, configurations(seed, QUICK_TRIALS if is_quick else CURVE_TRIALS), seed)
        lives = read_lives(job.marks_path)
        is_reached = job.reached.exists()
        reached_s = float(job.reached.read_text(encoding="ascii")) if is_reached else math.inf
        figures = {
            f"{prefix}missed": 0.0 if is_reached else 1.0,
            f"{prefix}epochs": float(sum(moment_s <= reached_s for each in lives for moment_s in each.moments_s)),
        }
        if sum(each.started_s < reached_s for each in lives) > CURVE_WORKERS:
            figures[f"{prefix}utilisation"] = utilisation(lives, num_workers=CURVE_WORKERS, until_s=reached_s)
        if is_reached:
            figures[f"{prefix}time_to_target_s"] = reached_s - began_s
    return {"figures": figures}
