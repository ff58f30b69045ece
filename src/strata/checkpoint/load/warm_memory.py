"""Fresh memory, and having the system clear it before somebody waits for that.

A disk that reads past the page cache writes into our memory itself, and waits while the system clears page after page
for it: that takes longer than the reading. So another thread touches the memory first, and in large pages, which is six
times faster.

But not everywhere: a virtual machine may give large pages that nobody uses back to its host, and getting them again
takes longer than anything else. Small ones are mostly taken from what it has kept. So it is measured on the way.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from strata.checkpoint.format.layout import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Callable

LARGE_BYTES = 4 << 20
"""What has less is not worth the trouble."""
_STEP_BYTES = 4 << 20
_SLOW_S = 0.003
"""For a step, of the thread's own time: as long as small pages take. Large ones take a tenth of it."""
_MAX_SLOW = 4


def fresh_memory(num_bytes: int) -> memoryview:
    """On page boundaries, if there is much of it, and in large pages where the system has them.

    Raises:
        MemoryError: There is not so much of it; that is this machine's fault, not the checkpoint's.
    """
    try:
        if num_bytes < LARGE_BYTES:
            return np.empty(num_bytes, np.uint8).data
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (MemoryError, OSError, ValueError, OverflowError):
        raise MemoryError(
            f"{num_bytes} bytes are to be read at once, and there is not so much memory; load fewer tensors (only=…)"
        ) from None
    _advise(memory, "MADV_HUGEPAGE")
    return memoryview(memory)


class Warmer:
    """Touches fresh memory, before anything is in it. Goes over to small pages when large ones turn out slow."""

    def __init__(self, time_s: Callable[[], float] = time.thread_time) -> None:
        self._time_s = time_s
        self._lock = threading.Lock()
        self._num_slow = 0

    @property
    def gave_up(self) -> bool:
        """On large pages."""
        return self._num_slow >= _MAX_SLOW

    def warm(self, memory: memoryview, start: int = 0, end: int | None = None) -> None:
        """All of `memory` that `fresh_memory` gave, or a part that begins on a page."""
        end = memory.nbytes if end is None else end
        pages = np.frombuffer(memory, np.uint8)
        for at in range(start, end, _STEP_BYTES):
            stop = min(at + _STEP_BYTES, end)
            if self.gave_up and isinstance(memory.obj, mmap.mmap):
                _advise(memory.obj, "MADV_NOHUGEPAGE", at, stop - at)
            before_s = self._time_s()
            pages[at:stop:ALIGNMENT].fill(0)
            if self._time_s() - before_s > _SLOW_S:
                with self._lock:
                    self._num_slow += 1


def _advise(memory: mmap.mmap, advice: str, start: int = 0, length: int | None = None) -> None:
    """Unless this system, or its kernel, does not know it."""
    number = getattr(mmap, advice, None)
    if number is not None:
        with contextlib.suppress(OSError):
            memory.madvise(number, start, len(memory) - start if length is None else length)
