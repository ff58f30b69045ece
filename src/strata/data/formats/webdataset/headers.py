"""Walk a tar from header to header: ustar, pax, GNU long names and base-256 sizes. Pure: bytes come from a function.

A tar is untrusted input. Every number is checked before it is used, and whatever would be a member without its own
bytes (a link, a sparse file, a device) is refused. `tarfile` ends silently at a damaged header; here it is an error,
because the rest of the shard would be lost without a trace.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    ReadAt = Callable[[int, int], bytes]
    """Returns the bytes at an offset, fewer at the end of the file. Offsets never decrease."""

BLOCK_BYTES: Final = 512
SAMPLE_BYTES: Final = 512
"""The beginning of a payload that is read with its header."""
MAX_EXTENSION_BYTES: Final = 1 << 20
"""The limit of a pax header and of a GNU long name."""
MAX_NAME_BYTES: Final = 32 << 10
MAX_REST_BYTES: Final = 64 << 10
"""Bytes after the end marker that are checked to be zeros."""
_ZEROS: Final = bytes(BLOCK_BYTES)
_ADLER: Final = 65521
_CHECKSUM: Final = slice(148, 156)
_REFUSED: Final = {
    ord("1"): "a hard link, which has no bytes of its own; write the shard again with tar --hard-dereference",
    ord("2"): "a symbolic link, which has no bytes of its own; write the shard again with tar --dereference",
    ord("3"): "a device; leave it out",
    ord("4"): "a device; leave it out",
    ord("6"): "a pipe; leave it out",
    ord("S"): "a sparse file, whose holes are not stored; write the shard again without --sparse",
    ord("M"): "the continuation of another volume; write the shard again without --multi-volume",
    ord("D"): "a directory listing of an incremental backup; write the shard again without --incremental",
}
_REGULAR: Final = frozenset(b"0\x007")
_EXTENDING: Final = frozenset(b"xXgLK")
_IGNORED: Final = frozenset(b"5V")
"""Directories, and the name of a volume."""


class TarDamage(ValueError):
    """A header that cannot be followed."""

    def __init__(self, offset: int, problem: str) -> None:
        super().__init__(f"byte {offset:,}: {problem}")
        self.offset = offset
        self.problem = problem


class Member(NamedTuple):
    """A regular file in a tar."""

    name: str
    start: int
    """The offset of its first header: that of an extended header, if it has one."""
    offset: int
    """The offset of its bytes."""
    num_bytes: int
    header: bytes
    """The block that precedes its bytes."""


def walk(read_at: ReadAt, first: int, end: int, *, has_marker: bool) -> Iterator[Member]:
    """Yield the regular files between two offsets, in order. Directories are left out.

    `has_marker`: Whether the end marker of the tar must come before `end`. Otherwise members must fill the range, as
    they do in a row group.

    Raises:
        TarDamage: The bytes are not a tar, or have a member that is refused.
    """
    position, extended = first, _Extended()
    while position < end or has_marker:
        block = read_at(position, BLOCK_BYTES)
        if len(block) < BLOCK_BYTES:
            raise TarDamage(position, "the end marker is missing: the file was truncated, or its writer did not finish")
        if block == _ZEROS:
            if extended.start is not None or not has_marker:
                raise TarDamage(position, "zeros where the header of a member should be")
            _check_rest(read_at, position + BLOCK_BYTES)
            return
        payload = _payload(block, position)
        kind = block[156]
        if kind in _REGULAR:
            num_bytes = _size(block, position) if extended.num_bytes is None else extended.num_bytes
            _check_end(position, payload, num_bytes, end)
            name = extended.name or _name(block, position)
            start = position if extended.start is None else extended.start
            position = _padded(payload + num_bytes)
            if extended.start is not None:
                extended = _Extended()
            if not name.endswith("/"):  # before POSIX, a directory was a file whose name ends with a slash
                yield Member(name, start, payload, num_bytes, block)
        elif kind in _EXTENDING:
            position = extended.read(read_at, position, block, end)
        elif kind in _IGNORED:
            position, extended = payload, _Extended()
        else:
            name = extended.name or _name(block, position)
            problem = _REFUSED.get(kind, f"of the unknown type {chr(kind)!r}; write the shard again")
            raise TarDamage(position, f"member {_shown(name)!r} is {problem}")
    if position != end or extended.start is not None:
        raise TarDamage(min(position, end), f"the last member ends at byte {position:,} instead of {end:,}")


def is_tar(block: bytes) -> bool:
    """Return whether a block could be the header of a member, perhaps a damaged one."""
    return len(block) == BLOCK_BYTES and (block[257:262] == b"ustar" or _declared(block) is not None)


class _Extended:
    """What extended headers declare about the next member."""

    __slots__ = ("name", "num_bytes", "start")

    def __init__(self) -> None:
        self.start: int | None = None
        """The offset of the first extended header."""
        self.name = ""
        self.num_bytes: int | None = None

    def read(self, read_at: ReadAt, position: int, block: bytes, end: int) -> int:
        """Read the payload of an extended header and return the offset of the next header."""
        payload, num_bytes = position + BLOCK_BYTES, _size(block, position)
        if num_bytes > MAX_EXTENSION_BYTES:
            raise TarDamage(
                position, f"an extended header of {num_bytes:,} bytes; the limit is {MAX_EXTENSION_BYTES:,}"
            )
        _check_end(position, payload, num_bytes, end)
        data = read_at(payload, num_bytes)
        if len(data) < num_bytes:
            raise TarDamage(position, "an extended header that is cut off: the file was truncated")
        kind = block[156]
        if kind == ord("L"):
            self.name = _text(data.partition(b"\0")[0], position)
        elif kind != ord("K"):  # the target of a link, which is refused anyway
            self._add(data, position, is_global=kind == ord("g"))
        if kind != ord("g") and self.start is None:
            self.start = position
        return _padded(payload + num_bytes)

    def _add(self, data: bytes, position: int, *, is_global: bool) -> None:
        for key, value in _records(data, position):
            if key.startswith(b"GNU.sparse"):
                raise TarDamage(position, f"the next member is {_REFUSED[ord('S')]}")
            if key not in (b"path", b"size"):
                continue
            if is_global:
                raise TarDamage(position, f"a global header that sets the {key.decode()} of all members")
            if key == b"path":
                self.name = _text(value, position)
            elif not value.isdigit() or len(value) > 20:
                raise TarDamage(position, f"an extended header with the size {value[:20]!r}")
            else:
                self.num_bytes = int(value)


def _records(data: bytes, position: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a pax header: lines `LENGTH KEY=VALUE`."""
    first = 0
    while first < len(data) and data[first]:
        digits, space, _ = data[first : first + 20].partition(b" ")
        if not space or not digits.isdigit():
            raise TarDamage(position, "an extended header that is not a list of records")
        last = first + int(digits)
        key, equals, value = data[first + len(digits) + 1 : last - 1].partition(b"=")
        if not equals or last > len(data) or data[last - 1] != ord("\n"):
            raise TarDamage(position, "an extended header with a record that is cut off")
        yield key, value
        first = last


