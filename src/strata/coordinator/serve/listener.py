"""Start a server's listeners, and serve until the process must stop.

A coordinator and a relay serve the same gRPC service, with the same health, reflection and security checks, so both
start here. Only their backends differ.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from strata.coordinator import wire
from strata.coordinator.serve.admission import BodySlots
from strata.coordinator.serve.service import METHODS, abort, unary_handler
from strata.coordinator.serve.session_frames import FramesServer
from strata.coordinator.serve.session_grpc import StreamSlots, session_handler
from strata.errors import ConfigError, InvalidArgument, LimitExceeded, StrataError
from strata.transport.addresses import parse_address
from strata.transport.channels import server_options
from strata.transport.credentials import server_credentials
from strata.transport.sockets import SocketLock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from strata.coordinator.config import Limits, SecurityConfig
    from strata.coordinator.serve.admission import AdmissionControl
    from strata.coordinator.serve.backend import Backend
    from strata.coordinator.serve.session import SessionHub
    from strata.transport.addresses import Address
    from strata.transport.tokens import Guard

A_co = TypeVar("A_co", covariant=True)
Context = grpc.aio.ServicerContext[Any, Any]

GRACE_S = 2.0
"""Seconds that calls in progress may still take when the server shuts down."""


HEALTH_BODIES = 8
"""Health-check requests received concurrently; these need no token."""
MAX_WATCHES = 256
"""Callers that may watch the health at the same time."""


def health_handlers(servicer: health.aio.HealthServicer) -> grpc.GenericRpcHandler:
    """Serve health checks to every caller, with the same bounds on requests as unary calls."""
    bodies = BodySlots(HEALTH_BODIES)
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
                raise LimitExceeded(f"{MAX_WATCHES} callers already watch the health; call Check instead")
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


class GuardedReflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # the package has no types
    """gRPC reflection for callers with the role reader or higher."""

    def __init__(self, names: tuple[str, ...], admission: AdmissionControl, slots: StreamSlots) -> None:
        super().__init__(names)
        self._admission = admission
        self._slots = slots

    async def ServerReflectionInfo(  # noqa: N802 - gRPC's name
        self, requests: Any, context: Context
    ) -> AsyncIterator[Any]:
        try:
            with self._slots.take(self._admission.role(context)):
                async for answer in super().ServerReflectionInfo(requests, context):
                    yield answer
        except StrataError as error:
            await abort(context, error.with_traceback(None))


def make_grpc_server(
    backend: Backend, hub: SessionHub, admission: AdmissionControl, health_servicer: health.aio.HealthServicer
) -> grpc.aio.Server:
    """Create the gRPC server of a coordinator or relay: unary calls, sessions, health and reflection."""
    slots = StreamSlots(backend.limits)
    options = server_options(
        max_message_bytes=backend.limits.max_message_bytes, max_request_bytes=slots.max_message_bytes
    )
    server = grpc.aio.server(options=options)
    handlers = {method.name: unary_handler(method, backend, admission, hub.metrics) for method in METHODS}
    handlers["Session"] = session_handler(hub, admission, slots)
    service = grpc.method_handlers_generic_handler(wire.SERVICE, handlers)
    server.add_generic_rpc_handlers((service, health_handlers(health_servicer)))
    names = (wire.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(GuardedReflection(names, admission, slots), server)
    return server


def lock_socket(address: Address) -> SocketLock | None:
    """Lock a Unix socket, so that no other process serves there; return None for a port, which needs no lock.

    Raises:
        ConfigError: Another process serves there.
    """
    return SocketLock(address.path, field="listen") if address.path else None


async def start_grpc_server(server: grpc.aio.Server, address: str, security: SecurityConfig) -> str:
    """Start the server and return its actual address, with the real port for port 0."""
    try:
        port = add_port(server, address, security)
    except RuntimeError as error:
        raise ConfigError(
            f"listen={address!r} cannot be bound ({error}); stop the process that uses it, or choose another port",
            field="listen",
        ) from error
    await server.start()
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


async def start_frames(
    hub: SessionHub, wanted: str, grpc_address: str, limits: Limits, security: SecurityConfig, guard: Guard
) -> FramesServer | None:
    """Start the frames server beside the gRPC server; return None if it is off."""
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
    """Reject an address that other machines can reach without tokens and TLS, unless `insecure` is set."""
    if address.is_local or security.insecure or (security.certificate and not guard.is_open):
        return
    lacking = [name for name, has in (("tokens", not guard.is_open), ("TLS", bool(security.certificate))) if not has]
    raise ConfigError(
        f"{field}={str(address)!r} is reachable from other machines without {' and '.join(lacking)}; "
        "pass --tokens, --tls-cert and --tls-key (`strata certs` creates them), or --insecure to allow it",
        field=field,
    )


class Startable(Protocol[A_co]):
    async def start(self) -> A_co: ...
    async def stop(self) -> None: ...


def settle_memory() -> None:
    """Exclude the objects created at startup from garbage collection, and collect the rest less often.

    With the defaults, the collector takes a fifth of an idle coordinator's time and occasionally delays a barrier by 40
    ms. Reference counts free nearly everything anyway.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


async def serve_until_shutdown(
    make: Callable[[], Startable[A_co]],
    announce: Callable[[A_co], None],
    *,
    ended: asyncio.Future[StrataError] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, or until `ended` is set to an error, which is raised. Pass the addresses to
    `announce`.
    """
    shutdown = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, shutdown.set)
    server = make()
    addresses = await server.start()
    settle_memory()
    waiting = asyncio.create_task(shutdown.wait())
    try:
        announce(addresses)
        ends: set[asyncio.Future[Any]] = {waiting} if ended is None else {waiting, ended}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        await server.stop()
    if ended is not None and ended.done():
        raise ended.result()
