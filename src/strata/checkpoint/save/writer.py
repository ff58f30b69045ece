"""Write a staged snapshot to files: the memory as it is, or packed from compressed tensors and changed rows.

A whole snapshot lies in the staging memory as its file. Everything else is packed in a scratch memory of bounded size,
into as many files as that takes. Hashes are computed from the same memory while the disk is busy.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import zstandard
from xxhash import xxh3_128_hexdigest

from strata.checkpoint.format import layout as layouts
from strata.checkpoint.format import manifest as m
from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.format.layout import chunks
from strata.checkpoint.format.manifest import Slice, TensorEntry
from strata.checkpoint.format.part import RankPart
from strata.checkpoint.save import delta
from strata.checkpoint.save.staging import PrivateMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from strata.checkpoint.format.buffers import Bytes
    from strata.checkpoint.format.dtypes import DType
    from strata.checkpoint.format.layout import Layout, Place
    from strata.checkpoint.format.manifest import DataFile
    from strata.checkpoint.save.job import Job, JobTensor
    from strata.checkpoint.save.staging import Memory
    from strata.storage import Store, Watch

PACK_BYTES = 64 << 20
"""The approximate size of a packed file; a larger item gets a file of its own."""
SAMPLE_BYTES = 1 << 18
MAX_COMPRESSED_RATIO = 0.9
"""Data that does not compress to this ratio is stored as it is: readers would pay for nothing."""
ZSTD_LEVEL = 1
ZSTD_THREADS = 2
HASH_THREADS = 2
_PER_TASK_BYTES = 16 << 20


def file_name(rank: int, number: int = 0) -> str:
    """Return the name of a data file of a rank."""
    return f"rank-{rank:05d}-{number}.safetensors" if number else f"rank-{rank:05d}.safetensors"


WrittenFile = tuple[m.DataFile, dict[str, tuple[str, ...]]]
"""The manifest entry of a file, and the hashes of each tensor's chunks."""


def write_file(
    store: Store,
    directory: str,
    layout: Layout,
    data: memoryview,
    *,
    rank: int,
    number: int = 0,
    chunk_bytes: int,
    watch: Watch,
) -> WrittenFile:
    """Write a file of one rank."""
    with writing_file(
        store, directory, layout, data, rank=rank, number=number, chunk_bytes=chunk_bytes, watch=watch
    ) as written:
        return written


@contextlib.contextmanager
def writing_file(
    store: Store,
    directory: str,
    layout: Layout,
    data: memoryview,
    *,
    rank: int,
    number: int = 0,
    chunk_bytes: int,
    watch: Watch,
) -> Iterator[WrittenFile]:
    """Write a file while the block runs; it is durable when the block ends."""
    with ThreadPoolExecutor(HASH_THREADS + 1, thread_name_prefix="strata-write") as pool:
        putting = pool.submit(store.put_large, f"{directory}/{file_name(rank, number)}", data, watch=watch)
        try:
            groups = [pool.submit(_hashes, group, data, chunk_bytes, watch) for group in _groups(layout.places)]
            hashes = dict(itertools.chain.from_iterable(group.result() for group in groups))
            entry = m.DataFile(
                path=file_name(rank, number),
                rank=rank,
                size_bytes=layout.size_bytes,
                header_bytes=len(layout.header),
                header_hash=xxh3_128_hexdigest(layout.header),
            )
            yield entry, hashes
        finally:
            putting.result()


def _groups(places: Sequence[Place]) -> list[list[Place]]:
    """Group tensors to about equal size, so that many small tensors become one task."""
    groups: list[list[Place]] = [[]]
    room = _PER_TASK_BYTES
    for place in places:
        groups[-1].append(place)
        room -= place.num_bytes
        if room <= 0:
            groups.append([])
            room = _PER_TASK_BYTES
    return groups


def _hashes(
    places: Sequence[Place], data: memoryview, chunk_bytes: int, watch: Watch
) -> list[tuple[str, tuple[str, ...]]]:
    found = []
    for place in places:
        watch.check()
        pieces = chunks(place.offset, place.num_bytes, chunk_bytes)
        found.append((place.name, tuple(xxh3_128_hexdigest(data[start:end]) for start, end in pieces)))
    return found


