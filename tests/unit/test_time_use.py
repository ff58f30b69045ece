"""Where the time of a worker goes: the meter in the process, and the message that carries it."""

from __future__ import annotations

import math

import pytest

from strata.coordinator import wire
from strata.coordinator.relay.folds import Pulses
from strata.coordinator.state.time_use import TimeUse
from strata.train.time_use import TimeUseMeter, data_wait
from strata.v1 import calls_pb2 as pb
from strata.v1 import types_pb2


class HandClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s


def test_nothing_is_measured_before_the_first_step() -> None:
    meter = TimeUseMeter(HandClock())
    with meter.during("restore_s"):
        pass
    assert meter.read() is None


def test_waits_before_the_first_step_do_not_count() -> None:
    clock = HandClock()
    meter = TimeUseMeter(clock)
    waited = [5.0]
    meter.add_source("data_s", lambda: waited[0])
    with meter.during("restore_s"):
        clock.now_s += 3
    meter.begin()
    waited[0] += 2
    clock.now_s += 10
    assert meter.read() == TimeUse(measured_s=10.0, data_s=2.0)


def test_a_wait_in_progress_is_part_of_what_is_read() -> None:
    clock = HandClock()
    meter = TimeUseMeter(clock)
    meter.begin()
    with meter.during("checkpoint_s"):
        clock.now_s += 4
        assert meter.read() == TimeUse(measured_s=4.0, checkpoint_s=4.0)
    assert meter.read() == TimeUse(measured_s=4.0, checkpoint_s=4.0)


def test_a_wait_inside_another_counts_once() -> None:
    clock = HandClock()
    meter = TimeUseMeter(clock)
    meter.begin()
    with meter.during("checkpoint_s"):
        clock.now_s += 1
        with meter.during("barrier_s"):
            clock.now_s += 2
    assert meter.read() == TimeUse(measured_s=3.0, checkpoint_s=3.0)


def test_a_loader_without_a_sum_is_not_measured() -> None:
    assert data_wait(iter([])) is None


class MetricsOfSplits:
    """A dataset of a user, whose method needs an argument."""

    def get_metrics(self, split: str) -> str:
        return split


class OwnLoader:
    dataset = MetricsOfSplits()
    waited_s = None


def test_attributes_of_a_users_loader_with_another_meaning_are_not_read() -> None:
    assert data_wait(OwnLoader()) is None


def test_a_source_that_raises_is_dropped_and_the_rest_is_measured(caplog: pytest.LogCaptureFixture) -> None:
    clock = HandClock()
    meter = TimeUseMeter(clock)
    waits = [0.0, 0.5]
    meter.add_source("data_s", lambda: waits.pop(0))
    meter.begin()
    clock.now_s += 2
    assert meter.read() == TimeUse(measured_s=2.0, data_s=0.5)
    assert meter.read() == TimeUse(measured_s=2.0)
    assert meter.read() == TimeUse(measured_s=2.0)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("collective_s", [None, 0.0, 1.5])
def test_the_message_keeps_what_was_not_measured_apart_from_zero(collective_s: float | None) -> None:
    use = TimeUse(measured_s=9.0, data_s=1.0, barrier_s=0.5, collective_s=collective_s)
    assert wire.decode_time_use(wire.encode_time_use(use)) == use


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e300])
def test_what_cannot_have_been_measured_is_ignored(value: float) -> None:
    assert wire.decode_time_use(types_pb2.TimeUse(measured_s=value)) is None


def test_a_relay_folds_two_heartbeats_into_the_newest_time_use() -> None:
    pulses = Pulses()
    register = pb.RegisterWorkerRequest(job_id="j", worker_id="w")
    pulses.registered(register, pb.RegisterWorkerResponse(incarnation=7, heartbeat_s=1.0, lease_s=10.0), 0.0)
    for measured_s in (1.0, 2.0):
        use = types_pb2.TimeUse(measured_s=measured_s, data_s=0.5)
        pulses.beat(pb.HeartbeatRequest(job_id="j", worker_id="w", incarnation=7, time_use=use), 0.1)
    (sent,) = pulses.take()
    assert (sent.time_use.measured_s, sent.time_use.data_s) == (2.0, 0.5)
