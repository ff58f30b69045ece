"""The blocking client of the coordinator: the asyncio client, on an event loop in a background thread.

One thread serves all clients of the process. Calls may come from any thread. Clients that are still open at process
exit are closed before the thread stops. A forked child does not have the thread, so calls raise at once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import math
import threading
from typing import TYPE_CHECKING, Any, Self, TypeVar

from strata.coordinator.client._async import AsyncCoordinatorClient
from strata.coordinator.state.job import DEFAULT_JOB
from strata.errors import CoordinatorUnavailable
from strata.lifecycle import Home, at_exit, renewed
from strata.transport import forks

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from types import TracebackType

    from strata.coordinator.client._config import ClientConfig
    from strata.coordinator.client._worker import AsyncWorker
    from strata.coordinator.state import views
    from strata.coordinator.state.checkpoints import CheckpointProgress
    from strata.coordinator.state.events import CheckpointKind, CheckpointRecord, CommandName, CommandRecord, ShardEntry
    from strata.coordinator.state.membership import WorkerEventName, WorkerStateName
    from strata.coordinator.state.shards import Shard
    from strata.coordinator.state.time_use import TimeUse
    from strata.errors import StrataError
    from strata.transport.credentials import ClientSecurity

T = TypeVar("T")

log = logging.getLogger(__name__)

STOP_S = 1.0
"""Seconds that the last tasks of the loop have at process exit."""
CLOSE_TIMEOUT_S = 5.0
"""Seconds that a client has to close its session."""
CHECK_EVERY_S = 1.0
"""Seconds between two checks whether the loop still runs."""


class LoopThread:
    """An event loop in a background thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="strata-client", daemon=True)
        self._thread.start()
        self._home = Home()

    @property
    def usable(self) -> bool:
        return self._home.is_here and self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """Run `work` and return its result. Without `timeout_s`, only its own deadlines apply.

        Raises:
            TimeoutError: `work` did not finish within `timeout_s` and was cancelled.
            CoordinatorUnavailable: The loop has stopped because the process exits.
            ForkedProcess: This is a forked child.
        """
        try:
            self._home.require("this coordinator client")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise _stopped() from None
        except BaseException:
            work.close()
            raise
        try:
            return self._result(future, timeout_s)
        except BaseException:
            future.cancel()  # Ctrl-C in this thread cancels the call in the loop
            raise

    def _result(self, future: concurrent.futures.Future[T], timeout_s: float | None) -> T:
        left_s = math.inf if timeout_s is None else timeout_s
        while True:
            try:
                return future.result(min(left_s, CHECK_EVERY_S))
            except concurrent.futures.CancelledError:  # by `stop`
                raise _stopped() from None
            except TimeoutError:
                if future.done():  # it finished just now, or `work` itself raised
                    return future.result()
            if not self._thread.is_alive():
                raise _stopped()
            left_s -= CHECK_EVERY_S
            if left_s <= 0:
                raise TimeoutError(f"no result within {timeout_s:g} s")

    def stop(self) -> None:
        if self.usable:
            with contextlib.suppress(TimeoutError):
                self.run(_wait_for_tasks(STOP_S), timeout_s=STOP_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_S)
            if not self._thread.is_alive():  # else a callback blocks: the thread ends with the process
                self._loop.close()


def _stopped() -> CoordinatorUnavailable:
    return CoordinatorUnavailable("the process is exiting, and its connection to the coordinator is closed")


async def _wait_for_tasks(timeout_s: float) -> None:
    """Wait for gRPC's own tasks; a task destroyed while pending prints a warning."""
    async with asyncio.timeout(timeout_s):
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)


_shared: LoopThread | None = None
_shared_lock = renewed(threading.Lock())


def shared_loop() -> LoopThread:
    """Return the background loop of the process; started on first use.

    Raises:
        ForkedProcess: This process was forked from one that uses gRPC.
    """
    global _shared  # noqa: PLW0603 - one loop per process: gRPC's asyncio layer needs all channels on one
    forks.use_grpc()
    with _shared_lock:
        if _shared is None or not _shared.usable:
            _shared = LoopThread()
            at_exit(_shared.stop)
        return _shared


