"""What encodings and patches mean: pure functions from bytes to bytes.

A frame may claim anything, so it is unpacked into memory of the size that is expected, and never beyond it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard

if TYPE_CHECKING:
    from strata.checkpoint.format.buffers import Bytes

    Indices = np.ndarray[Any, Any]

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


def problem_of_indices(indices: Indices, *, before: int, num_units: int) -> str:
    """They rise, from beyond `before` on, and stay below `num_units`; empty if they do."""
    if not len(indices):
        return ""
    largest = int(indices.max())
    if largest >= num_units:
        return f"numbers unit {largest}, but there are only {num_units}"
    if int(indices[0]) <= before or bool((indices[1:] <= indices[:-1]).any()):
        return f"numbers its units out of order (after {before}): they must rise"
    return ""


def patch(target: Bytes, begin: int, indices: Indices, data: Bytes, *, unit_bytes: int, xor: bool) -> None:
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
