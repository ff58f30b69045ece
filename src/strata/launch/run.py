"""One run, from start to end: its coordinator, nodes, agent, signal handlers and control socket."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.coordinator.client import AsyncCoordinatorClient
from strata.coordinator.config import CoordinatorConfig, LeaseConfig
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.launch import control
from strata.launch.agent import Agent
from strata.launch.multi_node import NodeAgent
from strata.launch.nodes.base import Nodes
from strata.launch.nodes.local import LocalNode
from strata.launch.record.log import LogStream
from strata.transport import sockets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from strata.coordinator.extension import HttpOptions
    from strata.launch.actions import Finish
    from strata.launch.nodes.ray_cluster import RayCluster
    from strata.launch.record.directory import RunDirectory
    from strata.launch.record.display import Display
    from strata.launch.record.log import Which
    from strata.transport.credentials import ClientSecurity

    PageOf = Callable[[RunDirectory], "RunPage"]
    """Returns the page of a run: layers above pass it down, because they know what a page shows."""

LEASE = LeaseConfig(heartbeat_s=0.25, suspicion_s=0.25, lease_s=60.0, tick_s=0.25, step_timeout_s=0.0)
"""Timeouts on one machine. A reset connection means a dead worker, and heartbeats are cheap; but a library may hold the
GIL for many seconds, so the lease is long. The agent itself watches for hung workers.
"""


@dataclass(slots=True, kw_only=True)
class RunPage:
    """A page that the coordinator of a run serves while the run is active."""

    listen: str
    """HOST:PORT; port 0 picks a free one."""
    options: HttpOptions
    announce: Callable[[str], None]
    """Called with the URL once it can be opened."""
    url: str = ""
    """Where it can be opened; empty before that."""


def run(directory: RunDirectory, display: Display, *, logs: Which = "none", page: RunPage | None = None) -> Finish:
    """Start or resume the run of this directory and return when it has ended. `logs`: whose output to show; `page`:
    served if the coordinator is inside this process and only reachable from this machine.

    Raises:
        ConfigError: Another agent leads the run.
    """
    stream = LogStream(directory, display, logs)
    with (
        directory.lock(),
        sockets.place() as place,
        cluster_of(directory) as cluster,
        coordinator_of(directory, cluster, place.path, page) as (coordinator, security),
    ):
        try:
            url = "" if page is None else page.url
            return asyncio.run(_run(directory, stream, coordinator, security, cluster, place.path / "control", url))
        finally:
            stream.update(is_last=True)


async def _run(
    directory: RunDirectory,
    stream: LogStream,
    coordinator: str,
    security: ClientSecurity | None,
    cluster: RayCluster | None,
    control_socket: Path,
    page: str,
) -> Finish:
    streaming = asyncio.create_task(stream.run())
    try:
        if directory.spec.num_nodes > 1:
            return await NodeAgent(directory, stream, control_socket).run()
        return await _lead(directory, stream, coordinator, security, cluster, control_socket, page)
    finally:
        streaming.cancel()


async def _lead(
    directory: RunDirectory,
    display: Display,
    coordinator: str,
    security: ClientSecurity | None,
    cluster: RayCluster | None,
    control_socket: Path,
    page: str,
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
            display,
            coordinator=coordinator,
            control=str(control_socket),
            page=page,
            last_attempt=before.attempt if before is not None else -1,
            last_step=before.step if before is not None else 0,
        )
        async with control.serve(agent, control_socket):
            with control.handle_signals(agent):
                return await agent.run()


@contextlib.contextmanager
def cluster_of(directory: RunDirectory) -> Iterator[RayCluster | None]:
    """Connect to Ray, if the run uses it."""
    if directory.spec.engine == "ray":
        from strata.launch.nodes.ray_cluster import connected  # noqa: PLC0415 - imports Ray

        with connected(directory) as cluster:
            yield cluster
    else:
        yield None


@contextlib.contextmanager
def coordinator_of(
    directory: RunDirectory, cluster: RayCluster | None, place: Path, page: RunPage | None = None
) -> Iterator[tuple[str, ClientSecurity | None]]:
    """Return address and credentials of the coordinator: the one that the user named, or one inside this process."""
    config = CoordinatorConfig(state=str(directory.journal), lease=LEASE)
    if directory.spec.coordinator:
        yield directory.spec.coordinator, None
    elif cluster is not None and not cluster.is_here:
        from strata.launch.nodes.network_coordinator import start_on_network  # noqa: PLC0415 - imports cryptography

        with start_on_network(config, cluster.address, place / "secrets") as network:
            cluster.credentials = network
            yield network.address, network.security
    else:
        with _embedded(config, f"unix:{place}/coordinator.sock", page) as coordinator:
            yield coordinator.address, None


@contextlib.contextmanager
def _embedded(config: CoordinatorConfig, listen: str, page: RunPage | None) -> Iterator[EmbeddedCoordinator]:
    if page is None:
        with EmbeddedCoordinator(config, listen=listen) as coordinator:
            yield coordinator
        return
    with EmbeddedCoordinator(config, listen=listen, http=page.listen, options=page.options) as coordinator:
        page.url = coordinator.http_address
        page.announce(page.url)
        yield coordinator


@contextlib.asynccontextmanager
async def _nodes(directory: RunDirectory, cluster: RayCluster | None) -> AsyncIterator[Nodes]:
    """Return the nodes for the workers. The agent closes them."""
    if cluster is not None:
        async with cluster.nodes(directory, Nodes) as nodes:
            yield nodes
        return
    node = LocalNode(directory)
    await node.prepare()
    yield Nodes(node)
