"""A memory pool for decoded rows that reuses freed memory instead of returning it to the system.

Row groups and blocks are allocated and freed a hundred times a second. Arrow's default allocator returns freed memory
to the system within milliseconds, and getting it back, page by page, costs more than gathering rows into it. Arrow's
jemalloc allocator can be configured to keep freed memory for a while.
"""

from __future__ import annotations

import functools

import pyarrow as pa

KEPT_MS = 10_000
"""How long freed memory is kept for the next row group."""


@functools.cache
def pool() -> pa.MemoryPool:
    """Return the pool for decoded and gathered rows. Other users of Arrow in this process are not affected."""
    try:
        kept = pa.jemalloc_memory_pool()
        pa.jemalloc_set_decay_ms(KEPT_MS)
    except NotImplementedError:  # a build without jemalloc
        return pa.default_memory_pool()
    return kept


def release() -> None:
    """Return unused memory to the system."""
    pool().release_unused()
