"""Units into splits: arithmetic on their sizes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_SPLIT_BYTES = 2**40
_FACTORS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


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


def parse_bytes(size: object, *, field: str = "split_bytes") -> int:
    """128MiB, 1GB, 1.5 GiB or a number of bytes.

    Raises:
        InvalidArgument: It is none of these, or outside 1 byte to 1 TiB.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise InvalidArgument(f"{field} is {size!r}; give bytes as a number or as text: '128MiB'", field=field)
    found = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?) *([a-z]*)", str(size).strip(), re.ASCII | re.IGNORECASE)
    unit = found[2].lower() if found else ""
    if found and unit in ("k", "m", "g", "t"):
        raise InvalidArgument(
            f"{field} is {size!r}; say which is meant: {found[1]}{found[2].upper()}iB (powers of 1024) or "
            f"{found[1]}{found[2].upper()}B (powers of 1000)",
            field=field,
        )
    if not found or unit not in _FACTORS:
        raise InvalidArgument(f"{field} is {size!r}; write it as 128MiB, 1GB or a number of bytes", field=field)
    num_bytes = int(float(found[1]) * _FACTORS[unit]) if "." in found[1] else int(found[1]) * _FACTORS[unit]
    if not 1 <= num_bytes <= MAX_SPLIT_BYTES:
        raise InvalidArgument(f"{field} is {size!r}; it must be from 1 byte to 1TiB", field=field)
    return num_bytes


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
