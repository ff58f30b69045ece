"""The aggregation of a relay: many heartbeats into one per interval, the arrivals of a node at a barrier into one call.
No I/O and no clock.

A relay answers a heartbeat itself only for a worker that the coordinator has confirmed within the worker's lease, so it
never vouches for a worker longer than the coordinator would have. It forwards everything that it cannot answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from strata.coordinator import wire
from strata.coordinator.state.job import DEFAULT_JOB
from strata.coordinator.state.limits import MAX_COUNT
from strata.errors import InvalidArgument, LimitExceeded
from strata.v1 import calls_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from google.protobuf.message import Message

    from strata.errors import StrataError
    from strata.v1 import session_pb2, types_pb2

UNKNOWN_HEARTBEAT_S = 0.2
"""The assumed heartbeat interval of a worker that registered through another connection."""
UNKNOWN_LEASE_S = 2.5
FORGET_AFTER_LEASES = 4.0
"""A worker that has been silent for this many leases is forgotten; if it returns, the relay asks the coordinator."""


@dataclass(slots=True)
class Pulse:
    """One worker, as seen by the relay."""

    fence: int
    heard_s: float
    confirmed_s: float
    """When the coordinator last confirmed that the worker is a member."""
    heartbeat_s: float = UNKNOWN_HEARTBEAT_S
    lease_s: float = UNKNOWN_LEASE_S
    pending: pb.HeartbeatRequest | None = None
    """The heartbeat that was not sent upstream yet."""
    refusal: StrataError | None = None
    """The coordinator's error for the last heartbeat; the worker receives it with its next one."""
    commands: dict[int, types_pb2.Command] = field(default_factory=dict)
    acked_command_id: int = 0
    has_missed_command: bool = False
    """Its notice was lost: the coordinator answers the next heartbeat."""
    in_flight: bool = False
    """A heartbeat is on its way upstream; the next one waits for the answer, so that none pile up."""
    doubted: bool = False
    """Its connection was lost, and it has sent nothing since."""
    known_metrics: set[str] = field(default_factory=set)
    """Metric names that the coordinator has accepted; a new name may be rejected."""
    was_sent: bool = False
    is_urgent: bool = False

    @property
    def fold_s(self) -> float:
        """Short enough that two relays in a row still leave room for a lost heartbeat in the lease."""
        return min(self.heartbeat_s / 2, max(self.lease_s - self.heartbeat_s, 0.0) / 8)

    def add_commands(self, commands: Iterable[types_pb2.Command]) -> None:
        for command in commands:
            if command.command_id > self.acked_command_id:
                self.commands[command.command_id] = command

    def acknowledge(self, command_id: int) -> None:
        self.acked_command_id = max(self.acked_command_id, command_id)
        for done in [number for number in self.commands if number <= self.acked_command_id]:
            del self.commands[done]


@dataclass(slots=True)
class JobPulses:
    generation: int = 0
    num_workers: int = 0
    workers: dict[str, Pulse] = field(default_factory=dict)

    def update(self, generation: int, num_workers: int) -> None:
        if generation >= self.generation:
            self.generation, self.num_workers = generation, num_workers


