"""The first batch comes from the head of a row group, decoded alone, and is the same batch."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from strata import StructuredDataset
from strata.data.formats.parquet.format import ParquetFormat
from strata.data.runtime import pipeline
from strata.data.runtime.decoder import ThreadDecoder
from strata.data.source.source import DataFile, Source
from strata.errors import DataFileInvalid

NUM_ROWS = 1000
SMALL_PAGES: dict[str, Any] = {"data_page_size": 200, "write_batch_size": 50}
FORMAT = ParquetFormat()


@pytest.fixture(autouse=True)
def _every_unit_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "HEAD_BYTES", 1)


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record which heads were decoded, and how many rows of each."""
    found: list[tuple[int, int]] = []
    decode_head = ThreadDecoder.decode_head

    def noting(self: ThreadDecoder, number: int, num_rows: int) -> pa.Table:
        found.append((number, num_rows))
        return decode_head(self, number, num_rows)

    monkeypatch.setattr(ThreadDecoder, "decode_head", noting)
    return found


def rows_of(first: int, num_rows: int = NUM_ROWS) -> pa.Table:
    numbers = range(first, first + num_rows)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "price": pa.array([Decimal(n) / 100 for n in numbers], pa.decimal128(12, 2)),
            "word": [None if n % 7 == 0 else f"word {n % 50}" for n in numbers],
            "code": pa.array([f"code {n % 5}" for n in numbers]).dictionary_encode(),
            "day": [dt.date(2020, 1, 1) + dt.timedelta(days=n % 300) for n in numbers],
            "list": [list(range(n % 4)) if n % 5 else None for n in numbers],
            "point": [{"x": n, "y": [{"z": float(n)}] * (n % 3)} for n in numbers],
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 files of 2 row groups, with many pages each."""
    folder = tmp_path_factory.mktemp("rows")
    for number in range(2):
        table = rows_of(2 * number * NUM_ROWS, 2 * NUM_ROWS)
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=NUM_ROWS, **SMALL_PAGES)
    return folder


def read(folder: Path, **arguments: Any) -> tuple[list[dict[str, Any]], Any]:
    loader, dataset = StructuredDataset.create_dataloader(
        folder,
        **{"batch_size": 64, "num_workers": 2, "cache": False, "output_format": "arrow"} | arguments,
    )
    batches = [batch.to_pydict() for batch in loader]
    dataset.close()
    return batches, dataset


@pytest.mark.parametrize("num_rows", [1, 63, 64, 500, NUM_ROWS])
@pytest.mark.parametrize("columns", [rows_of(0, 1).column_names, ["point", "id"], ["code"]], ids=len)
def test_the_head_of_a_row_group_is_its_first_rows(folder: Path, columns: list[str], num_rows: int) -> None:
    path = folder / "1.parquet"
    source = Source(pafs.LocalFileSystem(), is_local=True)
    file = DataFile(str(path), path.name, path.stat().st_size, 1)
    facts = FORMAT.inspect(source, file, columns=None, unit_bytes=1)
    reader = FORMAT.open(source, file, facts.schema, facts.version)
    for unit in facts.units:
        head = FORMAT.read_head(reader, unit, columns, num_rows)
        whole = reader.read(unit, columns)
        assert head.schema == whole.schema
        assert head.equals(whole.slice(0, num_rows))
    reader.close()


def test_batches_and_counts_are_the_same_with_and_without_heads(
    folder: Path, heads: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, with_heads = read(folder)
    assert heads == [(0, 64)]
    monkeypatch.setattr(pipeline, "HEAD_BYTES", 1 << 60)
    expected, without = read(folder)
    assert len(heads) == 1
    assert found == expected
    one, other = with_heads.get_metrics(), without.get_metrics()
    assert (one.rows, one.batches, one.total.rows, one.total.units) == (4 * NUM_ROWS, 63, 4 * NUM_ROWS, 4)
    assert (other.total.rows, other.total.units) == (one.total.rows, one.total.units)
    assert one.total.bytes_decoded == other.total.bytes_decoded


@pytest.mark.parametrize(
    "arguments",
    [
        {"filters": "id >= 10"},
        {"transform": lambda batch: batch},
        {"on_error": "skip"},
        {"worker_type": "process", "num_workers": 1},
        {"batch_size": 251},  # more than a quarter of a row group
        {"shuffle": True, "shuffle_buffer_size": 2000, "lanes": 2},  # or first rows are decoded to measure them
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_a_head_is_not_read_if_it_may_differ_or_gains_nothing(
    folder: Path, heads: list[tuple[int, int]], arguments: dict[str, Any]
) -> None:
    batches, _ = read(folder, **arguments)
    assert not heads
    ids = sorted(number for batch in batches for number in batch["id"])
    assert ids == list(range(10 if "filters" in arguments else 0, 4 * NUM_ROWS))


def test_only_the_first_pass_starts_with_a_head(folder: Path, heads: list[tuple[int, int]]) -> None:
    loader, dataset = StructuredDataset.create_dataloader(folder, columns=["id"], batch_size=64, num_workers=2)
    for _ in range(3):
        assert np.concatenate([batch["id"] for batch in loader]).tolist() == list(range(4 * NUM_ROWS))
    assert heads == [(0, 64)]
    dataset.close()


def test_a_resumed_epoch_starts_with_the_row_group_that_it_stopped_in(
    folder: Path, heads: list[tuple[int, int]]
) -> None:
    expected, _ = read(folder)
    heads.clear()
    loader, dataset = StructuredDataset.create_dataloader(folder, batch_size=64, num_workers=2, output_format="arrow")
    for num_before, head in [(1, [(0, 128)]), (3, []), (32, [(2, 112)])]:
        batches = iter(loader)
        for _ in range(num_before):
            next(batches)
        state = loader.state_dict()
        other, resumed = StructuredDataset.create_dataloader(
            folder, batch_size=64, num_workers=2, output_format="arrow"
        )
        other.load_state_dict(state)
        heads.clear()
        assert [batch.to_pydict() for batch in other] == expected[num_before:]
        assert heads == head
        resumed.close()
        loader.set_epoch(0)
    dataset.close()


def test_rows_before_a_damaged_page_are_delivered_before_the_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"id": np.arange(NUM_ROWS)})
    pq.write_table(table, path, **SMALL_PAGES, use_dictionary=False, compression="none", write_page_checksum=True)
    data = bytearray(path.read_bytes())
    place = data.find(np.int64(900).tobytes() + np.int64(901).tobytes())
    assert place > 0
    data[place] ^= 0xFF
    path.write_bytes(bytes(data))
    loader, dataset = StructuredDataset.create_dataloader(path, batch_size=64, num_workers=2, cache=False)
    batches = iter(loader)
    assert next(batches)["id"].tolist() == list(range(64))
    with pytest.raises(DataFileInvalid, match=r"a\.parquet: row group 0, which begins with row 0, is damaged"):
        next(batches)
    dataset.close()
    first = data.find(np.int64(3).tobytes() + np.int64(4).tobytes())
    data[first] ^= 0xFF
    path.write_bytes(bytes(data))
    loader, dataset = StructuredDataset.create_dataloader(path, batch_size=64, num_workers=2, cache=False)
    with pytest.raises(DataFileInvalid, match=r"a\.parquet: row group 0, which begins with row 0, is damaged"):
        next(iter(loader))
    dataset.close()
