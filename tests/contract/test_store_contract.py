"""Every store passes the same suite; below it, tests of what only one kind of store promises."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from azure_blob import AzureServer, azure
from s3 import S3Server, s3
from store_contract import StoreContract

from strata.storage import Store, open_store

__all__ = ["azure", "s3"]  # fixtures

SMALL_PIECES = {"piece_bytes": 5 << 20, "concurrency": 4}
_numbers = itertools.count(1)


class OpenPlace:
    """A store that `open_store` opens."""

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
        """SeaweedFS lists a directory for some seconds after its last object was deleted; S3 has no directories."""
        found = store.children(prefix)
        assert found == sorted(found)
        top = f"{prefix}/" if prefix else ""
        assert [name for name in found if name in expected or any(store.walk(top + name))] == expected

    def test_a_transfer_takes_no_second_copy_of_the_data(self, s3: S3Server) -> None:
        """256 MiB up and down may take the memory of the pieces in flight: 8 of 8 MiB."""
        program = """
        import json, mmap, sys
        from pathlib import Path
        from strata.storage import open_store
        def peak_mib():
            return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10
        store = open_store(sys.argv[1], json.loads(sys.argv[2]))
        memory = mmap.mmap(-1, 256 << 20)
        memory[:] = b"x" * len(memory)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = peak_mib()
        store.put_large("a", memoryview(memory))
        written = peak_mib()
        store.read_into("a", 0, memoryview(memory))
        print(json.dumps([written - before, peak_mib() - before]))
        """
        command = [sys.executable, "-c", textwrap.dedent(program), s3.new_url(), json.dumps(s3.options())]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
        written_mib, read_mib = json.loads(done.stdout)
        assert written_mib < 64
        assert read_mib < 192


class TestAzureStore(StoreContract):
    @pytest.fixture
    def place(self, azure: AzureServer) -> OpenPlace:
        return OpenPlace(azure.new_url(), azure.options(**SMALL_PIECES))
