"""Read tensors, whole or in part, from a store. Every byte is compared with its hash, unless it is memory-mapped.

Most tensors lie in their file as they are wanted. Neighbours are read together, bypassing the page cache, into one
piece of memory, and returned as views of it. Other tensors (in several slices, encoded, wanted in part) are assembled
in memory of their own, a few chunks at a time. Patches are applied last. So a load takes as much memory as its result,
plus a constant.

`map_tensors` maps files instead. The mapping is private: writing to a tensor copies the page and leaves the file as it
is. Opening takes milliseconds however large the checkpoint is, but **no data is compared with its hash**, only the size
and the header of each file. The file must stay in place while its tensors are used: deleting it is harmless, but if it
is truncated the kernel ends the process (SIGBUS). Strata never changes a file.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strata.checkpoint.format import shards
from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.format.layout import ALIGNMENT
from strata.checkpoint.format.manifest import MAX_DIMENSIONS
from strata.checkpoint.load import fetch, integrity
from strata.checkpoint.load.fetch import LARGE_BYTES, Cache, Reader, Source, Stored, Warmer, fresh_memory, key_of
from strata.errors import CheckpointInvalid, StorageError
from strata.storage.base import check_key
from strata.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from strata.checkpoint.format.buffers import Bytes
    from strata.checkpoint.format.manifest import Manifest, Slice, TensorEntry
    from strata.checkpoint.format.shards import Box, Intersection
    from strata.storage import Store, Watch

READ_BYTES = 32 << 20
"""The size of one read; two are in flight while earlier ones are hashed."""
NUM_READS = 2
HASH_THREADS = 2
WARM_THREADS = 2
ASSEMBLY_THREADS = 4
_HASH_BYTES = 8 << 20
"""Small chunks are hashed in groups: submitting one to a thread costs more than hashing it."""
_STRIDED_BYTES = 32 << 20
_SLACK_BYTES = 64 << 20
_SLACK_FRACTION = 8
"""Unwanted bytes that may be read and kept to save requests: a constant plus this fraction of the wanted bytes."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A wanted box of a tensor, and the slices that cover it."""

    tensor: TensorEntry
    box: Box
    intersections: tuple[Intersection, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.box.shape) * BY_NAME[self.tensor.dtype].itemsize


def read_tensors(
    store: Store, manifest: Manifest, names: Iterable[str], *, watch: Watch, headers: Iterable[int] | None = None
) -> dict[str, Bytes]:
    """Return the bytes of each tensor, in row-major order.

    Args:
        headers: Check the headers of the files that are read and of these; None: of none, if the caller has done it.

    Raises:
        CheckpointCorrupt: A hash does not match.
        CheckpointMissing: A file does not exist; the message names the base, if it belongs to one.
        CheckpointInvalid: A file has another size than it had, or a patch is malformed.
    """
    entries = {tensor.name: tensor for tensor in manifest.tensors}
    wanted = {name: shards.whole_box(_entry(entries, name)) for name in names}
    return read_slices(store, manifest, wanted, watch=watch, headers=headers)


def read_slices(
    store: Store,
    manifest: Manifest,
    wanted: Mapping[str, Box],
    *,
    watch: Watch,
    headers: Iterable[int] | None = None,
) -> dict[str, Bytes]:
    """Return the bytes of a box of each tensor, in row-major order, however the tensor was sharded when it was saved.

    Of each slice, only the chunks from the first to the last wanted element are read.

    Raises:
        InvalidArgument: A box is not within its tensor.
        CheckpointInvalid: See `read_tensors`.
    """
    entries = {tensor.name: tensor for tensor in manifest.tensors}
    parts = [
        _Wanted(tensor, box, tuple(shards.intersections(tensor, box)))
        for tensor, box in ((_entry(entries, name), box) for name, box in wanted.items())
    ]
    source = Source(store, manifest, watch)
    met = [cut.part for one in parts for cut in one.intersections]
    files = {*(part.file for part in met), *(patch.file for part in met for patch in part.patches)}
    if headers is not None:
        integrity.check_headers(Source(store, manifest, watch.without_progress()), manifest, {*files, *headers})
    else:
        source.require(files)
    direct = [one for one in parts if _is_readable_in_place(one, manifest.chunk_bytes)]
    apart = {one.tensor.name for one in direct}
    assembled = [one for one in parts if one.tensor.name not in apart]
    found = _read_directly(source, manifest, direct)
    memory = {one.tensor.name: fresh_memory(one.num_bytes) for one in assembled}
    found |= {name: np.frombuffer(view, np.uint8) for name, view in memory.items()}
    _assemble(source, manifest, assembled, memory)
    _patch(source, manifest, parts, found)
    return {name: found[name] for name in wanted}


