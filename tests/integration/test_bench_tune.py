"""The benchmark of tuning at a small size: contenders run real studies and report their figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_bench_models import place

from strata.bench.contenders import models_data

__all__ = ["place"]
DEADLINE_S = 280
pytestmark = pytest.mark.timeout(DEADLINE_S + 20)


def write_movielens(place: Path) -> None:
    """Write ratings that depend on the user, so that a model learns something."""
    random = np.random.default_rng(0)
    directory = place / models_data.MOVIELENS
    directory.mkdir()
    users, items = random.integers(0, 30, 2_000), random.integers(0, 40, 2_000)
    ratings = np.where(random.random(2_000) < np.where(users % 2 == 0, 0.9, 0.1), 5, 1)
    texts = {
        "inter": [
            "user_id:token\titem_id:token\trating:float\ttimestamp:float",
            *(
                f"{user}\t{item}\t{rating}\t{at}"
                for at, (user, item, rating) in enumerate(zip(users, items, ratings, strict=True))
            ),
        ],
        "item": [
            "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq",
            *(f"{item}\tFilm\t1995\tDrama" for item in range(40)),
        ],
        "user": [
            "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token",
            *(f"{user}\t30\tF\tother\t1" for user in range(30)),
        ],
    }
    for suffix, lines in texts.items():
        (directory / f"ml-100k.{suffix}").write_text("\n".join(lines) + "\n", encoding="utf-8")


def bench(*only: str) -> Any:
    chosen = [word for name in only for word in ("--only", name)]
    ended = subprocess.run(
        [sys.executable, "-m", "strata.cli", "bench", "tune", "--quick", "--json", *chosen],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])["figures"]


@pytest.mark.slow
def test_decisions_and_handovers_of_real_studies_are_measured() -> None:
    found = bench("overhead", "scale", "scale, driver")

    assert found.keys() == {
        *("trial_overhead_ms", "optuna_trial_ms", "empty_trial_ms", "stop_to_next_ms"),
        *("report_decision_p50_ms", "report_decision_p99_ms"),
        *("scale_decision_us", "scale_growth", "scale_memory_kb"),
        *("scale_driver_first_ms", "scale_driver_last_ms", "scale_driver_growth"),
        *("scale_driver_memory_kb", "scale_driver_memory_mb"),
    }
    may_be_less = ("trial_overhead_ms", "scale_memory_kb", "scale_driver_memory_kb")
    assert all(found[key] > 0 for key in found if key not in may_be_less)
    assert found["scale_driver_growth"] == pytest.approx(found["scale_driver_last_ms"] / found["scale_driver_first_ms"])


@pytest.mark.slow
def test_strata_and_optuna_train_the_same_configurations_to_the_target(place: Path) -> None:
    write_movielens(place)

    found = bench("curve, strata", "curve, Optuna")

    assert found["missed"] == found["optuna_missed"] == 0.0
    assert found["time_to_target_over_optuna"] == pytest.approx(
        found["optuna_time_to_target_s"] / found["time_to_target_s"]
    )
