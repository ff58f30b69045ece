"""Rows as 16-bit floating-point numbers (IEEE 754 half precision), for the wire between machines.

Numbers are rounded to the nearest half, ties to even. Those that are too large become the largest finite half, not
infinity. Infinity itself becomes NaN, so that a gradient that is not finite stays one, and a server refuses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from strata.errors import InvalidArgument
from strata.servers.table import native

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strata.servers.table.optimizers import Rows

    Halves: TypeAlias = NDArray[np.uint16]

LARGEST = 65_504.0
"""The largest finite half."""
_NAN = 0x7E00
_SIGN = 0x8000
_FLOATS: Rows = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
"""The number of each half."""


def to_half(rows: Rows) -> Halves:
    """Return the bits of the nearest halves, in the same shape."""
    rows = np.ascontiguousarray(rows)
    if native.to_half is not None:
        halves = np.empty(rows.shape, np.uint16)
        native.to_half(rows.reshape(-1).view(np.uint32), halves.reshape(-1))
        return halves
    halves = np.clip(rows, -LARGEST, LARGEST).astype(np.float16).view(np.uint16)
    is_finite = np.isfinite(rows)
    if not is_finite.all():
        signs = np.signbit(rows[~is_finite]).astype(np.uint16) * np.uint16(_SIGN)
        halves[~is_finite] = signs | np.uint16(_NAN)
    return halves


def from_half(halves: Halves, out: Rows | None = None) -> Rows:
    """Return the numbers of these halves, exactly; into `out` if given.

    Raises:
        InvalidArgument: `out` has another shape, or is not contiguous.
    """
    rows = np.empty(halves.shape, np.float32) if out is None else out
    if rows.shape != halves.shape or not rows.flags.c_contiguous:
        raise InvalidArgument(
            f"rows of shape {list(rows.shape)} cannot hold halves of shape {list(halves.shape)}; use a contiguous "
            "array of the same shape",
            field="out",
        )
    if native.from_half is not None:
        native.from_half(np.ascontiguousarray(halves).reshape(-1), _FLOATS, rows.reshape(-1))
    else:
        rows[...] = halves.view(np.float16)
    return rows
