"""Strata: what measuring the waits in collectives adds to a step, in a process group of one rank."""

from __future__ import annotations

import json
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from strata.train.collectives import CollectiveWaits
from strata.train.time_use import TimeUseMeter

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_LAYERS = 50
"""Each has two parameters, of which DDP logs the order."""
NUM_TURNS, NUM_CALLS = 200, 50
"""Turns with and without measuring alternate, so that a busy machine slows both."""


def main() -> None:
    torch.set_num_threads(1)
    store = distributed.HashStore()  # type: ignore[attr-defined]  # torch does not declare the export
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model: Any = DistributedDataParallel(nn.Sequential(*(nn.Linear(8, 8) for _ in range(NUM_LAYERS))))
    done: Any = distributed.all_reduce(torch.ones(1), async_op=True)

    def step() -> None:
        """What DDP calls before a forward pass; the pass itself is the same."""
        model.logger.set_runtime_stats_and_log()
        model.reducer.prepare_for_forward()

    for _ in range(12):  # DDP measures its first ten iterations in any case
        model(torch.ones(1, 8)).sum().backward()
    figures = {
        "collective_ddp_us": added_us(step),
        "collective_call_us": added_us(lambda: done.wait()),  # noqa: PLW0108 - the wrapper is looked up in each call
    }
    distributed.destroy_process_group()
    print(json.dumps({"figures": figures}))


def added_us(call: Callable[[], Any]) -> float:
    """Return the time that measuring adds to a call: the median over turns."""
    added: list[float] = []
    for _ in range(NUM_TURNS):
        plain_s = mean_s(call)
        waits = CollectiveWaits(TimeUseMeter())
        waits.begin()
        if not waits.is_known():
            raise RuntimeError("this torch does not let waits in collectives be measured")
        call()  # DDP measures from the next forward pass on
        added.append(mean_s(call) - plain_s)
        waits.close()
        call()
    return statistics.median(added) * 1e6


def mean_s(call: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    for _ in range(NUM_CALLS):
        call()
    return (time.perf_counter() - began_s) / NUM_CALLS


if __name__ == "__main__":
    main()