# -- files packed from items ---------------------------------------------------------------------------------------


class Item(NamedTuple):
    """A tensor to pack into a file; a `TensorSpec` for `layout.plan`."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    num_bytes: int
    fill: Callable[[Bytes], None]
    """Writes the contents into the given memory."""


class Packed(NamedTuple):
    """Where an item was packed."""

    file: int
    """An index into the packer's files."""
    offset: int
    hashes: tuple[str, ...]


class Encoded(NamedTuple):
    """Compressed chunks."""

    frames: list[bytes]
    hashes: tuple[str, ...]
    """Of the chunks before compression."""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.frames))


class Packer:
    """Collects items and writes a file whenever they fill one."""

    def __init__(
        self,
        store: Store,
        directory: str,
        *,
        rank: int,
        metadata: dict[str, str],
        scratch: Memory | None = None,
        watch: Watch,
    ) -> None:
        """`scratch` is the memory in which files are packed; a caller that keeps it has it warm the next time."""
        self._store = store
        self._directory = directory
        self._rank = rank
        self._metadata = metadata
        self._watch = watch
        self._scratch = scratch or PrivateMemory()
        self._pending: list[Item] = []
        self._num_pending_bytes = 0
        self._names: set[str] = set()
        self.files: list[DataFile] = []
        self.places: dict[str, Packed] = {}
        """By the name of the item, once it is written."""

    def add(self, *items: Item) -> list[str]:
        """Add items that go into the same file; return their unique names in it."""
        num_bytes = sum(item.num_bytes for item in items)
        if self._pending and self._num_pending_bytes + num_bytes > PACK_BYTES:
            self._flush()
        named = [item._replace(name=self._free_name(item.name)) for item in items]
        self._pending += named
        self._num_pending_bytes += num_bytes
        return [item.name for item in named]

    def _free_name(self, wanted: str) -> str:
        name, number = wanted, 2
        while name in self._names:
            name, number = f"{wanted}#{number}", number + 1
        self._names.add(name)
        return name

    def finish(self) -> None:
        """Write the last file. At least one is written, so that every rank has one."""
        if self._pending or not self.files:
            self._flush()

    def _flush(self) -> None:
        items = {item.name: item for item in self._pending}
        plan = layouts.plan(self._pending, self._metadata)
        if self._scratch.size_bytes < plan.size_bytes:
            self._scratch.grow(plan.size_bytes)
        view = self._scratch.view()[: plan.size_bytes]
        view[: len(plan.header)] = plan.header
        memory = np.frombuffer(view, np.uint8)
        for place in plan.places:
            if place.num_bytes:
                items[place.name].fill(memory[place.offset : place.end])
        data_file, hashes = write_file(
            self._store,
            self._directory,
            plan,
            view,
            rank=self._rank,
            number=len(self.files),
            chunk_bytes=layouts.CHUNK_BYTES,
            watch=self._watch,
        )
        for place in plan.places:
            self.places[place.name] = Packed(len(self.files), place.offset, hashes[place.name])
        self.files.append(data_file)
        self._pending, self._num_pending_bytes = [], 0


def plain_item(name: str, dtype: DType, shape: tuple[int, ...], source: Bytes) -> Item:
    """Return an item that copies `source`."""
    return Item(name, dtype, shape, len(source), lambda out: np.copyto(out, source))


def encoded_item(name: str, encoded: Encoded) -> Item:
    """Return an item of compressed frames."""

    def fill(out: Bytes) -> None:
        np.copyto(out, np.frombuffer(b"".join(encoded.frames), np.uint8))

    return Item(name, BY_NAME["U8"], (encoded.num_bytes,), encoded.num_bytes, fill)


# -- compression ---------------------------------------------------------------------------------------------------


