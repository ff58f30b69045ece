"""The contract of a coordinator with every caller, through whichever entry point.

A `Way` is a way to call: unary, framed, through our client. The suite uses the messages of the .proto and does not know
our client. The subclass decides whether calls go to a coordinator or to a relay in front of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import pytest
from google.protobuf.message import Message

from strata.coordinator.config import BarrierConfig, CoordinatorConfig, LeaseConfig, Limits
from strata.v1 import calls_pb2 as pb
from strata.v1 import types_pb2

Code = grpc.StatusCode
DEADLINE_S = 20.0
MAX_MESSAGE_BYTES = 262_144
CONFIG = CoordinatorConfig(
    state="memory",
    lease=LeaseConfig(lease_s=60.0, heartbeat_s=10.0, suspicion_s=60.0, tick_s=0.01),
    barrier=BarrierConfig(timeout_s=90.0, max_timeout_s=3600.0),
    limits=Limits(
        max_shards_per_dataset=10_000,
        max_shards_per_reply=4,
        max_shards_per_ack=8,
        max_workers_per_reply=100,
        max_pending_commands_per_worker=3,
        max_series_per_worker=2,
        max_metadata_bytes=1024,
        max_message_bytes=MAX_MESSAGE_BYTES,
        max_session_backlog=100,
    ),
)
"""No worker dies of silence, and every limit is small."""


class Refused(Exception):
    """An error as received over the wire."""

    def __init__(self, code: grpc.StatusCode, error: types_pb2.Error) -> None:
        super().__init__(f"{code.name} {error.kind} ({error.field}): {error.message}")
        self.code = code
        self.kind = error.kind
        self.field = error.field
        self.message = error.message
        self.generation = error.generation
        self.missing = {m.worker_id: m.reason for m in error.missing}


class Way(Protocol):
    """Calls may come from several threads at once."""

    def call(self, method: str, request: Message) -> Any:
        """Return the answer to `strata.v1.Coordinator/method`.

        Raises:
            Refused: The coordinator refused the call.
        """
        ...

    def close(self) -> None: ...


@dataclass
class World:
    """A job with two workers and a dataset of 12 shards of 10 samples, 2 of them done."""

    way: Way
    job_id: str = "resnet"
    incarnations: dict[str, int] = field(default_factory=dict)
    """The incarnations that RegisterWorker returned; callers send them back and do not interpret them."""
    generation: int = 0

    def build(self) -> World:
        for worker_id in ("a", "b"):
            self.join(worker_id)
        self.call("RegisterDataset", pb.RegisterDatasetRequest(dataset_id="d", total_samples=115, shard_size=10))
        for worker_id in ("a", "b"):
            first = self.shards(worker_id)[0]
            self.call("AckShards", self.fenced(pb.AckShardsRequest, worker_id, dataset_id="d", indices=[first.index]))
        return self

    def call(self, method: str, request: Any) -> Any:
        """Make a call in this job, unless the request names another."""
        if "job_id" in request.DESCRIPTOR.fields_by_name and not request.job_id:
            request.job_id = self.job_id
        return self.way.call(method, request)

    def join(self, worker_id: str, **fields: Any) -> pb.RegisterWorkerResponse:
        request = pb.RegisterWorkerRequest(worker_id=worker_id, instance_id=f"process-of-{worker_id}")
        request.MergeFrom(pb.RegisterWorkerRequest(**fields))
        joined = self.call("RegisterWorker", request)
        self.incarnations[worker_id] = joined.incarnation
        self.generation = joined.generation
        return joined

    def leave(self, worker_id: str) -> pb.DeregisterWorkerResponse:
        left = self.call(
            "DeregisterWorker",
            pb.DeregisterWorkerRequest(worker_id=worker_id, incarnation=self.incarnations[worker_id]),
        )
        self.generation = left.generation
        return left

    def fenced(self, kind: type[Any], worker_id: str, **fields: Any) -> Any:
        """A request with the caller's identity and generation."""
        identity = {
            "job_id": self.job_id,
            "worker_id": worker_id,
            "incarnation": self.incarnations.get(worker_id, 1),
            "generation": self.generation,
        }
        return kind(**{**identity, **fields})

    def arrive(self, worker_id: str, **fields: Any) -> pb.WaitBarrierResponse:
        return self.call(
            "WaitBarrier", self.fenced(pb.WaitBarrierRequest, worker_id, **{"barrier_id": "sync", **fields})
        )

    def checkpoint(self, worker_id: str, **fields: Any) -> Any:
        fields = {"checkpoint_id": "c1", "step": 100, "path": "/c/1", **fields}
        return self.call("NotifyCheckpoint", self.fenced(pb.NotifyCheckpointRequest, worker_id, **fields))

    def shards(self, worker_id: str, **fields: Any) -> list[types_pb2.Shard]:
        """Return the items of all pages."""
        found: list[types_pb2.Shard] = []
        offset = 0
        while True:
            page = self.call(
                "GetAssignedShards", pb.GetAssignedShardsRequest(worker_id=worker_id, offset=offset, **fields)
            )
            found += page.shards
            offset = page.next_offset
            if not offset:
                return found

    def workers(self, job_id: str = "") -> dict[str, types_pb2.Worker]:
        listed = self.call("ListWorkers", pb.ListWorkersRequest(job_id=job_id))
        return {worker.worker_id: worker for worker in listed.workers}

    def everything(self) -> list[Message]:
        """Everything visible from outside, except time and the state of connections."""
        members = self.call("ListWorkers", pb.ListWorkersRequest())
        for worker in members.workers:
            worker.silent_s = 0.0
            worker.suspect = False
        seen: list[Message] = [
            self.call("ListJobs", pb.ListJobsRequest()),
            members,
            self.call("ListDatasets", pb.ListDatasetsRequest()),
            self.call("GetLatestCheckpoint", pb.GetLatestCheckpointRequest(types=range(1, 5))),
        ]
        for worker in members.workers:
            seen += self.shards(worker.worker_id, include_done=True)
            seen.append(self.call("Heartbeat", pb.HeartbeatRequest(worker_id=worker.worker_id)))
        return seen


