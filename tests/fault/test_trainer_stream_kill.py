"""A stream whose processes are killed trains on every row of a growing directory exactly once."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from strata import Trainer
from strata.errors import NoCheckpoint
from strata.launch.record.directory import DIRECTORY_VARIABLE
from strata.train import Batch, ParameterServer
from strata.trainer.exported import Predictor
from tests.integration.trainer_models import Counts

FILES, ROWS = 12, 20
PAUSE_S = 0.25
"""Between two files of the writer."""


@pytest.fixture(autouse=True)
def _in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "runs"))
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))


MOVE = f"""
while [ ! -e trained ]; do sleep 0.05; done
for number in $(seq 1 {FILES - 1}); do mv staging/$number.parquet data/; sleep {PAUSE_S}; done
"""
"""The program of the writer, which begins when training has: each file is complete when it appears."""


def prepare(staging: Path, data: Path) -> None:
    """Write the files of the writer, and add the first."""
    for directory in (staging, data):
        directory.mkdir()
    for number in range(FILES):
        ids = np.arange(ROWS * number, ROWS * (number + 1))
        pq.write_table(pa.table({"id": ids}), staging / f"{number}.parquet")
    (staging / "0.parquet").rename(data / "0.parquet")


class Killed(Trainer):
    """Rank 0 kills itself and a server with -9, once each."""

    marks = Path()
    kills: tuple[tuple[str, int], ...] = ()
    """(what to kill, number of the first call in its process at which it may die, once there is a checkpoint)"""
    calls = 0

    def training_step(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        self.calls += 1
        (self.marks / "trained").touch()
        for what, call in self.kills:
            mark = self.marks / f"killed-{what}"
            if os.environ["RANK"] == "0" and self.calls >= call and not mark.exists() and self._has_saved():
                mark.touch()
                os.kill(os.getpid() if what == "worker" else pid_of_server(self.module.count), signal.SIGKILL)
        total: torch.Tensor = batch.call(module).sum()
        return total

    def _has_saved(self) -> bool:
        return any((self.marks / "saved").glob("*/manifest.json"))


def pid_of_server(lookup: Any) -> int:
    """Return the process at the other end of the first connection of a lookup."""
    client = next(iter(lookup._rows._source._clients.values()))
    sock = client._links[-1]._connection._sock
    pid: int = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0]
    return pid


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param((("worker", 8),), id="worker"),
        pytest.param((("server", 8), ("worker", 4)), id="server and worker", marks=pytest.mark.slow),
    ],
)
def test_killed_processes_of_a_stream_neither_lose_nor_repeat_rows(
    tmp_path: Path, kills: tuple[tuple[str, int], ...]
) -> None:
    prepare(tmp_path / "staging", tmp_path / "data")
    trainer = Killed(
        Counts(FILES * ROWS + 1),
        optimizer=torch.optim.SGD,
        optimizer_args={"lr": 1.0},
        strategy=ParameterServer(servers=1, staleness=None, tables=("count",)),
        workers=2,
        checkpoints="saved",
        logs="none",
    )
    trainer.kills, trainer.marks = kills, tmp_path
    exported: list[torch.Tensor] = []

    def export() -> None:
        deadline_s = time.monotonic() + 200
        while not exported and time.monotonic() < deadline_s:
            try:
                model = Predictor(trainer.export("model", checkpoints="saved"))
            except NoCheckpoint:
                time.sleep(0.1)
            else:
                exported.append(model.predict({"id": torch.arange(FILES * ROWS + 1)}))

    writer = subprocess.Popen(["/bin/sh", "-c", MOVE], cwd=tmp_path)
    exporter = threading.Thread(target=export)
    exporter.start()
    try:
        result = trainer.fit("data", batch_size=2, stream=True, idle_timeout_s=6.0, every=3)
    finally:
        writer.kill()
        writer.wait(60)
        exporter.join(60)

    assert result.stop_reason == "no new file for 6 s"
    assert len(list(tmp_path.glob("killed-*"))) == len(kills)
    counts = trainer.module.count.weight.detach().reshape(-1)  # type: ignore[union-attr, operator]
    once = counts[0].item()
    assert once > 0
    assert counts.tolist() == [once] * (FILES * ROWS) + [0.0], "each row moves its own weight by the same amount"
    assert len(result.history) >= 2
    assert set(exported[0].tolist()) <= {-once, 0.0}, "a model of a running stream has each row at most once"
    assert exported[0].min() == -once
