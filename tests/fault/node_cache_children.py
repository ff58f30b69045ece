"""A process that uses a node cache at random and checks what it gets.

    node_cache_children.py DIRECTORY MAX_BYTES SEED NUM_STEPS

The contents of an entry follow from its key. Prints a line per step, and "wrong" if an entry has other contents.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from strata.data.shared.cache import COPY_BYTES, Claim, NodeCache

NUM_KEYS = 12


def contents(number: int) -> bytes:
    """Return what entry `number` holds: small ones are copied, large ones mapped."""
    return bytes([number]) * (1_000 if number % 3 == 0 else COPY_BYTES + number)


def main(directory: Path, max_bytes: int, seed: int, num_steps: int) -> None:
    cache = NodeCache(directory, max_bytes=max_bytes, linger_s=0.1)
    chosen = random.Random(seed)
    held: list[tuple[int, object]] = []
    for _ in range(num_steps):
        number = chosen.randrange(NUM_KEYS)
        data = contents(number)
        found = cache.claim(f"{number:040}", 0.2)
        if isinstance(found, Claim):
            if chosen.random() < 0.1:
                cache.abandon(found)
                found = None
            else:
                found = cache.publish(found, len(data), lambda fd, data=data: write(fd, data))  # type: ignore[misc]
        if found is not None:
            held = [*held[-2:], (number, found)]
        # Entries that are still held must be intact, too: others may have evicted them meanwhile.
        is_well = all(bytes(memoryview(buffer)) == contents(which) for which, buffer in held)  # type: ignore[arg-type]
        print("step" if is_well else "wrong", flush=True)
    print("end", flush=True)
    sys.stdin.read()


def write(fd: int, data: bytes) -> None:
    """Write in pieces, so that a kill can come between them."""
    for first in range(0, len(data), 40_000):
        os.pwrite(fd, data[first : first + 40_000], first)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
