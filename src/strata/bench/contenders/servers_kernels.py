"""The table's gather and row-wise Adagrad against the same loops in C, which gcc compiles for this machine.

`Table.pull` and `Table.push` are timed as a server calls them: keys in, rows out or updated. The C functions find keys
in a hash table of their own, with the same hash and the same share of free cells.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from strata.bench.contenders.servers_job import FIELDS, LR, WIDTH, Size, fill, require_memory, zipf
from strata.bench.contenders.servers_strata import fill_table
from strata.servers.table.keys import unique
from strata.servers.table.optimizers import RowWiseAdagrad
from strata.servers.table.table import Table, TableSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

EPS = 1e-8
WARM_UP = 3
COPIES = 2.4
"""Memory over the weights: the table, and the arrays of C."""
COMPILE_S = 60.0
SOURCE = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>

static uint64_t mix(uint64_t key) {
    key += 0x9E3779B97F4A7C15u;
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9u;
    key = (key ^ (key >> 27)) * 0x94D049BB133111EBu;
    return key ^ (key >> 31);
}

static int32_t find(const int32_t *cells, uint64_t last, const uint64_t *row_keys, uint64_t key) {
    uint64_t at = mix(key) & last;
    while (cells[at] >= 0 && row_keys[cells[at]] != key) at = (at + 1) & last;
    return cells[at];
}

void place(int32_t *cells, uint64_t last, const uint64_t *row_keys, int64_t num) {
    for (int64_t i = 0; i < num; i++) {
        uint64_t at = mix(row_keys[i]) & last;
        while (cells[at] >= 0) at = (at + 1) & last;
        cells[at] = (int32_t)i;
    }
}

void find_all(const int32_t *cells, uint64_t last, const uint64_t *row_keys, const uint64_t *keys, int64_t num,
              int32_t *slots) {
    for (int64_t i = 0; i < num; i++) slots[i] = find(cells, last, row_keys, keys[i]);
}

void gather(const float *weights, const int32_t *slots, int64_t num, float *rows) {
    for (int64_t i = 0; i < num; i++) memcpy(rows + i * WIDTH, weights + (int64_t)slots[i] * WIDTH, 4 * WIDTH);
}

void adagrad(float *weights, float *sums, const int32_t *slots, const float *gradients, int64_t num, float lr,
             float eps) {
    for (int64_t i = 0; i < num; i++) {
        const float *gradient = gradients + i * WIDTH;
        float *row = weights + (int64_t)slots[i] * WIDTH;
        float total = 0;
        for (int j = 0; j < WIDTH; j++) total += gradient[j] * gradient[j];
        sums[slots[i]] += total / WIDTH;
        float scale = lr / (sqrtf(sums[slots[i]]) + eps);
        for (int j = 0; j < WIDTH; j++) row[j] -= scale * gradient[j];
    }
}

int all_finite(const float *values, int64_t num) {
    int found = 1;
    for (int64_t i = 0; i < num; i++) found &= isfinite(values[i]) != 0;
    return found;
}

void touch(uint32_t *versions, uint32_t *counts, const int32_t *slots, int64_t num, uint32_t clock) {
    for (int64_t i = 0; i < num; i++) {
        versions[slots[i]] = clock;
        counts[slots[i]]++;
    }
}
"""


class CTable:
    """The same table in C."""

    def __init__(self, rows: int, directory: Path) -> None:
        self._code = compiled(directory)
        self.weights = np.empty((rows, WIDTH), np.float32)
        fill(torch.from_numpy(self.weights))
        self.sums = np.zeros((rows, 1), np.float32)
        self._keys = np.arange(rows, dtype=np.uint64)
        self._versions, self._counts = np.ones((2, rows), np.uint32)
        self._cells = np.full(1 << int(rows / 0.35).bit_length(), -1, np.int32)
        self._last = ctypes.c_uint64(len(self._cells) - 1)
        self._code.place(at(self._cells), self._last, at(self._keys), ctypes.c_int64(rows))

    def find(self, keys: NDArray[np.uint64]) -> NDArray[np.int32]:
        slots = np.empty(len(keys), np.int32)
        self._code.find_all(at(self._cells), self._last, at(self._keys), at(keys), ctypes.c_int64(len(keys)), at(slots))
        return slots

    def pull(self, keys: NDArray[np.uint64], out: NDArray[np.float32]) -> None:
        slots = self.find(keys)
        self._code.gather(at(self.weights), at(slots), ctypes.c_int64(len(slots)), at(out))

    def push(self, keys: NDArray[np.uint64], gradients: NDArray[np.float32], clock: int) -> None:
        if not self._code.all_finite(at(gradients), ctypes.c_int64(gradients.size)):
            raise RuntimeError("a gradient is not finite")
        slots = self.find(keys)
        num = ctypes.c_int64(len(slots))
        self._code.touch(at(self._versions), at(self._counts), at(slots), num, ctypes.c_uint32(clock))
        self.update(slots, gradients)

    def update(self, slots: NDArray[np.int32], gradients: NDArray[np.float32]) -> None:
        num, lr, eps = ctypes.c_int64(len(slots)), ctypes.c_float(LR), ctypes.c_float(EPS)
        self._code.adagrad(at(self.weights), at(self.sums), at(slots), at(gradients), num, lr, eps)


