"""What the formats of text share: one scan that finds the units, and reading a unit by its range of bytes.

Text does not say how many records it has, so it is read once as a whole, in pieces of bounded size; the scan gives
exact ranges and rows. As every byte passes by, the version is a hash of all of them. Types are guessed from the
beginning: to parse everything takes as long as an epoch. Where the guess turns out wrong, records are not damaged, and
that is said.

A compressed file can only be read from its first byte on, so it is one unit.
"""

from __future__ import annotations

import abc
import io
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import pyarrow as pa
import pyarrow.fs as pafs
import xxhash

from strata.data.filter.expression import Presence
from strata.data.formats.base import FileFacts, Unit
from strata.data.formats.records import UnitCutter
from strata.data.source.source import translate_errors
from strata.errors import DataFileChanged, DataFileInvalid, SchemaMismatch, StrataError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    from strata.data.filter.expression import Node
    from strata.data.formats.records import Records
    from strata.data.source.source import DataFile, Source

CODECS: Final = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
"""By the end of a file's name."""
PIECE_BYTES: Final = 1 << 20
"""How much is scanned at once: what fits the processor's cache."""
REQUEST_BYTES: Final = 16 << 20
"""How much is read at once where every read is a request."""
SAMPLE_BYTES: Final = 1 << 20
"""What types are guessed from."""
RECORD_BYTES_MAX: Final = 256 << 20
UNIT_BYTES_MAX: Final = 1 << 30
"""A unit is parsed as one block, whose size pyarrow counts in 32 bits."""
BOM: Final = b"\xef\xbb\xbf"
_MESSAGE_CHARS: Final = 400


