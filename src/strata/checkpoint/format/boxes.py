"""Boxes of elements within tensors: which stored slices meet what is wanted, and where their bytes go. Pure.

Elements are counted row by row (the last dimension runs fastest), in a file as in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.checkpoint.format.dtypes import BY_NAME
from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from strata.checkpoint.format.buffers import Bytes
    from strata.checkpoint.format.manifest import Slice, TensorEntry


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A part of a tensor: its corner and its size, in elements."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """What of a stored slice is wanted, and where it goes."""

    part: Slice
    low: tuple[int, ...]
    high: tuple[int, ...]
    """The box in the slice, its far corner excluded."""
    at: tuple[int, ...]
    """Where its near corner lies in what is wanted."""
    start: int
    end: int
    """The bytes of the slice's contents from the box's first element to its last."""
    target: int | None
    """Where these begin in what is wanted, if they are together there as they are here."""


def whole(tensor: TensorEntry) -> Rectangle:
    return Rectangle((0,) * len(tensor.shape), tensor.shape)


def cuts(tensor: TensorEntry, wanted: Rectangle) -> list[Cut]:
    """What of which slices makes up a rectangle.

    Raises:
        InvalidArgument: It is not within the tensor.
    """
    _check(tensor, wanted)
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
        start, end = _span(low, high, part.shape)
        there, there_end = _span(at, _minus(far, wanted.start), wanted.shape)
        together = end - start == there_end - there == math.prod(_minus(high, low))
        found.append(Cut(part, low, high, at, start * size, end * size, there * size if together else None))
    return found


def _check(tensor: TensorEntry, wanted: Rectangle) -> None:
    fits = len(wanted.start) == len(wanted.shape) == len(tensor.shape) and all(
        start >= 0 and size >= 0 and start + size <= whole
        for start, size, whole in zip(wanted.start, wanted.shape, tensor.shape, strict=True)
    )
    if not fits:
        raise InvalidArgument(
            f"tensor {tensor.name!r} has the shape {tensor.shape}; the box of {wanted.shape} at {wanted.start} is not "
            "within it",
            field=tensor.name,
        )


def _minus(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def _span(low: tuple[int, ...], high: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, int]:
    """The numbers of a box's first element and of the one behind its last."""
    first = last = 0
    for a, b, size in zip(low, high, shape, strict=True):
        first, last = first * size + a, last * size + b - 1
    return first, last + 1


def put(cut: Cut, data: Bytes, start: int, target: Bytes, *, wanted_shape: tuple[int, ...], item_bytes: int) -> None:
    """Puts the bytes from `start` on of the slice's contents, as far as they are wanted, to their place in `target`,
    which is the whole rectangle.
    """
    if cut.target is not None:
        first, last = max(start, cut.start), min(start + len(data), cut.end)
        if first < last:
            shift = cut.target - cut.start
            target[first + shift : last + shift] = data[first - start : last - start]
        return
    # As records of the element's size, so that types unknown to numpy are moved, too; a chunk may end within one.
    unit = item_bytes if start % item_bytes == 0 and len(data) % item_bytes == 0 else 1
    record, rest = np.dtype((np.void, unit)), item_bytes // unit
    places = tuple(slice(at, at + b - a) for at, a, b in zip(cut.at, cut.low, cut.high, strict=True))
    _put(
        target.view(record).reshape(*wanted_shape, rest)[places],
        (*cut.low, 0),
        (*cut.high, rest),
        (*cut.part.shape, rest),
        start // unit,
        data.view(record),
    )


def _put(
    target: np.ndarray[Any, Any],
    low: tuple[int, ...],
    high: tuple[int, ...],
    shape: tuple[int, ...],
    start: int,
    data: np.ndarray[Any, Any],
) -> None:
    """`data` are the elements from number `start` on of a box of this shape; `target` is its part from `low` to `high`.

    Whole rows at once; what is left of a row before and after them, as rows of one dimension less.
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
            _put(target[index - low[0]], low[1:], high[1:], shape[1:], first - index * row, inner)

    row = math.prod(shape[1:])
    first_whole, end_whole = -(-start // row), end // row
    if first_whole > end_whole:  # it begins and ends within one
        put_in_row(end_whole, start, end)
        return
    put_in_row(first_whole - 1, start, first_whole * row)
    a, b = max(first_whole, low[0]), min(end_whole, high[0])
    if a < b:
        rows = data[a * row - start : b * row - start].reshape(b - a, *shape[1:])
        inner_box = tuple(slice(x, y) for x, y in zip(low[1:], high[1:], strict=True))
        target[a - low[0] : b - low[0]] = rows[(slice(None), *inner_box)]
    put_in_row(end_whole, end_whole * row, end)
