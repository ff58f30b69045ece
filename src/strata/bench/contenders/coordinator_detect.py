"""Time until a failure is detected with the default lease: of a stopped and of a killed process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from strata.bench.server_processes import coordinator
from strata.coordinator.client import CoordinatorClient

WORKER = """
import sys
from strata import CoordinatorClient
client = CoordinatorClient(sys.argv[1]); client.connect()
client.register_worker(sys.argv[2])
print("ready", flush=True)
sys.stdin.read()
"""


def detect_s(client: CoordinatorClient, address: str, name: str, how: signal.Signals) -> float:
    """Return the time from the signal until other workers are notified."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, address, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        watcher = client.register_worker(f"watcher-of-{name}")
        before = watcher.latest_generation
        start_s = time.perf_counter()
        process.send_signal(how)
        while watcher.latest_generation == before:
            if not watcher.wait_changed(30.0):
                raise RuntimeError(f"the failure of {name} was not detected within 30 s")
        taken_s = time.perf_counter() - start_s
        watcher.deregister()
        return taken_s
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as directory,
        coordinator(Path(directory)) as (address, _),
        CoordinatorClient(address) as client,
    ):
        figures = {
            "detect_closed_s": detect_s(client, address, "killed", signal.SIGKILL),
            "detect_silent_s": detect_s(client, address, "stopped", signal.SIGSTOP),
        }
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
