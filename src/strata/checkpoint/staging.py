"""Warm memory that snapshots are copied into, laid out as their file will be.

Fresh pages cost more than the copy into them, so the memory is kept from one save to the next and only ever grows. It
is aligned to pages, so that it can be written as it is. One snapshot at a time: whoever fills it waits until the last
one has been written.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.checkpoint import dtypes
from strata.checkpoint.layout import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from strata.checkpoint.layout import Layout
    from strata.checkpoint.tree import Leaf

NUM_THREADS = 2
PIECE_BYTES = 16 << 20
_SMALL_BYTES = 1 << 20
"""Tensors below this are copied many at a time: handing one to a thread costs more than copying it."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Staging:
    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="strata-stage")

    @property
    def capacity_bytes(self) -> int:
        return len(self._memory) if self._memory is not None else 0

    def reserve(self, num_bytes: int) -> None:
        """Makes room and touches it, so that the first save is as fast as the others."""
        if num_bytes <= self.capacity_bytes:
            return
        self._memory = None  # before the new one: never two of them at once
        self._memory = aligned_memory(num_bytes)
        pages = np.frombuffer(self._memory, np.uint8)
        step = max(len(pages) // (4 * NUM_THREADS), ALIGNMENT)
        starts = range(0, len(pages), step)
        list(self._pool.map(lambda start: pages[start : start + step : ALIGNMENT].fill(0), starts))

    def fill(self, layout: Layout, leaves: Sequence[Leaf]) -> memoryview:
        """Copies a snapshot in; gives it as the bytes of its file. The caller may change its tensors afterwards."""
        self.reserve(layout.size_bytes)
        assert self._memory is not None
        view = memoryview(self._memory)[: layout.size_bytes]
        view[: len(layout.header)] = layout.header
        target = np.frombuffer(view, np.uint8)
        by_name = {leaf.name: leaf for leaf in leaves}
        tasks: list[Callable[[], None]] = []
        small: list[tuple[Leaf, int]] = []
        for place in layout.places:
            leaf = by_name[place.name]
            if place.num_bytes < _SMALL_BYTES:
                small.append((leaf, place.offset))
            else:
                tasks += _copies(leaf, target[place.offset : place.end])
        per_task = max(len(small) // (4 * NUM_THREADS), 64)
        tasks += [_copy_many(small[i : i + per_task], target) for i in range(0, len(small), per_task)]
        for done in [self._pool.submit(task) for task in tasks]:
            done.result()
        return view

    def close(self) -> None:
        self._pool.shutdown()
        self._memory = None


def aligned_memory(num_bytes: int) -> mmap.mmap:
    """Private pages, rounded up to whole ones; large ones where the system has them."""
    size = max(-(-num_bytes // ALIGNMENT) * ALIGNMENT, ALIGNMENT)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _copies(leaf: Leaf, target: Bytes) -> list[Callable[[], None]]:
    source = raw_bytes(leaf)
    if source is None:
        return [lambda: _copy_strided(leaf, target)]

    def copy(start: int, source: Bytes) -> None:
        np.copyto(target[start : start + PIECE_BYTES], source[start : start + PIECE_BYTES])

    return [
        lambda start=start: copy(start, source)  # type: ignore[misc]  # mypy does not see the default's type
        for start in range(0, len(source), PIECE_BYTES)
    ]


def _copy_many(leaves: Sequence[tuple[Leaf, int]], target: Bytes) -> Callable[[], None]:
    def copy() -> None:
        for leaf, offset in leaves:
            num_bytes = leaf.num_bytes
            if not num_bytes:
                continue
            piece = target[offset : offset + num_bytes]
            source = raw_bytes(leaf)
            if source is None:
                _copy_strided(leaf, piece)
            else:
                piece[:] = source

    return copy


def raw_bytes(leaf: Leaf) -> Bytes | None:
    """The leaf's own memory, if it lies there as it is to be stored."""
    source = leaf.source
    if leaf.kind == "bytes":
        return np.frombuffer(source, np.uint8)
    if leaf.kind == "torch":
        if source.device.type != "cpu" or not source.is_contiguous():
            return None
        memory = (ctypes.c_uint8 * leaf.num_bytes).from_address(source.data_ptr())
        return np.frombuffer(memoryview(memory).cast("B"), np.uint8)
    if not source.flags.c_contiguous or not source.dtype.isnative:
        return None
    flat: Bytes = source.reshape(-1).view(np.uint8)
    return flat


def _copy_strided(leaf: Leaf, target: Bytes) -> None:
    if leaf.kind == "torch":
        tensor_over(target, leaf.dtype, leaf.shape).copy_(leaf.source)
    else:
        np.copyto(array_over(target, leaf.dtype, leaf.shape), leaf.source)


def array_over(memory: Bytes, dtype: dtypes.DType, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The bytes as a numpy array, without a copy."""
    return memory.view(dtypes.to_numpy(dtype)).reshape(shape)


def tensor_over(memory: Bytes, dtype: dtypes.DType, shape: tuple[int, ...]) -> torch.Tensor:
    """The bytes as a torch tensor, without a copy."""
    import torch  # noqa: PLC0415 - only who has torch tensors needs torch

    if not math.prod(shape):
        return torch.empty(shape, dtype=dtypes.to_torch(dtype))
    return torch.frombuffer(memory.data, dtype=torch.uint8).view(dtypes.to_torch(dtype)).view(shape)
