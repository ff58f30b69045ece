"""Google's object storage for the tests: gcp-storage-emulator (PyPI), in memory, on a free port of loopback.

It has no access control: every caller may do everything.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3 import END, SCRIPT
from servers import DEADLINE_S, free_port, until

EMULATOR = Path(sys.executable).with_name("gcp-storage-emulator")
BUCKET = "datasets"


class GcsServer:
    def __init__(self, emulator: Path) -> None:
        self._emulator = emulator
        self._directory = Path(tempfile.mkdtemp(prefix="strata-gcs-"))
        self._numbers = itertools.count(1)
        self._keeper: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        flags = ["--host", "127.0.0.1", "--port", str(self.port), "--in-memory", "--default-bucket", BUCKET]
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", SCRIPT, "", str(self._emulator), "start", "--quiet", *flags],
            cwd=self._directory,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            until(self._has_bucket, "the emulator of Google's storage has its bucket")
        except AssertionError as error:
            error.add_note((self._directory / "log").read_text()[-5_000:])
            raise

    def close(self) -> None:
        if self._keeper is not None:
            with self._keeper as keeper:
                keeper.communicate(END, timeout=DEADLINE_S)
        shutil.rmtree(self._directory, ignore_errors=True)

    def new_url(self) -> str:
        """Return the URL of an empty prefix in the bucket."""
        return f"gs://{BUCKET}/place-{next(self._numbers)}"

    def options(self, **more: Any) -> dict[str, Any]:
        return {"base_url": self.endpoint, "allow_http": True, "skip_signature": True, **more}

    def _has_bucket(self) -> bool:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=1)) as connection:
            try:
                connection.request("GET", f"/storage/v1/b/{BUCKET}")
                return connection.getresponse().status == http.client.OK
            except (OSError, http.client.HTTPException):
                return False


@pytest.fixture(scope="session")
def gcs(requires_service: Callable[..., Path]) -> Iterator[GcsServer]:
    server = GcsServer(requires_service(EMULATOR, "run make setup"))
    try:
        server.start()
        yield server
    finally:
        server.close()
