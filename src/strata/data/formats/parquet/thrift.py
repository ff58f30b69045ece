"""Read and write Thrift's compact protocol, as far as Parquet footers and page indexes need it.

A struct is a sequence of fields that ends with a zero byte; a field is its number (as a difference), its type and its
value. Callers name the fields they need, and the scanner skips the others.

The input is untrusted: each step consumes at least one byte, nesting is limited, and invalid bytes raise
`ThriftDamaged`.

Written by hand because pyarrow exposes neither page indexes nor the position of a field in a footer, and the Thrift
libraries build objects of whole messages with generated classes and leave limits to the caller. Scanning a footer of
40 columns takes 0.4 ms of CPU time, once per schema; finding the row groups in the footer of the next file takes 3 µs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

TRUE: Final = 1
FALSE: Final = 2
BYTE: Final = 3
I16: Final = 4
I32: Final = 5
I64: Final = 6
DOUBLE: Final = 7
BINARY: Final = 8
LIST: Final = 9
SET: Final = 10
MAP: Final = 11
STRUCT: Final = 12
UUID: Final = 13

MAX_DEPTH: Final = 32
"""The deepest nesting of structs; Parquet has seven levels."""
_MAX_SHIFT: Final = 63
_WIDTHS: Final = {BYTE: 1, DOUBLE: 8, UUID: 16}
_INTEGERS: Final = frozenset({I16, I32, I64})
_MAX_FIELD: Final = 1 << 15


class ThriftDamaged(ValueError):
    """The bytes contradict the protocol, or the expected types."""


class Scanner:
    """Reads values from `data` and advances."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes | memoryview, at: int = 0) -> None:
        self.data = data
        self.at = at

    def byte(self) -> int:
        if self.at >= len(self.data):
            raise ThriftDamaged("the bytes end within a value")
        self.at += 1
        return self.data[self.at - 1]

    def varint(self) -> int:
        found = shift = 0
        while True:
            byte = self.byte()
            found |= (byte & 0x7F) << shift
            if byte < 0x80:
                return found
            shift += 7
            if shift > _MAX_SHIFT:
                raise ThriftDamaged("a number has more than ten bytes")

    def integer(self) -> int:
        found = self.varint()
        return (found >> 1) ^ -(found & 1)

    def binary(self) -> bytes:
        size = self.varint()
        start = self.at
        self._move(size)
        return bytes(self.data[start : start + size])

    def items(self, *kinds: int) -> int:
        """Read the header of a list with items of one of these types, and return their number."""
        kind, count = self.list_head()
        if count and kind not in kinds:
            raise ThriftDamaged(f"a list has items of the unexpected type {kind}")
        return count

    def integers(self) -> list[int]:
        return [self.integer() for _ in range(self.items(I16, I32, I64))]

    def binaries(self) -> list[bytes]:
        return [self.binary() for _ in range(self.items(BINARY))]

    def booleans(self) -> list[bool]:
        return [self.byte() == TRUE for _ in range(self.items(TRUE, FALSE))]

    def struct(self, known: Mapping[int, tuple[int, Callable[[], Any]]]) -> dict[int, Any]:
        """Read the known fields of a struct and skip the others.

        `known` maps field numbers to the expected type and the function that reads the value.

        Raises:
            ThriftDamaged: The struct cannot be read, or a field has another type.
        """
        found: dict[int, Any] = {}
        number = 0
        while True:
            head = self.byte()
            if not head:
                return found
            kind, number = self._field(head, number)
            expected = known.get(number)
            if expected is None:
                if kind not in (TRUE, FALSE):
                    self.skip(kind)
            elif kind != expected[0]:
                raise ThriftDamaged(f"field {number} has the type {kind}, not {expected[0]}")
            else:
                found[number] = expected[1]()

    def raw(self) -> bytes:
        """Return the bytes of a struct."""
        start = self.at
        self.skip(STRUCT)
        return bytes(self.data[start : self.at])

    def raws(self) -> list[bytes]:
        """Return the bytes of each struct in a list."""
        return [self.raw() for _ in range(self.items(STRUCT))]

    def _field(self, head: int, before: int) -> tuple[int, int]:
        number = before + (head >> 4) if head >> 4 else self.integer()
        if not 0 < number < _MAX_FIELD:
            raise ThriftDamaged(f"a field has the number {number}")
        return head & 0x0F, number

    def list_head(self) -> tuple[int, int]:
        head = self.byte()
        count = head >> 4
        if count == 0x0F:
            count = self.varint()
        if count > len(self.data) - self.at:  # an item has at least one byte
            raise ThriftDamaged(f"a list of {count} items is longer than the data")
        return head & 0x0F, count

    def _move(self, num_bytes: int) -> None:
        if num_bytes > len(self.data) - self.at:
            raise ThriftDamaged(f"a value of {num_bytes} bytes is longer than the data")
        self.at += num_bytes

    def skip(self, kind: int) -> None:
        try:
            self.at = _after(self.data, self.at, kind, MAX_DEPTH)
        except IndexError:
            raise ThriftDamaged("the bytes end within a value") from None
        if self.at > len(self.data):
            raise ThriftDamaged("the bytes end within a value")


