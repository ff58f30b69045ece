"""The Arrow IPC format, files (also Feather) and streams: a row group is a record batch.

A file is a stream between a magic number and a footer that lists the offsets of its messages; a stream without footer
is walked from header to header. Reading is then the same for both: the schema, the dictionaries and the batch are
copied from the file into one buffer, which is decoded as a stream. Only the buffers of requested columns are read; the
space of the others stays uninitialized. Files are not memory-mapped, because truncating a mapped file kills the
process.

The version covers the size, the schema, the footer, and for every message the header (rows, nulls, buffer sizes) and
the first `SAMPLE_BYTES` of its body. Two files that differ only after those bytes, with equal buffer sizes, have the
same version: reading all data would cost as much as an epoch.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
import xxhash

from strata.data.filter.expression import Presence
from strata.data.formats.arrow_messages import (
    CONTINUATION,
    DICTIONARY,
    PREFIX_BYTES,
    RECORD_BATCH,
    SCHEMA,
    Malformed,
    Message,
    has_dictionaries,
    header_span,
    parse_footer,
    parse_message,
    slots,
)
from strata.data.formats.base import FileFacts, Unit
from strata.data.formats.damage import CURE, NUM_HEAD_BYTES, undecodable, wrong_format
from strata.data.source.ranges import Range, coalesce
from strata.data.source.source import translate_errors
from strata.errors import DataFileChanged, DataFileInvalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from strata.data.filter.expression import Node
    from strata.data.formats.base import UnitRanges
    from strata.data.source.source import DataFile, Source

SAMPLE_BYTES = 4 << 10
GUESS_BYTES = 4 << 10
"""The first read of a header; most headers are shorter."""
TAIL_BYTES = 16 << 10
"""The first read for the footer."""
MAX_HEADER_BYTES = 256 << 20
"""The limit for a message header and for the footer."""
NUM_REMOTE_READS = 16
"""Concurrent reads of the headers of a remote file."""
LOCAL_GAP_BYTES = 8 << 10
REMOTE_GAP_BYTES = 256 << 10
"""The largest unneeded gap that is read to save a second request."""
WHOLE_BYTES = 1 << 20
"""A remote message up to this size is read whole: reading its header first would be another request."""
ALIGNMENT = 64
_MARK = b"ARROW1"
_FIRST_MESSAGE = 8
"""The offset of the first message of a file: after the magic number and its padding."""


class ArrowFormat:
    name: ClassVar[str] = "arrow"
    unit_name: ClassVar[str] = "record batch"
    is_typed: ClassVar[bool] = True

    def inspect(
        self,
        source: Source,
        file: DataFile,
        *,
        columns: Sequence[str] | None,
        unit_bytes: int,  # noqa: ARG002
        with_nulls: bool = True,  # noqa: ARG002  they are free here
    ) -> FileFacts:
        with source.open(file) as opened:
            handle = _Handle(source, file, opened)
            outline = _read_outline(handle)
            return self._measure(handle, outline, columns)

    def _measure(self, handle: _Handle, outline: _FileOutline, columns: Sequence[str] | None) -> FileFacts:
        schema = outline.schema
        wanted = set(range(len(schema)) if columns is None else map(schema.get_field_index, columns)) - {-1}
        units: list[Unit] = []
        null_counts = dict.fromkeys(sorted(wanted), 0)
        first_row = 0
        digest = xxhash.xxh3_64()
        for located in _read_messages(handle, outline, digest):
            message = located.message
            if message.kind != RECORD_BATCH or not message.num_rows:
                continue
            needed = outline.needed(message, wanted)
            num_bytes = located.header_bytes + sum(each.num_bytes for each in needed)
            units.append(Unit(len(units), message.num_rows, first_row, located.offset, num_bytes))
            first_row += message.num_rows
            _add_nulls(null_counts, outline, message)
        names = schema.names
        found = {names[column]: count for column, count in null_counts.items()}
        return FileFacts(schema.remove_metadata(), tuple(units), f"{outline.version}-{digest.hexdigest()}", found)

    def presence(
        self,
        source: Source,  # noqa: ARG002
        file: DataFile,  # noqa: ARG002
        facts: FileFacts,
        condition: Node,  # noqa: ARG002
        schema: pa.Schema,  # noqa: ARG002
    ) -> list[Presence]:
        """Return SOME for every row group: the format has no statistics."""
        return [Presence.SOME] * len(facts.units)

    def open(self, source: Source, file: DataFile, schema: pa.Schema, version: str) -> ArrowReader:  # noqa: ARG002
        return ArrowReader(source, file, version)

    def ranges(self, source: Source, file: DataFile, columns: Sequence[str], version: str) -> UnitRanges:
        """Return the ranges. The header of a message that is wanted nearly whole is not read: its size is known."""
        with source.open(file) as opened:
            outline = _read_planned_outline(_Handle(source, file, opened), version)
        wanted = {outline.schema.get_field_index(name) for name in columns} - {-1}
        has_all = len(wanted) == len(outline.schema)
        sizes = {offset: header + body for offset, header, body in outline.blocks[1]} if outline.blocks else {}

        def ranges_of(unit: Unit) -> Sequence[Range]:
            if not wanted:
                return []
            first = Range(unit.offset, min(GUESS_BYTES, file.size_bytes - unit.offset))  # a reader's first read
            num_bytes = sizes.get(unit.offset, unit.num_bytes if has_all else file.size_bytes)
            if has_all or num_bytes <= WHOLE_BYTES:
                return [first, Range(unit.offset, num_bytes)]
            with source.open(file) as opened:
                located = _Handle(source, file, opened).message_at(unit.offset, _describe(unit), unit)
            needed = outline.needed(located.message, wanted)
            header = Range(unit.offset, located.header_bytes)
            return [first, header, *(each.moved(located.body_offset) for each in needed)]

        return ranges_of


class ArrowReader:
    """Opening checks all headers of a local file against the version, and the footer and schema of a remote one."""

    def __init__(self, source: Source, file: DataFile, version: str) -> None:
        self._file = file
        self._gap_bytes = REMOTE_GAP_BYTES if source.has_round_trips else LOCAL_GAP_BYTES
        self._opened = source.open(file)
        try:
            self._handle = _Handle(source, file, self._opened)
            self._dictionaries = self._verify(version)
        except BaseException:
            self._opened.close()
            raise
        self._prefix: dict[tuple[int, ...], bytes] = {}
        """The schema and the dictionaries that precede a batch; one set of them is cached."""

    @property
    def bytes_read(self) -> int:
        return self._handle.bytes_read

    def read(self, unit: Unit, columns: Sequence[str]) -> pa.Table:
        if not columns:
            return pa.table({"": pa.nulls(unit.num_rows)}).select([])
        what = _describe(unit)
        located = self._handle.message_at(unit.offset, what, unit)
        num_rows = located.message.num_rows
        if located.message.kind != RECORD_BATCH or num_rows != unit.num_rows:
            raise DataFileInvalid(
                f"{self._file.name}: {what} should have {unit.num_rows} rows, but has {num_rows}; {CURE}",
                path=self._file.path,
                row_group=unit.index,
            )
        wanted = sorted({self._outline.schema.get_field_index(name) for name in columns})
        stream = self._load(located, set(wanted))
        options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
        try:
            with pa.ipc.open_stream(stream, options=options) as batches:
                table = pa.Table.from_batches([batches.read_next_batch()])
            # Later code follows offsets and dictionary codes unchecked; those of a damaged file point anywhere.
            table.validate(full=True)
        except pa.ArrowMemoryError:
            raise
        except (OSError, pa.ArrowException, StopIteration) as error:
            raise undecodable(f"{self._file.name}: {what}", error, file=self._file, unit=unit) from error
        return table.select(list(columns)).replace_schema_metadata(None)

    def close(self) -> None:
        self._opened.close()

    def _verify(self, version: str) -> list[_LocatedMessage]:
        """Check that this is the planned file, and return its dictionaries."""
        handle = self._handle
        self._outline = _read_planned_outline(handle, version)
        try:
            if handle.is_local or (self._outline.blocks is None and self._outline.has_dictionaries):
                digest = xxhash.xxh3_64()
                messages = _read_messages(handle, self._outline, digest)
                dictionaries = [each for each in messages if each.message.kind == DICTIONARY]
                if f"{self._outline.version}-{digest.hexdigest()}" != version:
                    raise _changed(handle)
                return dictionaries
        except DataFileInvalid as error:
            raise _changed(handle) from error
        return [handle.message_at(offset, "a dictionary") for offset, _, _ in (self._outline.blocks or ([],))[0]]

    def _load(self, located: _LocatedMessage, wanted: set[int]) -> pa.BufferReader:
        """Return a stream in memory with only this batch, and in its body only the buffers of these columns."""
        prefix = self._stream_prefix(located.offset)
        first_body = len(prefix) + located.header_bytes
        padding = -first_body % ALIGNMENT
        memory = pa.allocate_buffer(padding + first_body + located.message.body_bytes)
        view = memoryview(memory).cast("B")
        view[padding : padding + len(prefix)] = prefix
        view[padding + len(prefix) : padding + first_body] = located.header
        body = view[padding + first_body :]
        for each in coalesce(self._outline.needed(located.message, wanted), gap_bytes=self._gap_bytes):
            self._handle.read_into(body[each.offset : each.end], located.body_offset + each.offset)
        return pa.BufferReader(memory.slice(padding))

    def _stream_prefix(self, offset: int) -> bytes:
        """Return the schema and dictionaries for a batch: all of a file; in a stream, those in effect before it."""
        valid: dict[int, list[_LocatedMessage]] = {}
        for each in self._dictionaries:
            if self._outline.blocks is None and each.offset > offset:
                break
            if each.message.is_delta:
                valid.setdefault(each.message.dictionary, []).append(each)
            else:
                valid[each.message.dictionary] = [each]
        # Full dictionaries come before deltas, because a stream begins with one of each.
        ordered = sorted((each for found in valid.values() for each in found), key=lambda each: each.message.is_delta)
        key = tuple(each.offset for each in ordered)
        if key not in self._prefix:
            messages = [self._outline.schema_message]
            for each in ordered:
                messages += [each.header, self._handle.read(each.body_offset, each.message.body_bytes)]
            self._prefix = {key: b"".join(messages)}
        return self._prefix[key]


@dataclass(frozen=True, slots=True, eq=False)
class _LocatedMessage:
    """A message and its offset in the file."""

    offset: int
    header: bytes
    """The header with its prefix and its padding."""
    message: Message
    sample: bytes
    """The beginning of its body."""

    @property
    def header_bytes(self) -> int:
        return len(self.header)

    @property
    def body_offset(self) -> int:
        return self.offset + len(self.header)

    @property
    def end(self) -> int:
        return self.body_offset + self.message.body_bytes


class _Handle:
    """Reads from one file and counts the bytes."""

    def __init__(self, source: Source, file: DataFile, opened: pa.NativeFile) -> None:
        self.file = file
        self.is_local = source.is_local
        self.bytes_read = 0
        self._opened = opened
        self._counter = source.counter
        self._guess_bytes = GUESS_BYTES
        with translate_errors(file.name):
            self.size: int = opened.size()

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return these bytes, or fewer at the end of the file."""
        with translate_errors(self.file.name):
            data: bytes = self._opened.read_at(min(num_bytes, max(0, self.size - offset)), offset)
        self._count(len(data))
        return data

    def read_into(self, memory: memoryview, offset: int) -> None:
        if not len(memory):
            return
        with translate_errors(self.file.name):
            self._opened.seek(offset)
            num_read = self._opened.readinto(memory)
        self._count(num_read)
        if num_read != len(memory):
            found = f"{num_read} of {len(memory)} bytes at {offset}"
            raise DataFileChanged(
                f"{self.file.name} was truncated while it was read: {found}; {CURE}", path=self.file.path
            )

    def _count(self, num_bytes: int) -> None:
        self.bytes_read += num_bytes
        self._counter.add(num_bytes)

    def message_at(
        self, offset: int, what: str, unit: Unit | None = None, *, known: bytes | None = None
    ) -> _LocatedMessage:
        """Return the message at an offset; `known` are its first bytes, if they were read before."""
        located = self.message_or_end(offset, what, unit, known=known)
        if located is None:
            raise self._invalid(f"{what} is missing; {CURE}", unit)
        return located

    def message_or_end(
        self, offset: int, what: str, unit: Unit | None = None, *, sample_bytes: int = 0, known: bytes | None = None
    ) -> _LocatedMessage | None:
        """Return the message at an offset; None at the end of a stream."""
        data = self.read(offset, self._guess_bytes + sample_bytes) if known is None else known
        try:
            return self._parse(offset, data, sample_bytes)
        except Malformed as error:
            raise self._invalid(f"{what} is damaged or truncated ({error}); {CURE}", unit) from error

    def _invalid(self, problem: str, unit: Unit | None) -> DataFileInvalid:
        index = unit.index if unit is not None else None
        return DataFileInvalid(f"{self.file.name}: {problem}", path=self.file.path, row_group=index)

    def _parse(self, offset: int, data: bytes, sample_bytes: int) -> _LocatedMessage | None:
        """Parse a message; `data` are the bytes from `offset` on that are known, and the rest is read."""
        first, length = header_span(data[:PREFIX_BYTES])
        if not length:
            return None
        header_bytes = first + length
        if length > MAX_HEADER_BYTES or offset + header_bytes > self.size:
            raise Malformed(f"its header has {length} bytes, the file {self.size}")
        data = self._extend(offset, data, header_bytes)
        message = parse_message(data[first:header_bytes])
        end = offset + header_bytes + message.body_bytes
        if end > self.size:
            raise Malformed(f"it ends at byte {end}, the file at {self.size}")
        if message.kind == RECORD_BATCH:
            self._guess_bytes = header_bytes  # the batches of a file have similar headers
        sample_end = header_bytes + min(sample_bytes, message.body_bytes)
        data = self._extend(offset, data, sample_end)
        return _LocatedMessage(offset, data[:header_bytes], message, data[header_bytes:sample_end])

    def _extend(self, offset: int, data: bytes, num_bytes: int) -> bytes:
        missing = num_bytes - len(data)
        return data + self.read(offset + len(data), missing) if missing > 0 else data


