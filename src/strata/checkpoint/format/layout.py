"""Where every byte of a snapshot goes: the layout of one safetensors file.

    0            8            8 + N            8 + N + data
    │ N (u64 LE) │ JSON header │ tensors, back to back │

The header is padded with spaces until the data begins on a multiple of 4 KiB, so that it can be written with O_DIRECT
and mapped. safetensors allows no gaps between tensors; those with the widest elements come first, so that every tensor
is aligned to its own elements all the same. Any safetensors reader opens the file.
"""

from __future__ import annotations

import json
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
MAX_HEADER_BYTES = 100_000_000
"""As the safetensors library has it."""
_METADATA = "__metadata__"


class Place(NamedTuple):
    """One tensor in a file."""

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
    header: bytes
    """All that comes before the data, its length included; a multiple of `ALIGNMENT`."""
    places: tuple[Place, ...]
    """In the order of the file."""
    size_bytes: int


class TensorSpec(Protocol):
    """What goes into a file: a leaf, say."""

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
    ordered = sorted(leaves, key=lambda leaf: -leaf.dtype.itemsize)  # stable: otherwise as they came
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
    """(start, end) of the pieces of a tensor that have a hash each."""
    end = offset + num_bytes
    return [(start, min(start + chunk_bytes, end)) for start in range(offset, end, chunk_bytes)]


def read_header(data: bytes, *, file: str, size_bytes: int) -> tuple[dict[str, str], tuple[Place, ...]]:
    """Any safetensors header, ours or not: its metadata and its tensors in the order of the file.

    `data` begins with the length; `size_bytes` is the size of the whole file.

    Raises:
        CheckpointInvalid: It is not one; the message says what is wrong with which tensor.
    """
    length = header_length(data, file=file, size_bytes=size_bytes)
    text = data[8 : 8 + length]
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop(_METADATA, b"{}"), type=dict[str, str])
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointInvalid(f"{file}: its header is not that of a safetensors file ({error})") from None
    written = msgspec.json.encode({_METADATA: metadata, **entries})
    check_duplicate_keys(text.rstrip(b" "), written=written, file=f"{file}, its header")
    places = []
    begin = 8 + length
    expected = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        place = _place(name, entry, begin, file)
        if entry.data_offsets[0] != expected:
            what = "overlaps the one before it" if entry.data_offsets[0] < expected else "leaves a gap before it"
            raise CheckpointInvalid(
                f"{file}: tensor {name!r} {what} (starts at {entry.data_offsets[0]}, not {expected})"
            )
        expected = entry.data_offsets[1]
        places.append(place)
    if begin + expected != size_bytes:
        raise CheckpointInvalid(f"{file}: {size_bytes} bytes, but its header tells of {begin + expected}")
    return metadata, tuple(places)


def header_length(data: bytes, *, file: str, size_bytes: int) -> int:
    """Of the JSON, from the file's first eight bytes."""
    if len(data) < 8:
        raise CheckpointInvalid(f"{file}: {size_bytes} bytes are too few for a safetensors file")
    length = int.from_bytes(data[:8], "little")
    if length > min(MAX_HEADER_BYTES, size_bytes - 8):
        raise CheckpointInvalid(f"{file}: its header claims {length} bytes, which do not fit ({size_bytes} in all)")
    return length


def _place(name: str, entry: _Entry, begin: int, file: str) -> Place:
    dtype = BY_NAME.get(entry.dtype)
    if dtype is None:
        raise CheckpointInvalid(f"{file}: tensor {name!r} has elements of type {entry.dtype!r}, which is not known")
    num_bytes = dtype.itemsize
    for size in entry.shape:
        if size < 0:
            raise CheckpointInvalid(f"{file}: tensor {name!r} has the shape {entry.shape}")
        num_bytes *= size
    start, end = entry.data_offsets
    if start < 0 or end - start != num_bytes:
        raise CheckpointInvalid(
            f"{file}: tensor {name!r} has {end - start} bytes, but its shape {entry.shape} of {dtype.name} "
            f"needs {num_bytes}"
        )
    return Place(name, dtype, entry.shape, begin + start, num_bytes)


# -- duplicate keys ------------------------------------------------------------------------------------------------


def check_duplicate_keys(data: bytes, *, written: bytes, file: str) -> None:
    """`written` is what our encoder makes of what `data` was taken for. If they are the same bytes, as they nearly
    always are, there is nothing to look for.

    Raises:
        CheckpointInvalid: An object in `data` has a key twice.
    """
    if data == written:
        return

    def unique(pairs: list[tuple[str, Any]]) -> None:
        keys = [key for key, _ in pairs]
        if len(set(keys)) != len(keys):
            twice = next(key for i, key in enumerate(keys) if key in keys[:i])
            raise CheckpointInvalid(f"{file}: the key {twice[:200]!r} is there twice in one object")

    try:
        json.loads(data, object_pairs_hook=unique, parse_int=len, parse_float=len)  # numbers are not looked at
    except (ValueError, RecursionError) as error:  # of JSON that another reader has understood
        raise CheckpointInvalid(f"{file} is not plain JSON: {error}") from None
