"""The agent's own coordinator, reachable by workers on other machines.

It listens on the network, so it needs TLS and tokens, as every coordinator there. The CA, the certificate and the
tokens are generated for one start of the run: there is nothing to set up, and they are worthless afterwards.
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
class NetworkCoordinator:
    address: str
    security: ClientSecurity
    """Credentials of the agent, with the role admin."""
    ca: bytes
    """CA certificate for the workers."""
    token: str
    """Token for the workers."""

    def __repr__(self) -> str:
        return f"NetworkCoordinator({self.address!r}, …)"


@contextlib.contextmanager
def start_on_network(config: CoordinatorConfig, host: str, secrets: Path) -> Iterator[NetworkCoordinator]:
    """Start a coordinator at a free port of this address. `secrets` is a directory that only this user can enter."""
    write_set(secrets, hosts=[host], now=datetime.now(UTC), days=VALID_DAYS)
    write_tokens(secrets)
    security = SecurityConfig(
        certificate=str(secrets / "server.crt"), key=str(secrets / "server.key"), tokens=str(secrets / "tokens")
    )
    where = f"[{host}]:0" if ":" in host else f"{host}:0"
    with EmbeddedCoordinator(replace(config, security=security), listen=where) as coordinator:
        yield NetworkCoordinator(
            coordinator.address,
            ClientSecurity(ca=str(secrets / "ca.crt"), token_file=str(secrets / "admin.token")),
            (secrets / "ca.crt").read_bytes(),
            (secrets / "worker.token").read_text().strip(),
        )
