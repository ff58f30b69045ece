"""Arrow IPC, files (Feather too) and streams: a unit is a record batch.

A file is a stream with a mark before it and behind it a footer that lists where its messages are; a stream is walked
from header to header. From there on both are the same: a unit is read by putting the schema, the dictionaries and the
batch, as they are in the file, behind one another in memory, and decoding that as a stream. Only the buffers of the
columns that are asked for are read; the others' places stay as they are. Nothing is mapped: a mapped file that is cut
off by somebody else ends the process.

The version covers the size, the schema, the footer, and of every message the header (rows, nulls, sizes of buffers) and
the first `SAMPLE_BYTES` of its body. Two files that differ only behind those, with buffers of the same sizes, are taken
for the same: reading all data to tell them apart would cost as much as an epoch.
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
from strata.data.formats.damage import CURE, NUM_HEAD_BYTES, kind_of, undecodable
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
"""Read at once where the first header begins: most are shorter."""
TAIL_BYTES = 16 << 10
"""Read at once to find the footer."""
MAX_HEADER_BYTES = 256 << 20
"""Of a message, and of the footer."""
NUM_REMOTE_READS = 16
"""At once, for the headers of a file that is far away."""
LOCAL_GAP_BYTES = 8 << 10
REMOTE_GAP_BYTES = 256 << 10
"""So much that nobody needs is read rather than asking twice."""
WHOLE_BYTES = 1 << 20
"""A message far away that is no larger is read whole: finding out what of it is needed would be another request."""
ALIGNMENT = 64
_MARK = b"ARROW1"
_FIRST_MESSAGE = 8
"""In a file: behind the mark and its padding."""


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
        with_nulls: bool = True,  # noqa: ARG002  they cost nothing here
    ) -> FileFacts:
        with source.open(file) as opened:
            handle = _Handle(source, file, opened)
            outline = _outline(handle)
            return self._measure(handle, outline, columns)

    def _measure(self, handle: _Handle, outline: _Outline, columns: Sequence[str] | None) -> FileFacts:
        schema = outline.schema
        wanted = set(range(len(schema)) if columns is None else map(schema.get_field_index, columns)) - {-1}
        units: list[Unit] = []
        null_counts = dict.fromkeys(sorted(wanted), 0)
        first_row = 0
        digest = xxhash.xxh3_64()
        for place in _survey(handle, outline, digest):
            message = place.message
            if message.kind != RECORD_BATCH or not message.num_rows:
                continue
            needed = outline.needed(message, wanted)
            num_bytes = place.header_bytes + sum(each.num_bytes for each in needed)
            units.append(Unit(len(units), message.num_rows, first_row, place.offset, num_bytes))
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
        """There are no statistics."""
        return [Presence.SOME] * len(facts.units)

    def open(self, source: Source, file: DataFile, schema: pa.Schema, version: str) -> ArrowReader:  # noqa: ARG002
        return ArrowReader(source, file, version)

    def ranges(self, source: Source, file: DataFile, columns: Sequence[str], version: str) -> UnitRanges:
        """A message that is wanted nearly whole is not looked into: its footer, or who planned it, knows its size."""
        with source.open(file) as opened:
            outline = _checked_outline(_Handle(source, file, opened), version)
        wanted = {outline.schema.get_field_index(name) for name in columns} - {-1}
        has_all = len(wanted) == len(outline.schema)
        sizes = {offset: header + body for offset, header, body in outline.blocks[1]} if outline.blocks else {}

        def ranges_of(unit: Unit) -> Sequence[Range]:
            if not wanted:
                return []
            first = Range(unit.offset, min(GUESS_BYTES, file.size_bytes - unit.offset))  # as a reader begins
            num_bytes = sizes.get(unit.offset, unit.num_bytes if has_all else file.size_bytes)
            if has_all or num_bytes <= WHOLE_BYTES:
                return [first, Range(unit.offset, num_bytes)]
            with source.open(file) as opened:
                place = _Handle(source, file, opened).message_at(unit.offset, _named(unit))
            needed = outline.needed(place.message, wanted)
            return [first, Range(unit.offset, place.header_bytes), *(each.moved(place.body_offset) for each in needed)]

        return ranges_of


class ArrowReader:
    """Nearby, all headers are checked against the version when it is opened; far away, the footer and the schema."""

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
        self._before: dict[tuple[int, ...], bytes] = {}
        """The schema and the dictionaries that a batch needs before it; one set of them is kept."""

    @property
    def bytes_read(self) -> int:
        return self._handle.bytes_read

    def read(self, unit: Unit, columns: Sequence[str]) -> pa.Table:
        if not columns:
            return pa.table({"": pa.nulls(unit.num_rows)}).select([])
        what = _named(unit)
        place = self._handle.message_at(unit.offset, what)
        if place.message.kind != RECORD_BATCH or place.message.num_rows != unit.num_rows:
            raise DataFileInvalid(
                f"{self._file.name}: {what} should have {unit.num_rows} rows, but has {place.message.num_rows}; {CURE}"
            )
        wanted = sorted({self._outline.schema.get_field_index(name) for name in columns})
        stream = self._load(place, set(wanted))
        options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
        try:
            with pa.ipc.open_stream(stream, options=options) as batches:
                table = pa.Table.from_batches([batches.read_next_batch()])
            # Offsets and codes are followed by others without looking; those of a damaged file lead anywhere.
            table.validate(full=True)
        except pa.ArrowMemoryError:
            raise
        except (OSError, pa.ArrowException, StopIteration) as error:
            raise undecodable(f"{self._file.name}: {what}", error) from error
        return table.select(list(columns)).replace_schema_metadata(None)

    def close(self) -> None:
        self._opened.close()

    def _verify(self, version: str) -> list[_Place]:
        """Whether it is the file that was planned. Gives its dictionaries."""
        handle = self._handle
        self._outline = _checked_outline(handle, version)
        try:
            if handle.is_local or (self._outline.blocks is None and self._outline.has_dictionaries):
                digest = xxhash.xxh3_64()
                survey = _survey(handle, self._outline, digest)
                dictionaries = [place for place in survey if place.message.kind == DICTIONARY]
                if f"{self._outline.version}-{digest.hexdigest()}" != version:
                    raise _changed(handle)
                return dictionaries
        except DataFileInvalid as error:
            raise _changed(handle) from error
        return [handle.message_at(offset, "a dictionary") for offset, _, _ in (self._outline.blocks or ([],))[0]]

    def _load(self, place: _Place, wanted: set[int]) -> pa.BufferReader:
        """A stream with this batch only, in memory; of its body, the buffers of these columns."""
        before = self._before_batch(place.offset)
        first_body = len(before) + place.header_bytes
        padding = -first_body % ALIGNMENT
        memory = pa.allocate_buffer(padding + first_body + place.message.body_bytes)
        view = memoryview(memory).cast("B")
        view[padding : padding + len(before)] = before
        view[padding + len(before) : padding + first_body] = place.header
        body = view[padding + first_body :]
        for each in coalesce(self._outline.needed(place.message, wanted), gap_bytes=self._gap_bytes):
            self._handle.read_into(body[each.offset : each.end], place.body_offset + each.offset)
        return pa.BufferReader(memory.slice(padding))

    def _before_batch(self, offset: int) -> bytes:
        """In a file all dictionaries count; in a stream the last of each before the batch, and what was added to it."""
        valid: dict[int, list[_Place]] = {}
        for place in self._dictionaries:
            if self._outline.blocks is None and place.offset > offset:
                break
            if place.message.is_delta:
                valid.setdefault(place.message.dictionary, []).append(place)
            else:
                valid[place.message.dictionary] = [place]
        # Those that are added to come first: a stream begins with one of each.
        places = sorted((place for each in valid.values() for place in each), key=lambda place: place.message.is_delta)
        key = tuple(place.offset for place in places)
        if key not in self._before:
            messages = [self._outline.schema_message]
            for place in places:
                messages += [place.header, self._handle.read(place.body_offset, place.message.body_bytes)]
            self._before = {key: b"".join(messages)}
        return self._before[key]


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A message, and where it is."""

    offset: int
    header: bytes
    """With its prefix and its padding."""
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
    """Reads from one file, and counts."""

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
        """Fewer bytes where the file ends."""
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
            raise DataFileChanged(f"{self.file.name} was cut off while it was read: {found}; {CURE}")

    def _count(self, num_bytes: int) -> None:
        self.bytes_read += num_bytes
        self._counter.add(num_bytes)

    def message_at(self, offset: int, what: str, known: bytes | None = None) -> _Place:
        """`known`: what has been read of it."""
        place = self.message_or_end(offset, what, known=known)
        if place is None:
            raise DataFileInvalid(f"{self.file.name}: {what} is not there; {CURE}")
        return place

    def message_or_end(
        self, offset: int, what: str, *, sample_bytes: int = 0, known: bytes | None = None
    ) -> _Place | None:
        """None: the end of a stream."""
        data = self.read(offset, self._guess_bytes + sample_bytes) if known is None else known
        try:
            return self._parse(offset, data, sample_bytes)
        except Malformed as error:
            raise DataFileInvalid(f"{self.file.name}: {what} is damaged or cut off ({error}); {CURE}") from error

    def _parse(self, offset: int, data: bytes, sample_bytes: int) -> _Place | None:
        """`data`: what is known of the file from `offset` on; what is missing is read."""
        first, length = header_span(data[:PREFIX_BYTES])
        if not length:
            return None
        header_bytes = first + length
        if length > MAX_HEADER_BYTES or offset + header_bytes > self.size:
            raise Malformed(f"a header of {length} bytes in a file of {self.size}")
        data = self._extend(offset, data, header_bytes)
        message = parse_message(data[first:header_bytes])
        end = offset + header_bytes + message.body_bytes
        if end > self.size:
            raise Malformed(f"it ends at {end}, and the file at {self.size}")
        if message.kind == RECORD_BATCH:
            self._guess_bytes = header_bytes  # those of one file are alike
        sample_end = header_bytes + min(sample_bytes, message.body_bytes)
        data = self._extend(offset, data, sample_end)
        return _Place(offset, data[:header_bytes], message, data[header_bytes:sample_end])

    def _extend(self, offset: int, data: bytes, num_bytes: int) -> bytes:
        missing = num_bytes - len(data)
        return data + self.read(offset + len(data), missing) if missing > 0 else data


