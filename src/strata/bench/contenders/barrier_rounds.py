"""Measure a barrier, the same for Strata and TCPStore: 100 workers in 13 processes on the client's core.

All workers start a round at the same instant of the machine's clock, like the steps of a training, and not when another
worker is released; otherwise one round would count towards the wait of another. The figure is the time that each worker
waits after the last arrival.

Peers load this file in their own environment, so it does not import Strata.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

NUM_WORKERS = 100
WORKERS_PER_PROCESS = 8
PERIOD_S = 0.05
"""Time between the starts of two rounds."""
LEAD_S = 0.2
"""Time between readiness of all processes and the first round."""
WARM_UP_ROUNDS = 5
CLIENT_CORE = 1
READY_S = 60.0

Times = list[list[tuple[float, float]]]
"""For each round, when each worker of a process arrived and when it was released."""
Node = Callable[[Sequence[int], Callable[[], float], int], Times]
"""The body of a process. Its arguments are the ranks of its workers, a function that waits for all processes and
returns the same instant in all of them, and the number of rounds. It calls the function twice: before the first round,
which starts at that instant, and after the last one.
"""


def pin(core: int) -> None:
    if len(os.sched_getaffinity(0)) > 1:
        os.sched_setaffinity(0, {core})


def until_s(start_s: float, number: int) -> float:
    """Return the time until a round starts; 0 if it has started."""
    return max(start_s + number * PERIOD_S - time.perf_counter(), 0.0)


def measure(node: Node, num_rounds: int, *, num_workers: int = NUM_WORKERS) -> list[float]:
    """Return how long each worker waited in each round, in seconds, sorted. It forks, so call it before starting
    threads.
    """
    context = multiprocessing.get_context("fork")
    count = num_rounds + WARM_UP_ROUNDS
    pipes, processes = [], []
    for first in range(0, num_workers, WORKERS_PER_PROCESS):
        ranks = range(first, min(first + WORKERS_PER_PROCESS, num_workers))
        here, there = context.Pipe()
        process = context.Process(target=_run, args=(node, ranks, count, there), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        _let_go_together(pipes, READY_S)
        _let_go_together(pipes, READY_S + count * PERIOD_S)  # no process leaves while another is in its last round
        answers: list[Times] = [_receive(pipe, READY_S) for pipe in pipes]
        for process in processes:
            process.join(READY_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
    rounds = [[pair for times in answers for pair in times[number]] for number in range(WARM_UP_ROUNDS, count)]
    return sorted(released_s - max(arrived_s for arrived_s, _ in pairs) for pairs in rounds for _, released_s in pairs)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def _run(node: Node, ranks: Sequence[int], count: int, pipe: Any) -> None:
    pin(CLIENT_CORE)

    def wait_for_all() -> float:
        pipe.send(None)
        instant_s: float = pipe.recv()
        return instant_s

    pipe.send(node(ranks, wait_for_all, count))


def _let_go_together(pipes: Sequence[Any], timeout_s: float) -> None:
    """Wait until all processes are ready, then send all of them the same instant."""
    for pipe in pipes:
        _receive(pipe, timeout_s)
    instant_s = time.perf_counter() + LEAD_S
    for pipe in pipes:
        pipe.send(instant_s)


def _receive(pipe: Any, timeout_s: float) -> Any:
    if not pipe.poll(timeout_s):
        raise TimeoutError(f"a process of the benchmark did not answer within {timeout_s:g} s")
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError("a process of the benchmark ended too early; its last output is above") from None
