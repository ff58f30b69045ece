"""Files that an earlier version of Strata wrote, at commit c93273d; this version must read them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from strata.checkpoint import CheckpointManager, CheckpointType
from strata.coordinator.client import CoordinatorClient
from strata.coordinator.config import CoordinatorConfig
from strata.coordinator.embedded import EmbeddedCoordinator

WRITTEN = Path(__file__).parent / "written_at_c93273d"


def test_checkpoints_of_an_earlier_version_load_and_verify(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / "checkpoints", tmp_path / "checkpoints")
    table = np.arange(65_536, dtype=np.float32).reshape(64, 1_024)
    with CheckpointManager(tmp_path / "checkpoints") as manager:
        full, delta = sorted(manager.list(), key=lambda each: each.step)
        assert (full.checkpoint_type, delta.checkpoint_type) == (CheckpointType.FULL, CheckpointType.INCREMENTAL)
        manager.verify()
        first, second = manager.load(step=1), manager.load(step=2)
    assert np.array_equal(first["table"], table)
    table[7] = -1
    assert np.array_equal(second["table"], table)
    assert first["optimizer"] == {"lr": 1e-3, "betas": (0.9, 0.999)}
    assert (second["optimizer"]["lr"], second["name"], second["blob"]) == (5e-4, "resnet", b"opaque")


def test_the_journal_of_an_earlier_version_is_replayed_and_continued(tmp_path: Path) -> None:
    state = tmp_path / "coordinator.db"
    shutil.copy(WRITTEN / "coordinator.db", state)
    with (
        EmbeddedCoordinator(CoordinatorConfig(state=str(state))) as coordinator,
        CoordinatorClient(coordinator.address) as client,
    ):
        (dataset,) = client.list_datasets(job_id="resnet")
        assert (dataset.dataset_id, dataset.num_shards, dataset.num_done) == ("imagenet", 10, 3)
        worker = client.register_worker("worker-1", job_id="resnet")
        worker.wait_for_workers(1)
        assert worker.generation == 2  # generation 1 was of the earlier version
        left = worker.shards("imagenet")
        assert {shard.index for shard in left} <= set(range(3, 10))
        assert worker.ack(left[:1]).num_done == 4
