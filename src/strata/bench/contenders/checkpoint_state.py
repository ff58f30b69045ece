"""What is saved, the same for everybody. The peers' environment loads this file too, so it imports nothing of ours."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_TENSORS = 16
REPETITIONS = 3


def size_bytes() -> int:
    share = 1 / 16 if "--quick" in sys.argv else float(os.environ.get("STRATA_BENCH_GIB", "1"))
    return int(share * (1 << 30)) // (4 * NUM_TENSORS) * 4 * NUM_TENSORS


def state(num_tensors: int = NUM_TENSORS) -> dict[str, np.ndarray]:
    """Random, so that nothing along the way can compress it."""
    rng = np.random.default_rng(7)
    each = size_bytes() // (4 * num_tensors)
    return {f"layer.{i:05d}": rng.random(each, np.float32) for i in range(num_tensors)}


def directory() -> tempfile.TemporaryDirectory[str]:
    """On the disk that is meant: where the benchmark was started."""
    return tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-")


def median_ms(work: Callable[[int], object], *, after: Callable[[int], object] = lambda _: None) -> float:
    """Of a few, after one that does not count; `after` cleans up and is not timed."""
    taken = []
    for number in range(REPETITIONS + 1):
        start = time.perf_counter()
        work(number)
        taken.append(time.perf_counter() - start)
        after(number)
    return statistics.median(taken[1:]) * 1e3


def sync(path: Path) -> None:
    """A file or a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