@dataclass(frozen=True, slots=True, eq=False)
class _FileOutline:
    """The schema of a file, and its footer if it has one."""

    schema: pa.Schema
    schema_message: bytes
    first_message: int
    """The offset of the first message after the schema."""
    blocks: tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]] | None
    """The dictionaries and batches in the footer; None for a stream."""
    version: str

    @property
    def has_dictionaries(self) -> bool:
        return any(has_dictionaries(kind) for kind in self.schema.types)

    def slots(self, message: Message) -> list[tuple[int, int, int, int]] | None:
        """Return the slots of each column; None if the batch does not match its schema (unions of old writers)."""
        assert message.null_counts is not None
        assert message.buffers is not None
        found = slots(self.schema, message.view_buffers)
        num_nodes, num_buffers = (found[-1][1], found[-1][3]) if found else (0, 0)
        return found if (num_nodes, num_buffers) == (len(message.null_counts), len(message.buffers)) else None

    def needed(self, message: Message, wanted: set[int]) -> list[Range]:
        """Return the ranges of the message's body that these columns need."""
        column_slots = self.slots(message) if len(wanted) < len(self.schema) else None
        if column_slots is None:
            return [Range(0, message.body_bytes)]
        assert message.buffers is not None
        rows = [row for column in wanted for row in range(column_slots[column][2], column_slots[column][3])]
        return [Range(int(offset), int(num_bytes)) for offset, num_bytes in message.buffers[rows] if num_bytes]


