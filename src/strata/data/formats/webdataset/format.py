"""The WebDataset format: a row is a sample, a row group a run of consecutive samples, a column an extension.

All columns but `__key__` are binary; decoding JPEG, JSON and the like happens on batches (`batch/decoders.py`). A row
group is read in one request and walked again, so headers are verified when their samples are delivered. All parts of a
column are then copied by one native call.

A compressed shard is one row group, see `docs/design/data.md`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from strata.data.arrow_types import of_numbers
from strata.data.filter.expression import Presence
from strata.data.formats.base import FileFacts, Unit
from strata.data.formats.damage import CURE, NUM_HEAD_BYTES, wrong_format
from strata.data.formats.text import Text, codec_of, rows_only
from strata.data.formats.webdataset import index
from strata.data.formats.webdataset.headers import BLOCK_BYTES, TarDamage, is_tar, walk
from strata.data.formats.webdataset.regular import find_regular
from strata.data.formats.webdataset.samples import KEY, cut, outline, parts, split_name
from strata.data.memory import pool
from strata.data.source.source import translate_errors
from strata.errors import DataFileChanged, DataFileInvalid

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy.typing as npt

    from strata.data.filter.expression import Node
    from strata.data.formats.webdataset.regular import Regular
    from strata.data.formats.webdataset.samples import ShardOutline
    from strata.data.source.source import DataFile, Source

MAX_UNPACKED_BYTES: Final = 2 << 30
"""The limit of a compressed shard, unpacked, and of a row group: both are held in memory."""
MAX_UNIT_BYTES: Final = 4 << 20
"""The size of a row group. Its parts are copied while they are in the processor's cache, and a request to an object
store of this size is still efficient."""
SMALL_SAMPLE_BYTES: Final = 128 << 10
"""Average size of the samples of a row group up to which all headers are looked for at once. Every block is looked at,
so large samples are faster to walk."""
PIECE_BYTES: Final = 1 << 20
"""Bytes that are unpacked at once."""
LOCAL_WINDOW_BYTES: Final = (1 << 10, 1 << 20)
REMOTE_WINDOW_BYTES: Final = (64 << 10, 16 << 20)
"""The first and the largest read of a walk, which grow while headers are close to each other."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebDatasetFormat:
    name: ClassVar[str] = "webdataset"
    unit_name: ClassVar[str] = "sample range"
    is_typed: ClassVar[bool] = False
    """The columns are found, not declared; a row group is one range of bytes, as in text."""

    required: tuple[str, ...] = ()
    """Extensions that a sample must have to be a row."""

    def requiring(self, parts: Sequence[str]) -> WebDatasetFormat:
        return replace(self, required=tuple(parts))

    def inspect(
        self,
        source: Source,
        file: DataFile,
        *,
        columns: Sequence[str] | None,  # noqa: ARG002  a row group is read whole
        unit_bytes: int,
        with_nulls: bool = True,  # noqa: ARG002  they are free here
    ) -> FileFacts:
        found = find_outline(source, file)
        kept = found.complete(self.required)
        is_compressed = codec_of(file) is not None
        try:
            size = MAX_UNPACKED_BYTES if is_compressed else max(1, min(unit_bytes, MAX_UNIT_BYTES))
            units = cut(found, size, self.required)
        except TarDamage as error:
            raise _invalid(file, error) from error
        if is_compressed and units:
            units = (Unit(0, int(kept.sum()), 0, 0, file.size_bytes),)
            log.info(
                "%s is compressed: its %s samples are one row group, %s bytes unpacked, and resuming inside it unpacks "
                "it again",
                file.name,
                f"{units[0].num_rows:,}",
                f"{int(found.starts[-1]):,}",
            )
        names = [KEY, *found.extensions]
        nulls = {name: int((kept & ~found.has(name)).sum()) for name in found.extensions}
        types = [pa.string(), *(pa.large_binary() for _ in found.extensions)]
        return FileFacts(
            pa.schema(zip(names, types, strict=True)),
            units,
            found.version,
            {KEY: 0, **nulls},
            num_incomplete=int((~kept).sum()),
        )

    def presence(
        self,
        source: Source,  # noqa: ARG002
        file: DataFile,  # noqa: ARG002
        facts: FileFacts,
        condition: Node,  # noqa: ARG002
        schema: pa.Schema,  # noqa: ARG002
    ) -> list[Presence]:
        """Return SOME for every row group: tar has no statistics."""
        return [Presence.SOME] * len(facts.units)

    def open(
        self,
        source: Source,
        file: DataFile,
        schema: pa.Schema,  # noqa: ARG002
        version: str,
    ) -> WebDatasetReader:
        return WebDatasetReader(self, source, file, version)


