"""The ledger and the recoveries of a real run whose worker is killed."""

from __future__ import annotations

import json
import os
import re
import select
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from leftovers import nothing_is_left
from runs import Run, write_rows

pytestmark = pytest.mark.timeout(240)
DEADLINE_S = 90.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path, write_rows(tmp_path / "data"), "--workers", "2")
    with nothing_is_left(tmp_path):
        yield made
        made.bury()


def address(run: Run) -> str:
    """Return the address that the agent prints first."""
    assert run.agent.stderr is not None
    end_s, text = time.monotonic() + DEADLINE_S, ""
    while (found := re.search(r"dashboard: (http://\S+)\n", text)) is None:
        assert time.monotonic() < end_s, text
        if select.select([run.agent.stderr], [], [], 1.0)[0]:
            text += os.read(run.agent.stderr.fileno(), 4096).decode()
    return found[1]


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.loads(response.read())


def test_the_ledger_of_a_run_with_a_killed_worker_adds_up_and_its_recovery_has_all_moments(run: Run) -> None:
    run.start("--epochs", "50", "--step-s", "0.05")
    url = address(run)
    run.wait_for_step(0, 30)
    run.kill(0, 1)
    run.wait_for_step(1, 1)
    end_s = time.monotonic() + DEADLINE_S
    while True:  # heartbeats and samples arrive a moment later
        goodput, recoveries = get(f"{url}/api/goodput?job=job"), get(f"{url}/api/recoveries?job=job")
        is_measured = len(goodput["attempts"]) == 2 and goodput["attempts"][1]["parts_s"]["computing"] > 0
        if is_measured and recoveries["items"] and recoveries["items"][0]["took_s"] is not None:
            break
        assert time.monotonic() < end_s, (goodput, recoveries)
        time.sleep(0.1)

    for entry in (goodput["run"], *goodput["attempts"]):
        assert sum(entry["parts_s"].values()) == pytest.approx(entry["total_s"], abs=1e-6)
        assert min(entry["parts_s"].values()) >= 0
    first, second = goodput["attempts"]
    assert first["total_s"] == pytest.approx(2 * (first["ended_at_s"] - first["began_at_s"]), abs=1e-5)
    assert first["parts_s"]["starting"] > 0
    assert first["parts_s"]["computing"] > 0
    assert second["parts_s"]["recovering"] > 0

    (recovery,) = recoveries["items"]
    assert (recovery["failed_attempt"], recovery["attempt"], recovery["rank"]) == (0, 1, 1)
    assert "SIGKILL" in recovery["cause"]
    assert all(moment["at_s"] is not None for moment in recovery["moments"] if moment["name"] != "loaded")
    assert any(line.startswith("step ") for line in recovery["last_lines"])
