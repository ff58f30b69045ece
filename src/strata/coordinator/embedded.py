"""A coordinator inside this process: same server, same wire, on a Unix socket that only this user can open."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from strata.coordinator.client._sync import shared_loop
from strata.coordinator.config import CoordinatorConfig
from strata.coordinator.server import CoordinatorServer

if TYPE_CHECKING:
    from types import TracebackType


class EmbeddedCoordinator:
    """Runs until `stop`; `address` is for clients of this machine's same user.

    State is kept in memory, unless the config names a place for it.
    """

    def __init__(self, config: CoordinatorConfig | None = None) -> None:
        config = config or CoordinatorConfig(state="memory")
        self._directory = Path(tempfile.mkdtemp(prefix="strata-"))
        self.address = f"unix:{self._directory / 'coordinator.sock'}"
        self._config = replace(config, listen=self.address, http="off", state=config.state or "memory")
        self._server: CoordinatorServer | None = None
        self._loop = shared_loop()

    def start(self) -> Self:
        try:
            self._server = self._loop.run(_started(self._config))
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        if self._server is not None:
            self._loop.run(self._server.stop())
            self._server = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


async def _started(config: CoordinatorConfig) -> CoordinatorServer:
    server = CoordinatorServer(config)
    await server.start()
    return server
