"""The job description: what a saver needs to know of a snapshot in the staging memory.

It is plain data, so that the saver can be another process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.format.layout import Layout, Place
from strata.checkpoint.format.merge import Head  # noqa: TC001 - msgspec resolves it at run time
from strata.checkpoint.group.ranks import Ranks  # noqa: TC001 - msgspec resolves it at run time
from strata.checkpoint.save.delta import Changes

if TYPE_CHECKING:
    from collections.abc import Mapping


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a manager that concern its files."""

    compression: str = ""
    """`zstd`: compressible tensors are compressed."""
    depth: int = 1
    """The maximum length of a chain of deltas."""
    rebase_at: float = 0.5
    """A delta that is larger than this share of the state becomes a full checkpoint."""
    xor: bool = False
    """Half-precision tensors that changed throughout are stored as their compressed difference from the base."""
    statistics: bool = True


class JobTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in the staging memory, and which part of which tensor it is."""

    name: str
    """The name in the data file."""
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    tensor: str
    """The name in the manifest."""
    whole: tuple[int, ...]
    """The shape of the whole tensor."""
    start: tuple[int, ...]
    """Where this part begins in the whole tensor."""
    sharded: bool

    @property
    def place(self) -> Place:
        return Place(self.name, BY_NAME[self.dtype], self.shape, self.offset, self.num_bytes)


class PackedChanges(msgspec.Struct, frozen=True, array_like=True):
    """The changes of all tensors that changed, with a bit per unit."""

    bits: tuple[bytes, ...]
    tensors: dict[str, tuple[int, int]]
    """By name, the size of a unit and the number of its bits: the arrays of one table share them."""

    @classmethod
    def of(cls, changed: Mapping[str, Changes]) -> PackedChanges:
        different = {id(bits): bits for _, bits in changed.values() if bits.any()}
        numbers = {each: number for number, each in enumerate(different)}
        return cls(
            tuple(np.packbits(bits).tobytes() for bits in different.values()),
            {name: (unit, numbers[id(bits)]) for name, (unit, bits) in changed.items() if id(bits) in numbers},
        )

    def unpacked(self, tensor: JobTensor) -> Changes | None:
        if tensor.name not in self.tensors:
            return None
        unit, number = self.tensors[tensor.name]
        packed = np.frombuffer(self.bits[number], np.uint8)
        return Changes(unit, np.unpackbits(packed, count=-(-tensor.num_bytes // unit)).view(np.bool_))


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One snapshot to write."""

    head: Head
    ranks: Ranks | None = None
    """None: a single rank."""
    commits: bool = True
    """Whether the saver commits; if not, it returns its part and the manager commits."""
    header: bytes
    size_bytes: int
    tensors: tuple[JobTensor, ...]
    structure: Any
    changed: PackedChanges | None = None
    """What changed since the previous snapshot; None: it was not compared."""
    options: Options = Options()

    @property
    def rank(self) -> int:
        return self.ranks.rank if self.ranks is not None else 0

    @property
    def layout(self) -> Layout:
        return Layout(self.header, tuple(tensor.place for tensor in self.tensors), self.size_bytes)

    def changed_units(self, tensor: JobTensor) -> Changes | None:
        """Return which units of a tensor changed; None if none did."""
        return None if self.changed is None else self.changed.unpacked(tensor)


def max_job_bytes(layout: Layout) -> int:
    """Return the space that an encoded job may take behind its snapshot: names, shapes, and a bit per unit."""
    return (1 << 16) + len(layout.header) * 4 + layout.size_bytes // 400


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Job)


def encode(job: Job) -> bytes:
    return _encoder.encode(job)


def decode(data: bytes | memoryview) -> Job:
    return _decoder.decode(data)
