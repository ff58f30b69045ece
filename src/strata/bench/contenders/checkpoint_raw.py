"""The limits of the machine: write and read the state past the page cache, and copy it in memory."""

from __future__ import annotations

import json
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from strata.bench.contenders.checkpoint_state import directory, median_ms, size_bytes

PIECE_BYTES = 8 << 20
NUM_THREADS = 4
COPY_THREADS = 2


def main() -> None:
    size = size_bytes() // 4096 * 4096
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(memory)
    array = np.frombuffer(memory, np.uint8)
    array[:] = np.random.default_rng(7).integers(0, 256, 1 << 20, np.uint8).repeat(-(-size // (1 << 20)))[:size]
    source = array.copy()
    starts = range(0, size, PIECE_BYTES)
    with directory() as place, ThreadPoolExecutor(NUM_THREADS) as pool, ThreadPoolExecutor(COPY_THREADS) as copying:

        def write(number: int) -> None:
            fd = os.open(Path(place, str(number)), os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
            list(pool.map(lambda start: os.pwrite(fd, view[start : start + PIECE_BYTES], start), starts))
            os.fsync(fd)
            os.close(fd)

        def read(_: int) -> None:
            fd = os.open(Path(place, "kept"), os.O_RDONLY | os.O_DIRECT)
            list(pool.map(lambda start: os.preadv(fd, [view[start : start + PIECE_BYTES]], start), starts))
            os.close(fd)

        def copy(_: int) -> None:
            def piece(start: int) -> None:
                np.copyto(array[start : start + PIECE_BYTES], source[start : start + PIECE_BYTES])

            list(copying.map(piece, starts))

        write_ms = median_ms(write, after=lambda number: Path(place, str(number)).unlink())
        write(0)
        Path(place, "0").rename(Path(place, "kept"))
        figures = {"raw_write_ms": write_ms, "raw_read_ms": median_ms(read), "memcpy_ms": median_ms(copy)}
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