class Pulses:
    """All workers that use this relay."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobPulses] = {}

    # -- from below ------------------------------------------------------------------------------------------------

    def beat(self, request: pb.HeartbeatRequest, now_s: float) -> pb.HeartbeatResponse | StrataError | None:
        """Return the answer, or None if the coordinator must be asked with `newest(request)`."""
        pulse = self._pulse(request)
        if pulse is None or pulse.fence != request.incarnation:
            return None
        if pulse.refusal is not None:
            self.forget(request)
            return pulse.refusal
        pulse.heard_s = now_s
        if not _is_plain(request, pulse):
            return None
        if pulse.doubted or pulse.has_missed_command or now_s - pulse.confirmed_s > pulse.lease_s:
            pulse.doubted = False
            return None
        if request.acked_command_id > pulse.acked_command_id:
            pulse.acknowledge(request.acked_command_id)
            pulse.is_urgent = True
        if not pulse.was_sent:
            pulse.is_urgent = True
        pulse.pending = self.newest(request)
        job = self._jobs[_job_id(request)]
        commands = [pulse.commands[number] for number in sorted(pulse.commands)]
        return pb.HeartbeatResponse(generation=job.generation, num_workers=job.num_workers, commands=commands)

    def newest(self, request: pb.HeartbeatRequest) -> pb.HeartbeatRequest:
        """Merge this heartbeat into the pending one: fields that it omits stay, and changed metrics replace older
        values.
        """
        pulse = self._pulse(request)
        if pulse is None or pulse.fence != request.incarnation or pulse.pending is None:
            return request
        merged, pulse.pending = pulse.pending, None
        merged.MergeFrom(request)
        return merged

    def doubt(self, job_id: str, worker_id: str, fence: int) -> None:
        """Mark a worker as doubted after its connection was lost: pending heartbeats must not clear the suspicion, its
        next one must.
        """
        pulse = self._jobs.get(job_id, JobPulses()).workers.get(worker_id)
        if pulse is not None and pulse.fence == fence:
            pulse.doubted = True
            pulse.pending = None

    def forget(self, request: pb.HeartbeatRequest | pb.DeregisterWorkerRequest) -> None:
        pulse = self._pulse(request)
        if pulse is None or pulse.fence != request.incarnation:
            return
        job = self._jobs[_job_id(request)]
        del job.workers[request.worker_id]
        if not job.workers:
            del self._jobs[_job_id(request)]

    # -- upwards ---------------------------------------------------------------------------------------------------

    def urgent(self, request: pb.HeartbeatRequest) -> bool:
        pulse = self._pulse(request)
        return pulse is not None and pulse.is_urgent

    def take(self, job_id: str = "", worker_id: str = "", *, all_of_it: bool = False) -> list[pb.HeartbeatRequest]:
        """Return the heartbeats to send now: of all workers, of a job, or of one worker.

        Skips workers whose last heartbeat is unanswered, unless `all_of_it` is set; otherwise heartbeats would pile up
        at a slow coordinator.
        """
        taken = []
        for _, pulse in self._some(job_id, worker_id):
            if pulse.pending is not None and (all_of_it or not pulse.in_flight):
                taken.append(pulse.pending)
                pulse.pending, pulse.in_flight, pulse.was_sent, pulse.is_urgent = None, True, True, False
        return taken

    def renew(self, now_s: float) -> None:
        """Make every worker send a heartbeat at once over the new upstream connection, which ties the workers to it."""
        for (job_id, worker_id), pulse in self._some():
            is_here = not pulse.doubted and now_s - pulse.heard_s <= max(pulse.lease_s, UNKNOWN_LEASE_S)
            if is_here and pulse.pending is None and pulse.refusal is None:
                pulse.pending = pb.HeartbeatRequest(job_id=job_id, worker_id=worker_id, incarnation=pulse.fence)

    @property
    def has_pending(self) -> bool:
        return any(pulse.pending is not None for _, pulse in self._some())

    @property
    def fold_s(self) -> float:
        return min((pulse.fold_s for _, pulse in self._some()), default=UNKNOWN_HEARTBEAT_S / 2)

    def have_all_arrived(self, arrived: set[str], job_id: str, members: frozenset[str]) -> bool:
        """Whether no other worker of this job (or of `members`, if given) can arrive from here."""
        job = self._jobs.get(job_id, JobPulses())
        return all(
            worker in arrived or pulse.doubted or (members and worker not in members)
            for worker, pulse in job.workers.items()
        )

    def forget_silent(self, now_s: float) -> None:
        for (job_id, worker_id), pulse in self._some():
            if now_s - pulse.heard_s > FORGET_AFTER_LEASES * max(pulse.lease_s, 1.0):
                self.forget(pb.HeartbeatRequest(job_id=job_id, worker_id=worker_id, incarnation=pulse.fence))

    # -- from above ------------------------------------------------------------------------------------------------

    def registered(self, request: pb.RegisterWorkerRequest, response: pb.RegisterWorkerResponse, now_s: float) -> None:
        job = self._jobs.setdefault(_job_id(request), JobPulses())
        job.update(response.generation, response.world_size)
        pulse = job.workers.get(request.worker_id)
        if pulse is None or pulse.fence != response.incarnation:
            pulse = job.workers[request.worker_id] = Pulse(response.incarnation, heard_s=now_s, confirmed_s=now_s)
        pulse.heard_s = pulse.confirmed_s = now_s
        pulse.heartbeat_s, pulse.lease_s = response.heartbeat_s, response.lease_s
        pulse.doubted = False

    def confirmed(
        self, request: pb.HeartbeatRequest, response: pb.HeartbeatResponse, *, sent_s: float, folded: bool
    ) -> None:
        """Record that the coordinator accepted a heartbeat sent at `sent_s`."""
        pulse = self._pulse(request)
        if request.incarnation == 0:
            return
        if (pulse is None or pulse.fence != request.incarnation) and folded:
            return  # it has left or was replaced meanwhile
        job = self._jobs.setdefault(_job_id(request), JobPulses())
        job.update(response.generation, response.num_workers)
        if pulse is None or pulse.fence != request.incarnation:
            pulse = job.workers[request.worker_id] = Pulse(request.incarnation, heard_s=sent_s, confirmed_s=sent_s)
        if folded:
            pulse.in_flight = False
        pulse.was_sent = True
        pulse.known_metrics.update(request.metrics)
        pulse.confirmed_s = max(pulse.confirmed_s, sent_s)
        pulse.acknowledge(request.acked_command_id)
        pulse.add_commands(response.commands)
        pulse.has_missed_command = False

    def refused(self, request: pb.HeartbeatRequest, error: StrataError | None, *, folded: bool) -> None:
        """Record that a heartbeat failed; with `error=None`, no answer arrived."""
        pulse = self._pulse(request)
        if pulse is None or pulse.fence != request.incarnation:
            return
        if folded:
            pulse.in_flight = False
            pulse.refusal = error
        elif error is not None and not isinstance(error, InvalidArgument | LimitExceeded):
            self.forget(request)  # the worker has received the error

    def update_generation(self, job_id: str, generation: int, num_workers: int) -> None:
        job = self._jobs.get(job_id)
        if job is not None:
            job.update(generation, num_workers)

    def add_command(self, queued: session_pb2.CommandQueued) -> None:
        pulse = self._jobs.get(queued.job_id, JobPulses()).workers.get(queued.worker_id)
        if pulse is None:
            return
        previous_id = queued.previous_command_id
        if previous_id > pulse.acked_command_id and previous_id not in pulse.commands:
            pulse.has_missed_command = True
        else:
            pulse.add_commands([queued.command])

    def _pulse(self, request: pb.HeartbeatRequest | pb.DeregisterWorkerRequest) -> Pulse | None:
        job = self._jobs.get(_job_id(request))
        return job.workers.get(request.worker_id) if job else None

    def _some(self, job_id: str = "", worker_id: str = "") -> Iterator[tuple[tuple[str, str], Pulse]]:
        jobs = [job_id] if job_id in self._jobs else [] if job_id else list(self._jobs)
        for name in jobs:
            workers = self._jobs[name].workers
            for worker in [worker_id] if worker_id in workers else [] if worker_id else list(workers):
                yield (name, worker), workers[worker]


def _is_plain(request: pb.HeartbeatRequest, pulse: Pulse) -> bool:
    """Whether the coordinator cannot reject anything in this heartbeat; otherwise the worker must get the coordinator's
    own answer.
    """
    return (
        request.step <= MAX_COUNT
        and request.epoch <= MAX_COUNT
        and (not request.state or request.state in wire.STATES)
        and all(name in pulse.known_metrics for name in request.metrics)
    )


# -- barriers ------------------------------------------------------------------------------------------------------


class BarrierKey(NamedTuple):
    """Arrivals with the same key may go upstream in one call."""

    job_id: str
    generation: int
    barrier_id: str
    step: int
    members: frozenset[str]
    has_timeout: bool
    """Without a timeout, the coordinator's default applies, which the relay does not know."""


