"""Drive a coordinator's core step by step: time stands still until a test advances it, and nothing blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from strata.coordinator.config import BarrierConfig, CoordinatorConfig, LeaseConfig, Limits
from strata.coordinator.state import events as e
from strata.coordinator.state.barriers import BarrierEnded, Released, Ticket
from strata.coordinator.state.checkpoints import CheckpointProgress
from strata.coordinator.state.core import Core
from strata.coordinator.state.job import Beat, GenerationChanged, Job, Notice, Registration, ShardPage
from strata.coordinator.state.membership import Member, Membership, WorkerStateName
from strata.errors import StrataError

START_S = 1_000.0
JOB = "job"


class Driver:
    """The callers of one job, the clock and the journal."""

    def __init__(
        self,
        *,
        lease: LeaseConfig | None = None,
        limits: Limits | None = None,
        barrier: BarrierConfig | None = None,
    ) -> None:
        self.config = CoordinatorConfig(
            lease=lease or LeaseConfig(), limits=limits or Limits(), barrier=barrier or BarrierConfig()
        )
        self.core = Core(self.config)
        self.now_s = START_S
        self.journal: list[bytes] = []
        self.core.tick(self.now_s)

    # -- state -----------------------------------------------------------------------------------------------------

    @property
    def job(self) -> Job:
        return self.core.job(JOB)

    @property
    def membership(self) -> Membership:
        return self.job.membership

    @property
    def generation(self) -> int:
        return self.membership.generation

    @property
    def workers(self) -> list[str]:
        return list(self.membership.members)

    def member(self, worker_id: str) -> Member:
        return self.membership.members[worker_id]

    def incarnation(self, worker_id: str) -> int:
        return self.member(worker_id).incarnation

    # -- time and the journal --------------------------------------------------------------------------------------

    def settle(self) -> tuple[list[e.Event], list[Notice]]:
        """Do what the engine does with a batch: seal, make durable, announce."""
        events, notices = self.core.drain()
        self.journal += [e.encode(event) for event in events]
        self.core.announce(notices)
        return events, notices

    def after(self, seconds: float) -> tuple[list[e.Event], list[Notice]]:
        """Advance the clock and tick once."""
        self.now_s += seconds
        self.core.tick(self.now_s)
        return self.settle()

    def listen(self, seconds: float, *beating: str) -> list[e.Event]:
        """Tick every second for this long, while these workers send heartbeats."""
        events = []
        for _ in range(round(seconds)):
            self.now_s += 1.0
            for worker_id in beating:
                self.beat(worker_id)
            self.core.tick(self.now_s)
            events += self.settle()[0]
        return events

    def restarted(self) -> Core:
        """Return the core that another process builds from the journal."""
        core = Core(self.config)
        for payload in self.journal:
            core.apply(e.decode(payload))
        core.resume(self.now_s)
        return core

    # -- calls -----------------------------------------------------------------------------------------------------

    def register(
        self,
        worker_id: str,
        *,
        instance_id: str = "",
        capacity: float = 1.0,
        hostname: str = "",
        takeover: bool = False,
        is_watched: bool = False,
        job_id: str = JOB,
    ) -> Registration:
        """Join and settle."""
        answer = self.register_unsealed(
            worker_id,
            instance_id=instance_id,
            capacity=capacity,
            hostname=hostname,
            takeover=takeover,
            is_watched=is_watched,
            job_id=job_id,
        )
        self.settle()
        return answer()

    def register_unsealed(
        self,
        worker_id: str,
        *,
        instance_id: str = "",
        capacity: float = 1.0,
        hostname: str = "",
        takeover: bool = False,
        is_watched: bool = False,
        job_id: str = JOB,
    ):
        with self.core.job_or_new(job_id) as job:
            return job.register_worker(
                worker_id,
                instance_id=instance_id or f"{worker_id}-process",
                capacity=capacity,
                hostname=hostname,
                takeover=takeover,
                is_watched=is_watched,
                now_s=self.now_s,
            )

    def join(self, *worker_ids: str) -> list[Registration]:
        """Join in one batch."""
        answers = [self.register_unsealed(worker_id) for worker_id in worker_ids]
        self.settle()
        return [answer() for answer in answers]

    def replace(self, worker_id: str, instance_id: str = "another-process") -> Registration:
        return self.register(worker_id, instance_id=instance_id, takeover=True)

    def leave(self, worker_id: str) -> tuple[list[e.Event], list[Notice]]:
        self.job.deregister_worker(worker_id, self.incarnation(worker_id), "")
        return self.settle()

    def beat(
        self,
        worker_id: str,
        *,
        incarnation: int | None = None,
        state: WorkerStateName | None = None,
        step: int | None = None,
        epoch: int | None = None,
        metrics: Mapping[str, float] | None = None,
        acked: int = 0,
    ) -> Beat:
        return self.job.heartbeat(
            worker_id,
            self.incarnation(worker_id) if incarnation is None else incarnation,
            state=state,
            step=step,
            epoch=epoch,
            metrics=metrics or {},
            acked_command_id=acked,
            now_s=self.now_s,
        )

    def suspect(self, worker_id: str) -> None:
        self.membership.suspect(worker_id, self.incarnation(worker_id), self.now_s)

    def dataset(self, num_shards: int, dataset_id: str = "data", **how: object) -> tuple[int, int]:
        """Register a dataset with ten samples per shard."""
        spec = e.DatasetSpec(dataset_id=dataset_id, total_samples=num_shards * 10, shard_size=10, **how)  # type: ignore[arg-type]
        return self.register_dataset(spec)

    def register_dataset(self, spec: e.DatasetSpec, job_id: str = JOB) -> tuple[int, int]:
        with self.core.job_or_new(job_id) as job:
            answer = job.register_dataset(spec)
        self.settle()
        return answer

    def page(
        self,
        worker_id: str,
        *,
        dataset_id: str = "",
        epoch: int | None = None,
        include_done: bool = False,
        offset: int = 0,
    ) -> ShardPage:
        return self.job.assigned_shards(
            worker_id, dataset_id=dataset_id, epoch=epoch, include_done=include_done, offset=offset
        )

    def indices(self, worker_id: str, **which: object) -> list[int]:
        return [shard.index for shard in self.page(worker_id, **which).shards]  # type: ignore[arg-type]

    def ack(
        self,
        worker_id: str,
        indices: Sequence[int],
        *,
        dataset_id: str = "data",
        epoch: int = 0,
        incarnation: int | None = None,
        generation: int | None = None,
    ) -> tuple[int, int]:
        return self.job.ack_shards(
            worker_id,
            self.incarnation(worker_id) if incarnation is None else incarnation,
            self.generation if generation is None else generation,
            dataset_id=dataset_id,
            epoch=epoch,
            indices=indices,
        )

    def advance(self, from_epoch: int, *, dataset_id: str = "data", require_complete: bool = False) -> int:
        return self.job.advance_epoch(dataset_id, from_epoch=from_epoch, require_complete=require_complete)

    def arrive(self, worker_id: str, barrier_id: str = "sync", step: int = 0, **how: object) -> Released | Ticket:
        """Arrive, in whichever round of the barrier."""
        answer = self.wait_barrier(worker_id, barrier_id, step, **how)  # type: ignore[arg-type]
        return answer._replace(round=0) if isinstance(answer, Ticket) else answer

    def wait_barrier(
        self,
        worker_id: str,
        barrier_id: str = "sync",
        step: int = 0,
        *,
        members: Sequence[str] = (),
        timeout_s: float = 0.0,
        incarnation: int | None = None,
        generation: int | None = None,
    ) -> Released | Ticket:
        return self.job.wait_barrier(
            worker_id,
            self.incarnation(worker_id) if incarnation is None else incarnation,
            self.generation if generation is None else generation,
            barrier_id=barrier_id,
            step=step,
            members=frozenset(members),
            timeout_s=timeout_s,
            now_s=self.now_s,
        )

    def notify(
        self,
        worker_id: str,
        checkpoint_id: str = "ckpt",
        *,
        step: int = 100,
        epoch: int = 1,
        path: str = "/ckpt",
        kind: e.CheckpointKind = "FULL",
        ack: e.RankAck | None = None,
        incarnation: int | None = None,
        generation: int | None = None,
        wall_s: float = 0.0,
    ) -> CheckpointProgress:
        return self.job.notify_checkpoint(
            worker_id,
            self.incarnation(worker_id) if incarnation is None else incarnation,
            self.generation if generation is None else generation,
            spec=e.CheckpointSpec(checkpoint_id=checkpoint_id, step=step, epoch=epoch, path=path, type=kind),
            ack=ack or e.RankAck(),
            wall_s=wall_s,
        )

    def commit(self, checkpoint_id: str, kind: e.CheckpointKind = "FULL", *, step: int = 100) -> None:
        """Let every worker acknowledge the checkpoint."""
        for worker_id in self.workers:
            self.notify(worker_id, checkpoint_id, kind=kind, step=step)
        self.settle()

    def command(
        self,
        *worker_ids: str,
        name: e.CommandName = "STOP",
        reason: str = "",
        args: Mapping[str, str] | None = None,
        request_id: str = "",
    ) -> tuple[int, int]:
        return self.job.send_command(worker_ids, name, reason=reason, args=args or {}, request_id=request_id)

    # -- assertions ------------------------------------------------------------------------------------------------

    @contextmanager
    def refused(self, error: type[StrataError], field: str, *, generation: int | None = None) -> Iterator[None]:
        """Assert that the call inside fails with exactly this error and field, and changes nothing."""
        before = self.core.snapshot()
        with pytest.raises(error) as caught:
            yield
        assert type(caught.value) is error
        assert caught.value.field == field
        if generation is not None:
            assert caught.value.generation == generation
        assert self.core.snapshot() == before
        assert not self.core.has_news


def ended(notices: Sequence[Notice]) -> list[BarrierEnded]:
    return [notice for notice in notices if isinstance(notice, BarrierEnded)]


def generations(notices: Sequence[Notice]) -> list[int]:
    return [notice.generation for notice in notices if isinstance(notice, GenerationChanged)]


def of(kind: type, events: Sequence[e.Event]) -> list:
    return [event for event in events if isinstance(event, kind)]


BAD_IDS = ["", "x" * 129, " padded", "-dash", "a b", "a\n", "ünïcode", "semi;colon", "a\x00b"]
"""Empty, too long, malformed."""
BAD_COUNTS = [-1, 2**53 + 1, 2**63, 2**64 - 1]
