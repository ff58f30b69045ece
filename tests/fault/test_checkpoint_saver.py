"""The saver process outlives its trainer, and the trainer survives the death of its saver."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import saver_children

import strata
from strata.checkpoint.save import staging
from strata.checkpoint.saver import client
from strata.checkpoint.saver.client import ProcessSaver
from strata.data.shared.cache import NAME as NODE_CACHE
from strata.errors import CheckpointAborted, ConfigError, StorageError
from strata.storage.memory import MemoryStore

ROOT = str(Path(__file__).parents[2])
TIMEOUT_S = 60.0


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoints")


def run(name: str, place: str) -> tuple[int, list[str]]:
    """Run a trainer; return its exit code and its report."""
    with subprocess.Popen(
        [sys.executable, saver_children.__file__, name, place],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))},
        process_group=0,
    ) as child:
        assert child.stdout is not None
        report = child.stdout.readline().decode().split()
        child.wait(TIMEOUT_S)
        return child.returncode, report


def wait_for_end(pid: int) -> None:
    """Wait for a process that is not a child of ours."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], TIMEOUT_S)[0], f"process {pid} is still running"
    finally:
        os.close(descriptor)


def assert_is_state(loaded: dict[str, Any], number: int) -> None:
    assert loaded["number"] == number
    assert loaded["w"].tobytes() == saver_children.state_of(number)["w"].tobytes()


def test_the_staged_snapshot_of_a_killed_trainer_is_committed(place: str) -> None:
    code, (saved_id, saver_pid) = run("killed_when_staged", place)
    assert code == -signal.SIGKILL
    wait_for_end(int(saver_pid))
    with strata.CheckpointManager(place) as manager:
        assert [c.id for c in manager.list()] == [saved_id]
        manager.verify(id=saved_id)
        assert_is_state(manager.load(), 1)


def test_a_snapshot_that_was_half_copied_is_not_committed(place: str) -> None:
    code, (_, saver_pid) = run("killed_while_staging", place)
    assert code == -signal.SIGKILL
    wait_for_end(int(saver_pid))
    with strata.CheckpointManager(place) as manager:
        assert [c.step for c in manager.list()] == [1]
        assert_is_state(manager.load(), 1)


def test_the_saver_exits_although_a_child_of_the_trainer_lives_on(place: str) -> None:
    code, (child_pid, saver_pid) = run("killed_with_a_forked_child_alive", place)
    try:
        assert code == -signal.SIGKILL
        wait_for_end(int(saver_pid))
        with strata.CheckpointManager(place) as manager:
            assert_is_state(manager.load(), 1)
    finally:
        os.kill(int(child_pid), signal.SIGKILL)


def test_an_interrupt_from_the_keyboard_does_not_reach_the_saver(place: str) -> None:
    code, report = run("interrupted", place)
    assert (code, report[0]) == (0, "durable")
    wait_for_end(int(report[1]))


def test_a_trainer_that_exits_without_closing_has_saved(place: str) -> None:
    code, (_, saver_pid) = run("left_without_closing", place)
    assert code == 0
    wait_for_end(int(saver_pid))
    with strata.CheckpointManager(place) as manager:
        assert_is_state(manager.load(), 1)


def test_a_trainer_that_saves_in_a_thread_and_exits_without_closing_has_saved(place: str) -> None:
    assert run("left_a_thread_without_closing", place)[0] == 0
    with strata.CheckpointManager(place) as manager:
        assert_is_state(manager.load(), 1)


def test_a_forked_child_leaves_its_parents_saver_alone(place: str) -> None:
    assert run("forked", place) == (0, ["INCREMENTAL"])


def test_nothing_is_left_in_shared_memory(place: str) -> None:
    def left() -> set[str]:
        found = {path.name for path in staging.shared_directory().glob("strata-*")}
        return {name for name in found if not name.startswith(NODE_CACHE)}  # other tests use them

    before = left()
    _, (_, saver_pid) = run("killed_when_staged", place)
    wait_for_end(int(saver_pid))
    assert left() <= before


@contextlib.contextmanager
def small_manager(place: str) -> Iterator[tuple[strata.CheckpointManager, ProcessSaver]]:
    with strata.CheckpointManager(place, saver="process", statistics=False) as manager:
        assert isinstance(manager._saver, ProcessSaver)
        try:
            yield manager, manager._saver
        finally:
            if manager._saver.pid is not None:  # a failed test may have left it stopped
                with contextlib.suppress(ProcessLookupError):
                    os.kill(manager._saver.pid, signal.SIGCONT)


