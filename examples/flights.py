"""Predict which flights arrive late, from 3 million real flights.

    npm pack vega-datasets@3.2.1 && tar xzf vega-datasets-3.2.1.tgz package/data/flights-3m.parquet
    python examples/flights.py package/data/flights-3m.parquet

Without a file, it makes up a few thousand flights of the same form, to show that it runs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from strata import Trainer
from strata.train import DeepFM, DenseFeat, Features, SparseFeat

LATE_MINUTES = 15


def prepare(source: Path, target: Path) -> None:
    """Write `train/`, `valid/` and `test/`: the label, and the hour, weekday and month of each flight."""
    flights = pq.read_table(source)
    table = pa.table(
        {
            "late": pc.cast(pc.greater(flights["delay"], LATE_MINUTES), pa.int8()),
            "origin": flights["origin"],
            "destination": flights["destination"],
            "hour": pc.hour(flights["date"]),
            "weekday": pc.day_of_week(flights["date"]),
            "month": pc.month(flights["date"]),
            "distance": flights["distance"],
        }
    )
    order = np.random.default_rng(0).permutation(len(table))
    cuts = np.split(order, [int(0.8 * len(order)), int(0.9 * len(order))])
    for name, rows in zip(("train", "valid", "test"), cuts, strict=True):
        (target / name).mkdir(parents=True)
        pq.write_table(table.take(rows), target / name / "flights.parquet", row_group_size=100_000)


def made_up(rows: int) -> pa.Table:
    """Return flights of the same form; evening flights are late more often."""
    random = np.random.default_rng(0)
    minutes = random.integers(0, 180 * 1440, rows)
    late = random.random(rows) < np.where(minutes % 1440 > 960, 0.5, 0.1)
    airports = np.array([f"A{number:02}" for number in range(40)])
    return pa.table(
        {
            "date": (np.datetime64("2001-01-01T00:00:00", "us") + minutes * np.timedelta64(60_000_000, "us")),
            "delay": np.where(late, 40, 0),
            "distance": random.integers(50, 2500, rows),
            "origin": random.choice(airports, rows),
            "destination": random.choice(airports, rows),
        }
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        source = Path(sys.argv[1]) if len(sys.argv) > 1 else directory / "flights.parquet"
        if len(sys.argv) == 1:
            pq.write_table(made_up(8_000), source)
        prepare(source, directory)

        sparse = ["origin", "destination", "hour", "weekday", "month"]
        features = Features.fit(directory / "train", [*map(SparseFeat, sparse), DenseFeat("distance")])
        trainer = Trainer(
            module=DeepFM(features.fields),
            features=features,
            loss=torch.nn.BCEWithLogitsLoss(),
            optimizer=torch.optim.Adam,
            metrics=["auc", "logloss"],
            checkpoints=directory / "checkpoints",
        )
        result = trainer.fit(directory / "train", label="late", valid=directory / "valid", epochs=2, batch_size=4096)
        print(f"{result.steps} steps, best epoch {result.best_epoch + 1}: valid AUC {result.metrics['valid_auc']:.4f}")
        print("test", {name: round(value, 4) for name, value in trainer.evaluate(directory / "test").items()})
        trainer.export(directory / "model")
        print("exported:", ", ".join(sorted(path.name for path in (directory / "model").iterdir())))


if __name__ == "__main__":
    main()
