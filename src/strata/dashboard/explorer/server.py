"""`strata dashboard`: serves the explorer without a coordinator.

The protections are those of the coordinator's HTTP server: bounded connections, a check of the `Host` header while no
tokens are required, and tokens with TLS for every address that other machines can reach.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException

from strata import errors
from strata._version import __version__
from strata.clock import SystemClock
from strata.coordinator.config import CoordinatorConfig, Limits, SecurityConfig
from strata.coordinator.http.checks import HostCheck, RateLimit, own_names
from strata.coordinator.http.models import ErrorBody, Problem
from strata.coordinator.http.server import make_server
from strata.coordinator.serve.listener import require_safe, serve_until_shutdown
from strata.dashboard.explorer.routes import make_router
from strata.errors import ConfigError
from strata.transport.addresses import Address
from strata.transport.tokens import METADATA_KEY, Guard, Role, grants_from, require

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import uvicorn
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from strata.dashboard.explorer.limits import ExplorerConfig
    from strata.dashboard.explorer.places import Places

STATIC = Path(__file__).parents[1] / "static"
"""The built page; absent until `make web` has built it."""
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_STATUS_OF = {errors.Unauthenticated: 401, errors.PermissionRefused: 403, errors.LimitExceeded: 429}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where `strata dashboard` listens, and who may connect."""

    host: str = "127.0.0.1"
    port: int = 51052
    """0 picks a free port."""
    security: SecurityConfig = field(default_factory=SecurityConfig)

    @property
    def address(self) -> Address:
        return Address(self.host, self.port)


def make_explorer_app(
    places: Places, guard: Guard, *, names: frozenset[str], config: ExplorerConfig, static: Path = STATIC
) -> FastAPI:
    """Return the application: the explorer's routes, guarded, and the page."""
    router = make_router(places, config=config)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        router.close()
        places.close()

    app = FastAPI(
        title="Strata explorer",
        version=__version__,
        description="Checkpoints and their tensors. Nothing here changes a checkpoint.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    rate_limit, clock = RateLimit(Limits()), SystemClock()

    async def limit_rate(request: Request) -> None:
        rate_limit.admit(request.client.host if request.client else "", clock.monotonic_s())

    async def reader(request: Request) -> None:
        require(guard.role_of(request.headers.get(METADATA_KEY, "")), Role.READER, request.url.path)

    guarded = APIRouter(dependencies=[Depends(limit_rate), Depends(reader)])
    guarded.include_router(router)
    app.include_router(guarded)
    _add_page(app, static)
    for kind in (errors.StrataError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _refuse)
    app.add_middleware(SafeHeaders)
    if guard.is_open:
        app.add_middleware(HostCheck, names=names, refuse=_refuse_host)
    return app


def _add_page(app: FastAPI, static: Path) -> None:
    if (static / "index.html").is_file():
        app.mount("/", StaticFiles(directory=static, html=True), name="page")
        return

    @app.get("/", response_class=PlainTextResponse, include_in_schema=False)
    async def hint() -> str:
        return (
            "The explorer's API is below /api/explorer; /openapi.json describes it.\n"
            "This installation has no page: build it with `make web`, or install a release.\n"
        )


class SafeHeaders:
    """Adds the headers that keep a browser from running or sharing what it was not meant to."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


def _error(code: int, kind: str, message: str, field: str = "", headers: dict[str, str] | None = None) -> JSONResponse:
    body = ErrorBody(error=Problem(kind=kind, message=message, field=field))
    return JSONResponse(body.model_dump(), status_code=code, headers=headers)


async def _refuse(_request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        field = str(first["loc"][-1])
        return _error(422, "InvalidArgument", f"{field}: {first['msg']}; see /openapi.json", field)
    if isinstance(error, HTTPException):
        return _error(error.status_code, "RequestRefused", f"{error.detail}; see /openapi.json")
    assert isinstance(error, errors.StrataError)
    code = next((_STATUS_OF[kind] for kind in type(error).__mro__ if kind in _STATUS_OF), 500)
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(code)
    return _error(code, type(error).__name__, error.message, error.field, headers)


def _refuse_host(host: str) -> JSONResponse:
    message = (
        f"Host: {host[:100]!r} is not a name of this machine, so a page of another site may have sent the request; "
        "open the address that `strata dashboard` printed"
    )
    return _error(421, "RequestRefused", message, "Host")


class ExplorerServer:
    """Start it inside a running event loop; `start` returns its URL."""

    def __init__(self, places: Places, config: ServerConfig, explorer: ExplorerConfig) -> None:
        self._places, self._config, self._explorer = places, config, explorer
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen and serve.

        Raises:
            ConfigError: The address is in use, or other machines could reach it without tokens and TLS.
        """
        config = self._config
        guard = Guard(grants_from(config.security.tokens))
        require_safe(config.address, config.security, guard, field="host")
        names = own_names(CoordinatorConfig(http=str(config.address), security=config.security))
        app = make_explorer_app(self._places, guard, names=names, config=self._explorer)
        server = self._server = make_server(app, config.security)
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        try:
            listening = socket.create_server((config.host, config.port), family=family)
        except OSError as error:
            raise ConfigError(
                f"{config.address} cannot be bound ({error.strerror}); choose another --port, or 0 for a free one",
                field="port",
            ) from error
        self._task = asyncio.create_task(server.serve(sockets=[listening]), name="strata-explorer")
        host, port = listening.getsockname()[:2]
        return f"{'https' if config.security.certificate else 'http'}://{Address(host, port)}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
        if self._task is not None:
            await self._task


def run(places: Places, config: ServerConfig, explorer: ExplorerConfig, *, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: See `ExplorerServer.start`.
    """
    asyncio.run(serve_until_shutdown(lambda: ExplorerServer(places, config, explorer), announce))