@dataclass(frozen=True, slots=True, eq=False)
class _Outline:
    """What a file says before its first batch, and behind its last."""

    schema: pa.Schema
    schema_message: bytes
    first_message: int
    """Behind the schema."""
    blocks: tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]] | None
    """Dictionaries and batches; None: a stream."""
    version: str

    @property
    def has_dictionaries(self) -> bool:
        return any(has_dictionaries(kind) for kind in self.schema.types)

    def slots(self, message: Message) -> list[tuple[int, int, int, int]] | None:
        """Of each column; None where the batch has others than its schema lets expect (unions of old writers)."""
        assert message.null_counts is not None
        assert message.buffers is not None
        found = slots(self.schema, message.view_buffers)
        num_nodes, num_buffers = (found[-1][1], found[-1][3]) if found else (0, 0)
        return found if (num_nodes, num_buffers) == (len(message.null_counts), len(message.buffers)) else None

    def needed(self, message: Message, wanted: set[int]) -> list[Range]:
        """Of the message's body."""
        places = self.slots(message) if len(wanted) < len(self.schema) else None
        if places is None:
            return [Range(0, message.body_bytes)]
        assert message.buffers is not None
        rows = [row for column in wanted for row in range(places[column][2], places[column][3])]
        return [Range(int(offset), int(num_bytes)) for offset, num_bytes in message.buffers[rows] if num_bytes]


