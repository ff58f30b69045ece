"""The contract of every scheduler, the pruners of Optuna among them. An implementation adds how it is made."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import optuna
import pytest

from strata.errors import ConfigError
from strata.tune import SearchSpace
from strata.tune.schedulers import Resume, Scheduler, StartNew, Wait, make_scheduler
from strata.tune.space.neighbors import perturb

SPACE = SearchSpace().add_float("lr", min=1e-3, max=1.0, log=True)
Make = Callable[[], Scheduler]
pytestmark = [  # of Optuna itself
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"),
]

NAMED: list[tuple[str, dict[str, object]]] = [
    ("none", {}),
    ("asha", {"min_step": 1}),
    ("asha", {"min_step": 1, "kind": "stop"}),
    ("asha", {"min_step": 1, "compare": "first"}),
    ("hyperband", {"min_step": 1}),
    ("median", {"min_trials": 2}),
    ("median", {"min_trials": 2, "compare": "first"}),
    ("pbt", {}),
]
PRUNERS: list[Callable[[], optuna.pruners.BasePruner]] = [
    optuna.pruners.NopPruner,
    lambda: optuna.pruners.MedianPruner(n_startup_trials=2),
    lambda: optuna.pruners.PercentilePruner(25.0, n_startup_trials=2),
    lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=1),
    lambda: optuna.pruners.HyperbandPruner(min_resource=1, max_resource=9),
    lambda: optuna.pruners.ThresholdPruner(upper=0.9),
    lambda: optuna.pruners.PatientPruner(optuna.pruners.MedianPruner(n_startup_trials=2), patience=1),
]


def named(name: object, **options: object) -> Scheduler:
    return make_scheduler(name, options, perturb=lambda config, rng: perturb(SPACE, config, rng), seed=0)


@pytest.fixture(params=[*NAMED, *PRUNERS], ids=lambda each: str(each) if isinstance(each, tuple) else "pruner")
def make(request: pytest.FixtureRequest) -> Make:
    found = request.param
    if isinstance(found, tuple):
        return lambda: named(found[0], **found[1])
    return lambda: named(found())


def drive(scheduler: Scheduler, *, num_objectives: int = 1, num_trials: int = 12) -> list[object]:
    """Run trials that report random losses, some of them not numbers; return all decisions."""
    rng = np.random.default_rng(5)
    found: list[object] = []
    for trial in range(num_trials):
        scheduler.started(trial, {"lr": 0.1})
    stopped: set[int] = set()
    paused: dict[int, None] = {}
    for step in range(1, 10):
        for trial in map(int, rng.permutation(num_trials)):
            losses = tuple(map(float, rng.random(num_objectives)))
            losses = (math.inf,) * num_objectives if rng.random() < 0.1 else losses
            if trial in stopped or trial in paused:
                continue
            verdict = scheduler.reported(trial, step, losses, is_contended=True)
            found.append(verdict)
            assert (verdict.what == "continue") == (not verdict.reason)
            if verdict.what == "stop" or rng.random() < 0.05:
                scheduler.ended(trial, is_failed=verdict.what != "stop")
                stopped.add(trial)
            elif verdict.what == "pause":
                paused[trial] = None
        choice = scheduler.choose(paused.keys(), [], has_new=False)
        found.append(choice)
        if isinstance(choice, Resume):
            del paused[choice.trial]
            scheduler.resumed(choice.trial, {"lr": 0.2})
    return found


@pytest.mark.parametrize("num_objectives", [1, 2])
def test_decisions_are_a_function_of_the_order_of_calls(make: Make, num_objectives: int) -> None:
    first = drive(make(), num_objectives=num_objectives)

    assert len(first) > 12
    assert first == drive(make(), num_objectives=num_objectives)


def test_looking_for_what_to_run_changes_nothing(make: Make) -> None:
    scheduler = make()
    for trial in range(4):
        scheduler.started(trial, {"lr": 0.1})
        scheduler.reported(trial, 1, (0.1 * trial,), is_contended=True)

    for has_new in (True, False):
        choices = [scheduler.choose([0, 1], [2, 3], has_new=has_new) for _ in range(2)]
        assert choices[0] == choices[1]
        assert has_new or not isinstance(choices[0], StartNew)
    assert scheduler.choose([], [], has_new=True) == StartNew()
    assert scheduler.choose([], [], has_new=False) == Wait()


def test_a_metric_that_is_never_a_number_breaks_nothing(make: Make) -> None:
    scheduler = make()
    for trial in range(3):
        scheduler.started(trial, {"lr": 0.1})
        assert scheduler.reported(trial, 1, (math.inf,), is_contended=False).what in ("continue", "stop", "pause")
        scheduler.ended(trial, is_failed=True)


# -- pruners of Optuna -------------------------------------------------------------------------------------------------


def test_a_pruner_stops_the_trials_that_it_would_stop_in_optuna() -> None:
    losses = np.random.default_rng(1).random((20, 5))
    alone = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=3))
    ours = named(optuna.pruners.MedianPruner(n_startup_trials=3))
    expected, found = [], []
    for number, curve in enumerate(losses):
        trial = alone.ask()
        ours.started(number, {"lr": 0.1})
        for step, loss in enumerate(map(float, curve)):
            trial.report(loss, step)
            expected.append(trial.should_prune())
            found.append(ours.reported(number, step, (loss,), is_contended=True).what == "stop")
            if expected[-1]:
                alone.tell(trial, state=optuna.trial.TrialState.PRUNED)
                break
        else:
            alone.tell(trial, float(curve[-1]))
        ours.ended(number, is_failed=False)

    assert found == expected
    assert 3 < sum(found) < len(found)


def test_a_pruner_sees_values_as_they_were_reported_and_is_not_changed() -> None:
    pruner = optuna.pruners.ThresholdPruner(lower=0.5)
    scheduler = make_scheduler(pruner, {}, perturb=lambda config, _: config, seed=0, direction="max")
    for trial in (0, 1):
        scheduler.started(trial, {"lr": 0.1})

    assert scheduler.reported(0, 1, (-0.6,), is_contended=True).what == "continue"  # an accuracy of 0.6
    verdict = scheduler.reported(1, 1, (-0.4,), is_contended=True)
    assert (verdict.what, verdict.reason) == ("stop", "ThresholdPruner stops it at step 1 with 0.4")


def test_what_is_not_a_pruner_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a pruner of Optuna; pass an instance of"):
        named(object())
    with pytest.raises(ConfigError, match="options are for modes by name; pass them to the pruner itself"):
        named(optuna.pruners.NopPruner(), eta=3)
