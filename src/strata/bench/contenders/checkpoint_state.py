"""The state that every contender saves. Peers load this file in their environment, so it does not import Strata."""

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

REPETITIONS = 3
SEED = 7


def setting(name: str, default: float, *, quick: float | None = None) -> float:
    """Return a setting from `strata bench --set` or the environment; a given size also applies to a quick run."""
    value = os.environ.get(f"STRATA_BENCH_{name}")
    if value:
        return float(value)
    return quick if quick is not None and "--quick" in sys.argv else default


def num_tensors() -> int:
    return int(setting("TENSORS", 16))


def size_bytes() -> int:
    each = int(setting("GIB", 1, quick=1 / 16) * (1 << 30)) // (4 * num_tensors())
    return each * 4 * num_tensors()


def state(count: int | None = None) -> dict[str, np.ndarray]:
    """Return random tensors, which cannot be compressed."""
    rng = np.random.default_rng(SEED)
    num = count or num_tensors()
    each = max(size_bytes() // (4 * num), 1)
    return {f"layer.{i:05d}": rng.random(each, np.float32) for i in range(num)}


def directory() -> tempfile.TemporaryDirectory[str]:
    """Return a directory on the disk that is measured: the one in which the benchmark was started."""
    return tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-")


def median_ms(work: Callable[[int], object], *, after: Callable[[int], object] = lambda _: None) -> float:
    """Return the median of a few runs after a warm-up; `after` cleans up and is not timed."""
    taken = []
    for number in range(REPETITIONS + 1):
        start = time.perf_counter()
        work(number)
        taken.append(time.perf_counter() - start)
        after(number)
    return statistics.median(taken[1:]) * 1e3


def sync(path: Path) -> None:
    """Flush a file or a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
