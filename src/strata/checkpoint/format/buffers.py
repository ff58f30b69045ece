"""Tensors as bytes and bytes as tensors, without a copy where there can be none."""

from __future__ import annotations

import ctypes
import math
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard

from strata.checkpoint.format import dtypes
from strata.checkpoint.format.layout import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from strata.checkpoint.format.tree import Leaf

    Indices = np.ndarray[Any, Any]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def is_raw(leaf: Leaf) -> bool:
    """Whether its memory is ours to look at, in the order of its elements."""
    return raw_bytes(leaf) is not None


def pieces(leaf: Leaf, step: int, unit: int) -> Iterator[tuple[int, Bytes]]:
    """(start, bytes) of the leaf's contents, about `step` at a time, each start a multiple of `unit`.

    What does not lie in our memory in its order (on another device, strided) is fetched piece by piece.
    """
    source = raw_bytes(leaf)
    if source is not None:
        for start in range(0, len(source), step):
            yield start, source[start : start + step]
    elif leaf.kind == "torch" and leaf.source.is_contiguous():
        flat = leaf.source.reshape(-1)
        per_piece = max(step // leaf.dtype.itemsize, 1)
        for first in range(0, flat.numel(), per_piece):
            yield first * leaf.dtype.itemsize, _bytes_of_tensor(flat[first : first + per_piece].cpu())
    else:
        yield from _strided_pieces(leaf, step, unit)


def _strided_pieces(leaf: Leaf, step: int, unit: int) -> Iterator[tuple[int, Bytes]]:
    """Some rows at a time."""
    num_rows = leaf.shape[0] if leaf.shape else 1
    row_bytes = leaf.num_bytes // num_rows
    per_piece = max(step // math.lcm(row_bytes, unit), 1) * (math.lcm(row_bytes, unit) // row_bytes)
    for first in range(0, num_rows, per_piece):
        rows = leaf.source[first : first + per_piece] if leaf.shape else leaf.source
        shape = (len(rows), *leaf.shape[1:]) if leaf.shape else ()
        fetched = np.empty(math.prod(shape) * leaf.dtype.itemsize, np.uint8)
        copy_strided(leaf._replace(source=rows, shape=shape, num_bytes=len(fetched)), fetched)
        yield first * row_bytes, fetched


def rows_from(leaf: Leaf, rows: np.ndarray[Any, np.dtype[np.int64]]) -> Bytes:
    """Some rows of a leaf that does not lie in our memory as it is stored, one after another."""
    if leaf.kind == "torch":
        import torch  # noqa: PLC0415 - only who has torch tensors needs torch

        return _bytes_of_tensor(leaf.source[torch.from_numpy(rows).to(leaf.source.device)].contiguous().cpu())
    found: Bytes = np.ascontiguousarray(leaf.source[rows], dtype=leaf.source.dtype.newbyteorder("=")).reshape(-1)
    return found.view(np.uint8)


def _bytes_of_tensor(tensor: torch.Tensor) -> Bytes:
    """Of a contiguous one on the CPU, which the outcome keeps alive."""
    import torch  # noqa: PLC0415 - only who has torch tensors needs torch

    array: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return array


def aligned_memory(num_bytes: int) -> mmap.mmap:
    """Private pages, rounded up to whole ones; large ones where the system has them."""
    size = max(-(-num_bytes // ALIGNMENT) * ALIGNMENT, ALIGNMENT)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


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


def copy_strided(leaf: Leaf, target: Bytes) -> None:
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


# -- encodings and patches -----------------------------------------------------------------------------------------


XOR = "xor-zstd"
_MAX_WINDOW_BYTES = 1 << 27
"""As the zstd library has it: what a frame may refer back to, and its reader keeps."""


def decompress(frame: memoryview, out: memoryview) -> str:
    """One zstd frame, which fills `out` exactly. Gives what is wrong with it; empty if nothing is."""
    limit = max(_MAX_WINDOW_BYTES, out.nbytes)
    num_bytes = 0
    try:
        with zstandard.ZstdDecompressor(max_window_size=limit).stream_reader(frame, read_across_frames=True) as reader:
            while num_bytes < out.nbytes:
                num_read = reader.readinto(out[num_bytes:])
                if not num_read:
                    return f"its zstd frame gives {num_bytes} bytes, expected {out.nbytes}"
                num_bytes += num_read
            if reader.read(1):
                return f"its zstd frame gives more than the {out.nbytes} bytes that are expected"
    except zstandard.ZstdError as error:
        return f"it is not a zstd frame ({error}), {out.nbytes} bytes are expected from one"
    return ""


def find_index_problem(indices: Indices, *, before: int, num_units: int) -> str:
    """They rise, from beyond `before` on, and stay below `num_units`; empty if they do."""
    if not len(indices):
        return ""
    largest = int(indices.max())
    if largest >= num_units:
        return f"numbers unit {largest}, but there are only {num_units}"
    if int(indices[0]) <= before or bool((indices[1:] <= indices[:-1]).any()):
        return f"numbers its units out of order (after {before}): they must rise"
    return ""


def apply_patch(target: Bytes, begin: int, indices: Indices, data: Bytes, *, unit_bytes: int, xor: bool) -> None:
    """Puts units where they belong. `target` has the contents from byte `begin` on, and perhaps not all of them: units
    that lie across one of its ends are put there as far as it reaches.

    With `xor` the data is what the units differ in from what is there.
    """
    end = begin + len(target)
    first = -(-begin // unit_bytes)
    count = max(end // unit_bytes - first, 0)
    low, high = (int(i) for i in np.searchsorted(indices, [first, first + count]))
    if low < high:
        # One element for each unit, so that numpy moves them with one copy and not byte by byte.
        unit = np.dtype((np.void, unit_bytes))
        at = first * unit_bytes - begin
        units = target[at : at + count * unit_bytes].view(unit)
        chosen = indices[low:high] - first
        new = data[low * unit_bytes : high * unit_bytes]
        if xor:
            new = units[chosen].view(np.uint8) ^ new
        units[chosen] = new.view(unit)
    for number in (*range(low), *range(high, len(indices))):
        at = int(indices[number]) * unit_bytes
        piece = data[number * unit_bytes : (number + 1) * unit_bytes]
        start, stop = max(at, begin), min(at + len(piece), end)
        if start < stop:
            there = target[start - begin : stop - begin]
            there[:] = piece[start - at : stop - at] ^ there if xor else piece[start - at : stop - at]
