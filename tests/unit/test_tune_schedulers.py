"""Schedulers: which trials go on, and why."""

from __future__ import annotations

import math

import numpy as np
import pytest

from strata.errors import ConfigError
from strata.tune import SearchSpace
from strata.tune.schedulers import Resume, Scheduler, StartNew, Wait, make_scheduler
from strata.tune.space.neighbors import perturb

SPACE = SearchSpace().add_float("lr", min=1e-3, max=1.0, log=True)


def make(name: str, seed: int = 0, **options: object) -> Scheduler:
    return make_scheduler(name, options, perturb=lambda config, rng: perturb(SPACE, config, rng), seed=seed)


def report(scheduler: Scheduler, trial: int, step: int, loss: float, *, is_contended: bool = True) -> str:
    return scheduler.reported(trial, step, loss, is_contended=is_contended).what


def start(scheduler: Scheduler, *trials: int) -> None:
    for trial in trials:
        scheduler.started(trial, {"lr": 0.1 * (trial + 1)})


def test_without_a_scheduler_every_trial_runs_to_its_end() -> None:
    scheduler = make("none")
    start(scheduler, 0)

    assert report(scheduler, 0, 1, math.inf) == "continue"
    assert scheduler.choose([], [0], has_new=True) == StartNew()
    assert scheduler.choose([], [0], has_new=False) == Wait()


def test_asha_pauses_a_trial_until_it_is_among_the_best_quarter_and_then_resumes_it() -> None:
    scheduler = make("asha", eta=4, min_step=2)
    start(scheduler, 0, 1, 2, 3)

    assert report(scheduler, 0, 1, 0.1) == "continue"  # before the first rung
    assert report(scheduler, 0, 2, 0.2) == "pause"
    assert report(scheduler, 1, 2, 0.5) == "pause"
    assert scheduler.choose([0, 1], [2, 3], has_new=True) == StartNew()
    assert report(scheduler, 2, 2, 0.9) == "pause"
    assert report(scheduler, 3, 2, 0.3) == "pause"
    assert scheduler.choose([0, 1, 2, 3], [], has_new=True) == Resume(0, "place 1 of 4 at step 2")
    scheduler.resumed(0, {})
    assert scheduler.choose([1, 2, 3], [0], has_new=True) == StartNew()
    assert report(scheduler, 0, 7, 0.1) == "continue"
    assert report(scheduler, 0, 8, 0.1) == "pause"  # the next rung


def test_asha_lets_a_trial_go_on_at_once_if_it_is_already_among_the_best() -> None:
    scheduler = make("asha", eta=2, min_step=1)
    start(scheduler, 0, 1, 2, 3)
    report(scheduler, 0, 1, 0.5)

    assert report(scheduler, 1, 1, 0.4) == "continue"
    verdict = scheduler.reported(2, 1, 0.6, is_contended=True)
    assert (verdict.what, verdict.reason) == ("pause", "place 3 of 3 at step 1; the best 1/2 go on")


def test_asha_resumes_the_best_of_the_highest_rung_first() -> None:
    scheduler = make("asha", eta=2, min_step=1)
    start(scheduler, *range(6))
    for trial, loss in enumerate([0.4, 0.3, 0.2, 0.1]):
        report(scheduler, trial, 1, loss)  # 1, 2 and 3 go on at once: each is the best so far of two or more
    assert report(scheduler, 1, 2, 0.3) == "pause"
    assert report(scheduler, 2, 2, 0.35) == "pause"

    assert scheduler.choose([0, 1, 2], [3], has_new=True) == Resume(1, "place 1 of 2 at step 2")


def test_without_new_trials_the_best_of_a_small_rung_goes_on_so_that_one_trial_finishes() -> None:
    scheduler = make("asha", eta=4, min_step=1)
    start(scheduler, 0, 1)
    report(scheduler, 0, 1, 0.9)
    assert scheduler.choose([0], [1], has_new=False) == Wait()  # trial 1 may still be better
    report(scheduler, 1, 1, 0.5)

    assert scheduler.choose([0, 1], [], has_new=False) == Resume(1, "the best of 2 trials at step 1")
    scheduler.resumed(1, {})
    assert scheduler.choose([0], [1], has_new=False) == Wait()
    assert report(scheduler, 1, 4, 0.4) == "pause"
    assert scheduler.choose([0, 1], [], has_new=False) == Resume(1, "the best of 1 trial at step 4")
    scheduler.resumed(1, {})
    scheduler.ended(1, is_failed=False)
    assert scheduler.choose([0], [], has_new=False) == Wait()


def test_a_failed_trial_gives_its_place_to_the_next_best() -> None:
    scheduler = make("asha", eta=2, min_step=1)
    start(scheduler, 0, 1)
    report(scheduler, 0, 1, 0.5)
    assert report(scheduler, 1, 1, 0.4) == "continue"
    scheduler.ended(1, is_failed=True)

    assert scheduler.choose([0], [], has_new=False) == Resume(0, "the best of 1 trial at step 1")


def test_asha_that_stops_ends_all_but_the_best_quarter_so_far() -> None:
    scheduler = make("asha", kind="stop", eta=4, min_step=1)
    start(scheduler, *range(5))

    assert [report(scheduler, trial, 1, loss) for trial, loss in enumerate([0.5, 0.4, 0.6, 0.45, 0.1])] == [
        "continue",
        "continue",
        "stop",
        "stop",
        "continue",
    ]
    assert scheduler.choose([], [0], has_new=False) == Wait()


