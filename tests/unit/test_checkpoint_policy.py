"""When to save: the decisions of each strategy; an adaptive one never exceeds its overhead, whatever saves cost."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.checkpoint.policy import (
    FIRST_S,
    NUM_REMEMBERED,
    Adaptive,
    AnyOf,
    EverySeconds,
    EverySteps,
    History,
    Manual,
    Pacer,
    PastSave,
    Strategy,
    not_before,
)
from strata.clock import ManualClock
from strata.errors import ConfigError

costs_s = st.floats(0, 1_000, allow_nan=False)


def saves_until(pacer: Pacer, clock: ManualClock, last_step: int, *, step_s: float = 1.0) -> list[int]:
    """Return the steps at which a loop saves, with saves that cost nothing."""
    found = []
    for step in range(1, last_step + 1):
        clock.advance(step_s)
        if pacer.should_save(step):
            pacer.saved(step, stall_s=0, write_s=0)
            found.append(step)
    return found


def pace(strategy: Strategy) -> tuple[Pacer, ManualClock]:
    clock = ManualClock()
    return Pacer(strategy, clock), clock


def test_every_steps_saves_at_the_multiples_and_not_at_the_start() -> None:
    pacer, clock = pace(EverySteps(5))

    assert not pacer.should_save(0)
    assert saves_until(pacer, clock, 17) == [5, 10, 15]


def test_every_step_is_saved_from_the_first_on() -> None:
    assert saves_until(*pace(EverySteps(1)), 3) == [1, 2, 3]


def test_a_missed_multiple_is_saved_at_the_next_step() -> None:
    pacer, _ = pace(EverySteps(10))
    asked = []
    for step in range(7, 50, 7):
        decision = pacer.should_save(step)
        if decision:
            pacer.began(step, stall_s=0.1)
            asked.append((step, decision.reason))

    assert asked == [(s, f"step {s // 10 * 10} is a multiple of 10") for s in (14, 21, 35, 42)]


def test_a_restored_job_saves_at_the_same_steps_as_an_uninterrupted_one() -> None:
    pacer, _ = pace(EverySteps(1_000))
    pacer.restored(1_500)

    assert not pacer.should_save(1_501)
    assert pacer.should_save(1_501).reason == "the next multiple of 1000 is step 2000"
    assert pacer.should_save(2_000)


def test_a_job_that_went_back_to_an_older_step_saves_the_steps_between_again() -> None:
    pacer, _ = pace(EverySteps(10))
    pacer.saved(30, stall_s=0, write_s=0)
    pacer.restored(10)

    assert not pacer.should_save(19)
    assert pacer.should_save(20)


def test_every_seconds_counts_from_the_beginning_of_the_last_save() -> None:
    pacer, clock = pace(EverySeconds(60))
    assert not pacer.should_save(1)
    clock.advance(59)
    assert pacer.should_save(2).reason == "the next save is in 1.0 s"
    clock.advance(1)
    assert pacer.should_save(3)
    clock.advance(5)
    pacer.began(3, stall_s=5)
    clock.advance(55)
    assert pacer.should_save(4), "60 s after the save started, 55 s after it was staged"
    assert not pacer.should_save(3), "a saved step is not saved again"


def test_manual_never_saves_and_any_of_saves_when_one_strategy_does() -> None:
    assert saves_until(*pace(Manual()), 100) == []
    assert saves_until(*pace(AnyOf(EverySteps(50), EverySeconds(30))), 100) == [31, 50, 80, 100]
    decision = pace(AnyOf(EverySteps(50), Manual()))[0].should_save(1)
    assert decision.reason == "the next multiple of 50 is step 50; the script calls save() itself"


@given(
    steps=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    has_seconds=st.booleans(),
    asked=st.integers(0, 60),
    saved=st.integers(-1, 60),
)
def test_not_before_never_skips_a_step_at_which_a_strategy_saves(
    steps: list[int], has_seconds: bool, asked: int, saved: int
) -> None:
    strategies: list[Strategy] = [EverySteps(each) for each in steps]
    strategy = AnyOf(*strategies, EverySeconds(5.0)) if has_seconds else AnyOf(*strategies)
    history = History(last_step=saved, last_s=0.0)
    if not strategy.decide(asked, 0.0, history):
        first = not_before(strategy, asked)
        assert first > asked
        assert not any(strategy.decide(step, 100.0, history) for step in range(asked + 1, first))


def test_invalid_settings_are_rejected_with_the_cure() -> None:
    for make, message in (
        (lambda: EverySteps(0), "use 1 or more steps"),
        (lambda: EverySeconds(0), "above 0"),
        (lambda: EverySeconds(math.nan), "above 0"),
        (lambda: Adaptive(max_overhead=0), "0.01 is one percent"),
        (lambda: Adaptive(max_overhead=5), "0.01 is one percent"),
        (lambda: Adaptive(min_s=10, max_s=5), "raise max_s or lower min_s"),
        (AnyOf, "at least one"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


# -- adaptive ------------------------------------------------------------------------------------------------------


def test_an_adaptive_strategy_waits_a_minute_and_then_follows_its_measurements() -> None:
    pacer, clock = pace(Adaptive(max_overhead=0.01, min_s=10))
    assert pacer.should_save(0).reason == f"the next save is in {FIRST_S:.1f} s: no save was measured yet"
    clock.advance(FIRST_S)
    assert pacer.should_save(1)
    pacer.saved(1, stall_s=0.5, write_s=0)
    decision = pacer.should_save(2)
    assert decision.reason == "the next save is in 49.5 s: a stall takes 0.5 s, max_overhead is 0.01"
    clock.advance(49.5)
    assert pacer.should_save(3)


def test_writing_takes_at_most_half_of_an_interval() -> None:
    pacer, clock = pace(Adaptive(min_s=1))
    pacer.began(1, stall_s=0.0)
    clock.advance(1_000)
    assert pacer.should_save(2).reason == "the save of step 1 is still being written"
    pacer.ended(1, write_s=1_000)
    assert not pacer.should_save(2)
    clock.advance(999)
    assert not pacer.should_save(3)
    clock.advance(1)
    assert pacer.should_save(4)


def test_a_save_in_progress_during_a_restore_still_ends() -> None:
    pacer, clock = pace(Adaptive(min_s=1))
    pacer.began(9, stall_s=0.0)
    pacer.restored(5)
    pacer.ended(9, write_s=1)
    clock.advance(2)

    assert pacer.should_save(6)


def test_max_s_takes_precedence_over_the_overhead_and_the_reason_names_both() -> None:
    pacer, clock = pace(Adaptive(max_overhead=0.01, max_s=100))
    pacer.saved(1, stall_s=50, write_s=0)
    clock.advance(50)
    decision = pacer.should_save(2)

    assert decision.save
    assert "max_s=100; max_overhead would allow one every 5000.0 s" in decision.reason


def test_one_slow_save_lengthens_each_of_the_next_intervals_by_a_share_only() -> None:
    adaptive = Adaptive(max_overhead=0.01, min_s=1, max_s=1e9)
    usual = [PastSave(step=n, began_s=0, stall_s=0.1, write_s=0.1) for n in range(NUM_REMEMBERED - 1)]
    outlier = PastSave(step=99, began_s=0, stall_s=8.0, write_s=0.1)
    history = History(last_step=99, last_s=0, saves=(*usual, outlier))

    assert adaptive.decide(100, 8.0 / NUM_REMEMBERED / 0.01 + 10, history)
    assert not adaptive.decide(100, 8.0 / NUM_REMEMBERED / 0.01, history)


@given(
    st.lists(st.tuples(costs_s, costs_s), min_size=1, max_size=60),
    st.sampled_from([0.001, 0.01, 0.2, 1.0]),
    st.floats(0.1, 100),
    st.sampled_from([0.1, 3.0, 1_000.0]),
)
def test_an_adaptive_strategy_never_exceeds_its_overhead(
    costs: list[tuple[float, float]], max_overhead: float, min_s: float, step_s: float
) -> None:
    """Every stall is paid off within `NUM_REMEMBERED` intervals, and each interval is twice what its save took."""
    strategy = Adaptive(max_overhead=max_overhead, min_s=min_s, max_s=math.inf)
    pacer, clock = pace(strategy)
    pacer.should_save(0)
    began_s, step = [], 0
    for stall_s, write_s in costs:
        clock.advance(step_s)
        step += 1
        while not pacer.should_save(step):
            clock.advance(max(step_s, 0.2 * (clock.monotonic_s() - (began_s[-1] if began_s else 0))))
            step += 1
        began_s.append(clock.monotonic_s())
        clock.advance(stall_s)
        pacer.began(step, stall_s=stall_s)
        clock.advance(write_s)
        pacer.ended(step, write_s=write_s)

    intervals_s = [later - earlier for earlier, later in itertools.pairwise(began_s)]
    for interval_s, (stall_s, write_s) in zip(intervals_s, costs, strict=False):
        assert interval_s >= max(min_s, 2 * (stall_s + write_s)) * (1 - 1e-9)
    paid_off = costs[: max(len(intervals_s) - NUM_REMEMBERED + 1, 0)]
    spent_s = math.fsum(stall_s for stall_s, _ in paid_off)
    assert spent_s <= max_overhead * math.fsum(intervals_s) * (1 + 1e-9)


@given(st.floats(0.001, 10), st.floats(0.001, 0.5), st.integers(2, 20))
def test_with_steady_costs_every_interval_keeps_to_the_overhead(stall_s: float, overhead: float, num: int) -> None:
    strategy = Adaptive(max_overhead=overhead, min_s=1e-6, max_s=math.inf)
    saves = tuple(PastSave(step=n, began_s=0, stall_s=stall_s, write_s=0) for n in range(num))[-NUM_REMEMBERED:]
    history = History(last_step=num, last_s=0, saves=saves)
    due_s = max(stall_s / overhead, 2 * stall_s)

    assert not strategy.decide(num + 1, due_s * 0.999, history)
    assert strategy.decide(num + 1, due_s * 1.001, history)
