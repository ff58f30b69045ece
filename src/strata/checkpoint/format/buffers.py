"""Convert tensors to bytes and back, without a copy where possible; decompress frames and apply patches.

A compressed frame may claim any size, so it is decompressed into memory of the expected size and never beyond it.
"""

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
    """Return whether the leaf lies in host memory in the order in which it is stored."""
    return raw_bytes(leaf) is not None


def pieces(leaf: Leaf, step: int, unit: int) -> Iterator[tuple[int, Bytes]]:
    """Yield (start, bytes) of the leaf's contents, about `step` bytes at a time; each start is a multiple of `unit`.

    A leaf on another device, or a strided one, is fetched piece by piece.
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
    """Fetch a few rows at a time."""
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
    """Return the bytes of some rows of a leaf that is on another device or strided, back to back."""
    if leaf.kind == "torch":
        import torch  # noqa: PLC0415 - torch is optional

        return _bytes_of_tensor(leaf.source[torch.from_numpy(rows).to(leaf.source.device)].contiguous().cpu())
    found: Bytes = np.ascontiguousarray(leaf.source[rows], dtype=leaf.source.dtype.newbyteorder("=")).reshape(-1)
    return found.view(np.uint8)


def _bytes_of_tensor(tensor: torch.Tensor) -> Bytes:
    """Return the memory of a contiguous CPU tensor; the array keeps the tensor alive."""
    import torch  # noqa: PLC0415 - torch is optional

    array: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return array


def aligned_memory(num_bytes: int) -> mmap.mmap:
    """Allocate private, page-aligned memory, rounded up to whole pages."""
    size = max(-(-num_bytes // ALIGNMENT) * ALIGNMENT, ALIGNMENT)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def raw_bytes(leaf: Leaf) -> Bytes | None:
    """Return the leaf's own memory, or None if it is on another device, strided or not native-endian."""
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
    """Copy a leaf of any layout or device to `target`, in the order in which it is stored."""
    if leaf.kind == "torch":
        tensor_over(target, leaf.dtype, leaf.shape).copy_(leaf.source)
    else:
        np.copyto(array_over(target, leaf.dtype, leaf.shape), leaf.source)


def array_over(memory: Bytes, dtype: dtypes.DType, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return the bytes as a numpy array, without a copy."""
    return memory.view(dtypes.to_numpy(dtype)).reshape(shape)


def tensor_over(memory: Bytes, dtype: dtypes.DType, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the bytes as a torch tensor, without a copy."""
    import torch  # noqa: PLC0415 - torch is optional

    if not math.prod(shape):
        return torch.empty(shape, dtype=dtypes.to_torch(dtype))
    return torch.frombuffer(memory.data, dtype=torch.uint8).view(dtypes.to_torch(dtype)).view(shape)


# -- encodings and patches -----------------------------------------------------------------------------------------


XOR = "xor-zstd"
_MAX_WINDOW_BYTES = 1 << 27
"""The limit of the zstd library for the window of a frame, which its reader keeps in memory."""


def decompress(frame: memoryview, out: memoryview) -> str:
    """Decompress one zstd frame, which must fill `out` exactly; return what is wrong with it, or an empty string."""
    limit = max(_MAX_WINDOW_BYTES, out.nbytes)
    num_bytes = 0
    try:
        with zstandard.ZstdDecompressor(max_window_size=limit).stream_reader(frame, read_across_frames=True) as reader:
            while num_bytes < out.nbytes:
                num_read = reader.readinto(out[num_bytes:])
                if not num_read:
                    return f"its zstd frame has {num_bytes} bytes, expected {out.nbytes}"
                num_bytes += num_read
            if reader.read(1):
                return f"its zstd frame has more than the expected {out.nbytes} bytes"
    except zstandard.ZstdError as error:
        return f"it is not a valid zstd frame ({error}), expected {out.nbytes} bytes"
    return ""


def find_index_problem(indices: Indices, *, before: int, num_units: int) -> str:
    """Return what is wrong with the indices, or an empty string: they must rise from above `before` to `num_units`."""
    if not len(indices):
        return ""
    largest = int(indices.max())
    if largest >= num_units:
        return f"has the index {largest}, but the slice has only {num_units} units"
    if int(indices[0]) <= before or bool((indices[1:] <= indices[:-1]).any()):
        return f"has indices out of order (after {before}); they must rise"
    return ""


def apply_patch(target: Bytes, begin: int, indices: Indices, data: Bytes, *, unit_bytes: int, xor: bool) -> None:
    """Write the units of a patch into `target`, which holds the contents from byte `begin` on, perhaps not all.

    A unit that crosses an end of `target` is written in part. With `xor`, `data` is the exclusive or of the old and the
    new units.
    """
    end = begin + len(target)
    first = -(-begin // unit_bytes)
    count = max(end // unit_bytes - first, 0)
    low, high = (int(i) for i in np.searchsorted(indices, [first, first + count]))
    if low < high:
        # One element per unit, so that numpy copies units and not single bytes.
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
