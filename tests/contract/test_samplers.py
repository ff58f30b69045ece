"""The contract of every sampler. An implementation adds its name, and how far it may go without repeating itself."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest

from strata.errors import ConfigError
from strata.tune import SearchSpace
from strata.tune.samplers import FAILED, NAMES, Outcome, Sampler, make_sampler
from strata.tune.samplers.base import Direction

NUM_TRIALS = 24
IS_EXACT = sorted(set(NAMES) - {"gp"})
"""Samplers that continue after a replay as they would have without it."""


def mixed_space() -> SearchSpace:
    """A space for every sampler, so without a continuous parameter: conditions, a constraint, all kinds."""
    return (
        SearchSpace()
        .add_float("lr", min=0.1, max=1.0, step=0.1)
        .add_int("batch_size", values=[32, 64, 128])
        .add_int("layers", min=1, max=4)
        .add_categorical("optimizer", ["sgd", "adam", True, 1])
        .add_float("momentum", values=[0.0, 0.5, 0.9], when={"optimizer": "sgd"})
        .add_bool("nesterov", when={"momentum": [0.5, 0.9]})
        .add_fixed("epochs", 2)
        .add_constraint("batch_size * layers <= 256")
    )


def objective(config: dict[str, Any]) -> float:
    return float((config["lr"] - 0.4) ** 2 + abs(config["layers"] - 2) + (config["optimizer"] != "sgd"))


@pytest.fixture(params=NAMES)
def make(request: pytest.FixtureRequest) -> Callable[..., Sampler]:
    return lambda space, seed=0, **kwargs: make_sampler(request.param, space, seed=seed, **kwargs)


def run(sampler: Sampler, numbers: range, *, worker: int = 1) -> list[dict[str, Any]]:
    """Run trials with some workers, which finish in the reverse order of their start."""
    found: list[dict[str, Any]] = []
    for first in range(numbers.start, numbers.stop, worker):
        batch = range(first, min(first + worker, numbers.stop))
        configs = [sampler.ask(number) for number in batch]
        for number, config in reversed(list(zip(batch, configs, strict=True))):
            assert config is not None
            kind = number % 6
            value = (objective(config),)
            outcome = FAILED if kind == 4 else Outcome("pruned", value, 3) if kind == 5 else Outcome("finished", value)
            sampler.tell(number, outcome)
        found += [config for config in configs if config is not None]
    return found


def test_all_configurations_belong_to_the_space(make: Callable[..., Sampler]) -> None:
    space = mixed_space()
    found = run(make(space), range(NUM_TRIALS), worker=3)

    assert [space.why_not(config) for config in found if space.why_not(config)] == []
    assert all(type(each["epochs"]) is int and type(each["lr"]) is float for each in found)
    assert len({tuple(sorted(map(str, each.items()))) for each in found}) >= NUM_TRIALS // 3


def test_the_same_seed_and_calls_give_the_same_configurations(make: Callable[..., Sampler]) -> None:
    first, again, other = (run(make(mixed_space(), seed), range(14), worker=2) for seed in (7, 7, 8))

    assert first == again
    assert first != other


@pytest.mark.parametrize("name", IS_EXACT)
def test_a_replay_continues_with_the_configuration_that_would_have_come(name: str) -> None:
    space = mixed_space()
    whole = make_sampler(name, space, seed=3)
    configs = [whole.ask(number) for number in range(2)]
    rebuilt = make_sampler(name, space, seed=3)
    for number, config in enumerate(configs):
        assert config is not None
        rebuilt.replay(number, config)
    for number in range(2, 16):
        config = whole.ask(number)
        assert config is not None
        rebuilt.replay(number, config)
        for each in (whole, rebuilt):
            each.tell(number - 2, Outcome("finished", (objective(config),)))

    assert [whole.ask(number) for number in (16, 17)] == [rebuilt.ask(number) for number in (16, 17)]


def test_a_replayed_configuration_counts_even_if_the_sampler_would_choose_another(make: Callable[..., Sampler]) -> None:
    space = mixed_space()
    sampler = make(space)
    given = {"lr": 0.3, "batch_size": 64, "layers": 2, "optimizer": "adam", "epochs": 2}

    for number in range(4):
        sampler.replay(number, given)
        sampler.tell(number, Outcome("finished", (1.0,)))

    assert space.why_not(sampler.ask(4) or {}) == ""


def test_configurations_chosen_elsewhere_can_be_added(make: Callable[..., Sampler]) -> None:
    space = mixed_space()
    sampler = make(space)
    given = {"lr": 0.3, "batch_size": 64, "layers": 2, "optimizer": True, "epochs": 2}
    sampler.add(-1, given)
    sampler.add(0, given | {"optimizer": "sgd", "momentum": 0.5, "nesterov": False})

    found = run(sampler, range(1, 6))
    sampler.tell(0, Outcome("finished", (0.5,)))

    assert [space.why_not(each) for each in found] == [""] * 5
    assert space.why_not(sampler.ask(6) or {}) == ""


def test_a_second_outcome_and_one_of_an_unknown_trial_are_ignored(make: Callable[..., Sampler]) -> None:
    first, second = make(mixed_space()), make(mixed_space())
    for sampler in (first, second):
        sampler.ask(0)
        sampler.tell(0, Outcome("finished", (1.0,)))
    second.tell(0, Outcome("finished", (9.0,)))
    second.tell(0, FAILED)
    second.tell(99, FAILED)

    assert run(first, range(1, 14)) == run(second, range(1, 14))


def test_a_trial_that_has_paused_may_finish_later_and_a_second_end_is_ignored(make: Callable[..., Sampler]) -> None:
    first, second = make(mixed_space()), make(mixed_space())
    for sampler in (first, second):
        for number, paused in enumerate([Outcome("paused", (1.0,), 3), Outcome("paused")]):
            sampler.ask(number)
            sampler.tell(number, paused)
            sampler.tell(number, paused)
            sampler.tell(number, Outcome("finished", (0.5,), 9))
    second.tell(0, Outcome("finished", (9.0,), 9))
    second.tell(1, FAILED)

    found = run(first, range(2, 14))
    assert found == run(second, range(2, 14))
    assert [mixed_space().why_not(each) for each in found] == [""] * 12


def test_a_continuous_conditional_space_is_sampled(
    make: Callable[..., Sampler], request: pytest.FixtureRequest
) -> None:
    space = SearchSpace().add_categorical("kind", ["a", "b"])
    space.add_float("x", min=1e-6, max=1.0, log=True, when={"kind": "a"})
    space.add_float("y", min=-5, max=5, when={"kind": "b"}).add_int("z", min=1, max=1_000, log=True)
    space.add_constraint("x * z <= 1")
    if "grid" in request.node.name:
        with pytest.raises(
            ConfigError, match="a grid needs listed values, and 'x' is continuous; add step= or values="
        ):
            make(space)
        return
    sampler = make(space)

    for number in range(16):
        config = sampler.ask(number)
        assert config is not None
        assert space.why_not(config) == ""
        sampler.tell(number, Outcome("finished", (float(config["z"] or 0),)))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tpe", "gp", "nsga2"])
def test_several_objectives_are_sampled(name: str) -> None:
    sampler = make_sampler(name, mixed_space(), seed=0, directions=("min", "max"))

    for number in range(14):
        config = sampler.ask(number)
        assert config is not None
        values = (objective(config), float(config["batch_size"]))  # type: ignore[arg-type]
        sampler.tell(number, Outcome("pruned", values, 1) if number % 4 == 3 else Outcome("finished", values))


def test_a_grid_has_every_configuration_once_and_then_ends() -> None:
    space = mixed_space()
    grid = make_sampler("grid", space, seed=5)
    found: list[str] = []
    while (config := grid.ask(len(found))) is not None:
        found.append(str(sorted(map(str, config.items()))))
    rng = np.random.default_rng(0)

    assert len(set(found)) == len(found) == 10 * 10 * (3 + 5)  # lr; batch_size × layers; optimizer
    assert all(str(sorted(map(str, space.draw(rng).items()))) in found for _ in range(100))


def test_a_grid_skips_what_was_tried_before() -> None:
    space = SearchSpace().add_bool("a").add_int("b", min=1, max=2)
    grid = make_sampler("grid", space, seed=0)
    grid.add(0, {"a": True, "b": 2})
    found = [grid.ask(number) for number in range(1, 5)]

    assert found[3] is None
    assert {"a": True, "b": 2} not in found


def test_tpe_with_one_worker_gives_the_configurations_of_optuna_alone() -> None:
    optuna = pytest.importorskip("optuna")
    space = SearchSpace().add_float("x", min=-5, max=5).add_float("y", min=1e-3, max=1, log=True)
    space.add_categorical("kind", ["a", "b"])
    ours = make_sampler("tpe", space, seed=11)
    alone = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=11))

    for number in range(25):
        config = ours.ask(number)
        trial = alone.ask()
        x, y = trial.suggest_float("x", -5, 5), trial.suggest_float("y", 1e-3, 1, log=True)
        assert config == {"x": x, "y": y, "kind": trial.suggest_categorical("kind", ["a", "b"])}
        ours.tell(number, Outcome("finished", (x * x + y,)))
        alone.tell(trial, x * x + y)


def plain_space(num_others: int) -> SearchSpace:
    """A parameter x and others without a meaning: with x alone, NSGA-II would mutate it every time."""
    space = SearchSpace().add_float("x", min=0, max=1)
    for number in range(num_others):
        space.add_float(f"y{number}", min=0, max=1)
    return space


@pytest.mark.parametrize(("name", "num_trials", "num_others"), [("tpe", 60, 0), ("gp", 15, 0), ("nsga2", 300, 2)])
def test_a_sampler_learns_constraints_of_metrics(name: str, num_trials: int, num_others: int) -> None:
    """Large x is better and violates the constraint, so a sampler that knows it stays at or below the limit."""
    space = plain_space(num_others)
    sampler = make_sampler(name, space, seed=1)
    found = []
    for number in range(num_trials):
        config = sampler.ask(number)
        assert config is not None
        x = config["x"]
        assert isinstance(x, float)
        sampler.tell(number, Outcome("finished", (-x,), violations=(x - 0.25,)))
        found.append(x)

    late = found[-5:]
    assert sum(each <= 0.25 + 0.05 for each in late) >= 3, late


@pytest.mark.parametrize(
    ("name", "num_trials", "num_others", "directions"),
    [("tpe", 60, 0, ("min",)), ("tpe", 60, 0, ("min", "min")), ("nsga2", 250, 2, ("min", "min"))],
)
def test_a_sampler_learns_from_trials_that_pause_or_are_pruned(
    name: str, num_trials: int, num_others: int, directions: tuple[Direction, ...]
) -> None:
    """Trials with a small x finish, and all others pause for good, or are pruned where there are several objectives."""
    sampler = make_sampler(name, plain_space(num_others), seed=1, directions=directions)
    found = []
    for number in range(num_trials):
        config = sampler.ask(number)
        assert config is not None
        x = config["x"]
        assert isinstance(x, float)
        stopped: Literal["paused", "pruned"] = "paused" if len(directions) == 1 else "pruned"
        values = (x, -x)[: len(directions)]
        sampler.tell(number, Outcome("finished", values, 9) if x <= 0.2 else Outcome(stopped, values, 1))
        found.append(x)

    late = found[-20:]
    assert sum(each <= 0.2 + 0.05 for each in late) >= 12, late


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize(
    "make_object", ["RandomSampler", "NSGAIISampler", "NSGAIIISampler", "QMCSampler", "BruteForceSampler"]
)
def test_any_sampler_object_of_optuna_starts_as_it_was_given_in_every_study(make_object: str) -> None:
    optuna = pytest.importorskip("optuna")
    given = getattr(optuna.samplers, make_object)(seed=3)

    first, again = (run(make_sampler(given, mixed_space(), seed=0), range(6)) for _ in range(2))

    assert first == again
    assert [mixed_space().why_not(each) for each in first] == [""] * 6


def kind_of(sampler: Sampler) -> str:
    return type(sampler._study.sampler).__name__  # type: ignore[attr-defined]


def test_a_gaussian_process_gives_way_to_cma_es_and_tpe_in_long_studies() -> None:
    numbers = SearchSpace().add_float("x", min=0, max=1).add_int("n", min=1, max=100)
    mixed = SearchSpace().add_float("x", min=0, max=1).add_bool("b")

    assert kind_of(make_sampler("gp", numbers, seed=0, num_trials=1_000)) == "GPSampler"
    assert kind_of(make_sampler("gp", numbers, seed=0, num_trials=1_001)) == "CmaEsSampler"
    assert kind_of(make_sampler("gp", mixed, seed=0, num_trials=1_001)) == "TPESampler"
    assert kind_of(make_sampler("gp", numbers, seed=0, num_trials=1_001, directions=("min", "min"))) == "TPESampler"


@pytest.mark.parametrize("missing", ["torch", "scipy"])
def test_without_torch_or_scipy_a_gaussian_process_is_tpe(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))

    assert kind_of(make_sampler("gp", mixed_space(), seed=0)) == "TPESampler"


def test_an_unknown_sampler_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match="sampler 'best' is unknown; use random, grid, sobol, tpe, gp, cmaes, nsga2"):
        make_sampler("best", mixed_space(), seed=0)
    with pytest.raises(ConfigError, match="is not a sampler of Optuna"):
        make_sampler(object(), mixed_space(), seed=0)
