"""Predict which flights arrive late: the training script behind the screenshots, as a run and as the trials of a study.

    strata run --workers 2 train_flights.py --data flights

`scripts/screenshots.py` prepares the data and starts it. The validation rows are the same on every rank.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import strata

if TYPE_CHECKING:
    from strata.train.context import Context

CATEGORIES = ("origin", "destination", "hour", "weekday", "month")
LABEL, DISTANCE = "late", "distance"
VALIDATE_EVERY = 25


class FlightModel(torch.nn.Module):
    """An embedding table for each category, and a small network on top."""

    def __init__(self, sizes: dict[str, int], embedding: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleDict({name: torch.nn.Embedding(sizes[name], embedding) for name in CATEGORIES})
        for table in self.tables.values():
            torch.nn.init.normal_(table.weight, std=0.01)
        layers: list[torch.nn.Module] = []
        for num_in, num_out in ((embedding * len(CATEGORIES) + 1, width), (width, width)):
            layers += [torch.nn.Linear(num_in, num_out), torch.nn.ReLU(), torch.nn.Dropout(dropout)]
        self.head = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))

    def forward(self, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = [self.tables[name](rows[name]) for name in CATEGORIES]
        logits: torch.Tensor = self.head(torch.cat([*parts, rows[DISTANCE][:, None] / 1_000.0], dim=1))
        return logits.squeeze(1)


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the probability that a late flight has a higher score than one on time."""
    order = scores.argsort()
    ranks = torch.empty_like(scores, dtype=torch.float64)
    ranks[order] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    num_late = labels.sum().item()
    area = ranks[labels > 0].sum().item() - num_late * (num_late + 1) / 2
    return area / (num_late * (len(labels) - num_late))


def read(path: Path) -> dict[str, torch.Tensor]:
    table = pq.read_table(path)
    return {name: torch.from_numpy(table[name].to_numpy().copy()) for name in table.column_names}


def validate(model: torch.nn.Module, rows: dict[str, torch.Tensor]) -> dict[str, float]:
    model.eval()
    with torch.no_grad():
        scores = model(rows)
    model.train()
    loss = binary_cross_entropy_with_logits(scores, rows[LABEL].float())
    return {"valid_loss": loss.item(), "valid_auc": auc(scores, rows[LABEL])}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="directory with train/, valid.parquet and sizes.json")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--steps", type=int, help="stop after these steps, even within an epoch")
    parser.add_argument("--every", default="10s", help="time between checkpoints")
    parser.add_argument("--batch_size", type=int, default=512, help="rows of a step on each worker")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--embedding", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.1)
    args = parser.parse_args()

    with strata.init(every=args.every, keep_count=12) as ctx:
        train(ctx, args)


def train(ctx: Context, args: argparse.Namespace) -> None:
    ctx.init_process_group()
    Path(f"rank-{ctx.rank}.pid").write_text(str(os.getpid()), encoding="utf-8")  # for whoever kills it
    torch.manual_seed(0)
    torch.set_num_threads(1)
    valid = read(args.data / "valid.parquet")
    sizes = json.loads((args.data / "sizes.json").read_text(encoding="utf-8"))
    model = FlightModel(sizes, args.embedding, args.width, args.dropout)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    loader = ctx.dataloader(args.data / "train", batch_size=args.batch_size, shuffle=True)

    state = {"model": model, "optimizer": optimizer}
    step = ctx.restore(state).step
    print(f"rank {ctx.rank} of {ctx.world_size} starts at step {step}", flush=True)
    for epoch in ctx.epochs(args.epochs):
        for rows in loader:
            loss = binary_cross_entropy_with_logits(parallel(rows), rows[LABEL].float())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            figures = {"loss": loss.item(), "grad_norm": norm.item()}
            if step % VALIDATE_EVERY == 0:
                figures |= validate(model, valid)
                print(f"epoch {epoch} step {step}: {written(figures)}", flush=True)
            ctx.report(step=step, **figures)
            ctx.maybe_checkpoint(state)
            if step == args.steps:
                return


def written(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in figures.items())


if __name__ == "__main__":
    main()