def _describe(unit: Unit) -> str:
    return f"record batch {unit.index}, which begins with row {unit.first_row},"


def _changed(handle: _Handle) -> DataFileChanged:
    return DataFileChanged(
        f"{handle.file.name} has changed since it was planned: it had {handle.file.size_bytes} bytes and now has "
        f"{handle.size}, or its headers differ; create the dataset again, and write new data to new files",
        path=handle.file.path,
    )


def _read_planned_outline(handle: _Handle, version: str) -> _FileOutline:
    """Read the outline and check that the file is the planned one.

    Raises:
        DataFileChanged: The file has changed.
    """
    if handle.size != handle.file.size_bytes:
        raise _changed(handle)
    try:
        outline = _read_outline(handle)
    except DataFileInvalid as error:
        raise _changed(handle) from error
    if outline.version != version.partition("-")[0]:
        raise _changed(handle)
    return outline


def _read_outline(handle: _Handle) -> _FileOutline:
    beginning = handle.read(0, _FIRST_MESSAGE + GUESS_BYTES)
    head = beginning[:NUM_HEAD_BYTES]
    footer = b""
    blocks = None
    if head.startswith(_MARK):
        footer = _read_footer(handle)
        try:
            blocks = parse_footer(footer)
        except Malformed as error:
            raise DataFileInvalid(
                f"{handle.file.name}: its arrow footer is damaged ({error}); {CURE}", path=handle.file.path
            ) from error
    elif not _may_be_stream(head):
        raise wrong_format(handle.file, handle.size, head, "an arrow")
    first = _FIRST_MESSAGE if blocks is not None else 0
    located = handle.message_at(first, "the schema of the arrow data", known=beginning[first:])
    if located.message.kind != SCHEMA:
        raise DataFileInvalid(
            f"{handle.file.name}: its arrow data does not begin with a schema; {CURE}", path=handle.file.path
        )
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(located.header))
        _ = schema.names  # decodes the names, which may fail
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise undecodable(f"{handle.file.name}: its arrow schema", error, file=handle.file) from error
    digest = xxhash.xxh3_64(handle.size.to_bytes(8, "little"))
    digest.update(located.header)
    digest.update(footer)
    return _FileOutline(schema, located.header, located.end, blocks, digest.hexdigest())


