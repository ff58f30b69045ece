"""A run, from the first process to the last: coordinator, nodes, agent, signals, and a door for requests."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from strata.coordinator.client import AsyncCoordinatorClient
from strata.coordinator.config import CoordinatorConfig, LeaseConfig
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.launch import control
from strata.launch.agent import Agent
from strata.launch.multi_node import NodeAgent
from strata.launch.nodes.base import Nodes
from strata.launch.nodes.local import LocalNode
from strata.launch.record.stream import Streaming
from strata.transport import sockets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from strata.launch.nodes.ray_cluster import RayCluster
    from strata.launch.record.directory import RunDirectory
    from strata.launch.record.stream import Which
    from strata.launch.record.view import Shower
    from strata.launch.supervisor import Finish
    from strata.transport.credentials import ClientSecurity

LEASE = LeaseConfig(heartbeat_s=0.25, suspicion_s=0.25, lease_s=60.0, tick_s=0.05, step_timeout_s=0.0)
"""On one machine a reset connection is a death, and a beat costs nothing; but a library may keep the interpreter's lock
for many seconds, and is no less alive. The agent itself watches for hung workers.
"""


def run(directory: RunDirectory, shower: Shower, *, logs: Which = "none") -> Finish:
    """Runs what the directory's spec says, or goes on with it, until its end. `logs`: whose output is shown, too.

    Raises:
        ConfigError: Another agent has the run.
    """
    streaming = Streaming(directory, shower, logs)
    with (
        directory.lock(),
        sockets.place() as place,
        _cluster(directory) as cluster,
        _coordinator(directory, cluster, place.path) as (coordinator, security),
    ):
        try:
            return asyncio.run(_run(directory, streaming, coordinator, security, cluster, place.path / "control"))
        finally:
            streaming.look(is_last=True)


async def _run(
    directory: RunDirectory,
    shower: Streaming,
    coordinator: str,
    security: ClientSecurity | None,
    cluster: RayCluster | None,
    door: Path,
) -> Finish:
    streaming = asyncio.create_task(shower.run())
    try:
        if directory.spec.num_nodes > 1:
            return await NodeAgent(directory, shower, door).run()
        return await _lead(directory, shower, coordinator, security, cluster, door)
    finally:
        streaming.cancel()


async def _lead(
    directory: RunDirectory,
    shower: Shower,
    coordinator: str,
    security: ClientSecurity | None,
    cluster: RayCluster | None,
    door: Path,
) -> Finish:
    spec, before = directory.spec, directory.status
    async with (
        AsyncCoordinatorClient(coordinator, security=security) as client,
        _nodes(directory, cluster) as nodes,
    ):
        agent = Agent(
            spec,
            directory,
            nodes,
            client,
            shower,
            coordinator=coordinator,
            control=str(door),
            last_attempt=before.attempt if before is not None else -1,
            last_step=before.step if before is not None else 0,
        )
        async with control.served(agent, door):
            with control.signals(agent):
                return await agent.run()


@contextlib.contextmanager
def _cluster(directory: RunDirectory) -> Iterator[RayCluster | None]:
    """None: there is this machine alone, or agents on others."""
    if directory.spec.engine == "ray":
        from strata.launch.nodes.ray_cluster import connected  # noqa: PLC0415 - Ray is behind it

        with connected(directory) as cluster:
            yield cluster
    else:
        yield None


@contextlib.contextmanager
def _coordinator(
    directory: RunDirectory, cluster: RayCluster | None, place: Path
) -> Iterator[tuple[str, ClientSecurity | None]]:
    """Where it is reached, and what to show there: the one that the user has named, or one inside."""
    config = CoordinatorConfig(state=str(directory.journal), lease=LEASE)
    if directory.spec.coordinator:
        yield directory.spec.coordinator, None
    elif cluster is not None and not cluster.is_here:
        from strata.launch.nodes.reach import on_network  # noqa: PLC0415 - cryptography is behind it

        with on_network(config, cluster.address, place / "secrets") as reached:
            cluster.credentials = reached
            yield reached.address, reached.security
    else:
        with EmbeddedCoordinator(config, listen=f"unix:{place}/coordinator.sock") as coordinator:
            yield coordinator.address, None


@contextlib.asynccontextmanager
async def _nodes(directory: RunDirectory, cluster: RayCluster | None) -> AsyncIterator[Nodes]:
    """Where the workers go. The agent closes them."""
    if cluster is not None:
        async with cluster.nodes(directory) as nodes:
            yield nodes
        return
    node = LocalNode(directory)
    await node.prepare()
    yield Nodes(node)
