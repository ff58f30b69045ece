"""A coordinator as a process: gRPC, HTTP, journal, one event loop; or the same inside another process."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from strata.clock import SystemClock
from strata.coordinator import wire
from strata.coordinator.journal import MemoryJournal, describe, open_journal, open_leadership
from strata.coordinator.serve.admission import Door
from strata.coordinator.serve.backend import EngineBackend
from strata.coordinator.serve.engine import Engine
from strata.coordinator.serve.intake import Bodies
from strata.coordinator.serve.leader import STARTING, Candidate, LeaseKeeper
from strata.coordinator.serve.service import METHODS, abort, unary_handler
from strata.coordinator.serve.session import SessionHub
from strata.coordinator.serve.session_frames import FramesServer
from strata.coordinator.serve.session_grpc import Places, session_handler
from strata.errors import ConfigError, InvalidArgument, LimitExceeded, NotLeader, StrataError
from strata.transport import forks
from strata.transport.addresses import Address, parse_address
from strata.transport.channels import server_options
from strata.transport.credentials import server_credentials
from strata.transport.sockets import SocketLock
from strata.transport.tokens import Guard, grants_from

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import uvicorn

    from strata.clock import Clock
    from strata.coordinator.config import CoordinatorConfig, Limits, SecurityConfig
    from strata.coordinator.journal import Leadership, Term
    from strata.coordinator.serve.backend import Backend
    from strata.errors import JournalFenced

log = logging.getLogger(__name__)

A_co = TypeVar("A_co", covariant=True)
Context = grpc.aio.ServicerContext[Any, Any]

GRACE_S = 2.0
"""How long calls under way have to end when the coordinator leaves."""


@dataclass(frozen=True, slots=True)
class ServerAddresses:
    grpc: str
    http: str
    """Empty when HTTP is off."""
    state: str
    leads: bool = True
    """False: it stands by."""


class CoordinatorServer:
    """Make and start it inside a running event loop; `stop` leaves cleanly.

    It listens first and leads then: until it does, and after it has lost the leadership, calls are told `NotLeader`.
    """

    def __init__(self, config: CoordinatorConfig, *, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._engine: Engine | None = None
        self._hub: SessionHub | None = None
        self._grpc: grpc.aio.Server | None = None
        self._lock: SocketLock | None = None
        self._health = health.aio.HealthServicer()
        self._frames: FramesServer | None = None
        self._http: uvicorn.Server | None = None
        self._http_task: asyncio.Task[None] | None = None
        self._leadership: Leadership | None = None
        self._candidate: Candidate | None = None
        self._keeper: LeaseKeeper | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.ended: asyncio.Future[StrataError] = asyncio.get_running_loop().create_future()
        """Set when it cannot go on: why."""
        self.on_lead: Callable[[ServerAddresses], None] = lambda _: None
        """Called when a standby has become the leader."""

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
            door = Door(guard, config.limits, self._clock)
            hub = self._hub = SessionHub(backend, METHODS, door, self._engine.metrics)
            server = make_grpc_server(backend, hub, door, self._health)
            hub.refusal = self._engine.not_leader
            await self._tell_health(serving=False)
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
        if self._http is not None and self._http_task is not None:
            self._http.should_exit = True
            await self._http_task
            self._http = None
        if self._engine is not None:
            await self._engine.stop()
            self._engine = None
        if self._keeper is not None:
            await asyncio.to_thread(self._keeper.stop)
            self._keeper = None
        if self._leadership is not None:
            # The last thing: the next leader finds all that we acknowledged.
            await asyncio.to_thread(self._leadership.release)
            self._leadership.close()
            self._leadership = None

    # -- leading ---------------------------------------------------------------------------------------------------

    async def _run_for_leader(self, addresses: ServerAddresses) -> bool:
        """Whether it leads; a standby may do so later."""
        assert self._leadership is not None
        config = self._config
        candidate = Candidate(
            self._leadership, address=config.advertise or addresses.grpc, poll_s=config.leadership.poll_s
        )
        self._candidate = candidate
        if config.standby:
            term = await candidate.wait_once(self._stand_by)
        else:
            term = await candidate.insist(addresses.state)
        if term is not None:
            await self._lead(term)
        else:
            self._tasks.append(asyncio.create_task(self._lead_later(candidate, addresses), name="strata-standby"))
        self._tasks.append(asyncio.create_task(self._watch_health(candidate), name="strata-health"))
        return term is not None

    def _stand_by(self, words: NotLeader) -> None:
        assert self._engine is not None
        self._engine.standby = words

    async def _lead_later(self, candidate: Candidate, addresses: ServerAddresses) -> None:
        try:
            term = await candidate.wait(self._stand_by)
            if term is None:
                return
            await self._lead(term)
        except StrataError as error:
            self._end(error)
            return
        log.warning("this coordinator leads now (term %d)", term.number)
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
        await self._tell_health(serving=True)

    def _lose(self, error: JournalFenced) -> None:
        """Another one leads: nothing more is said here, and who waits is sent away."""
        log.error("%s", error)
        if self._engine is not None:
            self._engine.standby = NotLeader(
                "this coordinator has lost its leadership; try the next address of your list"
            )
        if self._hub is not None:
            self._hub.leave()
        self._end(error)

    def _end(self, error: StrataError) -> None:
        if not self.ended.done():
            self.ended.set_result(error)

    # -- health ----------------------------------------------------------------------------------------------------

    async def _watch_health(self, candidate: Candidate) -> None:
        """A coordinator that refuses calls says so to whoever balances them."""
        assert self._engine is not None
        said: bool | None = None
        while not await candidate.resigned_within(self._config.lease.tick_s):
            serving = self._engine.refusal is None
            if serving is not said:
                await self._tell_health(serving=serving)
                said = serving

    async def _tell_health(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", wire.SERVICE):
            await self._health.set(name, status)

    # -- HTTP ------------------------------------------------------------------------------------------------------

    async def _start_http(self, hub: SessionHub, guard: Guard) -> str:
        from strata.coordinator.http import make_app, make_server  # noqa: PLC0415 - only who serves HTTP pays for it

        assert self._engine is not None
        address = _http_address(self._config)
        server = make_server(make_app(self._engine, hub, guard), self._config.security)
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            # From here on nobody is turned away: who connects before uvicorn is ready waits in the socket's queue.
            listening = socket.create_server((address.host, address.port), family=family)
        except OSError as error:
            raise ConfigError(
                f"http={self._config.http!r} cannot be bound ({error.strerror}); choose another port, or 'off'",
                field="http",
            ) from error
        self._http = server
        self._http_task = asyncio.create_task(server.serve(sockets=[listening]), name="strata-http")
        host, port = listening.getsockname()[:2]
        return f"{'https' if self._config.security.certificate else 'http'}://{Address(host, port)}"


HEALTH_BODIES = 8
"""Health checks, for which nobody needs a token, whose requests are received at once."""
MAX_WATCHES = 256
"""Callers that are told when the health changes."""


def health_handlers(servicer: health.aio.HealthServicer) -> grpc.GenericRpcHandler:
    """Health for everybody, bounded: a request is read as unary calls are, and held as little."""
    bodies = Bodies(HEALTH_BODIES)
    num_watches = 0

    async def request(context: Context) -> Any:
        body = await bodies.receive(context)
        try:
            return health_pb2.HealthCheckRequest.FromString(body)
        except DecodeError:
            raise InvalidArgument("the message is not a grpc.health.v1.HealthCheckRequest") from None

    async def check(_requests: Any, context: Context) -> Any:
        try:
            asked = await request(context)
        except StrataError as error:
            await abort(context, error.with_traceback(None))
        return await servicer.Check(asked, context)

    async def watch(_requests: Any, context: Context) -> None:
        nonlocal num_watches
        num_watches += 1
        try:
            if num_watches > MAX_WATCHES:
                raise LimitExceeded(f"{MAX_WATCHES} callers watch the health already; call Check instead")
            await servicer.Watch(await request(context), context)
        except StrataError as error:
            await abort(context, error.with_traceback(None))
        finally:
            num_watches -= 1

    serialize = health_pb2.HealthCheckResponse.SerializeToString
    return grpc.method_handlers_generic_handler(
        health.SERVICE_NAME,
        {
            "Check": grpc.stream_unary_rpc_method_handler(check, response_serializer=serialize),
            "Watch": grpc.stream_stream_rpc_method_handler(watch, response_serializer=serialize),
        },
    )


class GuardedReflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # its package has no types
    """What the service looks like, for those who may at least read."""

    def __init__(self, names: tuple[str, ...], door: Door, places: Places) -> None:
        super().__init__(names)
        self._door = door
        self._places = places

    async def ServerReflectionInfo(  # noqa: N802 - gRPC's name
        self, requests: Any, context: Context
    ) -> AsyncIterator[Any]:
        try:
            with self._places.one(self._door.role(context)):
                async for answer in super().ServerReflectionInfo(requests, context):
                    yield answer
        except StrataError as error:
            await abort(context, error.with_traceback(None))


def make_grpc_server(
    backend: Backend, hub: SessionHub, door: Door, health_servicer: health.aio.HealthServicer
) -> grpc.aio.Server:
    """The service, unary and framed, with health and reflection; in a coordinator and in a relay alike."""
    places = Places(backend.limits)
    options = server_options(
        max_message_bytes=backend.limits.max_message_bytes, max_request_bytes=places.max_message_bytes
    )
    server = grpc.aio.server(options=options)
    handlers = {method.name: unary_handler(method, backend, door, hub.metrics) for method in METHODS}
    handlers["Session"] = session_handler(hub, door, places)
    service = grpc.method_handlers_generic_handler(wire.SERVICE, handlers)
    server.add_generic_rpc_handlers((service, health_handlers(health_servicer)))
    names = (wire.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(GuardedReflection(names, door, places), server)
    return server


def lock_socket(address: Address) -> SocketLock | None:
    """So that no other coordinator or relay serves there; None: it is a port, which has no need of it.

    Raises:
        ConfigError: Another one does.
    """
    return SocketLock(address.path, field="listen") if address.path else None


async def start_grpc_server(server: grpc.aio.Server, address: str, security: SecurityConfig) -> str:
    """Where it listens: port 0 has become a number."""
    try:
        port = add_port(server, address, security)
    except RuntimeError as error:
        raise ConfigError(
            f"listen={address!r} cannot be bound ({error}); is another coordinator running? choose another port",
            field="listen",
        ) from error
    await server.start()
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


async def start_frames(
    hub: SessionHub, wanted: str, grpc_address: str, limits: Limits, security: SecurityConfig, guard: Guard
) -> FramesServer | None:
    """Beside the gRPC server; None: it is off."""
    if wanted == "off":
        return None
    if wanted != "auto":
        require_safe(parse_address(wanted, field="frames"), security, guard, field="frames")
    server = FramesServer(hub, limits)
    await server.start(wanted, grpc_address, security)
    return server


def add_port(server: grpc.aio.Server, address: str, security: SecurityConfig) -> int:
    if not security.certificate or address.startswith("unix:"):
        return server.add_insecure_port(address)
    credentials = server_credentials(security.certificate, security.key, security.client_ca)
    return server.add_secure_port(address, credentials)


def require_safe(address: Address, security: SecurityConfig, guard: Guard, *, field: str) -> None:
    """Nothing listens where others can reach it without tokens and TLS, unless that is said to be meant."""
    if address.is_local or security.insecure or (security.certificate and not guard.is_open):
        return
    lacking = [name for name, has in (("tokens", not guard.is_open), ("TLS", bool(security.certificate))) if not has]
    raise ConfigError(
        f"{field}={str(address)!r} can be reached from other machines, and has no {' and no '.join(lacking)}; "
        "give --tokens, --tls-cert and --tls-key (`strata certs` makes a set), or say --insecure if it is meant",
        field=field,
    )


def _http_address(config: CoordinatorConfig) -> Address:
    address = parse_address(config.http, field="http")
    if address.path:
        raise ConfigError(f"http={config.http!r} is a Unix socket; write HOST:PORT, or 'off'", field="http")
    return address


def run(config: CoordinatorConfig, *, announce: Callable[[ServerAddresses], None]) -> None:
    """Serves until SIGTERM or SIGINT; a standby is announced a second time when it leads.

    Raises:
        JournalFenced: Another coordinator has become the leader.
    """
    asyncio.run(_run(config, announce))


async def _run(config: CoordinatorConfig, announce: Callable[[ServerAddresses], None]) -> None:
    server = CoordinatorServer(config)
    server.on_lead = announce
    await until_told_to_leave(lambda: server, announce, ended=server.ended)


class Server(Protocol[A_co]):
    async def start(self) -> A_co: ...
    async def stop(self) -> None: ...


def settle_memory() -> None:
    """Spares the garbage collector the modules and what was read at start, and lets it look at the rest less often.

    Left as it is, it takes a fifth of an idle coordinator's time and now and then stops a barrier for 40 ms. Nearly
    everything here is freed by its reference count anyway.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


async def until_told_to_leave(
    make: Callable[[], Server[A_co]],
    announce: Callable[[A_co], None],
    *,
    ended: asyncio.Future[StrataError] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, or until `ended` says why it cannot go on; `announce` hears the addresses."""
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave.set)
    server = make()
    addresses = await server.start()
    settle_memory()
    leaving = asyncio.create_task(leave.wait())
    try:
        announce(addresses)
        ends: set[asyncio.Future[Any]] = {leaving} if ended is None else {leaving, ended}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        await server.stop()
    if ended is not None and ended.done():
        raise ended.result()
