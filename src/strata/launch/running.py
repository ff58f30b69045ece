"""A run, from the first process to the last: coordinator, nodes, agent, signals, and a door for requests."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from strata.coordinator.client import AsyncCoordinatorClient
from strata.coordinator.config import CoordinatorConfig, LeaseConfig
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.launch import control
from strata.launch.agent import Agent
from strata.launch.node import LocalNode
from strata.launch.nodes import Nodes
from strata.launch.several import NodeAgent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from strata.launch.run_directory import RunDirectory
    from strata.launch.showing import Shower
    from strata.launch.supervising import Finish

LEASE = LeaseConfig(heartbeat_s=0.25, suspicion_s=0.25, lease_s=60.0, tick_s=0.05, step_timeout_s=0.0)
"""On one machine a reset connection is a death, and a beat costs nothing; but a library may keep the interpreter's lock
for many seconds, and is no less alive. The agent itself watches for hung workers.
"""
_SOCKETS = "strata-run-"


def run(directory: RunDirectory, shower: Shower) -> Finish:
    """Runs what the directory's spec says, or goes on with it, until its end.

    Raises:
        ConfigError: Another agent has the run.
    """
    with directory.lock(), _sockets(directory) as sockets, _coordinator(directory) as coordinator:
        return asyncio.run(_run(directory, shower, coordinator, sockets / "control"))


async def _run(directory: RunDirectory, shower: Shower, coordinator: str, door: Path) -> Finish:
    spec, before = directory.spec, directory.status
    if spec.num_nodes > 1:
        return await NodeAgent(directory, shower, door).run()
    async with AsyncCoordinatorClient(coordinator) as client, _nodes(directory) as nodes:
        agent = Agent(
            spec,
            directory,
            nodes,
            client,
            shower,
            coordinator=coordinator,
            control=str(door),
            last_attempt=before.attempt if before is not None else -1,
        )
        async with control.served(agent, door):
            with control.signals(agent):
                return await agent.run()


@contextlib.contextmanager
def _coordinator(directory: RunDirectory) -> Iterator[str]:
    """Where it is reached: the one that the user has named, or one inside."""
    if directory.spec.coordinator:
        yield directory.spec.coordinator
    else:
        with EmbeddedCoordinator(CoordinatorConfig(state=str(directory.journal), lease=LEASE)) as coordinator:
            yield coordinator.address


@contextlib.asynccontextmanager
async def _nodes(directory: RunDirectory) -> AsyncIterator[Nodes]:
    """Where the workers go. The agent closes them."""
    node = LocalNode(directory)
    await node.prepare()
    yield Nodes(node)


@contextlib.contextmanager
def _sockets(directory: RunDirectory) -> Iterator[Path]:
    """A place for sockets: their paths must be short, and those of runs need not be. What an agent that was killed has
    left is removed.
    """
    before = directory.status
    if before is not None and (left := Path(before.control).parent).name.startswith(_SOCKETS):
        shutil.rmtree(left, ignore_errors=True)
    place = Path(tempfile.mkdtemp(prefix=_SOCKETS))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
