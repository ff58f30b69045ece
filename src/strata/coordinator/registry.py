"""Assign the shards of datasets to workers, in a few plain calls.

    registry = DatasetRegistry(coordinator_url="localhost:50051")
    registry.register_worker("worker-01")
    registry.register_dataset("imagenet", total_samples=1_281_167, shard_size=1_024, shuffle=True, seed=42)
    for shard in registry.get_assigned_shards(worker_id="worker-01"):
        print(shard.shard_id, shard.start, shard.end)

Without a URL, the registry starts a coordinator inside this process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from strata.coordinator.client import CoordinatorClient
from strata.coordinator.state.job import DEFAULT_JOB
from strata.errors import StaleIncarnation, UnknownDataset, UnknownJob, UnknownWorker

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from strata.coordinator.client import ClientConfig, Worker
    from strata.coordinator.embedded import EmbeddedCoordinator
    from strata.coordinator.state.events import ShardEntry
    from strata.coordinator.state.shards import Shard
    from strata.coordinator.state.views import DatasetInfo, Progress, WorkerInfo


class DatasetRegistry:
    """Keeps the workers registered through it alive until `remove_worker` or `close`."""

    def __init__(
        self,
        coordinator_url: str | None = None,
        *,
        job_id: str = DEFAULT_JOB,
        config: ClientConfig | None = None,
    ) -> None:
        self.job_id = job_id
        self._embedded: EmbeddedCoordinator | None = None
        if coordinator_url is None:
            from strata.coordinator.embedded import EmbeddedCoordinator  # noqa: PLC0415 - only needed without a URL

            self._embedded = EmbeddedCoordinator().start()
            coordinator_url = self._embedded.address
        self._workers: dict[str, Worker] = {}
        self._client = CoordinatorClient(coordinator_url, config=config)
        try:
            self._client.connect()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect; the workers registered here are then declared dead."""
        self._client.close()
        if self._embedded is not None:
            self._embedded.stop()
            self._embedded = None

    # -- workers ---------------------------------------------------------------------------------------------------

    def register_worker(self, worker_id: str, *, capacity: float = 1.0) -> Worker:
        """Add a worker and keep it alive; `capacity` is its share of the shards relative to the other workers."""
        worker = self._client.register_worker(worker_id, job_id=self.job_id, capacity=capacity)
        self._workers[worker_id] = worker
        return worker

    def remove_worker(self, worker_id: str) -> None:
        """Remove a worker; its shards move to the other workers at once."""
        self._own(worker_id).deregister("removed from the registry")
        del self._workers[worker_id]

    @property
    def active_workers(self) -> list[str]:
        """Return the ids of all workers of the job, including those of other registries, ordered by rank."""
        return [worker.worker_id for worker in self.workers()]

    def workers(self) -> list[WorkerInfo]:
        try:
            return self._client.list_workers(job_id=self.job_id).workers
        except UnknownJob:
            return []

    def _own(self, worker_id: str) -> Worker:
        worker = self._workers.get(worker_id)
        if worker is None:
            raise UnknownWorker(
                f"worker {worker_id!r} was not registered through this registry, which has "
                f"{', '.join(sorted(self._workers)) or 'none'}",
                field="worker_id",
            )
        if worker.lost is not None:
            raise StaleIncarnation(f"worker {worker_id!r} was lost ({worker.lost}); register it again")
        return worker

    # -- datasets --------------------------------------------------------------------------------------------------

    def register_dataset(
        self,
        dataset_id: str,
        *,
        total_samples: int = 0,
        shard_size: int = 0,
        shards: Sequence[ShardEntry] = (),
        shuffle: bool = False,
        seed: int = 0,
    ) -> int:
        """Register a dataset by its number of samples or by a list; return its number of shards."""
        return self._client.register_dataset(
            dataset_id,
            job_id=self.job_id,
            total_samples=total_samples,
            shard_size=shard_size,
            shards=shards,
            shuffle=shuffle,
            seed=seed,
        )

    def get_assigned_shards(
        self, worker_id: str, dataset_id: str | None = None, epoch: int | None = None
    ) -> list[Shard]:
        """Return the shards that a worker should read now, in order; finished shards are excluded."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.lost is None:
            return worker.shards(dataset_id, epoch=epoch)
        return self._client.assigned_shards(worker_id, job_id=self.job_id, dataset_id=dataset_id, epoch=epoch)

    def ack_shards(self, worker_id: str, shards: Sequence[Shard]) -> Progress:
        """Mark shards as finished; they are not assigned again in this epoch, whichever worker dies."""
        return self._own(worker_id).ack(shards)

    def advance_epoch(self, dataset_id: str | None = None) -> int:
        """Start the next epoch of one dataset or of all; return the (highest) epoch."""
        infos = [self._dataset(dataset_id)] if dataset_id else self.datasets_info()
        return max(
            (self._client.advance_epoch(d.dataset_id, from_epoch=d.epoch, job_id=self.job_id) for d in infos), default=0
        )

    def current_epoch(self, dataset_id: str | None = None) -> int:
        """Return the epoch of a dataset, or the highest of all."""
        infos = [self._dataset(dataset_id)] if dataset_id else self.datasets_info()
        return max((d.epoch for d in infos), default=0)

    @property
    def datasets(self) -> list[str]:
        return [d.dataset_id for d in self.datasets_info()]

    def datasets_info(self) -> list[DatasetInfo]:
        try:
            return self._client.list_datasets(job_id=self.job_id)
        except UnknownJob:
            return []

    def _dataset(self, dataset_id: str) -> DatasetInfo:
        for info in self.datasets_info():
            if info.dataset_id == dataset_id:
                return info
        raise UnknownDataset(
            f"job {self.job_id!r} has no dataset {dataset_id!r}; register it first", field="dataset_id"
        )
