"""Server-sent events: one response per browser, which waits for news in the feed.

A response holds nothing but its place in the feed. `send` waits while the browser does not read; the HTTP server ends
the connection if that takes too long. If the feed overtakes a response, it ends, and the browser reconnects with a
place that the feed no longer has: then it is asked to load everything again.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from starlette.responses import Response

from strata.errors import LimitExceeded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.types import Receive, Scope, Send

    from strata.dashboard.live.feed import Feed

MAX_CLIENTS = 64
HEARTBEAT_S = 15.0
"""A comment is sent this often, so that proxies keep the connection and both sides notice its loss."""
RETRY_MS = 1_000
"""How long a browser waits before it reconnects."""


class Clients:
    """The open streams of one feed."""

    def __init__(self, feed: Feed, *, max_clients: int = MAX_CLIENTS, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.feed = feed
        self.heartbeat_s = heartbeat_s
        self.num = 0
        self.num_overtaken = 0
        """Streams that ended because their browser read too slowly."""
        self.is_stopped = False
        self._max_clients = max_clients
        self._waiting: set[asyncio.Future[None]] = set()

    def wake(self) -> None:
        """Let all streams look at the feed."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def stop(self) -> None:
        """End all streams."""
        self.is_stopped = True
        self.wake()

    def check_room(self) -> None:
        if self.num >= self._max_clients:
            raise LimitExceeded(f"{self._max_clients} pages get live updates already; close one, or try again later")

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        self.num += 1
        try:
            yield
        finally:
            self.num -= 1

    async def news(self, seq: int, disconnected: asyncio.Task[None]) -> None:
        """Return once there may be messages after `seq`, the client is gone, or a heartbeat is due."""
        if self.feed.last_seq > seq or self.is_stopped:
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait({future, disconnected}, timeout=self.heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting.discard(future)


class EventStream(Response):
    media_type = "text/event-stream"

    def __init__(
        self, clients: Clients, *, first: bytes, seq: int, is_allowed: Callable[[], bool], status_code: int = 200
    ) -> None:
        """`first`: what to send at once; `seq`: the last message that the client has; `is_allowed`: whether the token
        of the request is still valid.
        """
        super().__init__(status_code=status_code, headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._clients = clients
        self._first = b"retry: %d\n\n" % RETRY_MS + first
        self._seq = seq
        self._is_allowed = is_allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        disconnected = asyncio.ensure_future(_disconnect(receive))
        try:
            with self._clients.joined():
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await self._send_all(send, disconnected)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            disconnected.cancel()
            await asyncio.gather(disconnected, return_exceptions=True)

    async def _send_all(self, send: Send, disconnected: asyncio.Task[None]) -> None:
        clients, feed = self._clients, self._clients.feed
        body = self._first
        while True:
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await clients.news(self._seq, disconnected)
            if disconnected.done() or clients.is_stopped or not self._is_allowed():
                return
            if not feed.has_since(self._seq):
                clients.num_overtaken += 1
                return
            messages = feed.since(self._seq)
            self._seq = feed.last_seq
            body = b"".join(message.frame for message in messages) or b": still here\n\n"


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
