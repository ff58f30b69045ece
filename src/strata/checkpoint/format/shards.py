"""Tensors of which a rank holds only a part, and boxes of elements within tensors.

A `Shard` states which part it holds. A torch DTensor and a JAX array over several devices know it themselves; what they
hold on this rank is cut into boxes with their positions. Only the first of several copies is written, so that together
the ranks write every element once.

Elements are counted in row-major order (the last dimension varies fastest), in files as in memory.
"""

from __future__ import annotations

import fnmatch
import heapq
import itertools
import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from strata.checkpoint.format.dtypes import BY_NAME
from strata.errors import CheckpointInvalid, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    import numpy as np

    from strata.checkpoint.format.buffers import Bytes
    from strata.checkpoint.format.manifest import Slice, TensorEntry
    from strata.checkpoint.format.tree import Leaf

MAX_COMPARISONS = 500_000
Index = tuple[int, ...]
Run = tuple[int, int]
"""(start, length) along one dimension."""


class Shard:
    """The part of a larger tensor that this rank saves: `local` begins at `start` of a tensor of shape `shape`.

        Shard(rows, shape=(1_000_000, 64), start=(rank * len(rows), 0))

    The shards of all ranks under one name must cover the tensor. Several ranks may pass the same part with the same
    contents. The tensor is loaded as a whole.
    """

    __slots__ = ("local", "shape", "start")

    def __init__(self, local: Any, *, shape: Sequence[int], start: Sequence[int]) -> None:
        """
        Raises:
            InvalidArgument: The part does not lie within the tensor.
        """
        self.local = local
        self.shape = _index(shape, "shape")
        self.start = _index(start, "start")
        if not hasattr(local, "shape") or not hasattr(local, "dtype"):
            raise InvalidArgument(
                f"a Shard holds a torch tensor or a numpy or JAX array, not a {type(local).__name__}", field="local"
            )
        size = tuple(local.shape)
        if not len(size) == len(self.shape) == len(self.start):
            raise InvalidArgument(
                f"a Shard with {len(size)} dimensions has shape={self.shape} and start={self.start}; "
                "pass one number for each dimension",
                field="start",
            )
        if any(begin + n > whole for begin, n, whole in zip(self.start, size, self.shape, strict=True)):
            raise InvalidArgument(
                f"a Shard of shape {size} at start={self.start} does not fit into a tensor of shape {self.shape}; "
                "start counts elements of the whole tensor",
                field="start",
            )

    def __repr__(self) -> str:
        return f"Shard({tuple(self.local.shape)} at {self.start} of {self.shape})"


def _index(values: Sequence[int], field: str) -> Index:
    try:
        found = tuple(operator.index(value) for value in values)
    except TypeError:
        raise InvalidArgument(f"{field}={values!r} of a Shard is not a tuple of integers", field=field) from None
    if any(value < 0 for value in found):
        raise InvalidArgument(f"{field}={found} of a Shard has a negative number", field=field)
    return found


class Piece(NamedTuple):
    """A box of a tensor that this rank writes."""

    start: Index
    source: Any


@dataclass(frozen=True, slots=True)
class Held:
    """What this rank writes of a tensor that is spread over several ranks or devices."""

    shape: Index
    """Of the whole tensor."""
    pieces: list[Piece]
    """Empty if another rank writes what this one holds."""


# -- torch ---------------------------------------------------------------------------------------------------------


