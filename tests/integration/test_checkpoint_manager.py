"""Saving and loading with the manager, on real files."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import strata
from strata.checkpoint import CheckpointMetadata, CheckpointType
from strata.checkpoint.format import manifest as m
from strata.checkpoint.load import fetch
from strata.checkpoint.saver.executor import Executor
from strata.clock import ManualClock
from strata.errors import (
    CheckpointAborted,
    CheckpointBusy,
    CheckpointCorrupt,
    CheckpointInvalid,
    CheckpointMissing,
    CheckpointTooNew,
    ConfigError,
    InvalidArgument,
    NoCheckpoint,
    StorageDenied,
    StorageFull,
)
from strata.storage.base import Watch
from strata.storage.local import LocalStore


class CheckpointManager(strata.CheckpointManager):
    """Save in a thread: a process takes longer to start than most tests; `test_checkpoint_saver.py` tests it."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **{"saver": "thread", "statistics": False, **more})


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(str(tmp_path / "checkpoints")) as manager:
        yield manager


def state_of(number: int) -> dict[str, Any]:
    return {"model": {"w": np.full((64, 64), number, np.float32)}, "step": number}


def the_directory(manager: CheckpointManager, step: int) -> Path:
    return Path(manager.get(step=step).path)


def files_below(directory: Path) -> list[str]:
    """Ignore statistics, which are written when there is time."""
    found = (path for path in directory.rglob("*") if path.is_file() and path.name != "statistics.json")
    return sorted(str(path.relative_to(directory)) for path in found)


# -- typical use ----------------------------------------------------------------------------------------------------


def test_a_model_and_its_optimizer_are_restored(manager: CheckpointManager) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    info = manager.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        step=5_000,
        epoch=10,
        checkpoint_type=CheckpointType.FULL,
        metadata={"run": "a1"},
    )
    assert info.staged
    assert info.path.endswith(info.id)
    optimizer.step()  # training continues immediately
    metadata = info.wait()
    assert info.durable
    assert info.progress == 1.0
    assert metadata == manager.latest()
    assert (metadata.step, metadata.epoch, metadata.metadata) == (5_000, 10, {"run": "a1"})
    fresh = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    again = torch.optim.Adam(fresh.parameters())
    assert manager.restore({"model": fresh, "optimizer": again}).step == 5_000
    assert all(torch.equal(tensor, saved[name]) for name, tensor in fresh.state_dict().items())
    assert again.param_groups[0]["lr"] == 0.1


def test_the_names_are_at_the_top_of_the_package() -> None:
    assert strata.CheckpointManager is strata.checkpoint.CheckpointManager
    assert strata.CheckpointType is CheckpointType
    assert strata.CheckpointMetadata is CheckpointMetadata


def test_bytes_come_back_as_bytes(manager: CheckpointManager) -> None:
    for number, data in enumerate((b"model", bytearray(b"\0" * 100_000), memoryview(b"xyz"), b"")):
        manager.save(data, step=number, epoch=1).wait()
        assert manager.load() == bytes(data)


def test_other_tools_open_the_data_file_as_it_is(manager: CheckpointManager) -> None:
    info = manager.save({"model": {"w": torch.arange(6.0).reshape(2, 3)}}, step=1)
    info.wait()
    loaded = safetensors.torch.load_file(Path(info.path) / "rank-00000.safetensors")
    assert torch.equal(loaded["model.w"], torch.arange(6.0).reshape(2, 3))


def test_only_requested_tensors_are_read(manager: CheckpointManager, tmp_path: Path) -> None:
    manager.save(
        {"model": {"a": np.ones(4), "b": np.zeros(1 << 20)}, "optimizer": {"m": np.ones(1 << 20)}}, step=1
    ).wait()
    read = []
    loaded = manager.load(only=["model.a"], on_progress=read.append)
    assert loaded["model"]["a"].tolist() == [1, 1, 1, 1]
    assert set(loaded) == {"model"}
    assert read[-1].done_bytes < 10_000
    with pytest.raises(InvalidArgument, match="no tensor that matches"):
        manager.load(only=["nothing.*"])


