"""A node of a run that is an actor on a Ray cluster: the agent's end of `strata.launch.nodes.ray_actor`.

Ray tells of an actor that died at once, and of a connection that broke. It may mend; what was said meanwhile is said
again. One that breaks again is a lost node: Ray itself takes a quarter of a minute to be sure, and the job waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from strata.launch.nodes import ray_actor
from strata.launch.nodes.base import NodeLost
from strata.launch.nodes.ray_actor import DEVICES_VARIABLE, News, decode, encode
from strata.launch.processes.base import WorkerExit
from strata.launch.record.log import append

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from strata.launch.environment import WorkerSpec
    from strata.launch.nodes.ray_actor import Here
    from strata.launch.record.directory import RunDirectory

log = logging.getLogger(__name__)
MAX_UNAVAILABLE = 2
"""Calls in a row that find nobody. Ray takes about two seconds for each."""
RETRY_S = 0.1
CLOSE_TIMEOUT_S = 15.0


class RayNode:
    """`nodes.Node` as an actor. `lost` is set when it is."""

    def __init__(
        self,
        actor: Any,
        here: Here,
        *,
        name: str,
        logs: RunDirectory | None,
        devices: Callable[[str], Sequence[str]],
    ) -> None:
        """`logs`: where to put what workers write, if they are away. `devices`: the GPUs of all places on a host."""
        self.name = name
        self.host = here.host
        self.address = here.address
        self.slots = 1
        self.own_devices = here.devices
        self.lost = asyncio.Event()
        self._actor = actor
        self._logs = logs
        self._devices = devices
        self._attempts: dict[int, int] = {}
        self._killed: set[int] = set()
        """Of the ranks that are just being started."""
        self._number = 0
        self._doing: set[asyncio.Task[None]] = set()

    async def free_port(self) -> int:
        found = await self._order("free_port")
        return found if isinstance(found, int) else 0  # nobody will ask for it

    async def launch(self, workers: Sequence[WorkerSpec]) -> None:
        if not workers:
            return
        self._killed.clear()
        self._attempts = {worker.identity.rank: worker.identity.attempt for worker in workers}
        devices = self._devices(self.host)
        variables = {DEVICES_VARIABLE: ",".join(devices)} if devices else {}
        await self._order("launch", encode(ray_actor.Launch(workers=list(workers), variables=variables)))
        if self._killed:  # it may have come before the launch, and found nobody
            self._kill(sorted(self._killed))

    async def next_exit(self) -> WorkerExit:
        while True:
            try:
                news = decode(await self._hear(), News)
            except Exception:
                self.lost.set()
                raise
            self._number += 1
            self._keep_logs(news)
            if news.exit is not None:
                return WorkerExit(news.exit.rank, news.exit.code, news.exit.last_words, step=news.exit.step)

    def kill(self, ranks: Iterable[int]) -> None:
        theirs = list(ranks)
        self._killed |= set(theirs)
        self._kill(theirs)

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        if rank in self._attempts:
            order = ray_actor.Signal(attempt=self._attempts[rank], rank=rank, number=number)
            self._do(self._order("send_signal", encode(order)))

    async def dump_stacks(self, rank: int) -> None:
        await self._order("dump_stacks", rank)

    async def close(self) -> None:
        for task in self._doing:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._order("close")

    # -- within ----------------------------------------------------------------------------------------------------

    def _kill(self, ranks: Sequence[int]) -> None:
        by_attempt: dict[int, list[int]] = {}
        for rank in ranks:
            if rank in self._attempts:
                by_attempt.setdefault(self._attempts[rank], []).append(rank)
        for attempt, theirs in by_attempt.items():
            self._do(self._order("kill", encode(ray_actor.Kill(attempt=attempt, ranks=theirs))))

    async def _hear(self) -> bytes:
        """
        Raises:
            NodeLost: The actor is dead, or nobody answers.
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

    async def _order(self, method: str, *arguments: object) -> object:
        """Said again until it is heard; None from a node that is lost."""
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
                    log.info("%s does not %s: %s", self.name, method, type(error).__name__)
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
                log.warning("what rank %d wrote is not kept: %s", part.rank, error)

    def _do(self, work: Coroutine[Any, Any, object]) -> None:
        async def done() -> None:
            await work

        task = asyncio.create_task(done())
        self._doing.add(task)
        task.add_done_callback(self._doing.discard)


async def answer(reference: Any) -> object:
    """Of an actor. Who stops waiting does not disturb Ray, which will answer some time."""
    coming = asyncio.wrap_future(reference.future())
    coming.add_done_callback(lambda each: each.cancelled() or each.exception())  # heard, also if nobody waits
    return await asyncio.shield(coming)
