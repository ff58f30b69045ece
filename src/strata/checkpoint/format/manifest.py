"""The manifest lists the files and tensors of a checkpoint. A checkpoint exists once its manifest does.

    {"strata_checkpoint": 1, "hash": "<xxh3-128 of the next value's bytes>", "manifest": {…}}

A manifest is checked before it is published and again after it is read: no number or name in it is trusted.
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
"""The limit of numpy."""
MAX_TENSOR_BYTES = 1 << 63
_HEX = re.compile(r"[0-9a-f]{32}")
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class CheckpointType(enum.Enum):
    """Which part of the state a checkpoint holds."""

    FULL = "FULL"
    INCREMENTAL = "INCREMENTAL"
    """What changed since its base."""
    OPTIMIZER_ONLY = "OPTIMIZER_ONLY"
    MODEL_ONLY = "MODEL_ONLY"


class DataFile(msgspec.Struct, frozen=True, kw_only=True):
    """One safetensors file."""

    path: str
    """Relative to the checkpoint; a file of a base is relative to the store: `ID/NAME`."""
    rank: int
    size_bytes: int
    header_bytes: int
    header_hash: str


ENCODINGS = ("", "zstd", "xor-zstd")
"""Unencoded; each chunk a zstd frame; a zstd frame of the exclusive or with the bytes that are replaced."""


class Patch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Units of a slice that replace older ones: rows of a table, or blocks of bytes.

    The contents of the slice are cut into units of `unit_bytes`; the last one may be shorter. The indices of the
    replaced units rise, and the data holds the new units back to back.
    """

    file: int
    """An index into the manifest's files."""
    unit_bytes: int
    num_units: int
    num_bytes: int
    """Of the data; less than `num_units * unit_bytes` if it includes the short last unit."""
    index_bytes: int
    """Size of each index: 4 or 8, little-endian, unsigned."""
    index_offset: int
    """In bytes from the start of the file."""
    index_hashes: tuple[str, ...]
    offset: int
    """Of the data."""
    hashes: tuple[str, ...]
    encoding: str = ""
    frames: tuple[int, ...] = ()


class Slice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a tensor and where it is stored."""

    file: int
    """An index into the manifest's files."""
    offset: int
    """In bytes from the start of the file."""
    start: tuple[int, ...]
    """Where the part begins in the tensor."""
    shape: tuple[int, ...]
    hashes: tuple[str, ...]
    """xxh3-128 of each `chunk_bytes` of its contents, decoded and before patches are applied."""
    encoding: str = ""
    """One of `ENCODINGS`, except the exclusive or."""
    frames: tuple[int, ...] = ()
    """With an encoding: the size of each chunk in the file. Chunks lie back to back from `offset` on."""
    patches: tuple[Patch, ...] = ()
    """Later changes, oldest first."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor and its slices, which cover it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * BY_NAME[self.dtype].itemsize


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one checkpoint but its data."""

    id: str
    step: int
    epoch: int
    type: CheckpointType
    created_at_s: float
    num_ranks: int
    chunk_bytes: int
    parent: str = ""
    """The id of the checkpoint that a delta was computed against."""
    files: tuple[DataFile, ...]
    tensors: tuple[TensorEntry, ...]
    structures: tuple[Any, ...]
    """See `tree.py`. Ranks with equal structures share one."""
    structure_of_rank: tuple[int, ...]
    metadata: dict[str, Any] = {}
    data_cursor: str = ""
    """The position of the data loader; opaque here."""
    full_bytes: int
    """The size of the whole state."""
    written_bytes: int
    """The size of the files that this checkpoint wrote itself."""
    model_hash: str
    """A hash of the contents; see the function `model_hash`."""
    why: str = ""
    """Why the type is not the requested one; empty if it is."""

    @property
    def size_bytes(self) -> int:
        """The size of all files that it needs, including those of its bases."""
        return sum(file.size_bytes for file in self.files)

    @property
    def bases(self) -> tuple[str, ...]:
        """The ids of the checkpoints whose files it needs."""
        return tuple(sorted({file.path.split("/")[0] for file in self.files if "/" in file.path}))