def of_dtensor(value: Any, local: Any, path: str) -> Held:
    """Return what this rank writes of a DTensor, whose local tensor is `local`.

    Raises:
        InvalidArgument: The DTensor has a partial placement, or its local tensor does not match its placements.
    """
    shape = tuple(value.shape)
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return Held(shape, [])
    runs: list[list[Run]] = [[(0, size)] for size in shape]
    is_first = True
    for place, num, placement in zip(coordinate, value.device_mesh.shape, value.placements, strict=True):
        if placement.is_partial():
            raise InvalidArgument(
                f"{path} is a DTensor with the placement {placement}, which is not reduced yet; "
                "redistribute it with Shard or Replicate before you save it",
                field=path,
            )
        if placement.is_replicate():
            is_first = is_first and place == 0
        elif hasattr(placement, "split_factor") or placement.is_shard():
            runs[placement.dim] = cut_run(runs[placement.dim], num, place, int(getattr(placement, "split_factor", 1)))
        else:
            raise InvalidArgument(
                f"{path} is a DTensor with the unknown placement {placement}; wrap its local tensor in Shard(…)",
                field=path,
            )
    expected = tuple(sum(length for _, length in along) for along in runs)
    if tuple(local.shape) != expected:
        raise InvalidArgument(
            f"{path} is a DTensor of shape {shape} with placements {tuple(value.placements)}; the local tensor has the "
            f"shape {tuple(local.shape)}, expected {expected}; wrap parts of other sizes in Shard(…)",
            field=path,
        )
    return Held(shape, _pieces(local, [joined(along) or [(0, 0)] for along in runs]) if is_first else [])


def cut_run(runs: list[Run], num: int, which: int, split_factor: int) -> list[Run]:
    """Return what a placement assigns to member `which` of `num`.

    With a split factor (FSDP over tensor parallelism), each of that many chunks is cut on its own.
    """
    size = sum(length for _, length in runs)
    found: list[Run] = []
    for outer in range(split_factor):
        start, length = _chunk(size, split_factor, outer)
        inner_start, inner_length = _chunk(length, num, which)
        found += _taken(runs, start + inner_start, inner_length)
    return found


