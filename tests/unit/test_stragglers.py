"""The rank that the others wait for is named only where the measured time shows it."""

from __future__ import annotations

import pytest
from test_dashboard_health import job, worker

from strata.coordinator.state.time_use import TimeUse
from strata.dashboard import health
from strata.dashboard.sample import Sample
from strata.dashboard.stragglers import NoVerdict, RankSpent, Straggler, Stragglers, attribute
from strata.dashboard.uses import Spent, UseHistory


def rank(
    number: int, *, data: float = 0.0, saving: float = 0.0, blocked: float = 0.0, is_collective_known: bool = True
) -> RankSpent:
    """A rank that measured ten seconds; its parts are shares."""
    computing = 1.0 - data - saving - blocked
    parts = [10.0 * share for share in (computing, data, saving, 0.0, blocked)]
    return RankSpent(f"w{number}", number, Spent(10.0, *parts, is_collective_known))


def named(*ranks: RankSpent) -> tuple[int, str, float]:
    found = attribute(ranks)
    assert isinstance(found, Straggler), found
    return found.rank, found.cause, round(found.factor, 2)


def why(*ranks: RankSpent) -> str:
    found = attribute(ranks)
    assert isinstance(found, NoVerdict), found
    return found.why


def test_the_rank_that_waits_least_is_named_with_what_it_does_instead() -> None:
    others = [rank(0, blocked=0.6), rank(1, blocked=0.7)]

    assert named(*others, rank(2, data=0.6, blocked=0.05)) == (2, "data", 2.71)
    assert named(*others, rank(2, saving=0.6, blocked=0.05)) == (2, "checkpoint", 2.71)
    assert named(*others, rank(2, blocked=0.05)) == (2, "compute", 2.71)


def test_data_waits_are_evidence_without_measured_collectives_and_computing_is_none() -> None:
    others = [rank(number, blocked=0.6, is_collective_known=False) for number in range(2)]

    assert named(*others, rank(2, data=0.6, is_collective_known=False))[:2] == (2, "data")
    assert "cannot be compared" in why(*others, rank(2, is_collective_known=False))


def test_without_measured_waits_for_data_it_stays_open_whether_a_rank_computes_or_waits_for_them() -> None:
    others = [rank(0, data=0.1, blocked=0.6), rank(1, data=0.1, blocked=0.7)]
    measured, unmeasured = (attribute([*others, rank(2, data=data, blocked=0.05)]) for data in (0.001, 0.0))

    assert isinstance(measured, Straggler)
    assert isinstance(unmeasured, Straggler)
    assert (measured.cause, unmeasured.cause) == ("compute", "compute")
    assert measured.line.endswith("its steps compute longer")
    assert unmeasured.line.endswith("its steps take longer, in computing or in a loader that measures no waits")


def test_ranks_that_hide_their_waits_in_collectives_get_no_verdict() -> None:
    slow = rank(1, data=0.7, is_collective_known=False)

    assert "collectives of torch are not measured" in why(rank(0, is_collective_known=False), slow)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([rank(0)], "a single rank"),
        ([], "a single rank"),
        ([rank(0, blocked=0.1), rank(1)], "no rank waits long"),
        ([rank(0, blocked=0.6), rank(1, blocked=0.6), rank(2), rank(3)], "equally little"),
        ([rank(0, blocked=0.6), RankSpent("w1", 1, None)], "1 of 2 ranks have not measured"),
    ],
)
def test_there_is_no_verdict_where_it_is_unclear(ranks: list[RankSpent], words: str) -> None:
    assert words in why(*ranks)


def test_a_rank_that_loads_checkpoints_instead_of_the_three_causes_is_not_explained() -> None:
    loads = RankSpent("w2", 2, Spent(10.0, 4.0, 0.0, 0.0, 6.0, 0.0, True))

    assert "neither data" in why(rank(0, blocked=0.6), rank(1, blocked=0.6), loads)


def test_the_verdict_keeps_the_step_since_which_it_holds_and_becomes_the_health_line() -> None:
    uses, stragglers = UseHistory(), Stragglers()
    for number in range(12):
        at_s = 5.0 * number
        waits = TimeUse(measured_s=at_s, barrier_s=0.6 * at_s, collective_s=0.0)
        loads = TimeUse(measured_s=at_s, data_s=0.6 * at_s, collective_s=0.0)
        members = [
            worker(each, step=840 + 10 * number, time_use=loads if each == 2 else waits, time_use_at_s=at_s)
            for each in range(3)
        ]
        found = job(*members)
        sample = Sample(at_s=at_s, monotonic_s=at_s, jobs={found.job_id: found})
        uses.update(sample)
        stragglers.update(sample, uses)

    verdict = stragglers.of_job("resnet")
    assert isinstance(verdict, Straggler)
    assert verdict.line == "rank 2 is 2.5× slower than the median since step 840: it waits for data"
    (finding,) = health.findings(found, now_s=at_s, heartbeat_s=1.0, rates={}, slow={}, straggler=verdict)
    assert (finding.kind, finding.rank, finding.line) == ("slow", 2, verdict.line)
    assert stragglers.of_job("other") == NoVerdict("the job has no workers")
