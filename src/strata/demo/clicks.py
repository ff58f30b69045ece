"""The demo's data: a generated click log in Parquet files.

A model can learn from it: some users click more often, some items attract more clicks, and low prices and similar items
viewed before raise the odds. The rest is random. The same seed gives the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from pathlib import Path

NUM_USERS = 2_000
NUM_ITEMS = 1_000
NUM_COUNTRIES = 8
MAX_RECENT = 5
"""Items that a user has viewed before."""
_NUM_KINDS = 4
_SHARES = (0.4, 0.3, 0.2, 0.1)
"""Share of the rows in each file; unequal, as in real data."""
_ROW_GROUP_ROWS = 5_000


@dataclass(frozen=True, slots=True)
class ClickFiles:
    num_rows: int
    num_files: int
    num_bytes: int


def write_clicks(directory: Path, *, num_rows: int, seed: int) -> ClickFiles:
    """Write the rows to a few files of unequal size; the column `row` numbers them for the demo's checks."""
    directory.mkdir(parents=True)
    table = _clicks(num_rows, np.random.default_rng(seed))
    ends = np.rint(np.cumsum((0.0, *_SHARES)) * num_rows).astype(int).tolist()
    paths = [directory / f"part-{number}.parquet" for number in range(len(_SHARES))]
    for path, (start, end) in zip(paths, pairwise(ends), strict=True):
        pq.write_table(table.slice(start, end - start), path, row_group_size=_ROW_GROUP_ROWS)
    return ClickFiles(num_rows, len(paths), sum(path.stat().st_size for path in paths))


def _clicks(num_rows: int, random: np.random.Generator) -> pa.Table:
    click_rate, appeal = random.normal(size=NUM_USERS), random.normal(size=NUM_ITEMS)
    kinds = random.integers(_NUM_KINDS, size=NUM_ITEMS)
    users, items = random.integers(NUM_USERS, size=num_rows), random.integers(NUM_ITEMS, size=num_rows)
    countries, prices = random.integers(NUM_COUNTRIES, size=num_rows), random.random(num_rows)
    num_recent = random.integers(MAX_RECENT + 1, size=num_rows)
    offsets = np.concatenate([[0], np.cumsum(num_recent)])
    recent = random.integers(NUM_ITEMS, size=offsets[-1])
    similar = np.bincount(
        np.repeat(np.arange(num_rows), num_recent),
        kinds[recent] == np.repeat(kinds[items], num_recent),
        minlength=num_rows,
    )
    logits = 2.0 * click_rate[users] + 2.0 * appeal[items] + similar - 4.0 * prices + 0.2 * countries
    clicked = random.random(num_rows) < 1 / (1 + np.exp(-logits))
    return pa.table(
        {
            "row": np.arange(num_rows),
            "user": users,
            "item": items,
            "country": countries,
            "recent": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(recent)),
            "price": prices.astype(np.float32),
            "clicked": clicked.astype(np.float32),
        }
    )


def row_numbers(directory: Path) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the row numbers in the files, read with pyarrow and without Strata's loader."""
    column = pq.read_table(directory, columns=["row"]).column("row")
    numbers: np.ndarray[tuple[int], np.dtype[np.int64]] = column.to_numpy().astype(np.int64)
    return numbers
