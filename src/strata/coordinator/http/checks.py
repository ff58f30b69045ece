"""Checks before a request is routed: its `Host` header, the rate of its machine, and the size of its body.

A page of another site can make a browser call a server on loopback: its own name resolves to 127.0.0.1 (DNS rebinding),
so that the browser lets it read the answer. The browser still sends that name in `Host`. A coordinator without tokens
therefore answers only requests that name this machine. IP addresses cannot be rebound, and with tokens such a page has
no token to send.

FastAPI reads the whole body of a request before it runs any check of a route, that of the token included. Bodies are
therefore bounded in size and time here, for everyone.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from strata.coordinator.serve.admission import Bucket
from strata.errors import LimitExceeded
from strata.transport.addresses import parse_address

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from strata.coordinator.config import CoordinatorConfig, Limits

LOOPBACK = "localhost"
MAX_BODY_BYTES = 64 * 1024
BODY_WITHIN_S = 10.0
"""From the end of the headers to the end of the body."""
MAX_PEERS = 1_000
"""Peers whose rate is tracked; the least recent are dropped first."""


def own_names(config: CoordinatorConfig) -> frozenset[str]:
    """Return the names of this machine, and those that the config adds."""
    bound = parse_address(config.http, field="http").host
    return frozenset(_plain(name) for name in (LOOPBACK, bound, socket.gethostname(), *config.security.hosts))


def is_own(host: str, names: frozenset[str]) -> bool:
    """Whether a `Host` header names this machine."""
    name = _plain(host[: host.rindex("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0])
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name in names or name.endswith(f".{LOOPBACK}")
    return True


def _plain(name: str) -> str:
    return name.lower().rstrip(".")


class HostCheck:
    """Rejects requests for another host."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        names: frozenset[str],
        refuse: Callable[[str], Callable[[Scope, Receive, Send], Awaitable[None]]],
    ) -> None:
        self._app = app
        self._names = names
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = [value.decode("latin-1") for key, value in scope["headers"] if key == b"host"]
            foreign = next((host for host in hosts if not is_own(host, self._names)), None)
            if foreign is not None:
                await self._refuse(foreign)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuses the body of a request while it arrives, if it is too large or too slow."""

    def __init__(self, app: ASGIApp, *, within_s: float = BODY_WITHIN_S) -> None:
        self._app = app
        self._within_s = within_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        num_bytes, is_complete, is_answered = 0, False, False
        until_s = asyncio.get_running_loop().time() + self._within_s

        async def receive_bounded() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:  # what follows is that the client has gone
                return await receive()
            try:
                async with asyncio.timeout_at(until_s):
                    message = await receive()
            except TimeoutError:
                return refuse(408, f"the body did not arrive within {self._within_s:g} s")
            num_bytes += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if num_bytes > MAX_BODY_BYTES:
                return refuse(413, f"the body has more than {MAX_BODY_BYTES} bytes; send less")
            return message

        def refuse(status: int, reason: str) -> Message:
            if is_answered:  # by a route that needs no body, such as a stream of events
                return {"type": "http.disconnect"}
            raise HTTPException(status, reason, {"Connection": "close"})  # the rest of the body is not read

        async def send_noted(message: Message) -> None:
            nonlocal is_answered
            is_answered = True
            await send(message)

        await self._app(scope, receive_bounded, send_noted)


class RateLimit:
    """Limits the HTTP requests of one machine, so that a runaway dashboard does not slow down the workers."""

    def __init__(self, limits: Limits) -> None:
        self._per_s = limits.max_http_requests_per_s
        self._buckets: dict[str, Bucket] = {}

    def admit(self, peer: str, now_s: float) -> None:
        bucket = self._buckets.pop(peer, None) or Bucket(self._per_s, now_s)
        self._buckets[peer] = bucket
        if len(self._buckets) > MAX_PEERS:
            del self._buckets[next(iter(self._buckets))]
        if not bucket.take(1, now_s):
            raise LimitExceeded(
                f"more than limits.max_http_requests_per_s={self._per_s} requests per second from {peer}; slow down"
            )
