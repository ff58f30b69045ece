"""The tensors of a checkpoint or of a plain safetensors file, and their bytes, in pieces of bounded size.

`SavedCheckpoint` reads through `checkpoint/load/`, so every byte is compared with its hash, and incremental and sharded
checkpoints look like full ones. `PlainFile` reads any safetensors file; such a file has no hashes.
"""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from strata.checkpoint.format import layout
from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.format.manifest import TensorEntry
from strata.checkpoint.format.shards import Box
from strata.checkpoint.load import reader, statistics
from strata.dashboard.explorer.tree import natural_key
from strata.errors import CheckpointInvalid, CheckpointMissing, ObjectMissing, StorageError
from strata.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from strata.checkpoint.format.buffers import Bytes
    from strata.checkpoint.format.manifest import Manifest
    from strata.checkpoint.load.statistics import Statistics
    from strata.dashboard.explorer.limits import Budget
    from strata.storage import Store

PIECE_BYTES = 16 << 20
"""Read at a time: one chunk with a hash of its own."""

Piece = tuple[int, Any]
"""The number of the first element, and the bytes."""


class Contents(Protocol):
    """What the explorer needs of a checkpoint. The bytes of a tensor are in row-major order."""

    id: str
    version: str
    """Changes when the contents do."""
    tensors: Mapping[str, TensorEntry]
    """In the order in which they are listed."""

    def statistics(self) -> Mapping[str, Statistics]:
        """Return the stored statistics; empty if there are none."""
        ...

    def pieces(self, tensor: TensorEntry, budget: Budget) -> Iterator[Piece]:
        """Read a tensor from begin to end. A piece is valid until the next but one is requested.

        Raises:
            CheckpointInvalid: The data cannot be trusted; the message names the file and the tensor.
            ReadTooLarge: The budget is used up.
        """
        ...

    def box(self, tensor: TensorEntry, box: Box, budget: Budget) -> Bytes:
        """Read a box of a tensor.

        Raises:
            CheckpointInvalid: See `pieces`.
        """
        ...