def test_when_a_saver_is_killed_another_one_writes_the_snapshot(place: str) -> None:
    with small_manager(place) as (manager, saver):
        state = saver_children.state_of(1)
        manager.prepare(state)
        first = stop(saver)
        save = manager.save(state, step=1)
        os.kill(first, signal.SIGKILL)
        assert save.wait(TIMEOUT_S).step == 1
        assert saver.pid != first
        assert_is_state(manager.load(), 1)
        assert len(manager.list()) == 1


def test_a_snapshot_that_kills_two_savers_fails_and_the_next_one_works(place: str) -> None:
    with small_manager(place) as (manager, saver):
        state = saver_children.state_of(1)
        manager.prepare(state)
        save = manager.save(state, step=1)
        killed = set()
        while not save.done:
            pid = saver.pid
            assert pid is not None
            if pid not in killed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                killed.add(pid)
                wait_for_end(pid)
        if save.error is not None:  # unless one of them was faster than us
            assert isinstance(save.error, CheckpointAborted)
            assert "killed by signal 9" in str(save.error)
            save.was_reported = True
        assert manager.save(state, step=2).wait(TIMEOUT_S).step == 2
        assert_is_state(manager.load(), 1)


def stop(saver: ProcessSaver) -> int:
    """Stop the saver, so that it cannot write anything."""
    assert saver.pid is not None
    os.kill(saver.pid, signal.SIGSTOP)
    return saver.pid


def test_after_a_saver_was_killed_the_next_save_is_full(place: str) -> None:
    with small_manager(place) as (manager, saver):
        state = {"emb": np.zeros((10_000, 64), np.float32)}
        manager.save(state, step=1).wait()
        assert saver.pid is not None
        os.kill(saver.pid, signal.SIGKILL)
        wait_for_end(saver.pid)
        state["emb"][5] = 5
        saved = manager.save(state, step=2, checkpoint_type="INCREMENTAL").wait()
        assert saved.checkpoint_type.name == "FULL"
        assert "the saver was restarted" in saved.why
        state["emb"][6] = 6
        saved = manager.save(state, step=3, checkpoint_type="INCREMENTAL").wait()
        assert saved.checkpoint_type.name == "INCREMENTAL"
        assert np.array_equal(manager.load()["emb"], state["emb"])


def test_deltas_and_growing_states_go_through_the_process(place: str) -> None:
    with small_manager(place) as (manager, _):
        for size in (1_000, 100_000, 50):
            state = {"emb": np.zeros((size, 64), np.float32), "size": size}
            manager.save(state, step=size).wait()
            state["emb"][7] = 7
            saved = manager.save(state, step=size + 1, checkpoint_type="INCREMENTAL", dirty={"emb": [7]}).wait()
            assert saved.checkpoint_type.name == ("INCREMENTAL" if size > 50 else "FULL")
            assert np.array_equal(manager.load(id=saved.id)["emb"], state["emb"])


