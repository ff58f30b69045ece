"""The coordinator's client for plain code: the asyncio client, on an event loop in a thread of its own.

One such thread serves every client of the process. Calls may come from any thread. What is still open when the process
ends is closed before the thread is stopped. A forked child has no such thread, and calls raise there at once.
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
    from strata.errors import StrataError
    from strata.transport.credentials import ClientSecurity

T = TypeVar("T")

log = logging.getLogger(__name__)

STOP_S = 1.0
"""How long the loop's last tasks have to end when the process does."""
CLOSE_TIMEOUT_S = 5.0
"""How long a client has to hang up; it is the other side's turn for a moment only."""
LOOK_S = 1.0
"""How often a caller looks whether the loop that it waits for still runs."""


class LoopThread:
    """An event loop that runs in the background."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="strata-client", daemon=True)
        self._thread.start()
        self._home = Home()

    @property
    def usable(self) -> bool:
        return self._home.is_here and self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """Waits for what `work` returns. Left out, its own deadlines are the only ones.

        Raises:
            TimeoutError: It has not ended within `timeout_s`, and is cancelled.
            CoordinatorUnavailable: The loop has stopped, because the process ends.
            ForkedProcess: This is a forked child.
        """
        try:
            self._home.require("this client of the coordinator")
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
            future.cancel()  # Ctrl-C here ends the call there
            raise

    def _result(self, future: concurrent.futures.Future[T], timeout_s: float | None) -> T:
        left_s = math.inf if timeout_s is None else timeout_s
        while True:
            try:
                return future.result(min(left_s, LOOK_S))
            except concurrent.futures.CancelledError:  # by `stop`
                raise _stopped() from None
            except TimeoutError:
                if future.done():  # just now, or it is the work's own
                    return future.result()
            if not self._thread.is_alive():
                raise _stopped()
            left_s -= LOOK_S
            if left_s <= 0:
                raise TimeoutError(f"no answer within {timeout_s:g} s")

    def stop(self) -> None:
        if self.usable:
            with contextlib.suppress(TimeoutError):
                self.run(_others_end(STOP_S), timeout_s=STOP_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_S)
            if not self._thread.is_alive():  # else a callback does not return: the thread ends with the process
                self._loop.close()


def _stopped() -> CoordinatorUnavailable:
    return CoordinatorUnavailable("the process is ending, and its connection to the coordinator is closed")


async def _others_end(timeout_s: float) -> None:
    """Lets gRPC's own tasks finish; a task that is destroyed while it waits complains on the terminal."""
    async with asyncio.timeout(timeout_s):
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)


_shared: LoopThread | None = None
_shared_lock = renewed(threading.Lock())


def shared_loop() -> LoopThread:
    """The process's one background loop, begun when first needed.

    Raises:
        ForkedProcess: This process was forked from one that uses gRPC.
    """
    global _shared  # noqa: PLW0603 - one loop a process: gRPC's asyncio layer wants all channels on one
    forks.use_grpc()
    with _shared_lock:
        if _shared is None or not _shared.usable:
            _shared = LoopThread()
            at_exit(_shared.stop)
        return _shared


class CoordinatorClient:
    """Talks to a coordinator; reconnects by itself and repeats what was not answered.

        with CoordinatorClient("localhost:50051") as client:
            worker = client.register_worker("worker-01", job_id="resnet")
            client.register_dataset("imagenet", job_id="resnet", total_samples=1_281_167, shard_size=1_024)
            for shard in worker.shards("imagenet"):
                ...
                worker.ack([shard])

    Workers registered here are kept alive in the background until they deregister or the client is closed.
    """

    def __init__(
        self,
        address: str | Sequence[str] = "localhost:50051",
        *,
        config: ClientConfig | None = None,
        security: ClientSecurity | None = None,
    ) -> None:
        """`address` may name several coordinators, leader and standbys, as a list or with commas between them."""
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
        """Opens the session, until `close` or the end of the process; a second call does nothing."""
        self._loop.run(self._client.connect())
        self._withdraw_hook()
        self._withdraw_hook = at_exit(functools.partial(_close, self._loop, self._client))

    def close(self) -> None:
        """Hangs up. Workers that did not deregister are declared dead after a moment. Forked children have nothing to
        close.
        """
        if self._home.is_here:
            self._withdraw_hook()
            _close(self._loop, self._client)

    @property
    def addresses(self) -> list[str]:
        return self._client.addresses

    @property
    def num_connections(self) -> int:
        """How often the session was opened; more than 1 means that a connection was lost and renewed."""
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
        """Joins a job; the worker is kept alive from here on.

        `is_watched`: somebody else sees to it that it makes steps; the coordinator only sees to it that it is alive.
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
        """Declares a dataset, by count or by list; gives its number of shards. The same again changes nothing."""
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
        """A worker's unfinished shards, in the order to read them."""
        return self._loop.run(
            self._client.assigned_shards(
                worker_id, job_id=job_id, dataset_id=dataset_id, epoch=epoch, include_done=include_done
            )
        )

    def advance_epoch(
        self, dataset_id: str, *, from_epoch: int, job_id: str = DEFAULT_JOB, require_complete: bool = False
    ) -> int:
        """Ends `from_epoch` if nobody has yet; gives the epoch that the dataset is in."""
        return self._loop.run(
            self._client.advance_epoch(
                dataset_id, from_epoch=from_epoch, job_id=job_id, require_complete=require_complete
            )
        )

    def latest_checkpoint(
        self, *, job_id: str = DEFAULT_JOB, kinds: Sequence[CheckpointKind] = ()
    ) -> CheckpointRecord | None:
        """The newest committed checkpoint; by default of the kinds that a job can be restored from."""
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
        """Orders workers (all, if none is named) to do something; gives the command's id."""
        return self._loop.run(
            self._client.send_command(name, job_id=job_id, worker_ids=worker_ids, reason=reason, args=args)
        )

    def list_jobs(self) -> list[views.JobInfo]:
        return self._loop.run(self._client.list_jobs())

    def drop_job(self, job_id: str, *, force: bool = False, generation: int = 0, reason: str = "") -> bool:
        """Forgets a job that is over; False if it was not there. See `AsyncCoordinatorClient.drop_job`."""
        return self._loop.run(self._client.drop_job(job_id, force=force, generation=generation, reason=reason))

    def list_workers(self, *, job_id: str = DEFAULT_JOB, page_size: int = 0) -> views.MembershipInfo:
        """All workers of a job, fetched page by page; 0 is as many at once as the coordinator gives."""
        return self._loop.run(self._client.list_workers(job_id=job_id, page_size=page_size))

    def list_datasets(self, *, job_id: str = DEFAULT_JOB) -> list[views.DatasetInfo]:
        return self._loop.run(self._client.list_datasets(job_id=job_id))


