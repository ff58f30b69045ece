"""A parameter server and a worker in processes of their own, which the nursery forks at nodes of a private network."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.errors import StrataError
from strata.servers import connection
from strata.servers.client import ServersClient
from strata.servers.clocks import Push
from strata.servers.endpoint import Endpoint, Security
from strata.servers.server import Server
from strata.servers.state import Fence, ServerState
from strata.servers.table.initial import Initial
from strata.servers.table.optimizers import Adagrad
from strata.servers.table.table import TableSpec
from strata.transport import bulk

if TYPE_CHECKING:
    from nursery import Lifeline

PART = "all"
WIDTHS = {"users": 8, "items": 4}
SPECS = [
    TableSpec(name=name, width=width, optimizer=Adagrad(lr=0.1), initial=Initial(seed=width))
    for name, width in WIDTHS.items()
]


def keys_of(rank: int, step: int) -> dict[str, Any]:
    generator = np.random.default_rng((rank, step))
    return {name: np.sort(generator.choice(5_000, 300, replace=False)).astype(np.uint64) for name in WIDTHS}


def gradients_of(keys: dict[str, Any], rows: dict[str, Any]) -> dict[str, Push]:
    """Depend on the rows, so that rows of the wrong step show."""
    return {name: Push(keys[name], rows[name] * np.float32(0.5) + 1) for name in keys}


def undisturbed(num_workers: int, steps: int) -> dict[str, dict[int, bytes]]:
    """Return the rows after synchronous steps without any network."""
    state = ServerState(SPECS, num_workers=num_workers, staleness=0)
    fences = [Fence(rank, 0, 0) for rank in range(num_workers)]
    for fence in fences:
        state.join(fence)
    for step in range(steps):
        keys = [keys_of(rank, step) for rank in range(num_workers)]
        rows = [{name: state.tables[name].pull(own) for name, own in each.items()} for each in keys]
        for fence in fences:
            state.push(fence, step + 1, gradients_of(keys[fence.rank], rows[fence.rank]))
    return rows_in(state)


def rows_in(state: ServerState) -> dict[str, dict[int, bytes]]:
    found = {}
    for name in WIDTHS:
        saved = state.tables[name].rows()
        values = np.concatenate([saved.weights, saved.state], axis=1)
        found[name] = {key: row.tobytes() for key, row in zip(saved.keys.tolist(), values, strict=True)}
    return found


def server(lifeline: Lifeline, *, directory: str, host: str, num_workers: int) -> None:
    """Serve synchronous workers, and report its state on request."""
    security = Security.create(Path(directory), host)
    state = ServerState(SPECS, num_workers=num_workers, staleness=0)
    serving = Server(state, f"{host}:0", guard=security.guard, context=security.context)
    endpoint = Endpoint(
        node=host,
        local={},
        remote={PART: serving.addresses[0]},
        certificate=security.certificate,
        token=security.published_token,
    )
    lifeline.send(endpoint=endpoint.encode())
    while lifeline.receive() is not None:
        rows = {name: {key: row.hex() for key, row in each.items()} for name, each in rows_in(state).items()}
        lifeline.send(step=state.step, waits_for=state.waits_for(), rows=rows)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def worker(lifeline: Lifeline, *, rank: int, endpoints: dict[str, str], stall_s: float) -> None:
    """Train up to the step of each order; report the steps made, the error and what was logged."""
    bulk.STALL_S = stall_s
    logged = _Lines()
    logging.getLogger("strata").addHandler(logged)
    found = {name: Endpoint.decode(text) for name, text in endpoints.items()}
    client = ServersClient(
        {name: each.remote[PART] for name, each in found.items()},
        Fence(rank, 0, 0),
        WIDTHS,
        tokens={name: each.client_token() for name, each in found.items()},
        contexts={name: each.client_context() for name, each in found.items()},
    )
    step = client.clock
    lifeline.send(step=step)
    while (order := lifeline.receive()) is not None:
        error, wait_s = "", order["wait_s"]
        connection.SLOW_S = order["slow_s"]
        try:
            while step < order["until"]:
                keys = keys_of(rank, step)
                rows = client.pull(step, keys).rows(wait_s)
                client.push(step + 1, gradients_of(keys, rows)).result(wait_s)
                step += 1
        except StrataError as failed:
            error = f"{type(failed).__name__}: {failed.message}"
        lifeline.send(step=step, error=error, logged=logged.lines)
    client.close()
