"""The coordinator process: gRPC, HTTP, journal and leadership on one event loop.

`CoordinatorServer` also runs inside other processes (see `embedded`).
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from grpc_health.v1 import health, health_pb2

from strata.clock import SystemClock
from strata.coordinator import wire
from strata.coordinator.extension import HttpOptions
from strata.coordinator.journal import MemoryJournal, describe, open_journal, open_leadership
from strata.coordinator.serve.admission import AdmissionControl
from strata.coordinator.serve.backend import EngineBackend
from strata.coordinator.serve.engine import Engine
from strata.coordinator.serve.leader import STARTING, Candidate, LeaseKeeper
from strata.coordinator.serve.listener import (
    GRACE_S,
    lock_socket,
    make_grpc_server,
    require_safe,
    serve_until_shutdown,
    start_frames,
    start_grpc_server,
)
from strata.coordinator.serve.service import METHODS
from strata.coordinator.serve.session import SessionHub
from strata.errors import ConfigError, NotLeader, StrataError
from strata.transport import forks
from strata.transport.addresses import Address, parse_address
from strata.transport.tokens import Guard, grants_from

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc
    import uvicorn

    from strata.clock import Clock
    from strata.coordinator.config import CoordinatorConfig
    from strata.coordinator.extension import Extension
    from strata.coordinator.journal import Leadership, Term
    from strata.coordinator.serve.session_frames import FramesServer
    from strata.errors import JournalFenced
    from strata.transport.sockets import SocketLock

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerAddresses:
    grpc: str
    http: str
    """Empty if HTTP is off."""
    state: str
    leads: bool = True
    """False for a standby."""


class CoordinatorServer:
    """Create and start it inside a running event loop; `stop` shuts down cleanly.

    The server listens before it leads. Until it leads, and after it has lost the leadership, every call fails with
    `NotLeader`.
    """

    def __init__(
        self, config: CoordinatorConfig, *, clock: Clock | None = None, http: HttpOptions | None = None
    ) -> None:
        self._config = config
        self._http_options = http or HttpOptions()
        self._clock = clock or SystemClock()
        self._engine: Engine | None = None
        self._hub: SessionHub | None = None
        self._grpc: grpc.aio.Server | None = None
        self._lock: SocketLock | None = None
        self._health = health.aio.HealthServicer()
        self._frames: FramesServer | None = None
        self._http: uvicorn.Server | None = None
        self._http_task: asyncio.Task[None] | None = None
        self._extensions: list[Extension] = []
        """Those that were started."""
        self._leadership: Leadership | None = None
        self._candidate: Candidate | None = None
        self._keeper: LeaseKeeper | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.ended: asyncio.Future[StrataError] = asyncio.get_running_loop().create_future()
        """Set to the error that ended the server."""
        self.on_lead: Callable[[ServerAddresses], None] = lambda _: None
        """Called when a standby becomes the leader."""

    async def start(self) -> ServerAddresses:
        forks.use_grpc()
        config = self._config
        listen = parse_address(config.listen, field="listen")
        guard = Guard(grants_from(config.security.tokens))
        require_safe(listen, config.security, guard, field="listen")
        if config.http != "off":
            require_safe(_http_address(config), config.security, guard, field="http")
        try:
            self._leadership = open_leadership(config.state, config=config.leadership, clock=self._clock)
            self._engine = Engine(MemoryJournal(), config, self._clock)
            self._engine.leadership = self._leadership
            self._engine.standby = STARTING
            backend = EngineBackend(self._engine)
            admission = AdmissionControl(guard, config.limits, self._clock)
            hub = self._hub = SessionHub(backend, METHODS, admission, self._engine.metrics)
            server = make_grpc_server(backend, hub, admission, self._health)
            hub.refusal = self._engine.not_leader
            await self._set_health(serving=False)
            self._lock = lock_socket(listen)
            grpc_address = await start_grpc_server(server, str(listen), config.security)
            self._grpc = server
            self._frames = await start_frames(hub, config.frames, grpc_address, config.limits, config.security, guard)
            http_address = await self._start_http(hub, guard) if config.http != "off" else ""
            addresses = ServerAddresses(grpc_address, http_address, describe(config.state), leads=True)
            leads = await self._run_for_leader(addresses)
        except BaseException:
            await self.stop()
            raise
        return addresses if leads else replace(addresses, leads=False)

    async def stop(self) -> None:
        if self._candidate is not None:
            self._candidate.resign()
        for task in self._tasks:
            await task
        self._tasks.clear()
        if self._engine is not None:
            await self._engine.stop_watching()
        if self._hub is not None:
            self._hub.leave()
        if self._frames is not None:
            await self._frames.stop()
            self._frames = None
        if self._grpc is not None:
            await self._health.enter_graceful_shutdown()
            await self._grpc.stop(GRACE_S)
            self._grpc = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        await self._stop_http()
        if self._engine is not None:
            await self._engine.stop()
            self._engine = None
        if self._keeper is not None:
            await asyncio.to_thread(self._keeper.stop)
            self._keeper = None
        if self._leadership is not None:
            # Released last, so that the next leader finds everything that we acknowledged.
            await asyncio.to_thread(self._leadership.release)
            self._leadership.close()
            self._leadership = None

    # -- leading ---------------------------------------------------------------------------------------------------

    async def _run_for_leader(self, addresses: ServerAddresses) -> bool:
        """Return whether this coordinator leads; a standby may lead later."""
        assert self._leadership is not None
        config = self._config
        candidate = Candidate(
            self._leadership, address=config.advertise or addresses.grpc, poll_s=config.leadership.poll_s
        )
        self._candidate = candidate
        if config.standby:
            term = await candidate.wait_once(self._stand_by)
        else:
            term = await candidate.lead_or_raise(addresses.state)
        if term is not None:
            await self._lead(term)
        else:
            self._tasks.append(asyncio.create_task(self._lead_later(candidate, addresses), name="strata-standby"))
        self._tasks.append(asyncio.create_task(self._watch_health(candidate), name="strata-health"))
        return term is not None

    def _stand_by(self, error: NotLeader) -> None:
        assert self._engine is not None
        self._engine.standby = error

    async def _lead_later(self, candidate: Candidate, addresses: ServerAddresses) -> None:
        try:
            term = await candidate.wait(self._stand_by)
            if term is None:
                return
            await self._lead(term)
        except StrataError as error:
            self._end(error)
            return
        log.warning("this coordinator is now the leader (term %d)", term.number)
        self.on_lead(addresses)

    async def _lead(self, term: Term) -> None:
        assert self._engine is not None
        assert self._leadership is not None
        loop = asyncio.get_running_loop()
        self._engine.on_fenced = self._lose
        self._keeper = LeaseKeeper(self._leadership, lambda error: loop.call_soon_threadsafe(self._lose, error))
        self._keeper.start()
        config = self._config
        self._engine.journal = open_journal(
            config.state, config=config.journal, term=term, leadership=config.leadership
        )
        self._engine.start()
        await self._set_health(serving=True)

    def _lose(self, error: JournalFenced) -> None:
        """Stop answering and close all sessions: another coordinator leads."""
        log.error("%s", error)
        if self._engine is not None:
            self._engine.standby = NotLeader(
                "this coordinator has lost its leadership; try the next address in your list"
            )
        if self._hub is not None:
            self._hub.leave()
        self._end(error)

    def _end(self, error: StrataError) -> None:
        if not self.ended.done():
            self.ended.set_result(error)

    # -- health ----------------------------------------------------------------------------------------------------

    async def _watch_health(self, candidate: Candidate) -> None:
        """Report NOT_SERVING to load balancers while calls are rejected."""
        assert self._engine is not None
        reported: bool | None = None
        while not await candidate.resigned_within(self._config.lease.tick_s):
            serving = self._engine.refusal is None
            if serving is not reported:
                await self._set_health(serving=serving)
                reported = serving

    async def _set_health(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", wire.SERVICE):
            await self._health.set(name, status)

    # -- HTTP ------------------------------------------------------------------------------------------------------

    async def _start_http(self, hub: SessionHub, guard: Guard) -> str:
        assert self._engine is not None
        address = _http_address(self._config)
        for extension in self._http_options.extensions:
            extension.start(self._engine, hub)
            self._extensions.append(extension)
        if not self._http_options.is_lazy:
            self._http = self._make_http(hub, guard)
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            # Listen now: clients that connect before uvicorn is ready wait in the backlog of the socket.
            listening = socket.create_server((address.host, address.port), family=family)
        except OSError as error:
            raise ConfigError(
                f"http={self._config.http!r} cannot be bound ({error.strerror}); choose another port or 'off'",
                field="http",
            ) from error
        self._http_task = asyncio.create_task(self._serve_http(listening, hub, guard), name="strata-http")
        host, port = listening.getsockname()[:2]
        return f"{'https' if self._config.security.certificate else 'http'}://{Address(host, port)}"

    def _make_http(self, hub: SessionHub, guard: Guard) -> uvicorn.Server:
        from strata.coordinator.http import make_app, make_server  # noqa: PLC0415 - only needed to serve HTTP

        assert self._engine is not None
        app = make_app(self._engine, hub, guard, self._http_options.extensions)
        return make_server(app, self._config.security, is_private=self._http_options.is_private)

    def _load_http(self) -> None:
        """Import FastAPI and the extensions, on another thread: the workers of the run must be answered meanwhile."""
        importlib.import_module("strata.coordinator.http")
        for extension in self._http_options.extensions:
            extension.load()

    async def _stop_http(self) -> None:
        while self._extensions:  # first: a response that never ends would keep the server from stopping
            await self._extensions.pop().stop()
        if self._http_task is None:
            return
        if self._http is not None:
            self._http.should_exit = True
            await self._http_task
        else:  # no client has connected yet
            self._http_task.cancel()
            await asyncio.gather(self._http_task, return_exceptions=True)
        self._http = self._http_task = None

    async def _serve_http(self, listening: socket.socket, hub: SessionHub, guard: Guard) -> None:
        """Serve HTTP; if it is lazy, from the first connection on, which waits in the backlog meanwhile."""
        with listening:
            if self._http is None:
                await _readable(listening)
                await asyncio.to_thread(self._load_http)
                self._http = self._make_http(hub, guard)
            await self._http.serve(sockets=[listening])


async def _readable(listening: socket.socket) -> None:
    """Return when a client has connected."""
    loop = asyncio.get_running_loop()
    connected: asyncio.Future[None] = loop.create_future()

    def notice() -> None:
        if not connected.done():
            connected.set_result(None)

    loop.add_reader(listening, notice)
    try:
        await connected
    finally:
        loop.remove_reader(listening)


def _http_address(config: CoordinatorConfig) -> Address:
    address = parse_address(config.http, field="http")
    if address.path:
        raise ConfigError(f"http={config.http!r} is a Unix socket; write HOST:PORT or 'off'", field="http")
    return address


def run(
    config: CoordinatorConfig, *, announce: Callable[[ServerAddresses], None], http: HttpOptions | None = None
) -> None:
    """Serve until SIGTERM or SIGINT; a standby is announced again when it becomes the leader.

    Raises:
        JournalFenced: Another coordinator has become the leader.
    """
    asyncio.run(_run(config, announce, http))


async def _run(
    config: CoordinatorConfig, announce: Callable[[ServerAddresses], None], http: HttpOptions | None
) -> None:
    server = CoordinatorServer(config, http=http)
    server.on_lead = announce
    await serve_until_shutdown(lambda: server, announce, ended=server.ended)
