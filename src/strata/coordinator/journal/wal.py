"""Detect transactions in SQLite's write-ahead log that SQLite will ignore.

After a crash, SQLite reads the log up to the first frame with a wrong checksum and silently drops the rest. That is
right for the transaction that the crash interrupted, and wrong if a damaged frame hides acknowledged transactions. We
therefore scan the log before SQLite opens it. The format: https://sqlite.org/fileformat2.html#walformat

One case remains undecided: damage to the last transaction of the log looks like an interrupted transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_HEADER_BYTES = 32
_FRAME_HEADER_WORDS = 6
"""page, size of the database after a commit (0: no commit), two salts, two checksums"""
_MAGIC = 0x377F0682
_DEFAULT_PAGE_BYTES = 4096
_MASK = 0xFFFFFFFF

_Pair = tuple[int, int]


def hidden_commits(path: Path) -> int:
    """Return the number of commits behind the first broken frame of this log."""
    data = np.fromfile(path, dtype=np.uint8) if path.exists() else np.zeros(0, dtype=np.uint8)
    if data.size < _HEADER_BYTES:
        return 0
    header = [int(word) for word in data[:_HEADER_BYTES].view(">u4")]
    order = ">u4" if header[0] & 1 else "<u4"
    sums = _add((0, 0), data[:24].view(order))
    is_valid = header[0] & ~1 == _MAGIC and sums == (header[6], header[7])
    page_bytes = {1: 65536}.get(header[2], header[2]) if is_valid else _DEFAULT_PAGE_BYTES
    frame_bytes = 4 * _FRAME_HEADER_WORDS + page_bytes
    num_frames = (data.size - _HEADER_BYTES) // frame_bytes
    if num_frames == 0:
        return 0
    frames = data[_HEADER_BYTES : _HEADER_BYTES + num_frames * frame_bytes].reshape(num_frames, frame_bytes)
    fields = frames[:, : 4 * _FRAME_HEADER_WORDS].copy().view(">u4")
    salts = np.array(header[4:6] if is_valid else fields[0, 2:4], dtype=np.uint32)
    num_valid = _num_valid(frames, fields, salts, sums, order) if is_valid else 0
    beyond = fields[num_valid:]
    # Frames from before the last restart of the log have two different salts; a single match may be the result of
    # damage.
    is_of_this_log = (beyond[:, 2:4] == salts).any(axis=1)
    return int(np.count_nonzero(is_of_this_log & (beyond[:, 1] != 0)))


def _num_valid(
    frames: NDArray[np.uint8], fields: NDArray[np.uint32], salts: NDArray[np.uint32], sums: _Pair, order: str
) -> int:
    """Return the number of frames that SQLite will accept; each checksum continues the previous one."""
    summed = np.concatenate([frames[:, :8], frames[:, 4 * _FRAME_HEADER_WORDS :]], axis=1).view(order).astype(np.uint32)
    # The checksum is linear modulo 2³², so each frame contributes a product with Fibonacci numbers.
    step, weights = _weights(summed.shape[1] // 2)
    shares = summed @ weights
    for index, (share, field) in enumerate(zip(shares, fields, strict=True)):
        sums = _advance(sums, step, (int(share[0]), int(share[1])))
        if sums != (int(field[4]), int(field[5])) or (field[2:4] != salts).any():
            return index
    return len(frames)


def _weights(num_pairs: int) -> tuple[list[_Pair], NDArray[np.uint32]]:
    """Return the effect of `num_pairs` rounds on the running sums, and the contribution of each word.

    One round over the words x, y is: s += x + t; t += y + s.
    """
    weights = np.empty((2 * num_pairs, 2), dtype=np.uint32)
    a, b, c, d = 1, 0, 0, 1  # the effect of the later rounds, as the matrix ((a, b), (c, d))
    for pair in reversed(range(num_pairs)):
        weights[2 * pair] = ((a + b) & _MASK, (c + d) & _MASK)
        weights[2 * pair + 1] = (b, d)
        a, b, c, d = (a + b) & _MASK, (a + 2 * b) & _MASK, (c + d) & _MASK, (c + 2 * d) & _MASK
    return [(a, b), (c, d)], weights


def _advance(sums: _Pair, step: list[_Pair], share: _Pair) -> _Pair:
    (a, b), (c, d) = step
    return (a * sums[0] + b * sums[1] + share[0]) & _MASK, (c * sums[0] + d * sums[1] + share[1]) & _MASK


def _add(sums: _Pair, words: NDArray[np.uint32]) -> _Pair:
    s, t = sums
    for x, y in zip(words[::2].tolist(), words[1::2].tolist(), strict=True):
        s = (s + x + t) & _MASK
        t = (t + y + s) & _MASK
    return s, t
