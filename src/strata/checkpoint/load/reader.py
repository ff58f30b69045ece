"""From a store back to tensors: every byte that is used has been compared with its hash.

Most tensors lie in their file as they are wanted. Those that lie next to each other are read together, past the page
cache, into memory of their own, and what comes back are views of it. All others (in several slices, encoded, wanted in
part) are put together in memory of their own, a few chunks at a time. Patches come last. So a load takes as much memory
as what it gives, and a constant.
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
"""Read at a time; two of them are under way, while what came before is hashed."""
NUM_READS = 2
HASH_THREADS = 2
WARM_THREADS = 2
ASSEMBLY_THREADS = 4
_HASH_BYTES = 8 << 20
"""Small chunks are hashed many at a time: handing one to a thread costs more than hashing it."""
_STRIDED_BYTES = 32 << 20
_SLACK_BYTES = 64 << 20
_SLACK_FRACTION = 8
"""What may be read and kept without being wanted, to read in one go: a constant, and this part of what is wanted."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A rectangle of a tensor, and what it is made of."""

    tensor: TensorEntry
    rectangle: Box
    cuts: tuple[Intersection, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.rectangle.shape) * BY_NAME[self.tensor.dtype].itemsize


def read_tensors(
    store: Store, manifest: Manifest, names: Iterable[str], *, watch: Watch, headers: Iterable[int] | None = None
) -> dict[str, Bytes]:
    """The bytes of each tensor, whole, in the order of its elements.

    Args:
        headers: Check those of the files that are read, and of these; None: of none, for whoever has done so before.

    Raises:
        CheckpointCorrupt: A hash does not match.
        CheckpointMissing: A file is not there; of a base, the message names it.
        CheckpointInvalid: A file is shorter than it was, or a patch cannot be true.
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
    """The bytes of a rectangle of each tensor, in the order of its elements, however the tensor was cut when it was
    saved. Of the slices that meet the rectangle only the chunks from its first to its last element are read.

    Raises:
        InvalidArgument: A rectangle is not within its tensor.
        CheckpointInvalid: As `read_tensors`.
    """
    entries = {tensor.name: tensor for tensor in manifest.tensors}
    parts = [
        _Wanted(tensor, rectangle, tuple(shards.intersections(tensor, rectangle)))
        for tensor, rectangle in ((_entry(entries, name), rectangle) for name, rectangle in wanted.items())
    ]
    source = Source(store, manifest, watch)
    met = [cut.part for one in parts for cut in one.cuts]
    files = {*(part.file for part in met), *(patch.file for part in met for patch in part.patches)}
    if headers is not None:
        integrity.check_headers(Source(store, manifest, watch.unheard()), manifest, {*files, *headers})
    else:
        source.require(files)
    direct = [one for one in parts if _lies_as_wanted(one, manifest.chunk_bytes)]
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
    """Some of the bytes of one slice, decoded and patched.

    Raises:
        CheckpointInvalid: As `read_tensors`.
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
        raise CheckpointInvalid(f"the structure refers to tensor {name!r}, which the checkpoint does not have")
    return entries[name]


@contextlib.contextmanager
def _pool(num_threads: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """When something fails, what has not begun is dropped, and what has is waited for."""
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix=f"strata-{name}")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


# -- as it lies ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Direct:
    """A rectangle that lies in one file as it is wanted: so much of the file, whole chunks of it."""

    name: str
    stored: Stored
    chunks: range
    start: int
    end: int
    """Of the chunks, in the file."""
    wanted_start: int
    wanted_end: int


@dataclass(frozen=True, slots=True)
class _ReadRun:
    """Neighbours in one file that are read together."""

    file: int
    begin: int
    end: int
    parts: tuple[_Direct, ...]


