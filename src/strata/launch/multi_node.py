"""A run on several machines: each has an agent; one of them leads, and the others follow its orders.

Every agent may lead: if the leader is lost, the next one takes over and starts the next attempt from the last
checkpoint. An agent that the coordinator has removed, because it was silent for longer than a lease, kills its workers
and joins again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from strata.clock import Clock, SystemClock
from strata.coordinator.client import AsyncCoordinatorClient
from strata.errors import ConfigError, StrataError
from strata.launch import control
from strata.launch.actions import Finish
from strata.launch.agent import Agent
from strata.launch.nodes import rendezvous
from strata.launch.nodes.base import Nodes
from strata.launch.nodes.local import LocalNode
from strata.launch.nodes.remote import RemoteNode
from strata.launch.nodes.rendezvous import Outbox
from strata.launch.protocol import (
    NOT_STARTED,
    DumpStacks,
    KillWorkers,
    NodeLeaving,
    Release,
    RunOver,
    SignalWorker,
    StartWorkers,
    WorkerExit,
    WorkersExited,
)
from strata.launch.record.directory import RunStatus
from strata.launch.record.timeline import RunEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from strata.launch.control import Controlled
    from strata.launch.nodes.base import Node
    from strata.launch.nodes.rendezvous import AgentGroup, Member
    from strata.launch.protocol import AnyMessage
    from strata.launch.record.directory import RunDirectory
    from strata.launch.record.display import Display

log = logging.getLogger(__name__)
GATHER_S = 30.0
"""How long the first attempt waits for all nodes, if those that have joined suffice."""
MAX_LOG_ENDS = 2
"""Exits of one message that carry the end of their log."""
BATCH_S = 0.02
"""Interval between two reports of exits: the workers of an attempt mostly exit together."""


class NodeAgent:
    """Take part in a run until its end, as its leader or as a follower."""

    def __init__(self, directory: RunDirectory, display: Display, socket: Path, *, clock: Clock | None = None) -> None:
        self._directory = directory
        self._spec = directory.spec
        self._display = display
        self._socket = socket
        self._clock = clock or SystemClock()
        self._client = AsyncCoordinatorClient(self._spec.coordinator)
        self._address = self._spec.node_address or rendezvous.own_address(self._spec.coordinator)
        self._slots = math.ceil(self._spec.workers.at_most / self._spec.num_nodes)
        self._role: Controlled | None = None
        self._stopped: Finish | None = None
        """Set by a request to stop that came while the agent had no role."""
        self._leaving = ""
        """Why this node leaves the run, if that was requested while it followed."""
        before = directory.status
        self._last_attempt = before.attempt if before is not None else -1
        self._last_step = before.step if before is not None else 0
        self._is_first = True
        status = RunStatus.of_this_process(now_s=self._clock.wall_s())
        self._status = msgspec.structs.replace(status, control=str(socket), attempt=max(self._last_attempt, 0))

    async def run(self) -> Finish:
        """
        Raises:
            CoordinatorError: The coordinator cannot be reached, or refuses this node.
        """
        async with self._client, control.serve(self, self._socket):
            with control.handle_signals(self):
                while True:
                    async with rendezvous.join_group(
                        self._client, self._spec.name, address=self._address, slots=self._slots
                    ) as group:
                        self._check_timeouts(group)
                        rendezvous.check_reachable(group)
                        finish = await self._take_part(group)
                    if finish is not None:
                        return finish
                    self._note("nodes", "the coordinator has removed this node; its workers have ended, rejoining")

    def stop(self, reason: str, *, is_now: bool = False) -> None:
        if self._role is not None:
            self._role.stop(reason, is_now=is_now)
        else:
            self._stopped = Finish("stopped", reason)

    def scale(self, workers: int | None, servers: int | None = None) -> None:
        """
        Raises:
            ConfigError: The number is outside the allowed range, or this node does not lead.
        """
        if self._role is None:
            raise ConfigError(
                f"this node is joining or leaving the run; ask for {_asked(workers, servers)} again in a moment",
                field="workers",
            )
        self._role.scale(workers, servers)

    def dump_stacks(self, rank: int) -> None:
        """
        Raises:
            ConfigError: There is no such worker now, or this node does not lead.
        """
        if self._role is None:
            raise ConfigError("this node is joining or leaving the run; ask for stacks again in a moment", field="rank")
        self._role.dump_stacks(rank)

    def _check_timeouts(self, group: AgentGroup) -> None:
        """Check that a lost machine is noticed before its workers count as hung."""
        limit_s = self._spec.step_timeout_s
        if 0 < limit_s <= group.lease_s:
            raise ConfigError(
                f"--step-timeout-s {limit_s:g} is not above the coordinator's lease of {group.lease_s:g} s; raise it, "
                "or lower lease.lease_s of the coordinator",
                field="step_timeout_s",
            )

    async def _take_part(self, group: AgentGroup) -> Finish | None:
        """Lead or follow until the end of the run; return None if the coordinator has removed this node."""
        while not group.is_out:
            if self._stopped is not None:
                return self._ended(self._stopped)
            if group.is_leader:
                return await self._lead(group)
            if group.leader is None:
                await group.receive()
            elif (finish := await self._follow(group, group.leader)) is not None:
                return self._ended(finish)
        return None

    async def _follow(self, group: AgentGroup, leader: Member) -> Finish | None:
        node = self._local_node(group)
        await node.prepare()
        self._role = follower = Follower(
            group, leader, node, self._note, coordinator=self._spec.coordinator, leaving=self._leaving
        )
        try:
            return await follower.run()
        finally:
            self._role = None
            self._is_first = False
            self._leaving = follower.leaving
            self._last_attempt = max(self._last_attempt, follower.last_attempt)

    async def _lead(self, group: AgentGroup) -> Finish | None:
        if self._leaving:
            return self._ended(Finish("stopped", f"{self._leaving}; the run continues without this node"))
        node = self._local_node(group)
        await node.prepare()
        nodes = Nodes(node, num_awaited=self._spec.num_nodes if self._is_first else 0)
        self._is_first = False
        agent = Agent(
            self._spec,
            self._directory,
            nodes,
            self._client,
            self._display,
            coordinator=self._spec.coordinator,
            control=str(self._socket),
            last_attempt=self._last_attempt,
            last_step=self._last_step,
            clock=self._clock,
        )
        self._role = agent
        running, watching = asyncio.create_task(agent.run()), asyncio.create_task(watch(group, nodes))
        opening = asyncio.get_running_loop().call_later(GATHER_S, nodes.stop_awaiting)
        try:
            await asyncio.wait((running, watching), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                watching.result()  # raises, or this node is out
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
        for other in await group.dismiss(RunOver(finish.outcome, finish.reason)):
            log.warning("node %s has not learned that the run is over; stop it there, or it continues", other.name)
        return finish

    def _local_node(self, group: AgentGroup) -> LocalNode:
        return LocalNode(self._directory, name=group.me.id, address=self._address, slots=self._slots)

    def _ended(self, finish: Finish) -> Finish:
        self._note("finished", f"{finish.outcome}: {finish.reason}")
        self._status = msgspec.structs.replace(
            self._status, state=finish.outcome, reason=finish.reason, exit_code=finish.exit_code
        )
        self._directory.write_status(self._status)
        return finish

    def _note(self, what: str, text: str) -> None:
        """Add an event to the timeline while this node does not lead; otherwise its `Agent` does so."""
        now_s = self._clock.wall_s()
        event = RunEvent(
            at_s=now_s,
            monotonic_s=self._clock.monotonic_s(),
            what=what,
            text=text,
            attempt=max(self._last_attempt, 0),
        )
        self._directory.note(event)
        self._display.print_event(event)
        self._status = msgspec.structs.replace(
            self._status, state="running", attempt=max(self._last_attempt, 0), updated_at_s=now_s
        )
        self._directory.write_status(self._status)


async def watch(group: AgentGroup, nodes: Nodes) -> None:
    """Keep the leader's nodes equal to the members and pass on their reports. Return when this node is out."""
    remotes: dict[str, RemoteNode] = {}
    leaving: set[str] = set()
    _update_nodes(group, nodes, remotes)
    while not group.is_out:
        for sender, message in await group.receive():
            if message is None:
                _update_nodes(group, nodes, remotes)
            elif sender in remotes:
                match message:
                    case WorkersExited():
                        remotes[sender].receive(message)
                    case NodeLeaving(reason):
                        leaving.add(sender)
                        nodes.drain(sender, reason)
        for name in [name for name in leaving if name not in remotes or remotes[name].is_empty]:
            leaving.discard(name)
            if name in remotes:
                remotes[name].release()


