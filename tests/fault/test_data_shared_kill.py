"""Killed and stopped processes of a node cache: the others go on, deliver every row, and nothing is left behind."""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import node_cache_children
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strata.data.shared import cache
from strata.data.shared.cache import COPY_BYTES
from tests.integration.servers import STRATA, until
from tests.integration.shared_readers import Reader, children, limit

__all__ = ["children", "limit"]  # fixtures

NUM_ROW_GROUPS = 6
ROWS = 20_000
"""In a row group: an entry is mapped, not copied."""


@pytest.fixture
def data(tmp_path: Path) -> str:
    columns = {"x": np.random.default_rng(0).normal(size=NUM_ROW_GROUPS * ROWS)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=ROWS)
    return str(tmp_path)


def is_gone(limit: int) -> bool:
    """Return whether the cache is removed, under its name and the one that it has meanwhile."""
    path = cache.directory_for(limit)
    return not path.exists() and not list(path.parent.glob(f".{path.name}*"))


def test_a_process_killed_while_it_decodes_loses_only_that_row_group(
    children: list[subprocess.Popen[str]], data: str, limit: int
) -> None:
    expected = Reader(children, data).result()
    killed = Reader(children, data, "die", shared_bytes=limit, linger_s=20)
    assert killed.line() == "ending\n"
    killed.process.wait(30)
    found = Reader(children, data, shared_bytes=limit).result()
    assert found["hash"] == expected["hash"]
    assert (found["units"], found["shared_units"]) == (NUM_ROW_GROUPS - 1, 1)


def test_a_stopped_process_delays_the_others_by_a_limited_time(
    children: list[subprocess.Popen[str]], data: str, limit: int
) -> None:
    expected = Reader(children, data).result()
    stopped = Reader(children, data, "stop", shared_bytes=limit)
    assert stopped.line() == "ending\n"
    found = Reader(children, data, shared_bytes=limit, wait_s=1.0).result()
    assert found["hash"] == expected["hash"]
    assert (found["units"], found["shared_units"]) == (NUM_ROW_GROUPS - 1, 1)
    stopped.process.send_signal(signal.SIGCONT)
    resumed = stopped.result()
    assert resumed["hash"] == expected["hash"]
    assert resumed["units"] == 2, "its own, and the one that was taken over from it"


def test_a_killed_reader_frees_what_it_had_mapped_and_nothing_is_left_after_the_last_process(
    children: list[subprocess.Popen[str]], data: str, limit: int
) -> None:
    readers = [Reader(children, data, shared_bytes=limit) for _ in range(2)]
    found = [reader.result() for reader in readers]
    assert sum(each["units"] for each in found) == NUM_ROW_GROUPS
    readers[0].process.kill()
    readers[0].process.wait(30)
    assert Reader(children, data, shared_bytes=limit).result()["shared_units"] == NUM_ROW_GROUPS
    for child in children:
        child.kill()
    until(lambda: is_gone(limit), "the cache is removed although every process was killed")


@pytest.mark.parametrize("seed", [0, 1])
def test_random_kills_and_stops_never_give_wrong_contents_and_the_limit_holds(tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed)
    most = 6 * COPY_BYTES
    path = cache.directory_for(most, tmp_path)
    seeds = itertools.count(seed * 100)

    def start() -> subprocess.Popen[str]:
        arguments = [str(each) for each in (path, most, next(seeds), 150)]
        return subprocess.Popen(
            [sys.executable, node_cache_children.__file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    running, stopped, num_kills, num_checks = [start() for _ in range(3)], None, 0, 0
    try:
        while running:
            child = chosen.choice([each for each in running if each is not stopped])
            assert child.stdout is not None
            line = child.stdout.readline()
            assert line in ("step\n", "end\n")
            if line == "end\n":
                running.remove(child)
                child.communicate()
            elif num_kills < 5 and chosen.random() < 0.04:
                num_kills += 1
                child.kill()
                child.communicate()
                running[running.index(child)] = start()
            elif stopped is None and len(running) > 1 and chosen.random() < 0.02:
                stopped = child
                child.send_signal(signal.SIGSTOP)
            if stopped is not None and (chosen.random() < 0.02 or running == [stopped]):
                stopped.send_signal(signal.SIGCONT)
                stopped = None
            assert used_bytes(path) <= most
            num_checks += used_bytes(path) > 0
        assert num_kills == 5
        assert num_checks
    finally:
        for child in running:
            child.kill()
            child.communicate()
    until(lambda: not path.exists(), "the cache is removed")


def used_bytes(path: Path) -> int:
    """Return the bytes of entries and of the room that is reserved for drafts; 0 if a process is changing them."""
    try:
        with (path / "lock").open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return sum(each.stat().st_size for each in path.iterdir() if each.suffix in (".entry", ".draft"))
    except (FileNotFoundError, BlockingIOError):
        return 0


WORKER = """
import json, os, signal, sys
from pathlib import Path
from strata.data import StructuredDataset, loader
from strata.data.shared import cache, eviction

eviction.MIN_WAIT_S = 25.0
loader.has_torch = lambda: False
cache.LINGER_S = 0.1
batches, dataset = StructuredDataset.create_dataloader(
    sys.argv[1], output_format="numpy", rank=0, num_ranks=1, shared_bytes=int(sys.argv[2])
)
assert sum(len(batch["x"]) for batch in batches) == int(sys.argv[3])
Path(f"{os.environ['RANK']}.units").write_text(str(dataset.get_metrics().total.units))
if sys.argv[4] == "wait":
    signal.pause()
"""


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_workers_of_a_run_share_and_nothing_is_left_after_it(tmp_path: Path, data: str, limit: int, end: str) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "worker.py").write_text(WORKER)
    how = "wait" if end == "kill" else "exit"
    rows = str(NUM_ROW_GROUPS * ROWS)
    with subprocess.Popen(
        [str(STRATA), "run", "--workers", "2", "worker.py", f"{data}/a.parquet", str(limit), rows, how],
        cwd=place,
        env={**os.environ, "STRATA_RUNS_DIR": str(place / "runs")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as run:
        try:
            until(lambda: len(list(place.glob("*.units"))) == 2, "both workers have read", deadline_s=40)
            if end == "kill":
                run.kill()
            assert run.wait(30) == (0 if end == "exit" else -signal.SIGKILL)
        finally:
            run.kill()
    assert sum(int(path.read_text()) for path in place.glob("*.units")) == NUM_ROW_GROUPS
    until(lambda: is_gone(limit), "the cache is removed")


def test_what_a_killed_keeper_leaves_is_removed_by_the_next_loader(
    children: list[subprocess.Popen[str]], data: str, limit: int
) -> None:
    reader = Reader(children, data, shared_bytes=limit, linger_s=600)
    reader.result()
    path = cache.directory_for(limit)
    keepers = [
        int(each.name)
        for each in Path("/proc").iterdir()
        if each.name.isdecimal() and str(path) in each.joinpath("cmdline").read_bytes().decode().split("\0")
    ]
    assert len(keepers) == 1
    os.kill(keepers[0], signal.SIGKILL)
    reader.process.kill()
    reader.process.wait(30)
    Reader(children, data, shared_bytes=limit + 1).result()
    assert is_gone(limit)
