"""A forked child behaves as if Strata had not started: it exits by itself and leaves its parent's objects alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strata.launch.environment import NOTE

CHILDREN = Path(__file__).parent / "fork_children.py"


@pytest.mark.parametrize(
    "name",
    [
        *("manager", "thread_manager", "async_manager", "registry", "client", "async_client", "orchestrator"),
        *("context", "loader", "process_loader", "scratch", "dataloader_after_a_save"),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("map_loader", "trainer")),
    ],
)
def test_after_a_fork_the_child_exits_and_the_parent_continues(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, CHILDREN, name], cwd=tmp_path, capture_output=True, text=True, timeout=55, check=False
    )

    complaints = [line for line in done.stderr.splitlines() if not line.startswith(NOTE)]
    assert (done.stdout, complaints, done.returncode) == ("well\n", [], 0)
