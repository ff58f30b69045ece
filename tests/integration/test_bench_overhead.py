"""The overhead benchmark measures equal training loops with and without Strata, and the start of both launchers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

KEYS = {
    "strata": {
        "overhead_fraction",
        "overhead_cpu_fraction",
        "noise_fraction",
        "in_calls_fraction",
        "step_ms",
        "bare_step_ms",
        "report_us",
        "maybe_checkpoint_us",
        "save_stall_ms",
    },
    "strata collectives": {"collective_ddp_us", "collective_call_us"},
    "strata start": {"start_s"},
}


@pytest.mark.slow
@pytest.mark.parametrize("contender", sorted(KEYS))
@pytest.mark.timeout(120)
def test_the_benchmark_reports_its_figures(contender: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "strata.cli", "bench", "overhead", "--quick", "--json", "--only", contender],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])["figures"]
    assert set(figures) == KEYS[contender]
    assert all(value > 0 for key, value in figures.items() if not key.endswith("fraction"))
