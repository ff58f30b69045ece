"""Keys of the node cache: equal in every process, and different for whatever decides the rows."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.data import StructuredDataset
from strata.data.plan.projection import Cast, ColumnProjection, TableProjection
from strata.data.runtime.decoder import Recipe
from strata.data.shared.keys import RowGroupKeys, Unshareable, digest, plain, store_identity

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def recipe_of(path: Path, **options: Any) -> Recipe:
    _, dataset = StructuredDataset.create_dataloader(
        str(path), **{"output_format": "arrow", "rank": 0, "num_ranks": 1, "cache": False, **options}
    )
    found: Recipe = dataset._recipe
    return found


def keys_of(recipe: Recipe) -> list[str]:
    keys = RowGroupKeys(recipe.source, recipe.plan, recipe.formats, recipe.columns)
    return [keys.key_of(number) for number in range(recipe.plan.num_units)]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [1, 2, 3, 4], "y": [1.0, 2.0, 3.0, 4.0]}), path, row_group_size=2)
    return path


@given(values, values)
def test_a_digest_is_equal_exactly_for_equal_values(one: object, other: object) -> None:
    assert (digest(one) == digest(other)) == (repr(plain(one)) == repr(plain(other)))


def test_the_order_of_sets_and_mappings_does_not_matter_and_that_of_lists_does() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest(frozenset("abc")) == digest(frozenset("cba"))
    assert digest([1, 2]) != digest([2, 1])
    assert digest("1") != digest(1) != digest(True)
    assert digest(np.array([1, 2])) != digest(np.array([2, 1])) != digest(np.array([2, 1], np.int32))
    with pytest.raises(Unshareable, match="a object cannot be compared"):
        digest(object())


def test_row_groups_of_one_file_have_different_keys(table: Path) -> None:
    one, two = keys_of(recipe_of(table))
    assert one != two


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 2},
        {"shuffle": True, "shuffle_seed": 3},
        {"split_bytes": 1_000},
        {"transform": lambda rows: rows},
        {"output_format": "numpy", "decimals": "float64"},
    ],
)
def test_what_does_not_change_decoded_rows_is_not_part_of_a_key(table: Path, options: dict[str, Any]) -> None:
    assert keys_of(recipe_of(table, **options)) == keys_of(recipe_of(table))


def test_whatever_decides_the_rows_is_part_of_a_key(table: Path) -> None:
    plain_key = keys_of(recipe_of(table))[0]
    others = [
        keys_of(recipe_of(table, **options))[0]
        for options in (
            {"columns": ["x"]},
            {"columns": ["y", "x"]},
            {"filters": "x > 0"},
            {"filters": "x >= 1"},
            {"schema": pa.schema([("x", pa.int32()), ("y", pa.float64())])},
        )
    ]
    assert len({plain_key, *others}) == 6


def test_long_filters_that_print_alike_have_different_keys(table: Path) -> None:
    def with_last(last: int) -> Any:
        return [("x", "in", [*range(1_000), last])]

    assert keys_of(recipe_of(table, filters=with_last(1_001))) != keys_of(recipe_of(table, filters=with_last(1_002)))


def test_a_filter_that_pyarrow_cannot_serialize_is_not_shared(table: Path) -> None:
    recipe = recipe_of(table, filters="x > 1")
    with pytest.raises(Unshareable, match="the filter cannot be compared"):
        keys_of(replace(recipe, plan=replace(recipe.plan, condition=object())))


def test_options_of_a_text_format_are_part_of_a_key(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,n\n2,\n")
    schema = pa.schema([("x", pa.int64()), ("y", pa.string())])
    keys = [
        keys_of(recipe_of(tmp_path / "a.csv", schema=schema, format_options=options))
        for options in ({}, {"null_values": ["n"]})
    ]
    assert keys[0] != keys[1]


@pytest.mark.parametrize("change", ["time", "inode", "name"])
def test_another_file_has_other_keys(table: Path, change: str) -> None:
    before = keys_of(recipe_of(table))
    status = table.stat()
    if change == "time":
        os.utime(table, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    elif change == "inode":
        copy = table.with_suffix(".copy")
        copy.write_bytes(table.read_bytes())
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
        copy.rename(table)
    else:
        table = table.rename(table.with_name("b.parquet"))
    assert not set(before) & set(keys_of(recipe_of(table)))


def test_a_file_that_changed_after_it_was_planned_is_not_shared(table: Path) -> None:
    recipe = recipe_of(table)
    table.touch()
    with pytest.raises(Unshareable, match="has changed"):
        keys_of(recipe)


def test_keys_are_equal_in_other_processes(table: Path) -> None:
    program = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from strata.data import loader
loader.has_torch = lambda: False
from test_data_shared_keys import keys_of, recipe_of
print(*keys_of(recipe_of(Path({str(table)!r}), filters="x in [1, 3, 4] or y > 2.5")))
"""
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()[0]
        for seed in ("1", "2")
    }
    assert printed == {keys_of(recipe_of(table, filters="x in [1, 3, 4] or y > 2.5"))[0]}


