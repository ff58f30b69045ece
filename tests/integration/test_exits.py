"""A script that ends in any way, with any of our objects open, exits promptly and with its own exit code."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exit_children import DEADLINE_S, ENDINGS

from strata.launch.environment import NOTE

CHILDREN = Path(__file__).parent / "exit_children.py"

FORMS = (
    *("bare_context", "saving_context", "dropped_context", "context_again", "torchrun_context", "worker"),
    *("registry", "client", "async_client", "orchestrator", "coordinator"),
    *("manager", "thread_manager", "async_manager", "loader", "map_loader"),
)


def run(cases: list[str], directory: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, CHILDREN, json.dumps(cases)],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
        check=True,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory with a short path: the temporary files of the children include sockets, whose paths are limited."""
    with tempfile.TemporaryDirectory(prefix="exits-") as place:
        yield Path(place)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_ends_in_every_way_with_the_scripts_own_exit_code(form: str, short_path: Path) -> None:
    endings = {ending: code for ending, (_, code) in ENDINGS.items() if (form, ending) != ("worker", "is terminated")}
    found = run([f"{form}: {ending}" for ending in endings], short_path)

    for (ending, code), end in zip(endings.items(), found, strict=True):
        assert end["code"] == code, f"{ending}: {end}"
        num_tracebacks = ending in ("raises", "is interrupted")
        assert end["output"].count("Traceback") == num_tracebacks, f"{ending}: {end['output']}"
        assert bool(end["output"]) == num_tracebacks, f"{ending}: {end['output']}"
        if ending != "is terminated":  # SIGTERM allows no cleanup; the next process of its kind cleans up
            assert end["left"] == [], ending


def test_every_form_ends_in_a_process_of_multiprocessing(short_path: Path) -> None:
    cases = [*(f"{form}: fork" for form in FORMS if "loader" not in form), "bare_context: spawn"]

    for case, end in zip(cases, run(cases, short_path), strict=True):
        assert (end["code"], end["output"], end["left"]) == (0, "", []), case


def test_a_worker_whose_coordinator_is_gone_ends_by_itself(short_path: Path) -> None:
    (end,) = run(["orphan: exits"], short_path)

    assert end["code"] == 3, end["output"]


def test_the_shortest_script_ends(short_path: Path) -> None:
    """Run the script of the first page in its own interpreter."""
    script = "import strata; ctx = strata.init(checkpoints='ck', every=2); ctx.report(step=1, loss=.1)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=short_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )

    assert (done.returncode, done.stdout) == (0, "")
    assert [line[: len(NOTE)] for line in done.stderr.splitlines()] == [NOTE]
