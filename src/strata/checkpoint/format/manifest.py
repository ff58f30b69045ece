"""The manifest: what a checkpoint consists of, and the only proof that it exists.

    {"strata_checkpoint": 1, "hash": "<xxh3-128 of the next value's bytes>", "manifest": {…}}

It is checked before it is published and again after it is read: nothing about its numbers and names is believed.
"""

from __future__ import annotations

import enum
import math
import re
from typing import TYPE_CHECKING, Any

import msgspec
from xxhash import xxh3_128, xxh3_128_hexdigest

from strata.checkpoint.format import layout
from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.format.shards import is_grid
from strata.errors import CheckpointCorrupt, CheckpointInvalid, CheckpointTooNew

if TYPE_CHECKING:
    from collections.abc import Iterable

VERSION = 1
FILE_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 30
MAX_METADATA_BYTES = 1 << 20
MAX_COMPARISONS = 500_000
MAX_UNIT_BYTES = 1 << 20
MAX_DIMENSIONS = 64
"""As numpy has it."""
MAX_TENSOR_BYTES = 1 << 63
_HEX = re.compile(r"[0-9a-f]{32}")
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class CheckpointType(enum.Enum):
    """What of the state is in a checkpoint."""

    FULL = "FULL"
    INCREMENTAL = "INCREMENTAL"
    """What differs from its base."""
    OPTIMIZER_ONLY = "OPTIMIZER_ONLY"
    MODEL_ONLY = "MODEL_ONLY"


class DataFile(msgspec.Struct, frozen=True, kw_only=True):
    """One safetensors file."""

    path: str
    """Relative to the checkpoint, or, of a base that is referred to, to its parent: `ID/NAME`."""
    rank: int
    size_bytes: int
    header_bytes: int
    header_hash: str


ENCODINGS = ("", "zstd", "xor-zstd")
"""As it is; each chunk a zstd frame; likewise, of what the bytes differ in from those they replace (exclusive or)."""


class Patch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Units of a slice that replace those which lie elsewhere: rows of a table, or blocks of bytes.

    The slice's contents are cut into units of `unit_bytes` (the last one may be shorter). `indices` numbers those that
    are replaced, rising; `data` has them one after another.
    """

    file: int
    """Which of the manifest's files."""
    unit_bytes: int
    num_units: int
    num_bytes: int
    """Of the data; less than the units' by what the last one of the slice is shorter."""
    index_bytes: int
    """Of each index: 4 or 8, little-endian, unsigned."""
    index_offset: int
    """In bytes, from the start of the file."""
    index_hashes: tuple[str, ...]
    offset: int
    """Of the data."""
    hashes: tuple[str, ...]
    encoding: str = ""
    frames: tuple[int, ...] = ()


