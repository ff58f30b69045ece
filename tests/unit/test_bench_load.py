"""The frames, commands and messages that benchmarks encode by hand, and how waits are counted."""

from __future__ import annotations

import pytest
from google.protobuf import wrappers_pb2

from strata.bench import timing
from strata.bench.contenders import barrier_rounds, coordinator_etcd, coordinator_redis
from strata.bench.contenders.coordinator_idle import long_look_s
from strata.bench.crowd import Node, arrivals, checked
from strata.errors import ConfigError
from strata.v1 import session_pb2, types_pb2


def frame_of(num_workers: int, *, folded: bool) -> session_pb2.ClientFrame:
    node = Node.__new__(Node)  # without a channel, which needs an event loop
    node.worker_ids = [f"worker-{i}" for i in range(num_workers)]
    node.fences = [100 + i for i in range(num_workers)]
    return session_pb2.ClientFrame.FromString(arrivals(node, 7, 3, folded=folded))


def test_eight_workers_of_a_node_arrive_with_eight_calls_in_one_frame() -> None:
    calls = [request.wait_barrier for request in frame_of(8, folded=False).requests]
    assert [(call.worker_id, call.incarnation) for call in calls] == [(f"worker-{i}", 100 + i) for i in range(8)]
    assert {(call.generation, call.step, len(call.with_workers)) for call in calls} == {(7, 3, 0)}


def test_folded_arrivals_are_one_call_like_a_relays() -> None:
    (request,) = frame_of(8, folded=True).requests
    call = request.wait_barrier
    assert (call.worker_id, call.incarnation) == ("worker-0", 100)
    assert [(a.worker_id, a.incarnation) for a in call.with_workers] == [(f"worker-{i}", 100 + i) for i in range(1, 8)]


def test_an_error_ends_the_measurement_instead_of_counting_as_an_answer() -> None:
    refused = session_pb2.Response(id=1, error=types_pb2.Error(message="no such worker"))
    with pytest.raises(RuntimeError, match="no such worker"):
        checked(session_pb2.ServerFrame(responses=[refused]))


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 16_383])
def test_fields_for_etcd_are_valid_protobuf(size: int) -> None:
    assert wrappers_pb2.BytesValue.FromString(coordinator_etcd.field(1, b"x" * size)).value == b"x" * size


def test_a_put_and_a_transaction_for_etcd_match_its_schema() -> None:
    put = coordinator_etcd.put(b"key")
    assert put == b"\x0a\x03key" + b"\x12\x20" + coordinator_etcd.VALUE
    operation = b"\x12" + bytes([len(put)]) + put
    assert coordinator_etcd.transaction([put, put]) == (b"\x12" + bytes([len(operation)]) + operation) * 2


def test_a_write_for_redis_is_an_array_of_three_words() -> None:
    assert coordinator_redis.set_command(b"key") == b"*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$32\r\n" + b"1" * 32 + b"\r\n"


def test_pipelines_for_redis_are_as_large_as_frames_and_repeat_no_key() -> None:
    found = coordinator_redis.pipelines(0, 200)
    assert [pipeline.count(b"SET") for pipeline in found] == [64, 64, 64]
    assert len({word for pipeline in found for word in pipeline.split(b"\r\n") if word.startswith(b"bench/")}) == 192


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99, 1.0])
def test_barriers_use_the_same_quantiles_as_other_figures(share: float) -> None:
    values = [float(i) for i in range(1, 151)]
    assert barrier_rounds.quantile(values, share) == timing.quantile(values, share)


def test_the_variable_sets_the_duration_of_a_long_idle_run() -> None:
    assert long_look_s("") is None
    assert long_look_s("600") == 600.0


@pytest.mark.parametrize("value", ["0", "-1", "601", "soon", "nan"])
def test_an_invalid_duration_of_an_idle_run_is_refused_with_the_bounds(value: str) -> None:
    with pytest.raises(ConfigError, match="up to 600"):
        long_look_s(value)
