"""Parse the headers of Arrow IPC messages without reading their bodies.

pyarrow reports the number of rows of a record batch only after reading all of it. The headers are FlatBuffers: tables
that begin with an offset to a list of field offsets. This module reads the few fields that are needed and checks every
offset against the header's bounds; pyarrow decodes the bodies.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

SCHEMA, DICTIONARY, RECORD_BATCH = 1, 2, 3
CONTINUATION = b"\xff\xff\xff\xff"
PREFIX_BYTES = 8
"""The continuation marker and the length of the header."""
_I32, _U32, _U16, _I64 = (struct.Struct(f"<{code}") for code in "iIHq")


class Malformed(ValueError):
    """A header contains an offset or a length outside its bounds."""


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    kind: int
    body_bytes: int
    num_rows: int = 0
    null_counts: npt.NDArray[np.int64] | None = None
    """One entry per node: columns and their children, depth first."""
    buffers: npt.NDArray[np.int64] | None = None
    """(offset in the body, bytes), one row per buffer."""
    view_buffers: tuple[int, ...] = ()
    """The number of data buffers of each string view or binary view."""
    dictionary: int = 0
    is_delta: bool = False


def header_span(prefix: bytes) -> tuple[int, int]:
    """Return the offset of the header in the message, and its length; length 0 is the end of a stream.

    Before Arrow 0.15, messages had no continuation marker.
    """
    first, second = (4, 8) if prefix[:4] == CONTINUATION else (0, 4)
    if len(prefix) < second:
        raise Malformed("the file ends within a message")
    (length,) = _I32.unpack_from(prefix, first)
    if length < 0:
        raise Malformed(f"a header has {length} bytes")
    return second, length


def parse_message(header: bytes) -> Message:
    """Parse a message header. Raises Malformed."""
    message = _root(header)
    kind = message.u8(1)
    body_bytes = message.i64(3)
    if body_bytes < 0:
        raise Malformed(f"a body has {body_bytes} bytes")
    if kind == DICTIONARY:
        table = message.table(2)
        return Message(kind, body_bytes, dictionary=table.i64(0), is_delta=bool(table.u8(2)))
    if kind != RECORD_BATCH:
        return Message(kind, body_bytes)
    batch = message.table(2)
    num_rows = batch.i64(0)
    nodes = batch.vector(1, 2)
    buffers = batch.vector(2, 2)
    if num_rows < 0 or (buffers < 0).any() or (len(buffers) and int(buffers.sum(axis=1).max()) > body_bytes):
        raise Malformed(f"a batch has {num_rows} rows, or buffers outside its body")
    views = tuple(int(count) for count in batch.vector(4, 1)[:, 0])
    return Message(kind, body_bytes, num_rows, nodes[:, 1], buffers, views)


def parse_footer(footer: bytes) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Return (offset, bytes of prefix and header, bytes of body) of dictionaries and of batches. Raises Malformed."""
    table = _root(footer)
    found = []
    for index in (2, 3):
        blocks = table.vector(index, 3)
        if (blocks < 0).any():
            raise Malformed("a block lies outside the file")
        # The header's length has 32 bits; the rest is padding.
        found.append([(int(offset), int(header) & 0xFFFFFFFF, int(body)) for offset, header, body in blocks])
    return found[0], found[1]


def slots(schema: pa.Schema, views: tuple[int, ...] = ()) -> list[tuple[int, int, int, int]]:
    """Return for each column its first and end node, and its first and end buffer."""
    left = iter(views)
    found = []
    node = buffer = 0
    for kind in schema.types:
        num_nodes, num_buffers = _size(kind, left)
        found.append((node, node + num_nodes, buffer, buffer + num_buffers))
        node, buffer = node + num_nodes, buffer + num_buffers
    return found


def has_dictionaries(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return has_dictionaries(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return True
    return any(has_dictionaries(kind.field(index).type) for index in range(kind.num_fields))


def _size(kind: pa.DataType, views: Iterator[int]) -> tuple[int, int]:
    """Return the number of nodes and buffers of a column of this type."""
    if isinstance(kind, pa.BaseExtensionType):
        return _size(kind.storage_type, views)
    types = pa.types
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return 1, 2 + next(views, 0)
    children = [_size(kind.field(index).type, views) for index in range(kind.num_fields)]
    num_nodes = 1 + sum(nodes for nodes, _ in children)
    return num_nodes, _own_buffers(kind) + sum(buffers for _, buffers in children)


def _own_buffers(kind: pa.DataType) -> int:
    types = pa.types
    if types.is_null(kind) or types.is_run_end_encoded(kind):
        return 0
    if types.is_struct(kind) or types.is_fixed_size_list(kind):
        return 1
    if types.is_union(kind):
        return 2 if kind.mode == "dense" else 1
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return 3
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return 3
    return 2


class _Table:
    __slots__ = ("_data", "_fields", "_position")

    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self._position = position
        fields = position - _unpack(_I32, data, position)
        num_bytes = _unpack(_U16, data, fields)
        _unpack(_U16, data, fields + max(num_bytes, 4) - 2)
        self._fields = data[fields + 4 : fields + num_bytes]

    def _at(self, index: int) -> int:
        """Return the offset of a field; 0 if it is absent."""
        if 2 * index + 2 > len(self._fields):
            return 0
        (offset,) = _U16.unpack_from(self._fields, 2 * index)
        return self._position + offset if offset else 0

    def u8(self, index: int) -> int:
        at = self._at(index)
        if at >= len(self._data):
            raise Malformed("a field lies outside its header")
        return self._data[at] if at else 0

    def i64(self, index: int) -> int:
        at = self._at(index)
        return _unpack(_I64, self._data, at) if at else 0

    def table(self, index: int) -> _Table:
        at = self._at(index)
        if not at:
            raise Malformed("a header has no contents")
        return _Table(self._data, at + _unpack(_U32, self._data, at))

    def vector(self, index: int, width: int) -> npt.NDArray[np.int64]:
        """Return a list of structs of `width` 64-bit words each."""
        at = self._at(index)
        if not at:
            return np.empty((0, width), np.int64)
        first = at + _unpack(_U32, self._data, at)
        length = _unpack(_U32, self._data, first)
        if first + 4 + length * width * 8 > len(self._data):
            raise Malformed(f"a list of {length} items exceeds its header")
        return np.frombuffer(self._data, "<i8", length * width, first + 4).reshape(length, width)


def _root(data: bytes) -> _Table:
    return _Table(data, _unpack(_U32, data, 0))


def _unpack(kind: struct.Struct, data: bytes, at: int) -> int:
    if at < 0 or at + kind.size > len(data):
        raise Malformed("an offset points outside its header")
    value: int = kind.unpack_from(data, at)[0]
    return value
