"""Arrays with room to grow in place: address space is reserved at once, memory is used as rows are written."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.errors import LimitExceeded

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

_NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux, which Python 3.11 does not name: do not count untouched pages as used."""


def reserve(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an array of zeros whose pages take no memory until they are written.

    Raises:
        LimitExceeded: The address space of this process is limited and does not suffice.
    """
    dtype = np.dtype(dtype)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not num_bytes:
        return np.zeros(shape, dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    try:
        memory = mmap.mmap(-1, num_bytes, flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise LimitExceeded(
            f"{num_bytes} bytes of address space for a table of shape {list(shape)} are not available ({error}); "
            "lower max_rows, or raise the limit of this process (ulimit -v)",
            field="max_rows",
        ) from error
    return np.frombuffer(memory, dtype).reshape(shape)