def find_outline(source: Source, file: DataFile, *, uses_index: bool = True) -> ShardOutline:
    """Return where the samples of a shard are: from its index, or by walking it.

    Raises:
        DataFileInvalid: It is damaged, or not a tar; the message names the offset.
        DataFileMissing, StorageError: It cannot be read.
    """
    if codec_of(file) is not None:
        return _outline_compressed(source, file)
    with source.open(file) as opened:
        window = _ReadAhead(source, file, opened)
        if uses_index and (found := index.read(source, file, window.read_at)) is not None:
            return found
        is_cut = not file.size_bytes or file.size_bytes % BLOCK_BYTES > 0
        head = window.read_at(0, BLOCK_BYTES)
        if not is_tar(head) if any(head) else is_cut:
            raise wrong_format(file, file.size_bytes, head[:NUM_HEAD_BYTES], "a webdataset")
        try:
            found = outline(window.read_at, file.size_bytes)
        except TarDamage as error:
            raise _invalid(file, error) from error
        if is_cut:
            cut_off = TarDamage(file.size_bytes, "the file does not end with a whole block: it was truncated")
            raise _invalid(file, cut_off)
        return found


def find_index(source: Source, file: DataFile) -> ShardOutline | None:
    """Return where the samples of an uncompressed shard are, if it has a valid index."""
    with source.open(file) as opened:
        return index.read(source, file, _ReadAhead(source, file, opened).read_at)


def _outline_compressed(source: Source, file: DataFile) -> ShardOutline:
    with Text(source, file) as text:
        stream = _Unpacked(text)
        try:
            found = outline(stream.read_at, MAX_UNPACKED_BYTES)
        except TarDamage as error:
            raise _invalid(file, error, is_compressed=True) from error
        stream.finish()
        return replace(found, version=text.hash_all())


class _ReadAhead:
    """Reads a file in windows that grow while the reads are close to each other."""

    def __init__(self, source: Source, file: DataFile, opened: pa.NativeFile) -> None:
        self._opened = opened
        self._name = file.name
        self._size_bytes = file.size_bytes
        self._counter = source.counter
        self._smallest, self._largest = REMOTE_WINDOW_BYTES if source.has_round_trips else LOCAL_WINDOW_BYTES
        self._num_bytes = self._smallest
        self._first = 0
        self._data = b""

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        begin = offset - self._first
        if begin >= 0 and begin + num_bytes <= len(self._data):
            return self._data[begin : begin + num_bytes]
        gap = begin - len(self._data)
        is_near = -len(self._data) <= gap <= 16 * self._smallest
        self._num_bytes = min(2 * self._num_bytes, self._largest) if is_near else self._smallest
        wanted = min(max(num_bytes, self._num_bytes), max(0, self._size_bytes - offset))
        with translate_errors(self._name):
            self._data = self._opened.read_at(wanted, offset) if wanted else b""
        self._counter.add(len(self._data))
        self._first = offset
        return self._data[:num_bytes]


