"""Compaction: rewrite an incremental checkpoint in full, independent of its bases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from strata.checkpoint.format import manifest as m
from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.format.layout import CHUNK_BYTES
from strata.checkpoint.format.manifest import CheckpointType, Slice
from strata.checkpoint.format.shards import Box
from strata.checkpoint.group.commit import publish
from strata.checkpoint.group.ranks import Ranks, new_id
from strata.checkpoint.load import integrity, reader
from strata.checkpoint.load.fetch import Source
from strata.checkpoint.save import delta, writer
from strata.checkpoint.save.writer import Packer
from strata.checkpoint.saver.executor import clean_up

if TYPE_CHECKING:
    from strata.checkpoint.format.manifest import Manifest
    from strata.storage import Store, Watch


def compact(store: Store, manifest: Manifest, *, watch: Watch) -> Manifest:
    """Write the full state of a checkpoint as a new checkpoint of the same step.

    Tensors are read and verified a part at a time, so it takes little memory, and a corrupt checkpoint does not become
    a valid one.

    Raises:
        CheckpointInvalid: The checkpoint cannot be trusted.
    """
    integrity.check_manifest_and_headers(Source(store, manifest, watch.without_progress()), manifest)
    id = new_id(manifest.step)
    try:
        new = _rewritten(store, manifest, id, watch)
        publish(store, new)
    except BaseException:
        clean_up(store, Ranks(), id)
        raise
    return new


def _rewritten(store: Store, manifest: Manifest, id: str, watch: Watch) -> Manifest:
    packer = Packer(store, id, rank=0, metadata={"strata": str(m.VERSION), "id": id, "rank": "0"}, watch=watch)
    packed: list[tuple[str, Box, str]] = []
    for tensor in manifest.tensors:
        dtype = BY_NAME[tensor.dtype]
        for box in writer.contiguous_boxes(tensor.shape, dtype.itemsize, block_bytes=delta.BLOCK_BYTES):
            part = Box(box.start, box.shape)
            data = reader.read_slices(store, manifest, {tensor.name: part}, watch=watch)[tensor.name]
            [name] = packer.add(writer.plain_item(tensor.name, dtype, box.shape, data))
            packed.append((tensor.name, part, name))
    packer.finish()
    slices: dict[str, list[Slice]] = {}
    for tensor_name, part, name in packed:
        place = packer.places[name]
        slices.setdefault(tensor_name, []).append(
            Slice(
                file=place.file,
                offset=place.offset,
                start=part.start,
                shape=part.shape,
                hashes=place.hashes,
            )
        )
    tensors = tuple(msgspec.structs.replace(t, slices=tuple(slices[t.name])) for t in manifest.tensors)
    written = sum(file.size_bytes for file in packer.files)
    return msgspec.structs.replace(
        manifest,
        id=id,
        type=CheckpointType.FULL,
        parent="",
        files=tuple(packer.files),
        tensors=tensors,
        full_bytes=written,
        written_bytes=written,
        model_hash=m.model_hash(tensors),
        chunk_bytes=CHUNK_BYTES,
        why=f"compacted from {manifest.id}",
        stall_s=msgspec.UNSET,  # those of another save
        write_s=msgspec.UNSET,
        duration_s=msgspec.UNSET,
    )
