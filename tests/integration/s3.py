"""A real S3 server for the tests: SeaweedFS (`weed`, from PyPI), on free ports of loopback.

It has one bucket, which the first upload creates. `admin` may do everything, `reader` may only read.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers import free_port

from strata.bench.weed import ADMIN, BUCKET, END, SCRIPT, WeedServer, identity

__all__ = ["ADMIN", "BUCKET", "END", "READER", "SCRIPT", "WEED", "S3Server", "s3"]

WEED = Path(sys.executable).with_name("weed")
READER = {"access_key_id": "reader", "secret_access_key": "the-readers-secret"}


class S3Server(WeedServer):
    def __init__(self, weed: Path) -> None:
        super().__init__(weed, others=[identity("reader", READER, ["Read", "List"])], free_port=free_port)
        self._numbers = itertools.count(1)

    def new_url(self) -> str:
        """Return the URL of an empty prefix in the bucket."""
        return f"s3://{BUCKET}/place-{next(self._numbers)}"

    def unfinished_uploads(self) -> list[str]:
        """Return uploads that were neither completed nor aborted: S3 charges for them but does not list them."""
        status, body = self._ask("filer", f"/buckets/{BUCKET}/.uploads/")
        found = json.loads(body or b"{}") if status == 200 else {}
        return [entry["FullPath"] for entry in found.get("Entries") or []]


@pytest.fixture(scope="session")
def s3(requires_service: Callable[..., Path]) -> Iterator[S3Server]:
    server = S3Server(requires_service(WEED, "run make setup"))
    try:
        server.start()
        yield server
    finally:
        server.close()
