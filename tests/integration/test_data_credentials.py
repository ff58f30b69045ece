"""Credentials expire during an epoch: the client library renews them, and reading continues.

The store is a real S3 server behind a proxy that knows which key is valid until when, as S3 does. Keys come from a
small server on loopback, as they do in a container. The loaders are in a process of their own, with its environment.
"""

from __future__ import annotations

import collections
import datetime as dt
import http.server
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from s3 import ADMIN, READER, S3Server, s3
from s3_proxy import Fault, FaultyProxy, Request
from servers import DEADLINE_S, HERE

__all__ = ["s3"]  # a fixture

NUM_FILES = 16
ROWS_EACH = 50
FIRST, SECOND = READER, ADMIN
"""Keys that the server accepts. The first is issued until the test changes it."""
VALID_S = 3
"""The lifetime of a key. The client requests a new one with every request in its last five seconds."""


class KeyServer:
    """Issues keys as the agent of a container does (`AWS_CONTAINER_CREDENTIALS_FULL_URI`)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.key: Mapping[str, str] | None = FIRST
        """The key to issue; None issues no more."""
        self.valid_until_s: dict[str, float] = {}
        """The expiry of each key, in terms of `time.time`."""
        self.are_over = False
        """Whether all keys are expired now."""
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = server._hand_out()
                self.send_response(200 if body else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/credentials"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def renew(self, key: Mapping[str, str] | None) -> None:
        with self._lock:
            self.key = key

    def is_valid(self, key: str) -> bool:
        return time.time() < self.valid_until_s.get(key, 0.0) and not self.are_over

    def _hand_out(self) -> bytes:
        with self._lock:
            if self.key is None:
                return b""
            ends_s = math.ceil(time.time()) + VALID_S
            self.valid_until_s[self.key["access_key_id"]] = ends_s
            response = {
                "AccessKeyId": self.key["access_key_id"],
                "SecretAccessKey": self.key["secret_access_key"],
                "Token": "",
                "Expiration": dt.datetime.fromtimestamp(ends_s, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
        return json.dumps(response).encode()


class Gate(FaultyProxy):
    """Passes requests with a valid key, and counts them."""

    def __init__(self, target_port: int, keys: KeyServer) -> None:
        super().__init__(target_port)
        self._keys = keys
        self.num_served: collections.Counter[str] = collections.Counter()
        self.num_refused: collections.Counter[str] = collections.Counter()

    def _take(self, request: Request) -> Fault | None:
        found = re.search(rb"Credential=([^/]+)/", request.head)
        key = found[1].decode() if found else "nobody"
        is_valid = self._keys.is_valid(key)
        with self._lock:
            (self.num_served if is_valid else self.num_refused)[key] += 1
        return None if is_valid else Fault(status=403)


class Child:
    """`read_in_two_halves` of `data_children.py`, which waits for a line before it continues."""

    def __init__(self, url: str, environment: Mapping[str, str]) -> None:
        script = [sys.executable, str(HERE / "data_children.py"), "read_in_two_halves", url, str(NUM_FILES * ROWS_EACH)]
        self._temporary = tempfile.TemporaryDirectory(prefix="keys-")  # multiprocessing leaves files in it
        variables = {**environment, "TMPDIR": self._temporary.name}
        self._process = subprocess.Popen(
            script, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._watchdog = threading.Timer(2 * DEADLINE_S, self._process.kill)
        self._watchdog.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.cancel()
        self._process.kill()
        self._process.communicate()
        self._temporary.cleanup()

    def next_report(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"it exited with {self._process.wait()}"
        return json.loads(line)

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()


@pytest.fixture(scope="module")
def url(s3: S3Server) -> str:
    url = s3.new_url()
    writer = pafs.S3FileSystem(
        endpoint_override=s3.endpoint,
        region="us-east-1",
        access_key=ADMIN["access_key_id"],
        secret_key=ADMIN["secret_access_key"],
    )
    for number in range(NUM_FILES):
        first = number * ROWS_EACH
        table = pa.table({"id": range(first, first + ROWS_EACH)})
        pq.write_table(table, f"{url.removeprefix('s3://')}/{number:02d}.parquet", filesystem=writer)
    return url


@contextmanager
def half_read(s3: S3Server, url: str, home: Path) -> Iterator[tuple[KeyServer, Gate, Child, dict[str, list[int]]]]:
    """Start a child that has read half an epoch with the first key, and return its rows by type of workers."""
    with KeyServer() as keys, Gate(s3.port, keys) as gate:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | {
            "HOME": str(home),
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": keys.url,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ENDPOINT_URL": gate.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
        }
        with Child(url, environment) as child:
            assert child.next_report() == {"planned": NUM_FILES * ROWS_EACH}
            num_for_plans = gate.num_served[FIRST["access_key_id"]]
            child.go_on()
            ids = child.next_report()["ids"]
            assert gate.num_served.keys() == {FIRST["access_key_id"]}
            assert gate.num_served[FIRST["access_key_id"]] > num_for_plans  # it was also used to read rows
            yield keys, gate, child, ids


@pytest.mark.slow
def test_credentials_that_expire_during_an_epoch_are_renewed_and_every_row_comes_once(
    s3: S3Server, url: str, tmp_path: Path
) -> None:
    with half_read(s3, url, tmp_path) as (keys, gate, child, first_half):
        keys.renew(SECOND)
        over_s = keys.valid_until_s[FIRST["access_key_id"]]
        while (left_s := over_s - time.time()) > 0:
            time.sleep(left_s)  # the gate and the client depend on real time
        child.go_on()
        rest = child.next_report()
    assert rest["errors"] == {}
    for worker_type in ("thread", "process"):
        assert sorted(first_half[worker_type] + rest["ids"][worker_type]) == list(range(NUM_FILES * ROWS_EACH))
    assert gate.num_served[SECOND["access_key_id"]] > 0
    assert not gate.num_refused


@pytest.mark.parametrize("is_asked", [True, False], ids=["the old key", "no key"])
def test_credentials_that_are_not_renewed_are_reported(s3: S3Server, url: str, tmp_path: Path, is_asked: bool) -> None:
    with half_read(s3, url, tmp_path) as (keys, gate, child, _):
        keys.renew(FIRST if is_asked else None)
        keys.are_over = True
        child.go_on()
        rest = child.next_report()
    assert rest["errors"].keys() == {"thread", "process"}
    for message in rest["errors"].values():
        assert re.match(r"StorageDenied: \d\d\.parquet: access denied: ", message)
        assert message.endswith("check its permissions, or the credentials")
    assert gate.num_refused
