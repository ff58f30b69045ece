"""Checkpoints behind symbolic links are read like any others, never deleted, and never ignored silently."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from strata import CheckpointManager
from strata.errors import InvalidArgument, NoCheckpoint, StorageDenied
from strata.storage.local import LocalStore


def save(place: Path, *steps: int, keep_count: int | None = None) -> list[Path]:
    """Save steps and return the directories that exist afterwards."""
    with CheckpointManager(place, saver="thread", keep_count=keep_count) as manager:
        for step in steps:
            manager.save({"w": np.full(4, step)}, step=step).wait()
        manager.wait()
        return [Path(one.path) for one in manager.list()]


def linked_away(directory: Path, to: Path) -> Path:
    """Move a checkpoint and link it, as a user does whose disk is full."""
    to.mkdir(parents=True, exist_ok=True)
    shutil.move(directory, to / directory.name)
    directory.symlink_to(to / directory.name)
    return to / directory.name


def test_a_checkpoint_that_was_moved_and_linked_is_listed_loaded_and_verified(tmp_path: Path) -> None:
    linked_away(save(tmp_path / "ck", 1, 2)[1], tmp_path / "large")
    with CheckpointManager(tmp_path / "ck", saver="thread") as manager:
        assert [one.step for one in manager.list()] == [1, 2]
        assert manager.problems == {}
        assert manager.load()["w"].tolist() == [2] * 4
        assert manager.verify(step=2).step == 2


def test_a_whole_directory_may_be_a_link_and_retention_works_in_it(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "ck").symlink_to(tmp_path / "large")
    assert len(save(tmp_path / "ck", 1, 2, 3, keep_count=2)) == 2
    assert len(list((tmp_path / "large").iterdir())) == 2


def test_nothing_is_deleted_through_a_link(tmp_path: Path) -> None:
    target = linked_away(save(tmp_path / "ck", 1)[0], tmp_path / "large")
    before = sorted(path.name for path in target.iterdir())
    there = save(tmp_path / "ck", 2, 3, 4, keep_count=1)
    assert [path.is_symlink() for path in there] == [True, False]  # the others are gone
    with CheckpointManager(tmp_path / "ck", saver="thread") as manager:
        with pytest.raises(InvalidArgument, match=rf"is a symbolic link to {target}; .*delete the link"):
            manager.delete(step=1)
        with pytest.raises(StorageDenied, match="nothing is deleted through a link"):
            manager._store.delete([f"{target.name}/manifest.json"])
    assert sorted(path.name for path in target.iterdir()) == before


@pytest.mark.parametrize("to", ["nowhere", "empty", "itself"])
def test_a_link_that_leads_to_no_checkpoint_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, to: str
) -> None:
    _, directory = save(tmp_path / "ck", 1, 2)
    moved = linked_away(directory, tmp_path / "large")
    (tmp_path / "empty").mkdir()
    if to == "itself":
        directory.unlink()
        directory.symlink_to(directory)
    else:
        moved.rename(tmp_path / "unmounted")
        if to == "empty":
            (tmp_path / "empty").rename(moved)
    with CheckpointManager(tmp_path / "ck", saver="thread") as manager:
        with caplog.at_level(logging.WARNING, "strata"):
            assert [one.step for one in manager.list()] == [1]
            assert [one.step for one in manager.list()] == [1]
        assert len([record for record in caplog.records if directory.name in record.getMessage()]) == 1
        assert "is a symbolic link to" in manager.problems[directory.name]
        assert "check that the disk is mounted" in manager.problems[directory.name]
        with pytest.raises(NoCheckpoint):
            manager.get(id=directory.name)
        if to == "nowhere":
            (tmp_path / "unmounted").rename(moved)
            assert [one.step for one in manager.list()] == [1, 2]
            assert manager.problems == {}


def test_links_with_other_names_are_ignored(tmp_path: Path) -> None:
    directory = save(tmp_path / "ck", 1)[0]
    (tmp_path / "ck" / "latest").symlink_to(directory.name)
    (tmp_path / "ck" / "old").symlink_to("nowhere")
    with CheckpointManager(tmp_path / "ck", saver="thread") as manager:
        assert [one.step for one in manager.list()] == [1]
        assert manager.problems == {}


def test_a_store_reads_through_a_link_and_lists_links_separately(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "ck")
    store.put("a/x", b"1")
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "y").write_bytes(b"2")
    (tmp_path / "ck" / "b").symlink_to(tmp_path / "large")
    assert store.children() == ["a"]
    assert store.links() == {"b": tmp_path / "large"}
    assert [listed.key for listed in store.walk("b")] == ["b/y"]
    assert store.get("b/y", max_bytes=1) == b"2"
    store.close()
