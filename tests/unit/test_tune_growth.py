"""More slots for the most promising trial near the end of a study: which one, how many, and never too often."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tune_study import World, check, restart, run_out, spec, starts

from strata.errors import ConfigError, InvalidArgument
from strata.tune.state import events as e
from strata.tune.state.actions import Start, Stop
from strata.tune.state.growth import LAST_PART, MIN_GAIN, MIN_REPORTS, next_growth, slots_at_start, slots_per_trial
from strata.tune.state.trial import Trial


def a_trial(number: int = 0, **changes: Any) -> Trial:
    """A running trial that may grow."""
    values: dict[str, Any] = {
        "state": "running",
        "slot": number,
        "step": 10,
        "best": 0.5,
        "checkpoint": "path",
        "num_lease_reports": MIN_REPORTS,
    }
    return Trial(number, {}, **values | changes)


def grown(*running: Trial, num_free: int = 1, max_slots: int = 4, longest: int = 0) -> tuple[int, int] | None:
    found = next_growth(running, num_free=num_free, max_slots=max_slots, longest=longest)
    return None if found is None else (found.trial, found.num_slots)


# -- the decision ------------------------------------------------------------------------------------------------------


def test_the_most_promising_trial_gets_all_free_slots_up_to_the_limit() -> None:
    running = a_trial(0, best=0.5), a_trial(1, best=0.2), a_trial(2, best=0.9)

    assert grown(*running, num_free=2) == (1, 3)
    assert grown(*running, num_free=9) == (1, 4)
    assert grown(a_trial(0), a_trial(1)) == (0, 2), "of equal trials, the first"


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint": ""},
        {"checkpoint_world_size": 1},
        {"num_lease_reports": MIN_REPORTS - 1},
        {"is_narrow": True},
        {"best": math.inf},
        {"extra_slots": (5, 6, 7)},
    ],
    ids=lambda each: next(iter(each)),
)
def test_the_next_trial_grows_if_the_best_one_cannot(changes: dict[str, Any]) -> None:
    best = a_trial(0, **{"best": 0.1} | changes)

    assert grown(best) is None
    assert grown(best, a_trial(1)) == (1, 2)


def test_a_restart_for_a_small_gain_does_not_pay() -> None:
    assert grown(a_trial(extra_slots=(1,))) == (0, 3)
    assert grown(a_trial(extra_slots=(1, 2))) is None, "from 3 slots to 4"


@pytest.mark.parametrize(("step", "is_grown"), [(79, True), (80, False), (100, False), (101, True)])
def test_a_trial_that_is_about_to_end_is_left_alone(step: int, is_grown: bool) -> None:
    """One that has trained for longer than those that have finished may go on for any time."""
    assert (grown(a_trial(step=step), longest=100) is not None) is is_grown


@pytest.mark.parametrize("why", ["prune", "pause", "grow", "preempt", "expire"])
def test_no_trial_is_restarted_while_another_one_stops(why: Any) -> None:
    assert grown(a_trial(0), a_trial(1, stopping=why)) is None


def test_a_trial_that_starts_anyway_takes_the_free_slots_unless_a_better_one_could_have_them() -> None:
    def at_start(trial: Trial, *running: Trial, num_free: int = 3) -> int:
        return slots_at_start(trial, running, num_free=num_free, max_slots=4)

    stopped = a_trial(0, state="queued", slot=None)
    assert at_start(stopped) == 3
    assert at_start(stopped, num_free=9) == 4
    assert at_start(stopped, a_trial(1, best=0.9)) == 3
    assert at_start(stopped, a_trial(1, best=0.1)) == 1
    assert at_start(stopped, a_trial(1, best=0.1, checkpoint="")) == 3, "that one cannot have them"
    assert at_start(a_trial(0, slot=None, is_growing=True), a_trial(1, best=0.1)) == 3, "it has stopped for them"
    assert at_start(a_trial(0, slot=None, checkpoint="")) == 1


TRIALS = st.builds(
    a_trial,
    st.integers(0, 99),
    step=st.none() | st.integers(0, 200),
    best=st.sampled_from([0.1, 0.5, math.inf]),
    checkpoint=st.sampled_from(["", "path"]),
    checkpoint_world_size=st.sampled_from([0, 0, 2]),
    num_lease_reports=st.integers(0, 2 * MIN_REPORTS),
    is_narrow=st.booleans(),
    extra_slots=st.sampled_from([(), (100,), (100, 101, 102)]),
    stopping=st.sampled_from([None, None, None, "pause"]),
)


@given(
    running=st.lists(TRIALS, max_size=6, unique_by=lambda each: each.number),
    num_free=st.integers(-1, 8),
    max_slots=st.integers(1, 8),
    longest=st.integers(0, 200),
)
def test_a_growth_always_pays_and_is_that_of_the_best_trial(
    running: list[Trial], num_free: int, max_slots: int, longest: int
) -> None:
    found = next_growth(running, num_free=num_free, max_slots=max_slots, longest=longest)
    if found is None:
        return
    trial = next(each for each in running if each.number == found.trial)
    assert found.num_slots <= min(max_slots, trial.num_slots + num_free)
    assert found.num_slots >= MIN_GAIN * trial.num_slots
    assert trial.checkpoint
    assert not trial.checkpoint_world_size
    assert not trial.is_narrow
    assert trial.num_lease_reports >= MIN_REPORTS
    assert not longest * (1 - LAST_PART) <= (trial.step or 0) <= longest
    assert all(each.stopping is None for each in running)
    others = [each for each in running if each.best < trial.best]
    for other in others:  # each of them alone would not grow either
        assert next_growth([other], num_free=num_free, max_slots=max_slots, longest=longest) is None


def test_the_limit_is_a_multiple_of_the_workers_of_a_trial() -> None:
    assert [slots_per_trial(limit, 2) for limit in (None, 2, 6)] == [1, 1, 3]
    for limit, cure in [(1, "pass 2 or 2"), (3, "pass 2 or 4"), (0, "pass 2 or 2")]:
        with pytest.raises(ConfigError, match=f"max_workers_per_trial={limit} must be a multiple .*; {cure}"):
            slots_per_trial(limit, 2)
    with pytest.raises(ConfigError, match="must be at most 20,000"):
        slots_per_trial(20_002, 2)


# -- in a study --------------------------------------------------------------------------------------------------------


def near_the_end(num_slots: int = 2, max_slots: int = 2, **options: Any) -> World:
    """Trial 0 has reported and saved, and trial 1, the last one, has ended."""
    world = World(spec(num_trials=2, **options), num_slots=num_slots, max_slots=max_slots)
    for step in range(1, MIN_REPORTS + 1):
        world.report(0, step, 0.5)
    world.finish(1, 0.9)
    world.save(0, 1)
    return world


def stops(world: World) -> list[tuple[int, int]]:
    return [(each.trial, each.lease) for each in world.actions if isinstance(each, Stop)]


def last_start(world: World) -> Start:
    return next(each for each in reversed(world.actions) if isinstance(each, Start))


def test_the_last_trial_saves_stops_and_continues_on_all_slots() -> None:
    world = near_the_end()
    why = "it continues on 2 slots: no other trial needs them"
    assert world.last() == Stop(0, 1, 0, why, is_saving=True)
    assert world.report(0, 4, 0.1) == "", "it saves this step"
    assert stops(world) == [(0, 1)]
    world.save(0, 3)
    world.stopped(0)

    assert world.last() == Start(0, 2, 0, world.state.trials[0].config, "0/3", 3, (1,))
    assert world.state.trials[0].num_slots == 2
    world.finish(0, 0.1)
    assert world.states() == ["finished", "finished"]
    assert world.state.ended is not None


def test_a_study_without_the_argument_gives_no_trial_more_slots() -> None:
    world = near_the_end(max_slots=1)
    run_out(world)

    assert stops(world) == []
    assert starts(world) == [(0, 1, 0), (1, 1, 1)]


def test_no_trial_grows_while_others_can_start() -> None:
    world = World(spec(num_trials=3), num_slots=2, max_slots=2)
    world.is_answering = False
    for step in range(1, MIN_REPORTS + 1):
        world.report(0, step, 0.5)
    world.save(0, 1)
    world.finish(1, 0.9)  # the sampler takes its time
    world.report(0, 9, 0.4)

    assert stops(world) == []


def test_a_function_that_never_saves_is_not_stopped() -> None:
    world = World(spec(num_trials=2), num_slots=2, max_slots=2)
    world.finish(1, 0.9)
    for step in range(1, 20):
        world.report(0, step, 0.5)

    assert stops(world) == []


def test_a_trial_whose_loader_states_are_per_rank_keeps_its_number_of_workers() -> None:
    world = World(spec(num_trials=2), num_slots=2, max_slots=2)
    world.finish(1, 0.9)
    for step in range(1, 20):
        world.report(0, step, 0.5)
    world.do(e.Saved(trial=0, lease=1, step=19, checkpoint="0/19", world_size=1))
    world.lose(0)

    assert stops(world) == []
    assert last_start(world).slots == (0,)


def test_a_grown_trial_that_loses_a_worker_continues_on_as_many() -> None:
    world = near_the_end()
    world.stopped(0)
    world.report(0, 4, 0.4)
    world.lose(0)

    assert (last_start(world).lease, last_start(world).slots) == (3, (0, 1))


def test_a_function_that_fails_with_more_workers_continues_without_them_and_is_not_blamed() -> None:
    world = near_the_end(max_failures=1)
    world.stopped(0)
    world.fail(0, "ValueError: world_size must be 1")

    assert world.states()[0] == "running"
    assert (last_start(world).lease, last_start(world).slots) == (3, (0,))
    assert world.state.trials[0].num_failures == 0
    for step in range(4, 20):
        world.report(0, step, 0.4)
    assert len(stops(world)) == 1, "it does not try again"
    world.fail(0)
    assert world.states()[0] == "failed"


def test_workers_lost_before_any_progress_count_and_the_trial_continues_without_them() -> None:
    world = near_the_end()
    world.stopped(0)
    world.lose(0)

    assert last_start(world).slots == (0,)
    assert world.state.trials[0].num_losses == 1


def test_a_killed_driver_starts_the_grown_trial_on_as_many_slots_again() -> None:
    world = near_the_end()
    world.save(0, 3)
    world.stopped(0)
    world.report(0, 4, 0.4)
    restart(world)

    assert (last_start(world).lease, last_start(world).slots, last_start(world).step) == (3, (0, 1), 3)
    check(world)


def test_a_killed_driver_without_the_argument_starts_it_on_one_slot() -> None:
    world = near_the_end()
    world.stopped(0)
    world.max_slots = 1
    restart(world)

    assert (last_start(world).lease, last_start(world).slots) == (3, (0,))


def test_a_grown_trial_whose_slots_are_gone_saves_and_continues_on_those_that_are_left() -> None:
    world = near_the_end(num_slots=3, max_slots=3)
    world.stopped(0)
    assert last_start(world).slots == (0, 1, 2)
    world.report(0, 4, 0.4)
    world.do(world.resized(2))
    assert world.last() == Stop(0, 2, 0, "its slot is gone", is_saving=True)
    world.stopped(0)

    assert last_start(world).slots == (0, 1)
    check(world)


def test_of_several_trials_the_widest_gives_way_if_a_slot_is_gone() -> None:
    world = World(spec(num_trials=3), num_slots=3, max_slots=2)
    for step in range(1, MIN_REPORTS + 1):
        world.report(0, step, 0.1)
        world.report(1, step, 0.5)
    world.save(0, 1)
    world.finish(2, 0.9)
    world.stopped(0)
    assert last_start(world).slots == (0, 2)
    world.do(world.resized(2))

    assert stops(world)[-1] == (0, 2)


def test_the_last_promoted_trial_starts_on_all_slots() -> None:
    options = {"scheduler": "asha", "scheduler_options": {"eta": 4, "min_step": 2}}
    world = World(spec(num_trials=2, **options), num_slots=2, max_slots=2)
    for trial, loss in enumerate([0.2, 0.9]):
        world.report(trial, 2, loss)
    world.do(world.resized(0))
    for trial in range(2):
        world.save(trial, 2)
        world.stopped(trial)
    world.do(world.resized(2))

    assert (last_start(world).trial, last_start(world).lease, last_start(world).slots) == (0, 2, (0, 1))
    run_out(world)
    assert world.states() == ["finished", "pruned"]


def test_slots_go_first_to_trials_that_can_be_promoted() -> None:
    options = {"scheduler": "asha", "scheduler_options": {"eta": 2, "min_step": 2}}
    world = World(spec(num_trials=4, **options), num_slots=4, max_slots=4)
    for trial, loss in enumerate([0.1, 0.2, 0.3, 0.4]):
        world.report(trial, 2, loss)
    world.do(world.resized(0))
    for trial in range(4):
        world.save(trial, 2)
        world.stopped(trial)
    world.do(world.resized(4))

    assert {each.number: each.num_slots for each in world.state.running} == {0: 1, 1: 1}
    check(world)


def test_a_trial_grows_again_only_after_progress() -> None:
    world = World(spec(num_trials=3), num_slots=3, max_slots=4)
    for step in range(1, MIN_REPORTS + 1):
        world.report(0, step, 0.1)
    world.save(0, 1)
    world.finish(2, 0.9)
    world.stopped(0)
    world.finish(1, 0.9)
    assert last_start(world).slots == (0, 2)
    assert len(stops(world)) == 1, "it has just started"
    for step in range(4, 4 + MIN_REPORTS):
        world.report(0, step, 0.1)

    assert len(stops(world)) == 2


def test_journals_of_earlier_versions_load() -> None:
    """Their facts have neither extra slots nor a limit of them."""
    resized = e.decode(b'{"kind":"Resized","num_slots":2}')
    leased = e.decode(b'{"kind":"Leased","trial":0,"lease":1,"slot":0}')
    saved = e.decode(b'{"kind":"Saved","trial":0,"lease":1,"step":2,"checkpoint":"path"}')

    assert resized == e.Resized(num_slots=2, max_slots_per_trial=1)
    assert leased == e.Leased(trial=0, lease=1, slot=0, extra_slots=())
    assert saved == e.Saved(trial=0, lease=1, step=2, checkpoint="path", world_size=0)
    assert b"slots" not in e.encode(leased), "a study without growth writes what it always has"


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="max_slots_per_trial=0 must be between 1 and 10,000"):
        World(spec(), max_slots=0)
