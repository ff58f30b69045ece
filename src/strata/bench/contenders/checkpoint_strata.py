"""Ours: durable, hashed, committed; and loaded again with every byte verified."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

from strata.bench.contenders.checkpoint_state import REPETITIONS, directory, median_ms, state
from strata.checkpoint import CheckpointManager

NUM_SMALL = 20_000


def saved(place: str, what: Any, *, first_step: int) -> tuple[list[float], list[float]]:
    """How long each save stalled, and how long it took to be durable; the first one prepared."""
    stalls, totals = [], []
    with CheckpointManager(place, keep_count=1) as manager:
        manager.prepare(what)
        for step in range(first_step, first_step + REPETITIONS + 1):
            start = time.perf_counter()
            save = manager.save(what, step=step)
            stalls.append(time.perf_counter() - start)
            save.wait()
            totals.append(time.perf_counter() - start)
            manager.wait()
    return stalls, totals


def main() -> None:
    with directory() as place:
        large = state()
        stalls, totals = saved(place, large, first_step=0)
        del large
        with CheckpointManager(place) as manager:
            load_ms = median_ms(lambda _: manager.load())

        def peek(_: int) -> None:
            with CheckpointManager(place) as fresh:
                fresh.latest()

        peek_ms = median_ms(peek)
        _, small = saved(f"{place}/small", state(NUM_SMALL), first_step=0)
        saved(f"{place}/thousand", state(1_000), first_step=0)
        with CheckpointManager(f"{place}/thousand") as manager:
            one_ms = median_ms(lambda _: manager.load(only=["layer.00500"]))
    figures = {
        "stall_ms": statistics.median(stalls[1:]) * 1e3,
        "first_stall_ms": stalls[0] * 1e3,
        "durable_ms": statistics.median(totals[1:]) * 1e3,
        "load_ms": load_ms,
        "peek_ms": peek_ms,
        "one_of_1000_ms": one_ms,
        "small_tensors_over_large": statistics.median(small[1:]) / statistics.median(totals[1:]),
    }
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
