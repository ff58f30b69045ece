"""Schedulers: which trials go on, and why."""

from __future__ import annotations

import math

import numpy as np
import pytest

from strata.errors import ConfigError
from strata.tune import SearchSpace
from strata.tune.schedulers import Resume, Scheduler, StartNew, Wait, make_scheduler
from strata.tune.schedulers.rungs import ParetoRung
from strata.tune.space.neighbors import perturb

SPACE = SearchSpace().add_float("lr", min=1e-3, max=1.0, log=True)


def make(name: str, seed: int = 0, **options: object) -> Scheduler:
    return make_scheduler(name, options, perturb=lambda config, rng: perturb(SPACE, config, rng), seed=seed)


def report(scheduler: Scheduler, trial: int, step: int, loss: float, *, is_contended: bool = True) -> str:
    return scheduler.reported(trial, step, (loss,), is_contended=is_contended).what


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
    verdict = scheduler.reported(2, 1, (0.6,), is_contended=True)
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

    assert stopping.reported(0, 1, (math.inf,), is_contended=True).reason == "its metric is not a number at step 1"
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
    verdict = scheduler.reported(4, 1, (0.99,), is_contended=True)
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


def test_asha_with_several_objectives_lets_every_trial_go_on_that_few_others_dominate() -> None:
    scheduler = make("asha", kind="stop", eta=2, min_step=1)
    start(scheduler, *range(6))
    points = [(0.1, 0.9), (0.9, 0.1), (0.5, 0.5), (0.6, 0.6), (0.95, 0.95), (0.95, 0.05)]

    verdicts = [scheduler.reported(trial, 1, losses, is_contended=True) for trial, losses in enumerate(points)]

    assert [each.what for each in verdicts] == ["continue"] * 4 + ["stop", "continue"]
    assert verdicts[4].reason == "4 of 5 trials dominate it at step 1; the best 1/2 go on"


def test_asha_compares_the_first_objective_if_asked_to() -> None:
    scheduler = make("asha", kind="stop", eta=2, min_step=1, compare="first")
    start(scheduler, 0, 1)

    assert scheduler.reported(0, 1, (0.1, 0.9), is_contended=True).what == "continue"
    assert scheduler.reported(1, 1, (0.9, 0.1), is_contended=True).what == "stop"


def test_median_stops_a_trial_that_is_worse_than_the_median_in_all_objectives() -> None:
    scheduler = make("median", min_trials=3)
    start(scheduler, *range(5))
    for trial in range(3):
        scheduler.reported(trial, 1, (0.5, 0.5), is_contended=True)

    assert scheduler.reported(3, 1, (0.9, 0.4), is_contended=True).what == "continue"
    assert scheduler.reported(4, 1, (0.9, 0.6), is_contended=True).what == "stop"


@pytest.mark.parametrize("seed", range(5))
def test_the_ranks_of_a_rung_are_the_numbers_of_dominating_trials(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rung = ParetoRung(1, 2)
    losses: dict[int, tuple[float, ...]] = {}
    for trial in range(60):
        losses[trial] = tuple(map(float, rng.integers(0, 6, 2)))
        rung.add(trial, losses[trial])
        if trial % 7 == 6:
            gone = int(rng.choice(list(losses)))
            rung.remove(gone)
            del losses[gone]

    def num_better(trial: int) -> int:
        mine = losses[trial]
        return sum(all(a <= b for a, b in zip(each, mine, strict=True)) and each != mine for each in losses.values())

    assert {trial: rung.rank(trial) for trial in losses} == {trial: num_better(trial) for trial in losses}
    best = rung.best(1, losses.keys())
    assert best is not None
    assert num_better(best) == 0
    assert rung.num_trials == len(losses)


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
        ("asha", {"compare": "all"}, "compare='all' is unknown; use 'dominance' or 'first'"),
        ("pbt", {"interval": 0}, "interval=0 must be 1 step or more"),
        ("pbt", {"fraction": 0.6}, "fraction=0.6 must be above 0"),
    ],
)
def test_an_invalid_option_is_refused_with_the_cure(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, **options)
