"""The asyncio client of the coordinator; the blocking client (`_sync.py`) wraps it."""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from typing import TYPE_CHECKING, Any, Self

from strata.coordinator import wire
from strata.coordinator.client._config import ClientConfig
from strata.coordinator.client._link import SessionLink, message
from strata.coordinator.client._worker import OUT, AsyncWorker
from strata.coordinator.state import views
from strata.coordinator.state.job import DEFAULT_JOB
from strata.errors import CoordinatorUnavailable, InvalidArgument, StrataError
from strata.lifecycle import Home
from strata.transport import forks
from strata.transport.addresses import parse_addresses
from strata.transport.credentials import ClientSecurity
from strata.v1 import calls_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from google.protobuf.message import Message

    from strata.coordinator.state.events import CheckpointKind, CheckpointRecord, CommandName, ShardEntry
    from strata.coordinator.state.shards import Shard
    from strata.v1 import session_pb2

log = logging.getLogger(__name__)


class AsyncCoordinatorClient:
    """Calls a coordinator over one session; reconnects automatically and retries unanswered calls.

    Background heartbeats keep the workers registered here alive until they deregister or the client is closed.
    """

    def __init__(
        self,
        address: str | Sequence[str] = "localhost:50051",
        *,
        config: ClientConfig | None = None,
        security: ClientSecurity | None = None,
    ) -> None:
        """Prepare the client; `address` may contain several coordinators (leader and standbys), as a list or separated
        by commas.
        """
        self.addresses = [str(a) for a in parse_addresses(address, field="address")]
        self.config = config or ClientConfig()
        self.security = security or ClientSecurity()
        self._workers: dict[tuple[str, str], AsyncWorker] = {}
        self._link: SessionLink | None = None
        self._home = Home()
        self._beater: asyncio.Task[None] | None = None
        self._beat_now = asyncio.Event()
        self._watches: dict[str, asyncio.Event] = {}

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> None:
        """Open the session; later calls do nothing."""
        forks.use_grpc()
        if self._link is not None:
            return
        link = SessionLink(
            self.addresses, self.config, self.security, on_notice=self._notice, on_connect=self._beat_now.set
        )
        await link.open()
        self._link = link
        self._home = Home()
        self._beater = asyncio.create_task(self._beat_forever(), name="strata-heartbeats")

    async def close(self) -> None:
        """Close the session. Workers that did not deregister are declared dead shortly afterwards.

        Does nothing in a forked child: the session belongs to the parent.
        """
        if not self._home.is_here:
            return
        if self._beater is not None:
            self._beater.cancel()
            await asyncio.gather(self._beater, return_exceptions=True)
            self._beater = None
        if self._link is not None:
            await self._link.close()
            self._link = None

    @property
    def num_connections(self) -> int:
        """How often the session was opened; more than 1 after a lost connection."""
        return self._link.num_connections if self._link else 0

    async def call(self, field: str, request: Message, *, timeout_s: float | None = None) -> Any:
        """Make one call of the service, by its name in session frames."""
        if self._link is None:
            raise CoordinatorUnavailable("the client is not connected; use it in a `with` block or call connect()")
        self._home.require("this coordinator client")
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
        is_watched: bool = False,
        launch_rank: int | None = None,
        attempt: int | None = None,
    ) -> AsyncWorker:
        """Join a job; heartbeats keep the worker alive from now on.

        `is_watched`: another process detects hung steps, so the coordinator only checks that the worker is alive.
        """
        request = message(
            pb.RegisterWorkerRequest,
            job_id=job_id,
            worker_id=worker_id,
            instance_id=instance_id or uuid.uuid4().hex,
            capacity=capacity,
            hostname=socket.gethostname(),
            takeover=takeover,
            is_watched=is_watched,
            launch_rank=launch_rank,
            attempt=attempt,
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
        except OUT as error:
            worker.lost = error
            worker.changed.set()
            self._forget(worker)
            log.warning("worker %s is no longer a member of job %s: %s", worker.worker_id, worker.job_id, error)
        except InvalidArgument as error:
            log.warning("the coordinator rejected the report of %s, so it is dropped: %s", worker.worker_id, error)
            worker.forget_report()
            self._beat_now.set()
        except StrataError as error:
            log.debug("heartbeat of %s failed and will be retried: %s", worker.worker_id, error)

    def _notice(self, notice: session_pb2.Notice) -> None:
        if notice.HasField("generation_changed"):
            changed = notice.generation_changed
            for worker in self._workers.values():
                if worker.job_id == changed.job_id:
                    worker.hear_generation(changed.generation, changed.num_workers, changed.reason)
        elif notice.HasField("command_queued"):
            queued = notice.command_queued
            addressee = self._workers.get((queued.job_id, queued.worker_id))
            if addressee is None:
                pass  # its registration is being answered; its first heartbeat brings the command
            elif addressee.has_heard(queued.previous_command_id):
                addressee.hear_commands([wire.decode_command(queued.command)])
            else:
                self._beat_now.set()
        about = getattr(notice, notice.WhichOneof("notice") or "", None)
        if about is not None and about.job_id in self._watches:
            self._watches[about.job_id].set()

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
        """Register a dataset by its number of samples or by a list; return its number of shards. Repeating the call
        changes nothing.
        """
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
        """Return the unfinished shards of a worker, in the order to read them."""
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
                shards, offset = [], 0  # the membership changed between two pages: start over
                continue
            shards += wire.decode_shards(page.shards)
            generation, offset = page.generation, page.next_offset
            if not offset:
                return shards, generation

    async def advance_epoch(
        self, dataset_id: str, *, from_epoch: int, job_id: str = DEFAULT_JOB, require_complete: bool = False
    ) -> int:
        """End `from_epoch` unless another worker already has; return the current epoch of the dataset."""
        request = message(
            pb.AdvanceEpochRequest,
            job_id=job_id,
            dataset_id=dataset_id,
            from_epoch=from_epoch,
            require_complete=require_complete,
        )
        response: pb.AdvanceEpochResponse = await self.call("advance_epoch", request)
        return response.epoch

    # -- reading and commands --------------------------------------------------------------------------------------

    async def latest_checkpoint(
        self, *, job_id: str = DEFAULT_JOB, kinds: Sequence[CheckpointKind] = ()
    ) -> CheckpointRecord | None:
        """Return the newest committed checkpoint, by default of the kinds that a job can be restored from."""
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
        """Send a command to the given workers, by default to all; return its id."""
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

    async def drop_job(self, job_id: str, *, force: bool = False, generation: int = 0, reason: str = "") -> bool:
        """Delete a finished job; return False if it does not exist. A job with workers requires `force`.

        Pass `generation`, as returned by `list_jobs`, to spare a job that has changed since, or a new job of the same
        name.
        """
        request = message(pb.DropJobRequest, job_id=job_id, force=force, generation=generation, reason=reason)
        response: pb.DropJobResponse = await self.call("drop_job", request)
        return response.dropped

    async def list_workers(
        self, *, job_id: str = DEFAULT_JOB, page_size: int = 0, watch: bool = False
    ) -> views.MembershipInfo:
        """Return all workers of a job, fetched page by page; `page_size=0` uses the coordinator's maximum.

        With `watch`, `wait_notice` returns from now on when something happens in the job. Pass it with every call: a
        session that the coordinator has lost watches nothing.
        """
        if watch:
            self._watches.setdefault(job_id, asyncio.Event())
        workers: list[views.WorkerInfo] = []
        generation, offset = 0, 0
        while True:
            request = message(pb.ListWorkersRequest, job_id=job_id, offset=offset, limit=page_size, watch=watch)
            page: pb.ListWorkersResponse = await self.call("list_workers", request)
            found = wire.decode_membership(page)
            if offset and page.generation != generation:
                workers, offset = [], 0  # the membership changed between two pages: start over
                continue
            workers += found.workers
            generation, offset = page.generation, page.next_offset
            if not offset:
                return views.MembershipInfo(found.generation, found.reason, workers, page.is_watching)

    async def wait_notice(self, job_id: str, timeout_s: float) -> bool:
        """Wait for the next notice about a job that `list_workers` watches; False if none comes in time."""
        watched = self._watches.setdefault(job_id, asyncio.Event())
        try:
            async with asyncio.timeout(timeout_s):
                await watched.wait()
        except TimeoutError:
            return False
        watched.clear()
        return True

    async def list_datasets(self, *, job_id: str = DEFAULT_JOB) -> list[views.DatasetInfo]:
        return wire.decode_datasets(await self.call("list_datasets", message(pb.ListDatasetsRequest, job_id=job_id)))
