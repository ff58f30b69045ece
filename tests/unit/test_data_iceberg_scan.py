"""The locator finds the files of a table and their file system."""

from __future__ import annotations

from typing import Any

import pyarrow.fs as pafs
import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO

from strata.data.iceberg.scan import Locator
from strata.errors import DataError, StorageError


class _Table:
    """The part of a table that the locator uses."""

    def __init__(self, io: Any) -> None:
        self.io = io

    def location(self) -> str:
        return "file:///tables/clicks"

    def name(self) -> tuple[str, str]:
        return "db", "clicks"


class _TwoPlaces(PyArrowFileIO):
    """An I/O object that opens s3 as another file system, without a server."""

    def _initialize_fs(self, scheme: str, netloc: str | None = None) -> pafs.FileSystem:
        if scheme == "s3":
            return pafs.SubTreeFileSystem(f"/{netloc}", pafs.LocalFileSystem())
        return super()._initialize_fs(scheme, netloc)


def locator(io: Any) -> Locator:
    return Locator(_Table(io))  # type: ignore[arg-type]


def test_files_are_named_relative_to_the_table() -> None:
    found = locator(PyArrowFileIO()).file("file:///tables/clicks/data/a=1/x.parquet", 7)
    assert (found.path, found.name) == ("/tables/clicks/data/a=1/x.parquet", "data/a=1/x.parquet")
    elsewhere = locator(PyArrowFileIO()).file("/other/x.parquet", 7)
    assert (elsewhere.path, elsewhere.name) == ("/other/x.parquet", "/other/x.parquet")


def test_local_files_are_local_in_every_spelling() -> None:
    source = locator(PyArrowFileIO()).source(["/other/x.parquet", "file:///tables/clicks/data/x.parquet"])
    assert source.is_local


def test_files_on_several_file_systems_are_rejected_with_an_example_of_each() -> None:
    io = _TwoPlaces()
    assert not locator(io).source(["s3://bucket/x.parquet", "s3://bucket/y.parquet"]).is_local
    for locations in (["s3://bucket/x.parquet", "/y.parquet"], ["s3://bucket/x.parquet", "s3://other/y.parquet"]):
        with pytest.raises(
            DataError, match=rf"db\.clicks has files on more than one .* {locations[0]} and {locations[1]}"
        ):
            locator(io).source(locations)


def test_an_unknown_scheme_is_rejected_with_the_cure() -> None:
    with pytest.raises(StorageError, match=r"ftp://host/x\.parquet cannot be reached: .*catalog_config"):
        locator(PyArrowFileIO()).source(["ftp://host/x.parquet"])
