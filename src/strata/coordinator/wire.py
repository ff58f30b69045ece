"""Convert between protobuf messages and our own types.

Only the service, the client and the relay use this module.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import grpc

from strata import errors
from strata.coordinator.state import events as e
from strata.coordinator.state import views
from strata.coordinator.state.checkpoints import CheckpointProgress
from strata.coordinator.state.membership import WorkerEvent
from strata.coordinator.state.shards import Shard
from strata.coordinator.state.time_use import TimeUse
from strata.v1 import calls_pb2, coordinator_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from google.protobuf.message import Message

    from strata.coordinator.state.membership import WorkerEventName, WorkerStateName

SERVICE: str = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"].full_name
ERROR_METADATA_KEY = "strata-error-bin"
FRAME_MARGIN_BYTES = 64
"""The maximum that a frame adds to a single message."""
_BRIEF_BYTES = 4_096
_ENTRY_BYTES = 32
"""Tag and length of one message in a frame, plus the request id of an answer."""

Code = grpc.StatusCode

STATUS_OF: dict[type[errors.StrataError], grpc.StatusCode] = {
    errors.StrataError: Code.INTERNAL,
    errors.InvalidArgument: Code.INVALID_ARGUMENT,
    errors.LimitExceeded: Code.RESOURCE_EXHAUSTED,
    errors.CoordinatorError: Code.FAILED_PRECONDITION,
    errors.UnknownJob: Code.NOT_FOUND,
    errors.UnknownWorker: Code.NOT_FOUND,
    errors.UnknownDataset: Code.NOT_FOUND,
    errors.WorkerExists: Code.ALREADY_EXISTS,
    errors.DatasetExists: Code.ALREADY_EXISTS,
    errors.BarrierBroken: Code.ABORTED,
    errors.Unauthenticated: Code.UNAUTHENTICATED,
    errors.PermissionRefused: Code.PERMISSION_DENIED,
    errors.CoordinatorUnavailable: Code.UNAVAILABLE,
    errors.JournalError: Code.UNAVAILABLE,
}
"""An error has the status of its nearest ancestor in this table."""


def status_of(error: errors.StrataError) -> grpc.StatusCode:
    return next(STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF)


def encode_error(error: errors.StrataError) -> types_pb2.Error:
    return types_pb2.Error(
        kind=type(error).__name__,
        code=status_of(error).value[0],
        message=error.message,
        field=error.field,
        generation=error.generation,
        missing=[types_pb2.Missing(worker_id=worker, reason=why) for worker, why in error.missing.items()],
    )


def encode_error_briefly(error: errors.StrataError) -> tuple[str, types_pb2.Error]:
    """Encode an error for the status and trailing metadata of a unary call; peers accept 8 KiB for both, including
    base64.
    """
    brief = encode_error(error)
    if brief.ByteSize() > _BRIEF_BYTES:
        brief.message = _shortened(brief.message, 1_000)
    while brief.missing and brief.ByteSize() > _BRIEF_BYTES:
        brief.missing.pop()
    return _shortened(error.message, 250), brief


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def decode_error(error: types_pb2.Error) -> errors.StrataError:
    kind = errors.BY_KIND.get(error.kind, errors.CoordinatorError)
    missing = {m.worker_id: m.reason for m in error.missing}
    return kind(error.message, field=error.field, generation=error.generation, missing=missing)


def num_fitting(messages: Sequence[Message], max_bytes: int) -> int:
    """Return how many of the messages, from the first on, fit into one frame; at least one."""
    return num_sizes_fitting((message.ByteSize() for message in messages), max_bytes)[0]


def fits(num: int, num_bytes: int, max_bytes: int) -> bool:
    """Whether `num` messages of `num_bytes` in total fit into one frame."""
    return num_bytes + num * _ENTRY_BYTES <= max_bytes - FRAME_MARGIN_BYTES


def num_sizes_fitting(sizes: Iterable[int], max_bytes: int) -> tuple[int, int]:
    """Return how many messages of these sizes fit, and their total size."""
    room, num, total = max_bytes - FRAME_MARGIN_BYTES, 0, 0
    for size in sizes:
        room -= size + _ENTRY_BYTES
        if room < 0 and num:
            break
        num += 1
        total += size
    return num, total


# -- enums ---------------------------------------------------------------------------------------------------------

_STATE_PREFIX = "WORKER_STATE_"
_CHECKPOINT_PREFIX = "CHECKPOINT_TYPE_"
_COMMAND_PREFIX = "COMMAND_KIND_"

STATES: dict[int, WorkerStateName] = {
    number: name.removeprefix(_STATE_PREFIX)  # type: ignore[misc]  # the proto lists the literals of WorkerStateName
    for name, number in types_pb2.WorkerState.items()
    if number
}
_STATE_NAMES = frozenset(STATES.values())


def check_state(name: WorkerStateName) -> WorkerStateName:
    if name not in _STATE_NAMES:
        raise errors.InvalidArgument(
            f"state={name!r} is invalid; use one of {', '.join(STATES.values())}", field="state"
        )
    return name


def decode_state(number: types_pb2.WorkerState.ValueType) -> WorkerStateName:
    state = STATES.get(number)
    if state is None:
        raise errors.InvalidArgument(f"state={number} is unknown; see the .proto", field="state")
    return state


def encode_state(name: WorkerStateName) -> types_pb2.WorkerState.ValueType:
    return types_pb2.WorkerState.Value(_STATE_PREFIX + name)


def decode_checkpoint_kind(number: types_pb2.CheckpointType.ValueType, field: str = "type") -> e.CheckpointKind:
    name = _enum_name(types_pb2.CheckpointType, number, field) if number else "CHECKPOINT_TYPE_FULL"
    return name.removeprefix(_CHECKPOINT_PREFIX)  # type: ignore[return-value]  # the proto lists the literals


def encode_checkpoint_kind(kind: e.CheckpointKind) -> types_pb2.CheckpointType.ValueType:
    return types_pb2.CheckpointType.Value(_CHECKPOINT_PREFIX + kind)


def decode_command_name(number: types_pb2.CommandKind.ValueType) -> e.CommandName:
    if not number:
        raise errors.InvalidArgument("kind is unspecified; set the command to send", field="kind")
    return _enum_name(types_pb2.CommandKind, number, "kind").removeprefix(_COMMAND_PREFIX)  # type: ignore[return-value]


def encode_command_name(name: e.CommandName) -> types_pb2.CommandKind.ValueType:
    return types_pb2.CommandKind.Value(_COMMAND_PREFIX + name)


def _enum_name(enum: object, number: int, field: str) -> str:
    try:
        return str(enum.Name(number))  # type: ignore[attr-defined]  # protobuf's enum wrappers share no base class
    except ValueError:
        raise errors.InvalidArgument(f"{field}={number} is unknown; see the .proto", field=field) from None


# -- messages ------------------------------------------------------------------------------------------------------


def encode_shards(shards: Iterable[Shard]) -> list[types_pb2.Shard]:
    return [
        types_pb2.Shard(
            dataset_id=dataset_id,
            shard_id=shard_id,
            index=index,
            start=start,
            end=end,
            uri=uri,
            epoch=epoch,
            done=done,
        )
        for dataset_id, shard_id, index, start, end, uri, epoch, done in shards
    ]


def decode_shards(shards: Iterable[types_pb2.Shard]) -> list[Shard]:
    return [Shard(s.dataset_id, s.shard_id, s.index, s.start, s.end, s.uri, s.epoch, s.done) for s in shards]


def encode_command(command: e.CommandRecord) -> types_pb2.Command:
    return types_pb2.Command(
        command_id=command.command_id,
        kind=encode_command_name(command.name),
        reason=command.reason,
        args=command.args,
    )


def decode_command(command: types_pb2.Command) -> e.CommandRecord:
    return e.CommandRecord(
        command_id=command.command_id,
        name=decode_command_name(command.kind),
        reason=command.reason,
        args=dict(command.args),
    )


def encode_checkpoint(record: e.CheckpointRecord | None) -> types_pb2.Checkpoint | None:
    if record is None:
        return None
    spec = record.checkpoint
    return types_pb2.Checkpoint(
        checkpoint_id=spec.checkpoint_id,
        step=spec.step,
        epoch=spec.epoch,
        path=spec.path,
        size_bytes=record.size_bytes,
        type=encode_checkpoint_kind(spec.type),
        hashes=record.hashes,
        model_hash=record.model_hash,
        metadata=record.metadata,
        data_cursor=record.data_cursor,
        generation=record.generation,
        num_ranks=record.num_ranks,
        committed_at_s=record.committed_at_s,
    )


def decode_checkpoint(checkpoint: types_pb2.Checkpoint) -> e.CheckpointRecord:
    return e.CheckpointRecord(
        checkpoint=e.CheckpointSpec(
            checkpoint_id=checkpoint.checkpoint_id,
            step=checkpoint.step,
            epoch=checkpoint.epoch,
            path=checkpoint.path,
            type=decode_checkpoint_kind(checkpoint.type),
        ),
        generation=checkpoint.generation,
        num_ranks=checkpoint.num_ranks,
        size_bytes=checkpoint.size_bytes,
        hashes=dict(checkpoint.hashes),
        model_hash=checkpoint.model_hash,
        metadata=dict(checkpoint.metadata),
        data_cursor=checkpoint.data_cursor,
        committed_at_s=checkpoint.committed_at_s,
    )


def decode_dataset(request: calls_pb2.RegisterDatasetRequest) -> e.DatasetSpec:
    return e.DatasetSpec(
        dataset_id=request.dataset_id,
        total_samples=request.total_samples,
        shard_size=request.shard_size,
        shards=tuple(e.ShardEntry(shard_id=s.shard_id, uri=s.uri, num_samples=s.num_samples) for s in request.shards),
        shuffle=request.shuffle,
        seed=request.seed,
    )


def decode_checkpoint_ack(request: calls_pb2.NotifyCheckpointRequest) -> tuple[e.CheckpointSpec, e.RankAck]:
    spec = e.CheckpointSpec(
        checkpoint_id=request.checkpoint_id,
        step=request.step,
        epoch=request.epoch,
        path=request.path,
        type=decode_checkpoint_kind(request.type),
    )
    ack = e.RankAck(
        size_bytes=request.size_bytes,
        hashes=dict(request.hashes),
        model_hash=request.model_hash,
        metadata=dict(request.metadata),
        data_cursor=request.data_cursor,
    )
    return spec, ack


# -- client views --------------------------------------------------------------------------------------------------


def decode_worker(worker: types_pb2.Worker) -> views.WorkerInfo:
    return views.WorkerInfo(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        rank=worker.rank,
        state=STATES[worker.state],
        step=worker.step,
        epoch=worker.epoch,
        capacity=worker.capacity,
        hostname=worker.hostname,
        silent_s=worker.silent_s,
        suspect=worker.suspect,
        metrics=dict(worker.metrics),
        launch_rank=worker.launch_rank if worker.HasField("launch_rank") else None,
        attempt=worker.attempt if worker.HasField("attempt") else None,
        events={event.kind: event for event in decode_worker_events(worker.events)},
        time_use=decode_time_use(worker.time_use) if worker.HasField("time_use") else None,
    )


EVENTS: dict[types_pb2.WorkerEventKind.ValueType, WorkerEventName] = {
    types_pb2.WORKER_EVENT_KIND_CHOSEN: "CHOSEN",
    types_pb2.WORKER_EVENT_KIND_RESTORED: "RESTORED",
    types_pb2.WORKER_EVENT_KIND_FIRST_STEP: "FIRST_STEP",
}
MAX_EVENTS = 16
"""Of one heartbeat; a worker reports each kind once or twice in its life."""
_EVENT_KINDS = {name: kind for kind, name in EVENTS.items()}


def encode_worker_event(event: WorkerEvent) -> types_pb2.WorkerEvent:
    return types_pb2.WorkerEvent(kind=_EVENT_KINDS[event.kind], at_s=event.at_s, step=event.step)


def decode_worker_events(events: Iterable[types_pb2.WorkerEvent]) -> list[WorkerEvent]:
    """Return the events of known kinds: a newer version may have more."""
    return [
        WorkerEvent(EVENTS[event.kind], event.at_s, event.step)
        for event in itertools.islice(events, MAX_EVENTS)
        if event.kind in EVENTS and math.isfinite(event.at_s)
    ]


def encode_time_use(use: TimeUse) -> types_pb2.TimeUse:
    return types_pb2.TimeUse(
        measured_s=use.measured_s,
        data_s=use.data_s,
        checkpoint_s=use.checkpoint_s,
        barrier_s=use.barrier_s,
        restore_s=use.restore_s,
        collective_s=use.collective_s,
    )


def decode_time_use(use: types_pb2.TimeUse) -> TimeUse | None:
    """Return what a worker has measured; None if it cannot have measured that. No heartbeat is refused for it."""
    found = TimeUse(
        measured_s=use.measured_s,
        data_s=use.data_s,
        checkpoint_s=use.checkpoint_s,
        barrier_s=use.barrier_s,
        restore_s=use.restore_s,
        collective_s=use.collective_s if use.HasField("collective_s") else None,
    )
    return found if found.is_valid else None


def decode_membership(response: calls_pb2.ListWorkersResponse) -> views.MembershipInfo:
    return views.MembershipInfo(response.generation, response.reason, [decode_worker(w) for w in response.workers])


def decode_jobs(response: calls_pb2.ListJobsResponse) -> list[views.JobInfo]:
    return [
        views.JobInfo(j.job_id, j.generation, j.num_workers, j.num_datasets, j.checkpoint_step) for j in response.jobs
    ]


def decode_datasets(response: calls_pb2.ListDatasetsResponse) -> list[views.DatasetInfo]:
    return [
        views.DatasetInfo(d.dataset_id, d.num_shards, d.total_samples, d.epoch, d.num_done, d.shuffle, d.seed)
        for d in response.datasets
    ]


def decode_progress(response: calls_pb2.NotifyCheckpointResponse) -> CheckpointProgress:
    return CheckpointProgress(response.committed, response.num_acked, response.num_ranks)
