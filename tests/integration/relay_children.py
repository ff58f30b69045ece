"""A relay that the nursery forks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from strata import config as configs
from strata.coordinator.relay.relay import RelayConfig, run
from strata.transport.credentials import ClientSecurity

if TYPE_CHECKING:
    from nursery import Lifeline


def relay(lifeline: Lifeline, *, settings: dict[str, Any]) -> None:
    """Report the addresses and serve until SIGTERM."""
    config = configs.load(RelayConfig, settings, source="the test")
    run(
        config,
        security=ClientSecurity(),
        announce=lambda addresses: lifeline.send(**dataclasses.asdict(addresses)),
    )
