"""All that a saver has to know of a snapshot in its memory: plain data, so that it can be another process."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.format.layout import Layout, Place
from strata.checkpoint.format.merge import Head  # noqa: TC001 - likewise
from strata.checkpoint.group.ranks import Ranks  # noqa: TC001 - msgspec looks it up
from strata.checkpoint.save.delta import Bits, num_units


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How a manager wants its files."""

    compression: str = ""
    """`zstd`: tensors that shrink by it are stored so."""
    depth: int = 1
    """How many patches may lie upon each other before a delta is taken from the base again."""
    rebase_at: float = 0.5
    """A delta that would be larger than this share of the whole is not one."""
    xor: bool = False
    """Half-precision tensors that changed all over are stored as what they differ in from the base, compressed."""
    statistics: bool = True


class JobTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in the memory, and which part of which tensor it is."""

    name: str
    """In the data file."""
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    tensor: str
    """In the manifest."""
    whole: tuple[int, ...]
    """The shape of the whole tensor."""
    start: tuple[int, ...]
    """Where this part lies in it."""
    sharded: bool

    @property
    def place(self) -> Place:
        return Place(self.name, BY_NAME[self.dtype], self.shape, self.offset, self.num_bytes)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    head: Head
    ranks: Ranks | None = None
    """None: there is one only."""
    commits: bool = True
    """Whether the saver commits, or only puts its part there for somebody else to."""
    header: bytes
    size_bytes: int
    tensors: tuple[JobTensor, ...]
    structure: Any
    changed: dict[str, bytes] | None = None
    """Bits of the units that differ from the snapshot before, of tensors that have any; None: it was not compared."""
    options: Options = Options()

    @property
    def rank(self) -> int:
        return self.ranks.rank if self.ranks is not None else 0

    @property
    def layout(self) -> Layout:
        return Layout(self.header, tuple(tensor.place for tensor in self.tensors), self.size_bytes)

    def changed_units(self, tensor: JobTensor) -> Bits:
        count = num_units(tensor.place)
        packed = (self.changed or {}).get(tensor.name)
        if packed is None:
            return np.zeros(count, np.bool_)
        return np.unpackbits(np.frombuffer(packed, np.uint8), count=count).view(np.bool_)


def packed_bits(changed: dict[str, Bits]) -> dict[str, bytes]:
    return {name: np.packbits(bits).tobytes() for name, bits in changed.items() if bits.any()}


def with_reason(head: Head, why: str) -> Head:
    return msgspec.structs.replace(head, why=why)


def room_for(layout: Layout) -> int:
    """What a job may take behind its snapshot: names and shapes, and a bit for each unit of the tensors."""
    return (1 << 16) + len(layout.header) * 4 + layout.size_bytes // 400


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Job)


def encode(job: Job) -> bytes:
    return _encoder.encode(job)


def decode(data: bytes | memoryview) -> Job:
    return _decoder.decode(data)