def _lies_as_wanted(one: _Wanted, chunk_bytes: int) -> bool:
    """And little is read with it that is not wanted: that would stay in memory as long as the tensor does."""
    if len(one.cuts) != 1 or one.cuts[0].target is None or one.cuts[0].part.encoding:
        return False
    (cut,) = one.cuts
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
    (cut,) = one.cuts
    stored = fetch.of_slice(manifest, one.tensor, cut.part)
    chunks = stored.chunks(cut.start, cut.end)
    start, end = stored.in_file(chunks[0])[0], stored.in_file(chunks[-1])[1]
    at = stored.offset
    return _Direct(one.tensor.name, stored, chunks, start, end, at + cut.start, at + cut.end)


def _runs(parts: Sequence[_Direct]) -> Iterator[_ReadRun]:
    """In the order of the files. Gaps are read along while there is some slack, and small ones always."""
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
    start = near[0].start  # what is aligned in the file is aligned in memory
    begin = start - start % (ALIGNMENT if end - start >= LARGE_BYTES else 64)
    return _ReadRun(near[0].stored.file, begin, end, tuple(near))


def _fill_runs(source: Source, runs: Sequence[_ReadRun], memory: Sequence[memoryview]) -> None:
    """Reading, hashing what was read, and warming the memory of what is read next go on at the same time."""
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
    """The chunks of a run with their ends in the file, the first one last."""
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


# -- put together --------------------------------------------------------------------------------------------------


def _assemble(source: Source, manifest: Manifest, wanted: Sequence[_Wanted], memory: Mapping[str, memoryview]) -> None:
    """All but cuts that are patched before they can be taken apart."""
    places = {}
    chunks = []
    for one in wanted:
        for cut in one.cuts:
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
    num_dimensions = len(one.rectangle.shape)
    if num_dimensions >= MAX_DIMENSIONS:
        raise CheckpointInvalid(
            f"tensor {one.tensor.name!r} has {num_dimensions} dimensions and lies in slices; only fewer than "
            f"{MAX_DIMENSIONS} can be put together"
        )
    item_bytes = BY_NAME[one.tensor.dtype].itemsize
    shards.copy_intersection(cut, data, start, target, wanted_shape=one.rectangle.shape, item_bytes=item_bytes)


# -- patched -------------------------------------------------------------------------------------------------------


def _patch(source: Source, manifest: Manifest, wanted: Sequence[_Wanted], found: Mapping[str, Bytes]) -> None:
    patched = [(one, cut) for one in wanted for cut in one.cuts if cut.part.patches]
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
    """Patches know the slice as it was stored: it is patched piece by piece, before the pieces are taken apart."""
    step = max(_STRIDED_BYTES // manifest.chunk_bytes, 1) * manifest.chunk_bytes
    for start in range(cut.start - cut.start % manifest.chunk_bytes, cut.end, step):
        end = min(start + step, fetch.of_slice(manifest, one.tensor, cut.part).num_bytes)
        _put(one, cut, _contents(cache, manifest, one.tensor, cut.part, start, end), start, target)


# -- memory-mapped -------------------------------------------------------------------------------------------------


def map_tensors(
    store: Store, manifest: Manifest, names: Iterable[str], *, watch: Watch, headers: Iterable[int] = ()
) -> dict[str, Bytes]:
    """As `reading.read_tensors`, mapped where that can be: in a directory, and where a tensor lies in its file whole,
    as it is. Everything else (object stores, slices, encodings, patches) is read and verified.

    Raises:
        CheckpointInvalid: A file is not there, has another size, or another header.
    """
    wanted = list(dict.fromkeys(names))
    entries = {tensor.name: tensor for tensor in manifest.tensors}
    mappable = [entries[name] for name in wanted if name in entries and _can_be_mapped(store, entries[name])]
    source = Source(store, manifest, watch.unheard())
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
    except (OSError, ValueError) as error:  # ValueError: it has become shorter since its size was looked at
        raise StorageError(f"{path} cannot be mapped: {error}; load it without mmap=True") from error
    return np.frombuffer(view, np.uint8)
