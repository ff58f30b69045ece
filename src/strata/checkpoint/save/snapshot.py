"""A whole snapshot into files: the memory as it stands, or tensor by tensor where it is compressed."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from strata.checkpoint.format import layout as layouts
from strata.checkpoint.format import manifest as m
from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.format.manifest import Slice, TensorEntry
from strata.checkpoint.format.part import RankPart
from strata.checkpoint.save import delta, pieces, writer
from strata.checkpoint.save.pieces import Packer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from strata.checkpoint.format.buffers import Bytes
    from strata.checkpoint.save.job import Job, JobTensor
    from strata.checkpoint.save.memory import Memory
    from strata.storage import Store, Watch


def part_of(job: Job, files: list[m.DataFile], slices: dict[str, list[Slice]]) -> RankPart:
    entries: dict[str, TensorEntry] = {}
    for tensor in job.tensors:
        own_slices = tuple(slices[tensor.name])
        if tensor.tensor in entries:  # several parts of one, on this rank
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
    """The memory as it stands is the file."""
    with writer.file_being_written(
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
    metadata = {"strata": str(m.VERSION), "id": job.head.id, "rank": str(job.rank)}
    return Packer(store, job.head.id, rank=job.rank, metadata=metadata, scratch=scratch, watch=watch)


class Cut(NamedTuple):
    """A part of a tensor, and its bytes: an item of a file, and a slice in the manifest."""

    box: pieces.Box
    data: Bytes

    def item(self, tensor: JobTensor) -> pieces.Item:
        return pieces.copy_of(tensor.name, BY_NAME[tensor.dtype], self.box.shape, self.data)

    def slice(self, origin: tuple[int, ...], stored: Mapping[str, Any], encoding: str = "") -> Slice:
        """`origin` is where the box's own tensor, or slice, begins in the whole tensor."""
        start = tuple(map(operator.add, origin, self.box.start))
        return Slice(start=start, shape=self.box.shape, encoding=encoding, **stored)


def cuts(shape: tuple[int, ...], dtype: str, data: Bytes) -> Iterator[Cut]:
    """`data` has the contents of a tensor of this shape."""
    for box in pieces.boxes_of(shape, BY_NAME[dtype].itemsize, block_bytes=delta.BLOCK_BYTES):
        yield Cut(box, data[box.first_byte : box.first_byte + box.num_bytes])


class Stored(NamedTuple):
    """An item on its way into a file, and what the manifest has to say of it."""

    name: str
    hashes: tuple[str, ...] | None
    """Of what was encoded; None: of the bytes as they are, which the packer knows."""
    frames: tuple[int, ...]

    def fields(self, packer: Packer) -> dict[str, Any]:
        """As `Slice` and `Patch` have them."""
        place = packer.places[self.name]
        return {
            "file": place.file,
            "offset": place.offset,
            "hashes": place.hashes if self.hashes is None else self.hashes,
            "frames": self.frames,
        }


def encoded_as(item_name: str, encoded: pieces.Encoded) -> Stored:
    return Stored(item_name, encoded.hashes, tuple(map(len, encoded.frames)))


def plain_as(item_name: str) -> Stored:
    return Stored(item_name, None, ())


def write_compressed(store: Store, job: Job, memory: memoryview, scratch: Memory, watch: Watch) -> RankPart:
    """Tensors that shrink are stored as zstd frames, all others as they are."""
    data = np.frombuffer(memory[: job.size_bytes], np.uint8)
    packer = packer_for(store, job, scratch, watch)
    found: list[tuple[JobTensor, Cut, Stored]] = []
    for tensor in job.tensors:
        contents = data[tensor.offset : tensor.offset + tensor.num_bytes]
        shrinks = pieces.looks_compressible(contents)
        for cut in cuts(tensor.shape, tensor.dtype, contents):
            watch.check()
            encoded = pieces.encode(pieces.in_chunks(cut.data)) if shrinks else None
            if encoded is not None and encoded.num_bytes < pieces.WORTH_IT * len(cut.data):
                [name] = packer.add(pieces.encoded_item(f"{tensor.name}#zstd", encoded))
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