class SavedCheckpoint:
    """A checkpoint of ours."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store, self.manifest = store, manifest
        self.id = manifest.id
        self.version = f"{store.url}/{manifest.id}/{manifest.model_hash}"
        self.tensors: Mapping[str, TensorEntry] = {tensor.name: tensor for tensor in manifest.tensors}

    def statistics(self) -> Mapping[str, Statistics]:
        return statistics.read(self.store, self.manifest) or {}

    def pieces(self, tensor: TensorEntry, budget: Budget) -> Iterator[Piece]:
        budget.charge(tensor.num_bytes, f"tensor {tensor.name[:200]!r}")
        pieces = self._pieces(tensor, budget)
        return ahead(pieces) if tensor.num_bytes > PIECE_BYTES else pieces

    def box(self, tensor: TensorEntry, box: Box, budget: Budget) -> Bytes:
        # A slice needs whole chunks, from its first to its last element.
        budget.charge(_covered_bytes(tensor, box, self.manifest.chunk_bytes), f"a slice of {tensor.name[:200]!r}")
        return reader.read_slices(self.store, self.manifest, {tensor.name: box}, watch=budget.watch)[tensor.name]

    def _pieces(self, tensor: TensorEntry, budget: Budget) -> Iterator[Piece]:
        itemsize = BY_NAME[tensor.dtype].itemsize
        if len(tensor.slices) == 1:
            (part,) = tensor.slices
            step = -(-PIECE_BYTES // self.manifest.chunk_bytes) * self.manifest.chunk_bytes
            for start in range(0, tensor.num_bytes, step):
                budget.check()
                end = min(start + step, tensor.num_bytes)
                data = reader.read_contents(self.store, self.manifest, tensor, part, start, end, watch=budget.watch)
                yield start // itemsize, data
            return
        at = 0
        for box in boxes_of(tensor.shape, itemsize, PIECE_BYTES):
            budget.check()
            wanted = {tensor.name: box}
            data = reader.read_slices(self.store, self.manifest, wanted, watch=budget.watch)[tensor.name]
            yield at, data
            at += data.nbytes // itemsize


class PlainFile:
    """One safetensors file of any program."""

    def __init__(self, store: Store, key: str) -> None:
        """Read the header.

        Raises:
            CheckpointInvalid: It is not a safetensors file, or is damaged.
            CheckpointMissing: It does not exist.
        """
        self.store, self.id = store, key
        self.size_bytes, self.modified_at_s = _status(store, key)
        start = bytearray(min(8, self.size_bytes))
        store.read_into(key, 0, memoryview(start))
        length = layout.header_length(bytes(start), file=key, size_bytes=self.size_bytes)
        header = bytearray(8 + length)
        store.read_into(key, 0, memoryview(header))
        self.metadata, places = layout.read_header(bytes(header), file=key, size_bytes=self.size_bytes)
        digest = hashlib.blake2b(header, digest_size=16).hexdigest()
        self.version = f"{store.url}/{key}/{self.size_bytes}/{self.modified_at_s}/{digest}"
        self._places = {place.name: place for place in places}
        self.tensors: Mapping[str, TensorEntry] = {
            name: TensorEntry(name=name, dtype=place.dtype.name, shape=place.shape, slices=())
            for name, place in sorted(self._places.items(), key=lambda item: natural_key(item[0]))
        }

    def is_current(self) -> bool:
        """Return whether the file has the size and the time of when it was opened."""
        return (self.size_bytes, self.modified_at_s) == _status(self.store, self.id)

    def statistics(self) -> Mapping[str, Statistics]:
        return {}

    def pieces(self, tensor: TensorEntry, budget: Budget) -> Iterator[Piece]:
        budget.charge(tensor.num_bytes, f"tensor {tensor.name[:200]!r}")
        pieces = self._pieces(tensor, budget)
        return ahead(pieces) if tensor.num_bytes > PIECE_BYTES else pieces

    def _pieces(self, tensor: TensorEntry, budget: Budget) -> Iterator[Piece]:
        itemsize = BY_NAME[tensor.dtype].itemsize
        buffers = [np.empty(min(PIECE_BYTES, tensor.num_bytes), np.uint8) for _ in range(3)]
        for number, start in enumerate(range(0, tensor.num_bytes, PIECE_BYTES)):
            budget.check()
            end = min(start + PIECE_BYTES, tensor.num_bytes)
            yield start // itemsize, self._read(tensor, start, buffers[number % 3][: end - start], budget)

    def box(self, tensor: TensorEntry, box: Box, budget: Budget) -> Bytes:
        itemsize = BY_NAME[tensor.dtype].itemsize
        start, end = _range_of(tensor.shape, box)
        budget.charge((end - start) * itemsize, f"a slice of {tensor.name[:200]!r}")
        data = self._read(tensor, start * itemsize, np.empty((end - start) * itemsize, np.uint8), budget)
        numbers = np.zeros(1, np.int64)
        for whole, first, size in zip(tensor.shape, box.start, box.shape, strict=True):
            numbers = (numbers[:, np.newaxis] * whole + np.arange(first, first + size)).reshape(-1)
        return np.ascontiguousarray(data.reshape(-1, itemsize)[numbers - start]).reshape(-1)

    def _read(self, tensor: TensorEntry, start: int, out: Bytes, budget: Budget) -> Bytes:
        try:
            self.store.read_into(self.id, self._places[tensor.name].offset + start, out.data)
        except ObjectMissing:
            raise CheckpointMissing(f"{self.id} does not exist any more; it was deleted or renamed") from None
        except StorageError as error:
            if _status(self.store, self.id)[0] < self.size_bytes:
                raise CheckpointInvalid(
                    f"{self.id} was truncated: tensor {tensor.name[:200]!r} needs its bytes up to "
                    f"{self._places[tensor.name].end}; copy the file again"
                ) from error
            raise
        budget.watch.advance(out.nbytes)
        return out


def _status(store: Store, key: str) -> tuple[int, float]:
    """Return the size and, of a local file, the time of its last change."""
    try:
        size = store.size(key)
        if isinstance(store, LocalStore):
            return size, (store.root / key).stat().st_mtime
    except (ObjectMissing, FileNotFoundError):
        raise CheckpointMissing(f"{store.url}/{key} does not exist; check the path") from None
    return size, 0.0


# -- pieces --------------------------------------------------------------------------------------------------------


def boxes_of(shape: tuple[int, ...], itemsize: int, max_bytes: int) -> Iterator[Box]:
    """Cut a tensor into boxes that are contiguous in row-major order, in that order."""
    if 0 in shape:
        return
    if not shape:
        yield Box((), ())
        return
    below = math.prod(shape[1:]) * itemsize
    if below <= max_bytes or len(shape) == 1:
        step = max(max_bytes // below, 1)
        for first in range(0, shape[0], step):
            yield Box((first, *(0 for _ in shape[1:])), (min(step, shape[0] - first), *shape[1:]))
        return
    for index in range(shape[0]):
        for box in boxes_of(shape[1:], itemsize, max_bytes):
            yield Box((index, *box.start), (1, *box.shape))


def ahead(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Read the next piece while the caller works on the current one."""
    with ThreadPoolExecutor(1, thread_name_prefix="strata-explorer-read") as pool:
        coming = pool.submit(next, pieces, None)
        while (piece := coming.result()) is not None:
            coming = pool.submit(next, pieces, None)
            yield piece


def _range_of(shape: tuple[int, ...], box: Box) -> tuple[int, int]:
    """Return the range of elements, in row-major order, that holds a box."""
    if 0 in box.shape:
        return 0, 0
    start = last = 0
    for whole, first, size in zip(shape, box.start, box.shape, strict=True):
        start, last = start * whole + first, last * whole + first + size - 1
    return start, last + 1


def _covered_bytes(tensor: TensorEntry, box: Box, chunk_bytes: int) -> int:
    start, end = _range_of(tensor.shape, box)
    itemsize = BY_NAME[tensor.dtype].itemsize
    return min((end - start) * itemsize + 2 * chunk_bytes, tensor.num_bytes)
