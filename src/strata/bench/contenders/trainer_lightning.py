"""Lightning with DDP on two processes: start and throughput. It starts this script again for the second rank."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from importlib import metadata, util
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from strata.bench.contenders.trainer_job import (
    BATCH_SIZE,
    NUM_RANKS,
    NUM_STEPS,
    QUICK_STEPS,
    Rows,
    Timed,
    measured,
    whole_batch,
    write_times,
)


def main() -> None:
    import lightning as pl  # noqa: PLC0415

    steps = QUICK_STEPS if "--quick" in sys.argv else NUM_STEPS

    class Wrapped(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.module = Timed()
            self.loss = nn.BCEWithLogitsLoss()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y = batch
            loss: torch.Tensor = self.loss(self.module(x), y)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    wrapped = Wrapped()
    rows = Rows(steps * BATCH_SIZE * NUM_RANKS)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    began_s = time.time()
    trainer.fit(wrapped, DataLoader(rows, BATCH_SIZE, shuffle=True, collate_fn=whole_batch))
    if trainer.global_rank:
        return
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as directory:
        write_times(wrapped.module.times, f"{directory}/times.json")
        start_s, per_s = measured(f"{directory}/times.json", began_s)
    figures = {"lightning_start_s": start_s, "lightning_samples_per_s": per_s}
    print(json.dumps({"figures": figures, "versions": {"lightning": metadata.version("lightning")}}))


if __name__ == "__main__":
    if util.find_spec("lightning") is None:
        print(json.dumps({"not_installed": "lightning"}))
    else:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        main()
