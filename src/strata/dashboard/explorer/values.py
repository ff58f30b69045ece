"""Samples of values: which box of a tensor, and its elements as JSON has them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.format.shards import Box
from strata.checkpoint.load.statistics import numbers_in
from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.checkpoint.format.manifest import TensorEntry

_MAX_EXACT = 1 << 53
"""Above it, a JSON reader may lose digits of an integer."""


def box_within(tensor: TensorEntry, start: Sequence[int] | None, shape: Sequence[int] | None) -> Box:
    """Return a valid box; by default the first 16 positions of each of the last two dimensions."""
    num = len(tensor.shape)
    begin = tuple(start) if start is not None else (0,) * num
    if len(begin) != num or any(not 0 <= at <= whole for at, whole in zip(begin, tensor.shape, strict=False)):
        raise InvalidArgument(
            f"start={list(begin)} is not within the shape {list(tensor.shape)} of {tensor.name[:200]!r}", field="start"
        )
    left = tuple(whole - at for at, whole in zip(begin, tensor.shape, strict=True))
    size = tuple(shape) if shape is not None else tuple(min(n, 16 if i >= num - 2 else 1) for i, n in enumerate(left))
    if len(size) != num or any(not 0 <= wanted <= n for wanted, n in zip(size, left, strict=False)):
        raise InvalidArgument(
            f"shape={list(size)} at start={list(begin)} is not within the shape {list(tensor.shape)} of "
            f"{tensor.name[:200]!r}",
            field="shape",
        )
    return Box(begin, size)


def plain_values(data: Any, dtype_name: str) -> list[Any]:
    """Return elements as JSON values; those that a JSON number cannot hold exactly as text."""
    dtype = BY_NAME[dtype_name]
    data = np.ascontiguousarray(data)
    if dtype_name == "BOOL":
        return [bool(byte) for byte in data]
    if dtype_name in ("C32", "C64", "C128"):
        parts = data.view({"C32": np.float16, "C64": np.float32, "C128": np.float64}[dtype_name]).reshape(-1, 2)
        return [str(complex(*map(float, pair))).strip("()") for pair in parts.astype(np.float64)]
    numbers = numbers_in(data, dtype)
    if numbers.dtype.kind in "ui":
        return [value if abs(value) <= _MAX_EXACT else str(value) for value in numbers.tolist()]
    return [_plain_float(value) for value in numbers]


def _plain_float(value: Any) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return float(str(value))  # 0.1 of a float32, not 0.10000000149011612
