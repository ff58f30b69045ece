"""The contract of every source of data."""

from __future__ import annotations

import io
import pickle
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv, orc

from strata.data import StructuredDataset
from strata.data.source.filesystem import open_source
from strata.data.source.paths import FoundFiles, discover, guess_format, suffixes_of
from strata.data.source.source import ByteCounter, DataFile
from strata.errors import DataFileMissing, NoData, StorageDenied

PARQUET = suffixes_of("parquet")
NUM_ROWS, NUM_ROWS_OF_GROUP = 10_000, 2_500
NUM_READS = 50
HOSTILE = [
    *("a b/ c.parquet", "ünï/日本.parquet", "50%25.parquet", "100%.parquet", "a=1=2/b.parquet", "a+b&c.parquet"),
    *("quote'.parquet", "[1]*.parquet", "#hash.parquet", "semi;colon,comma.parquet"),
]


class DataPlace:
    """An empty directory or bucket, with functions to write to it and to read from it."""

    def __init__(
        self, url: str, *, writer: dict[str, Any] | None = None, reader: dict[str, Any] | None = None, **more: Any
    ) -> None:
        self.url = url
        self.reader = reader or writer or {}
        self.filesystem = more.get("filesystem")
        self._source, self._path = open_source(url, filesystem=self.filesystem, storage_options=writer)

    def write(self, name: str, content: bytes = b"x") -> None:
        above = f"{self._path}/{name}".rpartition("/")[0]
        if self._source.is_local:
            self._source.filesystem.create_dir(above, recursive=True)
        with self._source.filesystem.open_output_stream(f"{self._path}/{name}") as stream:
            stream.write(content)

    def make_directory(self, name: str) -> None:
        """Create the marker of a directory in an object store: an empty object whose name ends with a slash."""
        self._source.filesystem.create_dir(f"{self._path}/{name}", recursive=True)

    def remove(self, name: str) -> None:
        self._source.filesystem.delete_file(f"{self._path}/{name}")

    def discover(self, below: str = "", **more: Any) -> FoundFiles:
        path = f"{self.url}/{below}" if below else self.url
        options = {"suffixes": PARQUET, "filesystem": self.filesystem, "storage_options": self.reader, **more}
        return discover(path, **options)


def _encoded(table: pa.Table, suffix: str) -> bytes:
    sink = pa.BufferOutputStream()
    if suffix == "parquet":
        pq.write_table(table, sink, row_group_size=200)
    elif suffix == "orc":
        orc.write_table(table, sink)
    elif suffix == "csv":
        csv.write_csv(table, sink)
    else:
        with pa.ipc.new_file(sink, table.schema) as file:
            file.write_table(table, max_chunksize=200)
    return bytes(sink.getvalue())


def names_of(found: FoundFiles) -> list[str]:
    return [file.name for file in found.files]


def parquet_of(first: int) -> bytes:
    table = pa.table({"id": range(first, first + NUM_ROWS), "x": [i * 0.5 for i in range(NUM_ROWS)]})
    written = io.BytesIO()
    pq.write_table(table, written, row_group_size=NUM_ROWS_OF_GROUP, use_dictionary=False, compression="none")
    return written.getvalue()


