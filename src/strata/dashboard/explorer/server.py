"""`strata dashboard`: serves the explorer and the view of studies without a coordinator.

Login, page and protections are those of the coordinator: bounded connections, a check of the `Host` header
while no tokens are required, and tokens with TLS for every address that other machines can reach.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from fastapi import FastAPI, Request

from strata._version import __version__
from strata.clock import SystemClock
from strata.coordinator.config import CoordinatorConfig, Limits, SecurityConfig
from strata.coordinator.http.access import make_doors
from strata.coordinator.http.checks import BodyLimit, HostCheck, RateLimit, own_names
from strata.coordinator.http.problems import PROBLEMS, add_handlers, refuse_host
from strata.coordinator.http.server import make_server
from strata.coordinator.serve.listener import require_safe, serve_until_shutdown
from strata.dashboard.explorer.routes import make_router
from strata.dashboard.extension import STATIC
from strata.dashboard.http.login import add_login
from strata.dashboard.http.pages import ApiHeaders, Pages, read_files
from strata.dashboard.http.sessions import Sessions
from strata.dashboard.studies.routes import add_studies
from strata.dashboard.studies.source import Studies
from strata.errors import ConfigError
from strata.transport.addresses import Address
from strata.transport.tokens import Guard, grants_from

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    import uvicorn

    from strata.dashboard.explorer.limits import ExplorerConfig
    from strata.dashboard.explorer.places import Places


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
    places: Places,
    guard: Guard,
    *,
    names: frozenset[str],
    config: ExplorerConfig,
    studies: Studies | None = None,
    static: Path = STATIC,
) -> FastAPI:
    """Return the application: the routes of the explorer and of studies, guarded, and the page."""
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

    def admit(request: Request) -> None:
        rate_limit.admit(request.client.host if request.client else "", clock.monotonic_s())

    doors = make_doors(guard, admit, problems=PROBLEMS)
    add_login(doors, Sessions(clock.monotonic_s))
    doors.guarded.include_router(router)
    add_studies(doors, studies or Studies())
    app.include_router(doors.guarded)
    app.include_router(doors.open)
    app.router.default = Pages(read_files(static), doors, app.router.default)
    add_handlers(app)
    app.add_middleware(ApiHeaders)
    app.add_middleware(BodyLimit)
    if guard.is_open:
        app.add_middleware(HostCheck, names=names, refuse=refuse_host)
    return app


class Site(Protocol):
    """What a server serves."""

    def make_app(self, guard: Guard, config: CoordinatorConfig) -> FastAPI:
        """Return the application; called once, on the event loop."""
        ...

    async def stop(self) -> None:
        """End open responses, and release what the application used, which is still served."""
        ...


class ExplorerSite:
    """Checkpoints and studies."""

    def __init__(self, places: Places, explorer: ExplorerConfig, studies: Studies) -> None:
        self._places, self._explorer, self._studies = places, explorer, studies

    def make_app(self, guard: Guard, config: CoordinatorConfig) -> FastAPI:
        names = own_names(config)
        return make_explorer_app(self._places, guard, names=names, config=self._explorer, studies=self._studies)

    async def stop(self) -> None:
        pass  # the application closes its places when it ends


class PageServer:
    """Start it inside a running event loop; `start` returns its URL."""

    def __init__(self, site: Site, config: ServerConfig) -> None:
        self._site, self._config = site, config
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
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        try:
            listening = socket.create_server((config.host, config.port), family=family)
        except OSError as error:
            raise ConfigError(
                f"{config.address} cannot be bound ({error.strerror}); choose another --port, or 0 for a free one",
                field="port",
            ) from error
        app = self._site.make_app(guard, CoordinatorConfig(http=str(config.address), security=config.security))
        server = self._server = make_server(app, config.security)
        self._task = asyncio.create_task(server.serve(sockets=[listening]), name="strata-explorer")
        host, port = listening.getsockname()[:2]
        return f"{'https' if config.security.certificate else 'http'}://{Address(host, port)}"

    async def stop(self) -> None:
        await self._site.stop()
        if self._server is not None:
            self._server.should_exit = True
        if self._task is not None:
            await self._task


def serve(site: Site, config: ServerConfig, *, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: See `PageServer.start`.
    """
    asyncio.run(serve_until_shutdown(lambda: PageServer(site, config), announce))
