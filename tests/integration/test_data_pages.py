"""A filter on Parquet files with a page index delivers the same rows from fewer bytes."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata import StructuredDataset
from strata.data.formats.parquet import format as parquet
from strata.data.formats.parquet import pages
from strata.data.formats.parquet.pages import PagedFile
from strata.data.plan import report, row_counts
from strata.errors import NoData

NUM_ROWS = 40_000
GROUP_ROWS = 10_000


HAS_PAGE_ROWS = "max_rows_per_page" in inspect.signature(pq.write_table).parameters
"""Since pyarrow 23."""


def write(path: Path, table: pa.Table, *, page_rows: int = 500, group_rows: int = GROUP_ROWS, **options: Any) -> None:
    options = {"write_page_index": True, "write_batch_size": min(page_rows, 500), "use_dictionary": False, **options}
    if HAS_PAGE_ROWS:
        options["max_rows_per_page"] = page_rows
    else:  # every batch fills a page
        options |= {"write_batch_size": page_rows, "data_page_size": 1}
    pq.write_table(table, path, row_group_size=group_rows, **options)


def clicks(num_rows: int = NUM_ROWS, first: int = 0) -> pa.Table:
    random = np.random.default_rng(first)
    return pa.table(
        {
            "time": np.arange(first, first + num_rows),
            "x": random.normal(size=num_rows),
            "word": [f"word {number}" for number in random.integers(0, 10**9, num_rows)],
            "vector": list(random.normal(size=(num_rows, 4)).astype(np.float32)),
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create two files of four row groups with twenty pages each; only one has a page index."""
    folder = tmp_path_factory.mktemp("clicks")
    write(folder / "a.parquet", clicks())
    write(folder / "b.parquet", clicks(first=NUM_ROWS), write_page_index=False)
    return folder


def load(path: Path | str, filters: Any, **options: Any) -> tuple[pa.Table, StructuredDataset]:
    options = {"cache": False, "num_workers": 1, "output_format": "arrow", **options}
    loader, dataset = StructuredDataset.create_dataloader(str(path), filters=filters, **options)
    return pa.concat_tables(pa.table(batch) for batch in loader), dataset


