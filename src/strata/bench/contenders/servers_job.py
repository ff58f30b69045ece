"""The job of the contenders of `strata bench servers`: ids, a network, two ranks, the measurement. No Strata."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

NUM_RANKS = 2
ROWS, QUICK_ROWS = 10_000_000, 1_000_000
SAMPLES = 4_096
STEPS, QUICK_STEPS = 12, 4
WARM_UP = 3
"""Steps of a measurement that are not timed."""
FIELDS = 26
"""Ids of a sample."""
WIDTH = 64
LAYERS = 3
UNITS = (400, 64)
"""Hidden layers of the two networks."""
LR = 0.01
ZIPF = 1.05
SPREAD = 2_654_435_761
"""A prime: multiplied with it, ids that are close in frequency are not close in the table."""
BLOCK_ROWS = 65_536
COLLECTIVE_TIMEOUT = timedelta(seconds=240)
ALLOCATORS: Mapping[str, Mapping[str, str]] = {
    "": {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1)},
    "_plain": {},
}
"""By the suffix of a figure. The Trainer sets the thresholds in its workers; by default, glibc returns large buffers to
the kernel after every step."""
_CPU_CLOCK = 2
LOSS = nn.BCEWithLogitsLoss()


@dataclass(frozen=True, slots=True)
class Size:
    rows: int
    samples: int
    """In the batch of one rank."""
    steps: int

    @classmethod
    def given(cls) -> Size:
        """Return the size that the command line asks for."""
        is_quick = "--quick" in sys.argv
        return cls(
            rows=int(os.environ.get("STRATA_BENCH_ROWS", QUICK_ROWS if is_quick else ROWS)),
            samples=int(os.environ.get("STRATA_BENCH_SAMPLES", SAMPLES)),
            steps=int(os.environ.get("STRATA_BENCH_STEPS", QUICK_STEPS if is_quick else STEPS)),
        )

    @property
    def table_bytes(self) -> int:
        """The weights of the table."""
        return self.rows * WIDTH * 4


@dataclass(frozen=True, slots=True)
class Batch:
    ids: Tensor
    labels: Tensor


def batches(size: Size, count: int, *, seed: int) -> list[Batch]:
    """Return batches whose ids have a Zipf distribution over all rows of the table."""
    random = np.random.default_rng(seed)
    num_ids = size.samples * FIELDS
    found = []
    for _ in range(count):
        ids = zipf(random, num_ids, size.rows).reshape(size.samples, FIELDS)
        labels = random.integers(0, 2, size.samples).astype(np.float32)
        found.append(Batch(torch.from_numpy(ids), torch.from_numpy(labels)))
    return found


def zipf(random: np.random.Generator, count: int, rows: int) -> Any:
    """Return ids below `rows`; the n-th most frequent one has a probability in proportion to n^-1.05."""
    found = np.empty(0, np.int64)
    while len(found) < count:
        drawn = random.zipf(ZIPF, 2 * count)
        found = np.concatenate([found, drawn[drawn <= rows]])
    return (found[:count] - 1) * SPREAD % rows


class Network(nn.Module):
    """An MLP on the embeddings of all ids of a sample, one after the other."""

    def __init__(self, embedding: nn.Module, units: int) -> None:
        super().__init__()
        self.embedding = embedding
        sizes = [FIELDS * WIDTH, *[units] * LAYERS]
        hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.net = nn.Sequential(*hidden, nn.Linear(units, 1))

    def forward(self, ids: Any) -> Tensor:
        out: Tensor = self.net(self.embedding(ids).reshape(-1, FIELDS * WIDTH)).squeeze(-1)
        return out


def fill(weights: Any) -> None:
    """Write small random numbers. They repeat after a block of rows: drawing all takes longer than the measurement."""
    block = torch.randn(BLOCK_ROWS, weights.shape[1], generator=torch.Generator().manual_seed(0)) * 0.01
    with torch.no_grad():
        for start in range(0, len(weights), BLOCK_ROWS):
            part = weights[start : start + BLOCK_ROWS]
            part[:] = block[: len(part)]


def require_memory(num_bytes: float) -> None:
    """
    Raises:
        MemoryError: So much is not available.
    """
    available = psutil.virtual_memory().available
    if num_bytes > available:
        raise MemoryError(
            f"this contender needs {num_bytes / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are available; "
            "use a smaller table: --set rows=1000000"
        )


# -- processes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rank:
    """What a rank knows when it starts."""

    number: int
    directory: str
    size: Size


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes that the block starts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run_ranks(work: Callable[..., dict[str, float]], size: Size, *arguments: Any) -> dict[str, float]:
    """Call `work(rank, *arguments)` in two new processes with a process group; return the result of rank 0."""
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as directory:
        ranks = [Rank(number, directory, size) for number in range(NUM_RANKS)]
        context = multiprocessing.get_context("spawn")
        with environment({"OMP_NUM_THREADS": "1"}), ProcessPoolExecutor(NUM_RANKS, mp_context=context) as pool:
            working = [pool.submit(_in_group, work, rank, *arguments) for rank in ranks]
            try:
                for each in as_completed(working):
                    each.result()
            except BaseException:
                for child in multiprocessing.active_children():  # the other rank waits for the one that failed
                    child.kill()
                raise
            return working[0].result()


def _in_group(work: Callable[..., dict[str, float]], rank: Rank, *arguments: Any) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rank.directory}/group",
        rank=rank.number,
        world_size=NUM_RANKS,
        timeout=COLLECTIVE_TIMEOUT,
    )
    try:
        return work(rank, *arguments)
    finally:
        dist.destroy_process_group()


# -- measurement -------------------------------------------------------------------------------------------------------


def measure(
    size: Size, step: Callable[[int], object], finish: Callable[[], object] = int, *, servers: Sequence[int] = ()
) -> tuple[float, float]:
    """Return the CPU time per sample in microseconds and the samples/s of all ranks, on every rank.

    Args:
        finish: Waits until everything that the steps began is done.
        servers: Process ids whose CPU time counts too.
    """
    pids: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(pids, os.getpid())
    for number in range(WARM_UP):
        step(number)
    finish()
    dist.barrier()
    began_s, began_cpu_s = time.perf_counter(), cpu_s([*pids, *servers])
    for number in range(WARM_UP, WARM_UP + size.steps):
        step(number)
    finish()
    dist.barrier()
    taken_s, taken_cpu_s = time.perf_counter() - began_s, cpu_s([*pids, *servers]) - began_cpu_s
    dist.barrier()
    num_samples = size.samples * size.steps * NUM_RANKS
    return taken_cpu_s / num_samples * 1e6, num_samples / taken_s


def cpu_s(pids: Sequence[int]) -> float:
    """Return the CPU time of these processes with all their threads, in nanoseconds resolution (Linux)."""
    return sum(time.clock_gettime((~pid << 3) | _CPU_CLOCK) for pid in pids)


def named(system: str, units: int, suffix: str, measured: tuple[float, float]) -> dict[str, float]:
    """Return the two figures of a measurement."""
    cpu_us, per_s = measured
    return {f"{system}_{units}{suffix}_cpu_us": cpu_us, f"{system}_{units}{suffix}_samples_per_s": per_s}
