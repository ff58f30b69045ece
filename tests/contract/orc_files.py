"""Create LZO-compressed ORC files, which pyarrow reads but does not write, from uncompressed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

LZO = 3
_BLOCK_BYTES = 64 << 10

Message = list[tuple[int, int | bytes]]
"""A protocol buffer: fields by number."""


def recompress(path: Path, compressed: Callable[[bytes], bytes]) -> None:
    """Rewrite a file of one stripe as an LZO file. `compressed` returns a block with its header of three bytes."""
    data = path.read_bytes()
    postscript = _parsed(data[-1 - data[-1] : -1])
    end = len(data) - 1 - data[-1]
    footer_bytes, metadata_bytes = _number(postscript, 1), _number(postscript, 5)
    footer = _parsed(data[end - footer_bytes : end])
    metadata = data[end - footer_bytes - metadata_bytes : end - footer_bytes]
    stripe = _parsed(_bytes(footer, 3))
    offset, index_bytes, data_bytes, stripe_footer_bytes = (_number(stripe, number) for number in (1, 2, 3, 4))
    place = offset + index_bytes + data_bytes
    streams = _parsed(data[place : place + stripe_footer_bytes])
    made, contents, at = [], b"", offset
    for number, value in streams:
        if number != 1:
            made.append((number, value))
            continue
        assert isinstance(value, bytes)
        stream = _parsed(value)
        size = _number(stream, 3)
        if _number(stream, 1) not in (6, 7, 8):  # omit row indexes and Bloom filters
            own = _blocks(data[at : at + size], compressed)
            made.append((1, _written(_set(stream, 3, len(own)))))
            contents += own
        at += size
    stripe_footer = _blocks(_written(made), compressed)
    for number, value in ((1, 3), (2, 0), (3, len(contents)), (4, len(stripe_footer))):
        stripe = _set(stripe, number, value)
    new_footer = _blocks(_written(_set(_set(footer, 3, _written(stripe)), 8, 0)), compressed)
    new_metadata = _blocks(metadata, compressed)
    for number, value in ((1, len(new_footer)), (2, LZO), (3, _BLOCK_BYTES), (5, len(new_metadata))):
        postscript = _set(postscript, number, value)
    end_bytes = _written(sorted(postscript, key=lambda field: field[0]))
    path.write_bytes(
        b"ORC" + contents + stripe_footer + new_metadata + new_footer + end_bytes + bytes([len(end_bytes)])
    )


def stored(block: bytes) -> bytes:
    """Store a block uncompressed."""
    return (len(block) << 1 | 1).to_bytes(3, "little") + block


def lzo(block: bytes) -> bytes:
    """Compress a block with matches at short distances only."""
    made, literals = bytearray(), bytearray()
    at, flags = 0, 0
    """`flags` is the position where the last copy stores the number of literals after it."""
    while at < len(block):
        size, distance = _match(block, at)
        if size < 5:
            literals.append(block[at])
            at += 1
            continue
        _write_literals(made, literals, flags)
        made += _copy(size, distance)
        flags, at = len(made) - 2, at + size
    _write_literals(made, literals, flags)
    made += b"\x11\x00\x00"
    return (len(made) << 1).to_bytes(3, "little") + bytes(made)


def _write_literals(made: bytearray, literals: bytearray, flags: int) -> None:
    if literals and not made and len(literals) <= 238:
        made.append(17 + len(literals))
    elif 0 < len(literals) < 4:
        made[flags] |= len(literals)
    elif literals:
        size = len(literals) - 3
        made += bytes([size]) if size <= 15 else b"\x00" + _long(size - 15)
    made += literals
    literals.clear()


def _match(block: bytes, at: int) -> tuple[int, int]:
    best = (0, 0)
    for distance in range(1, min(at, 200) + 1):
        size = 0
        while at + size < len(block) and block[at + size - distance] == block[at + size] and size < 400:
            size += 1
        best = max(best, (size, distance), key=lambda each: each[0])
    return best


def _copy(size: int, distance: int) -> bytes:
    if size <= 8:
        return bytes([(size - 1) << 5 | ((distance - 1) & 7) << 2, (distance - 1) >> 3])
    head = bytes([32 | (size - 2)]) if size - 2 <= 31 else b"\x20" + _long(size - 2 - 31)
    return head + ((distance - 1) << 2).to_bytes(2, "little")


def _long(size: int) -> bytes:
    zeros, left = divmod(size - 1, 255)
    return bytes(zeros) + bytes([left + 1])


def _blocks(data: bytes, compressed: Callable[[bytes], bytes]) -> bytes:
    return b"".join(compressed(data[at : at + _BLOCK_BYTES]) for at in range(0, len(data), _BLOCK_BYTES))


def _parsed(data: bytes) -> Message:
    return list(_fields(data))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0

    def varint() -> int:
        nonlocal at
        found = shift = 0
        while True:
            byte = data[at]
            at += 1
            found |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return found

    while at < len(data):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
        else:
            assert tag & 7 == 2, "a field is neither a number nor bytes"
            size = varint()
            at += size
            yield tag >> 3, data[at - size : at]


def _written(message: Message) -> bytes:
    made = bytearray()
    for number, value in message:
        if isinstance(value, int):
            made += _varint(number << 3) + _varint(value)
        else:
            made += _varint(number << 3 | 2) + _varint(len(value)) + value
    return bytes(made)


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*made, number])


def _set(message: Message, number: int, value: int | bytes) -> Message:
    if all(each != number for each, _ in message):
        return [*message, (number, value)]
    return [(each, value if each == number else old) for each, old in message]


def _number(message: Message, number: int) -> int:
    return next((value for each, value in message if each == number and isinstance(value, int)), 0)


def _bytes(message: Message, number: int) -> bytes:
    return next(value for each, value in message if each == number and isinstance(value, bytes))
