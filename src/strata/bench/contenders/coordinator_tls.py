"""The load of `coordinator_strata` with TLS and a token: the cost of security."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from strata.bench.contenders.coordinator_strata import measure
from strata.bench.server_processes import CLIENT_CORE, coordinator, pin, secured


def main() -> None:
    quick = "--quick" in sys.argv
    num_calls, seconds = (10_000, 0.5) if quick else (200_000, 3.0)
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as directory:
        flags, security = secured(Path(directory))
        with coordinator(Path(directory), *flags) as (address, pid):
            pin(CLIENT_CORE)
            found = asyncio.run(measure(address, pid, num_calls=num_calls, seconds=seconds, security=security))
    kept = ("requests_per_s", "unary_requests_per_s")
    print(json.dumps({"figures": {f"tls_{key}": found[key] for key in kept}}))


if __name__ == "__main__":
    main()
