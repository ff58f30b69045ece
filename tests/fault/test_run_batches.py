"""`strata run` with batches by tokens and with a mix: killed and scaled, every row counts once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from leftovers import nothing_is_left
from runs import NUM_ROWS, Run

from strata.launch.control import Scale

EPOCHS = 2
SOURCE_ROWS = (600, 300)
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    """Create runs over two files of numbered rows with lists of tokens, and remove them after the test."""
    made: list[Run] = []
    assert sum(SOURCE_ROWS) == NUM_ROWS
    rng = np.random.default_rng(1)
    data = tmp_path / "data"
    data.mkdir()
    first = 0
    for num_rows in SOURCE_ROWS:
        columns: dict[str, Any] = {name: rng.random(num_rows) for name in "abcy"}
        tokens = [rng.integers(0, 100, length) for length in rng.integers(1, 40, num_rows)]
        table = pa.table({"id": np.arange(first, first + num_rows), **columns, "tokens": tokens})
        pq.write_table(table, data / f"rows-{first}.parquet", row_group_size=64)
        first += num_rows

    def make(*options: str) -> Run:
        made.append(Run(tmp_path, data, *options))
        return made[-1]

    with nothing_is_left(tmp_path):
        yield make
        for run in made:
            run.bury()


@pytest.mark.parametrize("batches", ["tokens", "mix"])
def test_after_a_kill_and_with_fewer_workers_every_row_of_every_file_counts_once(
    job: Any, tmp_path: Path, batches: str
) -> None:
    """In a mix, an epoch reads both files to their ends: the weights are their rows, which global batches divide."""
    run = job("--workers", "1:2")
    run.start(*("--batches", batches, "--batch-size", "15"), *("--step-s", "0.1", "--until", str(tmp_path / "hurry")))
    run.wait_for_step(0, 14)
    run.kill(0, 1)
    restored = int(run.wait_for(1, 0, r"restored (\d+)")[1])
    assert restored >= 5
    run.wait_for_step(1, restored + 3)
    run.ask(Scale(1))
    assert int(run.wait_for(2, 0, r"restored (\d+)")[1]) >= restored + 3
    (tmp_path / "hurry").touch()
    code, output = run.wait()
    assert code == 0, output
    (result,) = run.results()
    assert result["counts"] == [EPOCHS]