def _may_be_stream(head: bytes) -> bool:
    """Return whether the bytes begin with a marker and a header length, or, before Arrow 0.15, the length alone."""
    if head.startswith(CONTINUATION):
        return True
    return len(head) >= PREFIX_BYTES and 0 < int.from_bytes(head[:4], "little") <= 1 << 24


def _read_footer(handle: _Handle) -> bytes:
    tail = handle.read(max(0, handle.size - TAIL_BYTES), TAIL_BYTES)
    end_bytes = 4 + len(_MARK)
    if handle.size < _FIRST_MESSAGE + end_bytes or not tail.endswith(_MARK):
        raise DataFileInvalid(
            f"{handle.file.name} ({handle.size} bytes) begins as an arrow file but does not end as one: "
            f"it was truncated, or its writer did not finish; {CURE}",
            path=handle.file.path,
        )
    length = int.from_bytes(tail[-end_bytes : -len(_MARK)], "little")
    if length > MAX_HEADER_BYTES or length > handle.size - _FIRST_MESSAGE - end_bytes:
        raise DataFileInvalid(
            f"{handle.file.name}: its arrow footer should have {length} bytes, but the file has {handle.size} "
            f"and the limit is {MAX_HEADER_BYTES}; {CURE}",
            path=handle.file.path,
        )
    if length + end_bytes > len(tail):
        tail = handle.read(handle.size - length - end_bytes, length + end_bytes)
    return tail[-end_bytes - length : -end_bytes]


