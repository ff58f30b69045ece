"""A whole snapshot into files: the memory as it stands, or tensor by tensor where it is compressed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from strata.checkpoint import deltas, packing, writing
from strata.checkpoint import layout as layouts
from strata.checkpoint import manifest as m
from strata.checkpoint.dtypes import BY_NAME
from strata.checkpoint.manifest import Slice, TensorEntry
from strata.checkpoint.packing import Packer
from strata.checkpoint.parts import RankPart

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from strata.checkpoint.buffers import Bytes
    from strata.checkpoint.jobs import Job, JobTensor
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
    with writing.file_being_written(
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


def packer_for(store: Store, job: Job, watch: Watch) -> Packer:
    metadata = {"strata": str(m.VERSION), "id": job.head.id, "rank": str(job.rank)}
    return Packer(store, job.head.id, rank=job.rank, metadata=metadata, watch=watch)


@dataclass(frozen=True, slots=True)
class Cut:
    """Some rows of a tensor, in a file of their own."""

    first: int
    shape: tuple[int, ...]
    data: Bytes

    def item(self, tensor: JobTensor) -> packing.Item:
        return packing.copy_of(tensor.name, BY_NAME[tensor.dtype], self.shape, self.data)

    def slice(self, tensor: JobTensor, stored: Mapping[str, Any], encoding: str = "") -> Slice:
        start = (tensor.start[0] + self.first, *tensor.start[1:]) if tensor.start else ()
        return Slice(start=start, shape=self.shape, encoding=encoding, **stored)


def cuts(tensor: JobTensor, memory: Bytes) -> Iterator[Cut]:
    row = deltas.row_bytes(tensor.place)
    for first, count in packing.row_cuts(tensor.shape, row, block_bytes=deltas.BLOCK_BYTES):
        begin = tensor.offset + first * row
        shape = (count, *tensor.shape[1:]) if tensor.shape else ()
        yield Cut(first, shape, memory[begin : begin + math.prod(shape) * BY_NAME[tensor.dtype].itemsize])


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


def encoded_as(item_name: str, encoded: packing.Encoded) -> Stored:
    return Stored(item_name, encoded.hashes, tuple(map(len, encoded.frames)))


def plain_as(item_name: str) -> Stored:
    return Stored(item_name, None, ())


def write_compressed(store: Store, job: Job, memory: memoryview, watch: Watch) -> RankPart:
    """Tensors that shrink are stored as zstd frames, all others as they are."""
    data = np.frombuffer(memory[: job.size_bytes], np.uint8)
    packer = packer_for(store, job, watch)
    found: list[tuple[JobTensor, Cut, Stored]] = []
    for tensor in job.tensors:
        shrinks = packing.looks_compressible(data[tensor.offset : tensor.offset + tensor.num_bytes])
        for cut in cuts(tensor, data):
            watch.check()
            encoded = packing.encode(packing.in_chunks(cut.data)) if shrinks else None
            if encoded is not None and encoded.num_bytes < packing.WORTH_IT * len(cut.data):
                [name] = packer.add(packing.encoded_item(f"{tensor.name}#zstd", encoded))
                stored = encoded_as(name, encoded)
            else:
                [name] = packer.add(cut.item(tensor))
                stored = plain_as(name)
            found.append((tensor, cut, stored))
    packer.finish()
    slices: dict[str, list[Slice]] = {}
    for tensor, cut, stored in found:
        encoding = "zstd" if stored.frames else ""
        slices.setdefault(tensor.name, []).append(cut.slice(tensor, stored.fields(packer), encoding))
    return part_of(job, packer.files, slices)