class _Unpacked:
    """Unpacks a stream from front to back, and keeps only what may be read again."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._first = 0
        self._data = b""
        self._piece = memoryview(bytearray(PIECE_BYTES))

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        while offset + num_bytes > self._first + len(self._data) and self._more(offset):
            pass
        begin = max(0, offset - self._first)
        return self._data[begin : begin + num_bytes]

    def finish(self) -> None:
        """Unpack the rest, so that damage in it is found, and a bomb ends here."""
        while self._more(self._first + len(self._data)):
            pass

    def _more(self, offset: int) -> bool:
        """Unpack one more piece, and drop what lies before the offset."""
        filled = self._text.fill(self._piece)
        done = min(len(self._data), max(0, offset - self._first))
        self._first += done
        self._data = self._data[done:] + bytes(self._piece[:filled])
        if self._first + len(self._data) > MAX_UNPACKED_BYTES:
            raise TarDamage(
                self._first,
                f"the shard has more than {MAX_UNPACKED_BYTES >> 30} GiB unpacked; write smaller shards, or do not "
                "compress them",
            )
        return filled > 0


class WebDatasetReader:
    """The `Reader` of shards. A part that no sample of a shard has is null in all."""

    def __init__(self, form: WebDatasetFormat, source: Source, file: DataFile, version: str) -> None:
        self.bytes_read = 0
        self._form = form
        self._source = source
        self._file = file
        self._version = version
        self._opened: pa.NativeFile | None = None
        self._unchanged = (file.size_bytes, file.mtime_ns)
        """Size and modification time when the file was last known to match the plan."""

    def read(self, unit: Unit, columns: Sequence[str]) -> pa.Table:
        if not columns:
            return rows_only(unit.num_rows)
        try:
            if codec_of(self._file) is None:
                data = self._load(unit)
                is_small = unit.num_bytes <= unit.num_rows * SMALL_SAMPLE_BYTES
                regular = find_regular(data) if is_small else None
                found = _LoadedSamples(data, unit.offset, self._form.required, has_marker=False, regular=regular)
            else:
                data = self._unpack()
                found = _LoadedSamples(data, 0, self._form.required, has_marker=True)
        except TarDamage as error:
            self._check_unchanged()
            raise DataFileInvalid(
                f"{self._describe(unit)}: {error}; {CURE}", path=self._file.path, row_group=unit.index
            ) from error
        if self._source.is_local or len(found.keys) != unit.num_rows:
            self._check_unchanged()
        if len(found.keys) != unit.num_rows:
            raise DataFileInvalid(
                f"{self._describe(unit)}: {len(found.keys):,} samples, but {unit.num_rows:,} were planned; {CURE}",
                path=self._file.path,
                row_group=unit.index,
            )
        return found.table(columns)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _load(self, unit: Unit) -> pa.Buffer:
        if unit.num_bytes > MAX_UNPACKED_BYTES:
            raise TarDamage(
                unit.offset,
                f"a sample of {unit.num_bytes:,} bytes; the limit is {MAX_UNPACKED_BYTES:,}, because it is held in "
                "memory",
            )
        if self._opened is None:
            self._opened = self._source.open(self._file)
        memory = pa.allocate_buffer(unit.num_bytes, memory_pool=pool())
        with translate_errors(self._file.name):
            size_bytes = self._opened.size()
            if size_bytes != self._file.size_bytes:
                raise self._rewritten()
            self._opened.seek(unit.offset)
            taken = self._opened.readinto(memoryview(memory).cast("B"))
        self.bytes_read += taken
        self._source.counter.add(taken)
        if taken != unit.num_bytes:
            raise DataFileChanged(
                f"{self._file.name} was truncated while it was read: {taken:,} of {unit.num_bytes:,} bytes at "
                f"{unit.offset:,}; {CURE}",
                path=self._file.path,
            )
        return memory

    def _unpack(self) -> pa.Buffer:
        with Text(self._source, self._file) as text, pa.BufferOutputStream(memory_pool=pool()) as unpacked:
            piece = memoryview(bytearray(PIECE_BYTES))
            while filled := text.fill(piece):
                unpacked.write(piece[:filled])
                if unpacked.tell() > MAX_UNPACKED_BYTES:
                    raise self._rewritten()
            version = text.hash_all()
            self.bytes_read += text.bytes_read
            self._source.counter.add(text.bytes_read)
            if version != self._version:
                raise self._rewritten()
            return unpacked.getvalue()

    def _check_unchanged(self) -> None:
        """Check that the rows belong to the planned file, even if it was rewritten after it was opened.

        A file with another modification time is walked once: it may only have been touched or copied.

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
            try:
                version = find_outline(self._source, self._file, uses_index=False).version
            except DataFileInvalid as error:
                raise self._rewritten() from error
            if version == self._version:
                self._unchanged = found
                return
        raise self._rewritten()

    def _rewritten(self) -> DataFileChanged:
        return DataFileChanged(
            f"{self._file.name} was rewritten since it was planned; create the dataset again, and write new data to "
            "new files",
            path=self._file.path,
        )

    def _describe(self, unit: Unit) -> str:
        last = unit.offset + unit.num_bytes
        return (
            f"{self._file.name}, {self._form.unit_name} {unit.index} (bytes {unit.offset:,} to {last:,}, "
            f"from row {unit.first_row})"
        )