class CoordinatorClient:
    """Calls a coordinator; reconnects automatically and retries unanswered calls.

        with CoordinatorClient("localhost:50051") as client:
            worker = client.register_worker("worker-01", job_id="resnet")
            client.register_dataset("imagenet", job_id="resnet", total_samples=1_281_167, shard_size=1_024)
            for shard in worker.shards("imagenet"):
                ...
                worker.ack([shard])

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
        self._loop = shared_loop()
        self._client = self._loop.run(_made(address, config, security))
        self._home = Home()
        self._withdraw_hook: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def connect(self) -> None:
        """Open the session, until `close` or process exit; later calls do nothing."""
        self._loop.run(self._client.connect())
        self._withdraw_hook()
        self._withdraw_hook = at_exit(functools.partial(_close, self._loop, self._client))

    def close(self) -> None:
        """Close the session. Workers that did not deregister are declared dead shortly afterwards. Does nothing in a
        forked child.
        """
        if self._home.is_here:
            self._withdraw_hook()
            _close(self._loop, self._client)

    @property
    def addresses(self) -> list[str]:
        return self._client.addresses

    @property
    def num_connections(self) -> int:
        """How often the session was opened; more than 1 after a lost connection."""
        return self._client.num_connections

    def register_worker(
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
    ) -> Worker:
        """Join a job; heartbeats keep the worker alive from now on.

        `is_watched`: another process detects hung steps, so the coordinator only checks that the worker is alive.
        """
        registering = self._client.register_worker(
            worker_id,
            job_id=job_id,
            capacity=capacity,
            takeover=takeover,
            instance_id=instance_id,
            is_watched=is_watched,
            launch_rank=launch_rank,
            attempt=attempt,
        )
        return Worker(self._loop, self._loop.run(registering))

    def register_dataset(
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
        return self._loop.run(
            self._client.register_dataset(
                dataset_id,
                job_id=job_id,
                total_samples=total_samples,
                shard_size=shard_size,
                shards=shards,
                shuffle=shuffle,
                seed=seed,
            )
        )

    def assigned_shards(
        self,
        worker_id: str,
        *,
        job_id: str = DEFAULT_JOB,
        dataset_id: str | None = None,
        epoch: int | None = None,
        include_done: bool = False,
    ) -> list[Shard]:
        """Return the unfinished shards of a worker, in the order to read them."""
        return self._loop.run(
            self._client.assigned_shards(
                worker_id, job_id=job_id, dataset_id=dataset_id, epoch=epoch, include_done=include_done
            )
        )

    def advance_epoch(
        self, dataset_id: str, *, from_epoch: int, job_id: str = DEFAULT_JOB, require_complete: bool = False
    ) -> int:
        """End `from_epoch` unless another worker already has; return the current epoch of the dataset."""
        return self._loop.run(
            self._client.advance_epoch(
                dataset_id, from_epoch=from_epoch, job_id=job_id, require_complete=require_complete
            )
        )

    def latest_checkpoint(
        self, *, job_id: str = DEFAULT_JOB, kinds: Sequence[CheckpointKind] = ()
    ) -> CheckpointRecord | None:
        """Return the newest committed checkpoint, by default of the kinds that a job can be restored from."""
        return self._loop.run(self._client.latest_checkpoint(job_id=job_id, kinds=kinds))

    def send_command(
        self,
        name: CommandName,
        *,
        job_id: str = DEFAULT_JOB,
        worker_ids: Sequence[str] = (),
        reason: str = "",
        args: Mapping[str, str] | None = None,
    ) -> int:
        """Send a command to the given workers, by default to all; return its id."""
        return self._loop.run(
            self._client.send_command(name, job_id=job_id, worker_ids=worker_ids, reason=reason, args=args)
        )

    def list_jobs(self) -> list[views.JobInfo]:
        return self._loop.run(self._client.list_jobs())

    def drop_job(self, job_id: str, *, force: bool = False, generation: int = 0, reason: str = "") -> bool:
        """Delete a finished job; return False if it does not exist. See `AsyncCoordinatorClient.drop_job`."""
        return self._loop.run(self._client.drop_job(job_id, force=force, generation=generation, reason=reason))

    def list_workers(self, *, job_id: str = DEFAULT_JOB, page_size: int = 0) -> views.MembershipInfo:
        """Return all workers of a job, fetched page by page; `page_size=0` uses the coordinator's maximum."""
        return self._loop.run(self._client.list_workers(job_id=job_id, page_size=page_size))

    def list_datasets(self, *, job_id: str = DEFAULT_JOB) -> list[views.DatasetInfo]:
        return self._loop.run(self._client.list_datasets(job_id=job_id))


def _close(loop: LoopThread, client: AsyncCoordinatorClient) -> None:
    try:
        loop.run(client.close(), timeout_s=CLOSE_TIMEOUT_S)
    except TimeoutError as error:
        log.warning("cannot close the connection to the coordinator at %s: %s", ", ".join(client.addresses), error)