def test_a_loss_that_is_not_a_number_never_goes_on_at_a_rung() -> None:
    stopping, promoting = make("asha", kind="stop", min_step=1), make("asha", min_step=1)
    for scheduler in (stopping, promoting):
        start(scheduler, 0)

    assert stopping.reported(0, 1, math.inf, is_contended=True).reason == "its metric is not a number at step 1"
    assert report(promoting, 0, 1, math.inf) == "pause"
    assert promoting.choose([0], [], has_new=False) == Wait()


def test_a_report_that_passes_several_rungs_counts_at_each() -> None:
    scheduler = make("asha", eta=2, min_step=1)
    start(scheduler, 0, 1)
    report(scheduler, 0, 5, 0.5)  # rungs 1, 2 and 4

    assert report(scheduler, 1, 1, 0.4) == "continue"
    assert report(scheduler, 1, 4, 0.9) == "pause"  # the second of two


def test_the_first_report_sets_the_first_rung_and_there_is_none_from_max_step_on() -> None:
    scheduler = make("asha", eta=2, max_step=400)
    start(scheduler, 0)

    assert report(scheduler, 0, 100, 0.5) == "pause"
    scheduler.resumed(0, {})
    assert report(scheduler, 0, 199, 0.5) == "continue"
    assert report(scheduler, 0, 200, 0.5) == "pause"
    scheduler.resumed(0, {})
    assert report(scheduler, 0, 400, 0.5) == "continue"


def test_hyperband_shares_trials_among_brackets_with_later_first_rungs() -> None:
    scheduler = make("hyperband", eta=3, min_step=1, num_brackets=3)
    first = {}
    start(scheduler, *range(110))
    for trial in range(110):
        step = 1
        while report(scheduler, trial, step, 1.0 + trial) == "continue":
            step += 1
        first[trial] = step

    counts = [sum(step == rung for step in first.values()) for rung in (1, 3, 9)]
    assert sum(counts) == 110
    assert counts == pytest.approx([60, 30, 20], abs=2)  # weights 9/3, 3/2 and 1


def test_hyperband_has_no_bracket_without_a_rung() -> None:
    scheduler = make("hyperband", eta=3, min_step=1, max_step=4, num_brackets=3)
    start(scheduler, *range(20))

    assert all("pause" in {report(scheduler, trial, step, 1.0 + trial) for step in (1, 3)} for trial in range(20))


def test_median_stops_a_trial_whose_best_loss_is_above_the_running_means_of_the_others() -> None:
    scheduler = make("median", min_trials=3)
    start(scheduler, *range(5))
    for trial, losses in enumerate([(1.0, 0.5), (1.0, 0.7), (1.0, 0.9)]):
        assert [report(scheduler, trial, step, loss) for step, loss in enumerate(losses)] == ["continue"] * 2

    assert report(scheduler, 3, 1, 0.84) == "continue"  # the median of 0.75, 0.85 and 0.95
    verdict = scheduler.reported(4, 1, 0.99, is_contended=True)
    assert (verdict.what, verdict.reason) == ("stop", "its best loss 0.99 is above the median 0.845 at step 1")


def test_population_based_training_replaces_the_worst_by_a_perturbed_copy_of_the_best() -> None:
    scheduler = make("pbt", interval=2)
    start(scheduler, 0, 1, 2, 3)
    for trial, loss in enumerate([0.1, 0.2, 0.3, 0.05]):
        assert report(scheduler, trial, 1, loss, is_contended=False) == "continue"

    assert report(scheduler, 0, 2, 0.1, is_contended=False) == "continue"
    assert report(scheduler, 1, 2, 0.2, is_contended=True) == "pause"  # the others take their turn
    assert report(scheduler, 2, 2, 0.3, is_contended=False) == "pause"
    assert scheduler.choose([1, 2], [0, 3], has_new=True) == StartNew()
    assert scheduler.choose([1, 2], [0, 3], has_new=False) == Resume(1, "its turn at step 2")
    choice = scheduler.choose([2], [0, 3], has_new=False)
    assert isinstance(choice, Resume)
    assert (choice.trial, choice.donor) == (2, 3)
    assert choice.config in ({"lr": pytest.approx(0.4 * 0.8)}, {"lr": pytest.approx(0.4 * 1.2)})
    assert choice == scheduler.choose([2], [0, 3], has_new=False)  # looking changes nothing


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("best", {}, "scheduler 'best' is unknown; use none, asha, hyperband, median, pbt"),
        ("asha", {"eta": 1}, "eta=1 must be between 2 and 100"),
        ("asha", {"kind": "drop"}, "kind='drop' is unknown; use 'promote' or 'stop'"),
        ("asha", {"min_step": 0}, "min_step=0 must be 1 or more"),
        ("asha", {"min_step": 5, "max_step": 5}, "max_step=5 must be above min_step=5"),
        ("asha", {"brackets": 2}, "does not accept brackets=2"),
        ("hyperband", {"num_brackets": 9}, "num_brackets=9 must be between 1 and 8"),
        ("median", {"min_trials": 0}, "min_trials=0 must be 1 or more"),
        ("pbt", {"interval": 0}, "interval=0 must be 1 step or more"),
        ("pbt", {"fraction": 0.6}, "fraction=0.6 must be above 0"),
    ],
)
def test_an_invalid_option_is_refused_with_the_cure(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, **options)


@pytest.mark.parametrize("name", ["asha", "hyperband", "median", "pbt"])
def test_decisions_are_a_function_of_the_order_of_calls(name: str) -> None:
    def drive(scheduler: Scheduler) -> list[object]:
        rng = np.random.default_rng(1)
        start(scheduler, *range(12))
        found: list[object] = []
        for step in range(1, 10):
            for trial in map(int, rng.permutation(12)):
                found += [scheduler.reported(trial, step, float(rng.random()), is_contended=True)]
            found.append(scheduler.choose(range(12), [], has_new=False))
        return found

    assert drive(make(name)) == drive(make(name))
