"""The measured training loop: bare|strata BATCH_SIZE SAVE_EVERY SOCKET.

Over the socket it receives the command to train for a turn and reports how long the turn took; see `overhead_strata`.
The first save happens before, because it starts a process and allocates its memory. Later saves are in the middle of a
turn, so that the background write overlaps with training.
"""

import json
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch  # noqa: F401  # `strata run` reads this import and preloads it

import strata
from strata.bench.contenders.overhead_model import Training

TURNS_A_SAVE = 5


class Turns:
    """The loop's end of the socket."""

    def __init__(self, path: str) -> None:
        self._link = socket.socket(socket.AF_UNIX)
        self._link.connect(path)

    def report(self, **values: Any) -> None:
        self._link.sendall(json.dumps(values).encode() + b"\n")

    def __iter__(self) -> Iterator[None]:
        while self._link.recv(1):
            yield


def bare(training: Training, save_every: int, turns: Turns) -> None:
    num_steps = save_every // TURNS_A_SAVE
    number = save_every + num_steps // 2
    for before in range(number):
        training.step(before)
    turns.report(kind="bare")
    for _ in turns:
        began_s, cpu_began_s = time.perf_counter(), time.thread_time()
        for _ in range(num_steps):
            training.step(number)
            number += 1
        turns.report(turn_s=time.perf_counter() - began_s, cpu_s=time.thread_time() - cpu_began_s)
    turns.report(digest=training.digest())


def with_runtime(training: Training, save_every: int, turns: Turns) -> None:
    ctx = strata.init(every=save_every)
    state = {"model": training.model, "optimizer": training.optimizer}
    ctx.restore(state)
    num_steps = save_every // TURNS_A_SAVE
    number = save_every + num_steps // 2
    for before in range(number):
        loss = training.step(before)
        ctx.report(step=before + 1, loss=loss)
        ctx.maybe_checkpoint(state)
    turns.report(kind="strata")
    report_s: list[float] = []
    idle_s: list[float] = []
    stall_s: list[float] = []
    for _ in turns:
        num_saves = len(stall_s)
        began_s, cpu_began_s = time.perf_counter(), time.thread_time()
        for _ in range(num_steps):
            loss = training.step(number)
            number += 1
            at_s = time.perf_counter()
            ctx.report(step=number, loss=loss)
            reported_s = time.perf_counter()
            save = ctx.maybe_checkpoint(state)
            (idle_s if save is None else stall_s).append(time.perf_counter() - reported_s)
            report_s.append(reported_s - at_s)
        turn_s, cpu_s = time.perf_counter() - began_s, time.thread_time() - cpu_began_s
        turns.report(turn_s=turn_s, cpu_s=cpu_s, has_saved=len(stall_s) > num_saves)
    turns.report(digest=training.digest(), report_s=report_s, idle_s=idle_s, stall_s=stall_s)
    ctx.close()


if __name__ == "__main__":
    kind, batch_size, save_every, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    (bare if kind == "bare" else with_runtime)(Training(batch_size), save_every, Turns(path))
