"""Where the trials of a study run: on this machine, on several machines with an agent each, or on a Ray cluster.

With several machines, every one runs the same program. The first that joins drives the study, the others run its
trials. If the driver is lost, the next machine continues the study from its journal, which all of them share; the lock
of the journal keeps two drivers apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
from typing import TYPE_CHECKING

import msgspec

from strata.clock import SystemClock
from strata.coordinator.client import AsyncCoordinatorClient
from strata.errors import ConfigError, JournalLocked
from strata.launch import control
from strata.launch.multi_node import Follower, watch
from strata.launch.nodes import rendezvous
from strata.launch.nodes.local import LocalNode
from strata.launch.nodes.shared import SharedNodes
from strata.launch.protocol import RunOver
from strata.launch.record.directory import RunStatus
from strata.launch.run import cluster_of, coordinator_of
from strata.lifecycle import interrupted
from strata.transport import sockets
from strata.tune.driver import Driver
from strata.tune.journal import JOURNAL, StudyJournal
from strata.tune.state.actions import Finish
from strata.tune.worker import write_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from strata.launch.nodes.ray_cluster import RayCluster
    from strata.launch.nodes.rendezvous import AgentGroup, Member
    from strata.launch.record.directory import RunDirectory
    from strata.launch.run import RunPage
    from strata.transport.credentials import ClientSecurity
    from strata.tune.search import Search
    from strata.tune.state.actions import Handled

    Opening = Callable[[StudyJournal], tuple[Search, Handled | None]]

log = logging.getLogger(__name__)
LOCK_S = 60.0
"""Time for the journal to become free after its driver was lost: a file system of several machines notices it late."""
LOCK_RETRY_S = 0.2


class Engine:
    """One call of `tune` on this machine: it drives the study, or runs trials for the machine that does."""

    def __init__(
        self,
        directory: RunDirectory,
        opening: Opening,
        *,
        num_slots: int,
        workers_per_trial: int = 1,
        max_slots_per_trial: int = 1,
        timeout_s: float | None = None,
        page: RunPage | None = None,
    ) -> None:
        """
        Args:
            opening: Returns the search that a journal leads to, and what it begins with.
            num_slots: Largest number of trials at a time.
            workers_per_trial: Workers of a slot.
            max_slots_per_trial: Slots that one trial may take if no other needs them.
            page: Served while the study runs, if its coordinator is inside this process and only reachable from here.
        """
        self._directory = directory
        self._spec = directory.spec
        self._opening = opening
        self._num_slots = num_slots
        self._workers_per_trial = workers_per_trial
        self._max_slots_per_trial = max_slots_per_trial
        self._timeout_s = timeout_s
        self._page = page
        self._driver: Driver | None = None
        self._is_interrupted = False

    def run(self) -> Finish:
        """Return when the study has ended.

        Raises:
            ConfigError: The study cannot run here; the message names the cure.
            KeyboardInterrupt: Ctrl-C has ended it; running trials have saved.
        """
        try:
            finish = self._run()
        except KeyboardInterrupt:  # before its driver ran, or after
            self._is_interrupted = True
        if self._is_interrupted:
            name = self._directory.name
            raise interrupted(f"study {name} was interrupted; call tune with name={name!r} to continue it")
        return finish

    def _run(self) -> Finish:
        with sockets.place() as place:
            if self._spec.num_nodes > 1:
                return asyncio.run(self._take_part(place.path))
            with (
                self._directory.lock(),
                cluster_of(self._directory) as cluster,
                coordinator_of(self._directory, cluster, place.path, self._page) as (coordinator, security),
            ):
                return asyncio.run(self._run_alone(place.path, cluster, coordinator, security))

    def stop(self, reason: str, *, is_now: bool = False) -> None:
        """Let running trials save, and end the study; see `Driver.stop`.

        Raises:
            ConfigError: It has not started yet.
        """
        if self._driver is None:
            raise ConfigError("the study is starting; ask again in a moment")
        self._is_interrupted = reason == control.SIGNALS[signal.SIGINT]
        self._driver.stop(reason, is_now=is_now)

    def scale(self, workers: int | None, servers: int | None = None) -> None:  # noqa: ARG002 - as an agent has it
        """
        Raises:
            ConfigError: A study cannot change its size while it runs.
        """
        raise ConfigError(
            f"a study cannot change its size; stop it, and continue it with: strata tune --resume "
            f"{self._directory.name} --workers N",
            field="workers",
        )

    def dump_stacks(self, rank: int) -> None:  # noqa: ARG002 - as an agent has it
        """
        Raises:
            ConfigError: Ranks are those of its trials.
        """
        raise ConfigError("the ranks of a study are those of its trials; find the worker's process in the trial's log")

    def order_trial(self, trial: int, order: control.TrialOrder, reason: str) -> None:
        """Stop a trial, or let it start again; see `Driver.order`.

        Raises:
            ConfigError: The study has not started yet, or the trial cannot be stopped or started again now.
        """
        if self._driver is None:
            raise ConfigError("the study is starting; ask again in a moment")
        self._driver.order(trial, order, reason)

    async def _run_alone(
        self, place: Path, cluster: RayCluster | None, coordinator: str, security: ClientSecurity | None
    ) -> Finish:
        async with contextlib.AsyncExitStack() as stack:
            if cluster is not None:
                nodes = await stack.enter_async_context(cluster.nodes(self._directory, SharedNodes))
            else:
                node = LocalNode(self._directory, slots=self._num_slots * self._workers_per_trial)
                await node.prepare()
                nodes = SharedNodes(node)
            client = await stack.enter_async_context(AsyncCoordinatorClient(coordinator, security=security))
            host = cluster.address if cluster is not None and not cluster.is_here else ""
            return await self._drive(nodes, client, place, coordinator=coordinator, host=host)

    # -- several machines ------------------------------------------------------------------------------------------

    async def _take_part(self, place: Path) -> Finish:
        coordinator = self._spec.coordinator
        address = self._spec.node_address or rendezvous.own_address(coordinator)
        slots = math.ceil(self._num_slots / self._spec.num_nodes) * self._workers_per_trial
        async with AsyncCoordinatorClient(coordinator) as client:
            while True:
                async with rendezvous.join_group(client, self._spec.name, address=address, slots=slots) as group:
                    rendezvous.check_reachable(group)
                    while not group.is_out:
                        if group.is_leader:
                            finish = await self._lead(group, client, place)
                        elif group.leader is not None:
                            finish = await self._follow(group, group.leader)
                        else:
                            await group.receive()
                            continue
                        if finish is not None:
                            return finish
                log.warning("the coordinator has removed this machine; its trials have ended, rejoining")

    async def _follow(self, group: AgentGroup, leader: Member) -> Finish | None:
        """Run trials until the study ends; return None if its driver is lost, or this machine was removed."""
        node = self._node(group)
        await node.prepare()
        finish = await Follower(
            group, leader, node, lambda what, text: log.debug("%s: %s", what, text), coordinator=self._spec.coordinator
        ).run()
        return None if finish is None else Finish(finish.reason, finish.outcome == "done")

    async def _lead(self, group: AgentGroup, client: AsyncCoordinatorClient, place: Path) -> Finish | None:
        """Drive the study until it ends; return None if this machine was removed."""
        node = self._node(group)
        await node.prepare()
        nodes = SharedNodes(node)
        host = group.me.address
        driving = asyncio.create_task(self._drive(nodes, client, place, coordinator=self._spec.coordinator, host=host))
        watching = asyncio.create_task(watch(group, nodes))
        try:
            await asyncio.wait((driving, watching), return_when=asyncio.FIRST_COMPLETED)
            if not driving.done():
                watching.result()  # raises, or this machine was removed
                return None
            finish = driving.result()
        finally:
            for each in (driving, watching):
                each.cancel()
            await asyncio.gather(driving, watching, return_exceptions=True)
        await group.dismiss(RunOver("done" if finish.is_complete else "stopped", finish.reason))
        return finish

    def _node(self, group: AgentGroup) -> LocalNode:
        return LocalNode(self._directory, name=group.me.id, address=group.me.address, slots=group.me.slots)

    # -- driving ---------------------------------------------------------------------------------------------------

    async def _drive(
        self, nodes: SharedNodes, client: AsyncCoordinatorClient, place: Path, *, coordinator: str, host: str
    ) -> Finish:
        """Drive the study, and keep the status of its directory, which `strata ps` shows."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                journal = stack.enter_context(await self._journal())
                socket = place / "control"
                await stack.enter_async_context(control.serve(self, socket))
                status = RunStatus.of_this_process(now_s=SystemClock().wall_s())
                status = msgspec.structs.replace(status, state="running", control=str(socket))
                self._directory.write_status(status)
                outcome = "stopped"
                try:
                    finish = await self._driven(journal, nodes, client, place, coordinator=coordinator, host=host)
                    outcome = "done" if finish.is_complete else "stopped"
                except Exception:
                    outcome = "failed"
                    raise
                else:
                    return finish
                finally:
                    ended = msgspec.structs.replace(status, state=outcome, updated_at_s=SystemClock().wall_s())
                    self._directory.write_status(ended)
        finally:
            await nodes.close()

    async def _driven(
        self,
        journal: StudyJournal,
        nodes: SharedNodes,
        client: AsyncCoordinatorClient,
        place: Path,
        *,
        coordinator: str,
        host: str,
    ) -> Finish:
        search, recovered = self._opening(journal)
        ended = search.state.ended
        if ended is not None:
            return Finish(ended.reason, ended.is_complete)
        driver = Driver(
            search,
            journal,
            nodes,
            client,
            coordinator=coordinator,
            directory=self._directory.path,
            num_slots=self._num_slots,
            workers_per_trial=self._workers_per_trial,
            max_slots_per_trial=self._max_slots_per_trial,
            timeout_s=self._timeout_s,
            grace_s=self._spec.grace_s,
        )
        call = self._directory.path / "call"
        self._driver = driver
        with control.handle_signals(self):
            return await driver.run(place, recovered, publish=lambda found: write_endpoint(call, found), host=host)

    async def _journal(self) -> StudyJournal:
        """Open the journal; wait for a lost driver's lock, if there were several."""
        deadline_s = asyncio.get_running_loop().time() + (LOCK_S if self._spec.num_nodes > 1 else 0.0)
        while True:
            try:
                return StudyJournal(self._directory.path / JOURNAL)
            except JournalLocked:
                if asyncio.get_running_loop().time() >= deadline_s:
                    raise
            await asyncio.sleep(LOCK_RETRY_S)
