"""A coordinator as a process: gRPC, HTTP, journal, one event loop; or the same inside another process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from strata.clock import SystemClock
from strata.coordinator import wire
from strata.coordinator.backend import EngineBackend
from strata.coordinator.door import Door
from strata.coordinator.engine import Engine
from strata.coordinator.journal import describe, open_journal
from strata.coordinator.service import METHODS, unary_handler
from strata.coordinator.session import SessionHub
from strata.errors import ConfigError
from strata.transport.addresses import Address, parse_address
from strata.transport.channels import server_options
from strata.transport.credentials import server_credentials
from strata.transport.tokens import Guard, grants_from

if TYPE_CHECKING:
    from collections.abc import Callable

    import uvicorn

    from strata.clock import Clock
    from strata.coordinator.backend import Backend
    from strata.coordinator.config import CoordinatorConfig, SecurityConfig

log = logging.getLogger(__name__)

GRACE_S = 2.0
"""How long calls under way have to end when the coordinator leaves."""


@dataclass(frozen=True, slots=True)
class ServerAddresses:
    grpc: str
    http: str
    """Empty when HTTP is off."""
    state: str


class CoordinatorServer:
    """Start it inside a running event loop; `stop` leaves cleanly."""

    def __init__(self, config: CoordinatorConfig, *, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._engine: Engine | None = None
        self._hub: SessionHub | None = None
        self._grpc: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()
        self._http: uvicorn.Server | None = None
        self._http_task: asyncio.Task[None] | None = None

    async def start(self) -> ServerAddresses:
        config = self._config
        listen = parse_address(config.listen, field="listen")
        guard = Guard(grants_from(config.security.tokens))
        require_safe(listen, config.security, guard, field="listen")
        if config.http != "off":
            require_safe(_http_address(config), config.security, guard, field="http")
        try:
            journal = open_journal(config.state, config=config.journal)
            self._engine = Engine(journal, config, self._clock)
            self._engine.start()
            backend = EngineBackend(self._engine)
            door = Door(guard, config.limits, self._clock)
            hub = self._hub = SessionHub(backend, METHODS, door)
            grpc_address = await self._start_grpc(str(listen), backend, hub, door)
            http_address = await self._start_http(hub) if config.http != "off" else ""
        except BaseException:
            await self.stop()
            raise
        return ServerAddresses(grpc_address, http_address, describe(config.state))

    async def stop(self) -> None:
        if self._engine is not None:
            await self._engine.stop_watching()
        if self._hub is not None:
            self._hub.leave()
        if self._grpc is not None:
            await self._health.enter_graceful_shutdown()
            await self._grpc.stop(GRACE_S)
            self._grpc = None
        if self._http is not None and self._http_task is not None:
            self._http.should_exit = True
            await self._http_task
            self._http = None
        if self._engine is not None:
            await self._engine.stop()
            self._engine = None

    async def _start_grpc(self, address: str, backend: Backend, hub: SessionHub, door: Door) -> str:
        server = grpc.aio.server(options=server_options(max_message_bytes=self._config.limits.max_message_bytes))
        handlers = {method.name: unary_handler(method, backend, door) for method in METHODS}
        handlers["Session"] = hub.handler()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        await self._health.set(wire.SERVICE, health_pb2.HealthCheckResponse.SERVING)
        names = (wire.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            port = add_port(server, address, self._config.security)
        except RuntimeError as error:
            raise ConfigError(
                f"listen={address!r} cannot be bound ({error}); is another coordinator running? choose another port",
                field="listen",
            ) from error
        await server.start()
        self._grpc = server
        return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"

    async def _start_http(self, hub: SessionHub) -> str:
        import uvicorn  # noqa: PLC0415 - only a coordinator with HTTP pays for it

        from strata.coordinator.http import make_app  # noqa: PLC0415

        assert self._engine is not None
        address = _http_address(self._config)

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Any:
                yield  # signals are the coordinator's, not uvicorn's

        server = Server(uvicorn.Config(make_app(self._engine, hub), log_level="warning", access_log=False))
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
        return f"http://{Address(host, port)}"


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
    """Serves until SIGTERM or SIGINT."""
    asyncio.run(_run(config, announce))


async def _run(config: CoordinatorConfig, announce: Callable[[ServerAddresses], None]) -> None:
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave.set)
    server = CoordinatorServer(config)
    addresses = await server.start()
    try:
        announce(addresses)
        await leave.wait()
    finally:
        await server.stop()
