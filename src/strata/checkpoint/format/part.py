"""A part lists what one rank wrote: its files, and where each tensor or slice lies in them.

Each rank stores its part beside its data (`part-00003.json`), where rank 0 reads it to build the manifest. So a part
outlives its writer, and its size is not limited by a message:

    {"strata_part": 1, "hash": "<xxh3-128 of the next value's bytes>", "part": {…}}

Like a manifest, a part is not trusted.
"""

from __future__ import annotations

from typing import Any

import msgspec
from xxhash import xxh3_128_hexdigest

from strata.checkpoint.format import layout, tree
from strata.checkpoint.format import manifest as m
from strata.checkpoint.format.manifest import DataFile, TensorEntry
from strata.errors import CheckpointCorrupt, CheckpointInvalid, CheckpointTooNew

VERSION = 1
MAX_PART_BYTES = 1 << 28
MAX_RANKS = 100_000


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wrote of one checkpoint."""

    checkpoint: str
    """The id of the checkpoint."""
    rank: int
    files: tuple[DataFile, ...]
    tensors: tuple[TensorEntry, ...]
    """What this rank wrote: `shape` is that of the whole tensor, and slices refer to the files above."""
    sharded: tuple[str, ...] = ()
    """The names of tensors of which other ranks hold other slices. This rank holds all others whole."""
    structure: Any
    """The structure of the rank's whole state (see `tree.py`), including tensors that another rank writes."""
    full_bytes: int
    """The size of the rank's share of the state."""
    written_bytes: int
    chunk_bytes: int = layout.CHUNK_BYTES
    """The number of bytes per hash."""


def part_name(rank: int) -> str:
    """Return the name of a rank's part in the directory of its checkpoint."""
    return f"part-{rank:05d}.json"


class _PartEnvelope(msgspec.Struct):
    strata_part: int
    hash: str
    part: msgspec.Raw


class _PartVersion(msgspec.Struct):
    strata_part: int


_encoder = msgspec.json.Encoder()
_envelope_decoder = msgspec.json.Decoder(_PartEnvelope)
_decoder = msgspec.json.Decoder(RankPart)


def encode(part: RankPart) -> bytes:
    """Check and encode a part.

    Raises:
        CheckpointInvalid: A reader would reject it.
    """
    check(part, file=part_name(part.rank))
    data = _sealed(part)
    if len(data) > MAX_PART_BYTES:
        raise CheckpointInvalid(
            f"{part_name(part.rank)} has {len(data)} bytes, more than the limit of {MAX_PART_BYTES}; save fewer "
            "tensors on this rank"
        )
    return data


def _sealed(part: RankPart) -> bytes:
    body = _encoder.encode(part)
    return b'{"strata_part":%d,"hash":"%s","part":%s}\n' % (VERSION, xxh3_128_hexdigest(body).encode(), body)


def decode(data: bytes, *, file: str) -> RankPart:
    """Decode and check a part.

    Raises:
        CheckpointInvalid: It is malformed, has a duplicate key or contradicts itself.
        CheckpointCorrupt: Its bytes are not the bytes that were written.
        CheckpointTooNew: A newer version wrote it.
    """
    try:
        version = msgspec.json.decode(data, type=_PartVersion).strata_part
        if version > VERSION:
            raise CheckpointTooNew(
                f"{file} has format {version}, this rank reads up to {VERSION}; run one version of strata on all ranks"
            )
        if version < VERSION:
            raise CheckpointInvalid(f"{file} has the unknown format {version}")
        envelope = _envelope_decoder.decode(data)
        body = bytes(envelope.part)
        found = xxh3_128_hexdigest(body)
        if found != envelope.hash:
            raise CheckpointCorrupt(
                f"{file}: its hash is {found}, expected {envelope.hash[:40]!r}",
                file=file,
                expected=envelope.hash,
                found=found,
            )
        part = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointInvalid(f"{file} is not a valid part of a rank: {error}") from None
    layout.check_duplicate_keys(data, written=_sealed(part), file=file)
    check(part, file=file)
    return part


def check(part: RankPart, *, file: str) -> None:
    """Check everything that a part states about itself.

    Raises:
        CheckpointInvalid: A name, number or offset is impossible; the message names the tensor.
    """
    ranks = [part.rank, *(data_file.rank for data_file in part.files)]
    if not all(0 <= rank < MAX_RANKS for rank in ranks):
        raise CheckpointInvalid(
            f"{file}: rank {min(ranks)} or {max(ranks)} is out of range, expected 0 to {MAX_RANKS - 1}"
        )
    for data_file in part.files:
        if not is_of_base(data_file) and data_file.rank != part.rank:
            raise CheckpointInvalid(
                f"{file}: {data_file.path[:80]} belongs to rank {data_file.rank}, expected rank {part.rank}"
            )
    names = [tensor.name for tensor in part.tensors]
    unknown = sorted(set(part.sharded) - set(names))
    if unknown:
        raise CheckpointInvalid(f"{file}: tensor {unknown[0][:200]!r} is listed as sharded but has no entry")
    if len(set(names)) != len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise CheckpointInvalid(f"{file}: tensor {twice[:200]!r} occurs twice")
    try:
        tree.names_in(part.structure)
    except CheckpointInvalid as error:
        raise CheckpointInvalid(f"{file}: {error}") from None
    m.check(_alone(part, num_ranks=max(ranks) + 1, file=file), file=file)


def is_of_base(data_file: DataFile) -> bool:
    """Return whether another checkpoint, a base, wrote this file."""
    return "/" in data_file.path


def _alone(part: RankPart, *, num_ranks: int, file: str) -> m.Manifest:
    """Return the part as a manifest, so that the checks of a manifest apply.

    Each slice of a sharded tensor becomes a tensor of its own.
    """
    sharded, names = set(part.sharded), {tensor.name for tensor in part.tensors}
    tensors: list[TensorEntry] = []
    for tensor in part.tensors:
        if tensor.name not in sharded:
            tensors.append(tensor)
            continue
        for i, piece in enumerate(tensor.slices):
            ends = zip(piece.start, piece.shape, tensor.shape, strict=False)
            if not len(piece.start) == len(piece.shape) == len(tensor.shape) or not all(
                0 <= start <= start + size <= whole for start, size, whole in ends
            ):
                raise CheckpointInvalid(f"{file}: tensor {tensor.name[:200]!r} has a slice outside its shape")
            zeros = (0,) * len(piece.shape)
            own = piece if piece.start == zeros else msgspec.structs.replace(piece, start=zeros)
            name = tensor.name if not i else f"{tensor.name} (slice {i})"
            while i and name in names:
                name += "'"
            tensors.append(TensorEntry(name=name, dtype=tensor.dtype, shape=piece.shape, slices=(own,)))
    return m.Manifest(
        id=part.checkpoint,
        step=0,
        epoch=0,
        type=m.CheckpointType.FULL,
        created_at_s=0,
        num_ranks=num_ranks,
        chunk_bytes=part.chunk_bytes,
        parent="base" if any(map(is_of_base, part.files)) else "",
        files=part.files,
        tensors=tuple(tensors),
        structures=(part.structure,),
        structure_of_rank=(0,) * num_ranks,
        full_bytes=part.full_bytes,
        written_bytes=part.written_bytes,
        model_hash="",
    )
