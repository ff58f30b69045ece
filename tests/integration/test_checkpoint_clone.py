"""A clone of a checkpoint loads as the original did, after the original is gone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata
from strata.checkpoint.tools import clone as clones
from strata.checkpoint.tools.clone import clone, newest
from strata.errors import NoCheckpoint


def manager_at(place: Path) -> strata.CheckpointManager:
    return strata.CheckpointManager(place, saver="thread", statistics=False)


def saved(place: Path) -> dict[str, Any]:
    """Save a full checkpoint and an incremental one; return the last state."""
    state = {"rows": np.random.default_rng(0).random((20_000, 32), np.float32), "epoch": 1}
    with manager_at(place) as manager:
        manager.save(state, step=1).wait()
        state["rows"][7] += 1
        assert manager.save(state, step=2, checkpoint_type="INCREMENTAL").wait().bases
    return state


@pytest.mark.parametrize("has_links", [True, False])
def test_a_clone_of_an_incremental_checkpoint_loads_without_the_original(
    tmp_path: Path, has_links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no hard links here")

    state = saved(tmp_path / "original")
    if not has_links:
        monkeypatch.setattr(clones.os, "link", refuse)
    found = newest(tmp_path / "original")
    assert found is not None
    made = clone(found, tmp_path / "trials" / "clone")
    shutil.rmtree(tmp_path / "original")

    assert (made.step, Path(made.path)) == (2, tmp_path / "trials" / "clone" / found.name)
    with manager_at(tmp_path / "trials" / "clone") as manager:
        loaded = manager.load()
        manager.verify()
    assert np.array_equal(loaded["rows"], state["rows"])
    assert [each.name for each in (tmp_path / "trials").iterdir()] == ["clone"], "no draft is left"


def test_a_checkpoint_that_is_gone_cannot_be_cloned(tmp_path: Path) -> None:
    saved(tmp_path / "original")
    with pytest.raises(NoCheckpoint):
        clone(tmp_path / "original" / "step-000000000009-0123456789abcdef", tmp_path / "clone")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["original"]
    assert newest(tmp_path / "nowhere") is None
