"""Compare two checkpoints.

Which tensors differ follows from the manifests: the hashes of chunks and patches are compared, and no data is read. How
much they differ follows from the data: only chunks with different hashes are read, a few at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.checkpoint.format import buffers, dtypes
from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.format.shards import Box
from strata.checkpoint.load import reader
from strata.errors import InvalidArgument
from strata.storage import Watch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from strata.checkpoint.format.buffers import Bytes
    from strata.checkpoint.format.manifest import Manifest, Slice, TensorEntry
    from strata.storage import Store

_BLOCK_ELEMENTS = 1 << 20
"""Compared at a time, because the arithmetic uses wider types."""
_SMALL_BYTES = 1 << 20
_GROUP_BYTES = 32 << 20
_WINDOW_BYTES = 64 << 20
"""Read at a time from each side of a large tensor."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Names of tensors, in the order of the manifests."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    reshaped: tuple[str, ...]
    """Tensors with another shape or dtype."""
    changed: tuple[str, ...]
    """Tensors with other contents."""
    num_same: int
    same_structure: bool
    """Whether keys and plain values are equal too."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How much a tensor changed."""

    num_elements: int
    num_different: int
    """Compared bit by bit: 0.0 and -0.0 differ, equal NaNs do not."""
    max_abs: float | int | None
    """The largest finite difference; None if there is none, or numpy has no such dtype."""
    num_not_finite: int
    """Differences without a value, because one side is infinite or NaN."""
    l2: float | None = None
    """The Euclidean norm of all finite differences; None if it overflows, or numpy has no such dtype."""


def compare(old: Manifest, new: Manifest) -> Comparison:
    """Compare two manifests."""
    before, after = ({tensor.name: tensor for tensor in manifest.tensors} for manifest in (old, new))
    both = [name for name in after if name in before]
    reshaped = [n for n in both if (before[n].dtype, before[n].shape) != (after[n].dtype, after[n].shape)]
    apart = set(reshaped)
    changed = [n for n in both if n not in apart and _hashes(old, before[n]) != _hashes(new, after[n])]
    return Comparison(
        added=tuple(name for name in after if name not in before),
        removed=tuple(name for name in before if name not in after),
        reshaped=tuple(reshaped),
        changed=tuple(changed),
        num_same=len(both) - len(reshaped) - len(changed),
        same_structure=(old.structures, old.structure_of_rank) == (new.structures, new.structure_of_rank),
    )


def differs(old: Manifest, before: TensorEntry, new: Manifest, after: TensorEntry) -> bool:
    """Return whether a tensor may differ between two checkpoints, by its shape, its dtype and its hashes."""
    if (before.dtype, before.shape) != (after.dtype, after.shape):
        return True
    return _hashes(old, before) != _hashes(new, after)


def _hashes(manifest: Manifest, tensor: TensorEntry) -> tuple[Any, ...]:
    """Return the hashes of a tensor. Different slices or patches look like a change; `measure` then finds none."""
    slices = sorted((part.start, part.shape, part.hashes, _patch_hashes(part)) for part in tensor.slices)
    return manifest.chunk_bytes, slices


def _patch_hashes(part: Slice) -> list[tuple[Any, ...]]:
    return [(p.unit_bytes, p.index_hashes, p.hashes, p.encoding == buffers.XOR) for p in part.patches]


@dataclass(frozen=True, slots=True)
class Side:
    """A checkpoint and its store."""

    store: Store
    manifest: Manifest

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        return {tensor.name: tensor for tensor in self.manifest.tensors}


def measure(old: Side, new: Side, names: Iterable[str]) -> dict[str, Difference]:
    """Measure how much tensors changed; their shapes and dtypes must be equal in both checkpoints.

    Raises:
        CheckpointInvalid: A checkpoint cannot be trusted.
    """
    watch = Watch()
    before, after = old.tensors, new.tensors
    found = {}
    for group in _groups(names, before, after):
        if len(group) == 1:
            (name,) = group
            found[name] = difference(before[name], pairs(old, new, before[name], after[name], watch=watch))
            continue
        one, other = (reader.read_tensors(side.store, side.manifest, group, watch=watch) for side in (old, new))
        for name in group:
            found[name] = difference(before[name], [(one[name], other[name])])
    return found


def _groups(
    names: Iterable[str], before: Mapping[str, TensorEntry], after: Mapping[str, TensorEntry]
) -> Iterator[list[str]]:
    """Group small tensors that are neighbours on both sides; all others are read alone."""
    group: list[str] = []
    for name in names:
        near = group and all(
            len(side[name].slices) == len(side[group[0]].slices) == 1
            and side[name].slices[0].file == side[group[0]].slices[0].file
            and 0 <= side[name].slices[0].offset - side[group[0]].slices[0].offset <= _GROUP_BYTES
            and max(side[name].num_bytes, side[group[0]].num_bytes) <= _SMALL_BYTES
            for side in (before, after)
        )
        if group and not near:
            yield group
            group = []
        group.append(name)
    if group:
        yield group


