"""The cost of a step on top of a plain loop, for the Trainer, Lightning and Accelerate: one process, in turns."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import statistics
import sys
import tempfile
import warnings
from importlib import metadata
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from strata.bench.contenders.trainer_job import WARM_UP, Rows, Timed, whole_batch

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH_SIZE = 256
NUM_STEPS = 400
TURNS, QUICK_TURNS = 9, 2
LOSS = nn.BCEWithLogitsLoss()


def plain(module: Timed, rows: Rows) -> None:
    optimizer = torch.optim.Adam(module.parameters())
    for x, y in DataLoader(rows, BATCH_SIZE, shuffle=True, collate_fn=whole_batch):
        optimizer.zero_grad()
        LOSS(module(x), y).backward()
        optimizer.step()


def strata(module: Timed, rows: Rows) -> None:
    from strata.trainer.trainer import Trainer  # noqa: PLC0415

    Trainer(module, LOSS, torch.optim.Adam).fit((rows.x, rows.y), batch_size=BATCH_SIZE)


def strata_dataset(module: Timed, rows: Rows) -> None:
    from strata.trainer.trainer import Trainer  # noqa: PLC0415

    Trainer(module, LOSS, torch.optim.Adam).fit(rows, batch_size=BATCH_SIZE, collate_fn=whole_batch)


def lightning(module: Timed, rows: Rows) -> None:
    import lightning as pl  # noqa: PLC0415

    class Wrapped(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y = batch
            loss: torch.Tensor = LOSS(self.module(x), y)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Wrapped(), DataLoader(rows, BATCH_SIZE, shuffle=True, collate_fn=whole_batch))


def accelerate(module: Timed, rows: Rows) -> None:
    from accelerate import Accelerator  # noqa: PLC0415

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(
        module,
        torch.optim.Adam(module.parameters()),
        DataLoader(rows, BATCH_SIZE, shuffle=True, collate_fn=whole_batch),
    )
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(LOSS(model(x), y))
        optimizer.step()


def step_us(loop: Callable[[Timed, Rows], None], rows: Rows) -> float:
    """Return the median time of a step of a new module, in microseconds."""
    module = Timed(64, 2)
    loop(module, rows)
    times = module.times[WARM_UP:]
    return statistics.median(b - a for a, b in pairwise(times)) * 1e6


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows = Rows(NUM_STEPS * BATCH_SIZE)
    loops = {
        "plain": plain,
        "strata": strata,
        "dataset": strata_dataset,
        "lightning": lightning,
        "accelerate": accelerate,
        "again": plain,
    }
    found: dict[str, list[float]] = {name: [] for name in loops}
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as directory, contextlib.chdir(directory):
        for turn in range(QUICK_TURNS if "--quick" in sys.argv else TURNS):
            names = list(loops)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    found[name].append(step_us(loops[name], rows))
    base = [statistics.fmean(pair) for pair in zip(found["plain"], found["again"], strict=True)]

    def over(name: str) -> float:
        return statistics.median(a - b for a, b in zip(found[name], base, strict=True))

    figures = {
        "loop_overhead_us": over("strata"),
        "loop_dataset_overhead_us": over("dataset"),
        "lightning_overhead_us": over("lightning"),
        "accelerate_overhead_us": over("accelerate"),
        "loop_step_us": statistics.median(base),
        "loop_noise_us": statistics.median(abs(a - b) for a, b in zip(found["plain"], found["again"], strict=True)),
    }
    versions = {name: metadata.version(name) for name in ("lightning", "accelerate")}
    print(json.dumps({"figures": figures, "versions": versions}))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
