"""The coordinator's client for asyncio; the plain one (`_sync.py`) stands on it."""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any, Self, TypeVar

from strata.coordinator import limits, views, wire
from strata.coordinator.client._config import ClientConfig
from strata.coordinator.client._link import SessionLink
from strata.coordinator.events import number_of
from strata.coordinator.job import DEFAULT_JOB
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
from strata.transport.addresses import parse_addresses
from strata.transport.credentials import ClientSecurity
from strata.v1 import calls_pb2 as pb
from strata.v1 import session_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

    from google.protobuf.message import Message

    from strata.coordinator.checkpoints import CheckpointProgress
    from strata.coordinator.events import CheckpointKind, CheckpointRecord, CommandName, CommandRecord, ShardEntry
    from strata.coordinator.membership import WorkerStateName
    from strata.coordinator.shards import Shard

log = logging.getLogger(__name__)

M = TypeVar("M", bound="Message")

BARRIER_MARGIN_S = 5.0
"""The coordinator ends a barrier in time by itself; the client waits this much longer to hear it."""

_LOST = (StaleIncarnation, UnknownWorker, UnknownJob)
"""Answers that mean: this worker is out."""


class AsyncCoordinatorClient:
    """Talks to a coordinator over one session; reconnects by itself and repeats what was not answered.

    Workers registered here are kept alive by background heartbeats until they deregister or the client is closed.
    """

    def __init__(
        self,
        address: str | Sequence[str] = "localhost:50051",
        *,
        config: ClientConfig | None = None,
        security: ClientSecurity | None = None,
    ) -> None:
        """`address` may name several coordinators, leader and standbys, as a list or with commas between them."""
        self.addresses = [str(a) for a in parse_addresses(address, field="address")]
        self.config = config or ClientConfig()
        self.security = security or ClientSecurity()
        self._workers: dict[tuple[str, str], AsyncWorker] = {}
        self._link: SessionLink | None = None
        self._beater: asyncio.Task[None] | None = None
        self._beat_now = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> None:
        """Opens the session; a second call does nothing."""
        if self._link is not None:
            return
        link = SessionLink(
            self.addresses, self.config, self.security, on_notice=self._notice, on_connect=self._beat_now.set
        )
        await link.open()
        self._link = link
        self._beater = asyncio.create_task(self._beat_forever(), name="strata-heartbeats")

    async def close(self) -> None:
        """Hangs up. Workers that did not deregister are declared dead after a moment."""
        if self._beater is not None:
            self._beater.cancel()
            await asyncio.gather(self._beater, return_exceptions=True)
            self._beater = None
        if self._link is not None:
            await self._link.close()
            self._link = None

    @property
    def num_connections(self) -> int:
        """How often the session was opened; more than 1 means that a connection was lost and renewed."""
        return self._link.num_connections if self._link else 0

    async def call(self, field: str, request: Message, *, timeout_s: float | None = None) -> Any:
        """One call of the service, by its name in session frames."""
        if self._link is None:
            raise CoordinatorUnavailable("the client is not connected; use it in a `with` block, or call connect()")
        return await self._link.call(field, request, timeout_s=timeout_s or self.config.call_timeout_s)

    # -- workers ---------------------------------------------------------------------------------------------------

    async def register_worker(
        self,
        worker_id: str,
        *,
        job_id: str = DEFAULT_JOB,
        capacity: float = 1.0,
        takeover: bool = False,
        instance_id: str = "",
    ) -> AsyncWorker:
        """Joins a job; the worker is kept alive from here on."""
        request = message(
            pb.RegisterWorkerRequest,
            job_id=job_id,
            worker_id=worker_id,
            instance_id=instance_id or uuid.uuid4().hex,
            capacity=capacity,
            hostname=socket.gethostname(),
            takeover=takeover,
        )
        response: pb.RegisterWorkerResponse = await self.call("register_worker", request)
        worker = AsyncWorker(self, request, response)
        self._workers[job_id, worker_id] = worker
        self._beat_now.set()
        return worker

    def _forget(self, worker: AsyncWorker) -> None:
        if self._workers.get((worker.job_id, worker.worker_id)) is worker:
            del self._workers[worker.job_id, worker.worker_id]

    async def _beat_forever(self) -> None:
        while True:
            interval_s = min((w.heartbeat_s for w in self._workers.values()), default=1.0)
            try:
                async with asyncio.timeout(interval_s):
                    await self._beat_now.wait()
            except TimeoutError:
                pass
            self._beat_now.clear()
            beats = [self._beat(worker) for worker in list(self._workers.values())]
            await asyncio.gather(*beats)

    async def _beat(self, worker: AsyncWorker) -> None:
        try:
            await worker.heartbeat()
        except _LOST as error:
            worker.lost = error
            worker.changed.set()
            self._forget(worker)
            log.warning("worker %s is out of job %s: %s", worker.worker_id, worker.job_id, error)
        except InvalidArgument as error:
            log.warning("what %s reported was refused and is left out: %s", worker.worker_id, error)
            worker.forget_report()
            self._beat_now.set()
        except StrataError as error:
            log.debug("heartbeat of %s failed, will be repeated: %s", worker.worker_id, error)

    def _notice(self, notice: session_pb2.Notice) -> None:
        if notice.HasField("generation_changed"):
            changed = notice.generation_changed
            for worker in self._workers.values():
                if worker.job_id == changed.job_id:
                    worker.hear_generation(changed.generation, changed.num_workers, changed.reason)
        elif notice.HasField("command_queued"):
            queued = notice.command_queued
            addressee = self._workers.get((queued.job_id, queued.worker_id))
            if addressee is not None:
                addressee.hear_commands([wire.decode_command(queued.command)])

    # -- datasets --------------------------------------------------------------------------------------------------

    async def register_dataset(
        self,
        dataset_id: str,
        *,
        job_id: str = DEFAULT_JOB,
        total_samples: int = 0,
        shard_size: int = 0,
        shards: Sequence[ShardEntry] = (),
        shuffle: bool = False,
        seed: int = 0,
    ) -> int:
        """Declares a dataset, by count or by list; gives its number of shards. The same again changes nothing."""
        request = message(
            pb.RegisterDatasetRequest,
            job_id=job_id,
            dataset_id=dataset_id,
            total_samples=total_samples,
            shard_size=shard_size,
            shards=[message(pb.ShardSpec, shard_id=s.shard_id, uri=s.uri, num_samples=s.num_samples) for s in shards],
            shuffle=shuffle,
            seed=seed,
        )
        response: pb.RegisterDatasetResponse = await self.call("register_dataset", request)
        return response.num_shards

    async def assigned_shards(
        self,
        worker_id: str,
        *,
        job_id: str = DEFAULT_JOB,
        dataset_id: str | None = None,
        epoch: int | None = None,
        include_done: bool = False,
    ) -> list[Shard]:
        """A worker's unfinished shards, in the order to read them."""
        shards, _ = await self.shards_with_generation(
            worker_id, job_id=job_id, dataset_id=dataset_id, epoch=epoch, include_done=include_done
        )
        return shards

    async def shards_with_generation(
        self, worker_id: str, *, job_id: str, dataset_id: str | None, epoch: int | None, include_done: bool
    ) -> tuple[list[Shard], int]:
        shards: list[Shard] = []
        generation, offset = 0, 0
        while True:
            request = message(
                pb.GetAssignedShardsRequest,
                job_id=job_id,
                worker_id=worker_id,
                dataset_id=dataset_id or "",
                epoch=epoch,
                include_done=include_done,
                offset=offset,
            )
            page: pb.GetAssignedShardsResponse = await self.call("get_assigned_shards", request)
            if offset and page.generation != generation:
                shards, offset = [], 0  # the members changed between two pages: begin again
                continue
            shards += wire.decode_shards(page.shards)
            generation, offset = page.generation, page.next_offset
            if not offset:
                return shards, generation

    async def advance_epoch(
        self, dataset_id: str, *, from_epoch: int, job_id: str = DEFAULT_JOB, require_complete: bool = False
    ) -> int:
        """Ends `from_epoch` if nobody has yet; gives the epoch that the dataset is in."""
        request = message(
            pb.AdvanceEpochRequest,
            job_id=job_id,
            dataset_id=dataset_id,
            from_epoch=from_epoch,
            require_complete=require_complete,
        )
        response: pb.AdvanceEpochResponse = await self.call("advance_epoch", request)
        return response.epoch

    # -- reading and commanding ------------------------------------------------------------------------------------

    async def latest_checkpoint(
        self, *, job_id: str = DEFAULT_JOB, kinds: Sequence[CheckpointKind] = ()
    ) -> CheckpointRecord | None:
        """The newest committed checkpoint; by default of the kinds that a job can be restored from."""
        request = message(
            pb.GetLatestCheckpointRequest, job_id=job_id, types=[wire.encode_checkpoint_kind(k) for k in kinds]
        )
        response: pb.GetLatestCheckpointResponse = await self.call("get_latest_checkpoint", request)
        return wire.decode_checkpoint(response.checkpoint) if response.HasField("checkpoint") else None

    async def send_command(
        self,
        name: CommandName,
        *,
        job_id: str = DEFAULT_JOB,
        worker_ids: Sequence[str] = (),
        reason: str = "",
        args: Mapping[str, str] | None = None,
    ) -> int:
        """Orders workers (all, if none is named) to do something; gives the command's id."""
        request = message(
            pb.SendCommandRequest,
            job_id=job_id,
            worker_ids=list(worker_ids),
            kind=wire.encode_command_name(name),
            reason=reason,
            args=dict(args or {}),
            request_id=uuid.uuid4().hex,
        )
        response: pb.SendCommandResponse = await self.call("send_command", request)
        return response.command_id

    async def list_jobs(self) -> list[views.JobInfo]:
        return wire.decode_jobs(await self.call("list_jobs", pb.ListJobsRequest()))

    async def list_workers(self, *, job_id: str = DEFAULT_JOB) -> views.MembershipInfo:
        return wire.decode_membership(await self.call("list_workers", message(pb.ListWorkersRequest, job_id=job_id)))

    async def list_datasets(self, *, job_id: str = DEFAULT_JOB) -> list[views.DatasetInfo]:
        return wire.decode_datasets(await self.call("list_datasets", message(pb.ListDatasetsRequest, job_id=job_id)))