def test_parts_of_the_state_are_saved_by_type(manager: CheckpointManager) -> None:
    state = {"model": {"w": np.ones(2)}, "optimizer": {"m": np.zeros(2)}, "step": 3}
    manager.save(state, step=1, checkpoint_type=CheckpointType.MODEL_ONLY).wait()
    assert set(manager.load()) == {"model"}
    manager.save(state, step=2, checkpoint_type="optimizer_only").wait()
    assert set(manager.load()) == {"optimizer"}
    assert [c.checkpoint_type.name for c in manager.list()] == ["MODEL_ONLY", "OPTIMIZER_ONLY"]
    with pytest.raises(InvalidArgument, match="the state has only 'w'"):
        manager.save({"w": np.ones(1)}, step=3, checkpoint_type="MODEL_ONLY")


def test_a_checkpoint_of_another_type_than_requested_has_a_reason(manager: CheckpointManager) -> None:
    saved = manager.save(state_of(1), step=1, checkpoint_type=CheckpointType.INCREMENTAL).wait()
    assert saved.checkpoint_type is CheckpointType.FULL
    assert "nothing to compare with" in saved.why
    assert manager.get(step=1).why == saved.why


def test_a_state_changed_after_the_save_is_saved_as_it_was(manager: CheckpointManager) -> None:
    array = np.ones(1 << 20)
    info = manager.save(array, step=1)
    array[:] = 2
    info.wait()
    assert manager.load().max() == 1


def test_a_loaded_state_may_be_changed_without_changing_the_checkpoint(manager: CheckpointManager) -> None:
    manager.save({"a": torch.ones(4), "b": np.ones(4)}, step=1).wait()
    loaded = manager.load()
    loaded["a"] += 1
    loaded["b"] += 1
    assert manager.load()["a"].tolist() == [1, 1, 1, 1]


def test_a_checkpoint_is_found_by_step_and_id(manager: CheckpointManager) -> None:
    infos = [manager.save(state_of(step), step=step) for step in (3, 1, 2)]
    manager.wait()
    assert [c.step for c in manager.list()] == [1, 2, 3]
    assert manager.get(step=2).id == manager.get(id=infos[2].id).id
    assert manager.load(step=1)["step"] == 1
    assert manager.load(id=infos[0].id)["step"] == 3
    with pytest.raises(NoCheckpoint, match=r"step 7; the newest steps are 1, 2, 3"):
        manager.load(step=7)
    with pytest.raises(NoCheckpoint, match="no checkpoint 'nobody'"):
        manager.get(id="nobody")


def test_a_location_can_be_given_as_bucket_and_storage_type(tmp_path: Path) -> None:
    with CheckpointManager(bucket=str(tmp_path / "b"), storage_type="local") as manager:
        manager.save(b"x", step=1, epoch=2).wait()
        assert manager.latest() is not None
    with pytest.raises(ConfigError, match="pass storage_path="):
        CheckpointManager()
    with pytest.raises(ConfigError, match="ftp"):
        CheckpointManager("ftp://x/y")
    with pytest.raises(ConfigError, match="keep_count=0"):
        CheckpointManager(str(tmp_path), keep_count=0)


def test_an_empty_directory_has_no_checkpoint(manager: CheckpointManager) -> None:
    assert manager.list() == []
    assert manager.latest() is None
    with pytest.raises(NoCheckpoint, match="has no checkpoint"):
        manager.load()


def test_checkpoints_in_a_renamed_directory_are_loaded(manager: CheckpointManager, tmp_path: Path) -> None:
    manager.save(state_of(1), step=1).wait()
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    with CheckpointManager(f"file://{tmp_path}/elsewhere") as other:
        assert other.load()["step"] == 1
        other.verify()


# -- retention ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_kept_if_any_policy_keeps_it(tmp_path: Path) -> None:
    with CheckpointManager(str(tmp_path), keep_count=2, keep_every=4, keep_best=("loss", "min")) as manager:
        for step in range(10):
            manager.save(state_of(step), step=step, metadata={"loss": abs(step - 3)})
        manager.wait()
        assert [c.step for c in manager.list()] == [0, 3, 4, 8, 9]
        assert len(files_below(tmp_path)) == 2 * 5, "the files of deleted checkpoints are gone"


