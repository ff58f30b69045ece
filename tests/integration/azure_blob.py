"""Azure's blob storage for the tests: Microsoft's emulator `azurite` (npm), on a free port of loopback."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import hashlib
import hmac
import http.client
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3 import END, SCRIPT
from servers import DEADLINE_S, HERE, free_port, until

AZURITE = HERE / "node" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key of the emulator's only account, from Microsoft's documentation."""
CONTAINER = "checkpoints"
VERSION = "2021-12-02"


class AzureServer:
    def __init__(self, node: Path) -> None:
        self._node = node
        self._directory = Path(tempfile.mkdtemp(prefix="strata-azurite-"))
        self._numbers = itertools.count(1)
        self._keeper: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    def start(self) -> None:
        flags = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--location", str(self._directory / "data")]
        flags += ["--silent", "--skipApiVersionCheck", "--disableTelemetry"]
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", SCRIPT, "", str(self._node), str(AZURITE), *flags],
            cwd=self._directory,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            until(self._makes_container, "azurite makes a container")
        except AssertionError as error:
            error.add_note((self._directory / "log").read_text()[-5_000:])
            raise

    def close(self) -> None:
        if self._keeper is not None:
            with self._keeper as keeper:
                keeper.communicate(END, timeout=DEADLINE_S)
        shutil.rmtree(self._directory, ignore_errors=True)

    def new_url(self) -> str:
        """Return the URL of an empty prefix in the container."""
        return f"az://{CONTAINER}/place-{next(self._numbers)}"

    def options(self, **more: Any) -> dict[str, Any]:
        endpoint = f"http://127.0.0.1:{self.port}/{ACCOUNT}"
        return {"account_name": ACCOUNT, "account_key": KEY, "endpoint": endpoint, "allow_http": True, **more}

    def _makes_container(self) -> bool:
        """Create the container with a hand-signed request, because obstore cannot; return whether it exists."""
        now = dt.datetime.now(dt.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        path = f"/{ACCOUNT}/{CONTAINER}"
        dated = f"x-ms-date:{now}\nx-ms-version:{VERSION}\n"
        signed = "PUT" + "\n" * 12 + dated + f"/{ACCOUNT}{path}\nrestype:container"
        mac = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256)
        headers = {
            "x-ms-date": now,
            "x-ms-version": VERSION,
            "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(mac.digest()).decode()}",
            "Content-Length": "0",
        }
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=1)) as connection:
            try:
                connection.request("PUT", f"{path}?restype=container", headers=headers)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException):
                return False
            body = response.read()
        assert response.status in (201, 409), body  # 409: created by an earlier attempt whose answer was late
        return True


@pytest.fixture(scope="session")
def azure(requires_service: Callable[..., Path]) -> Iterator[AzureServer]:
    requires_service(AZURITE)
    server = AzureServer(requires_service("node"))
    try:
        server.start()
        yield server
    finally:
        server.close()