def _close(loop: LoopThread, client: AsyncCoordinatorClient) -> None:
    try:
        loop.run(client.close(), timeout_s=CLOSE_TIMEOUT_S)
    except TimeoutError as error:
        log.warning("the connection to the coordinator at %s was left open: %s", ", ".join(client.addresses), error)


async def _made(
    address: str | Sequence[str], config: ClientConfig | None, security: ClientSecurity | None
) -> AsyncCoordinatorClient:
    return AsyncCoordinatorClient(address, config=config, security=security)


class Worker:
    """A worker of a job, as its own process sees it; see `AsyncWorker` for what `generation` means here."""

    def __init__(self, loop: LoopThread, worker: AsyncWorker) -> None:
        self._loop = loop
        self._worker = worker
        self.job_id = worker.job_id
        self.worker_id = worker.worker_id
        self.incarnation = worker.incarnation

    @property
    def generation(self) -> int:
        """The membership that this program has adopted."""
        return self._worker.generation

    @property
    def latest_generation(self) -> int:
        """The newest membership heard of; when it is ahead, call `refresh()`."""
        return self._worker.latest_generation

    @property
    def rank(self) -> int:
        return self._worker.rank

    @property
    def world_size(self) -> int:
        return self._worker.world_size

    @property
    def lost(self) -> StrataError | None:
        """Why this worker is out of the job, if it is."""
        return self._worker.lost

    def report(
        self,
        *,
        state: WorkerStateName | None = None,
        step: int | None = None,
        epoch: int | None = None,
        **metrics: float,
    ) -> None:
        """Notes progress for the next heartbeat; costs nothing, so call it every step."""
        self._worker.note(state, step, epoch, metrics)

    def note(
        self, state: WorkerStateName | None, step: int | None, epoch: int | None, metrics: Mapping[str, float]
    ) -> None:
        """As `report`, of metrics that may have any name."""
        self._worker.note(state, step, epoch, metrics)

    def report_event(self, kind: WorkerEventName, *, at_s: float, step: int = 0) -> None:
        """Report a moment in this process's life with the next heartbeat."""
        self._worker.report_event(kind, at_s=at_s, step=step)

    def heartbeat(self) -> None:
        """Sends what was reported now, instead of at the next beat."""
        self._loop.run(self._worker.heartbeat())

    def take_commands(self) -> list[CommandRecord]:
        """The commands that came since the last look; they count as carried out from the next heartbeat on."""
        return self._worker.take_commands()

    def wait_changed(self, timeout_s: float) -> bool:
        """Waits for a new generation, a command, or this worker's end; False if nothing came in time."""
        return self._loop.run(self._worker.wait_changed(timeout_s))

    def refresh(self) -> views.Standing:
        """Adopts the newest generation: its number, this worker's rank, the world size. Raises if it is out."""
        return self._loop.run(self._worker.refresh())

    def wait_for_workers(self, count: int, *, timeout_s: float = 60.0) -> None:
        """Waits until the job has at least this many workers, and adopts that generation."""
        self._loop.run(self._worker.wait_for_workers(count, timeout_s=timeout_s))

    def deregister(self, reason: str = "", *, timeout_s: float | None = None) -> None:
        """Leaves the job; the shards move to the others at once. `timeout_s`: instead of the client's."""
        self._loop.run(self._worker.deregister(reason, timeout_s=timeout_s))

    def shards(
        self, dataset_id: str | None = None, *, epoch: int | None = None, include_done: bool = False
    ) -> list[Shard]:
        """What is this worker's now; adopts the generation that says so."""
        return self._loop.run(self._worker.shards(dataset_id, epoch=epoch, include_done=include_done))

    def ack(self, shards: Sequence[Shard]) -> views.Progress:
        """Says that these shards, of one dataset and epoch, have been trained on."""
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
        """Waits until all members of the generation are here; see `AsyncWorker.barrier`."""
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
        """Says that this rank's part is durable; the last rank's call commits the checkpoint."""
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
        """Where to go on after a failure; adopts the generation that says so."""
        return self._loop.run(self._worker.recover())
