"""A file with a place of its own, for `pa.PythonFile`, over something that is read by ranges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable


class RangedFile:
    def __init__(self, size_bytes: int, read_range: Callable[[int, int], pa.Buffer]) -> None:
        """`read_range`: from this offset so many bytes, which are there and not none."""
        self._size_bytes = size_bytes
        self._read_range = read_range
        self._place = 0
        self.closed = False

    def read(self, num_bytes: int = -1) -> pa.Buffer:
        left = max(0, self._size_bytes - self._place)
        num_bytes = left if num_bytes < 0 else min(num_bytes, left)
        found = self._read_range(self._place, num_bytes) if num_bytes else pa.py_buffer(b"")
        self._place += found.size
        return found

    read_buffer = read

    def seek(self, position: int, whence: int = 0) -> int:
        base = {0: 0, 1: self._place, 2: self._size_bytes}[whence]
        self._place = base + position
        return self._place

    def tell(self) -> int:
        return self._place

    def size(self) -> int:
        return self._size_bytes

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return True

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
