"""A stream whose processes are killed trains on every row of a growing directory exactly once. A process that is killed
within a pass restarts alone.
"""

from __future__ import annotations

import itertools
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
from strata.launch.environment import ALONE, MAY_RESTART_ALONE
from strata.launch.record.directory import open_run
from strata.train import Batch, ParameterServer
from strata.trainer.exported import Predictor
from tests.integration.servers import until
from tests.integration.trainer_models import Counts

pytestmark = pytest.mark.usefixtures("run_directory")

FILES, ROWS = 12, 20
PAUSE_S = 0.25
"""Between two files of the writer."""


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
    """(what to kill, number of the first call in its process at which it may die)"""
    is_calm = True
    """A server is not killed while it saves."""
    calls = 0

    def training_step(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        self.calls += 1
        rank = os.environ["RANK"]
        (self.marks / "trained").touch()
        (self.marks / f"process-{rank}-{os.getpid()}").touch()
        for what, call in self.kills:
            mark = self.marks / f"killed-{what}"
            if rank == "0" and self.calls >= call and not mark.exists():
                mark.touch()
                if what == "server" and self.is_calm:
                    until(may_restart_alone, "the server takes part in nothing collective", deadline_s=120.0)
                os.kill(os.getpid() if what == "worker" else pid_of_server(self.module.count), signal.SIGKILL)
        total: torch.Tensor = batch.call(module).sum()
        return total


def may_restart_alone() -> bool:
    """Return what the last server has declared."""
    return Path(os.environ[ALONE]).with_name("rank-3.alone").read_bytes() == MAY_RESTART_ALONE


def pid_of_server(lookup: Any) -> int:
    """Return the process at the other end of the last connection of a lookup."""
    client = next(iter(lookup._rows._source._clients.values()))
    sock = client._links[-1]._connection._sock
    pid: int = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0]
    return pid


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("kills", "every", "restarted"),
    [
        pytest.param((("worker", 8),), 1_000, [0], id="worker", marks=pytest.mark.slow),
        pytest.param((("server", 8), ("worker", 12)), 1_000, [3, 0], id="server and worker", marks=pytest.mark.slow),
        pytest.param((("server", 8), ("worker", 4)), 3, None, id="while saving", marks=pytest.mark.slow),
    ],
)
def test_killed_processes_of_a_stream_neither_lose_nor_repeat_rows(
    tmp_path: Path, kills: tuple[tuple[str, int], ...], every: int, restarted: list[int] | None
) -> None:
    """`restarted`: the ranks that restart alone; None: others may have to restart with them."""
    prepare(tmp_path / "staging", tmp_path / "data")
    trainer = Killed(
        Counts(FILES * ROWS + 1),
        optimizer=torch.optim.SGD,
        optimizer_args={"lr": 1.0},
        strategy=ParameterServer(servers=2, staleness=None, tables=("count",), replicas=1),
        workers=2,
        checkpoints="saved",
        logs="none",
        name="counts",
        max_restarts=5,
    )
    trainer.kills, trainer.marks, trainer.is_calm = kills, tmp_path, restarted is not None
    exported: list[torch.Tensor] = []

    def export() -> None:
        deadline_s = time.monotonic() + 200
        for number in itertools.count():
            if exported or time.monotonic() > deadline_s:
                return
            try:
                model = Predictor(trainer.export(f"model-{number}", checkpoints="saved"))
            except NoCheckpoint:
                time.sleep(0.1)
            else:
                found = model.predict({"id": torch.arange(FILES * ROWS + 1)})
                exported.extend([found] if found.min() < 0 else [])  # the first checkpoint has no rows yet

    writer = subprocess.Popen(["/bin/sh", "-c", MOVE], cwd=tmp_path)
    exporter = threading.Thread(target=export)
    exporter.start()
    try:
        result = trainer.fit("data", batch_size=2, stream=True, idle_timeout_s=6.0, every=every)
    finally:
        writer.kill()
        writer.wait(60)
        exporter.join(60)

    assert result.stop_reason == "no new file for 6 s"
    assert len(list(tmp_path.glob("killed-*"))) == len(kills)
    if restarted is not None:
        events = open_run("counts").events()
        assert [event.rank for event in events if event.what == "restarted"] == restarted
        assert {event.attempt for event in events} == {0}, [event.text for event in events]
        assert len(list(tmp_path.glob("process-1-*"))) == 1, "the other worker has kept its process"
    assert result.lost_updates == 0
    counts = trainer.module.count.weight.detach().reshape(-1)  # type: ignore[union-attr, operator]
    once = counts[0].item()
    assert once > 0
    assert counts.tolist() == [once] * (FILES * ROWS) + [0.0], "each row moves its own weight by the same amount"
    assert len(result.history) >= 2
    assert set(exported[0].tolist()) == {-once, 0.0}, "a model of a running stream has each row at most once"
