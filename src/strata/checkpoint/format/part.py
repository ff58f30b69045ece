"""What one rank has written, told to whoever commits: the files, and where each tensor or slice of one lies in them.

A part is an object of its own beside the data (`part-00003.json`), so it outlives its writer and is never too large
for a message:

    {"strata_part": 1, "hash": "<xxh3-128 of the next value's bytes>", "part": {…}}

It is read with the same distrust as a manifest.
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
    checkpoint: str
    """Its id."""
    rank: int
    files: tuple[DataFile, ...]
    tensors: tuple[TensorEntry, ...]
    """What this rank has written: `shape` is that of the whole tensor, the slices count the files above."""
    sharded: tuple[str, ...] = ()
    """Of these, the tensors that other ranks hold other slices of. All else the rank holds whole."""
    structure: Any
    """Of the rank's whole state, see `tree.py`; also of tensors that another rank writes for all."""
    full_bytes: int
    """Of the rank's share of the state."""
    written_bytes: int
    chunk_bytes: int = layout.CHUNK_BYTES
    """What each hash is of."""


def part_name(rank: int) -> str:
    return f"part-{rank:05d}.json"


class _Envelope(msgspec.Struct):
    strata_part: int
    hash: str
    part: msgspec.Raw


class _Version(msgspec.Struct):
    strata_part: int


_encoder = msgspec.json.Encoder()
_envelope_decoder = msgspec.json.Decoder(_Envelope)
_decoder = msgspec.json.Decoder(RankPart)


def encode(part: RankPart) -> bytes:
    """
    Raises:
        CheckpointInvalid: It would not be accepted when read.
    """
    check(part, file=part_name(part.rank))
    data = _sealed(part)
    if len(data) > MAX_PART_BYTES:
        raise CheckpointInvalid(
            f"{part_name(part.rank)} has {len(data)} bytes, more than {MAX_PART_BYTES}; save fewer tensors on this rank"
        )
    return data


def _sealed(part: RankPart) -> bytes:
    body = _encoder.encode(part)
    return b'{"strata_part":%d,"hash":"%s","part":%s}\n' % (VERSION, xxh3_128_hexdigest(body).encode(), body)


def decode(data: bytes, *, file: str) -> RankPart:
    """
    Raises:
        CheckpointInvalid: It is not a part, has a key twice, or cannot be true.
        CheckpointCorrupt: Its bytes are not those that were written.
        CheckpointTooNew: A newer version wrote it.
    """
    try:
        version = msgspec.json.decode(data, type=_Version).strata_part
        if version > VERSION:
            raise CheckpointTooNew(
                f"{file} has format {version}, this rank reads up to {VERSION}; run the same strata on all ranks"
            )
        if version < VERSION:
            raise CheckpointInvalid(f"{file} has format {version}, which there never was")
        envelope = _envelope_decoder.decode(data)
        body = bytes(envelope.part)
        found = xxh3_128_hexdigest(body)
        if found != envelope.hash:
            raise CheckpointCorrupt(f"{file}: its hash is {found}, expected {envelope.hash[:40]!r}")
        part = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointInvalid(f"{file} is not the part of a rank: {error}") from None
    layout.check_duplicate_keys(data, written=_sealed(part), file=file)
    check(part, file=file)
    return part


def check(part: RankPart, *, file: str) -> None:
    """
    Raises:
        CheckpointInvalid: Names, numbers or places that cannot be; the message names the tensor.
    """
    ranks = [part.rank, *(data_file.rank for data_file in part.files)]
    if not all(0 <= rank < MAX_RANKS for rank in ranks):
        raise CheckpointInvalid(
            f"{file}: it tells of rank {min(ranks)} or {max(ranks)}; ranks are 0 to {MAX_RANKS - 1}"
        )
    for data_file in part.files:
        if not is_of_base(data_file) and data_file.rank != part.rank:
            raise CheckpointInvalid(f"{file}: {data_file.path[:80]} is of rank {data_file.rank}, not {part.rank}")
    names = [tensor.name for tensor in part.tensors]
    strangers = sorted(set(part.sharded) - set(names))
    if strangers:
        raise CheckpointInvalid(f"{file}: tensor {strangers[0][:200]!r} is said to be sharded, and is not there")
    if len(set(names)) != len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise CheckpointInvalid(f"{file}: tensor {twice[:200]!r} is there twice")
    try:
        tree.names_in(part.structure)
    except CheckpointInvalid as error:
        raise CheckpointInvalid(f"{file}: {error}") from None
    m.check(_alone(part, num_ranks=max(ranks) + 1, file=file), file=file)


def is_of_base(data_file: DataFile) -> bool:
    """A file of another checkpoint, which this one refers to."""
    return "/" in data_file.path


def _alone(part: RankPart, *, num_ranks: int, file: str) -> m.Manifest:
    """The part as if it were a whole checkpoint, so that a manifest's checks apply: slices of tensors that lie over
    several ranks count as tensors of their own.
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
                raise CheckpointInvalid(f"{file}: tensor {tensor.name[:200]!r} has a slice that lies outside of it")
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