class Stretch(NamedTuple):
    """Whole lines. `data` is overwritten by the next one."""

    offset: int
    data: memoryview
    rows: npt.NDArray[np.int64]
    """Where records end, counted from the beginning of the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFormat(abc.ABC):
    """A `Format`, but for how records look."""

    name = "text"
    unit_name = "byte range"
    is_typed = False
    is_keyed = False

    piece_bytes: int = PIECE_BYTES
    """How much is scanned at once."""
    decided: frozenset[str] = field(default=frozenset(), repr=False)
    """Columns whose types the user gave: what does not fit them is damaged."""
    is_chosen: bool = field(default=False, repr=False)
    """Whether the user named the columns to deliver: others may be left out."""

    def informed(self, *, decided: Collection[str], is_chosen: bool) -> Self:
        return replace(self, decided=frozenset(decided), is_chosen=is_chosen)

    @property
    @abc.abstractmethod
    def records(self) -> Records: ...

    @property
    def has_header(self) -> bool:
        """Whether the first record names the columns."""
        return False

    @abc.abstractmethod
    def cure(self, error: Exception) -> str:
        """What to do about what pyarrow says of records that do not parse."""

    def can_retype(self, error: Exception) -> bool:  # noqa: ARG002
        """Whether another type of the column would mend it."""
        return True

    @abc.abstractmethod
    def guess(self, header: bytes, sample: bytes) -> pa.Schema:
        """The columns. `header`: the first record, where it names them; `sample`: the first of the others, or none.

        Raises:
            pa.ArrowException, ValueError: It cannot be parsed.
        """

    @abc.abstractmethod
    def parse(self, data: pa.Buffer | memoryview, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        """These columns, of whole records. `schema`: all columns of the file, in its order.

        Raises:
            pa.ArrowException, ValueError: It cannot be parsed.
        """

    @abc.abstractmethod
    def is_sound(self, data: pa.Buffer | memoryview, schema: pa.Schema, columns: Sequence[str]) -> bool:
        """Whether these are records, whatever the types of their values."""

    def wrong_guess(self, data: pa.Buffer | memoryview, schema: pa.Schema, columns: Sequence[str]) -> str | None:
        """Why `parse` fails, with the cure, if records are not damaged, but other than the beginning of the file."""
        if not self.is_sound(data, schema, columns):
            return None
        for name in columns:
            try:
                self.parse(data, schema, [name])
            except (pa.ArrowException, ValueError) as error:
                if name not in self.decided:
                    advice = f"say what it is: schema=pa.schema([({name!r}, …)]). Otherwise "
                    return (
                        f"column {name!r} was taken for {schema.field(name).type}, by the first {SAMPLE_BYTES:,} bytes "
                        f"of each file, and is something else here ({shortened(error)}); "
                        f"{advice if self.can_retype(error) else ''}{self.cure(error)}"
                    )
        return None

    def inspect(
        self,
        source: Source,
        file: DataFile,
        *,
        columns: Sequence[str] | None,  # noqa: ARG002  text is read whole
        unit_bytes: int,
        with_nulls: bool = True,  # noqa: ARG002  nobody knows
    ) -> FileFacts:
        head, header_bytes, head_rows = bytearray(), 0, 0
        cutter: UnitCutter | None = None
        with Text(source, file) as text:
            for stretch in text.stretches(self.records, self.piece_bytes):
                rows = stretch.rows
                if len(head) < SAMPLE_BYTES:
                    taken = int(rows.searchsorted(stretch.offset + SAMPLE_BYTES - len(head))) + 1
                    head_rows += len(rows[:taken])
                    head += stretch.data if taken >= len(rows) else stretch.data[: rows[taken - 1] - stretch.offset]
                if cutter is None and not self.has_header:
                    cutter = UnitCutter(stretch.offset, min(max(unit_bytes, 1), UNIT_BYTES_MAX))
                elif cutter is None and len(rows):
                    header_bytes = int(rows[0]) - text.first
                    cutter = UnitCutter(int(rows[0]), min(max(unit_bytes, 1), UNIT_BYTES_MAX))
                    rows, head_rows = rows[1:], head_rows - 1
                if cutter is not None:
                    cutter.add(rows)
        cuts = cutter.close() if cutter is not None else []
        schema = self._guess(file, bytes(head[:header_bytes]), bytes(head[header_bytes:]), head_rows)
        units = _units(file, cuts, is_compressed=text.codec is not None)
        return FileFacts(schema=schema, units=units, version=text.version)

    def _guess(self, file: DataFile, header: bytes, sample: bytes, num_rows: int) -> pa.Schema:
        where = f"{file.name}: its first {len(header) + len(sample):,} bytes"
        try:
            schema = self.guess(header, sample)
            _check_names(schema.names)
            found = self.parse(memoryview(sample), schema, schema.names).num_rows if num_rows else 0
        except (pa.ArrowException, ValueError) as error:
            raise DataFileInvalid(f"{where} are not {self.name}: {shortened(error)}; {self.cure(error)}") from error
        if schema.names and found != num_rows:
            raise DataFileInvalid(
                f"{where} are {num_rows} lines with {found} records; as {self.name}, every record has a line of its own"
            )
        return schema

    def presence(
        self,
        source: Source,  # noqa: ARG002
        file: DataFile,  # noqa: ARG002
        facts: FileFacts,
        condition: Node,  # noqa: ARG002
        schema: pa.Schema,  # noqa: ARG002
    ) -> list[Presence]:
        """Text has no statistics."""
        return [Presence.SOME] * len(facts.units)

    def open(self, source: Source, file: DataFile, schema: pa.Schema, version: str) -> TextReader:
        return TextReader(self, source, file, schema, version)


def _check_names(names: list[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two columns are called {twice!r}: rename one, or give column_names")


def _units(file: DataFile, cuts: list[tuple[int, int, int]], *, is_compressed: bool) -> tuple[Unit, ...]:
    if is_compressed and cuts:
        num_rows = sum(rows for _, _, rows in cuts)
        return (Unit(index=0, num_rows=num_rows, first_row=0, offset=0, num_bytes=file.size_bytes),)
    units, first_row = [], 0
    for index, (first, last, num_rows) in enumerate(cuts):
        units.append(Unit(index, num_rows, first_row, first, last - first))
        first_row += num_rows
    return tuple(units)


def shortened(error: Exception) -> str:
    """Of what pyarrow says, no more than fits a message: it may quote a whole record."""
    told = str(error).strip()
    return told if len(told) <= _MESSAGE_CHARS else f"{told[:_MESSAGE_CHARS]}…"


def codec_of(file: DataFile) -> str | None:
    return next((codec for suffix, codec in CODECS.items() if file.name.lower().endswith(suffix)), None)


class Text:
    """A file read from front to back, decompressed if its name says so; what storage gives is counted and hashed."""

    def __init__(self, source: Source, file: DataFile) -> None:
        self.codec = codec_of(file)
        self.first = 0
        """Where text begins: behind a byte order mark, if there is one."""
        self._file = file
        self._raw = _Raw(source.open(file), file.name)
        self._stream = self._raw if source.is_local else io.BufferedReader(self._raw, REQUEST_BYTES)
        if self.codec is not None:
            self._stream = pa.CompressedInputStream(pa.PythonFile(self._stream, mode="r"), self.codec)

    @property
    def bytes_read(self) -> int:
        return self._raw.bytes_read

    @property
    def version(self) -> str:
        return self._raw.hash.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def fill(self, buffer: memoryview) -> int:
        """As much as there is, or as fits.

        Raises:
            DataFileInvalid: It cannot be decompressed.
        """
        filled = 0
        while filled < len(buffer):
            try:
                taken = self._stream.readinto(buffer[filled:])
            except StrataError:
                raise
            except (OSError, pa.ArrowException) as error:
                raise DataFileInvalid(
                    f"{self._file.name} is no whole {self.codec} file: {shortened(error)}; copy it here again, "
                    f"or rename it if it is not compressed"
                ) from error
            if not taken:
                break
            filled += taken
        return filled

    def hash_all(self) -> str:
        """The version of all of it, as storage gives it."""
        piece = memoryview(bytearray(PIECE_BYTES))
        while self._raw.readinto(piece):
            pass
        return self.version

    def stretches(self, records: Records, piece_bytes: int) -> Iterator[Stretch]:
        """All of it, in whole lines.

        Raises:
            DataFileInvalid: A record is longer than any may be, or it cannot be decompressed.
        """
        buffer = bytearray(max(piece_bytes, 2 * len(BOM)))
        offset, size, is_last = 0, 0, False
        while not is_last:
            size += self.fill(memoryview(buffer)[size:])
            is_last = size < len(buffer)
            if offset == 0 and buffer[:size].startswith(BOM):
                self.first = offset = len(BOM)
                size = _drop(buffer, len(BOM), size)
            data = memoryview(buffer)[:size]
            ends = records.ends(data, is_last=is_last)
            if ends.stop:
                yield Stretch(offset, data[: ends.stop], ends.rows + offset)
                size = _drop(buffer, ends.stop, size)
                offset += ends.stop
            elif not is_last:
                buffer = self._grown(buffer, offset)

    def _grown(self, buffer: bytearray, offset: int) -> bytearray:
        if len(buffer) >= RECORD_BYTES_MAX:
            raise DataFileInvalid(
                f"{self._file.name}: the record that begins at byte {offset:,} does not end within "
                f"{RECORD_BYTES_MAX >> 20} MiB; is a quote not closed, or is this another format?"
            )
        return buffer + bytearray(len(buffer))


def _drop(buffer: bytearray, first: int, size: int) -> int:
    """Moves what is from `first` up to `size` to the front; gives back how much that is."""
    view = memoryview(buffer)
    view[: size - first] = view[first:size]
    return size - first


class _Raw(io.RawIOBase):
    """What the storage gives, counted and hashed; its failures are ours, also when pyarrow calls."""

    def __init__(self, opened: pa.NativeFile, name: str) -> None:
        self._opened = opened
        self._name = name
        self.hash = xxhash.xxh3_128()
        self.bytes_read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        with translate_errors(self._name):
            taken = int(self._opened.readinto(buffer))
        self.hash.update(memoryview(buffer)[:taken])
        self.bytes_read += taken
        return taken

    def close(self) -> None:
        if not self.closed:
            self._opened.close()
        super().close()


class TextReader:
    """The `Reader` of all text formats."""

    def __init__(self, form: TextFormat, source: Source, file: DataFile, schema: pa.Schema, version: str) -> None:
        self.bytes_read = 0
        self._form = form
        self._source = source
        self._file = file
        self._schema = schema
        self._version = version
        self._opened: pa.NativeFile | None = None
        self._unchanged = (file.size_bytes, file.mtime_ns)
        """Size and time of the file when it was last known to be as planned."""

    def read(self, unit: Unit, columns: Sequence[str]) -> pa.Table:
        strangers = [name for name in columns if name not in self._schema.names]
        if strangers:
            raise SchemaMismatch(f"{self._file.name} has no column {strangers[0]!r}; it has {self._schema.names}")
        if not columns:
            return rows_only(unit.num_rows)
        try:
            table = self._read(unit, columns)
        except (DataFileInvalid, SchemaMismatch):
            self._check_unchanged()
            raise
        if self._source.is_local or table.num_rows != unit.num_rows:
            self._check_unchanged()
        if table.num_rows != unit.num_rows:
            raise DataFileInvalid(f"{self._place(unit)}: {table.num_rows} records where {unit.num_rows} were planned")
        return table

    def _read(self, unit: Unit, columns: Sequence[str]) -> pa.Table:
        opened = self._open()
        if codec_of(self._file) is not None:
            return self._read_compressed(unit, columns)
        with translate_errors(self._file.name):
            data = opened.read_at(unit.num_bytes, unit.offset)
        self.bytes_read += len(data)
        return self._parse(unit, data, columns)

    def _open(self) -> pa.NativeFile:
        if self._opened is None:
            opened = self._source.open(self._file)
            with translate_errors(self._file.name):
                size_bytes = opened.size()
            if size_bytes != self._file.size_bytes:
                raise DataFileChanged(
                    f"{self._file.name} has {size_bytes:,} bytes and had {self._file.size_bytes:,} when planned; "
                    f"plan again, or bring the old file back"
                )
            self._opened = opened
        return self._opened

    def _check_unchanged(self) -> None:
        """That what was read is of the file that was planned, also if it was written to since it was opened.

        A file whose time is another one is compared as a whole, once: it may have been touched, or copied back.

        Raises:
            DataFileChanged: It was rewritten.
        """
        info = self._source.info(self._file.path, self._file.name)
        found = (info.size, info.mtime_ns)
        is_same_size = info.size == self._file.size_bytes
        tells_no_time = not info.mtime_ns or not self._file.mtime_ns
        # Where it is gone, what was read is of the file that is still open.
        if found == self._unchanged or info.type == pafs.FileType.NotFound or (is_same_size and tells_no_time):
            return
        if is_same_size:
            with Text(self._source, self._file) as text:
                if text.hash_all() == self._version:
                    self._unchanged = found
                    return
        raise self._rewritten()

    def _rewritten(self) -> DataFileChanged:
        return DataFileChanged(
            f"{self._file.name} is not the file that was planned: it was rewritten since; make the dataset anew, and "
            "write new data to new files"
        )

    def _read_compressed(self, unit: Unit, columns: Sequence[str]) -> pa.Table:
        tables = []
        is_header = self._form.has_header
        with Text(self._source, self._file) as text:
            for stretch in text.stretches(self._form.records, self._form.piece_bytes):
                data, rows = stretch.data, stretch.rows
                if is_header and len(rows):
                    data, rows = data[rows[0] - stretch.offset :], rows[1:]
                    is_header = False
                if len(rows):
                    tables.append(self._parse(unit, data, columns))
        self._finish(text)
        return pa.concat_tables(tables)

    def _finish(self, text: Text) -> None:
        """After a file was read as a whole: is it the one that was planned?"""
        self.bytes_read += text.bytes_read
        if text.version != self._version:
            raise self._rewritten()

    def _parse(self, unit: Unit, data: pa.Buffer | memoryview, columns: Sequence[str]) -> pa.Table:
        return self._parsed(
            unit,
            lambda: self._form.parse(data, self._schema, columns),
            lambda: self._form.wrong_guess(data, self._schema, columns),
        )

    def _parsed(
        self, unit: Unit, parse: Callable[[], pa.Table], wrong_guess: Callable[[], str | None] = lambda: None
    ) -> pa.Table:
        try:
            return parse()
        except (pa.ArrowException, ValueError) as error:
            if (told := wrong_guess()) is not None:
                raise SchemaMismatch(f"{self._place(unit)}: {told}", field="schema") from error
            raise DataFileInvalid(
                f"{self._place(unit)}: {shortened(error)} (rows counted from there); {self._form.cure(error)}"
            ) from error

    def _place(self, unit: Unit) -> str:
        last = unit.offset + unit.num_bytes
        return (
            f"{self._file.name}, {self._form.unit_name} {unit.index} (bytes {unit.offset:,} to {last:,}, "
            f"from row {unit.first_row})"
        )

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def rows_only(num_rows: int) -> pa.Table:
    """A table without columns."""
    return pa.table({"": pa.nulls(num_rows)}).select([])