def _read_messages(handle: _Handle, outline: _FileOutline, digest: xxhash.xxh3_64) -> Iterator[_LocatedMessage]:
    """Yield all messages after the schema, and add them to the digest."""
    blocks = outline.blocks
    for located in _walk_stream(handle, outline.first_message) if blocks is None else _read_blocks(handle, blocks):
        digest.update(located.header)
        digest.update(located.sample)
        yield located


def _walk_stream(handle: _Handle, offset: int) -> Iterator[_LocatedMessage]:
    num_batches = num_rows = 0
    while offset < handle.size:
        what = f"record batch {num_batches}, which begins with row {num_rows},"
        located = handle.message_or_end(offset, what, sample_bytes=SAMPLE_BYTES)
        if located is None:
            break
        yield located
        offset = located.end
        num_batches += located.message.kind == RECORD_BATCH
        num_rows += located.message.num_rows
    _check_end(handle, offset)


def _check_end(handle: _Handle, offset: int) -> None:
    """Check that a stream has its end marker, without which it may be truncated."""
    end = handle.read(offset, PREFIX_BYTES)
    if not end:
        raise DataFileInvalid(
            f"{handle.file.name}: the arrow stream has no end marker: it was truncated, "
            f"or its writer did not finish; {CURE}",
            path=handle.file.path,
        )
    end_bytes = PREFIX_BYTES if end.startswith(CONTINUATION) else 4
    if offset + end_bytes != handle.size:
        raise DataFileInvalid(
            f"{handle.file.name}: the arrow stream ends at byte {offset + end_bytes}, but the file has {handle.size}; "
            "write only one stream to a file",
            path=handle.file.path,
        )


def _read_blocks(
    handle: _Handle, blocks: tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]
) -> Iterator[_LocatedMessage]:
    def read(numbered: tuple[str, int, int, int]) -> _LocatedMessage:
        what, offset, header_bytes, body_bytes = numbered
        located = handle.message_or_end(offset, what, sample_bytes=SAMPLE_BYTES)
        if located is None or (located.header_bytes, located.message.body_bytes) != (header_bytes, body_bytes):
            raise DataFileInvalid(
                f"{handle.file.name}: {what} is not at the offset in the footer; {CURE}", path=handle.file.path
            )
        return located

    numbered = [
        (f"{name} {number}", *block)
        for name, each in zip(("dictionary", "record batch"), blocks, strict=True)
        for number, block in enumerate(each)
    ]
    if handle.is_local or len(numbered) < 2:
        yield from map(read, numbered)
        return
    with ThreadPoolExecutor(min(NUM_REMOTE_READS, len(numbered)), "arrow-headers") as pool:
        yield from pool.map(read, numbered)


def _add_nulls(null_counts: dict[int, int], outline: _FileOutline, message: Message) -> None:
    column_slots = outline.slots(message)
    if column_slots is None:
        null_counts.clear()
        return
    assert message.null_counts is not None
    for column in null_counts:
        null_counts[column] += int(message.null_counts[column_slots[column][0]])