class Slice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a part of a tensor lies."""

    file: int
    """Which of the manifest's files."""
    offset: int
    """In bytes, from the start of the file."""
    start: tuple[int, ...]
    """Its place in the tensor."""
    shape: tuple[int, ...]
    hashes: tuple[str, ...]
    """xxh3-128 of each `chunk_bytes` of its contents: as they are after decoding and before patching."""
    encoding: str = ""
    """One of `ENCODINGS`, but none that refers to something before it."""
    frames: tuple[int, ...] = ()
    """With an encoding: how many bytes each chunk has in the file. They lie one after another from `offset` on."""
    patches: tuple[Patch, ...] = ()
    """What has changed since, oldest first."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * BY_NAME[self.dtype].itemsize


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    step: int
    epoch: int
    type: CheckpointType
    created_at_s: float
    num_ranks: int
    chunk_bytes: int
    parent: str = ""
    """The id of the checkpoint that this one was compared with."""
    files: tuple[DataFile, ...]
    tensors: tuple[TensorEntry, ...]
    structures: tuple[Any, ...]
    """See `tree.py`. Ranks with the same structure share one."""
    structure_of_rank: tuple[int, ...]
    metadata: dict[str, Any] = {}
    data_cursor: str = ""
    """Where the data loader stands; opaque here."""
    full_bytes: int
    """Of the whole state."""
    written_bytes: int
    """Of it, what this checkpoint holds itself."""
    model_hash: str
    """Of the contents, see `model_hash`."""
    why: str = ""
    """Why it is of this type, if another was asked for."""

    @property
    def size_bytes(self) -> int:
        """Of all files that it needs, those of its bases included."""
        return sum(file.size_bytes for file in self.files)

    @property
    def bases(self) -> tuple[str, ...]:
        """The ids of the checkpoints whose files this one needs."""
        return tuple(sorted({file.path.split("/")[0] for file in self.files if "/" in file.path}))


def model_hash(tensors: Iterable[TensorEntry]) -> str:
    """Of all contents: the same tensors, cut and patched in the same way, give the same hash, at whatever step and
    place, and however they are encoded.
    """
    digest = xxh3_128()
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        digest.update(f"{tensor.name}\0{tensor.dtype}\0{tensor.shape}\0".encode())
        for part in tensor.slices:
            digest.update(f"{part.start}{part.shape}{''.join(part.hashes)}\0".encode())
            for patch in part.patches:
                digest.update(f"{patch.unit_bytes}{''.join(patch.index_hashes)}{''.join(patch.hashes)}\0".encode())
    return digest.hexdigest()


class _Envelope(msgspec.Struct):
    strata_checkpoint: int
    hash: str
    manifest: msgspec.Raw


_encoder = msgspec.json.Encoder()
_envelope_decoder = msgspec.json.Decoder(_Envelope)
_decoder = msgspec.json.Decoder(Manifest)


class _Version(msgspec.Struct):
    strata_checkpoint: int


def encode(manifest: Manifest) -> bytes:
    """
    Raises:
        CheckpointInvalid: It would not be accepted when read.
    """
    check(manifest, file=FILE_NAME)
    data = _sealed(manifest)
    if len(data) > MAX_MANIFEST_BYTES:
        raise CheckpointInvalid(
            f"the manifest has {len(data)} bytes, more than {MAX_MANIFEST_BYTES}; save fewer tensors"
        )
    return data


def _sealed(manifest: Manifest) -> bytes:
    body = _encoder.encode(manifest)
    envelope = b'{"strata_checkpoint":%d,"hash":"%s","manifest":%s}\n'
    return envelope % (VERSION, xxh3_128_hexdigest(body).encode(), body)


def decode(data: bytes, *, file: str) -> Manifest:
    """
    Raises:
        CheckpointInvalid: It is not a manifest, has a key twice, or cannot be true.
        CheckpointCorrupt: Its bytes are not those that were written.
        CheckpointTooNew: A newer version wrote it.
    """
    try:
        version = msgspec.json.decode(data, type=_Version).strata_checkpoint
        if version > VERSION:
            raise CheckpointTooNew(f"{file} has format {version}, this version reads up to {VERSION}; update strata")
        if version < VERSION:
            raise CheckpointInvalid(f"{file} has format {version}, which there never was")
        envelope = _envelope_decoder.decode(data)
        body = bytes(envelope.manifest)
        found = xxh3_128_hexdigest(body)
        if found != envelope.hash:
            raise CheckpointCorrupt(f"{file}: its hash is {found}, expected {envelope.hash[:40]!r}")
        manifest = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointInvalid(f"{file} is not a manifest: {error}") from None
    layout.check_duplicate_keys(data, written=_sealed(manifest), file=file)
    check(manifest, file=file)
    return manifest


# -- checks --------------------------------------------------------------------------------------------------------


def check(manifest: Manifest, *, file: str) -> None:
    """
    Raises:
        CheckpointInvalid: Names, numbers or places that cannot be; the message names the tensor.
    """
    _require(is_safe_name(manifest.id), file, f"the id {manifest.id[:80]!r} is not a plain name")
    _require(not manifest.parent or is_safe_name(manifest.parent), file, "the parent's id is not a plain name")
    numbers = (manifest.step, manifest.epoch, manifest.full_bytes, manifest.written_bytes)
    _require(
        all(0 <= number < 1 << 63 for number in numbers), file, "a step, an epoch or a size is negative or too large"
    )
    _require(0 <= manifest.created_at_s < 1 << 40, file, f"it was made at {manifest.created_at_s:g}")
    _require(manifest.num_ranks >= 1, file, f"it is of {manifest.num_ranks} ranks")
    _require(1 <= manifest.chunk_bytes <= 1 << 30, file, f"chunk_bytes is {manifest.chunk_bytes}")
    _require(len(manifest.structure_of_rank) == manifest.num_ranks, file, "not every rank has a structure")
    known = range(len(manifest.structures))
    _require(all(i in known for i in manifest.structure_of_rank), file, "a rank's structure is not there")
    for data_file in manifest.files:
        _check_file(data_file, manifest, file)
    names: set[str] = set()
    for tensor in manifest.tensors:
        _require(tensor.name not in names, file, f"tensor {tensor.name!r} is there twice")
        names.add(tensor.name)
        _check_tensor(tensor, manifest, file)
    _check_apart(manifest, file)


def _check_apart(manifest: Manifest, file: str) -> None:
    """No two tensors lie on the same bytes: what is the same tensor is there once."""
    ranges = []
    for tensor in manifest.tensors:
        itemsize = BY_NAME[tensor.dtype].itemsize
        for part in tensor.slices:
            num_bytes = sum(part.frames) if part.encoding else math.prod(part.shape) * itemsize
            if num_bytes:
                ranges.append((part.file, part.offset, part.offset + num_bytes, tensor.name))
            for patch in part.patches:
                num_bytes = sum(patch.frames) if patch.encoding else patch.num_bytes
                ranges.append((patch.file, patch.offset, patch.offset + num_bytes, tensor.name))
    ranges.sort()
    file_before, end_before, name_before = -1, 0, ""
    for number, start, end, name in ranges:
        if number == file_before and start < end_before and name != name_before:
            raise CheckpointInvalid(
                f"{file}: tensors {name_before[:200]!r} and {name[:200]!r} lie on the same bytes of "
                f"{manifest.files[number].path}, from {start} to {min(end, end_before)}"
            )
        if number != file_before or end > end_before:
            file_before, end_before, name_before = number, end, name


def is_safe_name(name: str) -> bool:
    """One path component, of letters that mean nothing to any file system or store."""
    return _SAFE_NAME.fullmatch(name) is not None


def _check_file(data_file: DataFile, manifest: Manifest, file: str) -> None:
    parts = data_file.path.split("/")
    is_of_base = len(parts) == 2 and manifest.parent != "" and parts[0] != manifest.id
    _require(
        (len(parts) == 1 or is_of_base) and all(map(is_safe_name, parts)),
        file,
        f"the path {data_file.path[:80]!r} leads out of the checkpoint",
    )
    _require(0 <= data_file.rank < manifest.num_ranks, file, f"{data_file.path} is of rank {data_file.rank}")
    _require(8 <= data_file.header_bytes <= data_file.size_bytes, file, f"{data_file.path} has an impossible size")
    _require(data_file.header_bytes <= layout.MAX_HEADER_BYTES + 8, file, f"{data_file.path} has too large a header")
    _require(_HEX.fullmatch(data_file.header_hash) is not None, file, f"{data_file.path} has no hash of its header")


def _check_tensor(tensor: TensorEntry, manifest: Manifest, file: str) -> None:
    problem = _problem_of(tensor, manifest)
    if problem:
        raise CheckpointInvalid(f"{file}: tensor {tensor.name[:200]!r} {problem}")


def _problem_of(tensor: TensorEntry, manifest: Manifest) -> str:
    """What cannot be true of it; empty if nothing is wrong. There may be many thousands, so words are made last."""
    dtype = BY_NAME.get(tensor.dtype)
    if dtype is None:
        return f"has elements of type {tensor.dtype[:40]!r}, which is not known"
    shape, slices = tensor.shape, tensor.slices
    if shape and min(shape) < 0:
        return f"has the shape {shape}"
    if math.prod(filter(None, shape)) * dtype.itemsize >= MAX_TENSOR_BYTES:  # an empty one may claim any other sides
        return f"has the shape {str(shape)[:200]}, which is too large"
    if len(slices) > 1 and len(shape) >= MAX_DIMENSIONS:
        return f"has {len(shape)} dimensions and lies in slices; only fewer than {MAX_DIMENSIONS} can be put together"
    for part in slices:
        if (part.shape != shape or any(part.start) or len(part.start) != len(shape)) and not _is_within(part, shape):
            return "has a slice that lies outside of it"
        num_bytes = math.prod(part.shape) * dtype.itemsize
        problem = (
            _problem_of_bytes(manifest, part.file, part.offset, num_bytes, part.hashes, part.encoding, part.frames)
            or ("refers to bytes before it, and there are none" if part.encoding == "xor-zstd" else "")
            or next(filter(None, (_problem_of_patch(manifest, patch, num_bytes) for patch in part.patches)), "")
        )
        if problem:
            return problem
    num_elements = sum(math.prod(part.shape) for part in slices)
    if num_elements != math.prod(shape) or not _are_disjoint(shape, slices):
        return "is not made up of its slices"
    return ""


def _problem_of_bytes(
    manifest: Manifest,
    file: int,
    offset: int,
    num_bytes: int,
    hashes: tuple[str, ...],
    encoding: str = "",
    frames: tuple[int, ...] = (),
) -> str:
    """Of bytes in a file: `num_bytes` is what they have once decoded."""
    if not 0 <= file < len(manifest.files):
        return f"lies in file {file}, which is not there"
    num_chunks = -(-num_bytes // manifest.chunk_bytes)
    if len(hashes) != num_chunks or not all(map(_HEX.fullmatch, hashes)):
        return f"has {len(hashes)} hashes, {num_chunks} are expected"
    if encoding not in ENCODINGS:
        return f"is encoded as {encoding[:40]!r}, which is not known"
    if encoding:
        largest = manifest.chunk_bytes + manifest.chunk_bytes // 128 + 1_024  # what zstd makes of noise
        if len(frames) != num_chunks or not all(0 < size <= largest for size in frames):
            return f"has {len(frames)} frames, {num_chunks} of 1 to {largest} bytes are expected"
        num_bytes = sum(frames)
    elif frames:
        return "has frames, but is not encoded"
    data_file = manifest.files[file]
    if offset < data_file.header_bytes or offset + num_bytes > data_file.size_bytes:
        return f"lies at {offset}+{num_bytes} of {data_file.path}, which has {data_file.size_bytes} bytes"
    return ""


def _problem_of_patch(manifest: Manifest, patch: Patch, slice_bytes: int) -> str:
    unit, count = patch.unit_bytes, patch.num_units
    if not 1 <= unit <= MAX_UNIT_BYTES or not 1 <= count <= -(-slice_bytes // unit):
        return f"has a patch of {count} units of {unit} bytes, which it has not"
    if not 0 <= count * unit - patch.num_bytes < unit:
        return f"has a patch of {patch.num_bytes} bytes for {count} units of {unit}"
    if patch.index_bytes not in (4, 8):
        return f"has a patch whose indices have {patch.index_bytes} bytes"
    num_index_bytes = count * patch.index_bytes
    return _problem_of_bytes(
        manifest, patch.file, patch.index_offset, num_index_bytes, patch.index_hashes
    ) or _problem_of_bytes(
        manifest, patch.file, patch.offset, patch.num_bytes, patch.hashes, patch.encoding, patch.frames
    )


def _is_within(part: Slice, shape: tuple[int, ...]) -> bool:
    return len(part.start) == len(part.shape) == len(shape) and all(
        min(start, size) >= 0 and start + size <= whole
        for start, size, whole in zip(part.start, part.shape, shape, strict=True)
    )


def _are_disjoint(shape: tuple[int, ...], slices: tuple[Slice, ...]) -> bool:
    """In order along the dimension that is cut most often, so that only neighbours are compared; a bound for those who
    are all neighbours.
    """
    if len(slices) < 2:
        return True
    if not slices[0].start:
        return False  # one number, twice
    if is_grid(shape, [(part.start, part.shape) for part in slices]):
        return True
    axis = max(range(len(slices[0].start)), key=lambda d: len({part.start[d] for part in slices}))
    num_compared = 0
    near: list[Slice] = []
    for one in sorted(slices, key=lambda part: part.start[axis]):
        near = [other for other in near if other.start[axis] + other.shape[axis] > one.start[axis]]
        num_compared += len(near)
        if num_compared > MAX_COMPARISONS or any(_overlap(one, other) for other in near):
            return False
        near.append(one)
    return True


def _overlap(one: Slice, other: Slice) -> bool:
    if not all(one.shape) or not all(other.shape):
        return False
    return all(
        a < b + m and b < a + n for a, n, b, m in zip(one.start, one.shape, other.start, other.shape, strict=True)
    )


def _require(holds: bool, file: str, problem: str) -> None:
    if not holds:
        raise CheckpointInvalid(f"{file}: {problem}")
