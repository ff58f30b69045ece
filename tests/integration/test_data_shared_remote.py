"""Remote files: bytes that are fetched once for all processes of a machine, and kept on a disk for the next run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from documents import ROOT, blocks
from s3 import S3Server, s3
from shared_readers import Reader, children, deliver, limit, same

from strata.data import StructuredDataset
from strata.data.runtime import prefetch
from strata.data.source.filesystem import open_source
from strata.data.source.ranges import Range
from strata.data.source.source import DataFile
from strata.errors import InvalidArgument

__all__ = ["children", "limit", "s3"]  # fixtures

NUM_ROW_GROUPS = 8
ROWS = 20_000


class Place:
    """A prefix in the bucket."""

    def __init__(self, server: S3Server) -> None:
        self.url = server.new_url()
        self.options = server.options()

    def write(self, seed: int) -> None:
        """Write a file whose size and footer do not depend on the seed."""
        source, path = open_source(self.url, storage_options=self.options)
        values = np.random.default_rng(seed).integers(0, 1 << 60, NUM_ROW_GROUPS * ROWS)
        files: pafs.FileSystem = source.filesystem
        with files.open_output_stream(f"{path}/a.parquet") as out:
            pq.write_table(
                pa.table({"x": values}),
                out,
                row_group_size=ROWS,
                write_statistics=False,
                use_dictionary=False,
                compression="none",
            )


@pytest.fixture
def place(s3: S3Server) -> Place:
    place = Place(s3)
    place.write(0)
    return place


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every request of a loader."""
    requests: list[int] = []
    read = prefetch._read

    def counted(opened: pa.NativeFile, file: DataFile, part: Range) -> bytes:
        requests.append(part.num_bytes)
        return read(opened, file, part)

    monkeypatch.setattr(prefetch, "_read", counted)
    return requests


def test_the_second_run_fetches_nothing(place: Place, tmp_path: Path, fetched: list[int]) -> None:
    options: dict[str, Any] = {"storage_options": place.options, "shuffle": True}
    plain, _ = deliver(place.url, **options)
    first, made = deliver(place.url, cache_dir=tmp_path / "cache", **options)
    fetched.clear()
    second, taken = deliver(place.url, cache_dir=tmp_path / "cache", **options)
    assert same(plain, first)
    assert same(plain, second)
    assert fetched == []
    assert made.cached_bytes == 0
    assert taken.cached_bytes >= 0.99 * taken.bytes_read > 0
    assert list((tmp_path / "cache").glob("*/*.entry")), "the bytes stay"


def test_a_replaced_object_is_fetched_although_its_size_and_footer_are_the_same(place: Place, tmp_path: Path) -> None:
    options: dict[str, Any] = {"storage_options": place.options, "cache_dir": tmp_path, "cache": False}
    before, _ = deliver(place.url, **options)
    place.write(1)
    after, taken = deliver(place.url, **options)
    assert not same(before, after)
    assert taken.cached_bytes == 0
    assert same(after, deliver(place.url, storage_options=place.options)[0])


def test_damaged_bytes_on_the_disk_are_fetched_again(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"storage_options": place.options, "cache_dir": tmp_path}
    before, _ = deliver(place.url, **options)
    [largest, *_] = sorted(tmp_path.glob("*/*.entry"), key=lambda path: -path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[1_000] ^= 1
    largest.write_bytes(data)
    after, _ = deliver(place.url, **options)
    assert same(before, after)
    assert "fetching them again" in caplog.text
    assert largest.read_bytes() != data, "and kept again"


def test_the_limit_of_the_disk_holds(place: Place, tmp_path: Path) -> None:
    most = 1 << 20  # the file has 1.3 MB
    plain, _ = deliver(place.url, storage_options=place.options)
    for _ in range(2):
        found, _ = deliver(place.url, storage_options=place.options, cache_dir=tmp_path, cache_bytes=most)
        assert same(plain, found)
    kept = [path.stat().st_size for path in tmp_path.glob("*/*.entry")]
    assert 0 < sum(kept) <= most


def test_processes_that_start_together_fetch_and_decode_once(children: list[Any], place: Place, limit: int) -> None:
    expected = Reader(children, place.url, storage_options=place.options).result()
    readers = [
        Reader(children, place.url, storage_options=place.options, shared_bytes=limit, rank=0, num_ranks=1)
        for _ in range(3)
    ]
    found = [reader.result() for reader in readers]
    assert {each["hash"] for each in found} == {expected["hash"]}
    assert sum(each["units"] for each in found) == NUM_ROW_GROUPS
    requested = sum(each["bytes_read"] - each["cached_bytes"] for each in found)
    assert requested <= 1.05 * expected["bytes_read"]


def test_the_example_of_the_page_runs(place: Place, tmp_path: Path, limit: int) -> None:
    [block] = [each for each in blocks(ROOT / "docs" / "data-sharing.md") if each.info == "python no-run"]
    text = block.text.replace("s3://bucket/clicks/", place.url).replace("/local/nvme/strata", str(tmp_path))
    text = text.replace("500GiB", "1GiB").replace("32GiB", str(limit)).replace("cache_dir=", "**options, cache_dir=")
    scope = {"StructuredDataset": StructuredDataset, "options": {"storage_options": place.options}}
    exec(text, scope)
    loader: Any = scope["loader"]
    assert sum(len(batch["x"]) for batch in loader) == NUM_ROW_GROUPS * ROWS
    assert list(tmp_path.glob("*/*.entry"))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"cache_dir": "s3://bucket/cache"}, "cache_dir"),
        ({"cache_dir": 3}, "cache_dir"),
        ({"cache_dir": "cache", "worker_type": "process"}, "worker_type"),
        ({"cache_bytes": "1 KiB"}, "cache_bytes"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        StructuredDataset.create_dataloader("nowhere", **options)
