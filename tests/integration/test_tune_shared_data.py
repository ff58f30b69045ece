"""Trials of a study on one machine read their data once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strata import SearchSpace, StructuredDataset, TrainingOrchestrator
from strata.data.shared.cache import NodeCache, directory_for

pytest.importorskip("cloudpickle")


def test_the_trials_of_a_study_read_each_row_group_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_RUNS_DIR", str(tmp_path / "runs"))
    path = str(tmp_path / "data.parquet")
    pq.write_table(pa.table({"x": np.random.default_rng(0).normal(size=100_000)}), path, row_group_size=5_000)
    limit = (768 << 20) + os.getpid()
    member = NodeCache(directory_for(limit), max_bytes=limit, linger_s=0.1)
    assert member.join(), "and keeps the cache between two trials, however long they are kept from running"

    def train(config: dict[str, Any]) -> float:
        from strata import StructuredDataset
        from strata.data.shared import eviction

        eviction.MIN_WAIT_S = 25.0  # a process that is kept from running has not been stopped
        loader, dataset = StructuredDataset.create_dataloader(
            path, batch_size=config["batch_size"], shuffle=True, shared_bytes=limit, output_format="numpy"
        )
        assert sum(len(batch["x"]) for batch in loader) == 100_000
        return float(dataset.get_metrics().total.bytes_read)

    grid = SearchSpace().add_int("batch_size", values=[100, 200, 300, 400])
    study = TrainingOrchestrator(hpt_mode="grid").tune(train, space=grid, num_trials=4, workers=2)
    read = [each.values[0] for each in study.trials]

    loader, dataset = StructuredDataset.create_dataloader(path, output_format="numpy", rank=0, num_ranks=1)
    assert sum(len(batch["x"]) for batch in loader) == 100_000
    member.leave()
    assert len(read) == 4
    assert sum(read) <= 1.05 * dataset.get_metrics().total.bytes_read
