"""A run on several machines: on each an agent; one of them leads, and the others do what it says.

Every agent may lead: if the one that does is lost, the next takes over, and starts the next attempt from the last
checkpoint. An agent that the coordinator has given up, because nothing was heard of it for a lease, ends its workers
and joins again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING

import msgspec

from strata.clock import Clock, SystemClock
from strata.coordinator.client import AsyncCoordinatorClient
from strata.errors import ConfigError
from strata.launch import control
from strata.launch.agent import Agent
from strata.launch.follower import Follower
from strata.launch.nodes import rendezvous
from strata.launch.nodes.base import Nodes
from strata.launch.nodes.local import LocalNode
from strata.launch.nodes.remote import RemoteNode
from strata.launch.nodes.rendezvous import Ended, Leaving, Over
from strata.launch.record.directory import RunStatus
from strata.launch.record.timeline import RunEvent
from strata.launch.supervisor import Finish

if TYPE_CHECKING:
    from pathlib import Path

    from strata.launch.control import Asked
    from strata.launch.nodes.rendezvous import Meeting, Member
    from strata.launch.record.directory import RunDirectory
    from strata.launch.record.view import Shower

log = logging.getLogger(__name__)
GATHER_S = 30.0
"""How long the first attempt waits for all nodes, if those that are there would do."""


class NodeAgent:
    """Takes part in a run until its end, now leading, now following."""

    def __init__(self, directory: RunDirectory, shower: Shower, door: Path, *, clock: Clock | None = None) -> None:
        self._directory = directory
        self._spec = directory.spec
        self._shower = shower
        self._door = door
        self._clock = clock or SystemClock()
        self._client = AsyncCoordinatorClient(self._spec.coordinator)
        self._address = self._spec.node_address or rendezvous.own_address(self._spec.coordinator)
        self._slots = math.ceil(self._spec.workers.at_most / self._spec.num_nodes)
        self._role: Asked | None = None
        self._stopped: Finish | None = None
        """Asked to stop while it had no role."""
        self._leaving = ""
        """Why it is to leave the run, if it was asked to while it followed."""
        before = directory.status
        self._last_attempt = before.attempt if before is not None else -1
        self._last_step = before.step if before is not None else 0
        self._is_first = True
        status = RunStatus.of_this_process(now_s=self._clock.wall_s())
        self._status = msgspec.structs.replace(status, control=str(door), attempt=max(self._last_attempt, 0))

    async def run(self) -> Finish:
        """
        Raises:
            CoordinatorError: The coordinator cannot be reached, or refuses this node.
        """
        async with self._client, control.served(self, self._door):
            with control.signals(self):
                while True:
                    async with rendezvous.joined(
                        self._client, self._spec.name, address=self._address, slots=self._slots
                    ) as here:
                        self._check_timeouts(here)
                        rendezvous.check_reach(here)
                        finish = await self._take_part(here)
                    if finish is not None:
                        return finish
                    self._note(
                        "nodes", "this node was given up by the coordinator; its workers have ended, it joins again"
                    )

    def stop(self, reason: str, *, is_now: bool = False) -> None:
        if self._role is not None:
            self._role.stop(reason, is_now=is_now)
        else:
            self._stopped = Finish("stopped", reason)

    def scale(self, workers: int) -> None:
        """
        Raises:
            ConfigError: So many may not be, or nobody here could see to it now.
        """
        if self._role is None:
            raise ConfigError(
                f"this node is just joining or leaving the run; ask for {workers} workers again in a moment",
                field="workers",
            )
        self._role.scale(workers)

    def _check_timeouts(self, here: Meeting) -> None:
        """A machine that is gone must be known to be gone before its workers can be taken for hung."""
        limit_s = self._spec.step_timeout_s
        if 0 < limit_s <= here.lease_s:
            raise ConfigError(
                f"--step-timeout-s {limit_s:g} is not above the coordinator's lease of {here.lease_s:g} s; raise it, "
                "or lower lease.lease_s there",
                field="step_timeout_s",
            )

    async def _take_part(self, here: Meeting) -> Finish | None:
        """None: this node is out."""
        while not here.is_out:
            if self._stopped is not None:
                return self._ended(self._stopped)
            if here.is_leader:
                return await self._lead(here)
            if here.leader is None:
                await here.hear()
            elif (finish := await self._follow(here, here.leader)) is not None:
                return self._ended(finish)
        return None

    # -- following -------------------------------------------------------------------------------------------------

    async def _follow(self, here: Meeting, leader: Member) -> Finish | None:
        node = self._local_node(here)
        await node.prepare()
        self._role = follower = Follower(
            here, leader, node, self._note, coordinator=self._spec.coordinator, leaving=self._leaving
        )
        try:
            return await follower.run()
        finally:
            self._role = None
            self._is_first = False
            self._leaving = follower.leaving
            self._last_attempt = max(self._last_attempt, follower.last_attempt)

    # -- leading ---------------------------------------------------------------------------------------------------

    async def _lead(self, here: Meeting) -> Finish | None:
        if self._leaving:
            return self._ended(Finish("stopped", f"{self._leaving}; the run goes on without this node"))
        node = self._local_node(here)
        await node.prepare()
        nodes = Nodes(node, awaited=self._spec.num_nodes if self._is_first else 0)
        self._is_first = False
        agent = Agent(
            self._spec,
            self._directory,
            nodes,
            self._client,
            self._shower,
            coordinator=self._spec.coordinator,
            control=str(self._door),
            last_attempt=self._last_attempt,
            last_step=self._last_step,
            clock=self._clock,
        )
        self._role = agent
        running, watching = asyncio.create_task(agent.run()), asyncio.create_task(_watch(here, nodes))
        opening = asyncio.get_running_loop().call_later(GATHER_S, nodes.open_up)
        try:
            await asyncio.wait((running, watching), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                watching.result()  # it raises, or this node is out
                return None
            finish = running.result()
        finally:
            opening.cancel()
            self._role = None
            for each in (running, watching):
                each.cancel()
            await asyncio.gather(running, watching, return_exceptions=True)
            self._last_attempt = max(self._last_attempt, agent.supervisor.attempt)
            self._last_step = agent.supervisor.step
        for other in await here.dismiss(Over(finish.outcome, finish.reason)):
            log.warning("node %s could not be told that the run is over; stop it there, or it goes on", other.name)
        return finish

    # -- within ----------------------------------------------------------------------------------------------------

    def _local_node(self, here: Meeting) -> LocalNode:
        return LocalNode(self._directory, name=here.me.id, address=self._address, slots=self._slots)

    def _ended(self, finish: Finish) -> Finish:
        self._note("finished", f"{finish.outcome}: {finish.reason}")
        self._status = msgspec.structs.replace(
            self._status, state=finish.outcome, reason=finish.reason, exit_code=finish.exit_code
        )
        self._directory.write_status(self._status)
        return finish

    def _note(self, what: str, text: str) -> None:
        """While this node does not lead; else its agent does."""
        now_s = self._clock.wall_s()
        event = RunEvent(
            at_s=now_s,
            monotonic_s=self._clock.monotonic_s(),
            what=what,
            text=text,
            attempt=max(self._last_attempt, 0),
        )
        self._directory.note(event)
        self._shower.say(event)
        self._status = msgspec.structs.replace(
            self._status, state="running", attempt=max(self._last_attempt, 0), updated_at_s=now_s
        )
        self._directory.write_status(self._status)


async def _watch(here: Meeting, nodes: Nodes) -> None:
    """Keeps the leader's nodes as the members are, and hands it what they say. Ends when this node is out."""
    remotes: dict[str, RemoteNode] = {}
    leaving: set[str] = set()
    _compare(here, nodes, remotes)
    while not here.is_out:
        for sender, message in await here.hear():
            if message is None:
                _compare(here, nodes, remotes)
            elif sender in remotes:
                match message:
                    case Ended():
                        remotes[sender].hear(message)
                    case Leaving(reason):
                        leaving.add(sender)
                        nodes.drain(sender, reason)
        for name in [name for name in leaving if name not in remotes or remotes[name].is_empty]:
            leaving.discard(name)
            if name in remotes:
                remotes[name].release()


def _compare(here: Meeting, nodes: Nodes, remotes: dict[str, RemoteNode]) -> None:
    there = {member.id: member for member in here.others}
    for name in [name for name in remotes if name not in there]:
        del remotes[name]
        nodes.lose(name, "its agent is gone")
    for name, member in there.items():
        if name not in remotes:
            remotes[name] = RemoteNode(here, member)
            nodes.join(remotes[name])
