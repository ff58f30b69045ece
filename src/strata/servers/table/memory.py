"""Arrays with room to grow in place: address space is reserved at once, memory is used as rows are written."""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.errors import LimitExceeded

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

_NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux, which Python 3.11 does not name: do not count untouched pages as used."""

_HUGE_FROM_BYTES = 16 << 20
"""Arrays from this size on use pages of 2 MiB: rows are read in no order, and with small pages the processor would look
up the page of nearly every row in memory. The last page may be empty, so small arrays do not use them."""


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
    if num_bytes >= _HUGE_FROM_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)
