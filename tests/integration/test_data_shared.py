"""Processes that share decoded row groups: each is decoded once, and the order is the same as without."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shared_readers import Reader, children, deliver, held, limit, same

from strata.data import StructuredDataset
from strata.data.shared import cache
from strata.errors import InvalidArgument
from tests.integration.servers import until

__all__ = ["children", "held", "limit"]  # fixtures

NUM_ROW_GROUPS = 12
ROWS = 2_000
"""In a row group: 80 KB for each of two columns, so an entry of both is mapped."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("shared")
    random = np.random.default_rng(0)
    for number in range(2):
        rows = NUM_ROW_GROUPS // 2 * ROWS
        columns = {
            "x": random.normal(size=rows),
            "wide": pa.FixedSizeListArray.from_arrays(random.normal(size=rows * 8), 8),
            "y": np.arange(rows) + number * rows,
        }
        pq.write_table(pa.table(columns), directory / f"{number}.parquet", row_group_size=ROWS)
    return str(directory)


def test_two_ranks_read_no_more_bytes_than_one(children: list[Any], data: str, limit: int) -> None:
    alone, expected = deliver(data, rank=0, num_ranks=1)
    ranks = [
        Reader(children, data, rank=rank, num_ranks=2, shuffle=True, shared_bytes=limit, num_epochs=2)
        for rank in range(2)
    ]
    found = [rank.result() for rank in ranks]
    assert sum(rank["bytes_read"] for rank in found) <= 1.05 * expected.bytes_read
    assert sum(rank["units"] for rank in found) == NUM_ROW_GROUPS
    assert sum(rank["rows"] for rank in found) == 2 * sum(len(batch["x"]) for batch in alone)
    assert not any(rank["unshared_units"] for rank in found)


def test_processes_that_read_the_same_rows_decode_each_row_group_once(
    children: list[Any], data: str, limit: int
) -> None:
    readers = [Reader(children, data, rank=0, num_ranks=1, shared_bytes=limit) for _ in range(3)]
    found = [reader.result() for reader in readers]
    assert sum(each["units"] for each in found) == NUM_ROW_GROUPS
    assert {each["hash"] for each in found} == {Reader(children, data, rank=0, num_ranks=1).result()["hash"]}
    for reader in readers:
        reader.end()
    until(lambda: not cache.directory_for(limit).exists(), "the cache is removed after a normal exit")


def test_loaders_with_other_columns_on_one_directory_do_not_meet(children: list[Any], data: str, limit: int) -> None:
    columns = [["x", "y"], ["y"], ["y", "x"]]
    readers = [Reader(children, data, columns=some, shared_bytes=limit) for some in columns]
    found = [reader.result() for reader in readers]
    plain = [Reader(children, data, columns=some).result() for some in columns]
    assert [each["hash"] for each in found] == [each["hash"] for each in plain]
    assert [each["units"] for each in found] == [NUM_ROW_GROUPS] * 3


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True, "shuffle_buffer_size": 3_000},
        {"filters": "x > 0.5"},
        {"filters": "y >= 5000 and y < 9000", "columns": ["x"]},
        {"worker_type": "process"},
        {"output_format": "arrow", "collate_fn": lambda batch: {"x": np.asarray(batch["x"])}},
    ],
)
def test_shared_rows_are_delivered_in_the_same_order(data: str, held: int, options: dict[str, Any]) -> None:
    plain, total = deliver(data, **options)
    first, made = deliver(data, shared_bytes=held, **options)
    second, taken = deliver(data, shared_bytes=held, **options)
    assert same(plain, first)
    assert same(plain, second)
    assert made.bytes_read == total.bytes_read > 0
    assert (taken.units, taken.bytes_read) == (0, 0)
    assert taken.shared_units == total.units