@dataclass(frozen=True)
class Refusal:
    """A call that must be refused in a certain way and change nothing."""

    name: str
    method: str
    request: Callable[[World], Message]
    code: grpc.StatusCode
    kind: str
    field: str


JOB_CALLS: dict[str, Callable[..., Message]] = {
    "DeregisterWorker": pb.DeregisterWorkerRequest,
    "Heartbeat": pb.HeartbeatRequest,
    "GetAssignedShards": pb.GetAssignedShardsRequest,
    "AckShards": pb.AckShardsRequest,
    "AdvanceEpoch": pb.AdvanceEpochRequest,
    "WaitBarrier": pb.WaitBarrierRequest,
    "NotifyCheckpoint": pb.NotifyCheckpointRequest,
    "GetLatestCheckpoint": pb.GetLatestCheckpointRequest,
    "RequestRecovery": pb.RequestRecoveryRequest,
    "SendCommand": lambda **fields: pb.SendCommandRequest(kind=1, **fields),
    "ListWorkers": pb.ListWorkersRequest,
    "GetMembership": pb.GetMembershipRequest,
    "ListDatasets": pb.ListDatasetsRequest,
}
"""Calls on a job that must exist."""
WORKER_CALLS: dict[str, dict[str, Any]] = {
    "Heartbeat": {},
    "GetAssignedShards": {},
    "RequestRecovery": {},
    "GetMembership": {},
    "DeregisterWorker": {"incarnation": 1},
    "AckShards": {},
    "WaitBarrier": {},
    "NotifyCheckpoint": {},
}
FENCED_CALLS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "AckShards": (pb.AckShardsRequest, {"dataset_id": "d", "indices": [0]}),
    "WaitBarrier": (pb.WaitBarrierRequest, {"barrier_id": "sync"}),
    "NotifyCheckpoint": (pb.NotifyCheckpointRequest, {"checkpoint_id": "c1", "path": "/c/1"}),
}
MALFORMED_IDS = ("a b", "-a", "a\n", "é", "a" * 129, "../\x00")


def _fenced(method: str, worker_id: str = "a", **overrides: Any) -> Callable[[World], Message]:
    kind, fields = FENCED_CALLS[method]
    return lambda world: world.fenced(kind, worker_id, **{**fields, **overrides})


def _beat(**fields: Any) -> Callable[[World], Message]:
    return lambda world: pb.HeartbeatRequest(worker_id="a", incarnation=world.incarnations["a"], **fields)


def _plain(request: Message) -> Callable[[World], Message]:
    """A new copy every time: `World.call` fills in the job."""
    return lambda _: type(request).FromString(request.SerializeToString())


def _register(**fields: Any) -> Callable[[World], Message]:
    return _plain(pb.RegisterWorkerRequest(**{"worker_id": "c", "instance_id": "process-of-c", **fields}))


def _dataset(**fields: Any) -> Callable[[World], Message]:
    return _plain(pb.RegisterDatasetRequest(**{"dataset_id": "e", **fields}))


def _shards(*names: str, **fields: Any) -> list[pb.ShardSpec]:
    return [pb.ShardSpec(shard_id=name, **fields) for name in names]


def _ack(worker_id: str, **fields: Any) -> Callable[[World], Message]:
    return lambda world: world.fenced(pb.AckShardsRequest, worker_id, **{"dataset_id": "d", **fields})


def _mine_and_theirs(world: World) -> Message:
    indices = [world.shards("a")[0].index, world.shards("b")[0].index]
    return world.fenced(pb.AckShardsRequest, "a", dataset_id="d", indices=indices)


def _command(**fields: Any) -> Callable[[World], Message]:
    return _plain(pb.SendCommandRequest(**{"kind": 1, **fields}))


NOT_FOUND, INVALID, EXISTS = Code.NOT_FOUND, Code.INVALID_ARGUMENT, Code.ALREADY_EXISTS
PRECONDITION, EXHAUSTED = Code.FAILED_PRECONDITION, Code.RESOURCE_EXHAUSTED

