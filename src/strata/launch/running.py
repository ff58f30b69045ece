"""A run on this machine, from the first process to the last: coordinator, agent, signals, and a door for requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from strata.coordinator.client import AsyncCoordinatorClient
from strata.coordinator.config import CoordinatorConfig, LeaseConfig
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.launch import control
from strata.launch.agent import Agent
from strata.launch.imports import preloads
from strata.launch.local import LocalWorkers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from strata.launch.run_directory import RunDirectory
    from strata.launch.showing import Shower
    from strata.launch.supervising import Finish

LEASE = LeaseConfig(heartbeat_s=0.25, suspicion_s=0.25, lease_s=5.0, tick_s=0.05, step_timeout_s=0.0)
"""On one machine a reset connection is a death, and a beat costs nothing. The agent itself watches for hung workers."""
SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


def run(directory: RunDirectory, shower: Shower) -> Finish:
    """Runs what the directory's spec says, or goes on with it, until its end.

    Raises:
        ConfigError: Another agent has the run.
    """
    with directory.lock(), _sockets() as sockets:
        config = CoordinatorConfig(state=str(directory.journal), lease=LEASE)
        with EmbeddedCoordinator(config) as coordinator:
            return asyncio.run(_run(directory, shower, coordinator.address, sockets / "control"))


async def _run(directory: RunDirectory, shower: Shower, coordinator: str, door: Path) -> Finish:
    spec, before = directory.spec, directory.status
    named = preloads(spec.script, is_module=spec.is_module, directory=spec.directory)
    variables = {**os.environ, **spec.variables}
    workers = LocalWorkers(preload=[*named, *spec.preload], is_warm=spec.is_warm, variables=variables)
    await workers.prepare()
    client = AsyncCoordinatorClient(coordinator)
    await client.connect()
    try:
        agent = Agent(
            spec,
            directory,
            workers,
            client,
            shower,
            coordinator=coordinator,
            control=str(door),
            last_attempt=before.attempt if before is not None else -1,
        )
        async with control.served(agent, door):
            with _signals(agent):
                return await agent.run()
    finally:
        await client.close()


@contextlib.contextmanager
def _sockets() -> Iterator[Path]:
    """A place for sockets: their paths must be short, and those of runs need not be."""
    place = Path(tempfile.mkdtemp(prefix="strata-run-"))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def _signals(agent: Agent) -> Iterator[None]:
    """Asked once, the workers save and stop; asked twice, they stop."""
    loop = asyncio.get_running_loop()
    for number, reason in SIGNALS.items():
        loop.add_signal_handler(number, agent.stop, reason)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
