"""Units into splits: arithmetic on their sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strata.config import parse_bytes as parse_bytes  # noqa: PLC0414 - the modules of data find it here
from strata.errors import InvalidArgument

if TYPE_CHECKING:
    import numpy.typing as npt


def pack(
    unit_file: npt.NDArray[np.int64],
    unit_rows: npt.NDArray[np.int64],
    unit_bytes: npt.NDArray[np.int64],
    *,
    split_bytes: int,
    split_rows: int | None = None,
) -> npt.NDArray[np.int64]:
    """Where splits begin, and at the end how many units there are.

    A split takes consecutive units of one file as long as they stay within the bounds; a unit that is larger than a
    bound is a split of its own. How far a split that begins at a unit reaches is found for all units at once; what is
    left to do one by one is to jump from split to split.
    """
    num_units = len(unit_file)
    ends = np.searchsorted(unit_file, unit_file, side="right")
    ends = np.minimum(ends, _reach(unit_bytes, split_bytes))
    if split_rows is not None:
        ends = np.minimum(ends, _reach(unit_rows, split_rows))
    jumps = np.maximum(ends, np.arange(1, num_units + 1)).tolist()
    starts = [0]
    while starts[-1] < num_units:
        starts.append(jumps[starts[-1]])
    return np.array(starts, np.int64)


def _reach(sizes: npt.NDArray[np.int64], limit: int) -> npt.NDArray[np.int64]:
    """For each unit, up to which one (not included) the sizes from here on stay within the limit."""
    # What is above the limit is so by however much; this keeps sums far from overflow.
    sums = np.concatenate([[0], np.cumsum(np.minimum(sizes, limit + 1))])
    return np.searchsorted(sums, sums[:-1] + limit, side="right") - 1


def parse_rows(rows: object, *, field: str = "split_rows") -> int | None:
    """
    Raises:
        InvalidArgument: It is not a number of rows.
    """
    if rows is None:
        return None
    if isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= 2**62:
        raise InvalidArgument(f"{field} is {rows!r}; give a number of rows from 1, or leave it out", field=field)
    return rows