REFUSALS = [
    *(
        Refusal(f"{m} in an unknown job", m, _plain(make(job_id="nowhere")), NOT_FOUND, "UnknownJob", "job_id")
        for m, make in JOB_CALLS.items()
    ),
    *(
        Refusal(f"{m} in a malformed job", m, _plain(make(job_id="a b")), INVALID, "InvalidArgument", "job_id")
        for m, make in (
            *JOB_CALLS.items(),
            ("RegisterWorker", pb.RegisterWorkerRequest),
            ("DropJob", pb.DropJobRequest),
        )
    ),
    *(
        Refusal(
            f"{m} of an unknown worker",
            m,
            _fenced(m, "nobody") if m in FENCED_CALLS else _plain(JOB_CALLS[m](worker_id="nobody", **fields)),
            NOT_FOUND,
            "UnknownWorker",
            "worker_id",
        )
        for m, fields in WORKER_CALLS.items()
    ),
    *(
        Refusal(f"{m} of an unknown dataset", m, _plain(request), NOT_FOUND, "UnknownDataset", "dataset_id")
        for m, request in (
            ("GetAssignedShards", pb.GetAssignedShardsRequest(worker_id="a", dataset_id="nothing")),
            ("AdvanceEpoch", pb.AdvanceEpochRequest(dataset_id="nothing")),
        )
    ),
    Refusal(
        "AckShards of an unknown dataset",
        "AckShards",
        _fenced("AckShards", dataset_id="nothing"),
        NOT_FOUND,
        "UnknownDataset",
        "dataset_id",
    ),
    # -- fencing
    *(
        Refusal(f"{m} of {what}", m, _fenced(m, generation=generation), PRECONDITION, "StaleGeneration", "generation")
        for m in FENCED_CALLS
        for what, generation in (("an old generation", 1), ("generation 0", 0), ("a generation to come", 99))
    ),
    *(
        Refusal(f"{m} of {what}", m, _fenced(m, incarnation=number), PRECONDITION, "StaleIncarnation", "incarnation")
        for m in FENCED_CALLS
        for what, number in (("another incarnation", 99), ("incarnation 0", 0))
    ),
    Refusal(
        "a deregistration of incarnation 0",
        "DeregisterWorker",
        _plain(pb.DeregisterWorkerRequest(worker_id="a")),
        INVALID,
        "InvalidArgument",
        "incarnation",
    ),
    Refusal(
        "GetMembership of another incarnation",
        "GetMembership",
        _plain(pb.GetMembershipRequest(worker_id="a", incarnation=99)),
        PRECONDITION,
        "StaleIncarnation",
        "incarnation",
    ),
    # -- jobs
    Refusal(
        "DropJob of a job with workers", "DropJob", _plain(pb.DropJobRequest()), PRECONDITION, "JobInUse", "job_id"
    ),
    Refusal(
        "DropJob of a job that has moved on",
        "DropJob",
        _plain(pb.DropJobRequest(force=True, generation=1)),
        PRECONDITION,
        "StaleGeneration",
        "generation",
    ),
    Refusal(
        "DropJob with a long reason",
        "DropJob",
        _plain(pb.DropJobRequest(force=True, reason="x" * 4097)),
        INVALID,
        "InvalidArgument",
        "reason",
    ),
    Refusal(
        "ListWorkers beyond any count",
        "ListWorkers",
        _plain(pb.ListWorkersRequest(offset=2**60)),
        INVALID,
        "InvalidArgument",
        "offset",
    ),
    # -- ids
    *(
        Refusal(
            f"worker_id {name!r}", "RegisterWorker", _register(worker_id=name), INVALID, "InvalidArgument", "worker_id"
        )
        for name in ("", *MALFORMED_IDS)
    ),
    *(
        Refusal(
            f"instance_id {name!r}",
            "RegisterWorker",
            _register(instance_id=name),
            INVALID,
            "InvalidArgument",
            "instance_id",
        )
        for name in ("", "a b")
    ),
    *(
        Refusal(
            f"dataset_id {name!r}",
            "RegisterDataset",
            _dataset(dataset_id=name, total_samples=1, shard_size=1),
            INVALID,
            "InvalidArgument",
            "dataset_id",
        )
        for name in ("", *MALFORMED_IDS)
    ),
    *(
        Refusal(
            f"barrier_id {name!r}",
            "WaitBarrier",
            _fenced("WaitBarrier", barrier_id=name),
            INVALID,
            "InvalidArgument",
            "barrier_id",
        )
        for name in ("", "a b")
    ),
    *(
        Refusal(
            f"checkpoint_id {name!r}",
            "NotifyCheckpoint",
            _fenced("NotifyCheckpoint", checkpoint_id=name),
            INVALID,
            "InvalidArgument",
            "checkpoint_id",
        )
        for name in ("", "a b")
    ),
    Refusal("request_id", "SendCommand", _command(request_id="a b"), INVALID, "InvalidArgument", "request_id"),
    Refusal("hostname", "RegisterWorker", _register(hostname="h" * 5000), INVALID, "InvalidArgument", "hostname"),
    # -- workers
    Refusal("a second process", "RegisterWorker", _register(worker_id="a"), EXISTS, "WorkerExists", "worker_id"),
    *(
        Refusal(f"capacity {c}", "RegisterWorker", _register(capacity=c), INVALID, "InvalidArgument", "capacity")
        for c in (-1.0, math.nan, math.inf, 1e9, 1e-9)
    ),
    *(
        Refusal(
            f"{name} of 2^64-1",
            "Heartbeat",
            _beat(metrics={"loss": 1.0}, **{name: 2**64 - 1}),
            INVALID,
            "InvalidArgument",
            name,
        )
        for name in ("step", "epoch")
    ),
    *(
        Refusal(
            f"{name} without an identity",
            "Heartbeat",
            _plain(pb.HeartbeatRequest(worker_id="a", **{name: value})),
            PRECONDITION,
            "StaleIncarnation",
            "incarnation",
        )
        for name, value in {"step": 7, "epoch": 1, "state": 4, "metrics": {"x": 1.0}, "acked_command_id": 1}.items()
    ),
    Refusal(
        "a metric's name",
        "Heartbeat",
        _beat(step=7, metrics={"a b": 1.0}),
        INVALID,
        "InvalidArgument",
        "metrics",
    ),
    Refusal(
        "too many metrics",
        "Heartbeat",
        _beat(step=7, metrics=dict.fromkeys("xyz", 1.0)),
        EXHAUSTED,
        "LimitExceeded",
        "metrics",
    ),
    # -- datasets
    Refusal(
        "a dataset with other contents",
        "RegisterDataset",
        _dataset(dataset_id="d", total_samples=115, shard_size=11),
        EXISTS,
        "DatasetExists",
        "dataset_id",
    ),
    *(
        Refusal(f"a dataset of {fields}", "RegisterDataset", _dataset(**fields), INVALID, "InvalidArgument", name)
        for name, fields in (
            ("total_samples", {}),
            ("shard_size", {"total_samples": 10}),
            ("total_samples", {"shard_size": 10}),
            ("total_samples", {"total_samples": 2**64 - 1, "shard_size": 1}),
            ("shard_size", {"total_samples": 1, "shard_size": 2**63}),
            ("seed", {"total_samples": 1, "shard_size": 1, "seed": 2**63}),
        )
    ),
    *(
        Refusal(name, "RegisterDataset", _dataset(**fields), INVALID, "InvalidArgument", at_fault)
        for name, at_fault, fields in (
            ("a count and a list", "shards", {"total_samples": 1, "shards": _shards("s")}),
            ("a shard listed twice", "shards.shard_id", {"shards": _shards("s", "t", "s")}),
            ("a shard's malformed id", "shards.shard_id", {"shards": _shards("s", "a b")}),
            ("a shard's long uri", "shards.uri", {"shards": _shards("s", uri="u" * 5000)}),
            ("a shard's samples", "shards.num_samples", {"shards": _shards("s", num_samples=2**60)}),
        )
    ),
    Refusal(
        "too many shards",
        "RegisterDataset",
        _dataset(total_samples=10_001, shard_size=1),
        EXHAUSTED,
        "LimitExceeded",
        "shard_size",
    ),
    # -- shards
    Refusal("another's shard", "AckShards", _mine_and_theirs, PRECONDITION, "ShardNotLeased", "indices"),
    Refusal("no shard", "AckShards", _ack("a"), INVALID, "InvalidArgument", "indices"),
    Refusal("shard 12 of 12", "AckShards", _ack("a", indices=[12]), INVALID, "InvalidArgument", "indices"),
    Refusal("shard 2^64-1", "AckShards", _ack("a", indices=[2**64 - 1]), INVALID, "InvalidArgument", "indices"),
    Refusal("too many acks", "AckShards", _ack("a", indices=[0] * 9), EXHAUSTED, "LimitExceeded", "indices"),
    *(
        Refusal(
            f"an ack in epoch {n}", "AckShards", _ack("a", epoch=n, indices=[0]), PRECONDITION, "EpochMismatch", "epoch"
        )
        for n in (1, 2**64 - 1)
    ),
    Refusal(
        "shards of epoch 2^64-1",
        "GetAssignedShards",
        _plain(pb.GetAssignedShardsRequest(worker_id="a", epoch=2**64 - 1)),
        INVALID,
        "InvalidArgument",
        "epoch",
    ),
    Refusal(
        "shards from 2^64-1 on",
        "GetAssignedShards",
        _plain(pb.GetAssignedShardsRequest(worker_id="a", offset=2**64 - 1)),
        INVALID,
        "InvalidArgument",
        "offset",
    ),
    Refusal(
        "an unfinished epoch",
        "AdvanceEpoch",
        _plain(pb.AdvanceEpochRequest(dataset_id="d", require_complete=True)),
        PRECONDITION,
        "EpochMismatch",
        "require_complete",
    ),
    Refusal(
        "advancing another epoch",
        "AdvanceEpoch",
        _plain(pb.AdvanceEpochRequest(dataset_id="d", from_epoch=1)),
        PRECONDITION,
        "EpochMismatch",
        "from_epoch",
    ),
    Refusal(
        "advancing epoch 2^64-1",
        "AdvanceEpoch",
        _plain(pb.AdvanceEpochRequest(dataset_id="d", from_epoch=2**64 - 1)),
        INVALID,
        "InvalidArgument",
        "from_epoch",
    ),
    # -- barriers
    *(
        Refusal(
            f"a barrier {name}", "WaitBarrier", _fenced("WaitBarrier", **fields), INVALID, "InvalidArgument", at_fault
        )
        for name, at_fault, fields in (
            ("for an unknown worker", "members", {"members": ["a", "nobody"]}),
            ("for others only", "members", {"members": ["b"]}),
            ("at step 2^64-1", "step", {"step": 2**64 - 1}),
            ("that waits NaN s", "timeout_s", {"timeout_s": math.nan}),
            ("that waits -1 s", "timeout_s", {"timeout_s": -1.0}),
            ("that waits for ever", "timeout_s", {"timeout_s": math.inf}),
            ("that waits a day", "timeout_s", {"timeout_s": 86_400.0}),
        )
    ),
    # -- checkpoints
    *(
        Refusal(
            f"a checkpoint with {name}", "NotifyCheckpoint", _fenced("NotifyCheckpoint", **fields), code, kind, at_fault
        )
        for name, code, kind, at_fault, fields in (
            ("step 2^60", INVALID, "InvalidArgument", "step", {"step": 2**60}),
            ("epoch 2^60", INVALID, "InvalidArgument", "epoch", {"epoch": 2**60}),
            ("2^60 bytes", INVALID, "InvalidArgument", "size_bytes", {"size_bytes": 2**60}),
            ("a long path", INVALID, "InvalidArgument", "path", {"path": "p" * 5000}),
            ("type 99", INVALID, "InvalidArgument", "type", {"type": 99}),
            ("many hashes", EXHAUSTED, "LimitExceeded", "hashes", {"hashes": {"f": "x" * 2000}}),
            ("much metadata", EXHAUSTED, "LimitExceeded", "metadata", {"metadata": {"k": "x" * 2000}}),
            ("a large cursor", EXHAUSTED, "LimitExceeded", "data_cursor", {"data_cursor": b"x" * 2000}),
        )
    ),
    Refusal(
        "the latest checkpoint of type 99",
        "GetLatestCheckpoint",
        _plain(pb.GetLatestCheckpointRequest(types=[99])),
        INVALID,
        "InvalidArgument",
        "types",
    ),
    # -- commands
    Refusal("no command", "SendCommand", _command(kind=0), INVALID, "InvalidArgument", "kind"),
    Refusal(
        "a command to a stranger",
        "SendCommand",
        _command(worker_ids=["a", "nobody"]),
        NOT_FOUND,
        "UnknownWorker",
        "worker_ids",
    ),
    Refusal("command 99", "SendCommand", _command(kind=99), INVALID, "InvalidArgument", "kind"),
    Refusal("a long reason", "SendCommand", _command(reason="r" * 5000), INVALID, "InvalidArgument", "reason"),
    Refusal("many arguments", "SendCommand", _command(args={"k": "x" * 2000}), EXHAUSTED, "LimitExceeded", "args"),
]


