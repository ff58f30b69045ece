"""The shared part of text formats: one scan that finds the row groups, and a reader of byte ranges.

Text does not state its number of records, so planning scans each file once, in pieces of bounded size, and gets exact
byte ranges and row counts. The scan sees every byte, so the version is a hash of all of them. Types are guessed from
the beginning of a file, because parsing everything would take as long as an epoch. A wrong guess raises
`SchemaMismatch`, not an error about damage.

A compressed file can only be read from its first byte, so it is one row group.
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
from strata.data.formats.damage import CURE
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

CODECS: Final = {".gz": "gzip", ".tgz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
"""Codecs by file name suffix."""
PIECE_BYTES: Final = 1 << 20
"""Bytes scanned at once, which fit in the processor cache."""
REQUEST_BYTES: Final = 16 << 20
"""Bytes read at once where every read is a request."""
SAMPLE_BYTES: Final = 1 << 20
"""Bytes from which types are guessed."""
RECORD_BYTES_MAX: Final = 256 << 20
UNIT_BYTES_MAX: Final = 1 << 30
"""A row group is parsed as one block, whose size pyarrow stores in 32 bits."""
BOM: Final = b"\xef\xbb\xbf"
_MAX_MESSAGE_CHARS: Final = 400


class Stretch(NamedTuple):
    """Whole lines. The next stretch overwrites `data`."""

    offset: int
    data: memoryview
    rows: npt.NDArray[np.int64]
    """The ends of records, as offsets in the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFormat(abc.ABC):
    """A `Format` without the syntax of records."""

    name = "text"
    unit_name = "byte range"
    is_typed = False
    is_keyed = False

    piece_bytes: int = PIECE_BYTES
    """Bytes scanned at once."""
    decided: frozenset[str] = field(default=frozenset(), repr=False)
    """Columns whose types the user passed: values that do not fit them count as damaged."""
    is_chosen: bool = field(default=False, repr=False)
    """Whether the user selected the columns to deliver, so that others may be dropped."""

    def informed(self, *, decided: Collection[str], is_chosen: bool) -> Self:
        return replace(self, decided=frozenset(decided), is_chosen=is_chosen)

    @property
    @abc.abstractmethod
    def records(self) -> Records: ...

    @property
    def has_header(self) -> bool:
        """Whether the first record contains the column names."""
        return False

    @abc.abstractmethod
    def cure(self, error: Exception) -> str:
        """Return what the user can do about an error of pyarrow's parser."""

    def can_retype(self, error: Exception) -> bool:  # noqa: ARG002
        """Return whether another type of the column would fix the error."""
        return True

    @abc.abstractmethod
    def guess(self, header: bytes, sample: bytes) -> pa.Schema:
        """Return the columns, from the header record (or empty bytes) and the first records after it.

        Raises:
            pa.ArrowException, ValueError: The sample cannot be parsed.
        """

    @abc.abstractmethod
    def parse(self, data: pa.Buffer | memoryview, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        """Return these columns of whole records. `schema` holds all columns of the file, in its order.

        Raises:
            pa.ArrowException, ValueError: The data cannot be parsed.
        """

    @abc.abstractmethod
    def is_sound(self, data: pa.Buffer | memoryview, schema: pa.Schema, columns: Sequence[str]) -> bool:
        """Return whether the data are valid records, whatever the types of their values."""

    def explain_wrong_guess(
        self, data: pa.Buffer | memoryview, schema: pa.Schema, columns: Sequence[str]
    ) -> str | None:
        """Return why `parse` fails, and the cure, if records are intact but differ from the guessed schema."""
        if not self.is_sound(data, schema, columns):
            return None
        for name in columns:
            try:
                self.parse(data, schema, [name])
            except (pa.ArrowException, ValueError) as error:
                if name not in self.decided:
                    advice = f"declare its type with schema=pa.schema([({name!r}, …)]). Otherwise "
                    return (
                        f"the type of column {name!r} was guessed as {schema.field(name).type} from the first "
                        f"{SAMPLE_BYTES:,} bytes of each file, but differs here ({shorten(error)}); "
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
        with_nulls: bool = True,  # noqa: ARG002  text has no null counts
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
        where = f"{file.name}: the first {len(header) + len(sample):,} bytes"
        try:
            schema = self.guess(header, sample)
            _check_names(schema.names)
            found = self.parse(memoryview(sample), schema, schema.names).num_rows if num_rows else 0
        except (pa.ArrowException, ValueError) as error:
            raise DataFileInvalid(
                f"{where} are not {self.name}: {shorten(error)}; {self.cure(error)}", path=file.path
            ) from error
        if schema.names and found != num_rows:
            raise DataFileInvalid(
                f"{where} are {num_rows} lines with {found} records; write one {self.name} record per line",
                path=file.path,
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
        """Return SOME for every row group: text has no statistics."""
        return [Presence.SOME] * len(facts.units)

    def open(self, source: Source, file: DataFile, schema: pa.Schema, version: str) -> TextReader:
        return TextReader(self, source, file, schema, version)


def _check_names(names: list[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two columns are named {twice!r}: rename one, or pass column_names")


def _units(file: DataFile, cuts: list[tuple[int, int, int]], *, is_compressed: bool) -> tuple[Unit, ...]:
    if is_compressed and cuts:
        num_rows = sum(rows for _, _, rows in cuts)
        return (Unit(index=0, num_rows=num_rows, first_row=0, offset=0, num_bytes=file.size_bytes),)
    units, first_row = [], 0
    for index, (first, last, num_rows) in enumerate(cuts):
        units.append(Unit(index, num_rows, first_row, first, last - first))
        first_row += num_rows
    return tuple(units)


def shorten(error: Exception) -> str:
    """Return the text of an error, cut to fit in a message: pyarrow may quote a whole record."""
    text = str(error).strip()
    return text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[:_MAX_MESSAGE_CHARS]}…"


def codec_of(file: DataFile) -> str | None:
    return next((codec for suffix, codec in CODECS.items() if file.name.lower().endswith(suffix)), None)


class Text:
    """A file read from front to back, decompressed by its suffix. The stored bytes are counted and hashed."""

    def __init__(self, source: Source, file: DataFile) -> None:
        self.codec = codec_of(file)
        self.first = 0
        """The offset of the text: after the byte order mark, if any."""
        self._file = file
        self._raw = _StoredBytes(source.open(file), file.name)
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
        """Fill the buffer as far as the file reaches, and return the number of bytes.

        Raises:
            DataFileInvalid: The file cannot be decompressed.
        """
        filled = 0
        while filled < len(buffer):
            try:
                taken = self._stream.readinto(buffer[filled:])
            except StrataError:
                raise
            except (OSError, pa.ArrowException) as error:
                raise DataFileInvalid(
                    f"{self._file.name} is not a complete {self.codec} file: {shorten(error)}; copy it again, "
                    f"or rename it if it is not compressed",
                    path=self._file.path,
                ) from error
            if not taken:
                break
            filled += taken
        return filled

    def hash_all(self) -> str:
        """Read the rest of the stored bytes and return the version of the file."""
        piece = memoryview(bytearray(PIECE_BYTES))
        while self._raw.readinto(piece):
            pass
        return self.version

    def stretches(self, records: Records, piece_bytes: int) -> Iterator[Stretch]:
        """Yield the text in stretches of whole lines.

        Raises:
            DataFileInvalid: A record exceeds the limit, or the file cannot be decompressed.
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
                buffer = self._grow(buffer, offset)

    def _grow(self, buffer: bytearray, offset: int) -> bytearray:
        if len(buffer) >= RECORD_BYTES_MAX:
            raise DataFileInvalid(
                f"{self._file.name}: the record that begins at byte {offset:,} does not end within "
                f"{RECORD_BYTES_MAX >> 20} MiB; check for an unclosed quote, or another format",
                path=self._file.path,
            )
        return buffer + bytearray(len(buffer))


def _drop(buffer: bytearray, first: int, size: int) -> int:
    """Move the bytes from `first` to `size` to the front, and return their number."""
    view = memoryview(buffer)
    view[: size - first] = view[first:size]
    return size - first


class _StoredBytes(io.RawIOBase):
    """The stored bytes of a file, counted and hashed. Errors are translated even when pyarrow is the caller."""

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
    """The `Reader` of text formats."""

    def __init__(self, form: TextFormat, source: Source, file: DataFile, schema: pa.Schema, version: str) -> None:
        self.bytes_read = 0
        self._form = form
        self._source = source
        self._file = file
        self._schema = schema
        self._version = version
        self._opened: pa.NativeFile | None = None
        self._unchanged = (file.size_bytes, file.mtime_ns)
        """Size and modification time when the file was last known to match the plan."""

    def read(self, unit: Unit, columns: Sequence[str]) -> pa.Table:
        unknown = [name for name in columns if name not in self._schema.names]
        if unknown:
            raise SchemaMismatch(f"{self._file.name} has no column {unknown[0]!r}; it has {self._schema.names}")
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
            raise DataFileInvalid(
                f"{self._describe(unit)}: {table.num_rows} records, but {unit.num_rows} were planned; {CURE}",
                path=self._file.path,
                row_group=unit.index,
            )
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
                    f"{self._file.name} has {size_bytes:,} bytes, but had {self._file.size_bytes:,} when it was "
                    "planned; create the dataset again, or restore the old file",
                    path=self._file.path,
                )
            self._opened = opened
        return self._opened

    def _check_unchanged(self) -> None:
        """Check that the rows belong to the planned file, even if it was rewritten after it was opened.

        A file with another modification time is compared as a whole, once: it may only have been touched or copied.

        Raises:
            DataFileChanged: The file was rewritten.
        """
        info = self._source.info(self._file.path, self._file.name)
        found = (info.size, info.mtime_ns)
        is_same_size = info.size == self._file.size_bytes
        lacks_mtime = not info.mtime_ns or not self._file.mtime_ns
        # If the file was deleted, the rows came from the file that is still open.
        if found == self._unchanged or info.type == pafs.FileType.NotFound or (is_same_size and lacks_mtime):
            return
        if is_same_size:
            with Text(self._source, self._file) as text:
                if text.hash_all() == self._version:
                    self._unchanged = found
                    return
        raise self._rewritten()

    def _rewritten(self) -> DataFileChanged:
        return DataFileChanged(
            f"{self._file.name} was rewritten since it was planned; create the dataset again, and write new data to "
            "new files",
            path=self._file.path,
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
        """Check the version of a file that was read as a whole."""
        self.bytes_read += text.bytes_read
        if text.version != self._version:
            raise self._rewritten()

    def _parse(self, unit: Unit, data: pa.Buffer | memoryview, columns: Sequence[str]) -> pa.Table:
        return self._translate_parse_errors(
            unit,
            lambda: self._form.parse(data, self._schema, columns),
            lambda: self._form.explain_wrong_guess(data, self._schema, columns),
        )

    def _translate_parse_errors(
        self, unit: Unit, parse: Callable[[], pa.Table], explain_wrong_guess: Callable[[], str | None] = lambda: None
    ) -> pa.Table:
        try:
            return parse()
        except (pa.ArrowException, ValueError) as error:
            if (reason := explain_wrong_guess()) is not None:
                raise SchemaMismatch(f"{self._describe(unit)}: {reason}", field="schema") from error
            raise DataFileInvalid(
                f"{self._describe(unit)}: {shorten(error)} (rows counted from there); {self._form.cure(error)}",
                path=self._file.path,
                row_group=unit.index,
            ) from error

    def _describe(self, unit: Unit) -> str:
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
    """Return a table without columns."""
    return pa.table({"": pa.nulls(num_rows)}).select([])