def read_contents(
    store: Store, manifest: Manifest, tensor: TensorEntry, part: Slice, start: int, end: int, *, watch: Watch
) -> Bytes:
    """Return a range of the bytes of one slice, decoded and patched.

    Raises:
        CheckpointInvalid: See `read_tensors`.
    """
    source = Source(store, manifest, watch)
    source.require([part.file, *(patch.file for patch in part.patches)])
    stored = fetch.of_slice(manifest, tensor, part)
    cache = Cache(source, [stored, *fetch.stored_patches(manifest, tensor, part)])
    return _contents(cache, manifest, tensor, part, start, end)


def _contents(cache: Cache, manifest: Manifest, tensor: TensorEntry, part: Slice, start: int, end: int) -> Bytes:
    found = np.frombuffer(fresh_memory(end - start), np.uint8)
    reader = Reader(cache, fetch.of_slice(manifest, tensor, part))
    for at in range(start, end, fetch.WINDOW_BYTES):
        stop = min(at + fetch.WINDOW_BYTES, end)
        found[at - start : stop - start] = reader.read(at, stop)
    fetch.apply_patches(cache, manifest, tensor, part, found, start)
    return found


def _entry(entries: Mapping[str, TensorEntry], name: str) -> TensorEntry:
    if name not in entries:
        raise CheckpointInvalid(f"the structure refers to tensor {name!r}, which is not in the checkpoint")
    return entries[name]


