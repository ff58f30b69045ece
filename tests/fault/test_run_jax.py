"""The JAX example, killed with `kill -9`, alone and under `strata run`: it ends with the weights, the momentum and the
key of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from leftovers import nothing_is_left
from runs import DEADLINE_S, Run

from strata import CheckpointManager

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_jax.py"
NUM_ROWS = 12_800
NUM_STEPS = 3 * -(-NUM_ROWS // 128)
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module", autouse=True)
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All processes run the same program, so only the first compiles it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        yield


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.parquet"
    x, y = np.random.default_rng(3).random((2, NUM_ROWS), np.float32)
    pq.write_table(pa.table({"x": x, "y": y, "z": x * y}), path, row_group_size=1_000)
    return path


def start_alone(place: Path, rows: Path) -> subprocess.Popen[str]:
    place.mkdir(exist_ok=True)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(EXAMPLE), str(rows)],
        cwd=place,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> Iterator[Any]:
    """Return the final state of an undisturbed run."""
    place = tmp_path_factory.mktemp("undisturbed")
    process = start_alone(place, rows)
    found: list[dict[str, Any]] = []

    def state() -> dict[str, Any]:
        if not found:
            output, _ = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, output
            found.append(last_state(place / "checkpoints" / "train_jax"))
        return found[0]

    yield state
    process.kill()
    process.communicate()


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, undisturbed: Any) -> Iterator[None]:
    """`undisturbed` starts before and may end afterwards."""
    with nothing_is_left(tmp_path, but="tmp*"):
        yield


def last_state(checkpoints: Path) -> dict[str, Any]:
    with CheckpointManager(checkpoints, saver="thread") as manager:
        last = manager.latest()
        assert last is not None
        assert last.step == NUM_STEPS
        state: dict[str, Any] = manager.load()
    return state


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["strata"]["loaders"] == expected["strata"]["loaders"]
    for name in ("params", "momentum"):
        for layer in ("hidden", "out"):
            assert np.array_equal(np.asarray(found[name][layer]), np.asarray(expected[name][layer]))
    assert np.array_equal(np.asarray(found["key"]["key_data"]), np.asarray(expected["key"]["key_data"]))


@pytest.mark.slow
def test_a_killed_single_process_resumes_from_its_checkpoint(tmp_path: Path, rows: Path, undisturbed: Any) -> None:
    process = start_alone(tmp_path / "job", rows)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 200 "):
            break
    process.kill()
    process.communicate()

    process = start_alone(tmp_path / "job", rows)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    assert int(output.split("begins after step ")[1].split()[0]) > 50
    assert_same(last_state(tmp_path / "job" / "checkpoints" / "train_jax"), undisturbed())


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_weights(tmp_path: Path, rows: Path, undisturbed: Any) -> None:
    run = Run(tmp_path, rows, script=EXAMPLE)
    try:
        run.start_plain(str(rows))
        run.wait_for(0, 0, r"step 200 .*")
        os.kill(worker_of(run), 9)
        code, output = run.wait()
    finally:
        run.bury()

    assert code == 0, output
    assert int(run.found(1, 0, r"begins after step (\d+)")[1]) > 50
    assert "fork" not in run.text(0, 0) + run.text(1, 0), "JAX warns of it once it has threads"
    assert_same(last_state(run.directory / "checkpoints"), undisturbed())


def worker_of(run: Run) -> int:
    """Return the process whose title shows this rank."""
    title = f"strata: {run.name} rank 0 of 1"
    found = psutil.process_iter(["cmdline"])  # not cmdline(), which raises for zombies
    (worker,) = [each for each in found if " ".join(each.info["cmdline"] or ()).startswith(title)]
    return worker.pid
