"""Strata: two processes of one machine that read the same samples, with and without `shared_bytes`.

Both are rank 0 of 1, as the ranks of a tensor-parallel group or two trials are, so each delivers every sample. Shards
are compressed: unpacking them takes most of the time and is shared; a process has one decode thread. The time counts
from the moment when both processes have created their loaders until both have delivered everything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from strata.bench.contenders.webdata_consumer import Consumer, text
from strata.bench.contenders.webdata_strata import loader_of

NUM_RANKS = 2
BASE_BYTES = 1 << 30
PAGE_BYTES = 4096
NUM_LIMITS = 4096


def read_as_rank(shared_bytes: int) -> None:
    """Be one of the processes: wait for a line, read everything, print the time when it ended and the bytes read."""
    shards = text()
    arguments: dict[str, Any] = {"num_workers": 1, "rank": 0, "num_ranks": 1}
    if shared_bytes:
        arguments["shared_bytes"] = shared_bytes
    loader, dataset = loader_of(shards, **arguments)
    print("ready", flush=True)
    sys.stdin.readline()
    consumer = Consumer(shards)
    for batch in loader:
        consumer.touch(batch)
    ended_s = time.monotonic()  # the same clock in all processes
    consumer.verify()
    print(json.dumps([ended_s, dataset.get_metrics().total.bytes_read]), flush=True)
    dataset.close()


def measure(num_ranks: int, shared_bytes: int = 0) -> tuple[float, float]:
    """Return the time until all processes have read everything, and the bytes that they read together."""
    command = [sys.executable, "-m", "strata.bench.contenders.webdata_shared", *sys.argv[1:], f"--rank={shared_bytes}"]
    ranks = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(num_ranks)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            if rank.stdout.readline() != "ready\n":
                raise RuntimeError(f"a rank ended with exit code {rank.wait()} before it read anything")
        began_s = time.monotonic()
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
        found = []
        for rank in ranks:
            assert rank.stdout is not None
            line = rank.stdout.readline()
            if not line:
                raise RuntimeError(f"a rank ended with exit code {rank.wait()} before it had read everything")
            found.append(json.loads(line))
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return max(ended_s for ended_s, _ in found) - began_s, sum(num_bytes for _, num_bytes in found)


def main() -> None:
    ranks = [int(each.partition("=")[2]) for each in sys.argv[1:] if each.startswith("--rank=")]
    if ranks:
        read_as_rank(ranks[0])
        return
    text()
    # Processes share what others with the same limit left, so every run has a limit of its own.
    shared_bytes = BASE_BYTES + os.getpid() % NUM_LIMITS * PAGE_BYTES
    _, bytes_of_one = measure(1)
    private_s, _ = measure(NUM_RANKS)
    shared_s, bytes_of_both = measure(NUM_RANKS, shared_bytes)
    figures = {
        "shared_bytes_ratio": bytes_of_both / bytes_of_one,
        "shared_speedup": private_s / shared_s,
        "private_ranks_s": private_s,
        "shared_ranks_s": shared_s,
    }
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
