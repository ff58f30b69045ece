"""The consumer of batches, the same for every contender: it touches every column and checks every id.

It reads one element of each column, which must be a contiguous tensor with as many rows as the batch has ids. It sums
all ids and their squares, which must be exact at the end of a pass. So no contender is fast because it leaves out work,
and the consumer itself takes little of the measured time.

Peers load this file in their own environment, so it imports only the file that generates the data.
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
    """Return a setting from `strata bench --set` or the environment; a given size also applies to a quick run."""
    value = os.environ.get(f"STRATA_BENCH_{name}")
    if value:
        return int(value)
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
    """Consumes the batches of one pass."""

    def __init__(self, num_columns: int) -> None:
        self._num_columns = num_columns
        self._num_rows = 0
        self._id_sum = 0
        self._id_squares = 0

    def touch(self, batch: Mapping[str, Any]) -> None:
        """Touch a batch.

        Raises:
            ValueError: A training could not use the batch.
        """
        ids = batch["id"]
        num_rows, num_columns = ids.shape[0], 0
        for name, column in batch.items():
            if column.shape[0] != num_rows or not column.is_contiguous():
                raise ValueError(
                    f"column {name!r} has shape {tuple(column.shape)} in a batch of {num_rows} ids, or gaps in memory"
                )
            last = column[-1]
            if last.ndim:  # several columns in one tensor
                num_columns += last.shape[0]
                last = last.sum()
            else:
                num_columns += 1
            last.item()
        if num_columns != self._num_columns:
            raise ValueError(f"a batch has {num_columns} columns, not {self._num_columns}")
        self._num_rows += num_rows
        self._id_sum += int(ids.sum())
        self._id_squares += int(torch.dot(ids, ids))  # wraps around on purpose

    def verify(self, expected: Checksum) -> None:
        """Check the checksum of the pass.

        Raises:
            ValueError: Not every row came exactly once, so the time is meaningless.
        """
        found = (self._num_rows, self._id_sum, self._id_squares % 2**64)
        sums = (expected.num_rows, expected.id_sum, expected.id_squares)
        if found != sums:
            raise ValueError(
                f"rows, sum of ids and sum of squares are {found}, not {sums}: rows were lost, repeated or changed"
            )


def pass_s(
    batches: Callable[[], Iterable[Mapping[str, Any]]], files: Files, *, num_columns: int | None = None
) -> float:
    """Return the time of one pass, from the request of the first batch to the end; every row is verified."""
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
    """Return the throughput of the median pass after a warm-up pass."""
    taken = [pass_s(batches, files, num_columns=num_columns) for _ in range(REPETITIONS + 1)]
    return files.num_rows / statistics.median(taken[1:])


def rows_per_s_once(batches: Callable[[], Iterable[Mapping[str, Any]]], files: Files) -> float:
    """Return the throughput of one pass, for contenders whose passes take long. It counts from the first batch, because
    the start of worker processes would not matter in a longer pass.
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
    if first_rows == files.num_rows:  # there was only one batch
        return files.num_rows / (end - start)
    return (files.num_rows - first_rows) / (end - first_s)


def warm(*places: Path) -> None:
    """Read files, or all files of a directory, once, so that they come from the page cache afterwards."""
    for place in places:
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            if path.is_file():
                with path.open("rb") as file:
                    while file.read(WARM_BYTES):
                        pass


def pss_mb() -> float:
    """Return the memory of this process and its descendants; shared pages are divided among them."""
    total_kb, left = 0, [str(os.getpid())]
    while left:
        process = Path("/proc", left.pop())
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            lines = (process / "smaps_rollup").read_text().splitlines()
            total_kb += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            left += [child for task in process.glob("task/*/children") for child in task.read_text().split()]
    return total_kb * 1024 / 1e6


class PeakPss:
    """Measures the peak memory while it is open. A sample takes tens of milliseconds, so do not time anything
    meanwhile.
    """

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