def test_a_transform_runs_on_shared_rows_in_every_process(data: str, held: int) -> None:
    def doubled(batch: pa.RecordBatch) -> dict[str, Any]:
        return {"x": np.asarray(batch["x"]) * 2}

    plain, _ = deliver(data, columns=["x"])
    first, _ = deliver(data, columns=["x"], transform=doubled, shared_bytes=held)
    second, taken = deliver(data, columns=["x"], shared_bytes=held)
    assert np.array_equal(first[3]["x"], plain[3]["x"] * 2)
    assert same(second, plain)
    assert taken.units == 0


def test_a_batch_may_be_changed_in_place(data: str, held: int) -> None:
    options = {"batch_size": ROWS, "columns": ["x"], "shared_bytes": held}
    loader, _dataset = StructuredDataset.create_dataloader(data, output_format="torch", **options)
    for batch in loader:
        batch["x"].zero_()
    again, taken = deliver(data, **options)
    assert taken.units == 0
    assert same(again, deliver(data, batch_size=ROWS, columns=["x"])[0])


def test_a_limit_below_the_size_of_the_data_holds_and_changes_no_row(data: str) -> None:
    limit = (1 << 20) + os.getpid()
    plain, _ = deliver(data, shuffle=True)
    largest = 0
    for _ in range(3):
        found, total = deliver(data, shuffle=True, shared_bytes=limit)
        assert same(plain, found)
        assert total.units + total.shared_units == NUM_ROW_GROUPS
        files = [path.stat().st_size for path in cache.directory_for(limit).iterdir()]
        largest = max(largest, sum(files))
    assert 0 < largest <= limit + 16, "16 bytes for `usage`"


def test_a_file_that_is_replaced_is_read_anew(tmp_path: Path, held: int) -> None:
    path = tmp_path / "a.parquet"
    random = np.random.default_rng(1)
    kept = []
    for _ in range(2):  # the footers are equal: no statistics, the same sizes
        values = random.integers(0, 1 << 60, 50_000)
        pq.write_table(pa.table({"x": values}), path, write_statistics=False, use_dictionary=False, compression="none")
        os.utime(path, ns=(1, 1))
        kept.append(path.rename(tmp_path / f"{len(kept)}.kept"))
    found = []
    for each in kept:
        path.unlink(missing_ok=True)
        each.rename(path)
        batches, total = deliver(str(tmp_path), format="parquet", shared_bytes=held, cache=False)
        found.append(np.concatenate([batch["x"] for batch in batches]))
        assert total.units == 1
    assert not np.array_equal(*found)


@pytest.mark.parametrize("damage", [b"", b"\0" * 64, b"\xff" * 64])
def test_an_unreadable_entry_is_made_again(
    data: str, held: int, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = deliver(data, columns=["x"])
    deliver(data, columns=["x"], shared_bytes=held)
    gc.collect()  # unmap the entries
    for path in cache.directory_for(held).glob("*.entry"):
        path.write_bytes(damage)
    found, total = deliver(data, columns=["x"], shared_bytes=held)
    assert same(plain, found)
    assert (total.units, total.unshared_units) == (NUM_ROW_GROUPS, 0)
    assert damage == b"" or "an entry of the node cache is unreadable" in caplog.text
    assert deliver(data, columns=["x"], shared_bytes=held)[1].units == 0


def test_a_file_system_of_one_process_is_not_shared(held: int, caplog: pytest.LogCaptureFixture) -> None:
    fsspec = pytest.importorskip("fsspec")
    with fsspec.filesystem("memory").open("/private/a.parquet", "wb") as file:
        pq.write_table(pa.table({"x": [1, 2, 3]}), file)
    for _ in range(2):
        batches, total = deliver("memory://private/", shared_bytes=held)
        assert len(batches) == 1
        assert (total.units, total.shared_units, total.unshared_units) == (1, 0, 1)
    assert "not shared between processes" in caplog.text


@pytest.mark.parametrize("value", ["1 KiB", -1, "lots", True])
def test_a_wrong_limit_names_the_argument(data: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match="shared_bytes"):
        deliver(data, shared_bytes=value)
