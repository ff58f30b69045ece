"""The parts of `strata bench tune` that decide what its figures mean."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.bench.contenders import tune_curve, tune_problems
from strata.bench.contenders.tune_marks import Life, Marks, handovers_ms, read_lives, utilisation
from strata.bench.contenders.tune_problems import FLOOR, FUNCTIONS, Config, Table, table_problem
from strata.bench.contenders.tune_quality import gp, regrets, tpe
from strata.bench.contenders.tune_scale_driver import NUM_WORKERS, Moment, figures_of
from strata.bench.contenders.tune_search import OptunaSearch, StrataSearch, lowest, space_of
from strata.bench.run import ROUND_VARIABLE
from strata.bench.tune import BENCHMARK, FIRST_CURVE_SEED

PROMISED = {
    *("regret_over_optuna", "time_to_target_over_ray_tune", "time_to_target_over_optuna", "trial_overhead_ms"),
    *("report_decision_p99_ms", "stop_to_next_ms", "utilisation"),
}
"""Names that others read from `--json`."""
OPTIMA: dict[str, Config] = {
    "branin": {"x0": np.pi, "x1": 2.275},
    "hartmann6": dict(
        zip((f"x{at}" for at in range(6)), (0.20169, 0.150011, 0.476874, 0.275332, 0.311652, 0.6573), strict=True)
    ),
    "ackley": dict.fromkeys((f"x{at}" for at in range(5)), 0.0),
    "rastrigin": dict.fromkeys((f"x{at}" for at in range(5)), 0.0),
    "mixed": {"model": "net", "weight_decay": 1e-5, "learning_rate": 1e-3, "layers": 3, "width": 128},
}


def test_the_benchmark_has_the_figures_that_others_read() -> None:
    assert {figure.key for figure in BENCHMARK.figures} >= PROMISED


@pytest.mark.parametrize("problem", FUNCTIONS, ids=lambda problem: problem.name)
def test_the_optimum_of_every_function_is_known_and_no_random_configuration_is_below(
    problem: tune_problems.Problem,
) -> None:
    rng = np.random.default_rng(1)

    assert problem.loss(OPTIMA[problem.name]) == pytest.approx(problem.optimum, abs=1e-6)
    assert min(problem.loss(problem.draw(rng)) for _ in range(200)) > problem.optimum
    assert problem.regret(problem.optimum) == FLOOR


def test_a_draw_of_a_space_is_a_configuration_of_strata() -> None:
    mixed = FUNCTIONS[-1]
    space = space_of(mixed.parameters)
    rng = np.random.default_rng(2)

    for _ in range(20):
        space.check(mixed.draw(rng))


@pytest.mark.parametrize("problem", [FUNCTIONS[0], FUNCTIONS[-1]], ids=lambda problem: problem.name)
def test_with_one_worker_strata_finds_what_optuna_finds_with_the_same_sampler(problem: tune_problems.Problem) -> None:
    ours, theirs = regrets(problem, tpe, tpe, seeds=[3], num_trials=15)

    assert ours == theirs


@pytest.mark.parametrize("problem", FUNCTIONS[:2], ids=lambda each: each.name)
def test_with_one_worker_a_gaussian_process_knows_every_result_as_in_optuna(problem: tune_problems.Problem) -> None:
    ours, theirs = regrets(problem, gp, gp, seeds=[3], num_trials=14)

    assert ours == pytest.approx(theirs, rel=1e-6)


def test_worker_seconds_limit_a_study_and_more_workers_run_more_trials() -> None:
    problem = FUNCTIONS[0]
    told: list[float] = []

    class Counted(OptunaSearch):
        def tell(self, trial: Any, loss: float) -> None:
            told.append(loss)
            super().tell(trial, loss)

    found = lowest(
        Counted(problem.parameters, tpe(0)), problem, num_workers=4, num_trials=100, until_s=5 * problem.usual_cost_s
    )

    assert found == min(told)
    assert 10 < len(told) < 35


def test_a_study_of_strata_starts_one_trial_per_worker() -> None:
    search = StrataSearch(space_of(FUNCTIONS[0].parameters), "random", seed=0, num_workers=3, num_trials=4)
    started = [search.ask() for _ in range(4)]

    assert started[3] is None
    assert started[0] is not None
    search.tell(started[0][0], 1.0)
    assert search.ask() is not None


def write_table(place: Path, rows: Any) -> Table:
    with (place / "rows.pkl").open("wb") as file:
        pickle.dump(rows, file)
    return Table(name="rows", file="rows.pkl", metric="acc", sign=-1, values={"depth": (1, 2), "act": ("a", "b")})


def test_a_table_is_searched_by_the_mean_of_its_runs(tmp_path: Path) -> None:
    rows = {key: {"acc": [float(key), float(key) + 2], "train_time": [3.0, 5.0]} for key in ("00", "01", "10", "11")}
    problem = table_problem(write_table(tmp_path, rows), tmp_path)

    assert problem.optimum == -12.0
    assert problem.loss({"depth": 2, "act": "a"}) == -11.0
    assert problem.cost_s({"depth": 2, "act": "a"}) == 4.0


def test_a_table_with_another_grid_or_with_code_in_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows\.pkl has no entry '01'"):
        table_problem(write_table(tmp_path, {"00": {"acc": [1.0], "train_time": [1.0]}}), tmp_path)
    with pytest.raises(pickle.UnpicklingError, match="only plain data"):
        table_problem(write_table(tmp_path, {"00": Path("x")}), tmp_path)


def test_time_between_trials_is_idle_and_the_end_of_a_study_does_not_count() -> None:
    lives = [Life(0.0, [1.0, 4.0]), Life(0.0, [2.0]), Life(3.0, [5.0]), Life(5.0, [9.0])]

    assert utilisation(lives, num_workers=2) == pytest.approx((4 + 2 + 2 + 0) / 10)
    assert utilisation(lives, num_workers=2, until_s=4.5) == pytest.approx((3 + 2 + 0) / 6)
    assert handovers_ms([Life(0.0, [1.0, 1.5]), Life(1.6, []), Life(2.0, [2.5])]) == [pytest.approx(600.0)]


def test_the_cpu_time_of_a_large_study_is_counted_per_trial_where_all_workers_are_busy() -> None:
    begin = [Moment(cpu_s=at * 0.5, rss_bytes=10**8) for at in range(NUM_WORKERS)]
    begun_s = NUM_WORKERS * 0.5
    inner = [
        Moment(cpu_s=begun_s + at * 0.002 + max(0, at - 600) * 0.001, rss_bytes=10**8 + at * 3_000)
        for at in range(1_000 - 2 * NUM_WORKERS)
    ]
    end = [Moment(cpu_s=inner[-1].cpu_s, rss_bytes=2 * 10**8) for _ in range(NUM_WORKERS)]

    found = figures_of([*begin, *inner, *end])

    assert found["scale_driver_first_ms"] == pytest.approx(2.0)
    assert found["scale_driver_last_ms"] == pytest.approx(3.0)
    assert found["scale_driver_memory_kb"] == pytest.approx(3.0)
    assert found["scale_driver_memory_mb"] == pytest.approx(200.0)


def test_marks_of_several_trials_are_read_in_the_order_of_their_starts(tmp_path: Path) -> None:
    path = str(tmp_path / "marks")
    first, second = Marks(path), Marks(path)
    second.add()
    last_s = first.add()

    lives = read_lives(path)

    assert [len(each.moments_s) for each in lives] == [1, 1]
    assert lives[0].last_s == last_s


def test_the_auc_of_the_curve_is_the_share_of_ordered_pairs() -> None:
    labels = np.array([0, 1, 0, 1, 1], dtype=np.float32)

    assert tune_curve.auc(np.array([0.1, 0.2, 0.3, 0.4, 0.5]), labels) == pytest.approx(5 / 6)
    assert tune_curve.auc(np.array([np.nan] * 5), labels) == 0.5


def test_no_round_of_the_curve_has_a_seed_with_which_its_target_was_adjusted() -> None:
    seeds = {
        tune_curve.seed_of({ROUND_VARIABLE: str(number), "STRATA_BENCH_SEED": str(first)})
        for number in range(5)
        for first in range(5)
    }

    assert tune_curve.seed_of({}) == FIRST_CURVE_SEED
    assert seeds.isdisjoint({0, 1})
    assert any(f"Seeds from {FIRST_CURVE_SEED} on" in note for note in BENCHMARK.notes), "stated with the figures"


def test_all_systems_get_configurations_of_the_same_space() -> None:
    space = tune_curve.space()

    for config in tune_curve.configurations(seed=4, num=20):
        space.check(config)
    assert tune_curve.configurations(4, 2) == tune_curve.configurations(4, 3)[:2]
