"""Who takes the batches, the same for everybody: a consumer that touches every column and knows every id.

Touching is reading one element of each column, which must be a contiguous tensor with as many rows as the batch has
ids; and summing all ids and their squares, which must come out right at the end of a pass. So nobody is fast by leaving
something out, and little of what is measured is the consumer itself.

The peers' environment loads this file too, so it imports nothing of ours but the file that makes the data.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from strata.bench.data_files import Checksum, Files

if __package__:
    from strata.bench import data_files
else:  # in the peers' environment
    sys.path.append(str(Path(__file__).parents[1]))
    data_files = importlib.import_module("data_files")
    sys.path.pop()

NUM_WORKERS = 2
REPETITIONS = 3
PSS_INTERVAL_S = 0.05
WARM_BYTES = 16 << 20


def setting(name: str, default: int, *, quick: int | None = None) -> int:
    """What `strata bench --set` or the environment says; a size that is named holds for a quick run, too."""
    said = os.environ.get(f"STRATA_BENCH_{name}")
    if said:
        return int(said)
    return quick if quick is not None and is_quick() else default


def is_quick() -> bool:
    return "--quick" in sys.argv


def num_rows() -> int:
    return setting("ROWS", 4_000_000, quick=200_000)


def num_small_files() -> int:
    return setting("FILES", 10_000, quick=500)


def batch_size() -> int:
    return setting("BATCH_SIZE", 4_096)


class Consumer:
    """Takes the batches of one pass."""

    def __init__(self, num_columns: int) -> None:
        self._num_columns = num_columns
        self._num_rows = 0
        self._id_sum = 0
        self._id_squares = 0

    def touch(self, batch: Mapping[str, Any]) -> None:
        """
        Raises:
            ValueError: It is not what a training could use.
        """
        ids = batch["id"]
        num_rows, num_columns = ids.shape[0], 0
        for name, column in batch.items():
            if column.shape[0] != num_rows or not column.is_contiguous():
                raise ValueError(
                    f"column {name!r} has shape {tuple(column.shape)} in a batch of {num_rows} ids, or gaps"
                )
            last = column[-1]
            if last.ndim:  # several columns in one
                num_columns += last.shape[0]
                last = last.sum()
            else:
                num_columns += 1
            last.item()
        if num_columns != self._num_columns:
            raise ValueError(f"a batch has {num_columns} columns, not {self._num_columns}")
        self._num_rows += num_rows
        self._id_sum += int(ids.sum())
        self._id_squares += int(torch.dot(ids, ids))  # wraps around, as the sum of the squares is meant to

    def verify(self, expected: Checksum) -> None:
        """
        Raises:
            ValueError: Not every row came exactly once, so a time says nothing.
        """
        found = (self._num_rows, self._id_sum, self._id_squares % 2**64)
        wanted = (expected.num_rows, expected.id_sum, expected.id_squares)
        if found != wanted:
            raise ValueError(
                f"rows, sum of ids and sum of squares are {found}, not {wanted}: rows were lost, repeated or changed"
            )


def pass_s(
    batches: Callable[[], Iterable[Mapping[str, Any]]], files: Files, *, num_columns: int | None = None
) -> float:
    """How long one pass takes, from asking for the first batch to the end; every row is accounted for."""
    consumer = Consumer(num_columns or files.num_columns)
    start = time.perf_counter()
    for batch in batches():
        consumer.touch(batch)
    taken_s = time.perf_counter() - start
    consumer.verify(files.checksum)
    return taken_s


def rows_per_s(
    batches: Callable[[], Iterable[Mapping[str, Any]]], files: Files, *, num_columns: int | None = None
) -> float:
    """The median of a few passes, after one that does not count."""
    taken = [pass_s(batches, files, num_columns=num_columns) for _ in range(REPETITIONS + 1)]
    return files.num_rows / statistics.median(taken[1:])


def rows_per_s_once(batches: Callable[[], Iterable[Mapping[str, Any]]], files: Files) -> float:
    """Of one pass, for those whose passes take long. It counts from the first batch on: that worker processes take
    their time to start would not matter in a pass as long as those of others.
    """
    consumer = Consumer(files.num_columns)
    start = time.perf_counter()
    first_rows, first_s = 0, start
    for batch in batches():
        consumer.touch(batch)
        if not first_rows:
            first_rows, first_s = batch["id"].shape[0], time.perf_counter()
    end = time.perf_counter()
    consumer.verify(files.checksum)
    if first_rows == files.num_rows:  # there was but one
        return files.num_rows / (end - start)
    return (files.num_rows - first_rows) / (end - first_s)


def warm(*places: Path) -> None:
    """Reads files, or all in a directory, once: what is timed afterwards comes from memory, not from the disk."""
    for place in places:
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            if path.is_file():
                with path.open("rb") as file:
                    while file.read(WARM_BYTES):
                        pass


def pss_mb() -> float:
    """Memory of this process and of those that it started, shared pages in equal parts."""
    total_kb, left = 0, [str(os.getpid())]
    while left:
        process = Path("/proc", left.pop())
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            lines = (process / "smaps_rollup").read_text().splitlines()
            total_kb += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            left += [child for task in process.glob("task/*/children") for child in task.read_text().split()]
    return total_kb * 1024 / 1e6


class PeakPss:
    """The most memory while it is open. A look takes tens of milliseconds, so nothing is timed meanwhile."""

    def __init__(self, *, interval_s: float = PSS_INTERVAL_S) -> None:
        self.peak_mb = 0.0
        self._interval_s = interval_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, pss_mb())
            if self._end.wait(self._interval_s):
                return