class DataSourceContract:
    @pytest.fixture
    def place(self) -> DataPlace:
        raise NotImplementedError

    def test_a_directory_is_listed_recursively_in_order(self, place: DataPlace) -> None:
        for name in ("b.parquet", "a/z.parquet", "a/c/y.parquet", "B.parquet", "a-1.parquet", "a/_tmp/t.parquet"):
            place.write(name, name.encode())
        for name in ("_SUCCESS", "a/.hidden.parquet", "notes.txt"):
            place.write(name)
        place.make_directory("a/empty")
        expected = ["B.parquet", "a-1.parquet", "a/c/y.parquet", "a/z.parquet", "b.parquet"]
        found = place.discover()
        assert names_of(found) == names_of(place.discover("/")) == expected
        assert [file.size_bytes for file in found.files] == [len(name) for name in expected]
        assert [found.source.read(file, 0, 99).to_pybytes().decode() for file in found.files] == expected
        assert found.passed_over == {".txt": 1, "hidden or marker": 3}
        assert names_of(place.discover("a")) == ["c/y.parquet", "z.parquet"]

    def test_patterns_match(self, place: DataPlace) -> None:
        for name in ("d1/part-0.parquet", "d1/e/part-1.parquet", "d2/part-2.parquet", "d2/x.parquet", "d2/part-3.bin"):
            place.write(name)
        assert names_of(place.discover("*/part-*.parquet")) == ["d1/part-0.parquet", "d2/part-2.parquet"]
        assert names_of(place.discover("**/part-[12].parquet")) == ["d1/e/part-1.parquet", "d2/part-2.parquet"]
        assert names_of(place.discover("d2/part-?.bin")) == ["part-3.bin"]
        with pytest.raises(NoData, match="no file was found"):
            place.discover("*/part-*.orc")

    def test_lists_select_files_and_directories(self, place: DataPlace) -> None:
        for name in ("x/a.parquet", "x/b.parquet", "y/c.parquet", "z.parquet"):
            place.write(name)
        listed = [f"{place.url}/{name}" for name in ("z.parquet", "x/b.parquet", "y/")]
        found = discover(listed, suffixes=PARQUET, filesystem=place.filesystem, storage_options=place.reader)
        assert names_of(found) == ["x/b.parquet", "y/c.parquet", "z.parquet"]

    @pytest.mark.parametrize("name", HOSTILE)
    def test_hostile_names_work(self, place: DataPlace, name: str) -> None:
        place.write(name, b"abc")
        for below in ("", name):
            found = place.discover(below)
            assert names_of(found) == [name if not below else name.rpartition("/")[2]]
            assert found.source.read(found.files[0], 1, 2).to_pybytes() == b"bc"

    def test_ranges_and_tails_are_read_and_counted(self, place: DataPlace) -> None:
        content = bytes(range(256)) * 1_024
        place.write("a.parquet", content)
        found = place.discover()
        source, (file,) = found.source, found.files
        assert source.read(file, 1_000, 70_000).to_pybytes() == content[1_000:71_000]
        assert source.read_tail(file, 8).to_pybytes() == content[-8:]
        assert source.read_tail(file, 1 << 30).to_pybytes() == content
        assert source.read(file, len(content) - 3, 10).to_pybytes() == content[-3:]
        assert source.read(file, len(content) + 5, 10).to_pybytes() == b""
        assert source.counter.total == 70_000 + 8 + len(content) + 3

    def test_threads_that_read_one_file_at_once_get_their_own_bytes(self, place: DataPlace) -> None:
        content = np.arange(100_000, dtype=np.int64).tobytes()
        place.write("a.parquet", content)
        found = place.discover()
        source, (file,) = found.source, found.files

        def read(seed: int) -> None:
            rng = random.Random(seed)
            with source.open(file) as opened:
                for _ in range(NUM_READS):
                    offset = rng.randrange(len(content))
                    assert opened.read_at(64, offset) == content[offset : offset + 64]

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(read, range(4)))
        finally:
            sys.setswitchinterval(before)

    def test_missing_files_are_reported(self, place: DataPlace) -> None:
        place.write("a.parquet")
        found = place.discover()
        with pytest.raises(NoData, match=r"nope\.parquet does not exist"):
            place.discover("nope.parquet")
        place.remove("a.parquet")
        with pytest.raises(DataFileMissing, match=r"^a\.parquet does not exist"):
            found.source.open(found.files[0])
        gone = DataFile(f"{found.files[0].path}.never", "never", 1, 0)
        with pytest.raises(DataFileMissing, match=r"^never does not exist"):
            found.source.read(gone, 0, 1)

    def test_a_dataset_is_read_by_row_group_and_bytes_are_counted(self, place: DataPlace) -> None:
        for i in range(3):
            place.write(f"part={i}/f.parquet", parquet_of(i * NUM_ROWS))
        found = place.discover(suffixes=None)
        assert guess_format(found.source, found.files) == "parquet"
        assert [file.partition for file in found.files] == [(("part", str(i)),) for i in range(3)]
        source = pickle.loads(pickle.dumps(found.source))
        ids = []
        for file in found.files:
            with source.open(file) as opened, pq.ParquetFile(opened) as parquet:
                ids += [i for group in range(4) for i in parquet.read_row_group(group, ["id"])["id"].to_pylist()]
        assert ids == list(range(3 * NUM_ROWS))
        own = ByteCounter()
        with source.open_counted(found.files[1], own) as opened, pq.ParquetFile(opened, pre_buffer=False) as parquet:
            footer = own.total
            group = parquet.read_row_group(2, ["id"])
        assert group["id"].to_pylist() == list(range(NUM_ROWS + 5_000, NUM_ROWS + 7_500))
        chunk = parquet.metadata.row_group(2).column(0).total_compressed_size
        assert chunk <= own.total - footer < 2 * chunk  # only the id column of one row group
        assert source.counter.total == own.total

    @pytest.mark.parametrize("suffix", ["parquet", "orc", "csv", "arrow"])
    def test_a_loader_delivers_every_row_once_and_resumes_where_another_stopped(
        self, place: DataPlace, suffix: str
    ) -> None:
        for number in range(3):
            table = pa.table({"id": list(range(number * 700, number * 700 + 700)), "x": [0.5] * 700})
            place.write(f"day={number}/part.{suffix}", _encoded(table, suffix))

        def load(**more: Any) -> Any:
            loader, _ = StructuredDataset.create_dataloader(
                place.url,
                filesystem=place.filesystem,
                storage_options=place.reader or None,
                batch_size=100,
                num_workers=2,
                shuffle=True,
                output_format="numpy",
                cache=False,
                **more,
            )
            return loader

        first = load()
        batches = iter(first)
        seen = [number for _ in range(8) for number in next(batches)["id"].tolist()]
        state = first.state_dict()
        first.dataset.close()
        for rank in range(2):
            rest = load(rank=rank, num_ranks=2)
            rest.load_state_dict(state)
            for batch in rest:
                assert (batch["id"] // 700 == batch["day"]).all()
                seen += batch["id"].tolist()
        assert sorted(seen) == list(range(2100))

    def test_reading_writes_nothing(self, place: DataPlace) -> None:
        place.write("a/b.parquet", b"abc")
        before = place.discover()
        with pytest.raises(NoData):
            place.discover("c/")
        before.source.read(before.files[0], 0, 3)
        assert place.discover().files == before.files


class DeniedContract:
    """The contract of servers that check credentials."""

    @pytest.fixture
    def strangers(self) -> list[dict[str, Any]]:
        """Return `storage_options` without permission to read from `place`."""
        raise NotImplementedError

    def test_wrong_credentials_are_denied(self, place: DataPlace, strangers: list[dict[str, Any]]) -> None:
        place.write("a.parquet")
        (file,) = place.discover().files
        for options in strangers:
            for below in ("", "a.parquet", "*.parquet"):
                with pytest.raises(StorageDenied, match="check its permissions, or the credentials"):
                    place.discover(below, storage_options=options)
            source, _ = open_source(place.url, storage_options=options)
            with pytest.raises(StorageDenied, match=r"^a\.parquet: access denied"):
                source.open(file)
