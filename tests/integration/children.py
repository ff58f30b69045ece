"""What the nursery's children do: be a coordinator, or be workers that a test can order about."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from strata import config as configs
from strata.coordinator.client import ClientConfig, CoordinatorClient
from strata.coordinator.config import CoordinatorConfig
from strata.coordinator.server import run
from strata.errors import StrataError

if TYPE_CHECKING:
    from nursery import Lifeline


def coordinator(lifeline: Lifeline, *, settings: dict[str, Any]) -> None:
    """Serves until SIGTERM; says its addresses."""
    config = configs.load(CoordinatorConfig, settings, source="the test")
    run(config, announce=lambda addresses: lifeline.say(**dataclasses.asdict(addresses)))


def workers(lifeline: Lifeline, *, address: str, worker_ids: list[str]) -> None:
    """Registers workers through one session, then obeys: `{"call": METHOD, "worker_id": …, "arguments": {…}}`."""
    config = ClientConfig(backoff_s=0.01, max_backoff_s=0.1)
    with CoordinatorClient(address, config=config) as client:
        members = {worker_id: client.register_worker(worker_id) for worker_id in worker_ids}
        lifeline.say(incarnations={worker_id: worker.incarnation for worker_id, worker in members.items()})
        while (order := lifeline.hear()) is not None:
            worker = members[order["worker_id"]]
            try:
                getattr(worker, order["call"])(**order.get("arguments", {}))
            except StrataError as error:
                lifeline.say(kind=type(error).__name__, message=error.message, lost=repr(worker.lost))
            else:
                lifeline.say(kind="", generation=worker.generation, lost=repr(worker.lost))
