"""The health of jobs in words, and the rates that it is computed from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.dashboard import health
from strata.dashboard.health import Slowness, SlowRanks
from strata.dashboard.rates import StepRate, StepRates
from strata.dashboard.sample import JobSample, Sample, WaitingBarrier, WorkerSample, state_of

NOW_S = 1_000.0


def worker(number: int = 0, **changes: object) -> WorkerSample:
    usual = WorkerSample(
        worker_id=f"worker-{number}",
        rank=number,
        state="TRAINING",
        step=840,
        epoch=2,
        incarnation=number + 1,
        attempt=0,
        silent_s=0.3,
        is_suspect=False,
        is_server=False,
        progress_s=NOW_S - 0.5,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def job(*workers: WorkerSample, **values: object) -> JobSample:
    return JobSample("resnet", 3, "worker-0 joined", workers, **values)  # type: ignore[arg-type]


def lines(
    found: JobSample, slow: dict[str, Slowness] | None = None, rates: dict[str, float] | None = None
) -> list[str]:
    return [
        each.line for each in health.findings(found, now_s=NOW_S, heartbeat_s=1.0, rates=rates or {}, slow=slow or {})
    ]


def sample(*jobs: JobSample, now_s: float = NOW_S, failure: str = "") -> Sample:
    return Sample(at_s=now_s, monotonic_s=now_s, jobs={each.job_id: each for each in jobs}, failure=failure)


def test_a_silent_worker_is_named_with_its_silence() -> None:
    assert lines(job(worker(0), worker(3, silent_s=4.0))) == ["worker-3 silent for 4 s"]


def test_two_late_heartbeats_are_not_silence() -> None:
    assert lines(job(worker(0, silent_s=2.4))) == []


def test_the_order_of_findings_is_the_order_of_their_weight() -> None:
    found = lines(
        job(
            worker(0, not_finite=("loss",)),
            worker(1, silent_s=9.0),
            worker(2, is_suspect=True, silent_s=1.0),
            worker(3, state="ERROR"),
            worker(4, progress_s=NOW_S - 45.0),
            waiting=WaitingBarrier("sync", 12.0, 5, ("a", "b", "c")),
        )
    )

    assert found == [
        "worker-3 is in state ERROR",
        "worker-2 lost its connection 1 s after its last heartbeat",
        "worker-1 silent for 9 s",
        "worker-4 has made no step for 45 s, at step 840",
        "barrier sync has waited 12 s for a, b, c and 2 more",
        "loss of worker-0 is not finite",
    ]


def test_a_rank_whose_steps_take_minutes_is_not_stalled_after_30_s() -> None:
    slow_steps = job(worker(0, progress_s=NOW_S - 45.0))

    assert lines(slow_steps, rates={"worker-0": 1 / 60}) == []
    assert lines(slow_steps, rates={"worker-0": 10.0}) == ["worker-0 has made no step for 45 s, at step 840"]


def test_the_loss_of_a_rack_is_one_line() -> None:
    found = lines(job(*(worker(number, silent_s=5.0) for number in range(40)), worker(40, state="ERROR")))

    assert found == ["worker-40 is in state ERROR", "40 workers are silent: worker-0, worker-1, worker-2 and 37 more"]


def test_a_slow_rank_is_named_with_its_factor_and_since_when() -> None:
    slow = {"worker-2": Slowness(since_step=840, since_s=900.0, factor=3.0)}

    assert lines(job(worker(0), worker(1), worker(2)), slow) == ["rank 2 is 3× slower than the median since step 840"]


def test_a_rank_is_slow_only_after_five_seconds_and_keeps_the_step_at_which_it_began() -> None:
    tracker = SlowRanks()
    rates = {"resnet": {"worker-0": 9.0, "worker-1": 9.0, "worker-2": 3.0}}
    for second in range(7):
        now = job(worker(0), worker(1), worker(2, step=100 + second))
        tracker.update(sample(now, now_s=NOW_S + second), rates)
        found = tracker.of_job(now, NOW_S + second)
        assert bool(found) == (second >= 5)

    assert found["worker-2"] == Slowness(100, NOW_S, 3.0)
    tracker.update(sample(now), {"resnet": {"worker-0": 9.0, "worker-1": 9.0, "worker-2": 8.0}})
    assert tracker.of_job(now, NOW_S + 60) == {}


@pytest.mark.parametrize("rates", [{"worker-0": 9.0, "worker-1": 1.0}, dict.fromkeys(["worker-0", "worker-1"], 1.0)])
def test_two_ranks_have_no_meaningful_median(rates: dict[str, float]) -> None:
    tracker, now = SlowRanks(), job(worker(0), worker(1))
    for second in range(20):
        tracker.update(sample(now, now_s=NOW_S + second), {"resnet": rates})

    assert tracker.of_job(now, NOW_S + 20) == {}


def test_without_findings_the_line_says_what_is_well() -> None:
    eight = job(*(worker(number) for number in range(8)), checkpoint_age_s=12.0)

    assert health.of_job(eight, []).line == "all 8 workers report; last checkpoint 12 s ago"
    assert health.of_job(job(worker(0)), []).line == "the worker reports; no checkpoint yet"
    assert health.of_job(job(), []).line == "no workers: worker-0 joined"
    assert health.of_all(sample(eight), []).line == "all 8 workers report; last checkpoint 12 s ago"
    assert health.of_all(sample(), []).line == "no jobs yet; strata run train.py starts one"
    two = sample(eight, replace(eight, job_id="bert"))
    assert health.of_all(two, []).line == "all 16 workers of 2 jobs report"


def test_a_failing_journal_comes_before_everything_else() -> None:
    silent = health.findings(job(worker(0, silent_s=4.0)), now_s=NOW_S, heartbeat_s=1.0, rates={}, slow={})

    found = health.of_all(sample(failure="the disk is full"), silent)

    assert (found.level, found.line, found.num_findings) == ("error", "the disk is full; and 1 more", 2)


def test_a_parameter_server_is_not_a_rank_but_its_silence_counts() -> None:
    server = worker(1, is_server=True, state="IDLE", progress_s=0.0, silent_s=4.0)

    assert lines(job(worker(0), server)) == ["worker-1 silent for 4 s"]
    assert state_of(job(worker(0), server)) == "training"


def test_one_recovering_worker_makes_a_job_recover() -> None:
    assert state_of(job(worker(0), worker(1, state="RECOVERING"))) == "recovering"
    assert state_of(job()) == "waiting"


# -- rates -------------------------------------------------------------------------------------------------------------


def test_steps_of_three_seconds_have_a_steady_rate() -> None:
    rate, found = StepRate(), []
    for second in range(40):
        rate.add(second // 3, NOW_S + second - second % 3)
        found.append(rate.per_s(NOW_S + second))

    assert found[0] is None
    assert found[10:] == pytest.approx([1 / 3] * 30)


def test_a_rank_that_stops_slows_down_and_one_that_is_set_back_starts_anew() -> None:
    rate = StepRate()
    for second in range(10):
        rate.add(second * 5, NOW_S + second)
    assert rate.per_s(NOW_S + 9) == pytest.approx(5.0)
    assert rate.per_s(NOW_S + 18) == pytest.approx(2.5)

    rate.add(20, NOW_S + 20)
    assert rate.per_s(NOW_S + 20) is None


def test_steps_that_a_restarted_process_restores_are_not_progress() -> None:
    rates = StepRates()
    for second, step in enumerate([0, 0, 1_742, 1_752, 1_762]):
        rates.update(sample(job(worker(0, step=step, progress_s=NOW_S + second)), now_s=NOW_S + second))

    assert rates.of_job(job(worker(0)), NOW_S + 4) == {"worker-0": pytest.approx(10.0)}


def test_the_rates_of_ranks_that_left_are_forgotten() -> None:
    rates = StepRates()
    for second in range(3):
        rates.update(sample(job(worker(0, step=second, progress_s=NOW_S + second)), now_s=NOW_S + second))
    assert rates.of_job(job(worker(0)), NOW_S + 2) == {"worker-0": pytest.approx(1.0)}

    rates.update(sample(job()))
    assert rates.of_job(job(worker(0)), NOW_S + 2) == {}
