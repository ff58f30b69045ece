"""Write the files of an incremental checkpoint: what changed since its parent. The rest refers to the parent's files.

A slice of the parent that did not change is referred to. If a few units changed, a patch with these units is added to
it; if much changed, it is stored again.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from xxhash import xxh3_128_hexdigest

from strata.checkpoint.format.buffers import aligned_memory
from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.format.layout import CHUNK_BYTES
from strata.checkpoint.format.manifest import Patch
from strata.checkpoint.save import delta, writer
from strata.checkpoint.save.writer import Cut, StoredItem, cuts, encoded_as, packer_for, part_of, plain_as
from strata.errors import CheckpointCorrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from strata.checkpoint.format.buffers import Bytes
    from strata.checkpoint.format.manifest import DataFile, Slice
    from strata.checkpoint.format.part import RankPart
    from strata.checkpoint.save.delta import Bits, Changes
    from strata.checkpoint.save.job import Job, JobTensor
    from strata.checkpoint.save.staging import Memory
    from strata.storage import Store, Watch

    Indices = np.ndarray[Any, np.dtype[np.int64]]

SMALL_BYTES = 1 << 16
"""A changed slice up to this size is stored whole."""
MAX_PATCHED_SHARE = 0.5
"""A slice of which a larger share changed is stored whole too."""
XOR_UNIT_BYTES = 1 << 16
_HALF_TYPES = ("BF16", "F16")


class _ParentSlice(NamedTuple):
    """A slice of the parent, and what changed in it."""

    tensor: JobTensor
    slice: Slice
    first_byte: int
    """Its offset in the tensor."""
    num_bytes: int
    unit_bytes: int
    changed: Bits
    """One bit per unit."""
    num_changed: int

    @property
    def num_changed_bytes(self) -> int:
        return min(self.num_changed * self.unit_bytes, self.num_bytes)

    @property
    def is_new(self) -> bool:
        """Whether enough changed to store it whole."""
        return self.num_changed_bytes > MAX_PATCHED_SHARE * self.num_bytes or self.num_bytes <= SMALL_BYTES

    @property
    def cost_bytes(self) -> int:
        if not self.num_changed_bytes:
            return 0
        return self.num_bytes if self.is_new else self.num_changed_bytes + delta.INDEX_BYTES * self.num_changed


class _Change(NamedTuple):
    """What is stored of a piece: new contents (`cut`), or a patch (`patch`, `indices`)."""

    piece: _ParentSlice
    stored: StoredItem
    cut: Cut | None = None
    patch: dict[str, Any] | None = None
    """The fields of `Patch` that are known before the file is written."""
    indices: StoredItem | None = None


class Delta:
    """Writes what changed since `parent` as a part that refers to the parent."""

    def __init__(
        self,
        store: Store,
        job: Job,
        memory: memoryview,
        parent: RankPart,
        changed: Mapping[str, Changes],
        scratch: Memory,
        watch: Watch,
    ) -> None:
        self._store = store
        self._job = job
        self._memory = np.frombuffer(memory[: job.size_bytes], np.uint8)
        self._parent = parent
        self._watch = watch
        self._pieces = list(_pieces(job, parent, changed))
        self._packer = packer_for(store, job, scratch, watch)

    @property
    def share(self) -> float:
        """The size of the delta as a share of a full save, before compression."""
        return sum(piece.cost_bytes for piece in self._pieces) / max(self._job.size_bytes, 1)

    @property
    def is_worthwhile(self) -> bool:
        """Whether the delta is small enough to be written instead of a full save."""
        saved = 0.0
        if self._job.options.xor:  # about half of the bytes of slightly changed numbers stay the same
            saved = sum(piece.cost_bytes / 2 for piece in self._pieces if _may_xor(piece)) / max(
                self._job.size_bytes, 1
            )
        return self.share - saved <= self._job.options.rebase_at

    def write(self) -> RankPart:
        """Write the delta.

        Raises:
            CheckpointCorrupt: The base, which is read for an exclusive or, is corrupt.
        """
        changes: dict[int, list[_Change]] = {}
        for number, piece in enumerate(self._pieces):
            if piece.cost_bytes:
                self._watch.check()
                changes[number] = list(self._changes(piece))
        self._packer.finish()
        files = _FileTable(self._packer.files, self._parent)
        slices: dict[str, list[Slice]] = {}
        for number, piece in enumerate(self._pieces):
            new = self._slices(piece, changes.get(number, []), files)
            slices.setdefault(piece.tensor.name, []).extend(new)
        return part_of(self._job, files.all, slices)

    def _changes(self, piece: _ParentSlice) -> Iterator[_Change]:
        if not piece.is_new:
            yield from self._patches(piece)
        elif self._job.options.xor and _may_xor(piece):
            yield from self._exclusive_or(piece)
        else:
            for cut in cuts(piece.slice.shape, piece.tensor.dtype, self._contents(piece)):
                [name] = self._packer.add(cut.item(piece.tensor))
                yield _Change(piece, plain_as(name), cut=cut)

    def _contents(self, piece: _ParentSlice) -> Bytes:
        return self._memory[piece.tensor.offset + piece.first_byte :][: piece.num_bytes]

    def _slices(self, piece: _ParentSlice, changes: list[_Change], files: _FileTable) -> list[Slice]:
        """Return the slices that replace a slice of the parent."""
        new = [(change.cut, change.stored) for change in changes if change.cut is not None]
        if new:
            return [cut.slice(piece.slice.start, stored.fields(self._packer)) for cut, stored in new]
        before = files.moved(piece.slice)
        patches = []
        for change in changes:
            assert change.indices is not None
            assert change.patch is not None
            indices = change.indices.fields(self._packer)
            fields = change.patch | change.stored.fields(self._packer)
            patches.append(Patch(index_offset=indices["offset"], index_hashes=indices["hashes"], **fields))
        return [msgspec.structs.replace(before, patches=(*before.patches, *patches))]

    # -- patches ---------------------------------------------------------------------------------------------------

    def _patches(self, piece: _ParentSlice) -> Iterator[_Change]:
        """Add patches of the changed units: several if they do not fit into one file."""
        tensor, unit = piece.tensor, piece.unit_bytes
        is_rows = unit == delta.row_bytes(tensor.place)
        contents = self._contents(piece)
        changed = np.flatnonzero(piece.changed)
        per_patch = max(writer.PACK_BYTES // (unit + 8), 1)
        for start in range(0, len(changed), per_patch):
            indices = changed[start : start + per_patch]
            num_bytes = _num_bytes(indices, unit, piece.num_bytes)
            item = writer.Item(
                tensor.name if is_rows else f"{tensor.name}#blocks",
                BY_NAME[tensor.dtype if is_rows else "U8"],
                (len(indices), *tensor.shape[1:]) if is_rows else (num_bytes,),
                num_bytes,
                _gatherer(contents, indices, unit),
            )
            yield self._patch(piece, unit, indices, item)

    def _patch(
        self, piece: _ParentSlice, unit: int, indices: Indices, item: writer.Item, encoded: writer.Encoded | None = None
    ) -> _Change:
        kind, dtype = (np.dtype("<u4"), "U32") if indices[-1] < 1 << 32 else (np.dtype("<u8"), "U64")
        what = "rows" if unit == delta.row_bytes(piece.tensor.place) else "numbers"
        indices_name, name = self._packer.add(
            writer.plain_item(
                f"{piece.tensor.name}#{what}", BY_NAME[dtype], (len(indices),), indices.astype(kind).view(np.uint8)
            ),
            item,
        )
        fields = {
            "unit_bytes": unit,
            "num_units": len(indices),
            "num_bytes": _num_bytes(indices, unit, piece.num_bytes),
            "index_bytes": kind.itemsize,
            "encoding": "" if encoded is None else "xor-zstd",
        }
        stored = plain_as(name) if encoded is None else encoded_as(name, encoded)
        return _Change(piece, stored, patch=fields, indices=plain_as(indices_name))

    # -- exclusive or ----------------------------------------------------------------------------------------------

    def _exclusive_or(self, piece: _ParentSlice) -> Iterator[_Change]:
        """Add compressed differences to the parent, a few chunks at a time, so that each patch fits into a file."""
        contents = self._contents(piece)
        step = writer.PACK_BYTES // CHUNK_BYTES * CHUNK_BYTES
        for start in range(0, piece.num_bytes, step):
            new = contents[start : start + step]
            encoded = writer.encode(self._differences(piece, start, new))
            indices = np.arange(start // XOR_UNIT_BYTES, -(-(start + len(new)) // XOR_UNIT_BYTES))
            item = writer.encoded_item(f"{piece.tensor.name}#xor", encoded)
            yield self._patch(piece, XOR_UNIT_BYTES, indices, item, encoded)

    def _differences(self, piece: _ParentSlice, start: int, new: Bytes) -> Iterator[Bytes]:
        """Yield the difference of each chunk. The base is verified: an error in it would become an error here."""
        data_file = self._parent.files[piece.slice.file]
        key = _path_from_outside(data_file, self._parent)
        memory = memoryview(aligned_memory(CHUNK_BYTES))
        for begin in range(0, len(new), CHUNK_BYTES):
            chunk = new[begin : begin + CHUNK_BYTES]
            old = memory[: len(chunk)]
            self._store.read_into(key, piece.slice.offset + start + begin, old)
            expected = piece.slice.hashes[(start + begin) // CHUNK_BYTES]
            found = xxh3_128_hexdigest(old)
            if found != expected:
                raise CheckpointCorrupt(
                    f"tensor {piece.tensor.name!r} in {key}, the base: the hash is {found}, expected {expected}; "
                    "save a FULL checkpoint",
                    file=key,
                    tensor=piece.tensor.name,
                    expected=expected,
                    found=found,
                )
            yield np.bitwise_xor(chunk, np.frombuffer(old, np.uint8))


def _may_xor(piece: _ParentSlice) -> bool:
    """Return whether an exclusive or is possible: only with a base that is neither encoded nor patched."""
    return (
        piece.is_new
        and piece.num_bytes > SMALL_BYTES
        and piece.tensor.dtype in _HALF_TYPES
        and not piece.slice.encoding
        and not piece.slice.patches
    )


class _FileTable:
    """The files of the new part: its own, and those of the parent that are still needed."""

    def __init__(self, own: list[DataFile], parent: RankPart) -> None:
        self.all = list(own)
        self._parent = parent
        self._numbers: dict[int, int] = {}

    def moved(self, slice: Slice) -> Slice:
        """Return the slice of the parent with the file indices of the new part."""
        patches = tuple(msgspec.structs.replace(patch, file=self._number(patch.file)) for patch in slice.patches)
        return msgspec.structs.replace(slice, file=self._number(slice.file), patches=patches)

    def _number(self, file: int) -> int:
        if file not in self._numbers:
            data_file = self._parent.files[file]
            self._numbers[file] = len(self.all)
            self.all.append(msgspec.structs.replace(data_file, path=_path_from_outside(data_file, self._parent)))
        return self._numbers[file]


def _path_from_outside(data_file: DataFile, parent: RankPart) -> str:
    return data_file.path if "/" in data_file.path else f"{parent.checkpoint}/{data_file.path}"


def _pieces(job: Job, parent: RankPart, changed: Mapping[str, Changes]) -> Iterator[_ParentSlice]:
    before = {entry.name: entry for entry in parent.tensors}
    for tensor in job.tensors:
        itemsize = BY_NAME[tensor.dtype].itemsize
        strides = [math.prod(tensor.shape[side + 1 :]) * itemsize for side in range(len(tensor.shape))]
        unit, bits = _smallest(changed.get(tensor.name) or delta.Changes.none(tensor.place), tensor.num_bytes)
        for part in _slices_within(tensor, before[tensor.tensor].slices):
            offset = map(operator.sub, part.start, tensor.start)
            first_byte = sum(map(operator.mul, offset, strides))
            num_bytes = math.prod(part.shape) * itemsize
            units = bits[first_byte // unit : -(-(first_byte + num_bytes) // unit)]
            yield _ParentSlice(tensor, part, first_byte, num_bytes, unit, units, int(np.count_nonzero(units)))


def _smallest(changes: Changes, num_bytes: int) -> Changes:
    """Return the changes in the units that need less space: blocks if most of the small rows in a block changed."""
    if changes.unit_bytes >= delta.MIN_ROW_BYTES:
        return changes
    return min(changes, changes.in_blocks(num_bytes), key=_patch_bytes)


def _patch_bytes(changes: Changes) -> int:
    return int(np.count_nonzero(changes.bits)) * (changes.unit_bytes + delta.INDEX_BYTES)


def _slices_within(tensor: JobTensor, slices: tuple[Slice, ...]) -> Iterator[Slice]:
    """Yield the slices within this part of a tensor: a rank may hold several parts."""
    for part in slices:
        sides = zip(part.start, part.shape, tensor.start, tensor.shape, strict=True)
        if all(first <= start and start + size <= first + length for start, size, first, length in sides):
            yield part


def _num_bytes(indices: Indices, unit: int, of_bytes: int) -> int:
    """Return the size of these units, of which the last may be short."""
    return int((np.minimum((indices + 1) * unit, of_bytes) - indices * unit).sum())


def _gatherer(contents: Bytes, indices: Indices, unit: int) -> Callable[[Bytes], None]:
    """Return a function that copies these units into the given memory."""
    count = len(contents) // unit
    whole = indices[indices < count]

    def fill(out: Bytes) -> None:
        if len(whole):
            source, target = delta.rows_of(contents, unit), delta.rows_of(out, unit)

            def gather(places: Indices) -> None:
                first, last = places[0], places[-1] + 1
                # "clip" avoids a copy of `out`
                np.take(source, whole[first:last], out=target[first:last], mode="clip")

            delta.in_threads(np.arange(len(whole)), gather)
        if len(whole) < len(indices):
            out[len(whole) * unit :] = contents[count * unit :]

    return fill
