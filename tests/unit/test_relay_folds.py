"""The aggregation of a relay as pure data: heartbeats and arrivals."""

from __future__ import annotations

import math

import pytest

from strata.coordinator.relay.folds import FORGET_AFTER_LEASES, Pulses, barrier_key, combined
from strata.coordinator.relay.relay import RelayConfig
from strata.errors import ConfigError, InvalidArgument, StaleIncarnation
from strata.v1 import calls_pb2 as pb
from strata.v1 import session_pb2, types_pb2

FENCE = 7_000_000_001
LEASE_S, HEARTBEAT_S = 5.0, 1.0
NO_WORKERS: frozenset[str] = frozenset()


def beat(worker_id: str = "a", incarnation: int = FENCE, **fields: object) -> pb.HeartbeatRequest:
    return pb.HeartbeatRequest(job_id="j", worker_id=worker_id, incarnation=incarnation, **fields)  # type: ignore[arg-type]


@pytest.fixture
def pulses() -> Pulses:
    """Worker `a` of job `j` has registered at second 0."""
    pulses = Pulses()
    pulses.registered(
        pb.RegisterWorkerRequest(job_id="j", worker_id="a"),
        pb.RegisterWorkerResponse(
            incarnation=FENCE, generation=3, world_size=2, lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S
        ),
        0.0,
    )
    return pulses


def confirm(pulses: Pulses, request: pb.HeartbeatRequest, at_s: float, *, folded: bool = True) -> None:
    pulses.confirmed(request, pb.HeartbeatResponse(generation=3, num_workers=2), sent_s=at_s, folded=folded)


def test_a_heartbeat_is_answered_from_the_last_known_state(pulses: Pulses) -> None:
    assert pulses.beat(beat(), 1.0) == pb.HeartbeatResponse(generation=3, num_workers=2)
    pulses.update_generation("j", 4, 5)
    pulses.update_generation("j", 2, 9)
    assert pulses.beat(beat(), 1.0) == pb.HeartbeatResponse(generation=4, num_workers=5)


@pytest.mark.parametrize("request_", [beat("b"), beat(incarnation=FENCE + 1), beat(incarnation=0)])
def test_heartbeats_of_unknown_workers_are_forwarded(pulses: Pulses, request_: pb.HeartbeatRequest) -> None:
    assert pulses.beat(request_, 1.0) is None


def test_heartbeats_fold_into_one_with_the_newest_values(pulses: Pulses) -> None:
    confirm(pulses, beat(metrics={"loss": 4.0, "lr": 0.1}), 0.0, folded=False)
    pulses.beat(beat(state=4, step=1, metrics={"loss": 3.0, "lr": 0.1}), 0.1)
    pulses.beat(beat(step=2, epoch=1, metrics={"loss": 2.0}), 0.2)
    pulses.beat(beat(), 0.3)
    (folded,) = pulses.take()
    assert folded == beat(state=4, step=2, epoch=1, metrics={"loss": 2.0, "lr": 0.1})
    assert pulses.take() == []


@pytest.mark.parametrize("odd", [{"step": 2**60}, {"epoch": 2**60}, {"state": 99}, {"metrics": {"new": 1.0}}])
def test_heartbeats_that_may_be_refused_are_forwarded(pulses: Pulses, odd: dict[str, object]) -> None:
    assert pulses.beat(beat(**odd), 0.1) is None
    pulses.refused(beat(**odd), InvalidArgument("no"), folded=False)
    assert pulses.beat(beat(), 0.2) is not None


def test_only_one_heartbeat_per_worker_is_in_flight(pulses: Pulses) -> None:
    pulses.beat(beat(step=1), 0.1)
    (first,) = pulses.take()
    pulses.beat(beat(step=2), 0.2)
    assert pulses.take() == []
    assert pulses.has_pending
    confirm(pulses, first, 0.1)
    assert [b.step for b in pulses.take()] == [2]


def test_the_relay_vouches_for_no_worker_longer_than_a_lease(pulses: Pulses) -> None:
    assert pulses.beat(beat(), LEASE_S) is not None
    assert pulses.beat(beat(step=9), LEASE_S + 0.1) is None
    confirm(pulses, beat(), LEASE_S + 0.1, folded=False)
    assert pulses.beat(beat(), LEASE_S + 0.2) is not None


def test_an_error_is_returned_once_with_the_next_heartbeat(pulses: Pulses) -> None:
    pulses.beat(beat(), 0.1)
    (folded,) = pulses.take()
    refusal = StaleIncarnation("you are out")
    pulses.refused(folded, refusal, folded=True)
    assert pulses.beat(beat(), 0.2) is refusal
    assert pulses.beat(beat(), 0.3) is None


def test_an_unanswered_heartbeat_changes_nothing(pulses: Pulses) -> None:
    pulses.beat(beat(step=1), 0.1)
    (folded,) = pulses.take()
    pulses.refused(folded, None, folded=True)
    assert pulses.beat(beat(step=2), 0.2) is not None
    assert len(pulses.take()) == 1


def test_a_lost_connection_drops_the_pending_heartbeat_and_forwards_the_next(pulses: Pulses) -> None:
    pulses.beat(beat(step=1), 0.1)
    pulses.doubt("j", "a", FENCE)
    assert pulses.take() == []
    assert pulses.have_all_arrived(set(), "j", NO_WORKERS), "no barrier waits for it"
    pulses.renew(0.2)
    assert pulses.take() == [], "a relay sends no heartbeats for a worker that may be dead"
    assert pulses.beat(beat(step=2), 0.3) is None
    assert not pulses.have_all_arrived(set(), "j", NO_WORKERS)