def test_without_a_policy_nothing_is_deleted(manager: CheckpointManager) -> None:
    for step in range(5):
        manager.save(state_of(step), step=step)
    manager.wait()
    assert len(manager.list()) == 5


def test_a_deleted_checkpoint_is_gone_and_its_files_too(manager: CheckpointManager, tmp_path: Path) -> None:
    for step in (1, 2):
        manager.save(state_of(step), step=step).wait()
    manager.delete(step=1)
    assert [c.step for c in manager.list()] == [2]
    assert len(files_below(tmp_path)) == 2
    with pytest.raises(NoCheckpoint):
        manager.delete(step=1)


# -- one at a time --------------------------------------------------------------------------------------------------


class GatedStore(LocalStore):
    """A store whose large writes wait until they are released."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.begun, self.gate = threading.Event(), threading.Event()

    def put_large(self, key: str, data: memoryview, *, watch: Watch | None = None) -> None:
        self.begun.set()
        assert self.gate.wait(30)
        super().put_large(key, data, watch=watch)


def test_with_when_busy_skip_a_save_is_skipped_with_a_reason(tmp_path: Path) -> None:
    store = GatedStore(tmp_path)
    with CheckpointManager(store=store, when_busy="skip") as manager:
        first = manager.save(state_of(1), step=1)
        second = manager.save(state_of(2), step=2)
        assert second.done
        assert not second.durable
        with pytest.raises(CheckpointAborted, match=f"skipped: {first.id}"):
            second.wait()
        with pytest.raises(TimeoutError, match=r"not durable after 0\.001 s"):
            first.wait(0.001)
        store.gate.set()
        first.wait()
        assert [c.step for c in manager.list()] == [1]


def test_with_when_busy_raise_a_save_is_rejected(tmp_path: Path) -> None:
    store = GatedStore(tmp_path)
    with CheckpointManager(store=store, when_busy="raise") as manager:
        manager.save(state_of(1), step=1)
        with pytest.raises(CheckpointBusy):
            manager.save(state_of(2), step=2)
        store.gate.set()


def test_a_cancelled_save_leaves_nothing_behind(tmp_path: Path) -> None:
    store = GatedStore(tmp_path)
    with CheckpointManager(store=store) as manager:
        info = manager.save(state_of(1), step=1)
        assert store.begun.wait(30)
        info.cancel()
        store.gate.set()
        with pytest.raises(CheckpointAborted):
            info.wait()
        manager.wait()
        assert files_below(tmp_path) == []
        manager.save(state_of(2), step=2).wait()
        assert [c.step for c in manager.list()] == [2]


class FailingStore(LocalStore):
    fails_at = ""

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self._fail(key)
        super().put(key, data, if_absent=if_absent)

    def put_large(self, key: str, data: memoryview, *, watch: Watch | None = None) -> None:
        self._fail(key)
        super().put_large(key, data, watch=watch)

    def _fail(self, key: str) -> None:
        if self.fails_at and self.fails_at in key:
            raise StorageFull(f"{key}: no space left on device")


@pytest.mark.parametrize("where", ["safetensors", "manifest"])
def test_a_failed_save_is_reported_and_the_previous_checkpoint_stays_the_latest(tmp_path: Path, where: str) -> None:
    store = FailingStore(tmp_path)
    manager = CheckpointManager(store=store, keep_count=1)
    manager.save(state_of(1), step=1).wait()
    store.fails_at = where
    info = manager.save(state_of(2), step=2)
    with pytest.raises(StorageFull):
        info.wait()
    assert not info.durable
    manager.wait()
    assert manager.load()["step"] == 1
    assert len(files_below(tmp_path)) == 2, "the failed save left no files"
    manager.save(state_of(3), step=3)
    with pytest.raises(StorageFull):  # also without wait()
        manager.close()


def test_leftovers_of_a_killed_writer_are_deleted_after_an_hour_and_nothing_else_is(tmp_path: Path) -> None:
    names = ["step-000000000001-" + "a" * 16, "step-000000000002-" + "b" * 16, "mine"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").write_bytes(b"half")
    (tmp_path / names[1] / ".tmp-0").write_bytes(b"half")
    with CheckpointManager(str(tmp_path)) as manager:
        manager.save(state_of(3), step=3)
        manager.wait()
        assert all((tmp_path / name).exists() for name in names), "the save may still be in progress"
        two_hours_ago_s = time.time() - 7_200
        for path in (path for name in names for path in (tmp_path / name).iterdir()):
            os.utime(path, (two_hours_ago_s, two_hours_ago_s))
        manager.save(state_of(4), step=4)
        manager.wait()
        assert [(tmp_path / name).exists() for name in names] == [False, False, True]


def forged(directory: Path, **changes: Any) -> None:
    """Replace values of a manifest and correct its hash."""
    path = directory / m.FILE_NAME
    body = json.loads(path.read_text())["manifest"] | changes
    data = json.dumps(body).encode()
    path.write_bytes(b'{"strata_checkpoint":1,"hash":"%s","manifest":%s}' % (m.xxh3_128_hexdigest(data).encode(), data))


TIB = 1 << 40
HUGE_FILE = {
    "path": "rank-00000.safetensors",
    "rank": 0,
    "size_bytes": 17 * TIB,
    "header_bytes": 8,
    "header_hash": "0" * 32,
}
HUGE_SLICE = {"file": 0, "offset": 8, "start": [0], "shape": [16 * TIB], "hashes": ["0" * 32] * (1 << 14)}
HUGE_TENSOR = {"name": "model.w", "dtype": "U8", "shape": [16 * TIB], "slices": [HUGE_SLICE]}


@pytest.mark.parametrize(
    "changes",
    [
        {"structures": [{"dict": [["model"]]}]},
        {"structures": [{"dict": [["model", {"tensor": 5, "as": "numpy"}]]}]},
        {"structures": [{"dict": [["model", {"tensor": "model.nobody", "as": "numpy"}]]}]},
        {"files": [HUGE_FILE], "tensors": [HUGE_TENSOR], "chunk_bytes": 1 << 30},
    ],
    ids=["no pair", "no name", "no tensor", "16 TiB"],
)
@pytest.mark.parametrize("only", [None, ["model.*"]], ids=["all", "only"])
def test_a_forged_manifest_is_ignored(tmp_path: Path, changes: dict[str, Any], only: list[str] | None) -> None:
    with CheckpointManager(str(tmp_path)) as manager:
        for step in (1, 2):
            manager.save(state_of(step), step=step).wait()
        directory = the_directory(manager, 2)
    forged(directory, **changes)
    with CheckpointManager(str(tmp_path)) as manager:
        assert manager.load(only=only)["model"]["w"].max() == 1


def test_files_that_are_far_too_large_are_ignored(tmp_path: Path) -> None:
    with CheckpointManager(str(tmp_path)) as manager:
        for step in (1, 2, 3):
            manager.save(state_of(step), step=step).wait()
        two, three = the_directory(manager, 2), the_directory(manager, 3)
    os.truncate(two / m.FILE_NAME, 2 << 30)
    (three / "quarantine.json").write_bytes(b"[" * 2_000_000)
    with CheckpointManager(str(tmp_path)) as manager:
        assert manager.load()["step"] == 1
        assert set(manager.problems) == {two.name, three.name}


# -- corruption -----------------------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def spoil_data(directory: Path) -> None:
    flip(directory / "rank-00000.safetensors", -1)


def spoil_manifest(directory: Path) -> None:
    flip(directory / m.FILE_NAME, 200)


def truncate(directory: Path) -> None:
    path = directory / "rank-00000.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def empty(directory: Path) -> None:
    os.truncate(directory / "rank-00000.safetensors", 0)


def lose(directory: Path) -> None:
    (directory / "rank-00000.safetensors").unlink()


def make_newer(directory: Path) -> None:
    path = directory / m.FILE_NAME
    path.write_bytes(path.read_bytes().replace(b'"strata_checkpoint":1', b'"strata_checkpoint":9'))


WAYS = [
    (spoil_data, CheckpointCorrupt, "tensor 'model.w' in rank-00000.safetensors"),
    (spoil_manifest, CheckpointInvalid, "manifest.json"),
    (truncate, CheckpointInvalid, "bytes, expected"),
    (empty, CheckpointInvalid, "has 0 bytes"),
    (lose, CheckpointMissing, "file rank-00000.* does not exist"),
    (make_newer, CheckpointTooNew, "format 9"),
]


@pytest.mark.parametrize(("spoil", "error", "message"), WAYS)
def test_corruption_is_named_and_never_loaded(tmp_path: Path, spoil: Any, error: type[Exception], message: str) -> None:
    with CheckpointManager(str(tmp_path)) as manager:
        for step in (1, 2):
            manager.save(state_of(step), step=step).wait()
        directory = the_directory(manager, 2)
    spoil(directory)
    with CheckpointManager(str(tmp_path)) as manager:
        with pytest.raises(error, match=message):
            manager.load(id=directory.name)
        with pytest.raises(error, match=message):
            manager.verify(id=directory.name)
        assert manager.load()["step"] == 1, "the newest intact checkpoint is loaded"
        assert [c.step for c in manager.list()] == [1]
        assert list(manager.problems) == [directory.name]
    assert directory.exists(), "the damaged checkpoint is kept for inspection"
    with CheckpointManager(str(tmp_path)) as manager:
        assert manager.load()["step"] == 1


def test_files_of_two_checkpoints_that_were_swapped_are_noticed(tmp_path: Path) -> None:
    with CheckpointManager(str(tmp_path)) as manager:
        for step in (1, 2):
            manager.save(state_of(step), step=step).wait()
        one, two = (the_directory(manager, step) / "rank-00000.safetensors" for step in (1, 2))
        one.rename(tmp_path / "aside")
        two.rename(one)
        (tmp_path / "aside").rename(two)
        for step in (1, 2):
            with pytest.raises(CheckpointCorrupt):
                manager.load(step=step)
        with pytest.raises(NoCheckpoint, match="if files were swapped"):
            manager.load()


def test_a_renamed_directory_is_not_another_checkpoint(manager: CheckpointManager) -> None:
    manager.save(state_of(1), step=1).wait()
    directory = the_directory(manager, 1)
    directory.rename(directory.with_name("step-000000000009-00"))
    assert manager.list() == []
    assert "rename its directory" in manager.problems["step-000000000009-00"]


def test_a_changed_header_is_rejected_by_load_and_verify(manager: CheckpointManager) -> None:
    manager.save(state_of(1), step=1).wait()
    flip(the_directory(manager, 1) / "rank-00000.safetensors", 3_000)  # in the padding
    for use in (manager.verify, manager.load, lambda **which: manager.load(only=["*"], **which)):
        with pytest.raises(CheckpointCorrupt, match="header"):
            use(step=1)


def test_foreign_files_in_the_directory_are_ignored(manager: CheckpointManager, tmp_path: Path) -> None:
    manager.save(state_of(1), step=1).wait()
    root = tmp_path / "checkpoints"
    (root / "notes.txt").write_text("hello")
    (root / "logs").mkdir()
    (root / "half").mkdir()
    (root / "half" / "rank-00000.safetensors").write_bytes(b"half")
    assert [c.step for c in manager.list()] == [1]


def test_two_writers_of_one_step_both_commit_and_the_later_is_found(tmp_path: Path) -> None:
    clock = ManualClock()
    with CheckpointManager(str(tmp_path), clock=clock) as one, CheckpointManager(str(tmp_path), clock=clock) as other:
        one.save({"who": "one"}, step=5).wait()
        clock.advance(1)
        other.save({"who": "other"}, step=5).wait()
        assert one.load() == {"who": "other"}
        assert len(one.list()) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": -1}, "step=-1"),
        ({"step": 1.5}, "step=1.5"),
        ({"step": True}, "step=True"),
        ({"step": 1, "epoch": -2}, "epoch=-2"),
        ({"step": 1, "checkpoint_type": "HALF"}, "HALF"),
        ({"step": 1, "metadata": {"x": object()}}, "metadata is not valid JSON"),
        ({"step": 1, "metadata": {"x": "y" * 2_000_000}}, "metadata has"),
    ],
)
def test_invalid_arguments_are_rejected_before_anything_is_written(
    manager: CheckpointManager, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        manager.save({"a": 1}, **arguments)
    assert files_below(tmp_path) == []


def test_a_closed_manager_rejects_saves(tmp_path: Path) -> None:
    manager = CheckpointManager(str(tmp_path))
    manager.close()
    manager.close()
    with pytest.raises(InvalidArgument, match="is closed"):
        manager.save(b"", step=1)


def test_the_manifest_is_plain_json(manager: CheckpointManager) -> None:
    manager.save(state_of(1), step=1, metadata={"note": "…"}).wait()
    document = json.loads((the_directory(manager, 1) / m.FILE_NAME).read_text())
    assert document["strata_checkpoint"] == 1
    assert document["manifest"]["metadata"] == {"note": "…"}
    assert [tensor["name"] for tensor in document["manifest"]["tensors"]] == ["model.w"]


# -- mistakes of callers, and events at a bad time -------------------------------------------------------------------


def test_loading_is_possible_after_closing(tmp_path: Path) -> None:
    state = {"w": np.arange(4 << 20)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(state, step=1).wait()
    assert np.array_equal(manager.load()["w"], state["w"])
    manager.verify(step=1)
    with pytest.raises(InvalidArgument, match="is closed"):
        manager.save(state, step=2)
    with pytest.raises(InvalidArgument, match="is closed"):
        manager.prepare(state)


def test_a_pattern_that_matches_nothing_is_rejected_even_if_others_match(manager: CheckpointManager) -> None:
    manager.save({"model": {"w": np.ones(3)}, "epoch": 3}, step=1).wait()
    for patterns in (["nothing"], ["model.*", "modle.*"], []):
        with pytest.raises(InvalidArgument, match=r"no tensor that matches .*; its tensors are model.w"):
            manager.load(only=patterns)


@pytest.mark.parametrize(
    "mistake", ["gpu", "cuda:7", 3.5, lambda storage, _: storage], ids=["gpu", "cuda:7", "number", "function"]
)
def test_a_missing_device_is_an_invalid_argument(manager: CheckpointManager, mistake: Any) -> None:
    manager.save({"w": torch.ones(3)}, step=1).wait()
    with pytest.raises(InvalidArgument, match="not a device of this machine"):
        manager.load(map_location=mistake)
    assert len(manager.list()) == 1, "nothing is in quarantine"
    assert torch.equal(manager.load(map_location={"cpu": "cpu"})["w"], torch.ones(3))


def test_a_failed_allocation_does_not_put_a_checkpoint_into_quarantine(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.save({"w": np.arange(4 << 20)}, step=1).wait()

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("Cannot allocate memory")

    with monkeypatch.context() as short:
        short.setattr(fetch.mmap, "mmap", refuse)
        with pytest.raises(MemoryError, match="load fewer tensors"):
            manager.load()
    assert len(manager.list()) == 1


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda m: m.save({}, step=1, data_cursor=None), "data_cursor=None is not a string"),
        (lambda m: m.save({}, step="1"), "step='1' is invalid"),
        (lambda m: m.save({"name": "\udc80"}, step=1), "not valid Unicode"),
        (lambda m: m.save({"w": np.ma.masked_array([1.0])}, step=1), "masked array"),
        (lambda m: m.save({"w": np.ones(2)}, step=1, dirty=[1]), "pass a dict of tensor names"),
        (lambda m: m.save({"w": np.ones(2)}, step=1, dirty={"w": 1}), "not a list of row indices"),
        (lambda m: m.delete(), "needs a checkpoint"),
        (lambda m: m.restore(torch.nn.Linear(1, 1)), "takes a dict such as"),
        (lambda m: m.restore({"epoch": 3}), "'epoch' is a int without load_state_dict"),
        (lambda m: m.load(id=7), "use step= for a number"),
        (lambda m: m.load(step="7"), "is invalid; use an integer"),
        (lambda m: m.get(step=-1), "is invalid; use an integer"),
    ],
)
def test_mistakes_are_named(manager: CheckpointManager, call: Any, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        call(manager)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"keep_best": "loss"}, "use .metric"),
        ({"keep_count": 1.5}, "is invalid; use an integer"),
        ({"policies": [3]}, "is not a retention policy"),
        ({"strategy": "often"}, "is not a strategy"),
        ({"incremental_depth": "2"}, "use 1 to 16"),
        ({"storage_path": ""}, "is empty"),
    ],
)
def test_invalid_settings_are_named(tmp_path: Path, arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        CheckpointManager(**{"storage_path": tmp_path, **arguments})


def test_numpy_integers_are_accepted(manager: CheckpointManager) -> None:
    saved = manager.save({}, step=np.int64(5), epoch=np.int32(2)).wait()  # type: ignore[arg-type]
    assert (saved.step, saved.epoch) == (5, 2)
    assert manager.get(step=5, id=saved.id) == saved
    with pytest.raises(NoCheckpoint, match="has step 5, not 6"):
        manager.get(step=6, id=saved.id)


def test_a_save_within_a_save_is_rejected_instead_of_waiting(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = manager._stage

    def interrupted(*arguments: Any) -> Any:
        with pytest.raises(CheckpointBusy, match="set a flag"):
            manager.save({}, step=2)
        return stage(*arguments)

    monkeypatch.setattr(manager, "_stage", interrupted)
    manager.save({"w": np.ones(3)}, step=1).wait()


def test_a_pipe_instead_of_a_manifest_does_not_block(manager: CheckpointManager, tmp_path: Path) -> None:
    manager.save(state_of(1), step=1).wait()
    odd = tmp_path / "checkpoints" / "step-000000000009-0123456789abcdef"
    odd.mkdir()
    os.mkfifo(odd / "manifest.json")
    assert manager.load()["step"] == 1


def test_a_read_only_directory_still_falls_back_to_an_older_checkpoint(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        manager.save(state_of(step), step=step).wait()
    next(the_directory(manager, 2).glob("*.safetensors")).unlink()

    def refuse(*_: Any, **__: Any) -> None:
        raise StorageDenied("read-only")

    monkeypatch.setattr(manager._store, "put", refuse)
    assert manager.load()["step"] == 1


def test_a_policy_that_raises_is_logged_and_saving_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def keep(self, _checkpoints: Any) -> dict[str, str]:
            raise KeyError("loss")

    with CheckpointManager(tmp_path, policies=[Broken()]) as manager:
        for step in (1, 2):
            manager.save(state_of(step), step=step).wait()
    assert "could not delete" in caplog.text
    assert len(manager.list()) == 2


def test_listing_during_a_save_is_consistent(manager: CheckpointManager) -> None:
    found: list[int] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            found.append(len(manager.list()))

    looking = [threading.Thread(target=look) for _ in range(3)]
    for thread in looking:
        thread.start()
    for step in range(20):
        manager.save(state_of(step), step=step).wait()
    ended.set()
    for thread in looking:
        thread.join()
    assert len(manager.list()) == 20
    assert max(found) <= 20


def test_a_retry_finds_what_the_first_attempt_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    run = Executor.run

    def remembered(self: Executor, job: Any, memory: memoryview, watch: Watch, **more: Any) -> Any:
        seen.append((job, bytes(memory)))
        return run(self, job, memory, watch, **more)

    monkeypatch.setattr(Executor, "run", remembered)
    with CheckpointManager(tmp_path) as manager:
        state = state_of(1)
        manager.save(state, step=1).wait()
        state["model"]["w"][3] = 3
        saved = manager.save(state, step=2, checkpoint_type="INCREMENTAL").wait()
    job, memory = seen[-1]
    again = run(Executor(LocalStore(tmp_path)), job, memoryview(memory), Watch(), is_retry=True)
    assert again.metadata == saved
    assert np.array_equal(manager.load()["model"]["w"], state["model"]["w"])


def test_statistics_are_written_when_there_is_time(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, statistics=True) as manager:
        saved = manager.save({"w": np.array([1.0, np.nan, 3.0])}, step=1).wait()
    [about] = json.loads((Path(saved.path) / "statistics.json").read_bytes())["tensors"].values()
    assert (about["min"], about["max"]) == (1.0, 3.0)