def _named(unit: Unit) -> str:
    return f"record batch {unit.index}, which begins with row {unit.first_row},"


def _changed(handle: _Handle) -> DataFileChanged:
    return DataFileChanged(
        f"{handle.file.name} is not the file that was planned: it had {handle.file.size_bytes} bytes, now it has "
        f"{handle.size}, or its headers are others; make the dataset anew, and write new data to new files"
    )


def _checked_outline(handle: _Handle, version: str) -> _Outline:
    """
    Raises:
        DataFileChanged: It is not the one that was planned.
    """
    if handle.size != handle.file.size_bytes:
        raise _changed(handle)
    try:
        outline = _outline(handle)
    except DataFileInvalid as error:
        raise _changed(handle) from error
    if outline.version != version.partition("-")[0]:
        raise _changed(handle)
    return outline


def _outline(handle: _Handle) -> _Outline:
    beginning = handle.read(0, _FIRST_MESSAGE + GUESS_BYTES)
    head = beginning[:NUM_HEAD_BYTES]
    footer = b""
    blocks = None
    if head.startswith(_MARK):
        footer = _read_footer(handle)
        try:
            blocks = parse_footer(footer)
        except Malformed as error:
            raise DataFileInvalid(f"{handle.file.name}: its arrow footer is damaged ({error}); {CURE}") from error
    elif not _may_be_stream(head):
        raise DataFileInvalid(
            f"{handle.file.name} ({handle.size} bytes) is not an arrow file: it looks {kind_of(head)}; "
            "name its format, or narrow the path so that it is left out"
        )
    first = _FIRST_MESSAGE if blocks is not None else 0
    place = handle.message_at(first, "the schema of the arrow data", beginning[first:])
    if place.message.kind != SCHEMA:
        raise DataFileInvalid(f"{handle.file.name}: its arrow data does not begin with a schema; {CURE}")
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(place.header))
        _ = schema.names  # are decoded only now
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise undecodable(f"{handle.file.name}: its arrow schema", error) from error
    digest = xxhash.xxh3_64(handle.size.to_bytes(8, "little"))
    digest.update(place.header)
    digest.update(footer)
    return _Outline(schema, place.header, place.end, blocks, digest.hexdigest())


