"""The data set for fitting features: 10 M rows, 8 sparse and 4 dense columns. Made once; does not import Strata."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SPARSE = tuple(f"s{number}" for number in range(8))
"""s0 to s3 are strings, s4 to s7 integers, with 100 to 1,000,000 different values."""
DENSE = tuple(f"d{number}" for number in range(4))
ROWS, QUICK_ROWS = 10_000_000, 200_000
ROWS_PER_FILE = 1_250_000
DIRECTORY_VARIABLE = "STRATA_BENCH_DATA_DIR"
_SIZES = (100, 1_000, 20_000, 200_000, 100, 5_000, 100_000, 1_000_000)


def data_path(*, is_quick: bool) -> Path:
    """Return the directory of the files, which are written on the first call."""
    rows = int(os.environ.get("STRATA_BENCH_ROWS", QUICK_ROWS if is_quick else ROWS))
    root = Path(os.environ.get(DIRECTORY_VARIABLE, ".build/bench-data"))
    path = root / f"features-{rows}"
    if not path.exists():
        draft = path.with_name(f".{path.name}-{os.getpid()}")
        draft.mkdir(parents=True)
        for number, first in enumerate(range(0, rows, ROWS_PER_FILE)):
            count = min(ROWS_PER_FILE, rows - first)
            pq.write_table(_table(np.random.default_rng(number), count), draft / f"{number:03}.parquet")
        draft.rename(path)
    return path


def _table(random: np.random.Generator, rows: int) -> pa.Table:
    columns: dict[str, object] = {}
    for name, size in zip(SPARSE, _SIZES, strict=True):
        ids = np.minimum(random.zipf(1.2, rows) - 1, size - 1).astype(np.int64)
        columns[name] = pa.array(ids) if int(name[1:]) >= 4 else pa.array([f"v{n}" for n in range(size)]).take(ids)
    for name in DENSE:
        columns[name] = random.normal(size=rows).astype(np.float32)
    return pa.table(columns)