class AsyncWorker:
    """A worker of a job, as its own process sees it.

    `generation`, `rank` and `world_size` are what this program has adopted; fenced calls carry that generation. When
    the membership changes, `latest_generation` moves ahead of it, and fenced calls raise `StaleGeneration`, until the
    program calls `refresh()`. So nothing is acknowledged under a membership that the program has not seen.
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
        """Why this worker is out of the job, if it is."""
        self.changed = asyncio.Event()
        """Set when the membership has moved on, or this worker is out, or a command came."""
        self._client = client
        self._state: WorkerStateName | None = None
        self._step: int | None = None
        self._epoch: int | None = None
        self._metrics: dict[str, float] = {}
        self._commands: list[CommandRecord] = []
        self._last_command_id = 0
        self._acked_command_id = 0
        self._rounds: Counter[tuple[str, int]] = Counter()

    @property
    def fence(self) -> int:
        """What this process's calls carry on the wire as `incarnation`; nobody else is told."""
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
        """Notes progress for the next heartbeat; costs nothing, so call it every step."""
        if state is not None:
            self._state = wire.check_state(state)
        if step is not None:
            self._step = limits.check_count(step, "step")
        if epoch is not None:
            self._epoch = limits.check_count(epoch, "epoch")
        self._metrics.update(metrics)

    def forget_report(self) -> None:
        """It was refused; a worker must not die of what it reports."""
        self._state = self._step = self._epoch = None
        self._metrics = {}

    async def heartbeat(self) -> None:
        """Sends what was reported now, instead of at the next beat."""
        metrics, self._metrics = self._metrics, {}
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
        )
        beat: pb.HeartbeatResponse = await self._client.call("heartbeat", request, timeout_s=self.lease_s)
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

    def hear_commands(self, commands: Iterable[CommandRecord]) -> None:
        new = [c for c in commands if c.command_id > self._last_command_id]
        if new:
            self._commands += new
            self._last_command_id = new[-1].command_id
            self.changed.set()

    def take_commands(self) -> list[CommandRecord]:
        """The commands that came since the last look; they count as carried out from the next heartbeat on."""
        taken, self._commands = self._commands, []
        if taken:
            self._acked_command_id = taken[-1].command_id
        return taken

    async def wait_changed(self, timeout_s: float) -> bool:
        """Waits for a new generation, a command, or this worker's end; False if nothing came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.changed.wait()
        except TimeoutError:
            return False
        self.changed.clear()
        return True

    # -- membership ------------------------------------------------------------------------------------------------

    async def refresh(self) -> views.MembershipInfo:
        """Adopts the newest generation: its number, this worker's rank, the world size."""
        members = await self._client.list_workers(job_id=self.job_id)
        mine = next((w for w in members.workers if w.worker_id == self.worker_id), None)
        if mine is None or mine.incarnation != self.incarnation:
            raise self.lost or StaleIncarnation(
                f"worker {self.worker_id!r} (incarnation {self.incarnation}) is out of the job; register again"
            )
        self.generation, self.rank, self.world_size = members.generation, mine.rank, len(members.workers)
        self.hear_generation(members.generation, len(members.workers), members.reason)
        return members

    async def wait_for_workers(self, count: int, *, timeout_s: float = 60.0) -> None:
        """Waits until the job has at least this many workers, and adopts that generation."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self.changed.clear()
                    members = await self.refresh()
                    if len(members.workers) >= count:
                        return
                    await self.changed.wait()
        except TimeoutError:
            raise CoordinatorUnavailable(
                f"{self.num_workers} of {count} workers of job {self.job_id!r} came within {timeout_s:g} s; "
                "start the others, or ask for fewer",
                generation=self.latest_generation,
            ) from None

    async def deregister(self, reason: str = "") -> None:
        """Leaves the job; the shards move to the others at once."""
        self._client._forget(self)
        request = message(
            pb.DeregisterWorkerRequest,
            job_id=self.job_id,
            worker_id=self.worker_id,
            incarnation=self._fence,
            reason=reason,
        )
        await self._client.call("deregister_worker", request)

    # -- shards ----------------------------------------------------------------------------------------------------

    async def shards(
        self, dataset_id: str | None = None, *, epoch: int | None = None, include_done: bool = False
    ) -> list[Shard]:
        """What is this worker's now; adopts the generation that says so."""
        while True:  # once, unless the members change between the two calls
            shards, generation = await self._client.shards_with_generation(
                self.worker_id, job_id=self.job_id, dataset_id=dataset_id, epoch=epoch, include_done=include_done
            )
            if generation != self.generation:
                await self.refresh()
            if generation == self.generation:
                return shards

    async def ack(self, shards: Sequence[Shard]) -> views.Progress:
        """Says that these shards, of one dataset and epoch, have been trained on."""
        if not shards:
            raise InvalidArgument("no shard is named; ack takes at least one", field="shards")
        first = shards[0]
        if any((s.dataset_id, s.epoch) != (first.dataset_id, first.epoch) for s in shards):
            raise InvalidArgument("shards of several datasets or epochs; acknowledge them one by one", field="shards")
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
        """Waits until all members of the generation are here.

        `step` tells one use of a name from the next; left out, uses are counted. If the membership changes, the
        barrier breaks (`BarrierBroken`), or, with `elastic`, is entered again in the new generation.
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
        """Says that this rank's part is durable; the last rank's call commits the checkpoint."""
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
        """Where to go on after a failure; adopts the generation that says so."""
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


def message(kind: type[M], /, **fields: Any) -> M:
    """A protobuf message; a value that does not fit its field is the caller's mistake, told by the field's name."""
    try:
        return kind(**fields)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{_misfit(kind, fields)} does not fit: {error}", field=_misfit(kind, fields)) from None


def _misfit(kind: type[Message], fields: Mapping[str, Any]) -> str:
    for name, value in fields.items():
        try:
            kind(**{name: value})
        except (ValueError, TypeError):
            return name
    return kind.__name__