def _may_be_stream(head: bytes) -> bool:
    """A mark and the length of a header, or, before Arrow 0.15, the length alone."""
    if head.startswith(CONTINUATION):
        return True
    return len(head) >= PREFIX_BYTES and 0 < int.from_bytes(head[:4], "little") <= 1 << 24


def _read_footer(handle: _Handle) -> bytes:
    tail = handle.read(max(0, handle.size - TAIL_BYTES), TAIL_BYTES)
    end_bytes = 4 + len(_MARK)
    if handle.size < _FIRST_MESSAGE + end_bytes or not tail.endswith(_MARK):
        raise DataFileInvalid(
            f"{handle.file.name} ({handle.size} bytes) begins as an arrow file but does not end as one: "
            f"it was cut off, or its writer did not finish; {CURE}"
        )
    length = int.from_bytes(tail[-end_bytes : -len(_MARK)], "little")
    if length > MAX_HEADER_BYTES or length > handle.size - _FIRST_MESSAGE - end_bytes:
        raise DataFileInvalid(
            f"{handle.file.name}: its arrow footer should have {length} bytes, but the file has {handle.size} "
            f"and a footer may have {MAX_HEADER_BYTES}; {CURE}"
        )
    if length + end_bytes > len(tail):
        tail = handle.read(handle.size - length - end_bytes, length + end_bytes)
    return tail[-end_bytes - length : -end_bytes]


def _survey(handle: _Handle, outline: _Outline, digest: xxhash.xxh3_64) -> Iterator[_Place]:
    """All messages behind the schema, which are added to the digest."""
    for place in _walk(handle, outline.first_message) if outline.blocks is None else _visit(handle, outline.blocks):
        digest.update(place.header)
        digest.update(place.sample)
        yield place


def _walk(handle: _Handle, offset: int) -> Iterator[_Place]:
    num_batches = num_rows = 0
    while offset < handle.size:
        what = f"record batch {num_batches}, which begins with row {num_rows},"
        place = handle.message_or_end(offset, what, sample_bytes=SAMPLE_BYTES)
        if place is None:
            break
        yield place
        offset = place.end
        num_batches += place.message.kind == RECORD_BATCH
        num_rows += place.message.num_rows
    _check_end(handle, offset)


def _check_end(handle: _Handle, offset: int) -> None:
    """A stream may end without a mark, but then nobody knows whether its writer had finished."""
    end = handle.read(offset, PREFIX_BYTES)
    if not end:
        raise DataFileInvalid(
            f"{handle.file.name}: the arrow stream has no end mark: it was cut off, "
            f"or its writer did not finish; {CURE}"
        )
    end_bytes = PREFIX_BYTES if end.startswith(CONTINUATION) else 4
    if offset + end_bytes != handle.size:
        raise DataFileInvalid(
            f"{handle.file.name}: the arrow stream ends at byte {offset + end_bytes}, but the file has {handle.size}; "
            "put only one stream in a file"
        )


def _visit(handle: _Handle, blocks: tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]) -> Iterator[_Place]:
    def look(numbered: tuple[str, int, int, int]) -> _Place:
        what, offset, header_bytes, body_bytes = numbered
        place = handle.message_or_end(offset, what, sample_bytes=SAMPLE_BYTES)
        if place is None or (place.header_bytes, place.message.body_bytes) != (header_bytes, body_bytes):
            raise DataFileInvalid(f"{handle.file.name}: {what} is not where the footer says; {CURE}")
        return place

    numbered = [
        (f"{name} {number}", *block)
        for name, each in zip(("dictionary", "record batch"), blocks, strict=True)
        for number, block in enumerate(each)
    ]
    if handle.is_local or len(numbered) < 2:
        yield from map(look, numbered)
        return
    with ThreadPoolExecutor(min(NUM_REMOTE_READS, len(numbered)), "arrow-headers") as pool:
        yield from pool.map(look, numbered)


def _add_nulls(null_counts: dict[int, int], outline: _Outline, message: Message) -> None:
    places = outline.slots(message)
    if places is None:
        null_counts.clear()
        return
    assert message.null_counts is not None
    for column in null_counts:
        null_counts[column] += int(message.null_counts[places[column][0]])
