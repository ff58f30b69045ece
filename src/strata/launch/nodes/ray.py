"""An actor on a Ray cluster as a node: the agent's side of `strata.launch.nodes.ray_actor`.

Ray reports a dead actor at once, and a broken connection too, which may recover: calls are then repeated. A connection
that breaks again counts as a lost node, since Ray needs another 15 seconds to be sure and the job waits meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from strata.launch.nodes.base import NodeLost
from strata.launch.nodes.ray_actor import DEVICES_VARIABLE, News
from strata.launch.protocol import DumpStacks, KillWorkers, SignalWorker, StartWorkers, decode, encode
from strata.launch.record.log import append

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterable, Sequence

    from strata.launch.environment import WorkerSpec
    from strata.launch.nodes.ray_actor import ActorReady
    from strata.launch.protocol import WorkerExit, WorkerOrder
    from strata.launch.record.directory import RunDirectory

log = logging.getLogger(__name__)
MAX_UNAVAILABLE = 2
"""Calls in a row without an answer. Ray takes about two seconds for each."""
RETRY_S = 0.1
CLOSE_TIMEOUT_S = 15.0


class RayNode:
    """A `Node` that is a Ray actor. The event `lost` is set when the node is lost."""

    def __init__(
        self,
        actor: Any,
        ready: ActorReady,
        *,
        name: str,
        logs: RunDirectory | None,
        devices: Callable[[str], Sequence[str]],
    ) -> None:
        """`logs`: directory for the output of workers on other machines. `devices`: GPUs of our actors on a host."""
        self.name = name
        self.host = ready.host
        self.address = ready.address
        self.slots = 1
        self.own_devices = ready.devices
        self.lost = asyncio.Event()
        self._actor = actor
        self._logs = logs
        self._devices = devices
        self._attempts: dict[int, int] = {}
        self._killed: set[int] = set()
        """Ranks that were killed since the last launch began."""
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def free_port(self) -> int:
        found = await self._call("free_port")
        return found if isinstance(found, int) else 0  # the node is lost: the port will not be used

    async def launch(self, workers: Sequence[WorkerSpec]) -> None:
        if not workers:
            return
        self._killed.clear()
        self._attempts = {worker.identity.rank: worker.identity.attempt for worker in workers}
        devices = self._devices(self.host)
        variables = {DEVICES_VARIABLE: ",".join(devices)} if devices else {}
        await self._call("obey", encode(StartWorkers.of(workers, variables)))
        if self._killed:  # the kill may have arrived before the start
            self._kill(sorted(self._killed))

    async def next_exit(self) -> WorkerExit:
        while True:
            try:
                news = decode(await self._fetch_news(), News)
            except Exception:
                self.lost.set()
                raise
            self._number += 1
            self._keep_logs(news)
            if news.exit is not None:
                return news.exit

    def kill(self, ranks: Iterable[int]) -> None:
        theirs = list(ranks)
        self._killed |= set(theirs)
        self._kill(theirs)

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        if rank in self._attempts:
            self._send(SignalWorker(self._attempts[rank], rank, int(number)))

    async def dump_stacks(self, rank: int) -> None:
        await self._call("obey", encode(DumpStacks(self._attempts.get(rank, -1), (rank,))))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._call("close")

    def _kill(self, ranks: Sequence[int]) -> None:
        by_attempt: dict[int, list[int]] = {}
        for rank in ranks:
            if rank in self._attempts:
                by_attempt.setdefault(self._attempts[rank], []).append(rank)
        for attempt, theirs in by_attempt.items():
            self._send(KillWorkers(attempt, tuple(theirs)))

    async def _fetch_news(self) -> bytes:
        """
        Raises:
            NodeLost: The actor is dead or does not answer.
        """
        from ray.exceptions import ActorUnavailableError, RayError  # noqa: PLC0415

        num_unavailable = 0
        while True:
            try:
                found = await answer(self._actor.news.remote(self._number))
            except ActorUnavailableError:
                num_unavailable += 1
                if num_unavailable >= MAX_UNAVAILABLE:
                    raise NodeLost("it does not answer") from None
                await asyncio.sleep(RETRY_S)
            except RayError as error:
                raise NodeLost(f"its Ray actor has ended ({type(error).__name__})") from None
            else:
                assert isinstance(found, bytes)
                return found

    def _send(self, order: WorkerOrder) -> None:
        async def send() -> None:
            await self._call("obey", encode(order))

        task = asyncio.create_task(send())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, method: str, *arguments: object) -> object:
        """Call a method of the actor until it answers; return None if the node is lost."""
        from ray.exceptions import ActorUnavailableError, RayError  # noqa: PLC0415

        lost = asyncio.create_task(self.lost.wait())
        try:
            while not self.lost.is_set():
                call = asyncio.ensure_future(answer(getattr(self._actor, method).remote(*arguments)))
                try:
                    await asyncio.wait({call, lost}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    call.cancel()
                try:
                    if call.done():
                        return call.result()
                except ActorUnavailableError:
                    await asyncio.sleep(RETRY_S)
                except (RayError, asyncio.CancelledError) as error:
                    log.info("%s: %s failed: %s", self.name, method, type(error).__name__)
                    return None
        finally:
            lost.cancel()
        return None

    def _keep_logs(self, news: News) -> None:
        if self._logs is None:
            return
        for part in news.logs:
            try:
                path = self._logs.log_path(part.attempt, part.rank)
                append(path, part.data, max_bytes=self._logs.spec.log_bytes)
            except OSError as error:
                log.warning("cannot store the output of rank %d: %s", part.rank, error)


async def answer(reference: Any) -> object:
    """Wait for an actor's answer. Cancelling the wait does not disturb Ray, which answers later."""
    coming = asyncio.wrap_future(reference.future())
    coming.add_done_callback(
        lambda each: each.cancelled() or each.exception()
    )  # retrieve it, even if nothing awaits it
    return await asyncio.shield(coming)
