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

REPETITIONS = 3
SEED = 7


def setting(name: str, default: float, *, quick: float | None = None) -> float:
    """What `strata bench --set` or the environment says; a size that is named holds for a quick run, too."""
    said = os.environ.get(f"STRATA_BENCH_{name}")
    if said:
        return float(said)
    return quick if quick is not None and "--quick" in sys.argv else default


def num_tensors() -> int:
    return int(setting("TENSORS", 16))


def size_bytes() -> int:
    each = int(setting("GIB", 1, quick=1 / 16) * (1 << 30)) // (4 * num_tensors())
    return each * 4 * num_tensors()


def state(count: int | None = None) -> dict[str, np.ndarray]:
    """Random, so that nothing along the way can compress it."""
    rng = np.random.default_rng(SEED)
    num = count or num_tensors()
    each = max(size_bytes() // (4 * num), 1)
    return {f"layer.{i:05d}": rng.random(each, np.float32) for i in range(num)}


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
