"""The same barrier with torch's TCPStore: 100 clients with one connection each; the last to arrive releases the others.

Nothing is durable. Runs in the peers' environment, so it imports only the file next to it that defines the measurement.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import multiprocessing
import multiprocessing.synchronize
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

sys.path.append(str(Path(__file__).parent))
rounds: Any = importlib.import_module("barrier_rounds")

HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=60)
SERVER_CORE = 0
SERVE_S = 240.0


def _tcp_store() -> Any:
    return importlib.import_module("torch.distributed").TCPStore


def serve(port: multiprocessing.SimpleQueue[int], leave: multiprocessing.synchronize.Event) -> None:
    rounds.pin(SERVER_CORE)
    store = _tcp_store()(HOST, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    port.put(store.port)
    leave.wait(SERVE_S)


def node(port: int, ranks: Sequence[int], wait_for_all: Callable[[], float], num_rounds: int) -> Any:
    """Run one thread and one connection per worker; TCPStore waits without Python's lock."""
    stores = [_tcp_store()(HOST, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT) for _ in ranks]
    start_s = wait_for_all()

    def member(store: Any) -> list[tuple[float, float]]:
        times = []
        for number in range(num_rounds):
            time.sleep(rounds.until_s(start_s, number))
            arrived_s = time.perf_counter()
            if store.add(f"barrier-{number}", 1) == rounds.NUM_WORKERS:
                store.set(f"go-{number}", "1")
            store.wait([f"go-{number}"])
            times.append((arrived_s, time.perf_counter()))
        return times

    with ThreadPoolExecutor(len(stores)) as pool:
        by_worker = list(pool.map(member, stores))
    wait_for_all()
    return [list(pairs) for pairs in zip(*by_worker, strict=True)]


def main() -> None:
    if importlib.util.find_spec("torch") is None:
        print(json.dumps({"not_installed": "torch"}))
        return
    _tcp_store()  # imported once, before the processes are forked
    num_rounds = 20 if "--quick" in sys.argv else 200
    context = multiprocessing.get_context("fork")
    port: multiprocessing.SimpleQueue[int] = context.SimpleQueue()
    leave = context.Event()
    server = context.Process(target=serve, args=(port, leave))
    server.start()
    try:
        waits_s = rounds.measure(functools.partial(node, port.get()), num_rounds)
    finally:
        leave.set()
        server.join(10)
        server.kill()
    figures = {
        "tcpstore_barrier_100_p50_ms": rounds.quantile(waits_s, 0.5) * 1e3,
        "tcpstore_barrier_100_p99_ms": rounds.quantile(waits_s, 0.99) * 1e3,
    }
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
