"""A node of another machine, as the agent that leads sees it: orders go there as messages, exits come back as such."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from strata.launch.nodes.rendezvous import Dump, Kill, Launch, Outbox, Release, SendSignal

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterable, Sequence

    from strata.launch.environment import WorkerSpec
    from strata.launch.nodes.rendezvous import AnyMessage, Ended, Meeting, Member
    from strata.launch.processes.base import WorkerExit

PORTS = range(20_000, 30_000)
"""Below those that systems give out by themselves."""


class RemoteNode:
    """`nodes.Node` over messages. It is lost when its agent is no member any more, which the leader notices."""

    def __init__(self, meeting: Meeting, member: Member) -> None:
        self.name = member.id
        self.host = self.address = member.address
        self.slots = member.slots
        self._attempt = -1
        self._running: set[int] = set()
        self._exits: asyncio.Queue[WorkerExit] = asyncio.Queue()
        self._outbox = Outbox(meeting)

    @property
    def is_empty(self) -> bool:
        return not self._running

    def hear(self, message: Ended) -> None:
        """Of an attempt that is over, nobody wants to know."""
        if message.attempt == self._attempt:
            for gone in message.exits:
                self._running.discard(gone.rank)
                self._exits.put_nowait(gone)

    async def free_port(self) -> int:
        return secrets.choice(PORTS)  # if it is taken, the next attempt has another

    async def launch(self, workers: Sequence[WorkerSpec]) -> None:
        if workers:
            identities = [worker.identity for worker in workers]
            self._attempt = identities[0].attempt
            self._running = {each.rank for each in identities}
            self._say(Launch(workers[0], tuple((each.rank, each.local_rank) for each in identities)))

    async def next_exit(self) -> WorkerExit:
        return await self._exits.get()

    def kill(self, ranks: Iterable[int]) -> None:
        self._say(Kill(self._attempt, tuple(ranks)))

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        self._say(SendSignal(self._attempt, rank, int(number)))

    async def dump_stacks(self, rank: int) -> None:
        """Done there before anything that is ordered afterwards."""
        self._say(Dump(self._attempt, rank))

    async def close(self) -> None:
        """Its agent ends its workers when it hears that the run is over, or that nobody leads."""
        await self._outbox.close()

    def release(self) -> None:
        self._say(Release())

    def _say(self, message: AnyMessage) -> None:
        self._outbox.say(self.name, message)
