"""A coordinator inside this process: the same server and wire protocol, on a Unix socket private to this user."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from strata.coordinator.client._sync import shared_loop
from strata.coordinator.config import CoordinatorConfig
from strata.coordinator.server import CoordinatorServer
from strata.lifecycle import Home, at_exit
from strata.transport import sockets

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from strata.coordinator.extension import HttpOptions
    from strata.coordinator.server import ServerAddresses

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
"""Two seconds for calls in progress, the rest for the last commit of the journal."""


class EmbeddedCoordinator:
    """Runs until `stop` or process exit; clients of the same user on this machine connect to `address`.

    State is kept in memory unless the config sets `state`.
    """

    def __init__(
        self,
        config: CoordinatorConfig | None = None,
        *,
        listen: str = "",
        http: str = "off",
        options: HttpOptions | None = None,
    ) -> None:
        """Prepare the coordinator. `listen` is a socket path or HOST:PORT (other machines need TLS and tokens in the
        config); by default, a socket in a private directory. `http` is HOST:PORT or `off`, whatever the config says;
        `options` extend what is served there.
        """
        config = config or CoordinatorConfig(state="memory")
        self._place = sockets.place() if not listen else None
        self.address = f"unix:{self._place.path}/coordinator.sock" if self._place is not None else listen
        self._config = replace(config, listen=self.address, http=http, state=config.state or "memory")
        self._options = options
        self.http_address = ""
        """URL of the HTTP server once it is started; empty if HTTP is off."""
        self._server: CoordinatorServer | None = None
        self._loop = shared_loop()
        self._home = Home()
        self._withdraw_hook: Callable[[], None] = lambda: None

    def start(self) -> Self:
        try:
            self._server, addresses = self._loop.run(_started(self._config, self._options))
            self.address, self.http_address = addresses.grpc, addresses.http
        except BaseException:
            self.stop()
            raise
        self._withdraw_hook = at_exit(self.stop)
        return self

    def stop(self) -> None:
        """Stop the coordinator; later calls do nothing. In a forked child, does nothing: the parent owns the
        coordinator.
        """
        if not self._home.is_here:
            return
        self._withdraw_hook()
        server, self._server = self._server, None
        if server is not None:
            try:
                self._loop.run(server.stop(), timeout_s=STOP_TIMEOUT_S)
            except TimeoutError:
                log.warning(
                    "the coordinator at %s did not stop within %g s; check whether the disk of its journal responds",
                    self.address,
                    STOP_TIMEOUT_S,
                )
        if self._place is not None:
            self._place.remove()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


async def _started(config: CoordinatorConfig, options: HttpOptions | None) -> tuple[CoordinatorServer, ServerAddresses]:
    """Start a coordinator and return it with its actual addresses, with the real port for port 0."""
    server = CoordinatorServer(config, http=options)
    return server, await server.start()
