"""Convert the bounds of row groups and pages to the types in which rows are compared.

A file states bounds as physical values. They become Arrow values by the logical type of the column, and are then cast
as its rows are. A bound that cannot be cast, or is NaN, counts as unknown.
"""

from __future__ import annotations

import decimal
import json
import math
import struct
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa

from strata.data.filter.pruning import Bounds, comparison_type, unknown_bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow.parquet as pq

    from strata.data.formats.parquet import page_index

Raw: TypeAlias = bool | int | float | bytes | None
"""A physical value; None if the file does not state it."""

_UNITS = {"milliseconds": "ms", "microseconds": "us", "nanoseconds": "ns"}
_TEXT = frozenset({"String", "JSON", "BSON", "Enum", "UUID", "None"})
_PLAIN: dict[str, Callable[[bytes], Raw]] = {
    "BOOLEAN": lambda data: bool(data[0] & 1),
    "INT32": lambda data: int.from_bytes(data, "little", signed=True),
    "INT64": lambda data: int.from_bytes(data, "little", signed=True),
    "FLOAT": lambda data: float(struct.unpack("<f", data)[0]),
    "DOUBLE": lambda data: float(struct.unpack("<d", data)[0]),
    "BYTE_ARRAY": lambda data: data,
    "FIXED_LEN_BYTE_ARRAY": lambda data: data,
}
"""Decoders of values in a page index, by physical type."""


def is_nested(kind: pa.DataType) -> bool:
    return kind.num_fields > 0 or isinstance(kind, pa.BaseExtensionType)


def have_bounds(schema: pa.Schema, compared: pa.Schema) -> bool:
    """Return whether the bounds of a file's columns hold for their rows in the types in which they are compared.

    Parquet stores durations as integers, so their bounds are in the file's unit.
    """
    return not any(
        is_nested(kind) or pa.types.is_dictionary(kind) or (pa.types.is_duration(field.type) and kind != field.type)
        for field in compared
        for kind in [schema.field(field.name).type]
    )


def of_groups(metadata: pq.FileMetaData, groups: Sequence[int], leaf: int, compared: pa.DataType) -> Bounds:
    """Return the bounds of a flat column that the footer states."""
    lows: list[Raw] = []
    highs: list[Raw] = []
    may_be_null, may_be_value = np.ones((2, len(groups)), np.bool_)
    for place, index in enumerate(groups):
        group = metadata.row_group(index)
        stated = group.column(leaf).statistics
        has_bounds = stated is not None and stated.has_min_max
        lows.append(stated.min_raw if has_bounds else None)
        highs.append(stated.max_raw if has_bounds else None)
        if stated is not None and stated.has_null_count:
            may_be_null[place] = stated.null_count > 0
            may_be_value[place] = stated.null_count < group.num_rows
    return _made(metadata.schema.column(leaf), lows, highs, may_be_null, may_be_value, compared)


def of_pages(
    column: pq.ColumnSchema, pages: Sequence[tuple[page_index.PageBounds, int] | None], compared: pa.DataType
) -> Bounds:
    """Return the bounds of a flat column that a page index states, per page or part of a page."""
    read = _PLAIN.get(column.physical_type)
    if read is None:
        return unknown_bounds(compared, len(pages))
    lows: list[Raw] = []
    highs: list[Raw] = []
    may_be_null, may_be_value = np.ones((2, len(pages)), np.bool_)
    for number, page in enumerate(pages):
        if page is None or page[0].null_pages[page[1]]:
            may_be_value[number] = page is None
            lows.append(None)
            highs.append(None)
            continue
        bounds, place = page
        lows.append(read(bounds.lows[place]))
        highs.append(read(bounds.highs[place]))
        may_be_null[number] = bounds.null_counts is None or bounds.null_counts[place] > 0
    return _made(column, lows, highs, may_be_null, may_be_value, compared)


def _made(
    column: pq.ColumnSchema,
    lows: Sequence[Raw],
    highs: Sequence[Raw],
    may_be_null: Any,
    may_be_value: Any,
    compared: pa.DataType,
) -> Bounds:
    try:
        low, high = (_arrow(column, values).cast(comparison_type(compared)) for values in (lows, highs))
    except (pa.ArrowException, TypeError, ValueError, OverflowError, decimal.DecimalException):
        low = high = pa.nulls(len(lows), comparison_type(compared))
    return Bounds(low, high, may_be_null, may_be_value)


def _arrow(column: pq.ColumnSchema, values: Sequence[Raw]) -> pa.Array:
    """Return the values as an Arrow array of the column's logical type.

    Raises:
        ValueError: The order of such values is unknown.
    """
    logical = json.loads(column.logical_type.to_json())
    physical, kind = column.physical_type, logical["Type"]
    if kind == "Decimal":
        return _decimals(values, logical["precision"], logical["scale"])
    if physical in ("INT32", "INT64"):
        width = 32 if physical == "INT32" else 64
        if kind == "Int" and not logical["isSigned"]:
            values = [None if value is None else int(value) % 2**width for value in values]
            return pa.array(values, pa.uint32() if width == 32 else pa.uint64())
        integers = pa.array(values, pa.int32() if width == 32 else pa.int64())
        if kind == "Date":
            return integers.cast(pa.date32())
        if kind in ("Time", "Timestamp"):
            unit = _UNITS[logical["timeUnit"]]
            if kind == "Timestamp":
                return integers.cast(pa.timestamp(unit, "UTC" if logical["isAdjustedToUTC"] else None))
            return integers.cast(pa.time32(unit) if width == 32 else pa.time64(unit))
        if kind in ("Int", "None"):
            return integers
    if physical in ("FLOAT", "DOUBLE"):
        return pa.array(_ordered(values), pa.float32() if physical == "FLOAT" else pa.float64())
    if kind == "Float16":
        halves = [float(np.frombuffer(value, "<f2")[0]) if isinstance(value, bytes) else None for value in values]
        return pa.array(_ordered(halves), pa.float32())
    if physical == "BOOLEAN":
        return pa.array(values, pa.bool_())
    if physical in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY") and kind in _TEXT:
        return pa.array(values, pa.binary())
    raise ValueError(f"{physical} as {kind}")


def _ordered(values: Sequence[Raw]) -> list[Raw]:
    """Replace NaN, which some writers state as minimum or maximum, by None."""
    return [None if isinstance(value, float) and math.isnan(value) else value for value in values]


def _decimals(values: Sequence[Raw], precision: int, scale: int) -> pa.Array:
    exact = decimal.Context(prec=decimal.MAX_PREC, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)
    digits = [int.from_bytes(value, "big", signed=True) if isinstance(value, bytes) else value for value in values]
    made = [None if value is None else exact.scaleb(decimal.Decimal(value), -scale) for value in digits]
    return pa.array(made, pa.decimal128(precision, scale) if precision <= 38 else pa.decimal256(precision, scale))
