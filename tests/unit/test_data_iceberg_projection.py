"""The columns and rows of a file are projected without a table."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.data.formats.base import Unit
from strata.data.plan.projection import (
    Cast,
    ColumnProjection,
    ListConversion,
    MapConversion,
    MemberConversion,
    StructConversion,
    TableProjection,
    convert_array,
)


def unit(num_rows: int, first_row: int = 0) -> Unit:
    return Unit(0, num_rows, first_row, 0, 0)


@given(
    sizes=st.lists(st.integers(0, 20), max_size=6),
    gone=st.sets(st.integers(0, 130)),
    wanted=st.lists(st.sampled_from(["number", "same", "absent"]), unique=True),
)
def test_row_groups_without_deleted_rows_add_up_to_the_file_without_them(
    sizes: list[int], gone: set[int], wanted: list[str]
) -> None:
    rows = np.arange(sum(sizes))
    projection = TableProjection(
        {
            "number": ColumnProjection(Cast(pa.int64()), "n"),
            "same": ColumnProjection(Cast(pa.string()), None, pa.scalar("x")),
            "absent": ColumnProjection(Cast(pa.float64())),
        },
        np.array(sorted(gone), dtype=np.int64),
    )
    file = pa.table({"n": pa.array(rows, pa.int32())}).select(projection.file_columns(wanted))
    parts, first = [], 0
    for size in sizes:
        one = unit(size, first)
        read = file.slice(first, size) if file.num_columns else pa.table({"": pa.nulls(size)}).select([])
        parts.append(projection.apply(read, one, wanted))
        assert parts[-1].num_rows == projection.num_left(one)
        first += size
    kept = [int(row) for row in rows if row not in gone]
    assert sum(part.num_rows for part in parts) == len(kept)
    if parts:
        whole = pa.concat_tables(parts)
        assert whole.column_names == wanted
        expected = {"number": kept, "same": ["x"] * len(kept), "absent": [None] * len(kept)}
        assert whole.to_pydict() == {name: expected[name] for name in wanted}


def test_columns_are_cast_to_the_tables_types_and_times_are_truncated() -> None:
    projection = TableProjection(
        {
            "wide": ColumnProjection(Cast(pa.int64()), "i"),
            "time": ColumnProjection(Cast(pa.timestamp("us")), "t"),
            "text": ColumnProjection(Cast(pa.string()), "d"),
        }
    )
    read = pa.table(
        {
            "i": pa.array([1, None], pa.int32()),
            "t": pa.array([1_999, -1], pa.timestamp("ns")),
            "d": pa.array(["a", "b"]).dictionary_encode(),
        }
    )
    made = projection.apply(read, unit(2), ["text", "time", "wide"])
    assert made.schema.types == [pa.string(), pa.timestamp("us"), pa.int64()]
    assert made["wide"].to_pylist() == [1, None]
    assert made["time"].cast(pa.int64()).to_pylist() == [1, 0]


def test_a_column_that_is_used_twice_is_read_once() -> None:
    projection = TableProjection(
        {"a": ColumnProjection(Cast(pa.int64()), "x"), "b": ColumnProjection(Cast(pa.float64()), "x")}
    )
    assert projection.file_columns(["b", "a"]) == ["x"]
    assert projection.apply(pa.table({"x": [1, 2]}), unit(2), ["b", "a"]).to_pydict() == {"b": [1.0, 2.0], "a": [1, 2]}


POINT = pa.struct([("x", pa.int64()), ("z", pa.string())])
RESHAPE = StructConversion(
    POINT,
    (MemberConversion("x", 1, Cast(pa.int64())), MemberConversion("z", None, Cast(pa.string()), pa.scalar("new"))),
)
OLD_POINT = pa.struct([("gone", pa.int32()), ("y", pa.int32())])
points = st.none() | st.fixed_dictionaries({"gone": st.none(), "y": st.none() | st.integers(-9, 9)})


def reshaped(point: dict[str, int] | None) -> dict[str, object] | None:
    return None if point is None else {"x": point["y"], "z": "new"}


@pytest.mark.parametrize("wide_before", [False, True])
@pytest.mark.parametrize("wide_after", [False, True])
@given(values=st.lists(st.none() | st.lists(points, max_size=3), max_size=8), cut=st.integers(0, 8))
def test_sliced_lists_of_structs_are_rebuilt(
    wide_before: bool, wide_after: bool, values: list[list[dict[str, int] | None] | None], cut: int
) -> None:
    before = pa.large_list(OLD_POINT) if wide_before else pa.list_(OLD_POINT)
    after = pa.large_list(POINT) if wide_after else pa.list_(POINT)
    made = convert_array(pa.array(values, before).slice(cut), ListConversion(after, RESHAPE))
    made.validate(full=True)
    assert made.type == after
    assert made.to_pylist() == [None if each is None else [reshaped(point) for point in each] for each in values[cut:]]


@given(
    values=st.lists(st.none() | st.dictionaries(st.text(max_size=3), points, max_size=3), max_size=8),
    cut=st.integers(0, 8),
)
def test_maps_keep_their_keys_and_rebuild_their_values(
    values: list[dict[str, dict[str, int] | None] | None], cut: int
) -> None:
    pairs = [None if each is None else list(each.items()) for each in values]
    array = pa.array(pairs, pa.map_(pa.string(), OLD_POINT)).slice(cut)
    made = convert_array(array, MapConversion(pa.map_(pa.string(), POINT), Cast(pa.string()), RESHAPE))
    made.validate(full=True)
    assert made.to_pylist() == [
        None if each is None else [(key, reshaped(point)) for key, point in each.items()] for each in values[cut:]
    ]


def test_a_projection_can_be_pickled() -> None:
    projection = TableProjection({"a": ColumnProjection(RESHAPE, "p")}, np.array([1], dtype=np.int64))
    copied = pickle.loads(pickle.dumps(projection))
    read = pa.table({"p": pa.array([{"gone": 1, "y": 2}, None, None], OLD_POINT)})
    assert copied.apply(read, unit(3), ["a"]).equals(projection.apply(read, unit(3), ["a"]))


def test_reading_needs_no_iceberg_package() -> None:
    code = "import sys, strata.data.plan.projection; assert not {'pyiceberg', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