def _after(data: bytes | memoryview, at: int, kind: int, depth: int) -> int:  # noqa: C901
    """Return the position after a value. Scanning a footer spends most of its time here, so calls are inlined.

    Raises:
        IndexError, ThriftDamaged: The value does not end.
    """
    if kind in _INTEGERS:
        while data[at] > 0x7F:
            at += 1
        return at + 1
    if kind == BINARY:
        size, at = _size(data, at)
        return at + size
    if kind in _WIDTHS:
        return at + _WIDTHS[kind]
    if not depth:
        raise ThriftDamaged(f"values are nested more than {MAX_DEPTH} levels deep")
    if kind == STRUCT:
        while head := data[at]:
            at += 1
            if head < 0x10:  # the field number follows in full
                while data[at] > 0x7F:
                    at += 1
                at += 1
            inner = head & 0x0F
            if inner in _INTEGERS:
                while data[at] > 0x7F:
                    at += 1
                at += 1
            elif inner == BINARY:
                size, at = _size(data, at)
                at += size
            elif inner > FALSE or not inner:  # the type of a boolean is its value
                at = _after(data, at, inner, depth - 1)
        return at + 1
    if kind in (LIST, SET):
        head = data[at]
        at += 1
        count = head >> 4
        if count == 0x0F:
            count, at = _size(data, at)
        return _after_items(data, at, (head & 0x0F,), count, depth - 1)
    if kind == MAP:
        count, at = _size(data, at)
        return _after_items(data, at + 1, (data[at] >> 4, data[at] & 0x0F), count, depth - 1) if count else at
    raise ThriftDamaged(f"type {kind} does not exist")


def _after_items(data: bytes | memoryview, at: int, kinds: tuple[int, ...], count: int, depth: int) -> int:
    if count > len(data) - at:  # an item has at least one byte
        raise ThriftDamaged(f"a list of {count} items is longer than the data")
    for _ in range(count):
        for kind in kinds:
            at = at + 1 if kind in (TRUE, FALSE) else _after(data, at, kind, depth)
    return at


def _size(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return a length, and the position after it."""
    size = data[at]
    at += 1
    if size < 0x80:
        return size, at
    size &= 0x7F
    shift = 7
    while True:
        byte = data[at]
        at += 1
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            return size, at
        shift += 7
        if shift > _MAX_SHIFT:
            raise ThriftDamaged("a number has more than ten bytes")


# --- writing ---

Field = tuple[int, int, bytes]
"""Number, type, and value as bytes."""


def varint(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)


def integer(number: int) -> bytes:
    """Encode an integer of 16 to 64 bits; all have the same encoding."""
    return varint(number << 1 if number >= 0 else (-number << 1) - 1)


def binary(data: bytes) -> bytes:
    return varint(len(data)) + data


def listed(kind: int, items: Sequence[bytes]) -> bytes:
    head = bytes([len(items) << 4 | kind]) if len(items) < 0x0F else bytes([0xF0 | kind]) + varint(len(items))
    return head + b"".join(items)


def struct(fields: Iterable[Field]) -> bytes:
    """Encode a struct from fields in ascending order."""
    made = []
    before = 0
    for number, kind, value in fields:
        assert number > before
        distance = number - before
        made.append(bytes([distance << 4 | kind]) if distance < 0x10 else bytes([kind]) + integer(number))
        made.append(value)
        before = number
    return b"".join(made) + b"\0"
