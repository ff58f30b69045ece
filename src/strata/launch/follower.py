"""A node's agent while another one leads: it starts and ends workers as it is told, and tells of their ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from strata.errors import ConfigError, StrataError
from strata.launch.nodes.rendezvous import Dump, Ended, Kill, Launch, Leaving, Outbox, Over, Release, SendSignal
from strata.launch.processes.base import NOT_STARTED, WorkerExit
from strata.launch.supervisor import Finish

if TYPE_CHECKING:
    from collections.abc import Callable

    from strata.launch.nodes.base import Node
    from strata.launch.nodes.rendezvous import AnyMessage, Meeting, Member

MAX_LOG_ENDS = 2
TOGETHER_S = 0.02
"""Workers of an attempt mostly end at the same time, and are told of together."""


class Follower:
    def __init__(
        self,
        here: Meeting,
        leader: Member,
        node: Node,
        note: Callable[[str, str], None],
        *,
        coordinator: str,
        leaving: str = "",
    ) -> None:
        """`note` takes what is for the timeline: what happened, and that in words. `coordinator`: as it is reached from
        here, which may be by another address than from the leader. `leaving`: it was asked to stop while another one
        led.
        """
        self.last_attempt = -1
        self.leaving = leaving
        """Why, once this node was asked to stop."""
        self._here = here
        self._leader = leader
        self._node = node
        self._note = note
        self._coordinator = coordinator
        self._running: set[int] = set()
        self._early: dict[int, int] = {}
        """Exit codes of the ranks that were to end, perhaps before the node had begun with their launch."""
        self._ended: list[WorkerExit] = []
        self._finish: Finish | None = None
        self._outbox = Outbox(here)
        self._launches: set[asyncio.Task[None]] = set()

    async def run(self) -> Finish | None:
        """Until the run is over, or this node has left it; None if the leader is gone, or this node is out. Nobody of
        its workers is left then.
        """
        self._note("nodes", f"node {self._leader.name} leads, and this one follows")
        if self.leaving:
            self._outbox.say(self._leader.id, Leaving(self.leaving))
        telling = asyncio.create_task(self._tell_exits())
        try:
            while not self._here.is_out:
                if telling.done():
                    telling.result()  # it raises: it ends only by an error
                of_others = []
                for heard in await self._here.hear():
                    if heard.sender != self._leader.id:
                        of_others.append(heard)
                    elif heard.message is not None:
                        await self._obey(heard.message)
                if self._finish is not None:
                    return self._finish
                if all(member.id != self._leader.id for member in self._here.members):
                    self._note("nodes", f"node {self._leader.name}, which led, is gone")
                    self._here.put_back(of_others)  # the next leader's first orders, perhaps
                    return None
            return None
        finally:
            telling.cancel()
            for each in self._launches:
                each.cancel()
            await asyncio.gather(telling, *self._launches, return_exceptions=True)
            await self._node.close()
            await self._outbox.close()

    # -- what is asked from outside --------------------------------------------------------------------------------

    def stop(self, reason: str, *, is_now: bool = False) -> None:
        """Asked once, all ranks save, and the run goes on without this node; asked twice, its workers end at once."""
        if is_now or self.leaving:
            self._finish = Finish("stopped", f"{reason}; this node has left the run at once")
            self._node.kill(self._running)
        else:
            self.leaving = reason
            self._note("stopping", f"{reason}: the workers save, then the run goes on without this node")
            self._outbox.say(self._leader.id, Leaving(reason))

    def scale(self, workers: int) -> None:
        raise ConfigError(f"node {self._leader.name} leads this run; ask for {workers} workers there", field="workers")

    # -- what is ordered -------------------------------------------------------------------------------------------

    async def _obey(self, message: AnyMessage) -> None:
        match message:
            case Launch(worker, ranks):
                identity = worker.identity
                self.last_attempt = identity.attempt
                self._running = {rank for rank, _ in ranks}
                self._early = {}
                self._note(
                    "started", f"attempt {identity.attempt} with {len(ranks)} of {identity.world_size} workers here"
                )
                task = asyncio.create_task(self._launch(message))
                self._launches.add(task)
                task.add_done_callback(self._launches.discard)
            case Kill(attempt, ranks) if attempt == self.last_attempt:
                self._early |= dict.fromkeys(ranks, -signal.SIGKILL)
                self._node.kill(ranks)
            case SendSignal(attempt, rank, number) if attempt == self.last_attempt:
                self._early.setdefault(rank, -number)
                with contextlib.suppress(ValueError):
                    self._node.send_signal(rank, signal.Signals(number))
            case Dump(attempt, rank) if attempt == self.last_attempt:
                await self._node.dump_stacks(rank)
            case Over(outcome, reason):
                self._finish = Finish(outcome, reason)
            case Release() if self.leaving:
                self._finish = Finish("stopped", f"{self.leaving}; the run goes on without this node")
            case _:
                pass  # of an attempt that is over

    async def _launch(self, order: Launch) -> None:
        """An order to end may have come in the same breath: whom it meant is not started, and has ended all the same.
        From here on the node has its workers, and hears of it.
        """
        early = [WorkerExit(rank, self._early[rank]) for rank, _ in order.ranks if rank in self._early]
        if early:
            self._tell(early)
        workers = [
            replace(
                order.worker,
                identity=replace(order.worker.identity, rank=rank, local_rank=local_rank),
                coordinator=self._coordinator,
            )
            for rank, local_rank in order.ranks
            if rank not in self._early
        ]
        try:
            await self._node.launch(workers)
        except StrataError as error:
            self._tell([WorkerExit(worker.identity.rank, NOT_STARTED, str(error)) for worker in workers])

    # -- what is told ----------------------------------------------------------------------------------------------

    async def _tell_exits(self) -> None:
        collecting = asyncio.create_task(self._collect())
        try:
            while True:
                await asyncio.sleep(TOGETHER_S)
                if self._ended:
                    ended, self._ended = self._ended, []
                    self._tell(ended)
                if collecting.done():
                    collecting.result()
        finally:
            collecting.cancel()

    async def _collect(self) -> None:
        while True:
            gone = await self._node.next_exit()
            self._ended.append(gone)  # the list is another one than before the wait, perhaps

    def _tell(self, exits: list[WorkerExit]) -> None:
        self._running -= {gone.rank for gone in exits}
        # A message holds 64 KiB; of many that fail together, the first say enough.
        told = [gone if n < MAX_LOG_ENDS else replace(gone, log_end=()) for n, gone in enumerate(exits)]
        self._outbox.say(self._leader.id, Ended(self.last_attempt, tuple(told)))
