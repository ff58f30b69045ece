"""Strata with its defaults: durable, hashed, committed; and loaded with every byte verified.

The saver computes statistics after the commit until the memory is needed. The next save claims the memory, which is
part of its stall. Closing a manager cancels the statistics, so they do not run during other measurements.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

from strata.bench.contenders.checkpoint_state import REPETITIONS, directory, median_ms, setting, state
from strata.checkpoint import CheckpointManager

NUM_SMALL = 20_000


def saved(place: str, what: Any) -> tuple[list[float], list[float]]:
    """Return the stall and the time until durable of each save; the first save follows `prepare`."""
    stalls, totals = [], []
    with CheckpointManager(place, keep_count=1) as manager:
        manager.prepare(what)
        for step in range(REPETITIONS + 1):
            start = time.perf_counter()
            save = manager.save(what, step=step)
            stalls.append(time.perf_counter() - start)
            save.wait()
            totals.append(time.perf_counter() - start)
            manager.wait()  # until the previous one is removed
    return stalls, totals


def loaded(manager: CheckpointManager) -> list[float]:
    """Return the time of each load. Each load releases its state at once, so all but the first find recently used
    memory; a load in a new process is like the first.
    """
    taken = []
    for _ in range(REPETITIONS + 1):
        start = time.perf_counter()
        manager.load()
        taken.append(time.perf_counter() - start)
    return taken


def main() -> None:
    with directory() as place:
        large = state()
        stalls, totals = saved(place, large)
        del large
        with CheckpointManager(place) as manager:
            loads = loaded(manager)

        def peek(_: int) -> None:
            with CheckpointManager(place) as fresh:
                fresh.latest()

        peek_ms = median_ms(peek)
        _, small = saved(f"{place}/small", state(int(setting("SMALL_TENSORS", NUM_SMALL))))
        saved(f"{place}/thousand", state(1_000))
        with CheckpointManager(f"{place}/thousand") as manager:
            one_ms = median_ms(lambda _: manager.load(only=["layer.00500"]))
    warm_stall = statistics.median(stalls[1:])
    figures = {
        "stall_ms": warm_stall * 1e3,
        "first_stall_over_warm": stalls[0] / warm_stall,
        "first_stall_ms": stalls[0] * 1e3,
        "durable_ms": statistics.median(totals[1:]) * 1e3,
        "load_ms": statistics.median(loads[1:]) * 1e3,
        "first_load_ms": loads[0] * 1e3,
        "peek_ms": peek_ms,
        "one_of_1000_ms": one_ms,
        "small_tensors_over_large": statistics.median(small[1:]) / statistics.median(totals[1:]),
    }
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