class CoordinatorContract:
    """Subclasses supply three fixtures.

    `way`, a new coordinator with `CONFIG` and a way to call it; `another_way`, a second caller of the same one;
    `wait_arrivals`, which waits until a number of workers have arrived at barriers, which is not visible on the wire.
    """

    @pytest.fixture
    def world(self, way: Way) -> World:
        return World(way).build()

    @pytest.fixture
    def pool(self) -> Iterator[ThreadPoolExecutor]:
        with ThreadPoolExecutor(8) as pool:
            yield pool

    # -- refusals --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("refusal", REFUSALS, ids=[r.name for r in REFUSALS])
    def test_a_bad_call_is_refused_with_its_reason_and_changes_nothing(self, world: World, refusal: Refusal) -> None:
        request = refusal.request(world)
        before = world.everything()
        with pytest.raises(Refused) as refused:
            world.call(refusal.method, request)
        assert (refused.value.code, refused.value.kind, refused.value.field) == (
            refusal.code,
            refusal.kind,
            refusal.field,
        )
        assert len(refused.value.message) > 20
        assert world.everything() == before

    def test_a_stale_caller_gets_the_current_generation(self, world: World) -> None:
        world.generation = 1
        with pytest.raises(Refused) as refused:
            world.arrive("a")
        assert refused.value.generation == 2
        assert "b joined" in refused.value.message

    def test_a_refused_call_does_not_create_its_job(self, way: Way) -> None:
        for method, request in (
            ("RegisterWorker", pb.RegisterWorkerRequest(job_id="new", worker_id="a b", instance_id="i")),
            ("RegisterDataset", pb.RegisterDatasetRequest(job_id="new", dataset_id="d")),
        ):
            with pytest.raises(Refused):
                way.call(method, request)
        assert way.call("ListJobs", pb.ListJobsRequest()).jobs == []

    def test_a_worker_that_was_replaced_is_refused_everywhere(self, world: World) -> None:
        old = world.incarnations["a"]
        world.join("a", instance_id="another-process", takeover=True)
        world.incarnations["a"] = old
        before = world.everything()
        requests = {
            **{m: _fenced(m)(world) for m in FENCED_CALLS},
            "Heartbeat": pb.HeartbeatRequest(worker_id="a", incarnation=old, step=5),
            "RequestRecovery": pb.RequestRecoveryRequest(worker_id="a", incarnation=old),
            "DeregisterWorker": pb.DeregisterWorkerRequest(worker_id="a", incarnation=old),
        }
        for method, request in requests.items():
            with pytest.raises(Refused) as refused:
                world.call(method, request)
            assert (refused.value.code, refused.value.kind) == (PRECONDITION, "StaleIncarnation"), method
        assert world.everything() == before

    def test_the_public_incarnation_does_not_authorise_calls_for_a_worker(self, world: World) -> None:
        before = world.everything()
        world.incarnations["a"] = world.workers()["a"].incarnation
        with pytest.raises(Refused) as refused:
            world.leave("a")
        assert (refused.value.code, refused.value.kind) == (PRECONDITION, "StaleIncarnation")
        assert world.everything() == before

    def test_a_worker_that_left_gets_the_reason(self, world: World) -> None:
        world.leave("a")
        with pytest.raises(Refused, match="it deregistered; register again") as refused:
            world.call("Heartbeat", pb.HeartbeatRequest(worker_id="a", incarnation=world.incarnations["a"]))
        assert (refused.value.code, refused.value.kind) == (PRECONDITION, "StaleIncarnation")

    def test_a_job_without_workers_takes_no_commands(self, world: World) -> None:
        world.leave("a")
        world.leave("b")
        with pytest.raises(Refused) as refused:
            world.call("SendCommand", pb.SendCommandRequest(kind=1))
        assert (refused.value.code, refused.value.field) == (INVALID, "worker_ids")

    def test_unacknowledged_commands_are_bounded(self, world: World) -> None:
        for _ in range(3):
            world.call("SendCommand", pb.SendCommandRequest(kind=1, worker_ids=["a"]))
        before = world.everything()
        with pytest.raises(Refused) as refused:
            world.call("SendCommand", pb.SendCommandRequest(kind=1))
        assert (refused.value.code, refused.value.kind) == (EXHAUSTED, "LimitExceeded")
        assert world.everything() == before

    # -- workers ---------------------------------------------------------------------------------------------------

    def test_workers_get_ranks_in_join_order_and_each_join_is_a_generation(self, way: Way) -> None:
        world = World(way)
        first, second = world.join("b"), world.join("a")
        assert (first.generation, first.rank, first.world_size) == (1, 0, 1)
        assert (second.generation, second.rank, second.world_size) == (2, 1, 2)
        assert [(w.worker_id, w.incarnation) for w in world.workers().values()] == [("b", 1), ("a", 2)]
        assert (first.lease_s, first.heartbeat_s) == (60.0, 10.0)
        assert [(w, m.rank) for w, m in world.workers().items()] == [("b", 0), ("a", 1)]

    def test_the_same_process_that_registers_again_gets_the_same_answer(self, world: World) -> None:
        before = world.everything()
        first = world.incarnations["b"]
        again = world.join("b")
        assert (again.incarnation, again.generation, again.rank, again.world_size) == (first, 2, 1, 2)
        assert world.everything() == before

    def test_a_takeover_is_the_next_incarnation_and_keeps_the_shards(self, world: World) -> None:
        mine = [shard.index for shard in world.shards("a", include_done=True)]
        taken = world.join("a", instance_id="another-process", takeover=True)
        assert (world.workers()["a"].incarnation, taken.generation, taken.world_size) == (3, 3, 2)
        assert [shard.index for shard in world.shards("a", include_done=True)] == mine

    def test_an_empty_job_id_is_the_job_called_default(self, way: Way) -> None:
        way.call("RegisterWorker", pb.RegisterWorkerRequest(worker_id="a", instance_id="i"))
        (job,) = way.call("ListJobs", pb.ListJobsRequest()).jobs
        assert (job.job_id, job.generation, job.num_workers) == ("default", 1, 1)
        assert way.call("ListWorkers", pb.ListWorkersRequest(job_id="default")).generation == 1

    def test_jobs_are_isolated(self, world: World) -> None:
        before = world.everything()[1:]
        other = World(world.way, job_id="bert")
        assert other.join("a").generation == 1
        assert world.everything()[1:] == before
        jobs = world.call("ListJobs", pb.ListJobsRequest()).jobs
        assert [(j.job_id, j.num_workers, j.num_datasets) for j in jobs] == [("resnet", 2, 1), ("bert", 1, 0)]

    def test_a_heartbeat_updates_the_worker(self, world: World) -> None:
        beat = pb.HeartbeatRequest(
            worker_id="a",
            incarnation=world.incarnations["a"],
            state=4,
            step=70,
            epoch=3,
            metrics={"loss": 0.5, "acc": 0.25},
        )
        answer = world.call("Heartbeat", beat)
        assert (answer.generation, answer.num_workers, len(answer.commands)) == (2, 2, 0)
        worker = world.workers()["a"]
        assert (worker.state, worker.step, worker.epoch) == (types_pb2.WORKER_STATE_TRAINING, 70, 3)
        assert dict(worker.metrics) == {"loss": 0.5, "acc": 0.25}
        assert 0 <= worker.silent_s < DEADLINE_S
        world.call("Heartbeat", pb.HeartbeatRequest(worker_id="a", incarnation=world.incarnations["a"]))
        assert (world.workers()["a"].state, world.workers()["a"].step) == (types_pb2.WORKER_STATE_TRAINING, 70)

    def test_leaving_moves_the_shards_at_once_and_may_be_repeated(self, world: World) -> None:
        assert world.leave("a").generation == 3
        assert len(world.shards("b", include_done=True)) == 12
        before = world.everything()
        assert world.leave("a").generation == 3
        assert world.everything() == before

    def test_workers_come_in_pages_in_the_order_of_their_ranks(self, way: Way) -> None:
        world = World(way)
        for number in range(5):
            world.join(f"w{number}")
        pages, offset = [], 0
        while not pages or offset:
            page = world.call("ListWorkers", pb.ListWorkersRequest(offset=offset, limit=2))
            assert (page.generation, page.num_workers) == (5, 5)
            pages.append([(w.worker_id, w.rank) for w in page.workers])
            offset = page.next_offset
        assert pages == [[("w0", 0), ("w1", 1)], [("w2", 2), ("w3", 3)], [("w4", 4)]]
        beyond = world.call("ListWorkers", pb.ListWorkersRequest(offset=5))
        assert (list(beyond.workers), beyond.next_offset, beyond.num_workers) == ([], 0, 5)

    def test_a_worker_reads_its_rank_without_listing_all_workers(self, world: World) -> None:
        world.leave("a")
        mine = world.call("GetMembership", pb.GetMembershipRequest(worker_id="b", incarnation=world.incarnations["b"]))
        assert (mine.generation, mine.rank, mine.world_size) == (3, 0, 1)
        assert mine.reason.startswith("a left")
        assert world.call("GetMembership", pb.GetMembershipRequest(worker_id="b")) == mine

    # -- the end of a job ------------------------------------------------------------------------------------------

    def test_a_job_is_dropped_when_its_workers_have_left_and_may_be_dropped_again(self, world: World) -> None:
        other = World(world.way, job_id="bert")
        other.join("a")
        for worker_id in ("a", "b"):
            world.leave(worker_id)
        drop = pb.DropJobRequest(generation=world.generation, reason="it is done")
        assert world.call("DropJob", drop).dropped
        assert [job.job_id for job in world.call("ListJobs", pb.ListJobsRequest()).jobs] == ["bert"]
        assert not world.call("DropJob", drop).dropped
        with pytest.raises(Refused, match="job 'resnet' does not exist") as refused:
            world.workers()
        assert refused.value.kind == "UnknownJob"

    def test_workers_of_a_dropped_job_cannot_affect_the_next_one(
        self, world: World, pool: ThreadPoolExecutor, wait_arrivals: Callable[[int], None]
    ) -> None:
        waiting = pool.submit(world.arrive, "a")
        wait_arrivals(1)
        assert world.call("DropJob", pb.DropJobRequest(force=True, reason="a mistake")).dropped
        broken = self.refused(waiting)
        assert (broken.code, broken.kind) == (Code.ABORTED, "BarrierBroken")
        assert "a mistake" in broken.message
        old, old_generation = dict(world.incarnations), world.generation
        fresh = world.join("a", instance_id="another-process")
        assert (fresh.rank, fresh.world_size) == (0, 1)
        assert fresh.generation > old_generation
        assert fresh.incarnation != old["a"]
        assert world.workers()["a"].incarnation == 3
        assert world.call("ListDatasets", pb.ListDatasetsRequest()).datasets == []
        before = world.everything()
        world.incarnations = old
        for worker_id, kind in (("a", "StaleIncarnation"), ("b", "UnknownWorker")):
            for generation in (old_generation, fresh.generation):
                world.generation = generation
                with pytest.raises(Refused) as refused:
                    world.arrive(worker_id)
                assert refused.value.kind == kind
        world.incarnations["a"] = fresh.incarnation
        assert world.everything() == before

    # -- datasets --------------------------------------------------------------------------------------------------

    def test_every_shard_has_one_owner_and_the_samples_are_covered_exactly(self, world: World) -> None:
        shards = [*world.shards("a", include_done=True), *world.shards("b", include_done=True)]
        shards.sort(key=lambda shard: shard.index)
        assert [(s.index, s.start, s.end) for s in shards] == [(i, 10 * i, min(10 * i + 10, 115)) for i in range(12)]
        assert {s.shard_id for s in shards} == {f"d-{i:06d}" for i in range(12)}

    def test_a_dataset_may_be_a_list_of_files(self, world: World) -> None:
        shards = [pb.ShardSpec(shard_id=f"f{i}", uri=f"s3://b/{i}.parquet", num_samples=i) for i in range(5)]
        request = pb.RegisterDatasetRequest(dataset_id="files", shards=shards, shuffle=True, seed=7)
        answer = world.call("RegisterDataset", request)
        assert (answer.num_shards, answer.epoch) == (5, 0)
        assert world.call("RegisterDataset", request) == answer
        found = [s for w in ("a", "b") for s in world.shards(w, dataset_id="files")]
        assert sorted((s.shard_id, s.uri, s.start, s.end) for s in found) == [
            ("f0", "s3://b/0.parquet", 0, 0),
            ("f1", "s3://b/1.parquet", 0, 1),
            ("f2", "s3://b/2.parquet", 1, 3),
            ("f3", "s3://b/3.parquet", 3, 6),
            ("f4", "s3://b/4.parquet", 6, 10),
        ]
        status = world.call("ListDatasets", pb.ListDatasetsRequest()).datasets[1]
        assert (status.dataset_id, status.num_shards, status.total_samples) == ("files", 5, 10)
        assert (status.shuffle, status.seed) == (True, 7)

    def test_long_answers_come_in_pages(self, world: World) -> None:
        world.leave("b")
        pages: list[list[int]] = []
        offset = 0
        while not pages or offset:
            page = world.call("GetAssignedShards", pb.GetAssignedShardsRequest(worker_id="a", offset=offset))
            pages.append([s.index for s in page.shards])
            offset = page.next_offset
        assert len(pages) == 3
        assert max(map(len, pages)) == 4
        assert len(set(itertools.chain(*pages))) == sum(map(len, pages)) == 10
        beyond = pb.GetAssignedShardsRequest(worker_id="a", offset=2**50)
        assert world.call("GetAssignedShards", beyond).shards == []

    def test_an_acknowledged_shard_is_not_assigned_again_whichever_worker_leaves(self, world: World) -> None:
        shard = world.shards("a")[0]
        ack = world.fenced(pb.AckShardsRequest, "a", dataset_id="d", indices=[shard.index, shard.index])
        answer = world.call("AckShards", ack)
        assert (answer.num_done, answer.num_shards) == (3, 12)
        assert world.call("AckShards", ack) == answer
        world.leave("a")
        assert len(world.shards("b")) == 9
        assert [s.done for s in world.shards("b", include_done=True)].count(True) == 3

    def test_an_epoch_is_advanced_once_however_many_workers_call(self, world: World) -> None:
        request = pb.AdvanceEpochRequest(dataset_id="d", from_epoch=0)
        assert world.call("AdvanceEpoch", request).epoch == 1
        assert world.call("AdvanceEpoch", request).epoch == 1
        assert [(s.epoch, s.done) for s in world.shards("a", include_done=True)] == [(1, False)] * 6
        status = world.call("ListDatasets", pb.ListDatasetsRequest()).datasets[0]
        assert (status.epoch, status.num_done) == (1, 0)
        with pytest.raises(Refused) as refused:
            world.shards("a", epoch=0)
        assert (refused.value.code, refused.value.kind) == (PRECONDITION, "EpochMismatch")

    def test_shards_of_a_future_epoch_can_be_listed(self, world: World) -> None:
        coming = world.shards("a", epoch=5)
        assert [(s.epoch, s.done) for s in coming] == [(5, False)] * 6

    # -- barriers --------------------------------------------------------------------------------------------------

    def test_a_barrier_is_released_by_the_last_arrival_and_stays_released(
        self, world: World, pool: ThreadPoolExecutor, wait_arrivals: Callable[[int], None]
    ) -> None:
        first = pool.submit(world.arrive, "a")
        wait_arrivals(1)
        assert not first.done()
        second = world.arrive("b")
        assert (second.generation, second.num_members) == (2, 2)
        assert first.result(DEADLINE_S) == second
        assert world.arrive("a") == second

    def test_a_barrier_may_name_its_members(self, world: World) -> None:
        assert world.arrive("a", members=["a"]).num_members == 1

    def test_callers_that_name_different_members_are_refused(
        self, world: World, pool: ThreadPoolExecutor, wait_arrivals: Callable[[int], None]
    ) -> None:
        waiting = pool.submit(world.arrive, "a")
        wait_arrivals(1)
        with pytest.raises(Refused, match="all callers must name the same members") as refused:
            world.arrive("b", members=["b"])
        assert (refused.value.code, refused.value.kind, refused.value.field) == (
            PRECONDITION,
            "BarrierMismatch",
            "members",
        )
        world.arrive("b")
        assert waiting.result(DEADLINE_S).num_members == 2

    def test_a_barrier_that_times_out_names_the_missing_workers(self, world: World) -> None:
        with pytest.raises(Refused, match=r"not all members arrived within 0\.1 s") as refused:
            world.arrive("a", timeout_s=0.1)
        assert (refused.value.code, refused.value.kind) == (Code.ABORTED, "BarrierBroken")
        assert list(refused.value.missing) == ["b"]
        assert "INITIALIZING at step 0" in refused.value.missing["b"]

    def test_a_barrier_breaks_for_all_callers_when_a_worker_leaves(
        self, world: World, pool: ThreadPoolExecutor, wait_arrivals: Callable[[int], None]
    ) -> None:
        world.join("c")
        waiting = [pool.submit(world.arrive, worker_id) for worker_id in ("a", "b")]
        wait_arrivals(2)
        good_bye = pb.DeregisterWorkerRequest(
            worker_id="c", incarnation=world.incarnations["c"], reason="out of memory"
        )
        world.call("DeregisterWorker", good_bye)
        for one in waiting:
            refused = self.refused(one)
            assert (refused.code, refused.kind, refused.generation) == (Code.ABORTED, "BarrierBroken", 4)
            assert refused.missing == {"c": "out of memory"}

    def test_the_longest_list_of_missing_workers_still_arrives(self, way: Way) -> None:
        """32 are named, in an error that fits into what HTTP/2 peers accept as trailers."""
        world = World(way)
        for number in range(33):
            world.join(f"worker-{number:02d}-" + "x" * 100)
        with pytest.raises(Refused, match="not all members arrived") as refused:
            world.arrive(f"worker-00-{'x' * 100}", timeout_s=0.05)
        assert (refused.value.code, refused.value.kind) == (Code.ABORTED, "BarrierBroken")
        assert len(refused.value.missing) > 0

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def test_a_checkpoint_is_committed_by_the_last_ack(self, world: World) -> None:
        first = world.checkpoint("a", size_bytes=10, hashes={"a.st": "1"}, metadata={"by": "a"})
        assert (first.committed, first.num_acked, first.num_ranks) == (False, 1, 2)
        assert world.checkpoint("a", size_bytes=10) == first
        assert not world.call("GetLatestCheckpoint", pb.GetLatestCheckpointRequest()).HasField("checkpoint")
        second = world.checkpoint("b", size_bytes=5, model_hash="m", data_cursor=b"\x00\xff", metadata={"and": "b"})
        assert (second.committed, second.num_acked, second.num_ranks) == (True, 2, 2)
        assert world.checkpoint("b") == second
        found = world.call("GetLatestCheckpoint", pb.GetLatestCheckpointRequest()).checkpoint
        assert (found.checkpoint_id, found.step, found.path, found.size_bytes) == ("c1", 100, "/c/1", 15)
        assert (found.model_hash, found.data_cursor, dict(found.metadata)) == (
            "m",
            b"\x00\xff",
            {"by": "a", "and": "b"},
        )
        assert (found.type, found.generation, found.num_ranks) == (types_pb2.CHECKPOINT_TYPE_FULL, 2, 2)
        assert found.committed_at_s > 1.6e9

    def test_ranks_that_disagree_on_a_checkpoint_are_refused(self, world: World) -> None:
        world.checkpoint("a")
        before = world.everything()
        with pytest.raises(Refused) as refused:
            world.checkpoint("b", step=101)
        assert (refused.value.code, refused.value.kind, refused.value.field) == (
            PRECONDITION,
            "CheckpointMismatch",
            "checkpoint_id",
        )
        assert world.everything() == before
        assert world.checkpoint("b").committed

    def test_a_change_of_members_ends_an_unfinished_checkpoint(self, world: World) -> None:
        world.checkpoint("a")
        world.join("c")
        assert [world.checkpoint(w).num_acked for w in ("b", "c")] == [1, 2]

    def test_the_latest_checkpoint_is_restorable_by_default(self, world: World) -> None:
        for number, kind in enumerate((1, 2, 4, 3)):
            for worker_id in ("a", "b"):
                world.checkpoint(worker_id, checkpoint_id=f"c{number}", type=kind, step=number)
        assert self.latest(world) == "c1"
        assert self.latest(world, types_pb2.CHECKPOINT_TYPE_MODEL_ONLY) == "c2"
        assert self.latest(world, types_pb2.CHECKPOINT_TYPE_FULL) == "c0"
        assert self.latest(world, types_pb2.CHECKPOINT_TYPE_FULL, types_pb2.CHECKPOINT_TYPE_OPTIMIZER_ONLY) == "c3"

    def test_recovery_returns_everything_that_a_worker_needs(self, world: World) -> None:
        request = pb.RequestRecoveryRequest(worker_id="b", incarnation=world.incarnations["b"])
        assert not world.call("RequestRecovery", request).HasField("checkpoint")
        for worker_id in ("a", "b"):
            world.checkpoint(worker_id)
        plan = world.call("RequestRecovery", request)
        assert (plan.checkpoint.checkpoint_id, plan.generation, plan.rank, plan.world_size) == ("c1", 2, 1, 2)
        page = world.call("GetAssignedShards", pb.GetAssignedShardsRequest(worker_id="b"))
        assert (list(plan.shards), plan.next_offset) == (list(page.shards), page.next_offset)
        assert plan.reason.startswith("b joined")

    # -- commands --------------------------------------------------------------------------------------------------

    def test_a_command_is_repeated_until_it_is_acknowledged(self, world: World) -> None:
        request = pb.SendCommandRequest(
            worker_ids=["a"], kind=types_pb2.COMMAND_KIND_STOP, reason="pruned", args={"save": "yes"}, request_id="r1"
        )
        sent = world.call("SendCommand", request)
        assert (sent.command_id, sent.num_workers) == (1, 1)
        assert world.call("SendCommand", request) == sent
        for _ in range(2):
            (command,) = world.call(
                "Heartbeat", pb.HeartbeatRequest(worker_id="a", incarnation=world.incarnations["a"])
            ).commands
            assert (command.command_id, command.kind, command.reason) == (1, types_pb2.COMMAND_KIND_STOP, "pruned")
            assert dict(command.args) == {"save": "yes"}
        assert self.commands(world, "b") == []
        assert self.commands(world, "a", acked=1) == []
        assert self.commands(world, "a") == []

    def test_a_command_without_recipients_goes_to_all_workers(self, world: World) -> None:
        sent = world.call("SendCommand", pb.SendCommandRequest(kind=types_pb2.COMMAND_KIND_CHECKPOINT_NOW))
        assert sent.num_workers == 2
        assert self.commands(world, "a") == self.commands(world, "b") == [sent.command_id]

    def test_commands_are_dropped_with_their_incarnation(self, world: World) -> None:
        world.call("SendCommand", pb.SendCommandRequest(kind=1, worker_ids=["a"]))
        world.join("a", instance_id="another-process", takeover=True)
        assert self.commands(world, "a") == []

    # -- sizes -----------------------------------------------------------------------------------------------------

    def test_a_message_above_the_limit_is_refused_and_the_coordinator_continues(
        self, world: World, another_way: Way
    ) -> None:
        before = world.everything()
        with pytest.raises(Refused) as refused:
            world.call("Heartbeat", pb.HeartbeatRequest(worker_id="x" * MAX_MESSAGE_BYTES))
        assert refused.value.code is EXHAUSTED
        world.way = another_way
        assert world.everything() == before

    def test_an_answer_above_the_limit_fails_only_its_caller(self, world: World) -> None:
        for number in range(66):
            world.call(
                "RegisterWorker",
                pb.RegisterWorkerRequest(job_id="wide", worker_id=f"w{number}", instance_id="i", hostname="h" * 4000),
            )
        with pytest.raises(Refused, match="request less") as refused:
            world.workers("wide")
        assert (refused.value.code, refused.value.kind) == (EXHAUSTED, "LimitExceeded")
        assert list(world.workers()) == ["a", "b"]

    def test_answers_that_exceed_a_frame_together_are_sent_separately(
        self, world: World, pool: ThreadPoolExecutor
    ) -> None:
        for number in range(40):
            world.call(
                "RegisterWorker",
                pb.RegisterWorkerRequest(job_id="wide", worker_id=f"w{number}", instance_id="i", hostname="h" * 4000),
            )
        answers = [pool.submit(world.workers, "wide") for _ in range(8)]
        assert [len(answer.result(DEADLINE_S)) for answer in answers] == [40] * 8

    # -- helpers ---------------------------------------------------------------------------------------------------

    def latest(self, world: World, *types: types_pb2.CheckpointType.ValueType) -> str:
        answer = world.call("GetLatestCheckpoint", pb.GetLatestCheckpointRequest(types=types))
        return answer.checkpoint.checkpoint_id

    def commands(self, world: World, worker_id: str, *, acked: int = 0) -> list[int]:
        beat = pb.HeartbeatRequest(
            worker_id=worker_id, incarnation=world.incarnations[worker_id], acked_command_id=acked
        )
        return [command.command_id for command in world.call("Heartbeat", beat).commands]

    def refused(self, waiting: Future[Any]) -> Refused:
        error = waiting.exception(DEADLINE_S)
        assert isinstance(error, Refused)
        return error