def at(array: NDArray[Any]) -> ctypes.c_void_p:
    """Return the address of an array, which must have a name: nothing else keeps it."""
    return ctypes.c_void_p(array.ctypes.data)


def compiled(directory: Path) -> ctypes.CDLL:
    source, library = directory / "table.c", directory / "table.so"
    source.write_text(SOURCE)
    # -ffast-math lets the compiler reorder the sum of squares, as numba does; isfinite needs the option after it.
    flags = ["-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", f"-DWIDTH={WIDTH}", "-shared", "-fPIC"]
    gcc = shutil.which("gcc") or "gcc"
    subprocess.run([gcc, *flags, "-o", library, source, "-lm"], check=True, timeout=COMPILE_S)
    return ctypes.CDLL(str(library))


class Push(NamedTuple):
    """The different keys of a batch, their gradients, and room for their rows."""

    keys: NDArray[np.uint64]
    gradients: NDArray[np.float32]
    rows: NDArray[np.float32]

    @classmethod
    def drawn(cls, random: np.random.Generator, size: Size) -> Push:
        keys = unique(zipf(random, size.samples * FIELDS, size.rows).astype(np.uint64)).keys
        gradients = random.standard_normal((len(keys), WIDTH), np.float32)
        return cls(keys, gradients, np.zeros_like(gradients))


class Times:
    """CPU time of this thread, in ms, by name."""

    def __init__(self) -> None:
        self._taken: dict[str, list[float]] = {}

    def time(self, name: str, work: Callable[..., object], *arguments: object) -> None:
        began_s = time.thread_time()
        work(*arguments)
        self._taken.setdefault(name, []).append((time.thread_time() - began_s) * 1e3)

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(each[WARM_UP:]) for name, each in self._taken.items()}


def check_equal(ours: Table, theirs: CTable, push: Push) -> None:
    """
    Raises:
        RuntimeError: The two tables have different rows after the same push.
    """
    ours.push(push.keys, push.gradients, 1)
    theirs.push(push.keys, push.gradients, 1)
    theirs.pull(push.keys, push.rows)
    if not np.allclose(ours.pull(push.keys), push.rows, rtol=1e-4, atol=1e-6):
        raise RuntimeError("the C code computes other rows than the table")


def main() -> None:
    size = Size.given()
    require_memory(COPIES * size.table_bytes)
    optimizer = RowWiseAdagrad(lr=LR, eps=EPS)
    ours = Table(TableSpec(name="ours", width=WIDTH, optimizer=optimizer, max_rows=size.rows))
    fill_table(ours, size.rows)
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as directory:
        theirs = CTable(size.rows, Path(directory))
    random = np.random.default_rng(0)
    check_equal(ours, theirs, Push.drawn(random, size))
    times = Times()
    for clock in range(2, WARM_UP + 3 * size.steps + 2):
        # Each gets a batch of its own: the second one to use a batch would find it in the cache.
        a, b = Push.drawn(random, size), Push.drawn(random, size)
        times.time("pull", ours.pull, a.keys, a.rows)
        times.time("c_pull", theirs.pull, b.keys, b.rows)
        times.time("push", ours.push, a.keys, a.gradients, clock)
        times.time("c_push", theirs.push, b.keys, b.gradients, clock)
        a, b = Push.drawn(random, size), Push.drawn(random, size)
        slots, c_slots = theirs.find(a.keys), theirs.find(b.keys)
        times.time("update", optimizer.update, theirs.weights, theirs.sums, slots, a.gradients, clock)
        times.time("c_update", theirs.update, c_slots, b.gradients)
    ms = times.medians()
    figures = {
        "gather_over_c": ms["c_pull"] / ms["pull"],
        "adagrad_over_c": ms["c_update"] / ms["update"],
        "push_over_c": ms["c_push"] / ms["push"],
        **{f"table_{name}_ms": value for name, value in ms.items()},
    }
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    if shutil.which("gcc") is None:
        print(json.dumps({"not_installed": "gcc"}))
    else:
        main()
