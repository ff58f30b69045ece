"""The coordinator's calls: decode the request, make one call on a job, encode the answer.

`METHODS` is the whole service. Unary calls and session frames both use it, so they cannot differ. One table in
`wire.py` maps errors to gRPC statuses.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from strata.coordinator import wire
from strata.coordinator.serve.admission import SMALL_BYTES, check_answer, check_repeated, check_wire
from strata.coordinator.serve.metrics import Metrics
from strata.coordinator.state import limits
from strata.errors import InvalidArgument, StrataError
from strata.transport.tokens import Role, require
from strata.v1 import calls_pb2 as pb
from strata.v1 import types_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message

    from strata.clock import Clock
    from strata.coordinator.config import CoordinatorConfig
    from strata.coordinator.serve.admission import AdmissionControl
    from strata.coordinator.serve.backend import Backend
    from strata.coordinator.state.barriers import Released, Ticket
    from strata.coordinator.state.checkpoints import CheckpointProgress
    from strata.coordinator.state.core import Core
    from strata.coordinator.state.events import CheckpointRecord
    from strata.coordinator.state.job import Beat, Job, Recovery, Registration, ShardPage
    from strata.coordinator.state.membership import Membership
    from strata.coordinator.state.views import Standing

log = logging.getLogger(__name__)

NONCE_BITS = 31


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    """As in the .proto."""
    request: type[Message]
    response: type[Message]
    decide: Callable[[Core, Any, Clock], Any]
    encode: Callable[[Any, CoordinatorConfig], Message]
    volatile: bool = False
    """Answered at once: touches nothing durable."""
    is_heavy: bool = False
    """Its cost grows with the number of workers, shards or jobs, so only one such call runs per turn of the event
    loop."""
    role: Role = Role.WORKER
    """The lowest role that may make the call."""
    role_for: Callable[[Any], Role] | None = None
    """The lowest role for a given request, if some requests need more than `role`."""
    repeated: tuple[str, ...] = field(init=False)
    """The repeated fields of a request."""
    field: str = field(init=False)
    """Its name in session frames: the same in snake_case."""

    def __post_init__(self) -> None:
        snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in self.name).lstrip("_")
        object.__setattr__(self, "field", snake)
        repeated = tuple(one.name for one in self.request.DESCRIPTOR.fields if one.is_repeated)
        object.__setattr__(self, "repeated", repeated)

    def needed(self, request: Any) -> Role:
        return self.role if self.role_for is None else self.role_for(request)

    def answer(self, value: Any, config: CoordinatorConfig) -> Message | StrataError:
        """Encode `value`, or the error instead. Never raises, because other callers are answered afterwards."""
        if isinstance(value, StrataError):
            return value
        try:
            return self.encode(value, config)
        except Exception as error:
            log.exception("cannot encode an answer of %s", self.name)
            return StrataError(f"the coordinator cannot encode its answer ({error}); see its log")


# -- workers -------------------------------------------------------------------------------------------------------


def _register_worker(core: Core, r: pb.RegisterWorkerRequest, clock: Clock) -> Callable[[], Registration]:
    with core.job_or_new(r.job_id) as job:
        return job.register_worker(
            r.worker_id,
            instance_id=r.instance_id,
            capacity=r.capacity,
            hostname=r.hostname,
            takeover=r.takeover,
            is_watched=r.is_watched,
            launch_rank=r.launch_rank if r.HasField("launch_rank") else None,
            attempt=r.attempt if r.HasField("attempt") else None,
            nonce=secrets.randbits(NONCE_BITS),
            now_s=clock.monotonic_s(),
        )


def _registered(value: Registration, config: CoordinatorConfig) -> pb.RegisterWorkerResponse:
    return pb.RegisterWorkerResponse(
        incarnation=value.fence,
        generation=value.generation,
        rank=value.rank,
        world_size=value.world_size,
        lease_s=config.lease.lease_s,
        heartbeat_s=config.lease.heartbeat_s,
    )


def _deregister_worker(core: Core, r: pb.DeregisterWorkerRequest, _clock: Clock) -> Callable[[], int]:
    return core.job(r.job_id).deregister_worker(r.worker_id, r.incarnation, r.reason)


def _deregistered(generation: int, _config: CoordinatorConfig) -> pb.DeregisterWorkerResponse:
    return pb.DeregisterWorkerResponse(generation=generation)


def _heartbeat(core: Core, r: pb.HeartbeatRequest, clock: Clock) -> Beat:
    state = r.state
    return core.job(r.job_id).heartbeat(
        r.worker_id,
        r.incarnation,
        state=wire.decode_state(state) if state else None,
        step=r.step if r.HasField("step") else None,
        epoch=r.epoch if r.HasField("epoch") else None,
        metrics=r.metrics,
        acked_command_id=r.acked_command_id,
        now_s=clock.monotonic_s(),
        events=wire.decode_worker_events(r.events) if r.events else (),
        time_use=wire.decode_time_use(r.time_use) if r.HasField("time_use") else None,
    )


def _beaten(beat: Beat, _config: CoordinatorConfig) -> pb.HeartbeatResponse:
    if not beat.commands:
        return _all_is_well(beat.generation, beat.num_workers)
    commands = map(wire.encode_command, beat.commands)
    return pb.HeartbeatResponse(generation=beat.generation, num_workers=beat.num_workers, commands=commands)


@lru_cache(maxsize=1_024)
def _all_is_well(generation: int, num_workers: int) -> pb.HeartbeatResponse:
    """Return one shared message: answers are never modified, only copied into frames."""
    return pb.HeartbeatResponse(generation=generation, num_workers=num_workers)


def _report_suspicion(core: Core, r: pb.ReportSuspicionRequest, clock: Clock) -> None:
    core.job(r.job_id).report_suspicion(r.worker_id, r.incarnation, r.reason, now_s=clock.monotonic_s())


def _suspected(_value: None, _config: CoordinatorConfig) -> pb.ReportSuspicionResponse:
    return pb.ReportSuspicionResponse()


def _send_command(core: Core, r: pb.SendCommandRequest, _clock: Clock) -> tuple[int, int]:
    return core.job(r.job_id).send_command(
        list(r.worker_ids),
        wire.decode_command_name(r.kind),
        reason=r.reason,
        args=dict(r.args),
        request_id=r.request_id,
    )


_OF_WORKERS = frozenset({types_pb2.COMMAND_KIND_STOP, types_pb2.COMMAND_KIND_CHECKPOINT_NOW})
"""Commands that the ranks of a job may agree on: when to save, and to stop together."""


def _role_to_send(r: pb.SendCommandRequest) -> Role:
    return Role.WORKER if r.kind in _OF_WORKERS else Role.ADMIN


def _sent(value: tuple[int, int], _config: CoordinatorConfig) -> pb.SendCommandResponse:
    return pb.SendCommandResponse(command_id=value[0], num_workers=value[1])


# -- shards --------------------------------------------------------------------------------------------------------


def _register_dataset(core: Core, r: pb.RegisterDatasetRequest, _clock: Clock) -> tuple[int, int]:
    with core.job_or_new(r.job_id) as job:
        return job.register_dataset(wire.decode_dataset(r))


def _dataset_registered(value: tuple[int, int], _config: CoordinatorConfig) -> pb.RegisterDatasetResponse:
    return pb.RegisterDatasetResponse(num_shards=value[0], epoch=value[1])


def _get_assigned_shards(core: Core, r: pb.GetAssignedShardsRequest, _clock: Clock) -> Callable[[], ShardPage]:
    job = core.job(r.job_id)
    return lambda: job.assigned_shards(
        r.worker_id,
        dataset_id=r.dataset_id,
        epoch=r.epoch if r.HasField("epoch") else None,
        include_done=r.include_done,
        offset=r.offset,
    )


def _shard_page(page: ShardPage, _config: CoordinatorConfig) -> pb.GetAssignedShardsResponse:
    return pb.GetAssignedShardsResponse(
        generation=page.generation, shards=wire.encode_shards(page.shards), next_offset=page.next_offset
    )


def _ack_shards(core: Core, r: pb.AckShardsRequest, _clock: Clock) -> tuple[int, int]:
    return core.job(r.job_id).ack_shards(
        r.worker_id, r.incarnation, r.generation, dataset_id=r.dataset_id, epoch=r.epoch, indices=list(r.indices)
    )


def _acked(value: tuple[int, int], _config: CoordinatorConfig) -> pb.AckShardsResponse:
    return pb.AckShardsResponse(num_done=value[0], num_shards=value[1])


def _advance_epoch(core: Core, r: pb.AdvanceEpochRequest, _clock: Clock) -> int:
    return core.job(r.job_id).advance_epoch(r.dataset_id, from_epoch=r.from_epoch, require_complete=r.require_complete)


def _advanced(epoch: int, _config: CoordinatorConfig) -> pb.AdvanceEpochResponse:
    return pb.AdvanceEpochResponse(epoch=epoch)


# -- barriers and checkpoints --------------------------------------------------------------------------------------


def _wait_barrier(core: Core, r: pb.WaitBarrierRequest, clock: Clock) -> Released | Ticket:
    return core.job(r.job_id).wait_barrier(
        r.worker_id,
        r.incarnation,
        r.generation,
        barrier_id=r.barrier_id,
        step=r.step,
        members=frozenset(r.members),
        timeout_s=r.timeout_s,
        now_s=clock.monotonic_s(),
        others=[(other.worker_id, other.incarnation) for other in r.with_workers],
    )


def _released(value: Released, _config: CoordinatorConfig) -> pb.WaitBarrierResponse:
    return pb.WaitBarrierResponse(generation=value.generation, num_members=value.num_members)


def _notify_checkpoint(core: Core, r: pb.NotifyCheckpointRequest, clock: Clock) -> CheckpointProgress:
    spec, ack = wire.decode_checkpoint_ack(r)
    return core.job(r.job_id).notify_checkpoint(
        r.worker_id, r.incarnation, r.generation, spec=spec, ack=ack, wall_s=clock.wall_s()
    )


def _checkpoint_progress(value: CheckpointProgress, _config: CoordinatorConfig) -> pb.NotifyCheckpointResponse:
    return pb.NotifyCheckpointResponse(committed=value.committed, num_acked=value.num_acked, num_ranks=value.num_ranks)


def _get_latest_checkpoint(core: Core, r: pb.GetLatestCheckpointRequest, _clock: Clock) -> CheckpointRecord | None:
    return core.job(r.job_id).latest_checkpoint([wire.decode_checkpoint_kind(t, "types") for t in r.types])


def _latest_checkpoint(record: CheckpointRecord | None, _config: CoordinatorConfig) -> pb.GetLatestCheckpointResponse:
    return pb.GetLatestCheckpointResponse(checkpoint=wire.encode_checkpoint(record))


def _request_recovery(core: Core, r: pb.RequestRecoveryRequest, _clock: Clock) -> Callable[[], Recovery]:
    job = core.job(r.job_id)
    return lambda: job.request_recovery(r.worker_id, r.incarnation)


def _recovery(value: Recovery, _config: CoordinatorConfig) -> pb.RecoveryResponse:
    return pb.RecoveryResponse(
        checkpoint=wire.encode_checkpoint(value.checkpoint),
        generation=value.page.generation,
        rank=value.registration.rank,
        world_size=value.registration.world_size,
        shards=wire.encode_shards(value.page.shards),
        next_offset=value.page.next_offset,
        reason=value.reason,
    )


# -- jobs ----------------------------------------------------------------------------------------------------------


def _drop_job(core: Core, r: pb.DropJobRequest, _clock: Clock) -> bool:
    return core.drop_job(r.job_id, force=r.force, generation=r.generation, reason=r.reason)


def _dropped(dropped: bool, _config: CoordinatorConfig) -> pb.DropJobResponse:
    return pb.DropJobResponse(dropped=dropped)


# -- reading -------------------------------------------------------------------------------------------------------


def _list_jobs(core: Core, _r: pb.ListJobsRequest, _clock: Clock) -> pb.ListJobsResponse:
    return pb.ListJobsResponse(jobs=[_job(job) for job in core.jobs.values()])


def _job(job: Job) -> pb.Job:
    latest = job.checkpoints.latest()
    return pb.Job(
        job_id=job.job_id,
        generation=job.membership.generation,
        num_workers=len(job.membership.members),
        num_datasets=len(job.shards.datasets),
        checkpoint_step=latest.checkpoint.step if latest else 0,
    )


def _list_workers(core: Core, r: pb.ListWorkersRequest, clock: Clock) -> Callable[[], pb.ListWorkersResponse]:
    membership, most = core.job(r.job_id).membership, core.config.limits.max_workers_per_reply
    begin = limits.check_count(r.offset, "offset")
    return lambda: _workers(membership, clock.monotonic_s(), begin, begin + min(r.limit or most, most))


def _workers(membership: Membership, now_s: float, begin: int, end: int) -> pb.ListWorkersResponse:
    num_workers = len(membership.members)
    return pb.ListWorkersResponse(
        num_workers=num_workers,
        next_offset=end if end < num_workers else 0,
        generation=membership.generation,
        reason=membership.generation_reason,
        workers=[
            types_pb2.Worker(
                worker_id=m.worker_id,
                incarnation=m.incarnation,
                rank=rank,
                state=wire.encode_state(m.state),
                step=m.step,
                epoch=m.epoch,
                capacity=m.joined.capacity,
                hostname=m.joined.hostname,
                silent_s=max(now_s - m.last_seen_s, 0.0),
                suspect=m.suspect_since_s is not None,
                metrics={name: series.last for name, series in m.metrics.items()},
                launch_rank=m.joined.launch_rank,
                attempt=m.joined.attempt,
                events=map(wire.encode_worker_event, m.events.values()),
                time_use=None if m.time_use is None else wire.encode_time_use(m.time_use),
            )
            for rank, m in itertools.islice(membership.ranked(), begin, end)
        ],
    )


def _get_membership(core: Core, r: pb.GetMembershipRequest, _clock: Clock) -> Callable[[], Standing]:
    return core.job(r.job_id).standing(r.worker_id, r.incarnation)


def _standing(value: Standing, _config: CoordinatorConfig) -> pb.GetMembershipResponse:
    return pb.GetMembershipResponse(
        generation=value.generation, rank=value.rank, world_size=value.world_size, reason=value.reason
    )


def _list_datasets(core: Core, r: pb.ListDatasetsRequest, _clock: Clock) -> pb.ListDatasetsResponse:
    return pb.ListDatasetsResponse(
        datasets=[
            types_pb2.DatasetStatus(
                dataset_id=d.spec.dataset_id,
                num_shards=d.spec.num_shards,
                total_samples=d.total_samples,
                epoch=d.epoch,
                num_done=d.num_done,
                shuffle=d.spec.shuffle,
                seed=d.spec.seed,
            )
            for d in core.job(r.job_id).shards.datasets.values()
        ]
    )


def _as_it_is(response: Message, _config: CoordinatorConfig) -> Message:
    return response


METHODS = (
    Method("RegisterWorker", pb.RegisterWorkerRequest, pb.RegisterWorkerResponse, _register_worker, _registered),
    Method(
        "DeregisterWorker",
        pb.DeregisterWorkerRequest,
        pb.DeregisterWorkerResponse,
        _deregister_worker,
        _deregistered,
    ),
    Method("Heartbeat", pb.HeartbeatRequest, pb.HeartbeatResponse, _heartbeat, _beaten, volatile=True),
    Method(
        "RegisterDataset",
        pb.RegisterDatasetRequest,
        pb.RegisterDatasetResponse,
        _register_dataset,
        _dataset_registered,
        is_heavy=True,
    ),
    Method(
        "GetAssignedShards",
        pb.GetAssignedShardsRequest,
        pb.GetAssignedShardsResponse,
        _get_assigned_shards,
        _shard_page,
        is_heavy=True,
    ),
    Method("AckShards", pb.AckShardsRequest, pb.AckShardsResponse, _ack_shards, _acked),
    Method("AdvanceEpoch", pb.AdvanceEpochRequest, pb.AdvanceEpochResponse, _advance_epoch, _advanced),
    Method("WaitBarrier", pb.WaitBarrierRequest, pb.WaitBarrierResponse, _wait_barrier, _released),
    Method(
        "NotifyCheckpoint",
        pb.NotifyCheckpointRequest,
        pb.NotifyCheckpointResponse,
        _notify_checkpoint,
        _checkpoint_progress,
    ),
    Method(
        "GetLatestCheckpoint",
        pb.GetLatestCheckpointRequest,
        pb.GetLatestCheckpointResponse,
        _get_latest_checkpoint,
        _latest_checkpoint,
        role=Role.READER,
        is_heavy=True,
    ),
    Method(
        "RequestRecovery",
        pb.RequestRecoveryRequest,
        pb.RecoveryResponse,
        _request_recovery,
        _recovery,
        is_heavy=True,
    ),
    Method(
        "SendCommand",
        pb.SendCommandRequest,
        pb.SendCommandResponse,
        _send_command,
        _sent,
        role_for=_role_to_send,
        is_heavy=True,
    ),
    Method(
        "ReportSuspicion",
        pb.ReportSuspicionRequest,
        pb.ReportSuspicionResponse,
        _report_suspicion,
        _suspected,
        volatile=True,
    ),
    Method("DropJob", pb.DropJobRequest, pb.DropJobResponse, _drop_job, _dropped, role=Role.ADMIN),
    Method(
        "ListJobs",
        pb.ListJobsRequest,
        pb.ListJobsResponse,
        _list_jobs,
        _as_it_is,
        role=Role.READER,
        is_heavy=True,
    ),
    Method(
        "ListWorkers",
        pb.ListWorkersRequest,
        pb.ListWorkersResponse,
        _list_workers,
        _as_it_is,
        role=Role.READER,
        is_heavy=True,
    ),
    Method(
        "GetMembership",
        pb.GetMembershipRequest,
        pb.GetMembershipResponse,
        _get_membership,
        _standing,
        role=Role.READER,
    ),
    Method(
        "ListDatasets",
        pb.ListDatasetsRequest,
        pb.ListDatasetsResponse,
        _list_datasets,
        _as_it_is,
        role=Role.READER,
        is_heavy=True,
    ),
)


def unary_handler(
    method: Method, backend: Backend, admission: AdmissionControl, metrics: Metrics | None = None
) -> grpc.RpcMethodHandler[Any, Any]:
    """Serve a unary call as a stream of one request, so that it can be rejected before its body is read."""
    metrics = metrics or Metrics()
    now_s, stats, limits_ = metrics.now_s, metrics.stats_of(method.name), backend.limits

    def decode(body: bytes) -> Any:
        check_wire(body, levels=1, limits=limits_)
        try:
            request = method.request.FromString(body)
        except DecodeError:
            raise InvalidArgument(f"the message is not a {method.request.DESCRIPTOR.full_name}") from None
        if len(body) > SMALL_BYTES:
            check_repeated(method.repeated, request, limits_)
        return request

    async def handle(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        came_s = now_s()
        answers: list[Message | StrataError] = []
        waiting: asyncio.Future[None] | None = None
        """Created only if the answer is not there at once, as that of a heartbeat is."""

        def done(answer: Message | StrataError) -> None:
            answers.append(answer)
            if waiting is not None and not waiting.done():  # the caller may have disconnected
                waiting.set_result(None)

        def begin(role: Role, body: bytes) -> None:
            request = decode(body)
            require(role, method.needed(request), method.name)
            backend.submit(method, request, done)

        try:
            role, bucket = admission.enter(context, method)
            try:
                body = await admission.body_slots(role).receive(context)
                if method.is_heavy or len(body) > SMALL_BYTES:
                    admission.check_size(role, len(body))
                    await admission.fair_queue.run(partial(begin, role, body), bucket.account)
                else:
                    begin(role, body)
                if not answers:
                    waiting = asyncio.get_running_loop().create_future()
                    await waiting
                answer = check_answer(answers[0], limits_)
            finally:
                admission.leave(bucket)
        except StrataError as error:
            answer = error.with_traceback(None)  # the traceback keeps this frame alive, and the request with it
        if isinstance(answer, StrataError):
            stats.refused(wire.status_of(answer).name, now_s() - came_s)
            await abort(context, answer)
        stats.answered(now_s() - came_s)
        return answer

    return grpc.stream_unary_rpc_method_handler(handle, response_serializer=method.response.SerializeToString)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: StrataError) -> None:
    words, details = wire.encode_error_briefly(error)
    metadata = ((wire.ERROR_METADATA_KEY, details.SerializeToString()),)
    await context.abort(wire.status_of(error), words, trailing_metadata=metadata)
