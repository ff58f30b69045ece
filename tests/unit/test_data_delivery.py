"""Estimates of the size of a delivered row before it is decoded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from strata.data.batch.delivery import GROWTH, VARIABLE_BYTES, estimate_row_bytes, lanes_that_fit


def plan_of(*kinds: pa.DataType, unit_rows: int = 100, read_bytes: int = 0) -> Any:
    """Return a plan of two row groups with `read_bytes` bytes per row."""
    schema = pa.schema([(f"c{number}", kind) for number, kind in enumerate(kinds)])
    rows = np.array([unit_rows, unit_rows], dtype=np.int64)
    return SimpleNamespace(
        schema=schema,
        columns=tuple(schema.names),
        unit_rows=rows,
        unit_total_rows=rows,
        unit_bytes=rows * read_bytes,
        num_units=2,
    )


@pytest.mark.parametrize(
    ("kind", "width"),
    [
        (pa.int64(), 8),
        (pa.bool_(), 1),
        (pa.decimal128(10, 2), 16),
        (pa.list_(pa.float32(), 768), 4 * 768),
        (pa.list_(pa.list_(pa.int16(), 3), 5), 2 * 3 * 5),
        (pa.struct([("x", pa.float64()), ("y", pa.list_(pa.int8(), 4))]), 12),
        (pa.uuid(), 16),
    ],
    ids=str,
)
def test_types_of_fixed_width_are_counted_exactly(kind: pa.DataType, width: int) -> None:
    assert estimate_row_bytes(plan_of(kind, pa.int32(), read_bytes=10_000)) == width + 4


@pytest.mark.parametrize("kind", [pa.string(), pa.list_(pa.float32()), pa.struct([("a", pa.binary())])], ids=str)
def test_types_of_variable_width_are_estimated_from_the_bytes_read(kind: pa.DataType) -> None:
    assert estimate_row_bytes(plan_of(kind, pa.int64(), read_bytes=1)) == VARIABLE_BYTES + 8
    assert estimate_row_bytes(plan_of(kind, pa.int64(), read_bytes=5000)) == GROWTH * 5000


def test_fewer_lanes_fit_if_rows_are_wide() -> None:
    floats, strings = plan_of(pa.list_(pa.float32(), 256)), plan_of(pa.string(), read_bytes=1 << 20)
    assert lanes_that_fit(floats, estimate_row_bytes(floats), split_bytes=4 * 1024 * 100, at_most=8) == 4
    assert lanes_that_fit(strings, estimate_row_bytes(strings), split_bytes=1 << 20, at_most=8) == 1
