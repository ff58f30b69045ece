"""Every kind of source passes the same contract."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from azure_blob import AzureServer, azure
from data_source_contract import DataPlace, DataSourceContract, DeniedContract
from gcs import GcsServer, gcs
from s3 import READER, S3Server, s3

from strata.errors import NoData

__all__ = ["azure", "gcs", "s3"]  # fixtures

_numbers = itertools.count(1)


class TestLocal(DataSourceContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> DataPlace:
        return DataPlace(str(tmp_path / "data"))


class TestFsspecLocal(DataSourceContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> DataPlace:
        return DataPlace(str(tmp_path / "data"), filesystem=fsspec.filesystem("file"))


class TestFsspecMemory(DataSourceContract):
    @pytest.fixture
    def place(self) -> Iterator[DataPlace]:
        place = DataPlace(f"memory://contract-{next(_numbers)}")
        yield place
        fsspec.filesystem("memory").store.clear()


class TestS3(DataSourceContract, DeniedContract):
    @pytest.fixture
    def place(self, s3: S3Server) -> DataPlace:
        """Return credentials that allow only reading."""
        return DataPlace(s3.new_url(), writer=s3.options(), reader=s3.options(**READER))

    @pytest.fixture
    def strangers(self, s3: S3Server) -> list[dict[str, Any]]:
        anonymous = {"access_key_id": None, "secret_access_key": None, "anonymous": True}
        return [s3.options(secret_access_key="wrong"), s3.options(access_key_id="who"), s3.options(**anonymous)]

    def test_a_missing_bucket_is_reported(self, s3: S3Server) -> None:
        for path in ("s3://no-such-bucket", "s3://no-such-bucket/x/", "s3://no-such-bucket/*.parquet"):
            with pytest.raises(NoData, match="that the bucket exists"):
                DataPlace(path, writer=s3.options()).discover()


class TestAzure(DataSourceContract, DeniedContract):
    @pytest.fixture
    def place(self, azure: AzureServer) -> DataPlace:
        return DataPlace(azure.new_url(), writer=azure.options())

    @pytest.fixture
    def strangers(self, azure: AzureServer) -> list[dict[str, Any]]:
        return [azure.options(account_key="QUJDRA==")]


class TestGcs(DataSourceContract):
    @pytest.fixture
    def place(self, gcs: GcsServer) -> DataPlace:
        return DataPlace(gcs.new_url(), writer=gcs.options())

    def test_a_missing_bucket_is_reported(self, gcs: GcsServer) -> None:
        with pytest.raises(NoData, match="that the bucket exists"):
            DataPlace("gs://no-such-bucket/x", writer=gcs.options()).discover()