async def _made(
    address: str | Sequence[str], config: ClientConfig | None, security: ClientSecurity | None
) -> AsyncCoordinatorClient:
    return AsyncCoordinatorClient(address, config=config, security=security)


class Worker:
    """A worker of a job, in its own process; see `AsyncWorker` for the meaning of `generation`."""

    def __init__(self, loop: LoopThread, worker: AsyncWorker) -> None:
        self._loop = loop
        self._worker = worker
        self.job_id = worker.job_id
        self.worker_id = worker.worker_id
        self.incarnation = worker.incarnation

    @property
    def generation(self) -> int:
        """The generation that this program has adopted."""
        return self._worker.generation

    @property
    def latest_generation(self) -> int:
        """The newest generation known; if it is ahead, call `refresh()`."""
        return self._worker.latest_generation

    @property
    def rank(self) -> int:
        return self._worker.rank

    @property
    def world_size(self) -> int:
        return self._worker.world_size

    @property
    def lost(self) -> StrataError | None:
        """Why this worker is no longer a member, if so."""
        return self._worker.lost

    def report(
        self,
        *,
        state: WorkerStateName | None = None,
        step: int | None = None,
        epoch: int | None = None,
        **metrics: float,
    ) -> None:
        """Record progress for the next heartbeat; cheap, so call it every step."""
        self._worker.note(state, step, epoch, metrics)

    def note(
        self, state: WorkerStateName | None, step: int | None, epoch: int | None, metrics: Mapping[str, float]
    ) -> None:
        """Like `report`, for metrics with arbitrary names."""
        self._worker.note(state, step, epoch, metrics)

    def report_event(self, kind: WorkerEventName, *, at_s: float, step: int = 0) -> None:
        """Report a moment in this process's life with the next heartbeat."""
        self._worker.report_event(kind, at_s=at_s, step=step)

    def measure(self, read: Callable[[], TimeUse | None]) -> None:
        """Send where this process's time went with every heartbeat: what `read` returns, in another thread."""
        self._worker.measure(read)

    def heartbeat(self) -> None:
        """Send the reported progress now instead of with the next heartbeat."""
        self._loop.run(self._worker.heartbeat())

    def take_commands(self) -> list[CommandRecord]:
        """Return the commands received since the last call; the next heartbeat acknowledges them."""
        return self._worker.take_commands()

    def wait_changed(self, timeout_s: float) -> bool:
        """Wait for a new generation, a command, or the end of this membership; return False after `timeout_s`."""
        return self._loop.run(self._worker.wait_changed(timeout_s))

    def refresh(self) -> views.Standing:
        """Adopt the newest generation with this worker's rank and the world size. Raises if the worker is no longer a
        member.
        """
        return self._loop.run(self._worker.refresh())

    def wait_for_workers(self, count: int, *, timeout_s: float = 60.0) -> None:
        """Wait until the job has at least `count` workers, and adopt that generation."""
        self._loop.run(self._worker.wait_for_workers(count, timeout_s=timeout_s))

    def deregister(self, reason: str = "", *, timeout_s: float | None = None) -> None:
        """Leave the job; the shards move to other workers at once. `timeout_s` overrides the client's."""
        self._loop.run(self._worker.deregister(reason, timeout_s=timeout_s))

    def shards(
        self, dataset_id: str | None = None, *, epoch: int | None = None, include_done: bool = False
    ) -> list[Shard]:
        """Return this worker's shards, and adopt the generation that assigned them."""
        return self._loop.run(self._worker.shards(dataset_id, epoch=epoch, include_done=include_done))

    def ack(self, shards: Sequence[Shard]) -> views.Progress:
        """Acknowledge these shards, of one dataset and epoch, as finished."""
        return self._loop.run(self._worker.ack(shards))

    def barrier(
        self,
        name: str,
        *,
        step: int | None = None,
        members: Sequence[str] = (),
        timeout_s: float = 300.0,
        elastic: bool = False,
    ) -> None:
        """Wait until all members of the generation have arrived; see `AsyncWorker.barrier`."""
        self._loop.run(self._worker.barrier(name, step=step, members=members, timeout_s=timeout_s, elastic=elastic))

    def notify_checkpoint(
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
        return self._loop.run(
            self._worker.notify_checkpoint(
                checkpoint_id,
                step=step,
                epoch=epoch,
                path=path,
                kind=kind,
                size_bytes=size_bytes,
                hashes=hashes,
                model_hash=model_hash,
                metadata=metadata,
                data_cursor=data_cursor,
            )
        )

    def recover(self) -> views.RecoveryPlan:
        """Return where to resume after a failure, and adopt that generation."""
        return self._loop.run(self._worker.recover())