def model_hash(tensors: Iterable[TensorEntry]) -> str:
    """Hash the contents of all tensors.

    Equal tensors that are sliced and patched alike have equal hashes, whatever their step, location and encoding.
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
    """Check and encode a manifest.

    Raises:
        CheckpointInvalid: A reader would reject it.
    """
    check(manifest, file=FILE_NAME)
    data = _sealed(manifest)
    if len(data) > MAX_MANIFEST_BYTES:
        raise CheckpointInvalid(
            f"the manifest has {len(data)} bytes, more than the limit of {MAX_MANIFEST_BYTES}; save fewer tensors"
        )
    return data


def _sealed(manifest: Manifest) -> bytes:
    body = _encoder.encode(manifest)
    envelope = b'{"strata_checkpoint":%d,"hash":"%s","manifest":%s}\n'
    return envelope % (VERSION, xxh3_128_hexdigest(body).encode(), body)


def decode(data: bytes, *, file: str) -> Manifest:
    """Decode and check a manifest.

    Raises:
        CheckpointInvalid: It is malformed, has a duplicate key or contradicts itself.
        CheckpointCorrupt: Its bytes are not the bytes that were written.
        CheckpointTooNew: A newer version wrote it.
    """
    try:
        version = msgspec.json.decode(data, type=_Version).strata_checkpoint
        if version > VERSION:
            raise CheckpointTooNew(f"{file} has format {version}, this version reads up to {VERSION}; upgrade strata")
        if version < VERSION:
            raise CheckpointInvalid(f"{file} has the unknown format {version}")
        envelope = _envelope_decoder.decode(data)
        body = bytes(envelope.manifest)
        found = xxh3_128_hexdigest(body)
        if found != envelope.hash:
            raise CheckpointCorrupt(
                f"{file}: its hash is {found}, expected {envelope.hash[:40]!r}",
                file=file,
                expected=envelope.hash,
                found=found,
            )
        manifest = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointInvalid(f"{file} is not a manifest: {error}") from None
    layout.check_duplicate_keys(data, written=_sealed(manifest), file=file)
    check(manifest, file=file)
    return manifest


# -- checks --------------------------------------------------------------------------------------------------------


def check(manifest: Manifest, *, file: str) -> None:
    """Check everything that a manifest states about itself.

    Raises:
        CheckpointInvalid: A name, number or offset is impossible; the message names the tensor.
    """
    _require(is_safe_name(manifest.id), file, f"the id {manifest.id[:80]!r} is not a valid name")
    _require(not manifest.parent or is_safe_name(manifest.parent), file, "the id of the parent is not a valid name")
    numbers = (manifest.step, manifest.epoch, manifest.full_bytes, manifest.written_bytes)
    _require(all(0 <= number < 1 << 63 for number in numbers), file, "a step, epoch or size is negative or too large")
    _require(0 <= manifest.created_at_s < 1 << 40, file, f"created_at_s={manifest.created_at_s:g} is not a valid time")
    _require(manifest.num_ranks >= 1, file, f"num_ranks={manifest.num_ranks} is not positive")
    _require(1 <= manifest.chunk_bytes <= 1 << 30, file, f"chunk_bytes={manifest.chunk_bytes} is out of range")
    _require(
        len(manifest.structure_of_rank) == manifest.num_ranks, file, "the number of structures does not match num_ranks"
    )
    known = range(len(manifest.structures))
    _require(all(i in known for i in manifest.structure_of_rank), file, "a rank refers to a missing structure")
    for data_file in manifest.files:
        _check_file(data_file, manifest, file)
    names: set[str] = set()
    for tensor in manifest.tensors:
        _require(tensor.name not in names, file, f"tensor {tensor.name!r} occurs twice")
        names.add(tensor.name)
        _check_tensor(tensor, manifest, file)
    _check_apart(manifest, file)


def _check_apart(manifest: Manifest, file: str) -> None:
    """Reject two tensors that share bytes of a file: a shared tensor has one entry."""
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
                f"{file}: tensors {name_before[:200]!r} and {name[:200]!r} overlap in {manifest.files[number].path}, "
                f"bytes {start} to {min(end, end_before)}"
            )
        if number != file_before or end > end_before:
            file_before, end_before, name_before = number, end, name


def is_safe_name(name: str) -> bool:
    """Return whether the name is one path component that every file system and store accepts."""
    return _SAFE_NAME.fullmatch(name) is not None


def _check_file(data_file: DataFile, manifest: Manifest, file: str) -> None:
    parts = data_file.path.split("/")
    is_of_base = len(parts) == 2 and manifest.parent != "" and parts[0] != manifest.id
    _require(
        (len(parts) == 1 or is_of_base) and all(map(is_safe_name, parts)),
        file,
        f"the path {data_file.path[:80]!r} leads out of the checkpoint",
    )
    _require(
        0 <= data_file.rank < manifest.num_ranks,
        file,
        f"{data_file.path} belongs to rank {data_file.rank} of {manifest.num_ranks}",
    )
    _require(8 <= data_file.header_bytes <= data_file.size_bytes, file, f"{data_file.path} has an impossible size")
    _require(
        data_file.header_bytes <= layout.MAX_HEADER_BYTES + 8, file, f"the header of {data_file.path} is too large"
    )
    _require(
        _HEX.fullmatch(data_file.header_hash) is not None, file, f"the header of {data_file.path} has no valid hash"
    )


def _check_tensor(tensor: TensorEntry, manifest: Manifest, file: str) -> None:
    problem = _problem_of(tensor, manifest)
    if problem:
        raise CheckpointInvalid(f"{file}: tensor {tensor.name[:200]!r} {problem}")


def _problem_of(tensor: TensorEntry, manifest: Manifest) -> str:
    """Return what is wrong with a tensor, or an empty string. Messages are built last: there may be 100,000 tensors."""
    dtype = BY_NAME.get(tensor.dtype)
    if dtype is None:
        return f"has the unknown dtype {tensor.dtype[:40]!r}"
    shape, slices = tensor.shape, tensor.slices
    if len(shape) > layout.MAX_DIMENSIONS:
        return f"has {len(shape)} dimensions, more than {layout.MAX_DIMENSIONS}"
    if shape and min(shape) < 0:
        return f"has the invalid shape {str(shape)[:200]}"
    if (
        math.prod(filter(None, shape)) * dtype.itemsize >= MAX_TENSOR_BYTES
    ):  # an empty tensor may claim any other dimension
        return f"has the shape {str(shape)[:200]}, which is too large"
    if len(slices) > 1 and len(shape) >= MAX_DIMENSIONS:
        return f"has slices and {len(shape)} dimensions; sliced tensors must have fewer than {MAX_DIMENSIONS}"
    for part in slices:
        if (part.shape != shape or any(part.start) or len(part.start) != len(shape)) and not _is_within(part, shape):
            return "has a slice outside its shape"
        num_bytes = math.prod(part.shape) * dtype.itemsize
        problem = (
            _problem_of_bytes(manifest, part.file, part.offset, num_bytes, part.hashes, part.encoding, part.frames)
            or ("has a slice that is an exclusive or without a base" if part.encoding == "xor-zstd" else "")
            or next(filter(None, (_problem_of_patch(manifest, patch, num_bytes) for patch in part.patches)), "")
        )
        if problem:
            return problem
    num_elements = sum(math.prod(part.shape) for part in slices)
    if num_elements != math.prod(shape) or not _are_disjoint(shape, slices):
        return "is not covered exactly once by its slices"
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
    """Return what is wrong with a range of bytes of a file; `num_bytes` is their decoded size."""
    if not 0 <= file < len(manifest.files):
        return f"refers to file {file}, which the manifest does not list"
    num_chunks = -(-num_bytes // manifest.chunk_bytes)
    if len(hashes) != num_chunks or not all(map(_HEX.fullmatch, hashes)):
        return f"has {len(hashes)} hashes, expected {num_chunks}"
    if encoding not in ENCODINGS:
        return f"has the unknown encoding {encoding[:40]!r}"
    if encoding:
        largest = manifest.chunk_bytes + manifest.chunk_bytes // 128 + 1_024  # the size of incompressible data in zstd
        if len(frames) != num_chunks or not all(0 < size <= largest for size in frames):
            return f"has {len(frames)} frames, expected {num_chunks} of 1 to {largest} bytes"
        num_bytes = sum(frames)
    elif frames:
        return "has frames but no encoding"
    data_file = manifest.files[file]
    if offset < data_file.header_bytes or offset + num_bytes > data_file.size_bytes:
        return f"has {num_bytes} bytes at {offset} of {data_file.path}, which has only {data_file.size_bytes} bytes"
    return ""


def _problem_of_patch(manifest: Manifest, patch: Patch, slice_bytes: int) -> str:
    unit, count = patch.unit_bytes, patch.num_units
    if not 1 <= unit <= MAX_UNIT_BYTES or not 1 <= count <= -(-slice_bytes // unit):
        return f"has a patch with an impossible number of units ({count} of {unit} bytes)"
    if not 0 <= count * unit - patch.num_bytes < unit:
        return f"has a patch of {patch.num_bytes} bytes for {count} units of {unit}"
    if patch.index_bytes not in (4, 8):
        return f"has a patch with indices of {patch.index_bytes} bytes, expected 4 or 8"
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
    """Return whether no two slices overlap.

    The slices are sorted along the dimension with the most cuts, so that only neighbours are compared, up to a bound.
    """
    if len(slices) < 2:
        return True
    if not slices[0].start:
        return False  # a scalar has one slice
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
