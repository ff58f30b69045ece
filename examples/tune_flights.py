"""Find a good model for the flights of `flights.py`: learning rate, batch size, embeddings, layers and dropout.

    python examples/tune_flights.py package/data/flights-3m.parquet

Without a file, it tunes on a few thousand made-up flights, to show that it runs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
import torch
from flights import made_up, prepare

from strata import SearchSpace, Trainer
from strata.train import DeepFM, DenseFeat, Features, SparseFeat

MAX_ROWS = 200_000


def model(fields, embedding_dim: int, width: int, dropout: float):
    return DeepFM(fields, embedding_dim=embedding_dim, hidden=(width, width), dropout=dropout)


def main() -> None:
    is_real = len(sys.argv) > 1
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        flights = pq.read_table(sys.argv[1]).slice(0, MAX_ROWS) if is_real else made_up(4_000)
        pq.write_table(flights, directory / "flights.parquet")
        prepare(directory / "flights.parquet", directory)

        sparse = ["origin", "destination", "hour", "weekday", "month"]
        features = Features.fit(directory / "train", [*map(SparseFeat, sparse), DenseFeat("distance")])
        trainer = Trainer(
            module=DeepFM(features.fields),
            features=features,
            loss=torch.nn.BCEWithLogitsLoss(),
            optimizer=torch.optim.AdamW,
            metrics=["auc"],
        )
        space = SearchSpace()
        space.add_float("lr", min=1e-4, max=3e-2, log=True)
        space.add_float("weight_decay", min=1e-5, max=1.0, log=True)
        space.add_int("batch_size", values=[256, 1024, 4096])
        space.add_int("embedding_dim", values=[4, 8, 16])
        space.add_int("width", values=[32, 64, 128])
        space.add_float("dropout", min=0.0, max=0.5)
        study = trainer.tune(
            space,
            directory / "train",
            label="late",
            valid=directory / "valid",
            epochs=9 if is_real else 3,
            metric="auc",
            module=model,
            num_trials=30 if is_real else 4,
        )
        print(study)
        print(f"best: valid AUC {study.best.values[0]:.4f} with {study.best.config}")
        print("test", {name: round(value, 4) for name, value in trainer.evaluate(directory / "test").items()})


if __name__ == "__main__":
    main()