def test_a_failure_in_the_process_keeps_its_type_and_message(place: str) -> None:
    with small_manager(place) as (manager, _):
        manager.save({"a": 1}, step=1).wait()
        for path in sorted(Path(place).rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        Path(place).rmdir()
        Path(place).write_text("in the way")
        with pytest.raises(StorageError, match="choose another key"):
            manager.save({"a": 2}, step=2).wait()
        Path(place).unlink()
        manager.save({"a": 3}, step=3).wait()
        assert manager.load() == {"a": 3}


def test_a_cancelled_save_leaves_nothing(place: str) -> None:
    with small_manager(place) as (manager, saver):
        state = saver_children.state_of(1)
        manager.prepare(state)
        stopped = stop(saver)
        save = manager.save(state, step=1)
        save.cancel()
        os.kill(stopped, signal.SIGCONT)
        with pytest.raises(CheckpointAborted, match="cancelled"):
            save.wait(TIMEOUT_S)
        assert [path for path in Path(place).rglob("*") if path.is_file()] == []


def test_progress_of_the_process_is_reported(place: str) -> None:
    progress = []
    with small_manager(place) as (manager, _):
        save = manager.save(saver_children.state_of(1), step=1, on_progress=progress.append)
        save.wait()
    assert progress[-1].done_bytes >= saver_children.NUM_BYTES
    assert save.progress == 1


def test_where_a_process_is_not_possible_a_thread_saves(place: str) -> None:
    with strata.CheckpointManager(store=MemoryStore()) as manager:
        manager.save({"a": 1}, step=1).wait()
        assert not isinstance(manager._saver, ProcessSaver)
    with pytest.raises(ConfigError, match="store= is an object of this process"):
        strata.CheckpointManager(store=MemoryStore(), saver="process")
    with strata.CheckpointManager(place) as manager:
        assert isinstance(manager._saver, ProcessSaver)
        assert manager._saver.pid is None, "no saver process is started"


def test_shared_memory_works_without_memfd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(staging, "shared_directory", lambda: tmp_path)
    Path(tmp_path, "strata-staging-1-dead").touch()
    held = os.open(tmp_path / "strata-staging-2-alive", os.O_RDWR | os.O_CREAT)
    staging.fcntl.flock(held, staging.fcntl.LOCK_EX)
    try:
        shared = staging.SharedMemory()
        shared.grow(10_000)
        shared.view()[:3] = b"abc"
        shared.grow(100_000)
        assert bytes(shared.view()[:3]) == b"abc", "the memory keeps its contents"
        assert [path.name for path in tmp_path.iterdir()] == ["strata-staging-2-alive"]
        shared.close()
    finally:
        os.close(held)
    assert staging.reap(tmp_path) == 1


def test_a_saver_that_cannot_be_started_fails_one_save_and_blocks_none(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("Too many open files")

    with small_manager(place) as (manager, _):
        with monkeypatch.context() as short:
            short.setattr(client.subprocess, "Popen", refuse)
            save = manager.save({"a": 1}, step=1)
            with pytest.raises(CheckpointAborted, match=r"could not be started \(Too many open files\)"):
                save.wait(TIMEOUT_S)
        assert manager.save({"a": 2}, step=2).wait(TIMEOUT_S).step == 2
        assert manager.load() == {"a": 2}


def test_a_manager_that_was_not_closed_leaves_no_process(place: str) -> None:
    manager = strata.CheckpointManager(place)
    assert isinstance(manager._saver, ProcessSaver)
    manager.save({"a": 1}, step=1).wait()
    pid = manager._saver.pid
    assert pid is not None
    del manager
    gc.collect()
    wait_for_end(pid)


def test_the_last_checkpoint_before_closing_has_statistics(place: str) -> None:
    with strata.CheckpointManager(place) as manager:
        saved = manager.save({"w": np.ones(1_000)}, step=1).wait()
    assert (Path(saved.path) / "statistics.json").exists()


def test_a_saver_that_hangs_is_killed_and_another_one_writes(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.checkpoint.manager.STALL_S", 6.0)  # a new one has to start in it
    with strata.CheckpointManager(place) as manager:
        manager.prepare({"w": np.ones(4)})
        hung = saver_children.saver_of(manager).pid
        assert hung is not None
        os.kill(hung, signal.SIGSTOP)

        assert manager.save({"w": np.ones(4)}, step=1).wait(TIMEOUT_S).step == 1
        assert saver_children.saver_of(manager).pid != hung


def test_a_saver_that_does_not_release_the_memory_is_killed(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CLAIM_TIMEOUT_S", 0.2)
    with strata.CheckpointManager(place) as manager:
        manager.save({"w": np.ones(4)}, step=1).wait(TIMEOUT_S)
        saver = saver_children.saver_of(manager)
        assert saver._free.wait(TIMEOUT_S)
        hung = saver.pid
        assert hung is not None
        saver._free.clear()  # as while statistics are computed
        os.kill(hung, signal.SIGSTOP)

        assert manager.save({"w": np.ones(4)}, step=2).wait(TIMEOUT_S).step == 2
        assert saver.pid != hung


def test_closing_does_not_wait_for_a_saver_that_hangs(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "CLOSE_TIMEOUT_S", 0.2)
    manager = strata.CheckpointManager(place)
    manager.save({"w": np.ones(4)}, step=1).wait(TIMEOUT_S)
    hung = saver_children.saver_of(manager).pid
    assert hung is not None
    os.kill(hung, signal.SIGSTOP)
    try:
        manager.close()
        assert f"saver process {hung}" in caplog.text
    finally:
        os.kill(hung, signal.SIGKILL)
        wait_for_end(hung)
