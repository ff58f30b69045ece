"""The files that `strata bench data` reads: generated once, the same on every machine, kept for the next run.

A dataset is a directory whose name says what is in it, and it appears only when it is whole: it is made beside its
place, and renamed. Other contents are another `VERSION`. Ids count from 0, so what a reader must find (how many
rows, and sums over their ids) is arithmetic and needs no look at the files.

The peers' environment loads this file too, so it imports nothing of ours.
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
    """What tells one set of rows from another: a row that is missing, repeated or another one changes it."""

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
    """Of these ids, each once."""

    def squares(below: int) -> int:
        return (below - 1) * below * (2 * below - 1) // 6

    total = (ids.start + ids.stop - 1) * len(ids) // 2
    return Checksum(len(ids), total, (squares(ids.stop) - squares(ids.start)) % 2**64)


def root() -> Path:
    """Where the variable says, else in the checkout's own place for what is built, else in the temporary directory."""
    said = os.environ.get(DIRECTORY_VARIABLE)
    if said:
        return Path(said)
    built = Path(__file__).resolve().parents[3] / ".build"
    return built / "bench-data" if built.is_dir() else Path(tempfile.gettempdir(), f"strata-bench-data-{os.getuid()}")


# --- datasets ---


def table(num_rows: int) -> Files:
    """Rows of 41 columns in 8 files of (at least) 4 row groups: an id, 13 dense, 26 categorical, a label."""
    ids = _file_ids(num_rows)
    directory = kept(f"table-{num_rows}", lambda place: _write(place, ids, _group_rows(num_rows), rows_of_table))
    return Files(directory, checksum_of(range(num_rows)), len(COLUMNS))


def table_again(num_rows: int, num_files: int) -> Files:
    """So many files of the same size as those of `table`: the same ones, linked again and again. Fewer than 8 are its
    first ones.
    """
    first, ids = table(num_rows), _file_ids(num_rows)
    directory = kept(f"table-{num_rows}-files-{num_files}", lambda place: _link(place, first.paths, num_files))
    return Files(directory, _sum(checksum_of(ids[number % NUM_FILES]) for number in range(num_files)), len(COLUMNS))


def wide(num_rows: int, *, times: int) -> Files:
    """Rows of 66 columns in 4 files, each linked so often."""
    ids = _file_ids(num_rows)[: NUM_FILES // 2]
    once = kept(f"wide-{num_rows}", lambda place: _write(place, ids, _group_rows(num_rows), rows_of_wide))
    paths = sorted(once.glob("*.parquet"))
    directory = kept(f"wide-{num_rows}-times-{times}", lambda place: _link(place, paths, times * len(ids)))
    return Files(directory, _sum(checksum_of(each) for each in ids * times), len(WIDE_COLUMNS))


def many(num_files: int, *, rows_each: int) -> Files:
    """Small files of 41 columns: copies of one, each a file of its own to the system."""

    def make(place: Path) -> None:
        _write(place, [range(rows_each)], rows_each, rows_of_table)
        first = place / _name(0)
        for number in range(1, num_files):
            shutil.copyfile(first, place / _name(number))

    directory = kept(f"many-{num_files}-of-{rows_each}", make)
    return Files(directory, _sum([checksum_of(range(rows_each))] * num_files), len(COLUMNS))


def rows_of_table(ids: range, number: int) -> pa.Table:
    """Values as click logs have them: dense ones that do not compress, categories of which few are frequent."""
    rng = np.random.default_rng([SEED, number])
    arrays: dict[str, Any] = {ID: np.arange(ids.start, ids.stop, dtype=np.int64)}
    for name in DENSE:
        arrays[name] = rng.standard_normal(len(ids), np.float32)
    for place, name in enumerate(CATEGORICAL):
        num_values = 10 ** (1 + place % 7)  # from ten to ten million
        kind = np.int64 if place % 2 else np.int32
        arrays[name] = (rng.random(len(ids), np.float32) ** 3 * num_values).astype(kind)
    arrays[LABEL] = (rng.random(len(ids), np.float32) < 0.05).astype(np.int8)
    return pa.table(arrays)


def rows_of_wide(ids: range, number: int) -> pa.Table:
    rng = np.random.default_rng([SEED, number])
    arrays: dict[str, Any] = {ID: np.arange(ids.start, ids.stop, dtype=np.int64)}
    arrays |= {name: rng.standard_normal(len(ids), np.float32) for name in WIDE_COLUMNS[1:]}
    return pa.table(arrays)


# --- making them ---


def kept(name: str, make: Callable[[Path], None]) -> Path:
    """The directory of this name, made now if it is not there."""
    place = root() / f"v{VERSION}-{name}"
    if place.is_dir():
        return place
    start = time.perf_counter()
    _say(f"making {place} (once)")
    root().mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root()))
    try:
        make(beside)
        try:
            beside.rename(place)
        except OSError:
            if not place.is_dir():
                raise  # else somebody else has made it meanwhile
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    _say(f"made {place.name} in {time.perf_counter() - start:.1f} s")
    return place


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
        _say(f"  {number + 1} of {len(files)} files: {len(ids):,} rows")

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(write, range(len(files))))


def _link(place: Path, paths: Sequence[Path], num_files: int) -> None:
    for number in range(num_files):
        (place / _name(number)).hardlink_to(paths[number % len(paths)])


def _file_ids(num_rows: int) -> list[range]:
    """Which ids each file of a table has."""
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


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