def test_deleted_rows_of_an_iceberg_file_are_part_of_a_key(table: Path) -> None:
    recipe = recipe_of(table)
    columns = {"x": ColumnProjection(Cast(pa.int64()), "x"), "y": ColumnProjection(Cast(pa.float64()), "y")}

    def with_deleted(*rows: int) -> list[str]:
        projection = TableProjection(columns, np.array(rows, np.int64))
        [planned] = recipe.plan.files
        plan = replace(recipe.plan, files=(replace(planned, projection=projection),))
        return keys_of(replace(recipe, plan=plan))

    assert with_deleted(1) == with_deleted(1)
    assert len({with_deleted()[0], with_deleted(0)[0], with_deleted(1)[0], keys_of(recipe)[0]}) == 4


def test_an_unknown_projection_is_not_shared(table: Path) -> None:
    recipe = recipe_of(table)
    [planned] = recipe.plan.files
    plan = replace(recipe.plan, files=(replace(planned, projection=object()),))  # type: ignore[arg-type]
    with pytest.raises(Unshareable, match="object cannot be compared"):
        keys_of(replace(recipe, plan=plan))


def s3(**options: Any) -> pafs.FileSystem:
    return pafs.S3FileSystem(access_key="k", secret_key="s", region="eu-west-1", **options)


def test_stores_at_other_endpoints_and_with_other_keys_differ() -> None:
    found = [
        digest(store_identity(each))
        for each in (
            s3(),
            s3(endpoint_override="localhost:9000"),
            pafs.S3FileSystem(anonymous=True, region="eu-west-1"),
            pafs.LocalFileSystem(),
            pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("http"))),
        )
    ]
    assert len(set(found)) == 5
    assert digest(store_identity(s3())) == found[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("memory"))),
        lambda: pafs.SubTreeFileSystem("/tmp", pafs.LocalFileSystem()),
        pafs._MockFileSystem,
    ],
)
def test_file_systems_that_may_differ_between_processes_are_not_shared(make: Callable[[], pafs.FileSystem]) -> None:
    with pytest.raises(Unshareable, match="another process may have other files"):
        store_identity(make())


def test_a_remote_file_without_a_modification_time_is_not_shared(table: Path) -> None:
    recipe = recipe_of(table)
    [planned] = recipe.plan.files
    remote = dataclasses.replace(recipe.source, filesystem=s3(), is_local=False)
    plan = replace(recipe.plan, files=(replace(planned, file=replace(planned.file, mtime_ns=0)),))
    assert keys_of(replace(recipe, source=remote))
    with pytest.raises(Unshareable, match="no modification time"):
        keys_of(replace(recipe, source=remote, plan=plan))
