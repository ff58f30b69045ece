"""Every store passes the same suite; below it, what only one kind of store can promise."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from azure import AzureServer, azure
from s3 import S3Server, s3
from store_contract import StoreContract

from strata.storage import Store, open_store

__all__ = ["azure", "s3"]  # fixtures

SMALL_PIECES = {"piece_bytes": 5 << 20, "concurrency": 4}
_numbers = itertools.count(1)


class OpenPlace:
    """Where `open_store` leads."""

    def __init__(self, url: str, options: dict[str, object] | None = None) -> None:
        self._top = url
        self._options = options
        self.clear()

    def open(self) -> Store:
        return open_store(self.url, self._options)

    def clear(self) -> None:
        self.url = f"{self._top}-{next(_numbers)}"


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def place(self) -> OpenPlace:
        return OpenPlace("memory://contract")


class TestLocalStore(StoreContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> OpenPlace:
        return OpenPlace(str(tmp_path / "checkpoints"))


class TestS3Store(StoreContract):
    @pytest.fixture
    def place(self, s3: S3Server) -> OpenPlace:
        return OpenPlace(s3.new_url(), s3.options(**SMALL_PIECES))

    def assert_children(self, store: Store, expected: list[str], prefix: str = "") -> None:
        """SeaweedFS keeps a directory for some seconds after its last object has gone; S3 has none."""
        found = store.children(prefix)
        assert found == sorted(found)
        top = f"{prefix}/" if prefix else ""
        assert [name for name in found if name in expected or any(store.walk(top + name))] == expected


class TestAzureStore(StoreContract):
    @pytest.fixture
    def place(self, azure: AzureServer) -> OpenPlace:
        return OpenPlace(azure.new_url(), azure.options(**SMALL_PIECES))
