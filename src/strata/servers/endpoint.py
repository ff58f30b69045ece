"""Where a server listens, and how workers find it.

Each server publishes its `Endpoint` through the coordinator, which workers trust already. Workers of the same node
connect to a Unix socket and share memory. For workers of other nodes, the server listens on a TCP port with TLS, under
a certificate of its own that the endpoint contains, and requires a token.
"""

from __future__ import annotations

import secrets
import socket
import ssl
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from strata.errors import StrataError
from strata.transport.certificates import issue, issue_authority, pem
from strata.transport.credentials import ClientSecurity
from strata.transport.tokens import Grant, Guard, Role

if TYPE_CHECKING:
    from pathlib import Path

    from strata.identity import Identity

TOPIC = "server"
DAYS = 365
"""Validity of a server's certificate, which lives as long as its process."""
_PROBE_PORT = 9


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach one server. A server listens once for each part of the parameters."""

    node: str
    local: dict[str, str]
    """Unix sockets, by part."""
    remote: dict[str, str] = {}
    """TCP addresses, by part; empty if the run has one node."""
    certificate: str = ""
    token: str = ""
    """Empty if workers have a token from their environment."""

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Endpoint:
        """
        Raises:
            StrataError: It is not an endpoint.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise StrataError(f"a parameter server published a malformed endpoint: {error}") from None

    def address_for(self, node: str, part: str) -> str:
        """Return the address for a worker on `node`.

        Raises:
            StrataError: The server cannot be reached from there.
        """
        if node == self.node:
            return self.local[part]
        if part not in self.remote:
            raise StrataError(f"the parameter server on {self.node} listens only on its own node, not for {node}")
        return self.remote[part]

    def client_token(self) -> str:
        return self.token or ClientSecurity().current_token()

    def client_context(self) -> ssl.SSLContext | None:
        """Return the TLS context that trusts this server's certificate alone."""
        if not self.certificate:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=self.certificate)
        return context


def node_of(identity: Identity) -> str:
    """Return a name that processes share if they can share memory."""
    return f"{socket.gethostname()}/{identity.node_rank}"


class Security(msgspec.Struct, frozen=True, kw_only=True):
    """The token and TLS of a server."""

    guard: Guard
    published_token: str = ""
    context: ssl.SSLContext | None = None
    certificate: str = ""

    @classmethod
    def create(cls, directory: Path, host: str) -> Security:
        """Create a certificate for `host` in `directory`; without a host, only the token."""
        own = ClientSecurity().current_token()
        token = own or secrets.token_hex(32)
        grants = (Grant(Role.WORKER, token.encode()),)
        guard = Guard(lambda: grants)
        published = "" if own else token
        if not host:
            return cls(guard=guard, published_token=published)
        now = datetime.now(UTC)
        authority = issue_authority(now=now, days=DAYS)
        issued = issue(authority, "strata parameter server", hosts=[host], now=now, days=DAYS)
        key, chain = directory / "server.key", directory / "server.crt"
        key.touch(mode=0o600)
        key.write_bytes(pem(issued, "key"))
        chain.write_bytes(pem(issued, "crt"))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chain, key)
        return cls(
            guard=guard,
            published_token=published,
            context=context,
            certificate=pem(authority, "crt").decode(),
        )


def address_towards(host: str) -> str:
    """Return the address of this machine from which packets to `host` leave; nothing is sent."""
    family = socket.getaddrinfo(host, _PROBE_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family[0], socket.SOCK_DGRAM) as probe:
        probe.connect(family[4])
        name: str = probe.getsockname()[0]
        return name
