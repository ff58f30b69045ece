"""The same barrier on torch's TCPStore: 100 clients with a connection each, the last to come says go. Nothing durable.

Runs in the peers' environment, so it imports nothing of ours.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import multiprocessing
import multiprocessing.synchronize
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

NUM_WORKERS = 100
HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=60)


def pin(core: int) -> None:
    if len(os.sched_getaffinity(0)) > 1:
        os.sched_setaffinity(0, {core})


def _tcp_store() -> Any:
    return importlib.import_module("torch.distributed").TCPStore


def serve(port: multiprocessing.SimpleQueue[int], leave: multiprocessing.synchronize.Event) -> None:
    pin(0)
    store = _tcp_store()(HOST, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    port.put(store.port)
    leave.wait(240)


def measure(port: int, num_rounds: int) -> list[float]:
    tcp_store = _tcp_store()
    stores = [
        tcp_store(HOST, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT) for _ in range(NUM_WORKERS)
    ]
    arrived_s = [[0.0] * NUM_WORKERS for _ in range(num_rounds + 5)]
    released_s = [[0.0] * NUM_WORKERS for _ in range(num_rounds + 5)]

    def member(rank: int) -> None:
        store = stores[rank]
        for number in range(num_rounds + 5):
            arrived_s[number][rank] = time.perf_counter()
            if store.add(f"barrier-{number}", 1) == NUM_WORKERS:
                store.set(f"go-{number}", "1")
            store.wait([f"go-{number}"])
            released_s[number][rank] = time.perf_counter()

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(NUM_WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [
        at_s - max(arrivals)
        for arrivals, releases in zip(arrived_s[5:], released_s[5:], strict=True)
        for at_s in releases
    ]


def main() -> None:
    if importlib.util.find_spec("torch") is None:
        print(json.dumps({"not_installed": "torch"}))
        return
    num_rounds = 20 if "--quick" in sys.argv else 200
    context = multiprocessing.get_context("spawn")
    port: multiprocessing.SimpleQueue[int] = context.SimpleQueue()
    leave = context.Event()
    server = context.Process(target=serve, args=(port, leave))
    server.start()
    try:
        found = port.get()
        pin(1)
        waits_s = sorted(measure(found, num_rounds))
    finally:
        leave.set()
        server.join(10)
        server.kill()
    last = len(waits_s) - 1
    figures = {
        "tcpstore_barrier_100_p50_ms": waits_s[last // 2] * 1e3,
        "tcpstore_barrier_100_p99_ms": waits_s[math.ceil(last * 0.99)] * 1e3,
    }
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
