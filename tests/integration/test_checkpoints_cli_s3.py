"""`strata checkpoints` on a bucket that a saver process has written, with `--storage-option`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from s3 import S3Server, s3
from test_checkpoints_cli import checkpoints

import strata
from strata.checkpoint.saver.client import ProcessSaver

__all__ = ["s3"]  # a fixture


def test_every_command_works_on_a_bucket(s3: S3Server, tmp_path: Path) -> None:
    url = s3.new_url()
    options = s3.options()
    flags = [f"--storage-option={name}={str(value).lower()}" for name, value in options.items() if name == "allow_http"]
    flags += [f"--storage-option={name}={value}" for name, value in options.items() if name != "allow_http"]

    def run(command: str, *more: str) -> str:
        done = checkpoints(command, url, *more, *flags)
        assert done.returncode == 0, done.stderr
        return done.stdout

    table = np.random.default_rng(0).random((5_000, 64), np.float32)
    state: dict[str, Any] = {"emb": table, "epoch": 1}
    with strata.CheckpointManager(url, storage_options=options) as manager:
        assert isinstance(manager._saver, ProcessSaver)
        manager.save(state, step=1).wait()
        table[7] = 7
        saved = manager.save(state, step=2, checkpoint_type="INCREMENTAL").wait()
        assert saved.checkpoint_type.name == "INCREMENTAL"
    assert [one["step"] for one in json.loads(run("ls", "--json"))["checkpoints"]] == [1, 2]
    assert "INCREMENTAL" in run("show", "--step", "2")
    assert "is intact" in run("verify", "--step", "2")
    assert "64 of 320000 elements" in run("diff", "1", "2")
    run("export", "--output", str(tmp_path / "out.safetensors"), "--step", "2")
    assert np.array_equal(safetensors.numpy.load_file(tmp_path / "out.safetensors")["emb"], table)
    assert "is a full checkpoint" in run("compact", "--step", "2")
    run("rm", "--step", "1", "--yes")
    run("repair", "--yes")
    with strata.CheckpointManager(url, storage_options=options) as manager:
        assert [one.step for one in manager.list()] == [2]
        assert np.array_equal(manager.load()["emb"], table)
