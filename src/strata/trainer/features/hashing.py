"""Hashes of many integers or strings at once, equal to those of `portable.py` for each value.

Loops over values in Python would hold the interpreter lock in the decode threads and stall the training loop, so
strings are hashed column by column: the first 8 bytes of all strings, the next 8 bytes of those that have them, and so
on. Strings longer than 256 bytes are replaced by their digest first, which bounds the number of rounds.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from strata import splitmix
from strata.trainer.features.portable import HASHED_BYTES

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

    Hashes = npt.NDArray[np.uint64]

_WORD: Final = 8
_CHUNK_ROWS: Final = 1 << 14
_FIRST_BYTES: Final = np.array([(1 << 8 * num_bytes) - 1 for num_bytes in range(_WORD + 1)], np.uint64)
"""Masks that keep the first bytes of a little-endian word."""


def mix(values: npt.NDArray[Any]) -> Hashes:
    """Hash 64-bit integers, signed or not, by splitmix64."""
    return splitmix.mix(values.astype(np.int64, copy=False).view(np.uint64))


def hash_strings(array: pa.Array) -> Hashes:
    """Hash large strings or large binaries; a null gets the hash of an arbitrary value."""
    hashes = np.empty(len(array), np.uint64)
    for first in range(0, len(array), _CHUNK_ROWS):
        chunk = array.slice(first, _CHUNK_ROWS)
        hashes[first : first + len(chunk)] = _hash_chunk(chunk)
    return hashes


def _hash_chunk(array: pa.Array) -> Hashes:
    data, starts, lengths = _bytes_of(array)
    is_long = lengths > HASHED_BYTES
    if is_long.any():
        data, starts, lengths = _with_digests(data, starts, lengths, np.flatnonzero(is_long))
    # Every position of the bytes as the start of a word; the padding belongs to the last words.
    padded = np.concatenate([data, np.zeros(_WORD, np.uint8)])
    words = np.ndarray((len(data) + 1,), "<u8", buffer=padded, strides=(1,))
    hashes = mix(lengths)
    rows = np.flatnonzero(lengths)
    place = 0
    while len(rows):
        left = lengths[rows] - place
        found = words[starts[rows] + place] & _FIRST_BYTES[np.minimum(left, _WORD)]
        hashes[rows] = mix(hashes[rows] ^ found)
        rows = rows[left > _WORD]
        place += _WORD
    return hashes


def _bytes_of(array: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the bytes of all strings, and where each of them starts and how long it is."""
    _, places, data = array.buffers()
    offsets = np.frombuffer(places, np.int64, len(array) + 1, array.offset * 8)
    first, last = int(offsets[0]), int(offsets[-1])
    used = np.frombuffer(data, np.uint8, last - first, first) if last > first else np.empty(0, np.uint8)
    return used, offsets[:-1] - first, np.diff(offsets)


def _with_digests(
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    rows: npt.NDArray[np.intp],
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Replace the strings of some rows by their digests, appended to the bytes."""
    whole = memoryview(data.data)
    digests = b"".join(
        hashlib.blake2b(whole[start : start + length]).digest()
        for start, length in zip(starts[rows].tolist(), lengths[rows].tolist(), strict=True)
    )
    size = len(digests) // len(rows)
    starts, lengths = starts.copy(), lengths.copy()
    starts[rows] = len(data) + size * np.arange(len(rows))
    lengths[rows] = size
    return np.concatenate([data, np.frombuffer(digests, np.uint8)]), starts, lengths
