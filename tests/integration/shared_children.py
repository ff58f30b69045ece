"""A process that reads a directory through the node cache, and prints what it delivered and counted as JSON.

    shared_children.py DIRECTORY OPTIONS [stop | die]

With `stop` or `die` it decodes one row group, then stops or dies in the middle of the second one.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import threading
from typing import Any

import pyarrow as pa

from strata.data import StructuredDataset, loader
from strata.data.runtime.decoder import ThreadDecoder
from strata.data.shared import cache, eviction


def end_in_the_second(sent: signal.Signals) -> None:
    """Send this process a signal in the middle of its second decode."""
    read, lock, numbers = ThreadDecoder._read, threading.Lock(), []

    def ending(self: ThreadDecoder, number: int) -> tuple[pa.Table, int]:
        with lock:
            numbers.append(number)
            if len(numbers) == 2:
                print("ending", flush=True)
                signal.pthread_kill(threading.get_ident(), sent)  # takes effect before this thread goes on
        return read(self, number)

    ThreadDecoder._read = ending  # type: ignore[method-assign]


def main(directory: str, options: dict[str, Any], how: str) -> None:
    loader.has_torch = lambda: False  # its import would take most of the time
    cache.LINGER_S = options.pop("linger_s", 0.1)
    eviction.MIN_WAIT_S = options.pop("wait_s", 25.0)  # a process that is kept from running has not been stopped
    num_epochs = options.pop("num_epochs", 1)
    if how:
        end_in_the_second(signal.SIGSTOP if how == "stop" else signal.SIGKILL)
    batches, dataset = StructuredDataset.create_dataloader(
        directory, **{"batch_size": 500, "num_workers": 1, "output_format": "numpy"} | options
    )
    hashed, num_rows = hashlib.sha256(), 0
    for _ in range(num_epochs):
        for batch in batches:
            for name, values in batch.items():
                hashed.update(name.encode() + values.tobytes())
                num_rows = num_rows + (len(values) if name == min(batch) else 0)
    total = dataset.get_metrics().total
    counts = {
        name: getattr(total, name) for name in ("units", "bytes_read", "cached_bytes", "shared_units", "unshared_units")
    }
    print(json.dumps({"hash": hashed.hexdigest(), "rows": num_rows, **counts}), flush=True)
    sys.stdin.read()  # stay a member until the test closes it


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