def test_a_new_upstream_connection_receives_heartbeats_of_all_workers(pulses: Pulses) -> None:
    pulses.renew(1.0)
    assert pulses.take() == [beat()]
    pulses.refused(beat(), None, folded=True)
    pulses.renew(LEASE_S + 1.0)
    assert pulses.take() == []


def queued(command_id: int, *, previous: int = 0) -> session_pb2.CommandQueued:
    command = types_pb2.Command(command_id=command_id)
    return session_pb2.CommandQueued(job_id="j", worker_id="a", command=command, previous_command_id=previous)


def test_after_a_missed_command_the_coordinator_answers_the_next_heartbeat(pulses: Pulses) -> None:
    pulses.take()
    confirm(pulses, beat(), 0.1)
    pulses.add_command(queued(2, previous=1))
    assert pulses.beat(beat(), 0.2) is None
    both = [types_pb2.Command(command_id=1), types_pb2.Command(command_id=2)]
    pulses.confirmed(beat(), pb.HeartbeatResponse(generation=1, num_workers=1, commands=both), sent_s=0.2, folded=False)
    answer = pulses.beat(beat(), 0.3)
    assert isinstance(answer, pb.HeartbeatResponse)
    assert [c.command_id for c in answer.commands] == [1, 2]


def test_commands_are_repeated_until_they_are_acknowledged(pulses: Pulses) -> None:
    pulses.add_command(queued(1))
    pulses.add_command(queued(2, previous=1))
    for _ in range(2):
        answer = pulses.beat(beat(), 0.1)
        assert isinstance(answer, pb.HeartbeatResponse)
        assert [c.command_id for c in answer.commands] == [1, 2]
    pulses.take()
    confirm(pulses, beat(), 0.1)
    assert not pulses.urgent(beat())
    answer = pulses.beat(beat(acked_command_id=1), 0.2)
    assert isinstance(answer, pb.HeartbeatResponse)
    assert [c.command_id for c in answer.commands] == [2]
    assert pulses.urgent(beat())
    assert [b.acked_command_id for b in pulses.take("j", "a")] == [1]


def test_departed_and_long_silent_workers_are_forgotten(pulses: Pulses) -> None:
    pulses.forget(pb.DeregisterWorkerRequest(job_id="j", worker_id="a", incarnation=FENCE + 1))
    assert pulses.beat(beat(), 0.0) is not None
    pulses.forget_silent(FORGET_AFTER_LEASES * LEASE_S)
    assert pulses.beat(beat(), 0.0) is not None
    pulses.forget_silent(FORGET_AFTER_LEASES * LEASE_S + 0.1)
    assert pulses.beat(beat(), 0.0) is None


@pytest.mark.parametrize(("heartbeat_s", "lease_s"), [(1.0, 5.0), (1.0, 2.0), (0.2, 1.5), (10.0, 60.0)])
def test_a_heartbeat_delayed_by_two_relays_fits_into_the_lease(heartbeat_s: float, lease_s: float) -> None:
    pulses = Pulses()
    response = pb.RegisterWorkerResponse(incarnation=1, lease_s=lease_s, heartbeat_s=heartbeat_s)
    pulses.registered(pb.RegisterWorkerRequest(worker_id="a"), response, 0.0)
    assert 0 < pulses.fold_s <= heartbeat_s / 2
    assert heartbeat_s + 2 * pulses.fold_s < lease_s


def test_a_barrier_waits_for_the_named_workers_of_this_relay(pulses: Pulses) -> None:
    assert not pulses.have_all_arrived({"b"}, "j", NO_WORKERS)
    assert pulses.have_all_arrived({"a", "b"}, "j", NO_WORKERS)
    assert not pulses.have_all_arrived({"b"}, "j", frozenset("ab"))
    assert pulses.have_all_arrived({"b"}, "j", frozenset("bc"))
    assert pulses.have_all_arrived({"b"}, "another", NO_WORKERS)


# -- barriers ------------------------------------------------------------------------------------------------------


def arrival(worker_id: str, timeout_s: float = 0.0, **fields: object) -> pb.WaitBarrierRequest:
    return pb.WaitBarrierRequest(
        worker_id=worker_id, incarnation=ord(worker_id), generation=3, barrier_id="x", timeout_s=timeout_s, **fields
    )  # type: ignore[arg-type]


def test_arrivals_become_one_call_with_the_shortest_timeout() -> None:
    below = arrival("b", 4.0, with_workers=[pb.Arrival(worker_id="c", incarnation=99)])
    whole = combined([arrival("a", 5.0), below, arrival("d", 6.0)])
    assert (whole.worker_id, whole.timeout_s) == ("a", 4.0)
    assert [(w.worker_id, w.incarnation) for w in whole.with_workers] == [("b", 98), ("c", 99), ("d", 100)]
    assert combined([below]) is below


def test_only_equal_arrivals_are_combined() -> None:
    same = barrier_key(arrival("a", members=["a", "b"]))
    assert same == barrier_key(arrival("b", members=["b", "a"], job_id="default"))
    assert same != barrier_key(arrival("b", members=["a", "b", "c"]))
    assert same != barrier_key(arrival("b", members=["a", "b"], step=1))
    assert same != barrier_key(arrival("b", 5.0, members=["a", "b"])), "0 is a default that the relay does not know"
    for odd in (math.nan, math.inf, -1.0):
        assert barrier_key(arrival("a", odd)) is None


# -- config --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"upstream": "h:1", "listen": "h:1"}, "call itself"),
        ({"upstream": "h:1,nonsense"}, "not an address"),
        ({"upstream": "h:1", "fold_s": 2.0}, "between 0 and 1 second"),
        ({"upstream": "h:1", "max_unanswered": 0}, "at least 1"),
    ],
)
def test_a_config_that_exists_is_valid(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RelayConfig(**settings)  # type: ignore[arg-type]
