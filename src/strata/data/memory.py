"""Memory for decoded rows that is used again instead of being given back and asked for anew.

Units and blocks come and go a hundred times a second. Arrow's default allocator returns what was freed to the system
within milliseconds, and to get it back, page by page, costs more than to gather rows into it. Its other allocator can
be told to wait.
"""

from __future__ import annotations

import functools

import pyarrow as pa

KEPT_MS = 10_000
"""How long freed memory is kept for the next unit."""


@functools.cache
def pool() -> pa.MemoryPool:
    """Where decoded and gathered rows are kept. Other users of Arrow in this process are not affected."""
    try:
        kept = pa.jemalloc_memory_pool()
        pa.jemalloc_set_decay_ms(KEPT_MS)
    except NotImplementedError:  # not in every build
        return pa.default_memory_pool()
    return kept


def release() -> None:
    """Gives back what nobody uses."""
    pool().release_unused()
