"""A coordinator inside this process: same server, same wire, on a Unix socket that only this user can open."""

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

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
"""Calls under way have two seconds, the journal's last commit the rest."""


class EmbeddedCoordinator:
    """Runs until `stop`, or until the process ends; `address` is for clients of this machine's same user.

    State is kept in memory, unless the config names a place for it.
    """

    def __init__(self, config: CoordinatorConfig | None = None, *, listen: str = "") -> None:
        """`listen`: a socket of the caller's, or HOST:PORT for other machines, with TLS and tokens in the config.
        Left out, it has a socket in a directory of its own.
        """
        config = config or CoordinatorConfig(state="memory")
        self._place = sockets.place() if not listen else None
        self.address = f"unix:{self._place.path}/coordinator.sock" if self._place is not None else listen
        self._config = replace(config, listen=self.address, http="off", state=config.state or "memory")
        self._server: CoordinatorServer | None = None
        self._loop = shared_loop()
        self._home = Home()
        self._withdraw_hook: Callable[[], None] = lambda: None

    def start(self) -> Self:
        try:
            self._server, self.address = self._loop.run(_started(self._config))
        except BaseException:
            self.stop()
            raise
        self._withdraw_hook = at_exit(self.stop)
        return self

    def stop(self) -> None:
        """May be called again. Does nothing in a forked child: the coordinator is its parent's."""
        if not self._home.is_here:
            return
        self._withdraw_hook()
        server, self._server = self._server, None
        if server is not None:
            try:
                self._loop.run(server.stop(), timeout_s=STOP_TIMEOUT_S)
            except TimeoutError:
                log.warning(
                    "the coordinator at %s did not stop within %g s: does its journal's disk answer?",
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


async def _started(config: CoordinatorConfig) -> tuple[CoordinatorServer, str]:
    """And where it listens: port 0 has become a real one."""
    server = CoordinatorServer(config)
    return server, (await server.start()).grpc
