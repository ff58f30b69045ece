"""The ORC format: a row group is a stripe.

The metadata of a file is in its tail (`orc_tail.py`), which takes one read. The version is the tail's hash: the tail
contains the offset, the sizes and the statistics of every stripe and column.

pyarrow's decoder reads the streams of a stripe one by one, in many small reads. The ranges of the requested columns are
therefore fetched beforehand, coalesced, and the decoder reads from memory. A footer at the end of each stripe lists
these ranges; where every read is a request, it is not read if nearly all of the stripe is wanted.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.orc as paorc

from strata.data.filter import pruning
from strata.data.filter.pruning import Bounds, comparison_type
from strata.data.formats.base import FileFacts, Unit
from strata.data.formats.damage import CURE, NUM_HEAD_BYTES, kind_of, undecodable, wrong_format
from strata.data.formats.orc_tail import (
    POSTSCRIPT_BYTES_MAX,
    OrcTail,
    Statistics,
    TailDamaged,
    TailUnsupported,
    parse_postscript,
    parse_stripe_footer,
    parse_tail,
)
from strata.data.formats.text import rows_only
from strata.data.source.ranges import Range, coalesce
from strata.data.source.source import translate_errors
from strata.errors import DataFileChanged, DataFileInvalid, SchemaMismatch, StrataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.data.filter.expression import Node, Presence
    from strata.data.formats.base import UnitRanges
    from strata.data.formats.orc_tail import Stream, Stripe
    from strata.data.source.source import DataFile, Source

TAIL_BYTES: Final = 64 << 10
"""Contains the tail of most files, and the footers of the last stripes."""
GAP_BYTES: Final = 4 << 10
"""Ranges with at most this gap are read as one."""
GAP_BYTES_REMOTE: Final = 1 << 20
"""The same where every read is a request. A stripe up to this size is read whole."""


class OrcFormat:
    name = "orc"
    unit_name = "stripe"
    is_typed = True

    def inspect(
        self,
        source: Source,
        file: DataFile,
        *,
        columns: Sequence[str] | None,
        unit_bytes: int,  # noqa: ARG002
        with_nulls: bool = True,  # noqa: ARG002  they are free here
    ) -> FileFacts:
        """Return the metadata. The bytes of a stripe are exact if its footer lies close to the end of the file.

        Such footers come with the read of the tail. Each of the others would cost a read, so the columns' share of
        their bytes is estimated from the known stripes.
        """
        with source.open(file) as opened:
            parts = _PrefetchedFile(file, opened)
            parsed = _read_tail(file, parts)
            schema = _open_native(file, parts)[1]
        tail = parsed.tail
        names = [name for name in (tail.column_ids if columns is None else columns) if name in tail.column_ids]
        sizes = _column_bytes(parsed, {number for name in names for number in tail.column_ids[name]})
        units = []
        first_row = 0
        for index, (stripe, num_bytes) in enumerate(zip(tail.stripes, sizes, strict=True)):
            if stripe.num_rows:
                units.append(Unit(index, stripe.num_rows, first_row, stripe.offset, num_bytes))
                first_row += stripe.num_rows
        return FileFacts(schema, tuple(units), tail.version, _null_counts(tail, names))

    def presence(
        self, source: Source, file: DataFile, facts: FileFacts, condition: Node, schema: pa.Schema
    ) -> list[Presence]:
        with source.open(file) as opened:
            tail = _read_tail(file, _PrefetchedFile(file, opened), version=facts.version).tail
        numbers = {name: tail.column_ids[name][0] for name in schema.names if name in tail.column_ids}
        try:
            statistics = tail.stripe_statistics(list(numbers.values()))
        except TailDamaged as error:
            raise DataFileInvalid(
                f"{file.name}: the statistics of its orc stripes are damaged ({error}); {CURE}", path=file.path
            ) from error
        bounds = {
            name: _bounds(
                [(unit.num_rows, statistics[unit.index].get(number)) for unit in facts.units],
                facts.schema.field(name).type,
                schema.field(name).type,
            )
            for name, number in numbers.items()
        }
        return pruning.presence(condition, bounds, len(facts.units))

    def open(self, source: Source, file: DataFile, schema: pa.Schema, version: str) -> OrcReader:  # noqa: ARG002
        return OrcReader(source, file, version)

    def ranges(self, source: Source, file: DataFile, columns: Sequence[str], version: str) -> UnitRanges:
        with source.open(file) as opened:
            parsed = _read_tail(file, _PrefetchedFile(file, opened), version=version)
        tail = parsed.tail

        def read_footer(stripe: Stripe) -> memoryview:
            known = parsed.section(stripe.footer_offset, stripe.footer_bytes)
            if known is not None:
                return known
            return memoryview(source.read(file, stripe.footer_offset, stripe.footer_bytes)).cast("B")

        def ranges_of(unit: Unit) -> Sequence[Range]:
            stripe = tail.stripes[unit.index]
            if not columns:
                return []
            if stripe.num_bytes <= GAP_BYTES_REMOTE or set(columns) >= set(tail.column_ids):
                return [Range(stripe.offset, stripe.num_bytes)]
            footer = Range(stripe.footer_offset, stripe.footer_bytes)
            try:
                return [footer, *_streams(read_footer(stripe), tail, stripe, columns)]
            except TailDamaged:  # reading the stripe reports it
                return [footer]

        return ranges_of


class OrcReader:
    """Opens its file at the first read."""

    def __init__(self, source: Source, file: DataFile, version: str) -> None:
        self._source = source
        self._file = file
        self._version = version
        self._parts: _PrefetchedFile | None = None
        self._tail: OrcTail | None = None
        self._native: paorc.ORCFile | None = None
        self.bytes_read = 0

    def read(self, unit: Unit, columns: Sequence[str]) -> pa.Table:
        if not columns:
            return rows_only(unit.num_rows)
        parts, tail, native = self._open()
        unknown = [name for name in columns if name not in tail.column_ids]
        if unknown:
            raise SchemaMismatch(f"{self._file.name} has no column {unknown[0]!r}; it has {list(tail.column_ids)}")
        what = f"{self._file.name}, stripe {unit.index}, which begins with row {unit.first_row},"
        try:
            self._fetch(parts, tail, tail.stripes[unit.index], columns)
            batch = native.read_stripe(unit.index, columns=list(columns))
            if not set(columns) <= set(batch.schema.names):  # pyarrow took "a.b" for a member of "a"
                batch = native.read_stripe(unit.index)
            table = pa.Table.from_batches([batch]).select(list(columns)).replace_schema_metadata(None)
        except StrataError:
            raise
        except (TailDamaged, pa.ArrowException, OSError, ValueError) as error:
            if parts.failure is not None:
                raise parts.failure from error
            raise undecodable(what, error, file=self._file, unit=unit) from error
        finally:
            parts.forget()
            self._count(parts)
        if table.num_rows != unit.num_rows:
            raise DataFileInvalid(
                f"{what} has {table.num_rows} rows, not {unit.num_rows} as planned; {CURE}",
                path=self._file.path,
                row_group=unit.index,
            )
        return table

    def close(self) -> None:
        if self._parts is not None:
            self._count(self._parts)
            self._parts.opened.close()
        self._parts = self._tail = self._native = None

    def _count(self, parts: _PrefetchedFile) -> None:
        self.bytes_read += parts.bytes_read
        parts.bytes_read = 0

    def _open(self) -> tuple[_PrefetchedFile, OrcTail, paorc.ORCFile]:
        if self._parts is None or self._tail is None or self._native is None:
            self.close()
            self._parts = _PrefetchedFile(self._file, self._source.open(self._file))
            tail = _read_tail(self._file, self._parts, version=self._version).tail
            self._native, _ = _open_native(self._file, self._parts)
            self._parts.forget()
            self._tail = tail
        return self._parts, self._tail, self._native

    def _fetch(self, parts: _PrefetchedFile, tail: OrcTail, stripe: Stripe, columns: Sequence[str]) -> None:
        """Fetch the footer of a stripe, and then the streams of these columns."""
        gap_bytes = GAP_BYTES_REMOTE if self._source.has_round_trips else GAP_BYTES
        if stripe.num_bytes <= gap_bytes and self._source.has_round_trips:
            parts.fetch(stripe.offset, stripe.num_bytes)
            return
        footer = parts.fetch(stripe.footer_offset, stripe.footer_bytes)
        wanted = _streams(memoryview(footer).cast("B"), tail, stripe, columns)
        for each in coalesce(wanted, gap_bytes=gap_bytes):
            parts.fetch(each.offset, each.num_bytes)


def _streams(footer: memoryview, tail: OrcTail, stripe: Stripe, columns: Sequence[str]) -> list[Range]:
    """Return the ranges of a stripe that these columns need, without its footer.

    Raises:
        TailDamaged: The footer cannot be parsed.
    """
    wanted = {number for name in columns for number in tail.column_ids.get(name, ())} | {0}
    streams = parse_stripe_footer(footer, tail.postscript, stripe)
    return [Range(stream.offset, stream.num_bytes) for stream in streams if _is_read(stream, wanted)]


def _is_read(stream: Stream, columns: set[int]) -> bool:
    """Return whether a stream is read. Column 0 is the row itself, with a stream only if whole rows can be null."""
    return stream.column in columns and not stream.is_index and stream.num_bytes > 0


# -- reading parts of a file -------------------------------------------------------------------------------------------


class _PrefetchedFile(io.RawIOBase):
    """A file for pyarrow with prefetched parts; other parts are read on demand.

    The decoder reports a failed read only as text, so the error itself is stored here.
    """

    def __init__(self, file: DataFile, opened: pa.NativeFile) -> None:
        self.opened = opened
        self.bytes_read = 0
        self.failure: StrataError | None = None
        self._file = file
        self._position = 0
        self._fetched: list[tuple[int, pa.Buffer]] = []
        with translate_errors(file.name):
            self.num_bytes = int(opened.size())

    def fetch(self, offset: int, num_bytes: int) -> pa.Buffer:
        with translate_errors(self._file.name):
            self.opened.seek(offset)
            data = self.opened.read_buffer(num_bytes)
        self.bytes_read += len(data)
        self._fetched.append((offset, data))
        return data

    def forget(self) -> None:
        """Drop the fetched parts and the stored error."""
        self._fetched.clear()
        self.failure = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.num_bytes}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> pa.Buffer:
        first = self._position
        last = self.num_bytes if size < 0 else min(first + size, self.num_bytes)
        self._position = last
        for offset, data in self._fetched:
            if offset <= first and last <= offset + len(data):
                return data.slice(first - offset, last - first)
        try:
            data = self.fetch(first, last - first)
        except StrataError as error:
            self.failure = error
            raise
        self._fetched.pop()
        return data


@dataclass(frozen=True, slots=True)
class _Parsed:
    tail: OrcTail
    offset: int
    data: memoryview
    """The bytes that were read, from `offset` on; more than the tail."""

    def section(self, offset: int, num_bytes: int) -> memoryview | None:
        """Return these bytes of the file; None if they were not read."""
        first = offset - self.offset
        return self.data[first : first + num_bytes] if first >= 0 else None


def _read_tail(file: DataFile, parts: _PrefetchedFile, *, version: str | None = None) -> _Parsed:
    """Read the tail in one read, or two if it is large, and check that it has this version."""
    if version is not None and parts.num_bytes != file.size_bytes:
        raise _changed(file, parts.num_bytes)
    offset = max(0, parts.num_bytes - TAIL_BYTES)
    data = memoryview(parts.fetch(offset, parts.num_bytes - offset)).cast("B")
    try:
        postscript = parse_postscript(data[-POSTSCRIPT_BYTES_MAX - 1 :], parts.num_bytes)
        if postscript.tail_bytes > len(data):
            parts.forget()
            offset = parts.num_bytes - postscript.tail_bytes
            data = memoryview(parts.fetch(offset, postscript.tail_bytes)).cast("B")
        tail = parse_tail(data[len(data) - postscript.tail_bytes :], postscript, parts.num_bytes)
    except TailDamaged as error:
        if version is not None:
            raise _changed(file, parts.num_bytes) from error
        raise _not_orc(file, parts, error) from error
    if version is not None and tail.version != version:
        raise _changed(file, parts.num_bytes)
    return _Parsed(tail, offset, data)


def _open_native(file: DataFile, parts: _PrefetchedFile) -> tuple[paorc.ORCFile, pa.Schema]:
    try:
        native = paorc.ORCFile(pa.PythonFile(parts, mode="r"))
        return native, native.schema.remove_metadata()
    except (pa.ArrowException, OSError, ValueError) as error:
        if parts.failure is not None:
            raise parts.failure from error
        raise undecodable(f"{file.name}: its orc footer", error, file=file) from error


def _changed(file: DataFile, num_bytes: int) -> DataFileChanged:
    return DataFileChanged(
        f"{file.name} has changed since it was planned: it had {file.size_bytes} bytes and now has {num_bytes}, "
        "or its footer differs; create the dataset again, and write new data to new files",
        path=file.path,
    )


def _not_orc(file: DataFile, parts: _PrefetchedFile, error: TailDamaged) -> DataFileInvalid:
    if isinstance(error, TailUnsupported):
        return undecodable(file.name, error, file=file)
    head = bytes(parts.fetch(0, min(NUM_HEAD_BYTES, parts.num_bytes)))
    if kind_of(head) == "orc":
        return DataFileInvalid(
            f"{file.name} ({parts.num_bytes} bytes) begins as an orc file but does not end as one ({error}): it was "
            f"truncated, or its writer did not finish; {CURE}",
            path=file.path,
        )
    return wrong_format(file, parts.num_bytes, head, "an orc")


# -- bytes and statistics ----------------------------------------------------------------------------------------------


def _column_bytes(parsed: _Parsed, columns: set[int]) -> list[int]:
    """Return the bytes to read for these columns, per stripe; see `OrcFormat.inspect`."""
    exact: dict[int, int] = {}
    for index, stripe in enumerate(parsed.tail.stripes):
        section = parsed.section(stripe.footer_offset, stripe.footer_bytes)
        if section is None:
            continue
        try:
            streams = parse_stripe_footer(section, parsed.tail.postscript, stripe)
        except TailDamaged:  # reading the stripe reports it; the other stripes may be intact
            continue
        exact[index] = stripe.footer_bytes + sum(each.num_bytes for each in streams if _is_read(each, columns))
    known = sum(parsed.tail.stripes[index].num_bytes for index in exact)
    share = sum(exact.values()) / known if known else 1.0
    return [exact.get(index, int(stripe.num_bytes * share)) for index, stripe in enumerate(parsed.tail.stripes)]


def _null_counts(tail: OrcTail, names: list[str]) -> dict[str, int]:
    counts = {}
    for name in names:
        try:
            statistics = tail.file_statistics(tail.column_ids[name][0])
        except TailDamaged:
            continue
        if statistics is not None and _agree(statistics, tail.num_rows):
            counts[name] = tail.num_rows - statistics.num_values
    return counts


def _agree(statistics: Statistics, num_rows: int) -> bool:
    """Return whether the counts of values and nulls agree; a writer that did not count states 0 and no nulls."""
    return statistics.num_values <= num_rows and (statistics.num_values == num_rows or statistics.has_null)


def _bounds(stated: Sequence[tuple[int, Statistics | None]], kind: pa.DataType, compared: pa.DataType) -> Bounds:
    """Return the bounds of one column from its rows and statistics per stripe.

    `kind` is the type in the file, `compared` the type in which rows are compared.
    """
    sound = [each if each is not None and _agree(each, num_rows) else None for num_rows, each in stated]
    try:
        lows = _values([None if each is None else each.low for each in sound], kind).cast(comparison_type(compared))
        highs = _values([None if each is None else each.high for each in sound], kind).cast(comparison_type(compared))
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        lows = highs = pa.nulls(len(sound), comparison_type(compared))
    has_null = [each is None or each.num_values < num_rows for (num_rows, _), each in zip(stated, sound, strict=True)]
    has_value = [each is None or each.num_values > 0 for each in sound]
    return Bounds(lows, highs, np.array(has_null, np.bool_), np.array(has_value, np.bool_))


def _values(values: Sequence[bool | float | str | None], kind: pa.DataType) -> pa.Array:
    """Return an array of values; text becomes bytes, and times are nanoseconds."""
    if any(isinstance(value, str) for value in values):
        return pa.array([value.encode() if isinstance(value, str) else None for value in values], pa.binary())
    if pa.types.is_timestamp(kind):
        return pa.array(values, pa.int64()).cast(pa.timestamp("ns", kind.tz)).cast(kind)
    return pa.array(values, kind)
