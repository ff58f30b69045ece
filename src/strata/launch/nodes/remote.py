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
        self._attempts: dict[int, int] = {}
        """Attempt of each rank that runs here."""
        self._exits: asyncio.Queue[WorkerExit] = asyncio.Queue()
        self._outbox = Outbox(group)

    @property
    def is_empty(self) -> bool:
        return not self._attempts

    def receive(self, message: WorkersExited) -> None:
        """Take exits of running workers; ignore those of earlier attempts."""
        for event in message.exits:
            if self._attempts.get(event.rank) == message.attempt:
                del self._attempts[event.rank]
                self._exits.put_nowait(event)

    async def free_port(self) -> int:
        return secrets.choice(PORTS)  # if it is taken, the next attempt gets another one

    async def launch(self, workers: Sequence[WorkerSpec]) -> None:
        if workers:
            order = StartWorkers.of(workers)
            self._attempts |= {rank: order.attempt for rank, _ in order.ranks}
            self._send(order)

    async def next_exit(self) -> WorkerExit:
        return await self._exits.get()

    def kill(self, ranks: Iterable[int]) -> None:
        by_attempt: dict[int, list[int]] = {}
        for rank in ranks:
            if rank in self._attempts:
                by_attempt.setdefault(self._attempts[rank], []).append(rank)
        for attempt, theirs in by_attempt.items():
            self._send(KillWorkers(attempt, tuple(theirs)))

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        if rank in self._attempts:
            self._send(SignalWorker(self._attempts[rank], rank, int(number)))

    async def dump_stacks(self, rank: int) -> None:
        if rank in self._attempts:
            self._send(DumpStacks(self._attempts[rank], (rank,)))

    async def close(self) -> None:
        """Send nothing more. The agent kills its workers when it learns that the run is over or has no leader."""
        await self._outbox.close()

    def release(self) -> None:
        self._send(Release())

    def _send(self, message: AnyMessage) -> None:
        self._outbox.send(self.name, message)
