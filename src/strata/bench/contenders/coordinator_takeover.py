"""From kill -9 of the leader until its standby has executed and answered a durable call.

Both use one SQLite file, whose lock ends with the leader's process; with PostgreSQL, the leader's lease is added. The
client has both addresses and finds the new leader itself, as workers do.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from strata.bench.server_processes import serving
from strata.coordinator.client import CoordinatorClient

NUM_WORKERS = 100


def takeover_s(directory: Path) -> float:
    arguments = ["-m", "strata.cli", "coordinator", "--listen", "127.0.0.1:0", "--http", "off", "--json"]
    arguments += ["--state", str(directory / "state.db")]
    with ExitStack() as stack:
        leader, pid = stack.enter_context(serving(arguments))
        standby, _ = stack.enter_context(serving([*arguments, "--standby"]))
        client = stack.enter_context(CoordinatorClient(f"{leader},{standby}"))
        for number in range(NUM_WORKERS):
            client.register_worker(f"worker-{number:03d}")
        generation = client.list_workers().generation
        start_s = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        client.register_dataset("rows", total_samples=1_000, shard_size=1)
        taken_s = time.perf_counter() - start_s
        after = client.list_workers()
        if (after.generation, len(after.workers)) != (generation, NUM_WORKERS):
            raise RuntimeError(f"the standby has {len(after.workers)} workers in generation {after.generation}")
        return taken_s


def main() -> None:
    num_rounds = 1 if "--quick" in sys.argv else 5
    taken_s = []
    for _ in range(num_rounds):
        with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as directory:
            taken_s.append(takeover_s(Path(directory)))
    print(json.dumps({"figures": {"takeover_s": sorted(taken_s)[len(taken_s) // 2]}}))


if __name__ == "__main__":
    main()
