"""Strata: from `kill -9` of a rank to the next step, the phases of that time, and the time to start."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from strata.bench.contenders import recovery_job_strata
from strata.bench.contenders.recovery_model import rows
from strata.bench.contenders.recovery_watch import NUM_RANKS, NUM_STEPS, kill_one
from strata.launch.record.directory import DIRECTORY_VARIABLE, open_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.launch.record.timeline import RunEvent

NAME = "bench"


def write_rows(path: Path) -> None:
    features, targets = rows()
    columns = {f"x{number}": features[:, number].numpy() for number in range(features.shape[1])}
    pq.write_table(pa.table({**columns, "y": targets.numpy()}), path, row_group_size=2_000)


def moment(events: Sequence[RunEvent], what: str, *, after_s: float) -> float:
    """Return the time of an event after the kill."""
    return next(event.at_s for event in events if event.what == what and event.at_s >= after_s) - after_s


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as name:
        data, runs = Path(name) / "rows.parquet", Path(name) / "runs"
        write_rows(data)

        def command(place: Path) -> Sequence[str]:
            script = recovery_job_strata.__file__
            options = ("--name", NAME, "--workers", str(NUM_RANKS), "--quiet")
            return [sys.executable, "-m", "strata.cli", "run", *options, script, str(data), str(place), str(NUM_STEPS)]

        os.environ[DIRECTORY_VARIABLE] = str(runs)
        measured = kill_one(command)
        events = open_run(NAME).events()
    detection_s = moment(events, "failed", after_s=measured.killed_at_s)
    restart_s = moment(events, "started", after_s=measured.killed_at_s)
    restored_s = moment(events, "restored", after_s=measured.killed_at_s)
    figures = {
        "recovery_s": measured.recovery_s,
        "start_s": measured.start_s,
        "detection_s": detection_s,
        "restart_s": restart_s - detection_s,
        "restore_s": restored_s - restart_s,
        "first_step_s": measured.recovery_s - restored_s,
    }
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
