"""Prefetch of bytes from remote storage."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.fs as pafs
import pyarrow.orc as paorc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.data.formats.parquet.footer import TAIL_BYTES
from strata.data.runtime.prefetch import Fetcher
from strata.data.source.ranges import Range, coalesce, split_ranges
from strata.data.structured import StructuredDataset
from strata.errors import DataFileChanged, DataFileMissing, StrataError

DEADLINE_S = 30.0
ranges = st.lists(st.builds(Range, st.integers(0, 300), st.integers(0, 40)), max_size=12)


def covered(of: list[Range]) -> set[int]:
    return {byte for each in of for byte in range(each.offset, each.end)}


@given(asked=ranges, hole=st.integers(0, 20))
def test_coalesced_ranges_cover_the_requested_bytes_and_small_gaps(asked: list[Range], hole: int) -> None:
    joined = coalesce(asked, gap_bytes=hole)
    assert covered(asked) <= covered(joined)
    assert all(low.end + hole < high.offset for low, high in itertools.pairwise(joined))
    extra = sorted(covered(joined) - covered(asked))
    runs = [sum(1 for _ in run) for run in _runs(extra)]
    assert all(length <= hole for length in runs)


def _runs(numbers: list[int]) -> Iterator[list[int]]:
    run: list[int] = []
    for number in numbers:
        if run and number != run[-1] + 1:
            yield run
            run = []
        run.append(number)
    if run:
        yield run


@given(asked=ranges, size=st.integers(1, 17))
def test_parts_are_small_and_cover_the_same_bytes_once(asked: list[Range], size: int) -> None:
    joined = coalesce(asked)
    cut = split_ranges(joined, part_bytes=size)
    assert all(0 < part.num_bytes <= size for part in cut)
    assert sum(part.num_bytes for part in cut) == sum(each.num_bytes for each in joined)
    assert covered(cut) == covered(joined)


class Requests(pafs.FileSystemHandler):  # type: ignore[misc]
    """Counts the requests to a directory, by file."""

    def __init__(self) -> None:
        self._inner = pafs.LocalFileSystem()
        self.lock = threading.Lock()
        self.reads: list[tuple[str, int, int]] = []
        self.answers = threading.Event()
        """Reads block until it is set."""
        self.answers.set()
        self.is_stuck = threading.Event()
        """Set once a read blocks."""

    def stick(self) -> None:
        if not self.answers.is_set():
            self.is_stuck.set()
            self.answers.wait(DEADLINE_S)

    def get_type_name(self) -> str:
        return "counted"

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        return self._inner.get_file_info(paths)  # type: ignore[no-any-return]

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        return self._inner.get_file_info(selector)  # type: ignore[no-any-return]

    def open_input_file(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(_Noted(self._inner.open_input_file(path), path, self), mode="r")

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self._inner.open_input_stream(path)

    def normalize_path(self, path: str) -> str:
        return path

    def create_dir(self, path: str, recursive: bool) -> None:
        raise NotImplementedError

    delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = create_dir
    move = copy_file = open_output_stream = open_append_stream = create_dir


class _Noted:
    closed = False

    def __init__(self, inner: pa.NativeFile, path: str, requests: Requests) -> None:
        self._inner, self._path, self._requests = inner, path, requests

    def read(self, num_bytes: int = -1) -> bytes:
        self._requests.stick()
        found: bytes = self._inner.read(None if num_bytes < 0 else num_bytes)
        with self._requests.lock:
            self._requests.reads.append((self._path, self._inner.tell() - len(found), len(found)))
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture
def requests() -> Requests:
    return Requests()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for number in range(3):
        columns = {f"c{i}": pa.array(range(number * 1000, number * 1000 + 900)) for i in range(6)}
        pq.write_table(pa.table(columns), tmp_path / f"{number}.parquet", row_group_size=300)
    return tmp_path


def far_away(data: Path, requests: Requests, **more: Any) -> tuple[Any, Any]:
    return StructuredDataset.create_dataloader(
        str(data), filesystem=pafs.PyFileSystem(requests), cache=False, batch_size=64, num_workers=2, **more
    )


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_remote_dataset_is_read_completely_in_few_requests(data: Path, requests: Requests, shuffle: bool) -> None:
    loader, dataset = far_away(data, requests, shuffle=shuffle, lanes=1)
    assert not dataset._recipe.source.is_local
    planned = len(requests.reads)
    ids = [number for batch in loader for number in batch["c0"].tolist()]
    assert sorted(ids) == sorted(base + i for base in (0, 1000, 2000) for i in range(900))
    # A row group is one request, whatever the number of its columns. Each worker and the fetcher open every file.
    assert len(requests.reads) - planned <= 9 + 3 * 3
    assert dataset.get_metrics().total.read_s > 0


def test_only_the_bytes_of_selected_columns_are_requested(tmp_path: Path, requests: Requests) -> None:
    noise = np.random.default_rng(7).integers(0, 1 << 60, (3, 60_000))  # a column chunk is larger than a hole
    pq.write_table(pa.table({f"c{i}": column for i, column in enumerate(noise)}), tmp_path / "wide.parquet")
    loader, dataset = far_away(tmp_path, requests, columns=["c2", "c0"])
    planned = sum(size for _, _, size in requests.reads)
    assert sum(len(batch["c2"]) for batch in loader) == 60_000
    asked = sum(size for _, _, size in requests.reads) - planned
    num_tails = 3  # by each worker and by the fetcher
    assert asked <= int(dataset.plan.unit_bytes.sum()) + num_tails * TAIL_BYTES
    assert asked < 0.9 * (tmp_path / "wide.parquet").stat().st_size


def write_units(suffix: str, path: Path, table: pa.Table, rows_of_unit: int) -> None:
    units = [table.slice(first, rows_of_unit).combine_chunks() for first in range(0, table.num_rows, rows_of_unit)]
    if suffix == "parquet":
        pq.write_table(table, path, row_group_size=rows_of_unit)
    elif suffix == "orc":
        with paorc.ORCWriter(path, stripe_size=1, batch_size=rows_of_unit) as writer:
            for unit in units:
                writer.write(unit)
    else:
        make = pa.ipc.new_file if suffix == "arrow" else pa.ipc.new_stream
        with make(path, table.schema) as batches:
            for unit in units:
                batches.write_table(unit)


@pytest.mark.parametrize("suffix", ["parquet", "orc", "arrow", "stream"])
def test_large_row_groups_are_requested_by_column_in_few_requests(
    tmp_path: Path, requests: Requests, suffix: str
) -> None:
    num_units, num_rows = 4, 60_000
    noise = np.random.default_rng(7).integers(0, 1 << 60, (8, num_units * num_rows))
    table = pa.table({f"c{i}": column for i, column in enumerate(noise)})  # 480 kB per column and unit
    path = tmp_path / f"part.{suffix}"
    write_units(suffix, path, table, num_rows)
    loader, dataset = far_away(
        path, requests, format="arrow" if suffix == "stream" else suffix, columns=["c7", "c1"], output_format="numpy"
    )
    assert dataset.plan.num_units == num_units
    num_planned = len(requests.reads)
    found = [batch["c7"] for batch in loader]
    assert (np.concatenate(found) == noise[7]).all()
    asked = requests.reads[num_planned:]
    # Per unit: two ranges and their locations, for the fetcher and for the decoder. Per file: three for each of them.
    assert len(asked) <= 4 * num_units + 3 * 3
    assert sum(size for _, _, size in asked) < 0.4 * path.stat().st_size


def test_text_is_fetched_by_byte_ranges(tmp_path: Path, requests: Requests) -> None:
    table = pa.table({"a": list(range(5000)), "b": [f"row {i}" for i in range(5000)]})
    pyarrow.csv.write_csv(table, tmp_path / "t.csv")
    loader, dataset = far_away(tmp_path, requests, split_bytes="16KiB")
    assert dataset.plan.num_units > 3
    assert [number for batch in loader for number in batch["a"].tolist()] == list(range(5000))


def test_row_groups_beyond_the_limit_are_not_prefetched(data: Path, requests: Requests) -> None:
    _, dataset = far_away(data, requests)
    size = int(dataset.plan.unit_bytes.max())
    fetcher = Fetcher(dataset._recipe, prefetch_bytes=size * 2)
    try:
        for number in range(5):
            fetcher.ahead(number)
        assert sorted(fetcher._row_groups) == [0, 1]
        fetcher.wait(4)  # needed now, so it is fetched despite the limit
        fetcher.release(0)
        fetcher.release(4)
        fetcher.ahead(3)
        assert sorted(fetcher._row_groups) == [1, 3]
    finally:
        fetcher.close()


def test_an_error_about_a_missing_file_names_it(data: Path, requests: Requests) -> None:
    loader, _ = far_away(data, requests)
    (data / "1.parquet").unlink()
    with pytest.raises(DataFileMissing, match=r"1\.parquet"):
        list(loader)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("num_rows", [600, 1500])
def test_a_file_rewritten_since_planning_is_not_delivered(
    tmp_path: Path, requests: Requests, suffix: str, num_rows: int
) -> None:
    def write(first: int, last: int) -> None:
        table = pa.table({"c0": range(first, last)})
        if suffix == "csv":
            pyarrow.csv.write_csv(table, tmp_path / "t.csv")
        else:
            pq.write_table(table, tmp_path / "t.parquet")

    write(100_000, 101_000)
    loader, _ = far_away(tmp_path, requests)
    write(500_000, 500_000 + num_rows)
    with pytest.raises(DataFileChanged, match=rf"t\.{suffix} "):
        list(loader)


def test_leaving_the_loop_ends_all_fetching_threads(data: Path, requests: Requests) -> None:
    loader, _ = far_away(data, requests)
    for _ in loader:
        break
    loader.dataset.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("strata-data")]


@pytest.mark.parametrize("num_batches", [0, 1])
def test_a_store_that_does_not_respond_does_not_block_leaving_the_loop(
    data: Path, requests: Requests, num_batches: int
) -> None:
    loader, dataset = far_away(data, requests, prefetch_bytes=1)

    def iterate() -> None:
        with contextlib.suppress(StrataError):  # closed while it was iterated over
            for number, _ in enumerate(loader):
                if number == num_batches:
                    requests.answers.clear()

    if not num_batches:
        requests.answers.clear()
    taking = threading.Thread(target=iterate, daemon=True)
    taking.start()
    try:
        assert requests.is_stuck.wait(DEADLINE_S)
        began_s = time.monotonic()
        dataset.close()
        assert time.monotonic() - began_s < 2
        taking.join(2)
        assert not taking.is_alive()
        assert dataset.get_metrics().total.errors == 0, "a stopped fetch is not a failure"
    finally:
        requests.answers.set()


STUCK = """
import sys, threading
sys.path.insert(0, {tests!r})
from test_data_prefetch import Path, Requests, far_away

requests = Requests()
loader, _ = far_away(Path({data!r}), requests)
requests.answers.clear()
batches = iter(loader)
assert requests.is_stuck.wait(30)
print("stuck", flush=True)
"""


def test_a_store_that_does_not_respond_does_not_block_interpreter_exit(data: Path) -> None:
    script = STUCK.format(tests=str(Path(__file__).parent), data=str(data))
    began_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "stuck\n"), done.stderr
    assert time.monotonic() - began_s < 0.8 * DEADLINE_S