def _chunk(size: int, num: int, which: int) -> Run:
    """Cut as `torch.chunk` does, but keep empty chunks."""
    per_chunk = -(-size // num)
    start = min(per_chunk * which, size)
    return start, min(per_chunk, size - start)


def _taken(runs: list[Run], start: int, length: int) -> list[Run]:
    """Return a range of the concatenated runs."""
    found, end, at = [], start + length, 0
    for begin, size in runs:
        low, high = max(start, at), min(end, at + size)
        if low < high:
            found.append((begin + low - at, high - low))
        at += size
    return found


def joined(runs: list[Run]) -> list[Run]:
    """Join adjacent runs."""
    found: list[Run] = []
    for start, length in runs:
        if found and sum(found[-1]) == start:
            start, length = found[-1][0], found.pop()[1] + length
        found.append((start, length))
    return found


def _pieces(local: Any, runs: list[list[Run]]) -> list[Piece]:
    """Cut the local tensor into boxes without gaps."""
    if all(len(along) == 1 for along in runs):
        return [Piece(tuple(along[0][0] for along in runs), local)]
    cuts = [list(zip(along, itertools.accumulate([0, *(n for _, n in along)]), strict=False)) for along in runs]
    return [
        Piece(
            tuple(start for (start, _), _ in chosen),
            local[tuple(slice(at, at + length) for (_, length), at in chosen)],
        )
        for chosen in itertools.product(*cuts)
    ]


# -- JAX -----------------------------------------------------------------------------------------------------------


def of_jax(value: Any) -> Held | None:
    """Return what this process writes of a JAX array; None if it alone holds the whole array."""
    if value.is_fully_addressable and value.is_fully_replicated:
        return None
    pieces = [
        Piece(tuple(begin.start or 0 for begin in part.index), part.data)
        for part in value.addressable_shards
        if part.replica_id == 0
    ]
    return Held(tuple(value.shape), sorted(pieces, key=lambda piece: piece.start))


# -- replicated tensors --------------------------------------------------------------------------------------------


def replicated_share(leaves: Iterable[Leaf], patterns: Iterable[str], rank: int, size: int) -> set[str]:
    """Return the names that this rank writes: its share of the leaves that match a pattern, and all other leaves.

    Every rank must hold the matching leaves. All ranks compute the same assignment: the largest leaf first, each to the
    rank with the smallest load. Parts of larger tensors are not assigned.
    """
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    everywhere: list[Leaf] = []
    mine: set[str] = set()
    for leaf in leaves:
        if leaf.global_shape is None and any(fnmatch.fnmatchcase(leaf.name, pattern) for pattern in wanted):
            everywhere.append(leaf)
        else:
            mine.add(leaf.name)
    loads = [(0, r) for r in range(size)]
    for leaf in sorted(everywhere, key=lambda leaf: (-leaf.num_bytes, leaf.name)):
        load, writer = loads[0]
        heapq.heapreplace(loads, (load + leaf.num_bytes, writer))
        if writer == rank:
            mine.add(leaf.name)
    return mine


# -- do boxes tile a tensor? ---------------------------------------------------------------------------------------

StartAndShape = tuple[Index, Index]
"""(start, shape) of a box."""


def is_grid(shape: Index, boxes: Sequence[StartAndShape]) -> bool:
    """Return whether the boxes are all cells of a grid over `shape`, the usual case, which is fast to check."""
    if len({start for start, _ in boxes}) != len(boxes):
        return False
    num_cells = 1
    for d, whole in enumerate(shape):
        starts = sorted({start[d] for start, _ in boxes})
        lengths = dict(zip(starts, map(operator.sub, [*starts[1:], whole], starts), strict=True))
        if starts[0] != 0 or any(size[d] != lengths[start[d]] for start, size in boxes):
            return False
        num_cells *= len(starts)
    return len(boxes) == num_cells


def first_overlap(boxes: Sequence[StartAndShape]) -> tuple[int, int] | None:
    """Return the indices of two boxes that share an element, or None.

    The boxes are sorted along the dimension with the most cuts, so that only neighbours are compared.

    Raises:
        CheckpointInvalid: Too many boxes are neighbours to compare them in reasonable time.
    """
    filled = [i for i, (_, size) in enumerate(boxes) if math.prod(size)]
    if len(filled) < 2:
        return None
    num_dimensions = len(boxes[filled[0]][0])
    if not num_dimensions:
        return filled[0], filled[1]
    axis = max(range(num_dimensions), key=lambda d: len({boxes[i][0][d] for i in filled}))
    near: list[int] = []
    num_compared = 0
    for i in sorted(filled, key=lambda i: boxes[i][0][axis]):
        start, size = boxes[i]
        near = [j for j in near if boxes[j][0][axis] + boxes[j][1][axis] > start[axis]]
        num_compared += len(near)
        if num_compared > MAX_COMPARISONS:
            raise CheckpointInvalid(f"{len(filled)} slices are too irregular to check; cut the tensor as a grid")
        for j in near:
            if all(map(_meet, start, size, *boxes[j])):
                return min(i, j), max(i, j)
        near.append(i)
    return None


def _meet(start: int, length: int, other: int, other_length: int) -> bool:
    return start < other + other_length and other < start + length


def identity(local: Any) -> tuple[Hashable, ...]:
    """Return a key that two torch tensors share if they are the same memory, even if they are empty."""
    memory = local.data_ptr() if local.numel() else -local.untyped_storage()._cdata
    return (memory, local.device, local.dtype, tuple(local.shape), local.stride())


# -- boxes of elements ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Box:
    """A box of elements of a tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Intersection:
    """The intersection of a stored slice with a wanted box."""

    part: Slice
    low: tuple[int, ...]
    high: tuple[int, ...]
    """Within the slice; `high` is exclusive."""
    at: tuple[int, ...]
    """Where `low` lies within the wanted box."""
    start: int
    end: int
    """The range of bytes of the slice from the first to the last element of the intersection."""
    target: int | None
    """The offset of these bytes in the wanted box, if they are contiguous in both; else None."""


def whole_box(tensor: TensorEntry) -> Box:
    """Return the box of a whole tensor."""
    return Box((0,) * len(tensor.shape), tensor.shape)


def intersections(tensor: TensorEntry, wanted: Box) -> list[Intersection]:
    """Intersect the slices of a tensor with a box.

    Raises:
        InvalidArgument: The box is not within the tensor.
    """
    _check_within(tensor, wanted)
    size = BY_NAME[tensor.dtype].itemsize
    found = []
    for part in tensor.slices:
        near = tuple(map(max, part.start, wanted.start))
        far = tuple(
            min(a + m, b + n) for a, m, b, n in zip(part.start, part.shape, wanted.start, wanted.shape, strict=True)
        )
        if any(a >= b for a, b in zip(near, far, strict=True)):
            continue
        low, high, at = _minus(near, part.start), _minus(far, part.start), _minus(near, wanted.start)
        start, end = _element_range(low, high, part.shape)
        there, there_end = _element_range(at, _minus(far, wanted.start), wanted.shape)
        together = end - start == there_end - there == math.prod(_minus(high, low))
        found.append(Intersection(part, low, high, at, start * size, end * size, there * size if together else None))
    return found


def _check_within(tensor: TensorEntry, wanted: Box) -> None:
    fits = len(wanted.start) == len(wanted.shape) == len(tensor.shape) and all(
        start >= 0 and size >= 0 and start + size <= whole
        for start, size, whole in zip(wanted.start, wanted.shape, tensor.shape, strict=True)
    )
    if not fits:
        raise InvalidArgument(
            f"the slice of shape {wanted.shape} at {wanted.start} is not within tensor {tensor.name!r}, whose shape is "
            f"{tensor.shape}",
            field=tensor.name,
        )


def _minus(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def _element_range(low: tuple[int, ...], high: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the row-major index of the first element of a box, and one past that of its last."""
    first = last = 0
    for a, b, size in zip(low, high, shape, strict=True):
        first, last = first * size + a, last * size + b - 1
    return first, last + 1


def copy_intersection(
    cut: Intersection, data: Bytes, start: int, target: Bytes, *, wanted_shape: tuple[int, ...], item_bytes: int
) -> None:
    """Copy the wanted part of `data`, the slice's bytes from `start` on, into `target`, the bytes of the whole box."""
    if cut.target is not None:
        first, last = max(start, cut.start), min(start + len(data), cut.end)
        if first < last:
            shift = cut.target - cut.start
            target[first + shift : last + shift] = data[first - start : last - start]
        return
    import numpy as np  # noqa: PLC0415 - `strata checkpoints ls` needs none

    # Records of the element's size, so that dtypes unknown to numpy can be copied; a chunk may end within an element.
    unit = item_bytes if start % item_bytes == 0 and len(data) % item_bytes == 0 else 1
    record, rest = np.dtype((np.void, unit)), item_bytes // unit
    places = tuple(slice(at, at + b - a) for at, a, b in zip(cut.at, cut.low, cut.high, strict=True))
    _copy_elements(
        target.view(record).reshape(*wanted_shape, rest)[places],
        (*cut.low, 0),
        (*cut.high, rest),
        (*cut.part.shape, rest),
        start // unit,
        data.view(record),
    )


def _copy_elements(
    target: np.ndarray[Any, Any],
    low: tuple[int, ...],
    high: tuple[int, ...],
    shape: tuple[int, ...],
    start: int,
    data: np.ndarray[Any, Any],
) -> None:
    """Copy elements of a box of this shape, from index `start` on, into `target`, its part from `low` to `high`.

    Whole rows are copied at once; incomplete rows before and after them are copied as boxes of one dimension less.
    """
    end = start + len(data)
    if len(shape) == 1:
        a, b = max(start, low[0]), min(end, high[0])
        if a < b:
            target[a - low[0] : b - low[0]] = data[a - start : b - start]
        return

    def put_in_row(index: int, first: int, last: int) -> None:
        if first < last and low[0] <= index < high[0]:
            inner = data[first - start : last - start]
            _copy_elements(target[index - low[0]], low[1:], high[1:], shape[1:], first - index * row, inner)

    row = math.prod(shape[1:])
    first_whole, end_whole = -(-start // row), end // row
    if first_whole > end_whole:  # the data begins and ends within one row
        put_in_row(end_whole, start, end)
        return
    put_in_row(first_whole - 1, start, first_whole * row)
    a, b = max(first_whole, low[0]), min(end_whole, high[0])
    if a < b:
        rows = data[a * row - start : b * row - start].reshape(b - a, *shape[1:])
        inner_box = tuple(slice(x, y) for x, y in zip(low[1:], high[1:], strict=True))
        target[a - low[0] : b - low[0]] = rows[(slice(None), *inner_box)]
    put_in_row(end_whole, end_whole * row, end)
