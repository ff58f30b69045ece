"""Bytes out of a checkpoint's files: in whole chunks, decoded, and compared with their hashes before anybody sees them.

Whatever lies in a file (a slice, the indices of a patch, its data) is a `Stored`: chunks one after another, with a hash
each. Those that lie next to each other are read together, as a `Window`: thousands of small ones are not to become
thousands of requests.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_128_hexdigest

from strata.checkpoint.format import encoding as decoding
from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.format.layout import ALIGNMENT
from strata.checkpoint.load.warm_memory import LARGE_BYTES, fresh_memory
from strata.errors import CheckpointCorrupt, CheckpointInvalid, CheckpointMissing, ObjectMissing, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from strata.checkpoint.format.buffers import Bytes
    from strata.checkpoint.format.manifest import DataFile, Manifest, Patch, Slice, TensorEntry
    from strata.storage import Store, Watch

WINDOW_BYTES = 16 << 20
"""Small chunks are read together up to so many; a chunk that has more is read alone."""
GAP_BYTES = 1 << 20
"""What is less than this apart is read together."""
_KEPT_WINDOWS = 6


@dataclass(frozen=True)
class Stored:
    """Bytes of a tensor in a file; `num_bytes` once they are decoded."""

    tensor: str
    what: str
    """Which bytes of it, for messages: empty for a slice itself."""
    file: int
    offset: int
    num_bytes: int
    chunk_bytes: int
    hashes: tuple[str, ...]
    encoding: str
    frames: tuple[int, ...]

    def decoded(self, number: int) -> tuple[int, int]:
        """Where a chunk begins and ends among the decoded bytes."""
        start = number * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.num_bytes)

    def in_file(self, number: int) -> tuple[int, int]:
        """Where it begins and ends in the file."""
        if self.encoding:
            return self._frame_ends[number], self._frame_ends[number + 1]
        start, end = self.decoded(number)
        return self.offset + start, self.offset + end

    @cached_property
    def _frame_ends(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self.frames, initial=self.offset))

    def chunks(self, start: int = 0, end: int | None = None) -> range:
        """The numbers of those that hold the decoded bytes from `start` to `end`."""
        end = self.num_bytes if end is None else end
        return range(start // self.chunk_bytes, -(-end // self.chunk_bytes)) if start < end else range(0)


def of_slice(manifest: Manifest, tensor: TensorEntry, part: Slice) -> Stored:
    num_bytes = math.prod(part.shape) * BY_NAME[tensor.dtype].itemsize
    places = (part.file, part.offset, num_bytes, manifest.chunk_bytes)
    return Stored(tensor.name, "", *places, part.hashes, part.encoding, part.frames)


def files_of(tensors: Iterable[TensorEntry]) -> set[int]:
    """The numbers of the files that hold them, and their patches."""
    parts = [part for tensor in tensors for part in tensor.slices]
    return {*(part.file for part in parts), *(patch.file for part in parts for patch in part.patches)}


def of_patch(manifest: Manifest, tensor: TensorEntry, patch: Patch) -> tuple[Stored, Stored]:
    """Its indices and its data."""
    places = (patch.file, patch.index_offset, patch.num_units * patch.index_bytes, manifest.chunk_bytes)
    indices = Stored(tensor.name, "the indices of a patch of ", *places, patch.index_hashes, "", ())
    places = (patch.file, patch.offset, patch.num_bytes, manifest.chunk_bytes)
    return indices, Stored(tensor.name, "a patch of ", *places, patch.hashes, patch.encoding, patch.frames)


# -- files ---------------------------------------------------------------------------------------------------------


class Source:
    """The files of one checkpoint, its bases' included; what is wrong with one is told in its name."""

    def __init__(self, store: Store, manifest: Manifest, watch: Watch) -> None:
        self._store = store
        self._manifest = manifest
        self._watch = watch

    def require(self, files: Iterable[int]) -> None:
        """Before memory is taken for what they claim to hold.

        Raises:
            CheckpointMissing: One is not there.
            CheckpointInvalid: One is shorter or longer than it was.
        """
        for number in sorted(set(files)):
            self._require(self._manifest.files[number])

    def _require(self, data_file: DataFile) -> None:
        try:
            size = self._store.size(key_of(self._manifest, data_file))
        except ObjectMissing:
            raise self._missing(data_file) from None
        if size != data_file.size_bytes:
            raise CheckpointInvalid(
                f"{self.describe(data_file)} has {size} bytes, expected {data_file.size_bytes}; "
                "it was cut off or replaced: copy it again, or load another checkpoint"
            )

    def fill(self, file: int, offset: int, out: memoryview) -> None:
        data_file = self._manifest.files[file]
        self._watch.check()
        try:
            self._store.read_into(key_of(self._manifest, data_file), offset, out)
        except ObjectMissing:
            raise self._missing(data_file) from None
        except StorageError:
            self._require(data_file)  # too short is the checkpoint's fault, all else the store's
            raise
        self._watch.advance(out.nbytes)

    def read(self, file: int, start: int, end: int) -> memoryview:
        """Into memory of its own, which is aligned as the file is, so that a disk can write into it directly."""
        begin = start - start % ALIGNMENT if end - start >= LARGE_BYTES else start
        memory = fresh_memory(end - begin)
        self.fill(file, begin, memory)
        return memory[start - begin :]

    def check(self, stored: Stored, number: int, data: memoryview) -> None:
        """
        Raises:
            CheckpointCorrupt: A chunk is not what was written.
        """
        found, expected = xxh3_128_hexdigest(data), stored.hashes[number]
        if found != expected:
            raise CheckpointCorrupt(f"{self.where(stored, number)}: the hash is {found}, expected {expected}")

    def decoded(self, stored: Stored, number: int, raw: memoryview, out: memoryview | None = None) -> memoryview:
        """A chunk as it was before it was encoded, and checked; in `out`, if it is given and there is something to do.

        Raises:
            CheckpointCorrupt: It is not what was written.
        """
        data = raw
        if stored.encoding:
            start, end = stored.decoded(number)
            data = fresh_memory(end - start) if out is None else out
            problem = decoding.decompress(raw, data)
            if problem:
                raise CheckpointCorrupt(f"{self.where(stored, number)}: {problem}")
        self.check(stored, number, data)
        return data

    def where(self, stored: Stored, number: int) -> str:
        start, end = stored.in_file(number)
        data_file = self._manifest.files[stored.file]
        return f"{stored.what}tensor {stored.tensor!r} in {data_file.path}, bytes {start} to {end}"

    def describe(self, data_file: DataFile) -> str:
        base, _, name = data_file.path.rpartition("/")
        of = (
            f"of {base}, which checkpoint {self._manifest.id} builds on,"
            if base
            else f"of checkpoint {self._manifest.id}"
        )
        return f"{name} {of}"

    def _missing(self, data_file: DataFile) -> CheckpointMissing:
        base, _, name = data_file.path.rpartition("/")
        if base:
            return CheckpointMissing(
                f"checkpoint {self._manifest.id} builds on {base}, whose file {name} is not there; was {base} removed, "
                "or not copied along? put it back beside this one, or load another checkpoint"
            )
        return CheckpointMissing(
            f"checkpoint {self._manifest.id} has no file {name}; was it removed? load another checkpoint"
        )


