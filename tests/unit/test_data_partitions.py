"""Hive partitions in file names become columns."""

from __future__ import annotations

from urllib.parse import quote

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.data.source.partitions import NULL, hive_partition, partition_fields, partition_values
from strata.data.source.source import DataFile
from strata.errors import SchemaMismatch


def file_of(name: str) -> DataFile:
    return DataFile(f"/data/{name}", name, 1, 1, hive_partition(name))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("f.parquet", ()),
        ("a=1/f.parquet", (("a", "1"),)),
        ("a=1/b=x%20y/f.parquet", (("a", "1"), ("b", "x y"))),
        (f"a={NULL}/f.parquet", (("a", None),)),
        ("a=/f.parquet", (("a", ""),)),
        ("a=b=c/f.parquet", (("a", "b=c"),)),
        ("plain/a=1/more/f.parquet", (("a", "1"),)),
        ("=1/f.parquet", ()),
        ("a=1/b=2.parquet", (("a", "1"),)),
        ("k%3Dx=%2F/f.parquet", (("k=x", "/"),)),
    ],
)
def test_the_partition_is_read_from_the_name(name: str, expected: tuple[tuple[str, str | None], ...]) -> None:
    assert hive_partition(name) == expected


def test_a_repeated_key_is_rejected_with_the_name() -> None:
    with pytest.raises(SchemaMismatch, match=r"a=1/a=2/f\.parquet contains the partition key 'a' twice"):
        hive_partition("a=1/a=2/f.parquet")


@given(st.lists(st.text(), min_size=1))
def test_every_partition_value_round_trips(values: list[str]) -> None:
    name = "".join(f"k{i}={quote(value, safe='')}/" for i, value in enumerate(values)) + "f.parquet"
    expected = [(f"k{i}", value) for i, value in enumerate(values)]
    if NULL not in values:
        assert list(hive_partition(name)) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["1", "-2", "0"], pa.int64()),
        (["9223372036854775807", "-9223372036854775808"], pa.int64()),
        (["9223372036854775808"], pa.string()),
        (["1", "01"], pa.string()),
        (["-0"], pa.string()),
        (["+1"], pa.string()),
        (["1_000"], pa.string()),
        (["٣"], pa.string()),
        (["1", "x"], pa.string()),
        (["1", NULL], pa.int64()),
        ([NULL], pa.string()),
        (["2026-11-16"], pa.string()),
        ([""], pa.string()),
    ],
)
def test_a_partition_column_is_int64_if_all_values_are_integers(values: list[str], expected: pa.DataType) -> None:
    files = [file_of(f"k={value}/f{i}.parquet") for i, value in enumerate(values)]
    for order in (files, files[::-1]):
        assert partition_fields(order) == [pa.field("k", expected)]


def test_constants_have_the_types_of_their_columns() -> None:
    files = [file_of("year=2026/day=01/f.parquet"), file_of(f"year={NULL}/day={NULL}/f.parquet")]
    fields = partition_fields(files)
    assert partition_values(files[0], fields) == {"year": 2026, "day": "01"}
    assert partition_values(files[1], fields) == {"year": None, "day": None}
    assert partition_values(files[0], fields[1:]) == {"day": "01"}


def test_no_files_and_no_keys_give_no_columns() -> None:
    assert partition_fields([]) == []
    assert partition_fields([file_of("f.parquet")]) == []


@pytest.mark.parametrize("other", ["g.parquet", "b=1/g.parquet", "a=1/b=2/g.parquet"])
def test_files_with_different_keys_are_rejected_and_two_are_named(other: str) -> None:
    with pytest.raises(SchemaMismatch, match=rf"a=1/f\.parquet has a, {other} has"):
        partition_fields([file_of("a=1/f.parquet"), file_of(other)])


def test_a_partition_value_of_another_type_is_rejected() -> None:
    fields = [pa.field("a", pa.int64())]
    with pytest.raises(SchemaMismatch, match=r"a=x/f\.parquet has a='x', but this key has integer values"):
        partition_values(file_of("a=x/f.parquet"), fields)
    with pytest.raises(SchemaMismatch, match="has no partition key 'a', its keys are none"):
        partition_values(file_of("f.parquet"), fields)
