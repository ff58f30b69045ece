"""Read the files of a checkpoint in whole chunks, decode them, and compare them with their hashes.

Everything in a file (a slice, the indices of a patch, its data) is a `Stored`: consecutive chunks, each with a hash.
Neighbouring chunks are read together as a `Window`, so that thousands of small chunks do not become thousands of
requests. Patches are applied a batch of units at a time, so that they need little memory however much has changed.

Fresh memory is touched by another thread before it is read into: a disk that bypasses the page cache writes into it
directly and would wait while the kernel clears page after page, which takes longer than the read. Huge pages make that
six times faster, except on virtual machines that return unused huge pages to their host; `Warmer` measures it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_128_hexdigest

from strata.checkpoint.format import buffers
from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.format.layout import ALIGNMENT
from strata.errors import (
    CheckpointAborted,
    CheckpointCorrupt,
    CheckpointInvalid,
    CheckpointMissing,
    ObjectMissing,
    StorageError,
    TransferCancelled,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from strata.checkpoint.format.buffers import Bytes
    from strata.checkpoint.format.manifest import DataFile, Manifest, Patch, Slice, TensorEntry
    from strata.storage import Store, Watch

    Indices = np.ndarray[Any, np.dtype[np.int64]]

WINDOW_BYTES = 16 << 20
"""Small chunks are read together up to this size; a larger chunk is read alone."""
GAP_BYTES = 1 << 20
"""Chunks with a smaller gap between them are read together."""
_KEPT_WINDOWS = 6
BATCH_BYTES = 8 << 20
"""The size of the units that are patched at a time."""
LARGE_BYTES = 4 << 20
"""Smaller memory is not worth page alignment."""
_STEP_BYTES = 4 << 20
_SLOW_S = 0.003
"""CPU time for a step with small pages; huge pages take a tenth of it."""
_MAX_SLOW = 4


@dataclass(frozen=True)
class Stored:
    """Bytes of a tensor in a file, in chunks; `num_bytes` is their decoded size."""

    tensor: str
    what: str
    """Which bytes, for messages; empty for the slice itself."""
    file: int
    offset: int
    num_bytes: int
    chunk_bytes: int
    hashes: tuple[str, ...]
    encoding: str
    frames: tuple[int, ...]

    def decoded(self, number: int) -> tuple[int, int]:
        """Return the start and end of a chunk in the decoded bytes."""
        start = number * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.num_bytes)

    def in_file(self, number: int) -> tuple[int, int]:
        """Return the start and end of a chunk in the file."""
        if self.encoding:
            return self._frame_ends[number], self._frame_ends[number + 1]
        start, end = self.decoded(number)
        return self.offset + start, self.offset + end

    @cached_property
    def _frame_ends(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self.frames, initial=self.offset))

    def chunks(self, start: int = 0, end: int | None = None) -> range:
        """Return the chunks that hold the decoded bytes from `start` to `end`."""
        end = self.num_bytes if end is None else end
        return range(start // self.chunk_bytes, -(-end // self.chunk_bytes)) if start < end else range(0)


def of_slice(manifest: Manifest, tensor: TensorEntry, part: Slice) -> Stored:
    """Return the stored bytes of a slice, without its patches."""
    num_bytes = math.prod(part.shape) * BY_NAME[tensor.dtype].itemsize
    places = (part.file, part.offset, num_bytes, manifest.chunk_bytes)
    return Stored(tensor.name, "", *places, part.hashes, part.encoding, part.frames)


def files_of(tensors: Iterable[TensorEntry]) -> set[int]:
    """Return the indices of the files that hold these tensors and their patches."""
    parts = [part for tensor in tensors for part in tensor.slices]
    return {*(part.file for part in parts), *(patch.file for part in parts for patch in part.patches)}


def of_patch(manifest: Manifest, tensor: TensorEntry, patch: Patch) -> tuple[Stored, Stored]:
    """Return the stored indices and the stored data of a patch."""
    places = (patch.file, patch.index_offset, patch.num_units * patch.index_bytes, manifest.chunk_bytes)
    indices = Stored(tensor.name, "the indices of a patch of ", *places, patch.index_hashes, "", ())
    places = (patch.file, patch.offset, patch.num_bytes, manifest.chunk_bytes)
    return indices, Stored(tensor.name, "a patch of ", *places, patch.hashes, patch.encoding, patch.frames)


# -- files ---------------------------------------------------------------------------------------------------------


class Source:
    """The files of one checkpoint, including those of its bases. Errors name the file."""

    def __init__(self, store: Store, manifest: Manifest, watch: Watch) -> None:
        self._store = store
        self._manifest = manifest
        self._watch = watch

    def require(self, files: Iterable[int]) -> None:
        """Check that the files exist, before memory is allocated for what they claim to hold.

        Raises:
            CheckpointMissing: A file does not exist.
            CheckpointInvalid: A file has another size than it had.
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
                "it was truncated or replaced: copy it again, or load another checkpoint"
            )

    def fill(self, file: int, offset: int, out: memoryview) -> None:
        """Read from a file into `out`.

        Raises:
            CheckpointMissing: The file does not exist.
            CheckpointAborted: The load was cancelled.
        """
        data_file = self._manifest.files[file]
        try:
            self._watch.check()
            self._store.read_into(key_of(self._manifest, data_file), offset, out)
        except ObjectMissing:
            raise self._missing(data_file) from None
        except TransferCancelled as error:
            raise CheckpointAborted(f"reading checkpoint {self._manifest.id} was cancelled") from error
        except StorageError:
            self._require(data_file)  # a short file is the checkpoint's fault, everything else the store's
            raise
        self._watch.advance(out.nbytes)

    def read(self, file: int, start: int, end: int) -> memoryview:
        """Read into fresh memory that is aligned like the file, so that a disk can write into it directly."""
        begin = start - start % ALIGNMENT if end - start >= LARGE_BYTES else start
        memory = fresh_memory(end - begin)
        self.fill(file, begin, memory)
        return memory[start - begin :]

    def check(self, stored: Stored, number: int, data: memoryview) -> None:
        """Compare a chunk with its hash.

        Raises:
            CheckpointCorrupt: The hash does not match.
        """
        found, expected = xxh3_128_hexdigest(data), stored.hashes[number]
        if found != expected:
            problem = f"the hash is {found}, expected {expected}"
            raise self._corrupt(stored, number, problem, expected=expected, found=found)

    def decoded(self, stored: Stored, number: int, raw: memoryview, out: memoryview | None = None) -> memoryview:
        """Decode and check a chunk; an encoded one is decoded into `out`, if it is given.

        Raises:
            CheckpointCorrupt: The chunk cannot be decoded, or its hash does not match.
        """
        data = raw
        if stored.encoding:
            start, end = stored.decoded(number)
            data = fresh_memory(end - start) if out is None else out
            problem = buffers.decompress(raw, data)
            if problem:
                raise self._corrupt(stored, number, problem)
        self.check(stored, number, data)
        return data

    def _corrupt(self, stored: Stored, number: int, problem: str, **hashes: str) -> CheckpointCorrupt:
        start, end = stored.in_file(number)
        path = self._manifest.files[stored.file].path
        return CheckpointCorrupt(
            f"{stored.what}tensor {stored.tensor!r} in {path}, bytes {start} to {end}: {problem}",
            file=path,
            tensor=stored.tensor,
            **hashes,
        )

    def describe(self, data_file: DataFile) -> str:
        """Name a file and its checkpoint, for messages."""
        base, _, name = data_file.path.rpartition("/")
        of = f"of {base}, a base of checkpoint {self._manifest.id}," if base else f"of checkpoint {self._manifest.id}"
        return f"{name} {of}"

    def _missing(self, data_file: DataFile) -> CheckpointMissing:
        base, _, name = data_file.path.rpartition("/")
        if base:
            return CheckpointMissing(
                f"checkpoint {self._manifest.id} needs its base {base}, whose file {name} does not exist; put {base} "
                "back beside it, or load another checkpoint"
            )
        return CheckpointMissing(
            f"file {name} of checkpoint {self._manifest.id} does not exist; restore it, or load another checkpoint"
        )


