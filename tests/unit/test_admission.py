"""Admission control: rates per caller, and roles per call."""

from __future__ import annotations

import pytest

from strata.clock import ManualClock
from strata.coordinator.config import Limits
from strata.coordinator.serve.admission import MAX_PEERS, SMALL_BYTES, AdmissionControl, Bucket
from strata.coordinator.serve.service import METHODS, Method
from strata.errors import LimitExceeded, PermissionRefused, Unauthenticated
from strata.transport.tokens import Guard, Role, parse_grants, require
from strata.v1 import calls_pb2, coordinator_pb2, types_pb2

BY_NAME = {method.name: method for method in METHODS}
TOKENS = {role: role.name[0].lower() * 32 for role in Role}
READING = {"GetLatestCheckpoint", "GetMembership", "ListJobs", "ListWorkers", "ListDatasets"}
COMMANDING = {"DropJob"}


class Call:
    """The part of gRPC's context that admission control uses."""

    def __init__(self, role: Role | None, peer: str = "ipv4:10.0.0.1:4711") -> None:
        self._metadata = (("authorization", f"Bearer {TOKENS[role]}"),) if role else ()
        self._peer = peer

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def peer(self) -> str:
        return self._peer


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def admission(clock: ManualClock) -> AdmissionControl:
    grants = parse_grants([f"{role.name} {token}" for role, token in TOKENS.items()], source="tokens")
    return AdmissionControl(Guard(lambda: grants), Limits(max_calls_per_s=10), clock)


def admit(admission: AdmissionControl, call: Call, method: Method, request: object = None) -> None:
    """Admit a call as `unary_handler` does, before and after its body is read."""
    role, bucket = admission.enter(call, method)
    try:
        if request is not None:
            require(role, method.needed(request), method.name)
    finally:
        admission.leave(bucket)


def test_a_bucket_allows_a_burst_of_one_second_and_refills() -> None:
    bucket = Bucket(10, 0.0)
    assert [bucket.take(1, 0.0) for _ in range(11)] == [1] * 10 + [0]
    assert bucket.take(1, 0.05) == 0
    assert bucket.take(1, 0.2) == 1
    assert [bucket.take(1, 1_000.0) for _ in range(11)] == [1] * 10 + [0]


def test_a_bucket_lets_the_first_calls_of_a_frame_through_and_not_the_rest() -> None:
    bucket = Bucket(10, 0.0)
    assert [bucket.take(4, 0.0) for _ in range(4)] == [4, 4, 2, 0]
    assert bucket.take(4, 0.25) == 2


def test_the_rate_limit_applies_per_machine(admission: AdmissionControl, clock: ManualClock) -> None:
    method = BY_NAME["ListJobs"]
    for port in range(10):
        admit(admission, Call(Role.READER, f"ipv4:10.0.0.1:{port}"), method)
    with pytest.raises(LimitExceeded, match="max_calls_per_s=10"):
        admit(admission, Call(Role.READER, "ipv4:10.0.0.1:99"), method)
    admit(admission, Call(Role.READER, "ipv4:10.0.0.2:1"), method)
    clock.advance(0.2)
    admit(admission, Call(Role.READER, "ipv4:10.0.0.1:99"), method)


def test_calls_without_a_token_do_not_use_up_the_rate(admission: AdmissionControl) -> None:
    for _ in range(20):
        with pytest.raises(Unauthenticated):
            admit(admission, Call(None), BY_NAME["ListJobs"])
    admit(admission, Call(Role.READER), BY_NAME["ListJobs"])


def test_the_number_of_tracked_peers_is_bounded(admission: AdmissionControl) -> None:
    for number in range(MAX_PEERS + 5):
        admit(admission, Call(Role.READER, f"ipv4:{number}:1"), BY_NAME["ListJobs"])
    assert len(admission._buckets) == MAX_PEERS


def test_every_call_of_the_service_has_a_role() -> None:
    served = {m.name for m in coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"].methods} - {"Session"}
    assert served == set(BY_NAME)
    assert {m.name for m in METHODS if m.role is Role.READER} == READING
    assert {m.name for m in METHODS if m.role is Role.ADMIN} == COMMANDING


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_each_role_may_make_its_calls_and_no_others(admission: AdmissionControl, role: Role, method: object) -> None:
    name = method.name  # type: ignore[attr-defined]
    needed = Role.READER if name in READING else Role.ADMIN if name in COMMANDING else Role.WORKER
    if role >= needed:
        admit(admission, Call(role), BY_NAME[name])
    else:
        with pytest.raises(PermissionRefused, match=f"{name} requires the role {needed.name.lower()}"):
            admit(admission, Call(role), BY_NAME[name])


@pytest.mark.parametrize("kind", types_pb2.CommandKind.values())
def test_workers_may_send_only_the_commands_that_ranks_agree_on(admission: AdmissionControl, kind: int) -> None:
    request = calls_pb2.SendCommandRequest(kind=kind)
    if types_pb2.CommandKind.Name(kind) in ("COMMAND_KIND_STOP", "COMMAND_KIND_CHECKPOINT_NOW"):
        admit(admission, Call(Role.WORKER), BY_NAME["SendCommand"], request)
    else:
        with pytest.raises(PermissionRefused, match="SendCommand requires the role admin"):
            admit(admission, Call(Role.WORKER), BY_NAME["SendCommand"], request)
    with pytest.raises(PermissionRefused, match="SendCommand requires the role"):
        admit(admission, Call(Role.READER), BY_NAME["SendCommand"], request)


def test_unary_calls_are_bounded_in_total_and_per_machine(clock: ManualClock) -> None:
    admission = AdmissionControl(Guard(), Limits(max_unary_calls=4), clock)
    method = BY_NAME["ListJobs"]
    buckets = [admission.enter(Call(None, f"ipv4:10.0.0.1:{port}"), method)[1] for port in range(2)]
    with pytest.raises(LimitExceeded, match="max_unary_calls=4"):
        admission.enter(Call(None, "ipv4:10.0.0.1:9"), method)
    buckets += [admission.enter(Call(None, f"ipv4:10.0.0.{host}:1"), method)[1] for host in (2, 3)]
    with pytest.raises(LimitExceeded, match="max_unary_calls=4"):
        admission.enter(Call(None, "ipv4:10.0.0.4:1"), method)
    for bucket in buckets:
        admission.leave(bucket)
    _, bucket = admission.enter(Call(None), method)
    assert (admission._num_calls, bucket.num_calls) == (1, 1)


def test_a_reader_may_not_send_a_large_request(admission: AdmissionControl) -> None:
    admission.check_size(Role.WORKER, 1 << 20)
    admission.check_size(Role.READER, SMALL_BYTES)
    with pytest.raises(LimitExceeded, match="the role reader may send 65536"):
        admission.check_size(Role.READER, SMALL_BYTES + 1)
