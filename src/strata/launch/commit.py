"""Checkpoints of several ranks, with a coordinator: a death is known at once, and the job knows its checkpoints."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import msgspec

from strata.errors import BarrierBroken, CheckpointAborted, StaleGeneration, StaleIncarnation, UnknownWorker
from strata.launch.environment import NEEDED_WORLD_SIZE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from strata.checkpoint.catalog import CheckpointMetadata
    from strata.coordinator.client import Worker

MAX_METADATA_BYTES = 16 << 10
"""More of the user's metadata stays in the manifest; the coordinator keeps many checkpoints in memory."""


class CoordinatorCommit:
    """`strata.checkpoint.group.commit.Commit` by way of a worker that has joined a job.

        manager = CheckpointManager(path, ranks=ranks, commit=CoordinatorCommit(worker))

    The job's workers and the checkpoint's ranks are the same processes. Calls may come from any thread.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._last: tuple[str, int] = ("", 0)
        """The last checkpoint's id, and this process's rank in it."""

    def all_written(self, id: str, *, step: int, rank: int, size: int, timeout_s: float) -> None:  # noqa: A002 - its name
        """Waits at a barrier of the checkpoint's name.

        Raises:
            CheckpointAborted: Somebody died or did not come; the message names them.
            CoordinatorUnavailable: Nobody answers.
        """
        with self._lock:
            self._last = (id, rank)
        if self._worker.world_size != size:
            raise CheckpointAborted(
                f"checkpoint {id} is of {size} ranks, and generation {self._worker.generation} of job "
                f"{self._worker.job_id!r} has {self._worker.world_size} workers; refresh() after every change, "
                "and let each rank be one worker"
            )
        try:
            self._worker.barrier(f"checkpoint/{id}", step=step, timeout_s=timeout_s)
        except BarrierBroken as error:
            raise CheckpointAborted(f"checkpoint {id}: {error}", missing=error.missing) from error
        except (StaleGeneration, StaleIncarnation, UnknownWorker) as error:
            raise CheckpointAborted(f"checkpoint {id}: the job's workers have changed meanwhile: {error}") from error

    def committed(self, metadata: CheckpointMetadata) -> None:
        """Every rank says so, the first one with the size of all.

        Raises:
            CoordinatorError: The coordinator did not take it; the checkpoint exists all the same.
        """
        with self._lock:
            last, rank = self._last
        is_first = rank == 0 or last != metadata.id
        self._worker.notify_checkpoint(
            metadata.id,
            step=metadata.step,
            epoch=metadata.epoch,
            path=metadata.path,
            kind=metadata.checkpoint_type.value,
            size_bytes=metadata.size_bytes if is_first else 0,
            model_hash=metadata.model_hash or "",
            metadata=_texts(metadata.metadata) if is_first else None,
        )


def _texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Texts as they are, all else as JSON; where it is too much, only what the agent needs."""
    texts = {
        str(key): value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for key, value in metadata.items()
    }
    num_bytes = sum(len(key.encode()) + len(value.encode()) for key, value in texts.items())
    if num_bytes <= MAX_METADATA_BYTES:
        return texts
    return {key: value for key, value in texts.items() if key == NEEDED_WORLD_SIZE}