def key_of(manifest: Manifest, data_file: DataFile) -> str:
    """Return the key of a file in the store. A path with a directory belongs to a base."""
    return data_file.path if "/" in data_file.path else f"{manifest.id}/{data_file.path}"


# -- windows -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Window:
    """Neighbouring chunks of one file that are read at once."""

    file: int
    start: int
    end: int
    chunks: tuple[tuple[Stored, int], ...]


def windows(chunks: Iterable[tuple[Stored, int]]) -> Iterator[Window]:
    """Group chunks into windows, in file order."""
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
    """Reads chunks in any order and from several threads; keeps the last few windows."""

    def __init__(self, source: Source, wanted: Iterable[Stored]) -> None:
        self.source = source
        found = windows((stored, number) for stored in wanted for number in stored.chunks())
        self._window_of = {
            (window.file, *stored.in_file(number)): window for window in found for stored, number in window.chunks
        }
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, int], Future[memoryview]] = OrderedDict()

    def decoded(self, stored: Stored, number: int) -> memoryview:
        """Return a chunk, decoded and checked."""
        start, end = stored.in_file(number)
        window = self._window_of[stored.file, start, end]
        data = self._read(window)
        return self.source.decoded(stored, number, data[start - window.start : end - window.start])

    def _read(self, window: Window) -> memoryview:
        key = (window.file, window.start)
        with self._lock:
            found = self._kept.get(key)
            is_ours = found is None
            if found is None:
                found = self._kept[key] = Future()
                if len(self._kept) > _KEPT_WINDOWS:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
        if is_ours:
            try:
                found.set_result(self.source.read(window.file, window.start, window.end))
            except BaseException as error:
                found.set_exception(error)
                raise
        return found.result()


