"""Strata's page: a coordinator with one worker per run, whose charts hold an hour of values."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from strata.bench.contenders.dashboard_page import measure, missing, report
from strata.bench.contenders.dashboard_runs import EVERY_S, METRICS, NAMES, NUM_POINTS, RUNS, value
from strata.bench.server_processes import coordinator_with_page, journal_in
from strata.coordinator.client import CoordinatorClient
from strata.dashboard.history.file import HistoryFile, path_beside
from strata.dashboard.history.store import HistoryStore
from strata.dashboard.sample import Spread

if TYPE_CHECKING:
    from collections.abc import Iterator

FIELD = "[role='combobox']"
"""Of the palette, which searches runs."""


def write_history(path: Path, *, now_s: float) -> None:
    """Write the file that a coordinator which has seen the last hour would have written."""
    store = HistoryStore()
    for step in range(NUM_POINTS):
        at_s = now_s - (NUM_POINTS - step) * EVERY_S
        for run, name in enumerate(RUNS):
            found = {f"metric:{metric}": value(metric, run, step) for metric in METRICS}
            store.add(name, at_s, {key: Spread(mean, mean, mean) for key, mean in found.items()})
    file = HistoryFile(path)
    file.write(store.take_changes())
    file.close()


@contextlib.contextmanager
def training(address: str) -> Iterator[None]:
    """Keep one worker per run alive that has reported its newest values."""
    with CoordinatorClient(address) as client:
        for run, name in enumerate(RUNS):
            worker = client.register_worker("worker-0", job_id=name)
            worker.refresh()
            now = {metric: value(metric, run, NUM_POINTS) for metric in METRICS}
            worker.note("TRAINING", NUM_POINTS, None, now)
            worker.heartbeat()
        yield


def main() -> None:
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as directory:
        write_history(path_beside(journal_in(Path(directory))), now_s=time.time())
        with coordinator_with_page(Path(directory)) as (address, url, _pid), training(address):
            report("", measure(f"{url}/?window=1h", names=NAMES, field=FIELD, shortcut="Control+k"), {})


if __name__ == "__main__":
    absent = missing()
    if absent is None:
        main()
    else:
        print(json.dumps({"not_installed": absent}))