@dataclass(slots=True)
class Gathering:
    """Arrivals at one barrier: those that wait for others of this node, and those already sent upstream."""

    waiting: list[tuple[pb.WaitBarrierRequest, Callable[[Message | StrataError], None]]] = field(default_factory=list)
    arrived: set[str] = field(default_factory=set)
    """Every worker that has arrived, waiting or sent upstream."""
    num_calls: int = 0
    """Upstream calls without an answer."""


def barrier_key(request: pb.WaitBarrierRequest) -> BarrierKey | None:
    """Return the key of an arrival, or None if it is unusual and the coordinator should see it unchanged."""
    if not (math.isfinite(request.timeout_s) and request.timeout_s >= 0):
        return None
    return BarrierKey(
        _job_id(request),
        request.generation,
        request.barrier_id,
        request.step,
        frozenset(request.members),
        request.timeout_s > 0,
    )


def arriving(request: pb.WaitBarrierRequest) -> set[str]:
    return {request.worker_id, *(other.worker_id for other in request.with_workers)}


def combined(requests: list[pb.WaitBarrierRequest]) -> pb.WaitBarrierRequest:
    """Combine the arrivals into one call; the shortest timeout applies."""
    first, *others = requests
    if not others:
        return first
    whole = pb.WaitBarrierRequest()
    whole.CopyFrom(first)
    whole.timeout_s = min(request.timeout_s for request in requests)
    for other in others:
        whole.with_workers.add(worker_id=other.worker_id, incarnation=other.incarnation)
        whole.with_workers.extend(other.with_workers)
    return whole


def _job_id(
    request: pb.HeartbeatRequest | pb.DeregisterWorkerRequest | pb.RegisterWorkerRequest | pb.WaitBarrierRequest,
) -> str:
    return request.job_id or DEFAULT_JOB
