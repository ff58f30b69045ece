"""The Trainer with two local workers: start and throughput. A new process, which imports everything first."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

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
from strata.launch.record.directory import DIRECTORY_VARIABLE
from strata.trainer.callbacks import Callback


class WriteTimes(Callback):
    """Writes the times of rank 0's steps at the end. A job's module is a copy, so the caller cannot see its list."""

    def __init__(self, path: str, module: Timed) -> None:
        self._path = path
        self._module = module

    def on_end(self, result: Any) -> None:  # noqa: ARG002 - the protocol's
        write_times(self._module.times, self._path)


def fit(engine: str) -> tuple[float, float, float]:
    """Return the time at which `fit` was called, the time from there to the end of the first step, and samples/s."""
    import torch  # noqa: PLC0415 - imported before `fit` is timed
    from torch import nn  # noqa: PLC0415

    from strata.trainer.trainer import Trainer  # noqa: PLC0415

    steps = QUICK_STEPS if "--quick" in sys.argv else NUM_STEPS
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as directory:
        os.environ[DIRECTORY_VARIABLE] = f"{directory}/runs"
        os.chdir(directory)
        module = Timed()
        out = str(Path(directory) / "times.json")
        trainer = Trainer(
            module,
            nn.BCEWithLogitsLoss(),
            torch.optim.Adam,
            workers=NUM_RANKS,
            engine=engine,
            logs="none",
            callbacks=[WriteTimes(out, module)],
            checkpoints=f"{directory}/checkpoints",
        )
        rows = Rows(steps * BATCH_SIZE * NUM_RANKS)
        began_s = time.time()
        trainer.fit(rows, batch_size=BATCH_SIZE, collate_fn=whole_batch)
        found = measured(out, began_s)
        os.chdir("/")
        return began_s, *found


def main() -> None:
    began_s = psutil.Process().create_time()
    imported_s, start_s, per_s = fit("local")
    figures = {"start_s": start_s, "command_start_s": imported_s - began_s + start_s, "samples_per_s": per_s}
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
