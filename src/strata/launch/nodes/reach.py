"""A coordinator inside the agent that workers on other machines reach.

It listens on the network, so it has TLS and tokens, as every coordinator there must. An authority, a certificate and
the tokens are made for this one start, and end with it: nobody has to set up anything, and nobody else can use them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from strata.coordinator.config import SecurityConfig
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.transport.certificates import write_set
from strata.transport.credentials import ClientSecurity
from strata.transport.tokens import write_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from strata.coordinator.config import CoordinatorConfig

VALID_DAYS = 3650
"""Longer than any run."""


@dataclass(frozen=True, slots=True)
class Reached:
    address: str
    security: ClientSecurity
    """The agent's, who commands."""
    ca: bytes
    """What workers need: whom to believe,"""
    token: str
    """and what to show."""

    def __repr__(self) -> str:
        return f"Reached({self.address!r}, …)"


@contextlib.contextmanager
def on_network(config: CoordinatorConfig, host: str, secrets: Path) -> Iterator[Reached]:
    """At a free port of this address. `secrets` is a directory that only this user can enter."""
    write_set(secrets, hosts=[host], now=datetime.now(UTC), days=VALID_DAYS)
    write_tokens(secrets)
    security = SecurityConfig(
        certificate=str(secrets / "server.crt"), key=str(secrets / "server.key"), tokens=str(secrets / "tokens")
    )
    where = f"[{host}]:0" if ":" in host else f"{host}:0"
    with EmbeddedCoordinator(replace(config, security=security), listen=where) as coordinator:
        yield Reached(
            coordinator.address,
            ClientSecurity(ca=str(secrets / "ca.crt"), token_file=str(secrets / "admin.token")),
            (secrets / "ca.crt").read_bytes(),
            (secrets / "worker.token").read_text().strip(),
        )