class _LoadedSamples:
    """The parts of the samples in a buffer."""

    def __init__(
        self,
        data: pa.Buffer,
        offset: int,
        required: Collection[str],
        *,
        has_marker: bool,
        regular: Regular | None = None,
    ) -> None:
        """`offset`: the offset of the buffer in the file, for errors. `regular`: its members, if they are known.

        Raises:
            TarDamage: The buffer is not a run of samples.
        """
        self._data = data
        self.keys: list[str] = []
        self._bounds: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        """Where each part begins and ends in the buffer, one after the other."""
        self._places: dict[str, tuple[list[int], list[int]]] = {}
        """For each extension: rows, and for each the number of its part."""
        if regular is None or not self._group(regular):
            self._walk(offset, has_marker=has_marker)
        if required:
            self._keep(required)

    def _group(self, regular: Regular) -> bool:
        """Group members whose headers are verified; return whether the samples are as they should be."""
        row, current = -1, None
        places: dict[str, tuple[list[int], list[int]]] = {}
        keys: list[str] = []
        for number, name in enumerate(regular.names):
            split = split_name(name)
            if split is None:
                continue
            key, extension = split
            if key != current:
                row, current = row + 1, key
                keys.append(key)
            if extension not in places:
                places[extension] = ([], [])
            rows, numbers = places[extension]
            if rows and rows[-1] == row:
                return False  # the sample has this part twice, and the walk raises the error
            rows.append(row)
            numbers.append(2 * number)
        if KEY in places:
            return False
        self.keys, self._bounds, self._places = keys, regular.bounds, places
        return True

    def _walk(self, offset: int, *, has_marker: bool) -> None:
        data = self._data
        bounds: list[int] = []
        view = memoryview(data)

        def read_at(position: int, num_bytes: int) -> bytes:
            return bytes(view[position - offset : position - offset + num_bytes])

        row = -1
        members = walk(read_at, offset, offset + data.size, has_marker=has_marker)
        for is_first, key, extension, member in parts(members):
            if is_first:
                row += 1
                self.keys.append(key)
            if extension not in self._places:
                self._places[extension] = ([], [])
            rows, numbers = self._places[extension]
            rows.append(row)
            numbers.append(len(bounds))
            begin = member.offset - offset
            bounds += (begin, begin + member.num_bytes)
        self._bounds = np.array(bounds, np.int64)

    def table(self, columns: Sequence[str]) -> pa.Table:
        # The parts, and the gaps between them, as one array of binaries: its rows at even places are the parts.
        bounds = self._bounds
        everything = pa.Array.from_buffers(
            pa.large_binary(), max(0, len(bounds) - 1), [None, pa.py_buffer(bounds), self._data]
        )
        arrays = [
            pa.array(self.keys, pa.string()) if name == KEY else self._column(name, everything) for name in columns
        ]
        return pa.Table.from_arrays(arrays, names=list(columns))

    def _column(self, extension: str, everything: pa.Array) -> pa.Array:
        num_rows = len(self.keys)
        rows, numbers = self._places.get(extension, ((), ()))
        if len(rows) == num_rows:
            taken = of_numbers(np.array(numbers, np.int64), pa.int64())
        else:
            places: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
            is_missing = np.ones(num_rows, np.bool_)
            places[list(rows)], is_missing[list(rows)] = numbers, False
            taken = pa.array(places, mask=is_missing)
        return pc.take(everything, taken, boundscheck=False, memory_pool=pool())

    def _keep(self, required: Collection[str]) -> None:
        """Drop samples that lack a required part."""
        wanted = [set(self._places[name][0]) if name in self._places else set() for name in required if name != KEY]
        kept = sorted(set(range(len(self.keys))).intersection(*wanted))
        if len(kept) == len(self.keys):
            return
        new = {old: place for place, old in enumerate(kept)}
        self.keys = [self.keys[old] for old in kept]
        for name, (rows, numbers) in self._places.items():
            pairs = [(new[row], number) for row, number in zip(rows, numbers, strict=True) if row in new]
            self._places[name] = ([row for row, _ in pairs], [number for _, number in pairs])


def _invalid(file: DataFile, error: TarDamage, *, is_compressed: bool = False) -> DataFileInvalid:
    unpacked = " unpacked" if is_compressed else ""
    return DataFileInvalid(f"{file.name},{unpacked} {error}; {CURE}", path=file.path)
