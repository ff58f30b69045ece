"""Every program in examples/ runs as it is."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLOW = {"flights", "gnn_packages", "train_jax", "tune_flights"}  # they train models
EXAMPLES = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else [])
    for path in sorted((ROOT / "examples").glob("*.py"))
]


def run_example(path: Path) -> str:
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.timeout(240)
@pytest.mark.parametrize("path", EXAMPLES)
def test_an_example_runs_to_its_end(path: Path) -> None:
    assert run_example(path).strip()


def test_two_workers_see_every_sample_once() -> None:
    printed = run_example(ROOT / "examples" / "two_workers.py")
    assert "together: 10000" in printed
    assert "checkpoint: /checkpoints/epoch-0" in printed