def difference(before: TensorEntry, ranges: Iterable[tuple[Bytes, Bytes]]) -> Difference:
    """Sum up the differences between ranges of bytes of a tensor; equal ranges may be left out."""
    dtype = BY_NAME[before.dtype]
    num_different = num_not_finite = 0
    max_abs: float | int | None = None
    squares: float | None = 0.0
    for one, other in ranges:
        for start in range(0, one.nbytes, _BLOCK_ELEMENTS * dtype.itemsize):
            a, b = (side[start : start + _BLOCK_ELEMENTS * dtype.itemsize] for side in (one, other))
            is_other = _is_other(a, b, dtype.itemsize)
            num_different += int(np.count_nonzero(is_other))
            numbers = [_numbers(side.reshape(-1, dtype.itemsize)[is_other].reshape(-1), dtype) for side in (a, b)]
            if numbers[0] is None or numbers[1] is None:
                squares = None
                continue
            if not numbers[0].size:
                continue
            largest, num_undefined, sum_of_squares = _distance(numbers[0], numbers[1])
            num_not_finite += num_undefined
            squares = None if squares is None else squares + sum_of_squares
            if largest is not None:
                max_abs = largest if max_abs is None else max(max_abs, largest)
    l2 = math.sqrt(squares) if squares is not None and math.isfinite(squares) else None
    return Difference(math.prod(before.shape), num_different, max_abs, num_not_finite, l2)


def _is_other(a: Bytes, b: Bytes, itemsize: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Compare elements bit by bit."""
    if itemsize <= 8:
        a, b = (np.ascontiguousarray(side) for side in (a, b))
        if a.ctypes.data % itemsize == b.ctypes.data % itemsize == 0:
            unsigned = np.dtype(f"u{itemsize}")
            return np.asarray(a.view(unsigned) != b.view(unsigned))
    return np.asarray((a.reshape(-1, itemsize) != b.reshape(-1, itemsize)).any(axis=1))


def pairs(
    old: Side, new: Side, before: TensorEntry, after: TensorEntry, *, watch: Watch
) -> Iterator[tuple[Bytes, Bytes]]:
    """Yield the bytes that may differ: by chunks if both sides have the same slices, else by rows."""
    size = BY_NAME[before.dtype].itemsize
    chunk_bytes = old.manifest.chunk_bytes
    cut_alike = len(before.slices) == len(after.slices) == 1 and chunk_bytes == new.manifest.chunk_bytes
    if not cut_alike or chunk_bytes % size:
        yield from _pairs_of_rows(old, new, before, after, watch)
        return
    (one,), (other,) = before.slices, after.slices
    for start, end in _suspects(chunk_bytes, before.num_bytes, one, other):
        yield (
            reader.read_contents(old.store, old.manifest, before, one, start, end, watch=watch),
            reader.read_contents(new.store, new.manifest, after, other, start, end, watch=watch),
        )


def _suspects(chunk_bytes: int, num_bytes: int, one: Slice, other: Slice) -> Iterator[tuple[int, int]]:
    """Yield ranges of chunks with different hashes, or of all chunks if the patches differ."""
    patched_alike = _patch_hashes(one) == _patch_hashes(other)
    start = end = 0
    for number, (a, b) in enumerate(zip(one.hashes, other.hashes, strict=True)):
        if a == b and patched_alike:
            continue
        first, last = number * chunk_bytes, min((number + 1) * chunk_bytes, num_bytes)
        if start < end and (first != end or last - start > _WINDOW_BYTES):
            yield start, end
            start = first
        elif start == end:
            start = first
        end = last
    if start < end:
        yield start, end


def _pairs_of_rows(
    old: Side, new: Side, before: TensorEntry, after: TensorEntry, watch: Watch
) -> Iterator[tuple[Bytes, Bytes]]:
    num_rows = before.shape[0] if before.shape else 1
    step = max(_WINDOW_BYTES * num_rows // max(before.num_bytes, 1), 1)
    for first in range(0, num_rows, step):
        rows = (min(step, num_rows - first), *before.shape[1:]) if before.shape else ()
        start = (first, *(0 for _ in before.shape[1:])) if before.shape else ()
        wanted = {before.name: Box(start, rows)}
        yield (
            reader.read_slices(old.store, old.manifest, wanted, watch=watch)[before.name],
            reader.read_slices(new.store, new.manifest, wanted, watch=watch)[after.name],
        )


def _numbers(data: Bytes, dtype: dtypes.DType) -> np.ndarray[Any, Any] | None:
    """Convert to a dtype in which numpy computes; None if numpy has no such dtype."""
    data = np.ascontiguousarray(data)
    if dtype.name == "BF16":  # the upper half of a float32
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype.name == "C32":
        parts = data.view(np.float16).astype(np.float64).reshape(-1, 2)
        return np.asarray(parts[:, 0] + 1j * parts[:, 1])
    try:
        numbers = data.view(dtypes.to_numpy(dtype))
    except InvalidArgument:
        return None
    if numbers.dtype.kind in "bui":
        return numbers.astype(np.uint64 if numbers.dtype.kind == "u" else np.int64)
    return numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64)


def _distance(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> tuple[float | int | None, int, float]:
    """Return the largest finite difference, the number of differences that are not finite, and the sum of squares."""
    if a.dtype.kind in "ui":  # the difference of two int64 always fits into uint64, and wraps to it
        gaps = np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)
        return int(gaps.max()), 0, float(np.square(gaps.astype(np.float64)).sum())
    with np.errstate(all="ignore"):
        distance = np.abs(a - b)
        finite = distance[np.isfinite(distance)]
        largest = float(finite.max()) if finite.size else None
        return largest, int(distance.size - finite.size), float(np.square(finite).sum())
