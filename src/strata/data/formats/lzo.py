"""LZO1X, as far as footers of ORC files need it: blocks of at most a few hundred KiB are decompressed.

pyarrow decodes such blocks in its ORC reader and offers no function for them; python-lzo, which does, is a binding to a
library that few machines have. The format is described in the kernel's `Documentation/staging/lzo.rst`: instructions,
each of which copies some of what was written before, and then up to three bytes of its own.
"""

from __future__ import annotations

_END = 16384
"""The distance of the instruction that ends a block."""


class LzoDamaged(ValueError):
    """These bytes are no LZO, or become more than they may."""


def decompress(data: bytes | memoryview, limit: int) -> bytes:
    """
    Raises:
        LzoDamaged: Of these bytes nothing can be made, or more than `limit` bytes.
    """
    try:
        return _decompress(bytes(data), limit)
    except IndexError:
        raise LzoDamaged("the bytes end within an instruction") from None


def _decompress(data: bytes, limit: int) -> bytes:
    made = bytearray()
    at = 0
    num_literals = 0
    """Of the instruction before; 4 stands for a run of them."""
    if data[0] > 17:
        at, num_literals = _literals(data, 1, data[0] - 17, made), min(data[0] - 17, 4)
    while at < len(data):
        code = data[at]
        at += 1
        if code < 16 and num_literals == 0:
            size, at = (code, at) if code else _long(data, at, 15)
            at, num_literals = _literals(data, at, size + 3, made), 4
        else:
            if code < 16:
                size, distance = (2, 1) if num_literals < 4 else (3, 2049)
                distance, at = distance + (data[at] << 2) + (code >> 2), at + 1
                num_literals = code & 3
            elif code < 64:
                mask = 7 if code < 32 else 31
                size, at = (code & mask, at) if code & mask else _long(data, at, mask)
                size += 2
                pair = data[at] | data[at + 1] << 8
                at += 2
                distance = (pair >> 2) + (1 if code >= 32 else _END + ((code & 8) << 11))
                num_literals = pair & 3
                if code < 32 and distance == _END:
                    return bytes(made)
            else:
                size = (code >> 5) + 1
                distance, at = 1 + (data[at] << 3) + (code >> 2 & 7), at + 1
                num_literals = code & 3
            _repeat(made, distance, size)
            at = _literals(data, at, num_literals, made)
        if len(made) > limit:
            raise LzoDamaged(f"a block of more than {limit} bytes")
    return bytes(made)


def _long(data: bytes, at: int, size: int) -> tuple[int, int]:
    """A size that does not fit into its instruction, and where it ends."""
    while not data[at]:
        size += 255
        at += 1
    return size + data[at], at + 1


def _literals(data: bytes, at: int, number: int, made: bytearray) -> int:
    if at + number > len(data):
        raise LzoDamaged("the bytes end within literals")
    made += data[at : at + number]
    return at + number


def _repeat(made: bytearray, distance: int, size: int) -> None:
    """The last bytes once more; more than there are, if they repeat themselves."""
    if distance > len(made):
        raise LzoDamaged("a copy of what lies before the beginning")
    source = made[-distance:] if distance > size else made[-distance:] * (size // distance + 1)
    made += source[:size]
