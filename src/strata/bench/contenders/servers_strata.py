"""Strata: the table on a parameter server, which updates rows with row-wise Adagrad; DDP for the dense layers.

Two workers and one server, each a process; rows travel in shared memory, and those of the next batch are pulled while
a step computes.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import tempfile
import threading
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from strata.bench.contenders.servers_job import (
    ALLOCATORS,
    BLOCK_ROWS,
    LOSS,
    LR,
    NUM_RANKS,
    UNITS,
    WARM_UP,
    WIDTH,
    Network,
    Rank,
    Size,
    batches,
    environment,
    fill,
    measure,
    named,
    require_memory,
    run_ranks,
)
from strata.identity import Identity
from strata.servers.client import ServersClient
from strata.servers.link import AskedRows
from strata.servers.server import Server
from strata.servers.state import Fence, ServerState
from strata.servers.table.optimizers import RowWiseAdagrad
from strata.servers.table.snapshot import Saved
from strata.servers.table.table import Table, TableSpec
from strata.trainer.strategy import AllReduce, tables
from strata.trainer.strategy.base import Upcoming
from strata.trainer.strategy.lookup import StepRows
from strata.transport.tokens import Guard

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from concurrent.futures import Future
    from multiprocessing.connection import Connection

    from strata.servers.table.keys import Keys
    from strata.servers.table.optimizers import RowOptimizer, Rows

TABLE = "embedding.weight"
STALENESS = 4
"""Steps that a worker may be ahead of the slowest; the prefetch takes one of them."""
COPIES = 1.2
"""Memory of the server over rows and state."""
START_S = 240.0


def main() -> None:
    print(json.dumps({"figures": figures("strata", Size.given(), RowWiseAdagrad(lr=LR))}))


def figures(system: str, size: Size, optimizer: RowOptimizer) -> dict[str, float]:
    found: dict[str, float] = {}
    for suffix, variables in ALLOCATORS.items():
        with environment(variables), serving(size, optimizer) as (address, pid):
            found |= run_ranks(train, size, system, suffix, address, pid)
    return found


# -- server ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(size: Size, optimizer: RowOptimizer, *, host: str = "") -> Iterator[tuple[str, int]]:
    """Run a server with a full table in a process; yield its address, a Unix socket without `host`, and its pid."""
    require_memory(COPIES * size.table_bytes * (1 + optimizer.state_width(WIDTH) / WIDTH))
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as directory, environment({"OMP_NUM_THREADS": "1"}):
        address = f"{host}:0" if host else f"unix:{directory}/server.sock"
        process = context.Process(target=serve, args=(there, address, size, optimizer))
        process.start()
        there.close()
        try:
            if not here.poll(START_S):
                raise TimeoutError(f"the server has not filled its table within {START_S:g} s")
            yield here.recv(), process.pid or 0
        finally:
            process.terminate()
            process.join()


def serve(ready: Connection, address: str, size: Size, optimizer: RowOptimizer) -> None:
    state = ServerState(
        [TableSpec(name=TABLE, width=WIDTH, optimizer=optimizer, max_rows=size.rows)],
        num_workers=NUM_RANKS,
        staleness=STALENESS,
    )
    fill_table(state.tables[TABLE], size.rows)
    server = Server(state, address, guard=Guard())
    ready.send(server.addresses[0])
    threading.Event().wait()


def fill_table(table: Table, rows: int) -> None:
    """Create all rows, as if they were those of an `nn.Embedding`."""
    weights = np.empty((BLOCK_ROWS, WIDTH), np.float32)
    fill(torch.from_numpy(weights))
    state = np.empty((BLOCK_ROWS, table.spec.optimizer.state_width(WIDTH)), np.float32)
    table.spec.optimizer.fill_state(weights, state, np.arange(BLOCK_ROWS, dtype=np.int32))
    none = np.zeros(BLOCK_ROWS, np.uint32)
    for start in range(0, rows, BLOCK_ROWS):
        num = min(BLOCK_ROWS, rows - start)
        keys = np.arange(start, start + num, dtype=np.uint64)
        table.put(Saved(keys, weights[:num], state[:num], none[:num], none[:num]))


# -- worker: what `Trainer(strategy=Hybrid(…))` replaces ---------------------------------------------------------------


class Source:
    """What a `WorkerLink` is in a run: pulls with the clock of this worker."""

    def __init__(self, client: ServersClient) -> None:
        self._client = client
        self.clock = client.clock

    def pull(self, wanted: Mapping[str, Keys]) -> dict[str, Rows]:
        return self.ask(wanted).rows()

    def ask(self, wanted: Mapping[str, Keys], steps_ahead: int = 0) -> AskedRows:
        return AskedRows([self._client.pull(self.clock + steps_ahead, wanted)])


class Worker:
    """One of the ranks."""

    def __init__(self, rank: Rank, address: str, *, incarnation: int = 0, prefetch: int = 1) -> None:
        """`prefetch`: batches whose rows are pulled ahead."""
        self._rank = rank
        self._prefetch = prefetch
        self._client = ServersClient({"server": address}, Fence(rank.number, 0, incarnation), {TABLE: WIDTH})
        self._source = Source(self._client)
        self._pushed: Future[None] | None = None

    def close(self) -> None:
        self._client.close()

    def measured(self, units: int, pid: int) -> tuple[float, float]:
        size = self._rank.size
        num_steps = WARM_UP + size.steps
        given = batches(size, num_steps, seed=self._rank.number)
        shown = [{"ids": batch.ids, "labels": batch.labels} for batch in given]
        rows = StepRows(self._source)
        plain = Network(nn.Embedding(size.rows, WIDTH, device="meta"), units)
        tables.replace(plain, tables.find(plain, ["embedding"]), rows)
        rank = Identity(
            rank=self._rank.number, world_size=NUM_RANKS, local_rank=self._rank.number, local_world_size=NUM_RANKS
        )
        bound = AllReduce().bind(plain, rank)  # as in the Trainer
        network = bound.module
        optimizer = torch.optim.Adagrad(network.parameters(), lr=LR)

        def step(number: int) -> None:
            window = shown[number : number + 1 + self._prefetch]
            rows.prepare([Upcoming(batch, ahead) for ahead, batch in enumerate(window)])
            optimizer.zero_grad()
            LOSS(network(given[number].ids), given[number].labels).backward()
            self._source.clock += 1
            self._pushed = self._client.push(self._source.clock, rows.take_gradients())
            optimizer.step()

        try:
            return measure(size, step, self._finish, servers=[pid])
        finally:
            bound.close()

    def _finish(self) -> None:
        if self._pushed is not None:
            self._pushed.result()


def train(rank: Rank, system: str, suffix: str, address: str, pid: int) -> dict[str, float]:
    worker = Worker(rank, address)
    try:
        return {
            key: value
            for units in UNITS
            for key, value in named(system, units, suffix, worker.measured(units, pid)).items()
        }
    finally:
        worker.close()


if __name__ == "__main__":
    main()
