"""Which bytes to ask a store for: few requests, none of them large. Pure."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

HOLE_BYTES = 256 << 10
"""Between two ranges: reading so much for nothing is quicker than another request."""
PART_BYTES = 4 << 20
"""Of one request. A connection to an object store gives some 50–100 MB/s, so a row group comes over several at once."""


@dataclass(frozen=True, slots=True)
class Range:
    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes

    def moved(self, num_bytes: int) -> Range:
        return Range(self.offset + num_bytes, self.num_bytes)


def coalesced(ranges: Iterable[Range], *, hole_bytes: int = HOLE_BYTES) -> list[Range]:
    """The same bytes in ascending order, neighbours joined, and the holes between near ones with them."""
    joined: list[Range] = []
    for each in sorted(ranges, key=lambda r: (r.offset, r.end)):
        if not each.num_bytes:
            continue
        if joined and each.offset - joined[-1].end <= hole_bytes:
            first = joined[-1].offset
            joined[-1] = Range(first, max(joined[-1].end, each.end) - first)
        else:
            joined.append(each)
    return joined


def parts(ranges: Iterable[Range], *, part_bytes: int = PART_BYTES) -> list[Range]:
    """Each range cut into about equal pieces of at most `part_bytes`."""
    made = []
    for each in ranges:
        count = -(-each.num_bytes // part_bytes)
        cuts = [each.offset + each.num_bytes * number // count for number in range(count + 1)]
        made += [Range(low, high - low) for low, high in itertools.pairwise(cuts)]
    return made


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
