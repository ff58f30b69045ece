"""Functions that the nursery's children run: a coordinator, and workers that execute a test's orders."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING, Any

from strata import config as configs
from strata.coordinator.client import ClientConfig, CoordinatorClient
from strata.coordinator.config import CoordinatorConfig
from strata.coordinator.server import run
from strata.errors import StrataError
from strata.transport.credentials import ClientSecurity

if TYPE_CHECKING:
    from nursery import Lifeline


def coordinator(lifeline: Lifeline, *, settings: dict[str, Any]) -> None:
    """Report the addresses and serve until SIGTERM."""
    config = configs.load(CoordinatorConfig, settings, source="the test")
    run(config, announce=lambda addresses: lifeline.send(**dataclasses.asdict(addresses)))


def workers(lifeline: Lifeline, *, address: str, worker_ids: list[str]) -> None:
    """Register workers through one session, then execute `{"call": METHOD, "worker_id": …, "arguments": {…}}`."""
    config = ClientConfig(backoff_s=0.01, max_backoff_s=0.1)
    with CoordinatorClient(address, config=config) as client:
        members = {worker_id: client.register_worker(worker_id) for worker_id in worker_ids}
        lifeline.send(incarnations={worker_id: worker.incarnation for worker_id, worker in members.items()})
        while (order := lifeline.receive()) is not None:
            worker = members[order["worker_id"]]
            try:
                getattr(worker, order["call"])(**order.get("arguments", {}))
            except StrataError as error:
                lifeline.send(kind=type(error).__name__, message=error.message, lost=repr(worker.lost))
            else:
                lifeline.send(kind="", generation=worker.generation, lost=repr(worker.lost))


def bystander(lifeline: Lifeline, *, address: str, token: str, name: str) -> None:
    """Run a worker that calls all the time and, on request, reports its slowest call since the previous request."""
    security, slowest_s, num_calls, failures = ClientSecurity(token=token), 0.0, 0, []
    stop = threading.Event()

    def call() -> None:
        nonlocal slowest_s, num_calls
        while not stop.wait(0.01):
            for one in (worker.heartbeat, client.list_jobs):
                began_s = time.monotonic()
                try:
                    one()
                except StrataError as error:
                    failures.append(repr(error))
                slowest_s = max(slowest_s, time.monotonic() - began_s)
                num_calls += 1

    with CoordinatorClient(address, security=security) as client:
        worker = client.register_worker(name)
        calling = threading.Thread(target=call, daemon=True)
        calling.start()
        lifeline.send(ready=True)
        while lifeline.receive() is not None:
            lifeline.send(slowest_s=slowest_s, num_calls=num_calls, failures=failures[:3], lost=repr(worker.lost))
            slowest_s, num_calls = 0.0, 0
        stop.set()
        calling.join()
