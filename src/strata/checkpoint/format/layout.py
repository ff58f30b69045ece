"""The byte layout of one data file, which is a safetensors file.

    0            8            8 + N            8 + N + data
    │ N (u64 LE) │ JSON header │ tensors, back to back │

The header is padded with spaces until the data begins on a multiple of 4 KiB, so that the file can be written with
O_DIRECT and memory-mapped. safetensors allows no gaps between tensors; tensors with the widest elements come first, so
that each is still aligned to its elements. Any safetensors reader opens the file.

JSON objects with a duplicate key are rejected: most readers take the last of the two values, some the first, so the
same bytes would be two different checkpoints with one valid hash.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from strata.checkpoint.format.dtypes import BY_NAME
from strata.errors import CheckpointInvalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.checkpoint.format.dtypes import DType

ALIGNMENT = 4_096
CHUNK_BYTES = 16 << 20
MAX_DIMENSIONS = 256
"""numpy has at most 64, and most operations of torch as well."""
MAX_TENSOR_BYTES = 1 << 63
"""A larger size cannot be real, and products of larger numbers would take long."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
_METADATA = "__metadata__"


class Place(NamedTuple):
    """The place of one tensor in a file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    """In bytes from the start of the file."""
    num_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """The header of a file and the places of its tensors."""

    header: bytes
    """Everything before the data, including its length; a multiple of `ALIGNMENT` bytes."""
    places: tuple[Place, ...]
    """In file order."""
    size_bytes: int


class TensorSpec(Protocol):
    """A tensor to lay out, such as a `Leaf`."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> DType: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def num_bytes(self) -> int: ...


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def plan(leaves: Sequence[TensorSpec], metadata: dict[str, str]) -> Layout:
    """Lay out a file that holds these tensors."""
    ordered = sorted(leaves, key=lambda leaf: -leaf.dtype.itemsize)  # stable: tensors of one width keep their order
    entries: dict[str, object] = {_METADATA: {"format": "pt", **metadata}}
    offset = 0
    for leaf in ordered:
        end = offset + leaf.num_bytes
        entries[leaf.name] = _Entry(leaf.dtype.in_file, leaf.dtype.shape_in_file(leaf.shape), (offset, end))
        offset = end
    text = msgspec.json.encode(entries)
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    places, at = [], len(header)
    for leaf in ordered:
        places.append(Place(leaf.name, leaf.dtype, leaf.shape, at, leaf.num_bytes))
        at += leaf.num_bytes
    return Layout(header, tuple(places), at)


def chunks(offset: int, num_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> list[tuple[int, int]]:
    """Return (start, end) of each piece of a tensor that has a hash of its own."""
    end = offset + num_bytes
    return [(start, min(start + chunk_bytes, end)) for start in range(offset, end, chunk_bytes)]


def read_header(data: bytes, *, file: str, size_bytes: int) -> tuple[dict[str, str], tuple[Place, ...]]:
    """Return the metadata and the tensors, in file order, of any safetensors header.

    `data` begins with the length; `size_bytes` is the size of the whole file.

    Raises:
        CheckpointInvalid: The header is malformed; the message names the tensor.
    """
    length = header_length(data, file=file, size_bytes=size_bytes)
    text = data[8 : 8 + length]
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop(_METADATA, b"{}"), type=dict[str, str])
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointInvalid(f"{file}: the header is not a safetensors header ({error})") from None
    written = msgspec.json.encode({_METADATA: metadata, **entries})
    check_duplicate_keys(text.rstrip(b" "), written=written, file=f"{file}, header")
    places = []
    begin = 8 + length
    expected = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        place = _place(name, entry, begin, file)
        if entry.data_offsets[0] != expected:
            what = "overlaps the previous tensor" if entry.data_offsets[0] < expected else "leaves a gap before it"
            raise CheckpointInvalid(
                f"{file}: tensor {name[:200]!r} {what} (starts at {entry.data_offsets[0]}, expected {expected})"
            )
        expected = entry.data_offsets[1]
        places.append(place)
    if begin + expected != size_bytes:
        raise CheckpointInvalid(f"{file} has {size_bytes} bytes, but its header describes {begin + expected}")
    return metadata, tuple(places)


def header_length(data: bytes, *, file: str, size_bytes: int) -> int:
    """Return the length of the JSON header, from the first eight bytes of the file."""
    if len(data) < 8:
        raise CheckpointInvalid(f"{file} has {size_bytes} bytes, too few for a safetensors file")
    length = int.from_bytes(data[:8], "little")
    if length > min(MAX_HEADER_BYTES, size_bytes - 8):
        raise CheckpointInvalid(f"{file}: the header claims {length} bytes, but the file has only {size_bytes}")
    return length


def _place(name: str, entry: _Entry, begin: int, file: str) -> Place:
    what = f"{file}: tensor {name[:200]!r}"
    dtype = BY_NAME.get(entry.dtype)
    if dtype is None:
        raise CheckpointInvalid(f"{what} has the unknown dtype {entry.dtype[:40]!r}")
    start, end = entry.data_offsets
    if len(entry.shape) > MAX_DIMENSIONS:
        raise CheckpointInvalid(f"{what} has {len(entry.shape)} dimensions, more than {MAX_DIMENSIONS}")
    if not all(0 <= number < MAX_TENSOR_BYTES for number in (*entry.shape, start, end)):
        raise CheckpointInvalid(f"{what} has a negative or impossibly large number in its shape or offsets")
    num_bytes = math.prod(entry.shape) * dtype.itemsize
    if end - start != num_bytes:
        needed = str(num_bytes) if num_bytes < MAX_TENSOR_BYTES else "2**63 or more"
        raise CheckpointInvalid(
            f"{what} has {end - start} bytes, but {dtype.name} {str(entry.shape)[:200]} needs {needed}"
        )
    return Place(name, dtype, entry.shape, begin + start, num_bytes)


# -- duplicate keys ------------------------------------------------------------------------------------------------


def check_duplicate_keys(data: bytes, *, written: bytes, file: str) -> None:
    """Reject JSON objects with a duplicate key.

    `written` is the decoded data, encoded again. If it equals `data`, as it nearly always does, no key is duplicate.

    Raises:
        CheckpointInvalid: An object in `data` has a duplicate key.
    """
    if data == written:
        return

    def unique(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise CheckpointInvalid(f"{file}: an object has the key {key[:200]!r} twice")
            seen.add(key)

    try:
        json.loads(
            data, object_pairs_hook=unique, parse_int=len, parse_float=len
        )  # the values of numbers do not matter
    except CheckpointInvalid:  # a ValueError, too
        raise
    except (ValueError, RecursionError) as error:  # JSON that msgspec accepts
        raise CheckpointInvalid(f"{file} is not standard JSON: {error}") from None
