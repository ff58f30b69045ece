"""Files that are put together from pieces: changed rows, compressed tensors.

A whole snapshot lies in the staging memory as its file; everything else is gathered in a scratch memory of bounded
size, in as many files as that takes.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import zstandard
from xxhash import xxh3_128_hexdigest

from strata.checkpoint.format import layout as layouts
from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.save import writer
from strata.checkpoint.save.memory import PrivateMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from strata.checkpoint.format.buffers import Bytes
    from strata.checkpoint.format.dtypes import DType
    from strata.checkpoint.format.manifest import DataFile
    from strata.checkpoint.save.memory import Memory
    from strata.storage import Store, Watch

PACK_BYTES = 64 << 20
"""Of one file, about: what is larger by itself gets one of its own."""
SAMPLE_BYTES = 1 << 18
WORTH_IT = 0.9
"""What does not shrink to this is left as it is: who reads it would pay for nothing."""
LEVEL = 1
_THREADS = 2


class Item(NamedTuple):
    """A tensor of such a file. Has what `layout.plan` asks of a leaf."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    num_bytes: int
    fill: Callable[[Bytes], None]


class Packed(NamedTuple):
    """Where an item went."""

    file: int
    """Counted from the first that was packed."""
    offset: int
    hashes: tuple[str, ...]


class Encoded(NamedTuple):
    frames: list[bytes]
    hashes: tuple[str, ...]
    """Of the chunks before they were encoded."""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.frames))


class Packer:
    """Takes items, and writes a file whenever enough have come together."""

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
        """`scratch` is memory to put files together in: whoever keeps it has it warm the next time."""
        self._store = store
        self._directory = directory
        self._rank = rank
        self._metadata = metadata
        self._watch = watch
        self._scratch = scratch or PrivateMemory()
        self._waiting: list[Item] = []
        self._num_waiting_bytes = 0
        self._names: set[str] = set()
        self.files: list[DataFile] = []
        self.places: dict[str, Packed] = {}
        """By the item's name, once it is written."""

    def add(self, *items: Item) -> list[str]:
        """Gives the names they have in their file, which is one for all of them; nothing else has such a name."""
        num_bytes = sum(item.num_bytes for item in items)
        if self._waiting and self._num_waiting_bytes + num_bytes > PACK_BYTES:
            self._flush()
        named = [item._replace(name=self._free_name(item.name)) for item in items]
        self._waiting += named
        self._num_waiting_bytes += num_bytes
        return [item.name for item in named]

    def _free_name(self, wanted: str) -> str:
        name, number = wanted, 2
        while name in self._names:
            name, number = f"{wanted}#{number}", number + 1
        self._names.add(name)
        return name

    def finish(self) -> None:
        """Writes the last file; there is one at least, so that every rank has one."""
        if self._waiting or not self.files:
            self._flush()

    def _flush(self) -> None:
        items = {item.name: item for item in self._waiting}
        plan = layouts.plan(self._waiting, self._metadata)
        if self._scratch.size_bytes < plan.size_bytes:
            self._scratch.grow(plan.size_bytes)
        view = self._scratch.view()[: plan.size_bytes]
        view[: len(plan.header)] = plan.header
        memory = np.frombuffer(view, np.uint8)
        for place in plan.places:
            if place.num_bytes:
                items[place.name].fill(memory[place.offset : place.end])
        data_file, hashes = writer.write_file(
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
        self._waiting, self._num_waiting_bytes = [], 0


def copy_of(name: str, dtype: DType, shape: tuple[int, ...], source: Bytes) -> Item:
    return Item(name, dtype, shape, len(source), lambda out: np.copyto(out, source))


def encoded_item(name: str, encoded: Encoded) -> Item:
    def fill(out: Bytes) -> None:
        np.copyto(out, np.frombuffer(b"".join(encoded.frames), np.uint8))

    return Item(name, BY_NAME["U8"], (encoded.num_bytes,), encoded.num_bytes, fill)


# -- compression ---------------------------------------------------------------------------------------------------


def looks_compressible(data: Bytes) -> bool:
    """By a few samples: most tensors are noise, and to find that out must cost nothing."""
    if len(data) < 1_024:
        return False
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    starts = (0, len(data) // 2, max(len(data) - SAMPLE_BYTES, 0))
    samples = [data[start : start + SAMPLE_BYTES] for start in starts]
    return sum(len(compressor.compress(s.data)) for s in samples) < WORTH_IT * sum(map(len, samples))


def encode(chunks: Iterator[Bytes]) -> Encoded:
    """Each chunk a frame of its own, so that each can be read and checked alone."""
    frames: list[bytes] = []
    hashes: list[str] = []
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="strata-zstd") as pool:
        for frame, digest in pool.map(_encode_chunk, chunks):
            frames.append(frame)
            hashes.append(digest)
    return Encoded(frames, tuple(hashes))


def _encode_chunk(chunk: Bytes) -> tuple[bytes, str]:
    return zstandard.ZstdCompressor(level=LEVEL).compress(chunk.data), xxh3_128_hexdigest(chunk.data)


def in_chunks(data: Bytes, chunk_bytes: int = layouts.CHUNK_BYTES) -> Iterator[Bytes]:
    for start in range(0, len(data), chunk_bytes):
        yield data[start : start + chunk_bytes]


class Box(NamedTuple):
    """A part of a tensor that lies in one piece."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    first_byte: int
    num_bytes: int


def boxes_of(shape: tuple[int, ...], itemsize: int, *, block_bytes: int) -> Iterator[Box]:
    """A tensor in parts that fit into one file each, cut along its first side that can be.

    Every cut lies on a multiple of `block_bytes`, so that blocks count the same in the parts as in the whole.
    """
    axis = next((axis for axis, side in enumerate(shape) if side > 1), 0)
    row_bytes = math.prod(shape[axis + 1 :]) * itemsize
    num_bytes = math.prod(shape) * itemsize
    if num_bytes <= PACK_BYTES:
        yield Box((0,) * len(shape), shape, 0, num_bytes)
        return
    multiple = block_bytes // math.gcd(row_bytes, block_bytes)
    step = max(PACK_BYTES // row_bytes // multiple, 1) * multiple
    for first in range(0, shape[axis], step):
        count = min(step, shape[axis] - first)
        start = tuple(first if side == axis else 0 for side in range(len(shape)))
        part = (*shape[:axis], count, *shape[axis + 1 :])
        yield Box(start, part, first * row_bytes, count * row_bytes)