def looks_compressible(data: Bytes) -> bool:
    """Judge by a few samples: most tensors are incompressible, and finding out must cost little."""
    if len(data) < 1_024:
        return False
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    starts = (0, len(data) // 2, max(len(data) - SAMPLE_BYTES, 0))
    samples = [data[start : start + SAMPLE_BYTES] for start in starts]
    return sum(len(compressor.compress(s.data)) for s in samples) < MAX_COMPRESSED_RATIO * sum(map(len, samples))


def encode(chunks: Iterator[Bytes]) -> Encoded:
    """Compress each chunk to a frame of its own, so that it can be read and checked alone."""
    frames: list[bytes] = []
    hashes: list[str] = []
    with ThreadPoolExecutor(ZSTD_THREADS, thread_name_prefix="strata-zstd") as pool:
        for frame, digest in pool.map(_encode_chunk, chunks):
            frames.append(frame)
            hashes.append(digest)
    return Encoded(frames, tuple(hashes))


def _encode_chunk(chunk: Bytes) -> tuple[bytes, str]:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(chunk.data), xxh3_128_hexdigest(chunk.data)


def in_chunks(data: Bytes, chunk_bytes: int = layouts.CHUNK_BYTES) -> Iterator[Bytes]:
    """Yield the data in chunks."""
    for start in range(0, len(data), chunk_bytes):
        yield data[start : start + chunk_bytes]


class ContiguousBox(NamedTuple):
    """A box of a tensor that is contiguous in memory."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    first_byte: int
    num_bytes: int


def contiguous_boxes(shape: tuple[int, ...], itemsize: int, *, block_bytes: int) -> Iterator[ContiguousBox]:
    """Cut a tensor into boxes that fit into one file each, along its first dimension that is larger than one.

    Every cut lies on a multiple of `block_bytes`, so that blocks have the same boundaries in the boxes and the tensor.
    """
    axis = next((axis for axis, side in enumerate(shape) if side > 1), 0)
    row_bytes = math.prod(shape[axis + 1 :]) * itemsize
    num_bytes = math.prod(shape) * itemsize
    if num_bytes <= PACK_BYTES:
        yield ContiguousBox((0,) * len(shape), shape, 0, num_bytes)
        return
    multiple = block_bytes // math.gcd(row_bytes, block_bytes)
    step = max(PACK_BYTES // row_bytes // multiple, 1) * multiple
    for first in range(0, shape[axis], step):
        count = min(step, shape[axis] - first)
        start = tuple(first if side == axis else 0 for side in range(len(shape)))
        part = (*shape[:axis], count, *shape[axis + 1 :])
        yield ContiguousBox(start, part, first * row_bytes, count * row_bytes)


# -- whole snapshots -----------------------------------------------------------------------------------------------


def part_of(job: Job, files: list[m.DataFile], slices: dict[str, list[Slice]]) -> RankPart:
    """Return the part of this rank."""
    entries: dict[str, TensorEntry] = {}
    for tensor in job.tensors:
        own_slices = tuple(slices[tensor.name])
        if tensor.tensor in entries:  # several parts of one tensor on this rank
            own_slices = (*entries[tensor.tensor].slices, *own_slices)
        entries[tensor.tensor] = TensorEntry(
            name=tensor.tensor, dtype=tensor.dtype, shape=tensor.whole, slices=own_slices
        )
    own = sum(file.size_bytes for file in files if "/" not in file.path)
    return RankPart(
        checkpoint=job.head.id,
        rank=job.rank,
        files=tuple(files),
        tensors=tuple(entries.values()),
        sharded=tuple(dict.fromkeys(tensor.tensor for tensor in job.tensors if tensor.sharded)),
        structure=job.structure,
        full_bytes=job.size_bytes,
        written_bytes=own,
    )


def write_whole(store: Store, job: Job, memory: memoryview, watch: Watch) -> RankPart:
    """Write the memory as it is: it is the file."""
    with writing_file(
        store,
        job.head.id,
        job.layout,
        memory[: job.size_bytes],
        rank=job.rank,
        chunk_bytes=layouts.CHUNK_BYTES,
        watch=watch,
    ) as (data_file, hashes):
        slices = {
            tensor.name: [
                Slice(file=0, offset=tensor.offset, start=tensor.start, shape=tensor.shape, hashes=hashes[tensor.name])
            ]
            for tensor in job.tensors
        }
        return part_of(job, [data_file], slices)


def packer_for(store: Store, job: Job, scratch: Memory, watch: Watch) -> Packer:
    """Return a packer for the files of a job."""
    metadata = {"strata": str(m.VERSION), "id": job.head.id, "rank": str(job.rank)}
    return Packer(store, job.head.id, rank=job.rank, metadata=metadata, scratch=scratch, watch=watch)


class Cut(NamedTuple):
    """A part of a tensor and its bytes: an item of a file, and a slice in the manifest."""

    box: ContiguousBox
    data: Bytes

    def item(self, tensor: JobTensor) -> Item:
        return plain_item(tensor.name, BY_NAME[tensor.dtype], self.box.shape, self.data)

    def slice(self, origin: tuple[int, ...], stored: Mapping[str, Any], encoding: str = "") -> Slice:
        """Return the slice of the manifest; `origin` is where the tensor or slice of the box begins in the whole."""
        start = tuple(map(operator.add, origin, self.box.start))
        return Slice(start=start, shape=self.box.shape, encoding=encoding, **stored)


def cuts(shape: tuple[int, ...], dtype: str, data: Bytes) -> Iterator[Cut]:
    """Cut `data`, the contents of a tensor of this shape, into parts that fit into a file."""
    for box in contiguous_boxes(shape, BY_NAME[dtype].itemsize, block_bytes=delta.BLOCK_BYTES):
        yield Cut(box, data[box.first_byte : box.first_byte + box.num_bytes])


class StoredItem(NamedTuple):
    """An added item, and what the manifest needs to know of it."""

    name: str
    hashes: tuple[str, ...] | None
    """Of the decoded chunks; None: the item is not encoded, and the packer has the hashes."""
    frames: tuple[int, ...]

    def fields(self, packer: Packer) -> dict[str, Any]:
        """Return the fields of `Slice` and `Patch`, once the item is written."""
        place = packer.places[self.name]
        return {
            "file": place.file,
            "offset": place.offset,
            "hashes": place.hashes if self.hashes is None else self.hashes,
            "frames": self.frames,
        }


def encoded_as(item_name: str, encoded: Encoded) -> StoredItem:
    return StoredItem(item_name, encoded.hashes, tuple(map(len, encoded.frames)))


def plain_as(item_name: str) -> StoredItem:
    return StoredItem(item_name, None, ())


def write_compressed(store: Store, job: Job, memory: memoryview, scratch: Memory, watch: Watch) -> RankPart:
    """Write compressible tensors as zstd frames, and all others as they are."""
    data = np.frombuffer(memory[: job.size_bytes], np.uint8)
    packer = packer_for(store, job, scratch, watch)
    found: list[tuple[JobTensor, Cut, StoredItem]] = []
    for tensor in job.tensors:
        contents = data[tensor.offset : tensor.offset + tensor.num_bytes]
        is_compressible = looks_compressible(contents)
        for cut in cuts(tensor.shape, tensor.dtype, contents):
            watch.check()
            encoded = encode(in_chunks(cut.data)) if is_compressible else None
            if encoded is not None and encoded.num_bytes < MAX_COMPRESSED_RATIO * len(cut.data):
                [name] = packer.add(encoded_item(f"{tensor.name}#zstd", encoded))
                stored = encoded_as(name, encoded)
            else:
                [name] = packer.add(cut.item(tensor))
                stored = plain_as(name)
            found.append((tensor, cut, stored))
    packer.finish()
    slices: dict[str, list[Slice]] = {}
    for tensor, cut, stored in found:
        encoding = "zstd" if stored.frames else ""
        slices.setdefault(tensor.name, []).append(cut.slice(tensor.start, stored.fields(packer), encoding))
    return part_of(job, packer.files, slices)
