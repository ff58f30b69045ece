"""What differs between two checkpoints.

The manifests tell which tensors do: the hashes of their chunks are compared, no data is read. By how much, the data
must tell: of a tensor that differs only the chunks with different hashes are read, one pair at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from strata.checkpoint import dtypes, layout, reading
from strata.checkpoint.dtypes import BY_NAME
from strata.checkpoint.manifest import Slice, TensorEntry
from strata.errors import InvalidArgument
from strata.storage import Watch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from strata.checkpoint.manifest import Manifest
    from strata.checkpoint.staging import Bytes
    from strata.storage import Store

_BLOCK_ELEMENTS = 1 << 20
"""Compared at a time: the arithmetic is done in wider types."""
_SMALL_BYTES = 1 << 20
_GROUP_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Comparison:
    """Names of tensors, in the order of the manifests."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    reshaped: tuple[str, ...]
    """Of another shape or element type."""
    changed: tuple[str, ...]
    """Of other contents."""
    num_same: int
    same_structure: bool
    """Also the plain values beside the tensors are the same."""


@dataclass(frozen=True, slots=True)
class Difference:
    num_elements: int
    num_different: int
    """Bit for bit: 0.0 and -0.0 differ, the same NaN twice does not."""
    max_abs: float | int | None
    """The largest finite difference; None where there is none, or numpy has no such type."""
    num_not_finite: int
    """Differences that no number tells, since one side is infinite or not a number."""


def compare(old: Manifest, new: Manifest) -> Comparison:
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


def _hashes(manifest: Manifest, tensor: TensorEntry) -> tuple[Any, ...]:
    """Tensors that were cut differently seem to differ; `measure` finds that they do not."""
    return manifest.chunk_bytes, sorted((part.start, part.shape, part.hashes) for part in tensor.slices)


def measure(store: Store, old: Manifest, new: Manifest, names: Iterable[str]) -> dict[str, Difference]:
    """How much tensors have changed that have the same shape and element type in both.

    Raises:
        CheckpointInvalid: What is read is not what was written.
    """
    before, after = ({tensor.name: tensor for tensor in manifest.tensors} for manifest in (old, new))
    found = {}
    for group in _groups(names, before, after):
        if len(group) == 1:
            (name,) = group
            found[name] = _difference(before[name], _pairs(store, old, new, before[name], after[name]))
            continue
        one, other = (reading.read_tensors(store, manifest, group, watch=Watch()) for manifest in (old, new))
        for name in group:
            found[name] = _difference(before[name], [(one[name], other[name])])
    return found


def _groups(
    names: Iterable[str], before: Mapping[str, TensorEntry], after: Mapping[str, TensorEntry]
) -> Iterator[list[str]]:
    """Small tensors that lie close together on both sides are read together; all others alone."""
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


def _difference(before: TensorEntry, pairs: Iterable[tuple[Bytes, Bytes]]) -> Difference:
    dtype = BY_NAME[before.dtype]
    num_different = num_not_finite = 0
    max_abs: float | int | None = None
    for one, other in pairs:
        for start in range(0, one.nbytes, _BLOCK_ELEMENTS * dtype.itemsize):
            a, b = (side[start : start + _BLOCK_ELEMENTS * dtype.itemsize] for side in (one, other))
            differs = (a.reshape(-1, dtype.itemsize) != b.reshape(-1, dtype.itemsize)).any(axis=1)
            num_different += int(differs.sum())
            numbers = [_numbers(side.reshape(-1, dtype.itemsize)[differs].reshape(-1), dtype) for side in (a, b)]
            if numbers[0] is None or numbers[1] is None or not numbers[0].size:
                continue
            largest, num_strange = _distance(numbers[0], numbers[1])
            num_not_finite += num_strange
            if largest is not None:
                max_abs = largest if max_abs is None else max(max_abs, largest)
    return Difference(math.prod(before.shape), num_different, max_abs, num_not_finite)


def _pairs(
    store: Store, old: Manifest, new: Manifest, before: TensorEntry, after: TensorEntry
) -> Iterator[tuple[Bytes, Bytes]]:
    """The bytes that may differ, from both sides. Chunk by chunk where both were cut alike, else the whole tensor."""
    size = BY_NAME[before.dtype].itemsize
    cut_alike = len(before.slices) == len(after.slices) == 1 and old.chunk_bytes == new.chunk_bytes
    if not cut_alike or old.chunk_bytes % size:
        one, other = (
            reading.read_tensors(store, manifest, [before.name], watch=Watch())[before.name] for manifest in (old, new)
        )
        yield one, other
        return
    for number, hashes in enumerate(zip(before.slices[0].hashes, after.slices[0].hashes, strict=True)):
        if hashes[0] != hashes[1]:
            yield _chunk(store, old, before, number), _chunk(store, new, after, number)


def _chunk(store: Store, manifest: Manifest, tensor: TensorEntry, number: int) -> Bytes:
    """Read and verified as if it were a tensor of its own."""
    (whole,) = tensor.slices
    start, end = layout.chunks(whole.offset, tensor.num_bytes, manifest.chunk_bytes)[number]
    shape = (end - start,)
    part = Slice(file=whole.file, offset=start, start=(0,), shape=shape, hashes=(whole.hashes[number],))
    alone = TensorEntry(name=tensor.name, dtype="U8", shape=shape, slices=(part,))
    only = msgspec.structs.replace(manifest, tensors=(alone,))
    return reading.read_tensors(store, only, [tensor.name], watch=Watch())[tensor.name]


def _numbers(data: Bytes, dtype: dtypes.DType) -> np.ndarray[Any, Any] | None:
    """In a type that numpy computes in; None: it has none for these."""
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


def _distance(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> tuple[float | int | None, int]:
    """The largest finite difference, and how many are not."""
    if a.dtype.kind in "ui":  # the difference of two int64 always fits into uint64, and wraps to it
        return int((np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)).max()), 0
    with np.errstate(all="ignore"):
        distance = np.abs(a - b)
    finite = distance[np.isfinite(distance)]
    return (float(finite.max()) if finite.size else None), int(distance.size - finite.size)
