"""Types that Arrow cannot concatenate, take or convert are delivered in a type that it can."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.data import StructuredDataset
from strata.data.arrow_types import recast
from strata.data.formats.parquet.format import ParquetReader
from strata.errors import SchemaMismatch

NUM_ROWS = 40
LISTS = pa.array(range(NUM_ROWS + 1), pa.int32())


def runs(values: list[Any], kind: pa.DataType | None = None) -> pa.Array:
    ends = pa.array([NUM_ROWS // 2, NUM_ROWS], pa.int32())
    return pa.RunEndEncodedArray.from_arrays(ends, pa.array(values, kind))


def coded(values: pa.Array) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0, 1] * (NUM_ROWS // 2), pa.int8()), values)


TEXT = ["a", "b"] * (NUM_ROWS // 2)
ODD: dict[str, pa.Array] = {
    "list of views": pa.array([[text, None] for text in TEXT], pa.list_(pa.string_view())),
    "struct of views": pa.array([{"a": text.encode()} for text in TEXT], pa.struct([("a", pa.binary_view())])),
    "map to views": pa.array([[("k", text)] for text in TEXT], pa.map_(pa.string(), pa.string_view())),
    "matrix of views": pa.array([[text] for text in TEXT], pa.list_(pa.string_view(), 1)),
    "codes of views": coded(pa.array(["a", "b"], pa.string_view())),
    "list of runs": pa.ListArray.from_arrays(LISTS, runs([1, 2])),
    "struct of runs": pa.StructArray.from_arrays([runs(["a", "b"])], ["r"]),
    "runs of lists": runs([[1], [2, 3]]),
    "list of codes": pa.ListArray.from_arrays(LISTS, coded(pa.array(["a", "b"]))),
    "list of list views": pa.array([[[1, 2], []]] * NUM_ROWS, pa.list_(pa.list_view(pa.int64()))),
    "times in nanoseconds": pa.array(range(NUM_ROWS), pa.time64("ns")),
    "list of times": pa.array([[number] for number in range(NUM_ROWS)], pa.list_(pa.time64("ns"))),
    "list of fixed binaries": pa.array([[b"ab"], [b"cd", None]] * (NUM_ROWS // 2), pa.list_(pa.binary(2))),
    "struct of such a list": pa.array([{"a": [b"ab"]}] * NUM_ROWS, pa.struct([("a", pa.list_(pa.binary(2)))])),
    "list of extensions": pa.ListArray.from_arrays(
        LISTS, pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0123456789abcdef"] * NUM_ROWS, pa.binary(16)))
    ),
}


def write(path: Path, *columns: pa.Array) -> None:
    """Write one file of two record batches per type."""
    first = 0
    for number, column in enumerate(columns):
        schema = pa.schema([("x", column.type), ("id", pa.int64())])
        with pa.ipc.new_file(path / f"{number}.arrow", schema) as writer:
            half = len(column) // 2
            for at in (0, half):
                part = column.slice(at, half)
                writer.write_batch(
                    pa.record_batch([part, pa.array(range(first + at, first + at + half))], schema=schema)
                )
        first += len(column)


def delivered(path: Path, output_format: str, **options: Any) -> list[tuple[int, Any]]:
    loader, _ = StructuredDataset.create_dataloader(
        str(path), format="arrow", output_format=output_format, batch_size=30, cache=False, **options
    )
    rows: list[tuple[int, Any]] = []
    for batch in loader:
        found = batch.to_pydict() if output_format == "arrow" else batch
        rows += zip([int(number) for number in found["id"]], list(found["x"]), strict=True)
    return sorted(rows, key=lambda row: row[0])


@pytest.mark.parametrize("name", [*ODD])
def test_nested_types_that_cannot_be_joined_or_taken_are_delivered_shuffled_or_not(tmp_path: Path, name: str) -> None:
    column = ODD[name]
    write(tmp_path, column, column)
    expected = list(enumerate(column.to_pylist() * 2))
    for output_format in ("arrow", "dict"):
        for shuffle in (False, True):
            assert delivered(tmp_path, output_format, shuffle=shuffle) == expected, (output_format, shuffle)
    as_objects = delivered(tmp_path, "torch", shuffle=True, strings={"x": "python"})
    assert as_objects == expected
    assert len(delivered(tmp_path, "pandas", shuffle=True)) == len(expected)


@pytest.mark.parametrize("name", [*ODD])
def test_nested_types_that_cannot_be_filtered_are_delivered_with_a_filter(tmp_path: Path, name: str) -> None:
    write(tmp_path, ODD[name])
    expected = list(enumerate(ODD[name].to_pylist()))
    for shuffle in (False, True):
        assert delivered(tmp_path, "dict", filters="id >= 7", shuffle=shuffle) == expected[7:]


@pytest.mark.parametrize("case", ["views", "views in Parquet", "runs"])
def test_views_and_runs_are_compared_by_value(tmp_path: Path, case: str) -> None:
    texts = [None, *TEXT[1:]]
    values = pc.run_end_encode(pa.array(texts)) if case == "runs" else pa.array(texts, pa.string_view())
    if case == "views in Parquet":
        pq.write_table(pa.table({"id": range(NUM_ROWS), "x": values}), tmp_path / "0.parquet", row_group_size=10)
    else:
        write(tmp_path, values)
    for filters, passes in (
        ("x == 'a'", lambda text: text == "a"),
        ("x not in ('b',)", lambda text: text != "b"),
        ("x is None", lambda text: text is None),
    ):
        loader, _ = StructuredDataset.create_dataloader(
            str(tmp_path), columns=["id"], filters=filters, output_format="dict", cache=False
        )
        found = [number for batch in loader for number in batch["id"]]
        assert found == [number for number, text in enumerate(texts) if passes(text)], filters


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (pc.field("at") > pa.scalar(0, pa.timestamp("s", "UTC")), "does not fit its columns"),
        (pc.divide(pc.field("id"), pc.field("zero")) > 1, "fails on a row: divide by zero"),
    ],
)
def test_an_invalid_filter_on_partitions_is_refused_without_reading_rows(
    tmp_path: Path, fails: pc.Expression, message: str
) -> None:
    (tmp_path / "day=1").mkdir()
    rows = {"id": pa.array([1]), "zero": pa.array([0]), "at": pa.array([0], pa.timestamp("s"))}
    pq.write_table(pa.table(rows), tmp_path / "day=1" / "0.parquet")
    with pytest.raises(SchemaMismatch, match=message):
        list(StructuredDataset.create_dataloader(str(tmp_path), filters=fails | (pc.field("day") == 1), cache=False)[0])


@pytest.mark.parametrize("has_pages", [False, True])
def test_durations_of_several_units_are_filtered_by_value(tmp_path: Path, has_pages: bool) -> None:
    for number, unit in enumerate(["s", "ms", "us"]):
        values = pa.array([-1, 1, 1000]).cast(pa.duration(unit))
        rows = pa.table({"id": pa.array([10 * number, 10 * number + 1, 10 * number + 2]), "x": values})
        pq.write_table(rows, tmp_path / f"{number}.parquet", row_group_size=1, write_page_index=has_pages)
    for filters, expected in (
        (pc.field("x") == pa.scalar(1, pa.duration("s")), [1, 12]),
        (pc.field("x").isin(pa.array([1, 1000], pa.duration("ms"))), [1, 11, 12, 22]),
        (pc.field("x") < pa.scalar(1, pa.duration("ms")), [0, 10, 20, 21]),
    ):
        loader, _ = StructuredDataset.create_dataloader(
            str(tmp_path), columns=["id"], filters=filters, output_format="dict", cache=False
        )
        assert [number for batch in loader for number in batch["id"]] == expected


def test_times_of_day_in_nanoseconds_are_exact_in_pandas(tmp_path: Path) -> None:
    write(tmp_path, pa.array([1, 86_399_999_999_999], pa.time64("ns")))
    rows = delivered(tmp_path, "pandas")
    assert [moment.value for _, moment in rows] == [1, 86_399_999_999_999]


@pytest.mark.parametrize("output_format", ["arrow", "pandas", "dict"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_dictionaries_may_differ_between_files_and_exceed_their_code_type(
    tmp_path: Path, output_format: str, is_nested: bool
) -> None:
    files = []
    for number in range(3):
        values = pa.array([f"file {number}, value {each}" for each in range(100)])
        files.append(pa.DictionaryArray.from_arrays(pa.array([*range(100)], pa.int8()), values))
    if is_nested:
        files = [pa.ListArray.from_arrays(pa.array(range(101), pa.int32()), each) for each in files]
    write(tmp_path, *files)
    expected = list(enumerate(value for each in files for value in each.to_pylist()))
    for shuffle in (False, True):
        rows = delivered(tmp_path, output_format, shuffle=shuffle)
        assert [(number, list(value) if is_nested else value) for number, value in rows] == expected
    if output_format == "arrow":
        loader, _ = StructuredDataset.create_dataloader(
            str(tmp_path), format="arrow", output_format="arrow", cache=False
        )
        assert "indices=int32" in str(next(iter(loader)).schema.field("x").type)


NULLS = st.none() | st.lists(st.none() | st.lists(st.none(), max_size=2), max_size=2)


@settings(max_examples=300, deadline=None)
@given(st.lists(NULLS, min_size=1, max_size=8), st.integers(0, 8), st.integers(0, 8), st.booleans())
def test_any_slice_of_lists_of_nulls_casts_to_any_list_type(
    values: list[Any], first: int, num_rows: int, is_large: bool
) -> None:
    inner = pa.list_(pa.null())
    array = pa.array(values, pa.large_list(inner) if is_large else pa.list_(inner)).slice(first, num_rows)
    for kind in (pa.list_(inner), pa.large_list(inner), pa.large_list(pa.large_list(pa.int64()))):
        made = recast(array, kind)
        made.validate(full=True)
        assert (made.type, made.to_pylist()) == (kind, array.to_pylist())


MIXED: dict[str, tuple[pa.Array, pa.Array]] = {
    "lists of nulls": (
        pa.array([[[None]], None, [None, []], []] * 10, pa.list_(pa.list_(pa.null()))),
        pa.array([[[None]], None, [None, []], []] * 10, pa.large_list(pa.list_(pa.null()))),
    ),
    "list views and lists": (pa.array([[1]] * 40, pa.list_view(pa.int32())), pa.array([[1]] * 40)),
    "runs and values": (runs(["a", "b"]), pa.array(TEXT)),
    "maps to nulls and to numbers": (
        pa.array([[("a", None)]] * 40, pa.map_(pa.string(), pa.null())),
        pa.array([[("a", 1)]] * 40, pa.map_(pa.string(), pa.int64())),
    ),
    "nothing and runs": (pa.nulls(40), runs(["a", "b"])),
    "nothing and a list view": (pa.nulls(40), pa.array([[1]] * 40, pa.list_view(pa.int64()))),
}


@pytest.mark.parametrize("name", [*MIXED])
def test_files_whose_types_differ_only_in_encoding_are_one_dataset(tmp_path: Path, name: str) -> None:
    write(tmp_path, *MIXED[name])
    expected = list(enumerate(MIXED[name][0].to_pylist() + MIXED[name][1].to_pylist()))
    for shuffle in (False, True):
        for some in (None, "id >= 0"):
            assert delivered(tmp_path, "arrow", shuffle=shuffle, filters=some) == expected
    assert len(delivered(tmp_path, "pandas", shuffle=True)) == len(expected)


def test_a_value_that_python_cannot_hold_raises_a_strata_error(tmp_path: Path) -> None:
    write(tmp_path, pa.array([10**15] * 4, pa.timestamp("ms")))
    with pytest.raises(SchemaMismatch, match=r"x is timestamp\[ms\].*columns="):
        delivered(tmp_path, "dict")


class _Refusing:
    """Fails like the decoder on lists with more than 2 GiB of strings."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def read_row_group(self, *_: object, **__: object) -> pa.Table:
        raise pa.ArrowNotImplementedError("Nested data conversions not implemented for chunked array outputs")


def test_a_row_group_too_large_to_decode_at_once_is_decoded_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"x": [[str(number)] for number in range(1000)], "id": range(1000)})
    pq.write_table(table, tmp_path / "a.parquet")
    opened: Callable[[ParquetReader], Any] = ParquetReader._open_native
    monkeypatch.setattr(ParquetReader, "_open_native", lambda self: _Refusing(opened(self)))
    loader, _ = StructuredDataset.create_dataloader(str(tmp_path), output_format="arrow", cache=False)
    assert pa.Table.from_batches(list(loader)).to_pydict() == table.to_pydict()
