"""Parse addresses: `HOST:PORT`, `http://HOST:PORT`, `unix:PATH`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    path: str = ""
    """The path of a Unix socket; host and port are then empty."""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_number(self) -> bool:
        """Whether the host is an IP address, which needs no DNS lookup."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True

    @property
    def is_local(self) -> bool:
        """Whether the address is reachable from this machine only."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_addresses(text: str | Sequence[str], *, field: str) -> list[Address]:
    """Parse one or several addresses, given as a list or as text separated by commas."""
    parts = text.split(",") if isinstance(text, str) else list(text)
    if not parts:
        raise ConfigError(f"{field} contains no address; write one or more HOST:PORT", field=field)
    return [parse_address(part.strip(), field=field) for part in parts]


def parse_address(text: str, *, field: str) -> Address:
    plain = text.removeprefix("http://").removeprefix("grpc://").rstrip("/")
    if plain.startswith("unix:"):
        path = plain.removeprefix("unix:")
        path = path.removeprefix("//")
        if not path:
            raise ConfigError(f"{field}={text!r} has no path; write unix:PATH", field=field)
        return Address("", 0, path)
    host, colon, port = plain.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{field}={text!r} is not an address; write HOST:PORT or unix:PATH", field=field)
    return Address(host, int(port))
