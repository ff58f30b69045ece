"""A worker of a job, in its own process: its adopted generation, its reports, and the notices it receives."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from strata.coordinator import wire
from strata.coordinator.client._link import message
from strata.coordinator.state import limits, views
from strata.coordinator.state.events import number_of
from strata.coordinator.state.membership import WorkerEvent
from strata.errors import (
    BarrierBroken,
    CoordinatorUnavailable,
    InvalidArgument,
    StaleGeneration,
    StaleIncarnation,
    StrataError,
    UnknownJob,
    UnknownWorker,
)
from strata.lifecycle import renewed
from strata.v1 import calls_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from strata.coordinator.client._async import AsyncCoordinatorClient
    from strata.coordinator.state.checkpoints import CheckpointProgress
    from strata.coordinator.state.events import CheckpointKind, CommandRecord
    from strata.coordinator.state.membership import WorkerEventName, WorkerStateName
    from strata.coordinator.state.shards import Shard
    from strata.coordinator.state.time_use import TimeUse

OUT = (StaleIncarnation, UnknownWorker, UnknownJob)
"""Errors that mean that this worker is no longer a member."""
BARRIER_MARGIN_S = 5.0
"""The coordinator times out barriers itself; the client waits this much longer for that answer."""


class AsyncWorker:
    """A worker of a job, in its own process.

    `generation`, `rank` and `world_size` are what this program has adopted; fenced calls carry that generation. When
    the membership changes, `latest_generation` moves ahead, and fenced calls raise `StaleGeneration` until the program
    calls `refresh()`. The program thus never acknowledges anything under a membership that it has not seen.
    """

    def __init__(
        self, client: AsyncCoordinatorClient, request: pb.RegisterWorkerRequest, response: pb.RegisterWorkerResponse
    ) -> None:
        self.job_id = request.job_id
        self.worker_id = request.worker_id
        self.instance_id = request.instance_id
        self.incarnation = number_of(response.incarnation)
        self._fence = response.incarnation
        self.generation = response.generation
        self.rank = response.rank
        self.world_size = response.world_size
        self.lease_s = response.lease_s
        self.heartbeat_s = response.heartbeat_s
        self.latest_generation = response.generation
        self.num_workers = response.world_size
        self.change_reason = ""
        self.lost: StrataError | None = None
        """Why this worker is no longer a member, if so."""
        self.changed = asyncio.Event()
        """Set when the membership has changed, the worker is no longer a member, or a command has arrived."""
        self._client = client
        self._state: WorkerStateName | None = None
        self._step: int | None = None
        self._epoch: int | None = None
        self._metrics: dict[str, float] = {}
        self._events: list[WorkerEvent] = []
        self._read_time_use: Callable[[], TimeUse | None] = lambda: None
        self._noting = renewed(threading.Lock())
        """Threads other than the loop's call `report`."""
        self._commands: list[CommandRecord] = []
        self._last_command_id = 0
        self._acked_command_id = 0
        self._rounds: Counter[tuple[str, int]] = Counter()

    @property
    def fence(self) -> int:
        """The value that this process's calls carry on the wire as `incarnation`; no other process knows it."""
        return self._fence

    # -- heartbeats ------------------------------------------------------------------------------------------------

    def report(
        self,
        *,
        state: WorkerStateName | None = None,
        step: int | None = None,
        epoch: int | None = None,
        **metrics: float,
    ) -> None:
        """Record progress for the next heartbeat; cheap, so call it every step."""
        self.note(state, step, epoch, metrics)

    def note(
        self, state: WorkerStateName | None, step: int | None, epoch: int | None, metrics: Mapping[str, float]
    ) -> None:
        """Like `report`, for metrics with arbitrary names."""
        if state is not None:
            self._state = wire.check_state(state)
        if step is not None:
            self._step = limits.check_count(step, "step")
        if epoch is not None:
            self._epoch = limits.check_count(epoch, "epoch")
        with self._noting:
            self._metrics.update(metrics)

    def report_event(self, kind: WorkerEventName, *, at_s: float, step: int = 0) -> None:
        """Report a moment in this process's life with the next heartbeat."""
        with self._noting:
            self._events.append(WorkerEvent(kind, at_s, limits.check_count(step, "step")))

    def measure(self, read: Callable[[], TimeUse | None]) -> None:
        """Send where this process's time went with every heartbeat: what `read` returns, in the loop's thread."""
        self._read_time_use = read

    def forget_report(self) -> None:
        """Drop a report that was rejected; a worker must not die because of its report."""
        self._state = self._step = self._epoch = None
        self._metrics = {}

    async def heartbeat(self) -> None:
        """Send the reported progress now instead of with the next heartbeat."""
        use = self._read_time_use()
        with self._noting:
            metrics, self._metrics = self._metrics, {}
            events, self._events = self._events, []
        request = message(
            pb.HeartbeatRequest,
            job_id=self.job_id,
            worker_id=self.worker_id,
            incarnation=self._fence,
            state=wire.encode_state(self._state) if self._state else 0,
            step=self._step,
            epoch=self._epoch,
            metrics=metrics,
            acked_command_id=self._acked_command_id,
            events=map(wire.encode_worker_event, events),
            time_use=None if use is None else wire.encode_time_use(use),
        )
        try:
            beat: pb.HeartbeatResponse = await self._client.call("heartbeat", request, timeout_s=self.lease_s)
        except CoordinatorUnavailable:
            with self._noting:  # not delivered: send it with the next heartbeat, unless newer
                self._metrics = {**metrics, **self._metrics}
                self._events = [*events, *self._events]
            raise
        self.hear_generation(beat.generation, beat.num_workers, "")
        if beat.commands:
            self.hear_commands([wire.decode_command(c) for c in beat.commands])

    def hear_generation(self, generation: int, num_workers: int, reason: str) -> None:
        if generation > self.latest_generation:
            self.latest_generation = generation
            self.num_workers = num_workers
            self.changed.set()
        if reason and generation == self.latest_generation:
            self.change_reason = reason

    def has_heard(self, command_id: int) -> bool:
        """Return whether this command has arrived. After one that has not, no other may be taken: the acknowledgement
        of a command covers all before it.
        """
        return command_id <= self._last_command_id

    def hear_commands(self, commands: Iterable[CommandRecord]) -> None:
        new = [c for c in commands if c.command_id > self._last_command_id]
        if new:
            self._commands += new
            self._last_command_id = new[-1].command_id
            self.changed.set()

    def take_commands(self) -> list[CommandRecord]:
        """Return the commands received since the last call; the next heartbeat acknowledges them."""
        taken, self._commands = self._commands, []
        if taken:
            self._acked_command_id = taken[-1].command_id
        return taken

    async def wait_changed(self, timeout_s: float) -> bool:
        """Wait for a new generation, a command, or the end of this membership; return False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.changed.wait()
        except TimeoutError:
            return False
        self.changed.clear()
        return True

    # -- membership ------------------------------------------------------------------------------------------------

    async def refresh(self) -> views.Standing:
        """Adopt the newest generation with this worker's rank and the world size. Raises if the worker is no longer a
        member.
        """
        request = message(
            pb.GetMembershipRequest, job_id=self.job_id, worker_id=self.worker_id, incarnation=self._fence
        )
        try:
            mine: pb.GetMembershipResponse = await self._client.call("get_membership", request)
        except OUT as error:
            raise self.lost or error from None
        self.generation, self.rank, self.world_size = mine.generation, mine.rank, mine.world_size
        self.hear_generation(mine.generation, mine.world_size, mine.reason)
        return views.Standing(mine.generation, mine.rank, mine.world_size, mine.reason)

    async def wait_for_workers(self, count: int, *, timeout_s: float = 60.0) -> None:
        """Wait until the job has at least `count` workers, and adopt that generation."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self.changed.clear()
                    if (await self.refresh()).world_size >= count:
                        return
                    await self.changed.wait()
        except TimeoutError:
            raise CoordinatorUnavailable(
                f"{self.num_workers} of {count} workers of job {self.job_id!r} joined within {timeout_s:g} s; "
                "start the others, or wait for fewer",
                generation=self.latest_generation,
            ) from None

    async def deregister(self, reason: str = "", *, timeout_s: float | None = None) -> None:
        """Leave the job; the shards move to other workers at once. `timeout_s` overrides the client's."""
        self._client._forget(self)
        request = message(
            pb.DeregisterWorkerRequest,
            job_id=self.job_id,
            worker_id=self.worker_id,
            incarnation=self._fence,
            reason=reason,
        )
        try:
            await self._client.call("deregister_worker", request, timeout_s=timeout_s)
        finally:
            self.changed.set()

    # -- shards ----------------------------------------------------------------------------------------------------

    async def shards(
        self, dataset_id: str | None = None, *, epoch: int | None = None, include_done: bool = False
    ) -> list[Shard]:
        """Return this worker's shards, and adopt the generation that assigned them."""
        while True:  # once, unless the membership changes between the two calls
            shards, generation = await self._client.shards_with_generation(
                self.worker_id, job_id=self.job_id, dataset_id=dataset_id, epoch=epoch, include_done=include_done
            )
            if generation != self.generation:
                await self.refresh()
            if generation == self.generation:
                return shards

    async def ack(self, shards: Sequence[Shard]) -> views.Progress:
        """Acknowledge these shards, of one dataset and epoch, as finished."""
        if not shards:
            raise InvalidArgument("shards is empty; pass at least one", field="shards")
        first = shards[0]
        if any((s.dataset_id, s.epoch) != (first.dataset_id, first.epoch) for s in shards):
            raise InvalidArgument(
                "the shards belong to several datasets or epochs; acknowledge each separately", field="shards"
            )
        request = message(
            pb.AckShardsRequest,
            **self._identity(),
            dataset_id=first.dataset_id,
            epoch=first.epoch,
            indices=[s.index for s in shards],
        )
        response: pb.AckShardsResponse = await self._client.call("ack_shards", request)
        return views.Progress(response.num_done, response.num_shards)

    # -- barriers and checkpoints ----------------------------------------------------------------------------------

    async def barrier(
        self,
        name: str,
        *,
        step: int | None = None,
        members: Sequence[str] = (),
        timeout_s: float = 300.0,
        elastic: bool = False,
    ) -> None:
        """Wait until all members of the generation have arrived.

        `step` distinguishes the uses of a name; by default, uses are counted. If the membership changes, the barrier
        breaks (`BarrierBroken`), or, with `elastic`, is entered again in the new generation.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            try:
                await self._arrive(name, step, members, deadline_s - loop.time())
            except (BarrierBroken, StaleGeneration) as error:
                if not elastic or error.generation == self.generation or loop.time() >= deadline_s:
                    raise
                await self.refresh()
            else:
                return

    async def _arrive(self, name: str, step: int | None, members: Sequence[str], timeout_s: float) -> None:
        key = (name, self.generation)
        number = self._rounds[key] if step is None else step
        request = message(
            pb.WaitBarrierRequest,
            **self._identity(),
            barrier_id=name,
            step=number,
            members=list(members),
            timeout_s=timeout_s,
        )
        await self._client.call("wait_barrier", request, timeout_s=timeout_s + BARRIER_MARGIN_S)
        if step is None:
            self._rounds[key] += 1

    async def notify_checkpoint(
        self,
        checkpoint_id: str,
        *,
        step: int,
        epoch: int,
        path: str,
        kind: CheckpointKind = "FULL",
        size_bytes: int = 0,
        hashes: Mapping[str, str] | None = None,
        model_hash: str = "",
        metadata: Mapping[str, str] | None = None,
        data_cursor: bytes = b"",
    ) -> CheckpointProgress:
        """Report that this rank's part is durable; the last rank's call commits the checkpoint."""
        request = message(
            pb.NotifyCheckpointRequest,
            **self._identity(),
            checkpoint_id=checkpoint_id,
            step=step,
            epoch=epoch,
            path=path,
            type=wire.encode_checkpoint_kind(kind),
            size_bytes=size_bytes,
            hashes=dict(hashes or {}),
            model_hash=model_hash,
            metadata=dict(metadata or {}),
            data_cursor=data_cursor,
        )
        return wire.decode_progress(await self._client.call("notify_checkpoint", request))

    async def recover(self) -> views.RecoveryPlan:
        """Return where to resume after a failure, and adopt that generation."""
        request = message(
            pb.RequestRecoveryRequest, job_id=self.job_id, worker_id=self.worker_id, incarnation=self._fence
        )
        response: pb.RecoveryResponse = await self._client.call("request_recovery", request)
        self.generation, self.rank, self.world_size = response.generation, response.rank, response.world_size
        self.hear_generation(response.generation, response.world_size, response.reason)
        shards = wire.decode_shards(response.shards) if not response.next_offset else await self.shards()
        return views.RecoveryPlan(
            checkpoint=wire.decode_checkpoint(response.checkpoint) if response.HasField("checkpoint") else None,
            generation=self.generation,
            rank=self.rank,
            world_size=self.world_size,
            shards=shards,
            reason=response.reason,
        )

    def _identity(self) -> dict[str, Any]:
        if self.lost is not None:
            raise self.lost
        return {
            "job_id": self.job_id,
            "worker_id": self.worker_id,
            "incarnation": self._fence,
            "generation": self.generation,
        }