class Reader:
    """Reads ranges of the decoded bytes of one `Stored`; keeps the last chunk for the next range."""

    def __init__(self, cache: Cache, stored: Stored) -> None:
        self._cache = cache
        self._stored = stored
        self._number = -1
        self._chunk = memoryview(b"")

    def read(self, start: int, end: int) -> Bytes:
        """Return a range. Do not write to it: the next range may begin with the same memory."""
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


# -- fresh memory --------------------------------------------------------------------------------------------------


def fresh_memory(num_bytes: int) -> memoryview:
    """Allocate memory; large memory is page-aligned, in huge pages where the system has them.

    Raises:
        MemoryError: This machine has not enough memory.
    """
    try:
        if num_bytes < LARGE_BYTES:
            return np.empty(num_bytes, np.uint8).data
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (MemoryError, OSError, ValueError, OverflowError):
        raise MemoryError(
            f"cannot allocate {num_bytes} bytes to read into; load fewer tensors at once (only=…)"
        ) from None
    _advise(memory, "MADV_HUGEPAGE")
    return memoryview(memory)


class Warmer:
    """Touches fresh memory before it is read into. Switches to small pages if huge pages turn out to be slow."""

    def __init__(self, time_s: Callable[[], float] = time.thread_time) -> None:
        self._time_s = time_s
        self._lock = threading.Lock()
        self._num_slow = 0

    @property
    def gave_up(self) -> bool:
        """Whether huge pages are no longer used."""
        return self._num_slow >= _MAX_SLOW

    def warm(self, memory: memoryview, start: int = 0, end: int | None = None) -> None:
        """Touch all of the memory, or a part that begins on a page boundary."""
        end = memory.nbytes if end is None else end
        pages = np.frombuffer(memory, np.uint8)
        for at in range(start, end, _STEP_BYTES):
            stop = min(at + _STEP_BYTES, end)
            if self.gave_up and isinstance(memory.obj, mmap.mmap):
                _advise(memory.obj, "MADV_NOHUGEPAGE", at, stop - at)
            before_s = self._time_s()
            pages[at:stop:ALIGNMENT].fill(0)
            if self._time_s() - before_s > _SLOW_S:
                with self._lock:
                    self._num_slow += 1


