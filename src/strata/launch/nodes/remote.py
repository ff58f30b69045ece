"""Another machine as a node, as the agent that leads sees it: orders and exits travel as messages."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from strata.launch.nodes.rendezvous import Outbox
from strata.launch.protocol import DumpStacks, KillWorkers, Release, SignalWorker, StartWorkers

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterable, Sequence

    from strata.launch.environment import WorkerSpec
    from strata.launch.nodes.rendezvous import AgentGroup, Member
    from strata.launch.protocol import AnyMessage, WorkerExit, WorkersExited

PORTS = range(20_000, 30_000)
"""Below the ephemeral ports of the system."""


class RemoteNode:
    """A `Node` whose agent runs on another machine. It is lost when its agent is no longer a member of the run."""

    def __init__(self, group: AgentGroup, member: Member) -> None:
        self.name = member.id
        self.host = self.address = member.address
        self.slots = member.slots
        self._attempt = -1
        self._running: set[int] = set()
        self._exits: asyncio.Queue[WorkerExit] = asyncio.Queue()
        self._outbox = Outbox(group)

    @property
    def is_empty(self) -> bool:
        return not self._running

    def receive(self, message: WorkersExited) -> None:
        """Take exits of the current attempt; ignore those of earlier ones."""
        if message.attempt == self._attempt:
            for event in message.exits:
                self._running.discard(event.rank)
                self._exits.put_nowait(event)

    async def free_port(self) -> int:
        return secrets.choice(PORTS)  # if it is taken, the next attempt gets another one

    async def launch(self, workers: Sequence[WorkerSpec]) -> None:
        if workers:
            order = StartWorkers.of(workers)
            started = {rank for rank, _ in order.ranks}
            self._running = self._running | started if order.attempt == self._attempt else started
            self._attempt = order.attempt
            self._send(order)

    async def next_exit(self) -> WorkerExit:
        return await self._exits.get()

    def kill(self, ranks: Iterable[int]) -> None:
        self._send(KillWorkers(self._attempt, tuple(ranks)))

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        self._send(SignalWorker(self._attempt, rank, int(number)))

    async def dump_stacks(self, rank: int) -> None:
        self._send(DumpStacks(self._attempt, (rank,)))

    async def close(self) -> None:
        """Send nothing more. The agent kills its workers when it learns that the run is over or has no leader."""
        await self._outbox.close()

    def release(self) -> None:
        self._send(Release())

    def _send(self, message: AnyMessage) -> None:
        self._outbox.send(self.name, message)