def _update_nodes(group: AgentGroup, nodes: Nodes, remotes: dict[str, RemoteNode]) -> None:
    members = {member.id: member for member in group.others}
    for name in [name for name in remotes if name not in members]:
        del remotes[name]
        nodes.lose(name, "its agent is gone")
    for name, member in members.items():
        if name not in remotes:
            remotes[name] = RemoteNode(group, member)
            nodes.join(remotes[name])


class Follower:
    """A node's agent while another one leads: it carries out orders and reports exits."""

    def __init__(
        self,
        group: AgentGroup,
        leader: Member,
        node: Node,
        note: Callable[[str, str], None],
        *,
        coordinator: str,
        leaving: str = "",
    ) -> None:
        """
        Args:
            note: Called with the kind and the text of an event for the timeline.
            coordinator: Its address from this machine, which may differ from the leader's.
            leaving: Why this node leaves the run, if that was requested while another agent led.
        """
        self.last_attempt = -1
        self.leaving = leaving
        """Why this node leaves the run, once that was requested."""
        self._group = group
        self._leader = leader
        self._node = node
        self._note = note
        self._coordinator = coordinator
        self._attempts: dict[int, int] = {}
        """Attempt of each rank that runs here: several jobs may share this node."""
        self._early: dict[int, int] = {}
        """Exit codes of ranks that were killed or signalled, perhaps before the node began to start them."""
        self._exits: list[WorkerExit] = []
        self._finish: Finish | None = None
        self._outbox = Outbox(group)
        self._launches: set[asyncio.Task[None]] = set()

    async def run(self) -> Finish | None:
        """Follow until the run is over or this node has left it; return None if the leader is gone or this node is
        out. All workers of this node have ended by then.
        """
        self._note("nodes", f"following node {self._leader.name}, which leads")
        if self.leaving:
            self._outbox.send(self._leader.id, NodeLeaving(self.leaving))
        reporting = asyncio.create_task(self._report_exits())
        try:
            while not self._group.is_out:
                if reporting.done():
                    reporting.result()  # raises: the task only ends with an error
                of_others = []
                for received in await self._group.receive():
                    if received.sender != self._leader.id:
                        of_others.append(received)
                    elif received.message is not None:
                        await self._obey(received.message)
                if self._finish is not None:
                    return self._finish
                if all(member.id != self._leader.id for member in self._group.members):
                    self._note("nodes", f"node {self._leader.name}, which led, is gone")
                    self._group.put_back(of_others)  # perhaps the first orders of the next leader
                    return None
            return None
        finally:
            reporting.cancel()
            for each in self._launches:
                each.cancel()
            await asyncio.gather(reporting, *self._launches, return_exceptions=True)
            await self._node.close()
            await self._outbox.close()

    def stop(self, reason: str, *, is_now: bool = False) -> None:
        """Let all ranks save and the run continue without this node. On the second call, kill this node's workers."""
        if is_now or self.leaving:
            self._finish = Finish("stopped", f"{reason}; this node has left the run at once")
            self._node.kill(self._attempts)
        else:
            self.leaving = reason
            self._note("stopping", f"{reason}: saving a checkpoint, then the run continues without this node")
            self._outbox.send(self._leader.id, NodeLeaving(reason))

    def scale(self, workers: int | None, servers: int | None = None) -> None:
        raise ConfigError(
            f"node {self._leader.name} leads this run; ask for {_asked(workers, servers)} there", field="workers"
        )

    def dump_stacks(self, rank: int) -> None:  # noqa: ARG002 - as an agent has it
        raise ConfigError(f"node {self._leader.name} leads this run; ask for stacks there", field="rank")

    # -- orders ----------------------------------------------------------------------------------------------------

    async def _obey(self, message: AnyMessage) -> None:
        match message:
            case StartWorkers():
                started = {rank: message.attempt for rank, _ in message.ranks}
                self._attempts |= started
                self._early = {rank: code for rank, code in self._early.items() if rank not in started}
                if message.worker.identity.incarnation:  # the others keep running
                    self._note("restarted", f"{', '.join(f'rank {rank}' for rank in sorted(started))} alone")
                else:
                    self.last_attempt = message.attempt
                    world_size = message.worker.identity.world_size
                    self._note("started", f"attempt {message.attempt} with {len(started)} of {world_size} workers here")
                task = asyncio.create_task(self._launch(message))
                self._launches.add(task)
                task.add_done_callback(self._launches.discard)
            case KillWorkers(attempt, ranks):
                theirs = self._of_attempt(attempt, ranks)
                self._early |= dict.fromkeys(theirs, -signal.SIGKILL)
                self._node.kill(theirs)
            case SignalWorker(attempt, rank, number) if self._of_attempt(attempt, [rank]):
                self._early.setdefault(rank, -number)
                with contextlib.suppress(ValueError):
                    self._node.send_signal(rank, signal.Signals(number))
            case DumpStacks(attempt, ranks):
                theirs = self._of_attempt(attempt, ranks)
                await asyncio.gather(*map(self._node.dump_stacks, theirs), return_exceptions=True)
            case RunOver(outcome, reason):
                self._finish = Finish(outcome, reason)
            case Release() if self.leaving:
                self._finish = Finish("stopped", f"{self.leaving}; the run continues without this node")
            case _:
                pass  # of an earlier attempt

    def _of_attempt(self, attempt: int, ranks: Iterable[int]) -> list[int]:
        """Return those ranks that run here in this attempt: an order for another one comes too late."""
        return [rank for rank in ranks if self._attempts.get(rank) == attempt]

    async def _launch(self, order: StartWorkers) -> None:
        """Start workers, except those that were killed or signalled in the meantime: they count as ended. From here on
        the node handles kills.
        """
        early = [WorkerExit(rank, self._early[rank], is_killed=True) for rank, _ in order.ranks if rank in self._early]
        if early:
            self._report(early)
        workers = [
            replace(worker, coordinator=self._coordinator)
            for worker in order.workers()
            if worker.identity.rank not in self._early
        ]
        try:
            await self._node.launch(workers)
        except StrataError as error:
            self._report([WorkerExit(worker.identity.rank, NOT_STARTED, str(error)) for worker in workers])

    # -- reports ---------------------------------------------------------------------------------------------------

    async def _report_exits(self) -> None:
        collecting = asyncio.create_task(self._collect())
        try:
            while True:
                await asyncio.sleep(BATCH_S)
                if self._exits:
                    exits, self._exits = self._exits, []
                    self._report(exits)
                if collecting.done():
                    collecting.result()
        finally:
            collecting.cancel()

    async def _collect(self) -> None:
        while True:
            event = await self._node.next_exit()
            self._exits.append(event)  # `_report_exits` may have replaced the list during the wait

    def _report(self, exits: list[WorkerExit]) -> None:
        # A message holds 64 KiB; of many workers that fail together, the first logs suffice.
        reported = [event if n < MAX_LOG_ENDS else replace(event, log_end=()) for n, event in enumerate(exits)]
        by_attempt: dict[int, list[WorkerExit]] = {}
        for event in reported:
            if event.rank in self._attempts:
                by_attempt.setdefault(self._attempts.pop(event.rank), []).append(event)
        for attempt, theirs in by_attempt.items():
            self._outbox.send(self._leader.id, WorkersExited(attempt, tuple(theirs)))


def _asked(workers: int | None, servers: int | None) -> str:
    """Return `3 workers`, `2 servers` or both."""
    asked = {"workers": workers, "servers": servers}
    return " and ".join(f"{number} {name}" for name, number in asked.items() if number is not None)