def key_of(manifest: Manifest, data_file: DataFile) -> str:
    """A path with a directory is of the base that an incremental checkpoint refers to."""
    return data_file.path if "/" in data_file.path else f"{manifest.id}/{data_file.path}"


# -- windows -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Window:
    """What is read at once: chunks that lie next to each other in one file."""

    file: int
    start: int
    end: int
    chunks: tuple[tuple[Stored, int], ...]


def windows(chunks: Iterable[tuple[Stored, int]]) -> Iterator[Window]:
    """In the order of the files."""
    places = sorted(
        ((stored.file, *stored.in_file(number), i, stored, number) for i, (stored, number) in enumerate(chunks)),
        key=lambda place: place[:4],
    )
    near: list[tuple[Stored, int]] = []
    file = start = end = 0
    for chunk_file, chunk_start, chunk_end, _, stored, number in places:
        apart = chunk_file != file or chunk_start - end > GAP_BYTES or max(end, chunk_end) - start > WINDOW_BYTES
        if near and apart:
            yield Window(file, start, end, tuple(near))
            near = []
        if not near:
            file, start, end = chunk_file, chunk_start, chunk_end
        end = max(end, chunk_end)
        near.append((stored, number))
    if near:
        yield Window(file, start, end, tuple(near))


class Cache:
    """The chunks of some `Stored`s, in any order and from several threads; the last few windows are kept."""

    def __init__(self, source: Source, wanted: Iterable[Stored]) -> None:
        self.source = source
        found = windows((stored, number) for stored in wanted for number in stored.chunks())
        self._window_of = {
            (window.file, *stored.in_file(number)): window for window in found for stored, number in window.chunks
        }
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, int], Future[memoryview]] = OrderedDict()

    def decoded(self, stored: Stored, number: int) -> memoryview:
        start, end = stored.in_file(number)
        window = self._window_of[stored.file, start, end]
        data = self._read(window)
        return self.source.decoded(stored, number, data[start - window.start : end - window.start])

    def _read(self, window: Window) -> memoryview:
        key = (window.file, window.start)
        with self._lock:
            found = self._kept.get(key)
            ours = found is None
            if found is None:
                found = self._kept[key] = Future()
                if len(self._kept) > _KEPT_WINDOWS:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
        if ours:
            try:
                found.set_result(self.source.read(window.file, window.start, window.end))
            except BaseException as error:
                found.set_exception(error)
                raise
        return found.result()


class Reader:
    """The decoded bytes of one `Stored`, a range at a time; the last chunk is kept for the next range."""

    def __init__(self, cache: Cache, stored: Stored) -> None:
        self._cache = cache
        self._stored = stored
        self._number = -1
        self._chunk = memoryview(b"")

    def read(self, start: int, end: int) -> Bytes:
        """Not to be written to: it may be what the next range begins with."""
        numbers = self._stored.chunks(start, end)
        if len(numbers) == 1:
            return self._part(numbers[0], start, end)
        whole = np.empty(end - start, np.uint8)
        for number in numbers:
            first, last = self._stored.decoded(number)
            first, last = max(first, start), min(last, end)
            whole[first - start : last - start] = self._part(number, first, last)
        return whole

    def _part(self, number: int, start: int, end: int) -> Bytes:
        if number != self._number:
            self._chunk = self._cache.decoded(self._stored, number)
            self._number = number
        first, _ = self._stored.decoded(number)
        return np.frombuffer(self._chunk[start - first : end - first], np.uint8)
