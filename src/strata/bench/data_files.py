"""The files that `strata bench data` reads: generated once, the same on every machine, kept for the next run.

A dataset is a directory named after its contents. It is written under a temporary name and renamed when complete. If
the contents change, raise `VERSION`. Ids count from 0, so the expected number of rows and the sums over their ids can
be computed without reading the files.

Peers load this file in their own environment, so it does not import Strata.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

VERSION = 1
DIRECTORY_VARIABLE = "STRATA_BENCH_DATA_DIR"
SEED = 7
NUM_FILES = 8
GROUPS_PER_FILE = 4
MAX_GROUP_ROWS = 125_000
NUM_THREADS = 2

ID = "id"
DENSE = tuple(f"dense_{i:02d}" for i in range(13))
CATEGORICAL = tuple(f"cat_{i:02d}" for i in range(26))
LABEL = "label"
COLUMNS = (ID, *DENSE, *CATEGORICAL, LABEL)
WIDE_COLUMNS = (ID, *(f"value_{i:02d}" for i in range(65)))
PROJECTED = (ID, "value_40")


@dataclass(frozen=True, slots=True)
class Checksum:
    """Checksum of a set of rows; a missing, repeated or different row changes it."""

    num_rows: int = 0
    id_sum: int = 0
    id_squares: int = 0
    """Modulo 2⁶⁴."""

    def plus(self, other: Checksum) -> Checksum:
        return Checksum(
            self.num_rows + other.num_rows,
            self.id_sum + other.id_sum,
            (self.id_squares + other.id_squares) % 2**64,
        )


@dataclass(frozen=True, slots=True)
class Files:
    """One dataset."""

    directory: Path
    checksum: Checksum
    num_columns: int

    @property
    def paths(self) -> list[Path]:
        return sorted(self.directory.glob("*.parquet"))

    @property
    def num_rows(self) -> int:
        return self.checksum.num_rows


def checksum_of(ids: range) -> Checksum:
    """Return the checksum of these ids, each once."""

    def squares(below: int) -> int:
        return (below - 1) * below * (2 * below - 1) // 6

    total = (ids.start + ids.stop - 1) * len(ids) // 2
    return Checksum(len(ids), total, (squares(ids.stop) - squares(ids.start)) % 2**64)


def root() -> Path:
    """Return the directory of all datasets: from the variable, else `.build` of the checkout, else a temporary one."""
    configured = os.environ.get(DIRECTORY_VARIABLE)
    if configured:
        return Path(configured)
    built = Path(__file__).resolve().parents[3] / ".build"
    return built / "bench-data" if built.is_dir() else Path(tempfile.gettempdir(), f"strata-bench-data-{os.getuid()}")


# --- datasets ---


def table(num_rows: int) -> Files:
    """Return rows of 41 columns in 8 files of at least 4 row groups: an id, 13 dense, 26 categorical, a label."""
    ids = _file_ids(num_rows)
    directory = kept(f"table-{num_rows}", lambda place: _write(place, ids, _group_rows(num_rows), rows_of_table))
    return Files(directory, checksum_of(range(num_rows)), len(COLUMNS))


def table_again(num_rows: int, num_files: int) -> Files:
    """Return `num_files` links to the files of `table`, in turn."""
    first, ids = table(num_rows), _file_ids(num_rows)
    directory = kept(f"table-{num_rows}-files-{num_files}", lambda place: _link(place, first.paths, num_files))
    return Files(directory, _sum(checksum_of(ids[number % NUM_FILES]) for number in range(num_files)), len(COLUMNS))


def wide(num_rows: int, *, times: int) -> Files:
    """Return rows of 66 columns in 4 files, each linked `times` times."""
    ids = _file_ids(num_rows)[: NUM_FILES // 2]
    once = kept(f"wide-{num_rows}", lambda place: _write(place, ids, _group_rows(num_rows), rows_of_wide))
    paths = sorted(once.glob("*.parquet"))
    directory = kept(f"wide-{num_rows}-times-{times}", lambda place: _link(place, paths, times * len(ids)))
    return Files(directory, _sum(checksum_of(each) for each in ids * times), len(WIDE_COLUMNS))


def many(num_files: int, *, rows_each: int) -> Files:
    """Return small files of 41 columns: separate copies of one file."""

    def make(place: Path) -> None:
        _write(place, [range(rows_each)], rows_each, rows_of_table)
        first = place / _name(0)
        for number in range(1, num_files):
            shutil.copyfile(first, place / _name(number))

    directory = kept(f"many-{num_files}-of-{rows_each}", make)
    return Files(directory, _sum([checksum_of(range(rows_each))] * num_files), len(COLUMNS))


def rows_of_table(ids: range, number: int) -> pa.Table:
    """Return values as in click logs: dense ones that do not compress, and skewed categories."""
    rng = np.random.default_rng([SEED, number])
    arrays: dict[str, Any] = {ID: np.arange(ids.start, ids.stop, dtype=np.int64)}
    for name in DENSE:
        arrays[name] = rng.standard_normal(len(ids), np.float32)
    for index, name in enumerate(CATEGORICAL):
        num_values = 10 ** (1 + index % 7)  # from ten to ten million
        kind = np.int64 if index % 2 else np.int32
        arrays[name] = (rng.random(len(ids), np.float32) ** 3 * num_values).astype(kind)
    arrays[LABEL] = (rng.random(len(ids), np.float32) < 0.05).astype(np.int8)
    return pa.table(arrays)


def rows_of_wide(ids: range, number: int) -> pa.Table:
    rng = np.random.default_rng([SEED, number])
    arrays: dict[str, Any] = {ID: np.arange(ids.start, ids.stop, dtype=np.int64)}
    arrays |= {name: rng.standard_normal(len(ids), np.float32) for name in WIDE_COLUMNS[1:]}
    return pa.table(arrays)


# --- writing ---


def kept(name: str, make: Callable[[Path], None]) -> Path:
    """Return the directory of this name; create it if it does not exist."""
    directory = root() / f"v{VERSION}-{name}"
    if directory.is_dir():
        return directory
    start = time.perf_counter()
    _log(f"generating {directory} (once)")
    root().mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root()))
    try:
        make(beside)
        try:
            beside.rename(directory)
        except OSError:
            if not directory.is_dir():
                raise  # otherwise another process has created it meanwhile
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    _log(f"generated {directory.name} in {time.perf_counter() - start:.1f} s")
    return directory


def _write(place: Path, files: Sequence[range], group_rows: int, make: Callable[[range, int], pa.Table]) -> None:
    def write(number: int) -> None:
        ids = files[number]
        writer: Any = None
        try:
            for start in range(ids.start, ids.stop, group_rows):
                rows = make(range(start, min(start + group_rows, ids.stop)), start)
                writer = writer or pq.ParquetWriter(place / _name(number), rows.schema, compression="snappy")
                writer.write_table(rows, row_group_size=group_rows)
        finally:
            if writer is not None:
                writer.close()
        _log(f"  {number + 1} of {len(files)} files: {len(ids):,} rows")

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(write, range(len(files))))


def _link(place: Path, paths: Sequence[Path], num_files: int) -> None:
    for number in range(num_files):
        (place / _name(number)).hardlink_to(paths[number % len(paths)])


def _file_ids(num_rows: int) -> list[range]:
    """Return the ids of each file of a table."""
    borders = [num_rows * number // NUM_FILES for number in range(NUM_FILES + 1)]
    return [range(first, last) for first, last in itertools.pairwise(borders)]


def _group_rows(num_rows: int) -> int:
    return min(MAX_GROUP_ROWS, -(-num_rows // (NUM_FILES * GROUPS_PER_FILE)))


def _sum(checksums: Iterable[Checksum]) -> Checksum:
    total = Checksum()
    for one in checksums:
        total = total.plus(one)
    return total


def _name(number: int) -> str:
    return f"part-{number:05d}.parquet"


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
