"""Commit checkpoints of several ranks through the coordinator, which notices a dead rank and records checkpoints."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import msgspec

from strata.errors import (
    BarrierBroken,
    CheckpointAborted,
    InvalidArgument,
    StaleGeneration,
    StaleIncarnation,
    UnknownWorker,
)
from strata.launch.environment import NEEDED_WORLD_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from strata.checkpoint.catalog import CheckpointMetadata
    from strata.coordinator.client import Worker

MAX_METADATA_BYTES = 16 << 10
"""Larger metadata stays in the manifest only; the coordinator keeps many checkpoints in memory."""


def meet(worker: Worker, name: str, *, step: int, members: Sequence[str], timeout_s: float) -> None:
    """Wait at a barrier for these members, or for all members of the generation if none are named.

    With names, workers that are not among them may join and leave meanwhile, as parameter servers do.

    Raises:
        BarrierBroken: A member is gone or did not arrive; the message names it.
        StaleGeneration, StaleIncarnation, UnknownWorker: The membership has changed.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = max(deadline_s - time.monotonic(), 0.1)
        try:
            worker.barrier(name, step=step, members=members, timeout_s=left_s)
        except BarrierBroken as error:
            if not members or error.missing or time.monotonic() >= deadline_s:
                raise
        except StaleGeneration:
            if not members or time.monotonic() >= deadline_s:
                raise
        except InvalidArgument as error:
            if error.field != "members":
                raise
            raise BarrierBroken(f"barrier {name!r}: a member is gone: {error.message}") from error
        else:
            return
        worker.refresh()


class CoordinatorCommit:
    """A `strata.checkpoint.group.commit.Commit` that uses a worker of a job.

        manager = CheckpointManager(path, ranks=ranks, commit=CoordinatorCommit(worker))

    The job's workers and the checkpoint's ranks are the same processes. Calls are safe from any thread.
    """

    def __init__(self, worker: Worker, members: Callable[[], Sequence[str]] = tuple) -> None:
        """`members`: returns the names of the ranks of a checkpoint; none if all workers of the job are."""
        self._worker = worker
        self._members = members
        self._lock = threading.Lock()
        self._last: tuple[str, int] = ("", 0)
        """Id of the last checkpoint, and this process's rank in it."""

    def all_written(self, id: str, *, step: int, rank: int, size: int, timeout_s: float) -> None:  # noqa: A002 - the protocol's name
        """Wait at a barrier for all ranks.

        Raises:
            CheckpointAborted: A rank died or did not arrive; the message names it.
            CoordinatorUnavailable: The coordinator does not answer.
        """
        with self._lock:
            self._last = (id, rank)
        try:
            if self._worker.generation != self._worker.latest_generation:
                self._worker.refresh()  # a rank was restarted alone
        except (StaleIncarnation, UnknownWorker) as error:
            raise CheckpointAborted(f"checkpoint {id}: the membership has changed: {error}") from error
        members = self._members()
        if (len(members) or self._worker.world_size) != size:
            raise CheckpointAborted(
                f"checkpoint {id} has {size} ranks, but generation {self._worker.generation} of job "
                f"{self._worker.job_id!r} has {self._worker.world_size} workers; call refresh() after every change, "
                "and register each rank as one worker"
            )
        try:
            meet(self._worker, f"checkpoint/{id}", step=step, members=members, timeout_s=timeout_s)
        except BarrierBroken as error:
            raise CheckpointAborted(f"checkpoint {id}: {error}", missing=error.missing) from error
        except (StaleGeneration, StaleIncarnation, UnknownWorker) as error:
            raise CheckpointAborted(f"checkpoint {id}: the membership has changed: {error}") from error

    def committed(self, metadata: CheckpointMetadata) -> None:
        """Acknowledge the checkpoint; rank 0 reports its size.

        Raises:
            CoordinatorError: The coordinator did not accept it; the checkpoint exists nevertheless.
        """
        with self._lock:
            last, rank = self._last
        is_first = rank == 0 or last != metadata.id
        if self._members() and self._worker.generation != self._worker.latest_generation:
            self._worker.refresh()  # a parameter server has joined or left
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
    """Return strings unchanged and other values as JSON; if that is too large, only what the agent needs."""
    texts = {
        str(key): value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for key, value in metadata.items()
    }
    num_bytes = sum(len(key.encode()) + len(value.encode()) for key, value in texts.items())
    if num_bytes <= MAX_METADATA_BYTES:
        return texts
    return {key: value for key, value in texts.items() if key == NEEDED_WORLD_SIZE}