def _payload(block: bytes, position: int) -> int:
    """Return the offset after a header, whose checksum is verified."""
    # The low half of Adler-32 is a sum of bytes, computed natively.
    found = (zlib.adler32(block) - 1) & 0xFFFF
    wanted = _declared(block)
    if wanted is None:
        raise TarDamage(position, "this is not the header of a member")
    # The checksum is computed with spaces in its own field.
    if (wanted - 8 * 0x20 + sum(block[_CHECKSUM])) % _ADLER != found % _ADLER and _signed(block) != wanted:
        raise TarDamage(position, "a header with a wrong checksum")
    return position + BLOCK_BYTES


def _declared(block: bytes) -> int | None:
    """Return the checksum that a header declares."""
    try:
        return int(block[_CHECKSUM].partition(b"\0")[0], 8)
    except ValueError:
        return None


def _signed(block: bytes) -> int:
    """Return the checksum of old writers, which took bytes as signed."""
    data = block[:148] + b" " * 8 + block[156:]
    return sum(byte - 256 if byte > 127 else byte for byte in data)


def _size(block: bytes, position: int) -> int:
    field = block[124:136]
    if field[0] & 0x80:
        if field[0] != 0x80:
            raise TarDamage(position, "a member with a negative size")
        return int.from_bytes(field[1:], "big")
    text = field.partition(b"\0")[0]
    try:
        num_bytes = int(text, 8)
    except ValueError:
        if text.strip():
            raise TarDamage(position, f"a member whose size is not a number: {text!r}") from None
        return 0
    if num_bytes < 0:
        raise TarDamage(position, f"a member with the negative size {num_bytes:,}")
    return num_bytes


def _name(block: bytes, position: int) -> str:
    name = block[:100].partition(b"\0")[0]
    if block[345] and block[257:263] == b"ustar\0":
        name = block[345:500].partition(b"\0")[0] + b"/" + name
    return _text(name, position)


def _text(name: bytes, position: int) -> str:
    if len(name) > MAX_NAME_BYTES:
        raise TarDamage(position, f"a name of {len(name):,} bytes; the limit is {MAX_NAME_BYTES:,}")
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise TarDamage(
            position, f"the name {name[:80]!r} is not UTF-8; write the shard again with --format=pax"
        ) from error


def _shown(name: str) -> str:
    return name if len(name) <= 80 else f"{name[:80]}…"


def _check_end(position: int, payload: int, num_bytes: int, end: int) -> None:
    if payload + num_bytes > end:
        raise TarDamage(
            position,
            f"a member of {num_bytes:,} bytes would end at byte {payload + num_bytes:,}, but only {end:,} are there: "
            "the file was truncated, or its header is damaged",
        )


def _check_rest(read_at: ReadAt, position: int) -> None:
    rest = read_at(position, MAX_REST_BYTES)
    if rest.strip(b"\0"):
        raise TarDamage(position, "bytes after the end marker; write joined tars as separate files")


def _padded(offset: int) -> int:
    return -(-offset // BLOCK_BYTES) * BLOCK_BYTES