@contextlib.contextmanager
def _pool(num_threads: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool; after a failure, cancel pending tasks and wait for running ones."""
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix=f"strata-{name}")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


# -- read in place -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Direct:
    """A box that is contiguous in one file, and the whole chunks that hold it."""

    name: str
    stored: Stored
    chunks: range
    start: int
    end: int
    """The range of the chunks in the file."""
    wanted_start: int
    wanted_end: int


@dataclass(frozen=True, slots=True)
class _ReadRun:
    """Neighbouring boxes of one file that are read together."""

    file: int
    begin: int
    end: int
    parts: tuple[_Direct, ...]


def _is_readable_in_place(one: _Wanted, chunk_bytes: int) -> bool:
    """Return whether a box is contiguous in its file, with few unwanted bytes, which stay in memory with the tensor."""
    if len(one.intersections) != 1 or one.intersections[0].target is None or one.intersections[0].part.encoding:
        return False
    (cut,) = one.intersections
    part_bytes = math.prod(cut.part.shape) * BY_NAME[one.tensor.dtype].itemsize
    start = cut.start - cut.start % chunk_bytes
    end = min(-(-cut.end // chunk_bytes) * chunk_bytes, part_bytes)
    return (end - start - one.num_bytes) * _SLACK_FRACTION <= one.num_bytes


def _read_directly(source: Source, manifest: Manifest, wanted: Sequence[_Wanted]) -> dict[str, Bytes]:
    runs = list(_runs([_direct(manifest, one) for one in wanted]))
    memory = [fresh_memory(run.end - run.begin) for run in runs]
    _fill_runs(source, runs, memory)
    found = {}
    for run, view in zip(runs, memory, strict=True):
        whole = np.frombuffer(view, np.uint8)
        for part in run.parts:
            found[part.name] = whole[part.wanted_start - run.begin : part.wanted_end - run.begin]
    return found


def _direct(manifest: Manifest, one: _Wanted) -> _Direct:
    (cut,) = one.intersections
    stored = fetch.of_slice(manifest, one.tensor, cut.part)
    chunks = stored.chunks(cut.start, cut.end)
    start, end = stored.in_file(chunks[0])[0], stored.in_file(chunks[-1])[1]
    at = stored.offset
    return _Direct(one.tensor.name, stored, chunks, start, end, at + cut.start, at + cut.end)


def _runs(parts: Sequence[_Direct]) -> Iterator[_ReadRun]:
    """Group neighbours, in file order. Small gaps are always read too, larger ones while there is slack."""
    slack = _SLACK_BYTES + sum(part.end - part.start for part in parts) // _SLACK_FRACTION
    near: list[_Direct] = []
    end = 0
    for part in sorted(parts, key=lambda part: (part.stored.file, part.start)):
        gap = part.start - end
        if near and (part.stored.file != near[0].stored.file or gap > min(fetch.GAP_BYTES, max(slack, ALIGNMENT))):
            yield _run(near, end)
            near = []
        if near:
            slack -= max(gap, 0)
        end = max(end, part.end) if near else part.end
        near.append(part)
    if near:
        yield _run(near, end)


def _run(near: Sequence[_Direct], end: int) -> _ReadRun:
    start = near[0].start  # memory is aligned like the file
    begin = start - start % (ALIGNMENT if end - start >= LARGE_BYTES else 64)
    return _ReadRun(near[0].stored.file, begin, end, tuple(near))


def _fill_runs(source: Source, runs: Sequence[_ReadRun], memory: Sequence[memoryview]) -> None:
    """Warm memory, read into it and hash the result, all at the same time."""
    warmer = Warmer()
    with (
        _pool(WARM_THREADS, "warm") as warming,
        _pool(NUM_READS, "read") as reading,
        _pool(HASH_THREADS, "hash") as hashing,
    ):

        def fill(file: int, start: int, piece: memoryview, warm: Future[None]) -> None:
            warm.result()
            source.fill(file, start, piece)

        reads = []
        for run, view in zip(runs, memory, strict=True):
            for at in range(0, view.nbytes, READ_BYTES):
                piece = view[at : at + READ_BYTES]
                warm = warming.submit(warmer.warm, view, at, at + piece.nbytes)
                reads.append((run, view, reading.submit(fill, run.file, run.begin + at, piece, warm), piece.nbytes))
        checks = []
        ready, current = 0, None
        for run, view, read, num_bytes in reads:
            if run is not current:
                current, ready, waiting = run, run.begin, _in_order(run)
            read.result()
            ready += num_bytes
            due = []
            while waiting and waiting[-1][0] <= ready:
                due.append(waiting.pop())
            checks += [hashing.submit(_check, source, run, view, group) for group in _grouped(due)]
        for check in checks:
            check.result()


def _in_order(run: _ReadRun) -> list[tuple[int, Stored, int]]:
    """Return the chunks of a run with their ends in the file, in reverse order."""
    found = [(part.stored.in_file(number)[1], part.stored, number) for part in run.parts for number in part.chunks]
    return sorted(found, key=lambda chunk: chunk[0], reverse=True)


def _grouped(chunks: Sequence[tuple[int, Stored, int]]) -> Iterator[list[tuple[int, Stored, int]]]:
    group: list[tuple[int, Stored, int]] = []
    num_bytes = 0
    for end, stored, number in chunks:
        group.append((end, stored, number))
        num_bytes += end - stored.in_file(number)[0]
        if num_bytes >= _HASH_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _check(source: Source, run: _ReadRun, view: memoryview, chunks: Sequence[tuple[int, Stored, int]]) -> None:
    for _, stored, number in chunks:
        start, end = stored.in_file(number)
        source.check(stored, number, view[start - run.begin : end - run.begin])


# -- assembled -----------------------------------------------------------------------------------------------------


def _assemble(source: Source, manifest: Manifest, wanted: Sequence[_Wanted], memory: Mapping[str, memoryview]) -> None:
    """Copy all intersections but those that must be patched before they are copied."""
    places = {}
    chunks = []
    for one in wanted:
        for cut in one.intersections:
            if cut.target is None and cut.part.patches:
                continue
            stored = fetch.of_slice(manifest, one.tensor, cut.part)
            places[id(stored)] = (one, cut)
            chunks += [(stored, number) for number in stored.chunks(cut.start, cut.end)]

    def land(window: fetch.Window) -> None:
        data = source.read(window.file, window.start, window.end)
        for stored, number in window.chunks:
            one, cut = places[id(stored)]
            start, end = stored.in_file(number)
            raw = data[start - window.start : end - window.start]
            name = one.tensor.name
            if name in warm:
                warm[name].result()
            _land(source, stored, number, raw, one, cut, np.frombuffer(memory[name], np.uint8))

    warmer = Warmer()
    with _pool(WARM_THREADS, "warm") as warming, _pool(ASSEMBLY_THREADS, "read") as pool:
        warm = {name: warming.submit(warmer.warm, view) for name, view in memory.items() if view.nbytes >= LARGE_BYTES}
        for landed in [pool.submit(land, window) for window in fetch.windows(chunks)]:
            landed.result()


def _land(
    source: Source, stored: Stored, number: int, raw: memoryview, one: _Wanted, cut: Intersection, target: Bytes
) -> None:
    start, end = stored.decoded(number)
    if stored.encoding and cut.target is not None and cut.start <= start and end <= cut.end:
        at = cut.target + start - cut.start
        source.decoded(stored, number, raw, target.data[at : at + end - start])
        return
    data = np.frombuffer(source.decoded(stored, number, raw), np.uint8)
    _put(one, cut, data, start, target)


def _put(one: _Wanted, cut: Intersection, data: Bytes, start: int, target: Bytes) -> None:
    num_dimensions = len(one.box.shape)
    if num_dimensions >= MAX_DIMENSIONS:
        raise CheckpointInvalid(
            f"tensor {one.tensor.name!r} has slices and {num_dimensions} dimensions; sliced tensors must have fewer "
            f"than {MAX_DIMENSIONS}"
        )
    item_bytes = BY_NAME[one.tensor.dtype].itemsize
    shards.copy_intersection(cut, data, start, target, wanted_shape=one.box.shape, item_bytes=item_bytes)


# -- patched -------------------------------------------------------------------------------------------------------


def _patch(source: Source, manifest: Manifest, wanted: Sequence[_Wanted], found: Mapping[str, Bytes]) -> None:
    patched = [(one, cut) for one in wanted for cut in one.intersections if cut.part.patches]
    if not patched:
        return
    patched.sort(key=lambda pair: (pair[1].part.patches[0].file, pair[1].part.patches[0].index_offset))
    needed = [stored for one, cut in patched for stored in fetch.stored_patches(manifest, one.tensor, cut.part)]
    needed += [fetch.of_slice(manifest, one.tensor, cut.part) for one, cut in patched if cut.target is None]
    cache = Cache(source, needed)

    def patch(one: _Wanted, cut: Intersection) -> None:
        target = found[one.tensor.name]
        if cut.target is None:
            _put_patched(cache, manifest, one, cut, target)
            return
        there = target[cut.target : cut.target + cut.end - cut.start]
        fetch.apply_patches(cache, manifest, one.tensor, cut.part, there, cut.start)

    with _pool(ASSEMBLY_THREADS, "patch") as pool:
        for done in [pool.submit(patch, one, cut) for one, cut in patched]:
            done.result()


def _put_patched(cache: Cache, manifest: Manifest, one: _Wanted, cut: Intersection, target: Bytes) -> None:
    """Patch a slice piece by piece and then copy the wanted part: patches refer to the slice as it was stored."""
    step = max(_STRIDED_BYTES // manifest.chunk_bytes, 1) * manifest.chunk_bytes
    for start in range(cut.start - cut.start % manifest.chunk_bytes, cut.end, step):
        end = min(start + step, fetch.of_slice(manifest, one.tensor, cut.part).num_bytes)
        _put(one, cut, _contents(cache, manifest, one.tensor, cut.part, start, end), start, target)


# -- memory-mapped -------------------------------------------------------------------------------------------------


def map_tensors(
    store: Store, manifest: Manifest, names: Iterable[str], *, watch: Watch, headers: Iterable[int] = ()
) -> dict[str, Bytes]:
    """Map tensors in a local directory that lie in one file unencoded; read and verify all others.

    Others are those in object stores, in several slices, encoded or patched.

    Raises:
        CheckpointInvalid: A file does not exist, or its size or header does not match.
    """
    wanted = list(dict.fromkeys(names))
    entries = {tensor.name: tensor for tensor in manifest.tensors}
    mappable = [entries[name] for name in wanted if name in entries and _can_be_mapped(store, entries[name])]
    source = Source(store, manifest, watch.without_progress())
    files = {tensor.slices[0].file for tensor in mappable}
    integrity.check_headers(source, manifest, files)
    mapped = {number: _mapped(store, manifest, number) for number in files}
    found = {}
    for tensor in mappable:
        (part,) = tensor.slices
        found[tensor.name] = mapped[part.file][part.offset : part.offset + tensor.num_bytes]
    rest = [name for name in wanted if name not in found]
    found |= read_tensors(store, manifest, rest, watch=watch, headers=set(headers) - files)
    return {name: found[name] for name in wanted}


def _can_be_mapped(store: Store, tensor: TensorEntry) -> bool:
    if not isinstance(store, LocalStore) or len(tensor.slices) != 1 or not tensor.num_bytes:
        return False
    (part,) = tensor.slices
    return not part.encoding and not part.patches


def _mapped(store: Store, manifest: Manifest, number: int) -> Bytes:
    assert isinstance(store, LocalStore)
    data_file = manifest.files[number]
    path = store.root / check_key(key_of(manifest, data_file))
    try:
        with path.open("rb") as file:
            view = mmap.mmap(file.fileno(), data_file.size_bytes, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # ValueError: truncated since its size was checked
        raise StorageError(f"{path} cannot be mapped: {error}; load it without mmap=True") from error
    return np.frombuffer(view, np.uint8)