@pytest.fixture(autouse=True)
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select pages in small files too."""
    monkeypatch.setattr(pages, "MIN_SAVED_BYTES", 0)


def without_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(parquet, "has_pages", lambda _: False)


@pytest.mark.skipif(not HAS_PAGE_ROWS, reason="pyarrow before 23 cannot limit the rows of a page")
def test_pages_that_cannot_pass_are_not_read_and_the_plan_counts_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filters = "time >= 12_345 and time < 13_456 or time == 77_000"
    found, dataset = load(folder, filters, columns=["x", "word", "vector"])
    pruning = dataset.plan.pruning
    # In file a, row group 1, four columns: three pages of twenty contain the times. File b has no index.
    assert (pruning.num_units_in_part, pruning.num_pages, pruning.num_pages_pruned) == (1, 80, 68)
    assert (pruning.num_units, pruning.num_units_pruned, pruning.num_units_counted) == (8, 6, 2)
    assert "1 row groups are read in part: 68 of 80 pages pruned" in str(dataset.plan)
    read = dataset.get_metrics().total.bytes_read
    without_pages(monkeypatch)
    same, other = load(folder, filters, columns=["x", "word", "vector"])
    assert found.equals(same)
    assert found.num_rows == 1112
    assert other.plan.fingerprint == dataset.plan.fingerprint
    assert other.plan.pruning.bytes_planned - pruning.bytes_planned == pruning.bytes_pages_pruned
    saved = other.get_metrics().total.bytes_read - read
    assert pruning.bytes_pages_pruned * 0.8 < saved <= pruning.bytes_pages_pruned
    assert report.rows(other.plan) == report.rows(dataset.plan)


def test_rows_decided_by_pages_are_not_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[tuple[int, tuple[tuple[int, int], ...]]] = []

    def noted(self: PagedFile, group: int, selection: Any, data: Any, rows: Any) -> pa.ChunkedArray:
        decoded.append((group, tuple(rows)))
        return decode(self, group, selection, data, rows)

    decode = PagedFile.decode
    monkeypatch.setattr(PagedFile, "decode", noted)
    options: dict[str, Any] = {"cache": False, "columns": ["x"]}
    _, dataset = StructuredDataset.create_dataloader(str(folder / "a.parquet"), filters="time < 12_345", **options)
    assert decoded == [(1, ((2000, 500),))]
    assert dataset.plan.num_rows == 12_345
    _, dataset = StructuredDataset.create_dataloader(str(folder / "a.parquet"), filters="time < 12_500", **options)
    assert len(decoded) == 1
    assert (dataset.plan.num_rows, dataset.plan.pruning.num_units_counted) == (12_500, 0)


def test_a_row_group_whose_pages_are_all_excluded_is_pruned(tmp_path: Path) -> None:
    """Check a value between minimum and maximum, which the row group's statistics cannot exclude."""
    every_other = clicks().filter(pa.array(np.arange(NUM_ROWS) // 500 % 2 == 0))
    write(tmp_path / "a.parquet", every_other, group_rows=5000)
    with pytest.raises(NoData, match="no row passes"):
        load(tmp_path, "time == 700")
    found, dataset = load(tmp_path, "time == 700 or time == 39_400")
    assert found["time"].to_pylist() == [39_400]
    assert (dataset.plan.num_units, dataset.plan.pruning.num_units_counted) == (1, 1)


@pytest.mark.parametrize("where", ["in threads", "in processes", "far away"])
def test_shuffled_rows_are_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    filters = "time >= 3000 and time < 4200 or time > 31_000 and time < 51_000"
    options: dict[str, Any] = {"shuffle": True, "batch_size": 700, "num_workers": 2}
    more: dict[str, Any] = {"worker_type": "process"} if where == "in processes" else {}
    if where == "far away":
        more["filesystem"] = pafs.PyFileSystem(pafs.FSSpecHandler(DirFileSystem(str(folder))))
    found, dataset = load("/" if where == "far away" else folder, filters, **options, **more)
    assert dataset.plan.parts is not None
    without_pages(monkeypatch)
    same, other = load(folder, filters, **options)
    assert other.plan.parts is None
    assert found.equals(same)
    assert found.num_rows == 1200 + 19_999
    assert dataset.get_metrics().total.bytes_read < other.get_metrics().total.bytes_read


def test_a_cached_survey_reads_the_same_parts(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"cache": str(tmp_path), "columns": ["x"]}
    first, dataset = load(folder, "time < 700", **options)
    again, other = load(folder, "time < 700", **options)
    assert first.equals(again)
    assert dataset.plan.parts is not None
    assert other.plan.parts is not None
    assert other.plan.parts.tolist() == dataset.plan.parts.tolist()
    assert other.plan.pruning == dataset.plan.pruning


def test_partitions_and_missing_columns_combine_with_pages(tmp_path: Path) -> None:
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        table = clicks(first=day * NUM_ROWS)
        write(tmp_path / f"day={day}" / "a.parquet", table if day == 1 else table.drop_columns(["word"]))
    filters = f"day == 1 and time < {NUM_ROWS + 300} or day == 2 and time >= {3 * NUM_ROWS - 200}"
    found, dataset = load(tmp_path, filters, columns=["day", "time", "word"])
    assert found["time"].to_pylist() == [*range(NUM_ROWS, NUM_ROWS + 300), *range(3 * NUM_ROWS - 200, 3 * NUM_ROWS)]
    assert found["day"].to_pylist() == [1] * 300 + [2] * 200
    assert found["word"].null_count == 200
    assert dataset.plan.pruning.num_units_in_part == 2


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "i": st.integers(-20, 20),
    "f": st.sampled_from([math.nan, -0.0, 0.0, 1.5, -2.0, math.inf, 7.25]),
    "s": st.sampled_from(["", "a", "ab", "b" * 70, "b" * 69 + "c", "z"]),
}
TYPES = {"i": pa.int32(), "f": pa.float32(), "s": pa.string()}


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    num_rows = draw(st.integers(1, 120))
    made: dict[str, Any] = {"row": np.arange(num_rows)}
    for name, values in VALUES.items():
        few = draw(st.lists(st.none() | values, min_size=1, max_size=8))
        random = np.random.default_rng(draw(st.integers(0, 9)))
        chosen = random.integers(0, len(few), num_rows)
        column = pa.array([few[place] for place in (sorted(chosen) if draw(st.booleans()) else chosen)], TYPES[name])
        made[name] = column.take(pa.compute.sort_indices(column)) if draw(st.booleans()) else column
    return pa.table(made)


@st.composite
def filters(draw: st.DrawFn) -> list[list[tuple[str, str, Any]]]:
    def term() -> tuple[str, str, Any]:
        name = draw(st.sampled_from([*VALUES]))
        operator = draw(st.sampled_from(["<", "<=", ">", ">=", "==", "!=", "in", "not in"]))
        values = VALUES[name]
        return name, operator, draw(st.lists(values, min_size=1, max_size=3) if "in" in operator else values)

    return [[term() for _ in range(draw(st.integers(1, 3)))] for _ in range(draw(st.integers(1, 3)))]


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(tables(), filters(), st.integers(1, 30), st.integers(20, 120), st.booleans(), st.sampled_from(["1.0", "2.0"]))
def test_rows_equal_pyarrows_filter_in_file_order(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    table: pa.Table,
    filters: list[list[tuple[str, str, Any]]],
    page_rows: int,
    group_rows: int,
    has_dictionary: bool,
    version: str,
) -> None:
    folder = tmp_path_factory.mktemp("property")
    options: dict[str, Any] = {"use_dictionary": has_dictionary, "data_page_version": version}
    write(folder / "a.parquet", table, page_rows=page_rows, group_rows=group_rows, **options)
    monkeypatch.setattr(row_counts, "MIN_SAVED", 0.0)
    monkeypatch.setattr(pages, "MIN_SAVED", 0.0)  # select pages even if it does not pay
    expected = pq.ParquetFile(folder / "a.parquet").read().filter(pq.filters_to_expression(filters))
    if not expected.num_rows:
        with pytest.raises(NoData):
            load(folder, filters, nulls="keep")
        return
    found, _ = load(folder, filters, nulls="keep", batch_size=50)
    assert found["row"].to_pylist() == expected["row"].to_pylist()
    assert repr(found.to_pylist()) == repr(expected.to_pylist())
