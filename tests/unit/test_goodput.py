"""The ledger of a run adds up, whatever is missing."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.coordinator.state.time_use import TimeUse
from strata.dashboard import goodput
from strata.dashboard.goodput import CATEGORIES, Life, Lives, RunTimes, grown, ledger, total
from strata.dashboard.history.file import HistoryFile
from strata.dashboard.history.store import Changes
from strata.dashboard.sample import JobSample, Sample, WorkerSample

if TYPE_CHECKING:
    from pathlib import Path


def life(rank: int = 0, attempt: int = 0, joined: float = 0.0, left: float | None = None, **more: object) -> Life:
    values = {"job_id": "j", "worker_id": f"w{rank}", "incarnation": attempt * 10 + rank, **more}
    return Life(rank=rank, attempt=attempt, joined_at_s=joined, left_at_s=left, **values)  # type: ignore[arg-type]


def seconds(entry: object) -> dict[str, float]:
    return {name: us / 1e6 for name, us in entry.parts_us.items() if us}  # type: ignore[attr-defined]


def test_a_measured_process_is_divided_into_its_waits_and_computing() -> None:
    use = TimeUse(measured_s=80.0, data_s=10.0, checkpoint_s=5.0, barrier_s=1.0, collective_s=4.0)
    (entry,) = ledger([life(joined=2.0, use=use, use_at_s=99.0)], now_s=100.0, times=RunTimes(started_at_s={0: 0.0}))
    assert seconds(entry) == {
        "computing": 60.0,
        "data": 10.0,
        "checkpoint": 5.0,
        "barriers": 5.0,
        "starting": 19.0,
        "unknown": 1.0,
    }
    assert entry.goodput == pytest.approx(0.6)


def test_the_time_between_a_failure_and_the_next_first_step_is_recovering() -> None:
    use = TimeUse(measured_s=8.0)
    first = [life(rank, left=10.0 + rank, use=use, use_at_s=9.0) for rank in range(2)]
    second = [life(rank, 1, joined=12.0, use=use, use_at_s=20.0) for rank in range(2)]
    before, after = ledger([*first, *second], now_s=20.0)
    assert seconds(before) == {"computing": 16.0, "starting": 2.0, "unknown": 2.0}
    assert seconds(after) == {"computing": 16.0, "recovering": 4.0}


def test_a_worker_that_was_restarted_alone_does_not_end_its_attempt() -> None:
    lives = [
        life(left=40.0, use=TimeUse(measured_s=40.0), use_at_s=40.0),
        life(1, left=10.0, use=TimeUse(measured_s=10.0), use_at_s=10.0),
        life(1, joined=10.0, left=40.0, incarnation=5, use=TimeUse(measured_s=28.0), use_at_s=40.0),
        life(0, 1, joined=44.0, use=TimeUse(measured_s=5.0), use_at_s=50.0),
        life(1, 1, joined=44.0, use=TimeUse(measured_s=5.0), use_at_s=50.0),
    ]
    before, after = ledger(lives, now_s=50.0)
    assert seconds(before) == {"computing": 78.0, "recovering": 2.0}
    assert seconds(after) == {"computing": 10.0, "recovering": 10.0}


def test_a_rank_that_finished_early_does_not_end_an_attempt_whose_failure_is_known() -> None:
    use = TimeUse(measured_s=10.0)
    lives = [
        life(left=10.0, use=use, use_at_s=10.0),
        life(1, left=40.0, use=TimeUse(measured_s=40.0), use_at_s=40.0),
        life(1, 1, joined=44.0, use=TimeUse(measured_s=5.0), use_at_s=50.0),
    ]
    before, after = ledger(lives, now_s=50.0, times=RunTimes(failed_at_s={0: 40.0}))
    assert seconds(before) == {"computing": 50.0, "barriers": 30.0}
    assert seconds(after) == {"computing": 5.0, "recovering": 5.0}


def test_the_time_between_a_stop_and_a_resume_does_not_count() -> None:
    use = TimeUse(measured_s=10.0)
    lives = [
        life(left=10.0, use=use, use_at_s=10.0),
        life(1, use=use, use_at_s=10.0),  # its end was not seen before the coordinator ended
        life(0, 1, joined=504.0, use=TimeUse(measured_s=5.0), use_at_s=510.0),
        life(1, 1, joined=504.0, use=TimeUse(measured_s=5.0), use_at_s=510.0),
    ]
    times = RunTimes(started_at_s={0: 0.0, 1: 500.0}, finished_at_s={0: 11.0})
    before, after = ledger(lives, now_s=510.0, times=times)
    assert seconds(before) == {"computing": 20.0, "barriers": 1.0, "unknown": 1.0}
    assert seconds(after) == {"computing": 10.0, "starting": 10.0}


def test_the_time_between_a_final_failure_and_a_resume_does_not_count() -> None:
    use = TimeUse(measured_s=10.0)
    lives = [life(left=10.0, use=use, use_at_s=10.0), life(0, 2, joined=504.0, use=use, use_at_s=514.0)]
    times = RunTimes(
        started_at_s={0: 0.0, 1: 10.5, 2: 500.0}, failed_at_s={0: 10.0, 1: 12.0}, finished_at_s={1: 12.0, 2: 514.0}
    )
    before, after = ledger(lives, now_s=900.0, times=times)
    assert seconds(before) == {"computing": 10.0}
    assert seconds(after) == {"computing": 10.0, "starting": 4.0}


def test_a_worker_that_measures_nothing_is_unknown_once_it_makes_steps() -> None:
    (entry,) = ledger([life(step=5), life(1)], now_s=10.0)
    assert seconds(entry) == {"unknown": 10.0, "starting": 10.0}


def test_a_rank_that_left_before_the_others_waits_for_them() -> None:
    use = TimeUse(measured_s=4.0)
    lives = [life(left=4.0, use=use, use_at_s=4.0), life(1, left=10.0, use=TimeUse(measured_s=10.0), use_at_s=10.0)]
    (entry,) = ledger(lives, now_s=99.0)
    assert seconds(entry) == {"computing": 14.0, "barriers": 6.0}


def test_steps_that_an_earlier_process_has_made_are_repeated_up_to_the_last_known_one() -> None:
    resumed = life(known_step=30)
    for step, computed_s in ((20, 1.0), (40, 3.0), (60, 5.0)):
        resumed = grown(resumed, step=step, use=TimeUse(measured_s=computed_s), use_at_s=computed_s, first_step=10)
    assert resumed.repeated_s == pytest.approx(2.0)


def test_a_process_whose_first_step_is_new_repeats_nothing() -> None:
    resumed = grown(life(known_step=30), step=40, use=TimeUse(measured_s=4.0), use_at_s=4.0, first_step=31)
    assert resumed.repeated_s == 0.0


def sample(at_s: float, *workers: WorkerSample) -> Sample:
    return Sample(at_s=1_000.0 + at_s, monotonic_s=at_s, jobs={"j": JobSample("j", 1, "", workers)})


def worker(
    step: int,
    use: TimeUse | None,
    *,
    incarnation: int = 1,
    attempt: int = 0,
    name: str = "w",
    is_server: bool = False,
) -> WorkerSample:
    return WorkerSample(
        worker_id=name, rank=0, state="TRAINING", step=step, epoch=0, incarnation=incarnation, attempt=attempt,
        silent_s=0.0, is_suspect=False, is_server=is_server, progress_s=0.0, launch_rank=0, time_use=use,
        time_use_at_s=use.measured_s + 1 if use else 0.0,
    )  # fmt: skip


def test_a_restarted_coordinator_continues_the_life_of_a_process() -> None:
    lives = Lives()
    lives.update(sample(0.0, worker(0, None)))
    lives.update(sample(3.0, worker(5, TimeUse(measured_s=2.0))))
    again = Lives()
    again.restore(lives.take_changes().changed)
    again.update(sample(4.0, worker(0, None)))  # members are known, their heartbeats are not yet
    (kept,) = again.of_job("j")
    assert (kept.joined_at_s, kept.step, kept.use) == (1_000.0, 5, TimeUse(measured_s=2.0))
    again.update(sample(9.0))
    assert again.of_job("j")[0].left_at_s == 1_009.0


def test_a_new_process_knows_the_last_step_of_the_ones_before() -> None:
    lives = Lives()
    lives.update(sample(1.0, worker(7, None)))
    lives.update(sample(2.0))
    lives.update(sample(3.0, worker(4, None, incarnation=2, attempt=1)))
    assert lives.of_job("j")[1].known_step == 7


def test_a_process_that_replaces_another_between_two_samples_knows_its_last_step() -> None:
    lives = Lives()
    lives.update(sample(1.0, worker(7, None)))
    lives.update(sample(2.0, worker(4, None, incarnation=2, attempt=1)))
    assert lives.of_job("j")[1].known_step == 7


def test_a_restarted_coordinator_without_a_history_counts_what_a_process_has_measured() -> None:
    lives = Lives()
    lives.update(sample(500_000.0, worker(50, None)))
    assert lives.of_job("j")[0].joined_at_s == 501_000.0
    use = TimeUse(measured_s=60.0, data_s=20.0)
    for at_s in (500_001.0, 500_002.0):
        seen = worker(51, use)
        lives.update(sample(at_s, dataclasses.replace(seen, time_use_at_s=500_000.5)))
    (entry,) = ledger(lives.of_job("j"), now_s=501_000.5)
    assert seconds(entry) == {"computing": 40.0, "data": 20.0}


def test_a_worker_that_turns_out_to_be_a_server_is_not_a_rank() -> None:
    lives = Lives()
    lives.update(sample(1.0, worker(0, None), worker(0, None, name="s")))
    lives.update(sample(2.0, worker(0, None), worker(900, None, name="s", is_server=True)))
    assert [each.worker_id for each in lives.of_job("j")] == ["w"]
    again = Lives()
    again.restore(lives.take_changes().changed)
    again.update(sample(3.0, worker(0, None), worker(900, None, name="s")))  # its metrics are not known yet
    assert [each.worker_id for each in again.of_job("j")] == ["w"]
    again.update(sample(4.0))
    again.update(sample(5.0, worker(0, None, incarnation=2)))
    assert again.of_job("j")[-1].known_step == 0


class Compared(str):
    """Counts how often it is compared."""

    __slots__ = ()
    num = 0

    def __eq__(self, other: object) -> bool:
        Compared.num += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_a_new_process_does_not_look_at_all_processes_before() -> None:
    lives, job_id = Lives(), Compared("j")
    lives.restore(life(left=1.0, job_id=job_id, incarnation=100 + number) for number in range(1_000))
    Compared.num = 0
    lives.update(sample(2.0, worker(0, None)))
    assert len(lives.of_job("j")) == 1_001
    assert Compared.num < 100


def test_of_too_many_processes_those_that_left_first_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "MAX_LIVES", 2)
    lives = Lives()
    lives.update(sample(1.0, worker(7, None, name="stays")))
    for number in range(2, 5):
        lives.update(sample(float(number), worker(7, None, name="stays"), worker(0, None, incarnation=number)))
        assert "stays" in {each.worker_id for each in lives.of_job("j")}
    kept = lives.of_job("j")
    assert [(each.worker_id, each.incarnation, each.left_at_s) for each in kept] == [
        ("stays", 1, None),
        ("w", 4, None),
    ]
    changes = lives.take_changes()
    assert (changes.forgotten, sorted(each.key for each in changes.changed)) == (
        ["j/w/2", "j/w/3"],
        ["j/stays/1", "j/w/4"],
    )


def test_the_history_keeps_a_process_that_joined_before_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(goodput, "MAX_LIVES", 2)
    lives, file = Lives(), HistoryFile(tmp_path / "x.history.db")
    lives.restore([life(joined=1.0), *(life(joined=5.0 + n, left=6.0 + n, incarnation=10 + n) for n in range(4))])
    lives.update(sample(20.0, worker(3, None, name="w0", incarnation=0)))
    changes = lives.take_changes()
    file.write(Changes([], []), changes.changed, changes.forgotten)
    again = Lives()
    again.restore(file.load_lives())
    file.close()
    assert [each.incarnation for each in again.of_job("j") if each.left_at_s is None] == [0]


times = st.floats(0, 1e6)
uses = st.builds(
    TimeUse, measured_s=times, data_s=times, checkpoint_s=times, barrier_s=times, restore_s=times,
    collective_s=st.none() | times,
)  # fmt: skip
lives_of_a_job = st.lists(
    st.builds(
        Life, job_id=st.just("j"), worker_id=st.just("w"), incarnation=st.integers(0, 99), rank=st.integers(0, 4),
        attempt=st.integers(0, 3), joined_at_s=times, left_at_s=st.none() | times, step=st.integers(0, 9),
        use=st.none() | uses, use_at_s=times, known_step=st.integers(0, 9), repeated_s=times,
    ),
    max_size=12,
)  # fmt: skip


of_attempts = st.dictionaries(st.integers(-1, 4), times, max_size=4)
timelines = st.builds(RunTimes, started_at_s=of_attempts, failed_at_s=of_attempts, finished_at_s=of_attempts)


@given(lives_of_a_job, times, timelines)
def test_the_parts_add_up_to_the_time_of_all_ranks(lives: list[Life], now_s: float, timeline: RunTimes) -> None:
    entries = ledger(lives, now_s=now_s, times=timeline)
    for entry in entries:
        whole = (round(entry.ended_at_s * 1e6) - round(entry.began_at_s * 1e6)) * entry.num_ranks
        assert entry.total_us == whole
        assert min(entry.parts_us.values()) >= 0
        assert tuple(entry.parts_us) == CATEGORIES
    for before, after in itertools.pairwise(entries):
        is_resume = any(before.attempt <= at < after.attempt for at in timeline.finished_at_s)  # type: ignore[operator]
        assert before.ended_at_s <= after.began_at_s if is_resume else before.ended_at_s == after.began_at_s
    whole_run = total(entries)
    assert (whole_run is None) == (not lives)
    assert whole_run is None or whole_run.total_us == sum(entry.total_us for entry in entries)


class Recorded(NamedTuple):
    """A run as it may happen, in whole seconds, with what a perfect ledger contains."""

    lives: list[Life]
    times: RunTimes
    now_s: float
    computing_s: int
    starting_s: int
    recovering_s: int
    barriers_s: int


@st.composite
def recorded(draw: st.DrawFn) -> Recorded:
    """Attempts that fail or are stopped; ranks that are restarted alone or finish early in them."""
    num_ranks = draw(st.integers(1, 3))
    lives: list[Life] = []
    started: dict[int, float] = {}
    failed: dict[int, float] = {}
    finished: dict[int, float] = {}
    sums = dict.fromkeys(("computing", "starting", "recovering", "barriers"), 0)
    at_s, is_start = 0, True
    for attempt in range(draw(st.integers(1, 4))):
        began_s = at_s
        joined_s = began_s + draw(st.integers(1, 5))
        started[attempt] = float(began_s)
        end_s = joined_s + draw(st.integers(20, 40))
        early = draw(st.none() | st.integers(1, num_ranks - 1)) if num_ranks > 1 else None
        for rank in range(num_ranks):
            stop_s = end_s - draw(st.integers(1, 5)) if rank == early else end_s
            sums["barriers"] += end_s - stop_s
            place_s, begin_s = joined_s, began_s
            breaks = draw(st.lists(st.integers(joined_s + 3, end_s - 8), max_size=2, unique=True).map(sorted))
            ends = [*breaks, stop_s]
            for number, (left_s, next_s) in enumerate(zip(ends, [*ends[1:], stop_s], strict=True)):
                first_s = min(place_s + draw(st.integers(0, 2)), left_s)
                sums["starting" if is_start and not number else "recovering"] += first_s - begin_s
                sums["computing"] += left_s - first_s
                lives.append(
                    life(
                        rank,
                        attempt,
                        joined=place_s,
                        left=left_s,
                        incarnation=len(lives),
                        use=TimeUse(measured_s=float(left_s - first_s)),
                        use_at_s=float(left_s),
                    )
                )
                begin_s, place_s = left_s, min(left_s + draw(st.integers(0, 2)), next_s)
        is_start = draw(st.booleans())
        if is_start:
            finished[attempt] = float(end_s)
        elif early is not None or draw(st.booleans()):  # else it follows from the lives
            failed[attempt] = float(end_s)
        at_s = end_s + (draw(st.integers(0, 1_000)) if is_start else 0)
    known = RunTimes(started_at_s=started, failed_at_s=failed, finished_at_s=finished)
    return Recorded(lives, known, float(end_s), *sums.values())


@given(recorded())
def test_restarts_and_resumes_take_nothing_from_computing(run: Recorded) -> None:
    whole = total(ledger(run.lives, now_s=run.now_s, times=run.times))
    assert whole is not None
    expected = {
        "computing": run.computing_s,
        "starting": run.starting_s,
        "recovering": run.recovering_s,
        "barriers": run.barriers_s,
    }
    assert seconds(whole) == {name: part for name, part in expected.items() if part}