def _advise(memory: mmap.mmap, advice: str, start: int = 0, length: int | None = None) -> None:
    """Give advice to the kernel, unless it does not know it."""
    number = getattr(mmap, advice, None)
    if number is not None:
        with contextlib.suppress(OSError):
            memory.madvise(number, start, len(memory) - start if length is None else length)


# -- patches -------------------------------------------------------------------------------------------------------


def stored_patches(manifest: Manifest, tensor: TensorEntry, part: Slice) -> list[Stored]:
    """Return the stored indices and data of all patches of a slice."""
    return [one for patch in part.patches for one in of_patch(manifest, tensor, patch)]


def apply_patches(
    cache: Cache, manifest: Manifest, tensor: TensorEntry, part: Slice, target: Bytes, begin: int
) -> None:
    """Apply all patches of a slice, oldest first, to `target`, its contents from byte `begin` on.

    Raises:
        CheckpointCorrupt: A hash does not match.
        CheckpointInvalid: A patch refers to units that the slice does not have.
    """
    slice_bytes = of_slice(manifest, tensor, part).num_bytes
    end = begin + len(target)
    for patch in part.patches:
        unit = patch.unit_bytes
        data = Reader(cache, of_patch(manifest, tensor, patch)[1])
        for position, indices in index_batches(cache, manifest, tensor, patch, slice_bytes):
            if int(indices[0]) * unit >= end:
                break
            low, high = (int(i) for i in np.searchsorted(indices, [begin // unit, -(-end // unit)]))
            if low < high:
                first, last = (position + low) * unit, min((position + high) * unit, patch.num_bytes)
                new = data.read(first, last)
                xor = patch.encoding == buffers.XOR
                buffers.apply_patch(target, begin, indices[low:high], new, unit_bytes=unit, xor=xor)


def index_batches(
    cache: Cache, manifest: Manifest, tensor: TensorEntry, patch: Patch, slice_bytes: int
) -> Iterator[tuple[int, Indices]]:
    """Yield the checked indices of a patch in batches, each with the number of indices before it."""
    stored_indices, _ = of_patch(manifest, tensor, patch)
    reader = Reader(cache, stored_indices)
    num_units = -(-slice_bytes // patch.unit_bytes)
    per_batch = max(BATCH_BYTES // max(patch.unit_bytes, patch.index_bytes), 1)
    before = -1
    for position in range(0, patch.num_units, per_batch):
        count = min(per_batch, patch.num_units - position)
        data = reader.read(position * patch.index_bytes, (position + count) * patch.index_bytes)
        indices = data.view(f"<u{patch.index_bytes}")
        problem = buffers.find_index_problem(indices, before=before, num_units=num_units)
        before = int(indices[-1])
        if not problem and position + count == patch.num_units:
            problem = _problem_of_length(patch, before, slice_bytes)
        if problem:
            path = manifest.files[patch.file].path
            raise CheckpointInvalid(f"a patch of tensor {tensor.name!r} in {path} {problem}; save a full checkpoint")
        yield position, indices.astype(np.int64)


def _problem_of_length(patch: Patch, last: int, slice_bytes: int) -> str:
    """Check the size of a patch: only the last unit of the slice may be shorter than the others."""
    expected = (patch.num_units - 1) * patch.unit_bytes + min(patch.unit_bytes, slice_bytes - last * patch.unit_bytes)
    if patch.num_bytes == expected:
        return ""
    return f"has {patch.num_bytes} bytes, but its units need {expected}"
