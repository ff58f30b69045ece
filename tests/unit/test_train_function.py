"""Functions that run on workers: files, permissions and errors."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from strata.errors import ConfigError, InvalidArgument, LimitExceeded, RunFailed
from strata.identity import Identity
from strata.launch.environment import WorkerSpec, worker_environment
from strata.train import function as calling
from strata.train.function import Call, read_call, read_error, read_result, write_call
from strata.train.function_run import preload_of


@pytest.fixture
def call_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Restore the search path afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "call" / calling.FUNCTION


@pytest.fixture
def work(call_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], Path]:
    """Act as a worker of attempt 3, rank 1; return the directory of results."""

    def run(function: Callable[..., Any]) -> Path:
        write_call(call_path, Call(function, (), {}))
        worker_spec = WorkerSpec(
            identity=Identity(
                run="r", attempt=3, rank=1, world_size=2, local_rank=1, local_world_size=2, master_port=1
            ),
            coordinator="",
            checkpoints="",
        )
        for name, value in worker_environment(worker_spec).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["calling", str(call_path)])
        calling.main()
        return call_path.parent

    return run


def test_a_function_of_this_very_test_arrives_with_its_arguments_and_search_path(
    call_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset = 40
    sys.path.insert(0, "/first")
    write_call(call_path, Call(lambda x, *, y: x + y + offset, (1,), {"y": 1}))
    theirs = [*sys.path]
    monkeypatch.setattr(sys, "path", ["/other"])
    call = read_call(call_path)

    assert call.function(*call.args, **call.kwargs) == 42
    assert sys.path == list(dict.fromkeys([*theirs, "/other"]))


def test_a_worker_without_the_run_directory_reports_it(call_path: Path, work: Any) -> None:
    work(int)
    shutil.rmtree(call_path.parent)
    with pytest.raises(ConfigError, match=r"is not on this machine; .* set STRATA_RUNS_DIR"):
        calling.main()


def test_only_this_user_can_read_the_files(call_path: Path, work: Any) -> None:
    before = os.umask(0)
    try:
        work(lambda: 1)
    finally:
        os.umask(before)

    assert call_path.parent.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in call_path.parent.iterdir()} == {0o600}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_files_that_others_can_write_or_read_are_not_loaded(call_path: Path, mode: int) -> None:
    write_call(call_path, Call(print, (), {}))
    call_path.chmod(mode)

    with pytest.raises(ConfigError, match=r"does not belong to this user alone.*STRATA_RUNS_DIR"):
        read_call(call_path)


def test_a_link_is_not_followed(call_path: Path) -> None:
    write_call(call_path, Call(print, (), {}))
    link = call_path.with_name("link")
    link.symlink_to(call_path)

    with pytest.raises(OSError, match="symbolic link"):
        read_call(link)


def test_what_cannot_be_pickled_is_named_and_leaves_no_file(call_path: Path) -> None:
    lock = threading.Lock()
    for call, named in (
        (Call(max, (1, lock), {}), "argument 2 of max, a lock,"),
        (Call(max, (1,), {"key": lock}), "argument 'key' of max, a lock,"),
        (Call(lambda: lock, (), {}), "the function test_what_cannot.*, with the globals that it uses,"),
    ):
        with pytest.raises(InvalidArgument, match=f"{named} cannot be pickled for the workers.*inside the function"):
            write_call(call_path, call)
    assert list(call_path.parent.iterdir()) == []


def test_a_call_that_is_too_large_is_refused_with_the_cure(call_path: Path) -> None:
    with pytest.raises(LimitExceeded, match="exceed 1 MiB; write large objects to a file"):
        write_call(call_path, Call(len, (bytes(1 << 20),), {}, max_bytes=1 << 20))
    assert list(call_path.parent.iterdir()) == []


def test_without_cloudpickle_the_error_names_the_install_command(
    call_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)

    with pytest.raises(ConfigError, match=r"strata-runtime\[functions\]"):
        write_call(call_path, Call(len, (), {}))


def test_a_result_is_that_of_its_rank_and_attempt(work: Any) -> None:
    directory = work(lambda: {"loss": 0.5})

    assert read_result(directory, 3, 1) == {"loss": 0.5}
    for attempt, rank in ((2, 1), (3, 0)):
        with pytest.raises(RunFailed, match=f"rank {rank} exited without a result; let the function return"):
            read_result(directory, attempt, rank)


def test_a_result_that_cannot_be_stored_does_not_fail_the_worker(work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = work(threading.Lock)
    with pytest.raises(RunFailed, match=r"a lock, cannot be pickled.*return its path"):
        read_result(directory, 3, 1)

    monkeypatch.setattr(calling, "MAX_RESULT_BYTES", 1 << 20)
    directory = work(lambda: bytes(1 << 20))
    with pytest.raises(RunFailed, match=r"exceeds 1 MiB; save it"):
        read_result(directory, 3, 1)


def test_a_function_that_raises_leaves_its_traceback_without_our_frames(work: Any, call_path: Path) -> None:
    def train() -> None:
        raise KeyError("row 7")

    with pytest.raises(KeyError):
        work(train)
    error = read_error(call_path.parent, 3, 1)

    assert error.startswith("Traceback (most recent call last):\n")
    assert error.endswith("KeyError: 'row 7'")
    assert "in train" in error
    assert "strata/train/function.py" not in error


def test_a_module_that_a_worker_cannot_import_is_named(call_path: Path, tmp_path: Path) -> None:
    module = tmp_path / "only_here_for_a_moment.py"
    module.write_text("def train():\n    pass\n")
    sys.path.append(str(tmp_path))
    import only_here_for_a_moment  # type: ignore[import-not-found]

    write_call(call_path, Call(only_here_for_a_moment.train, (), {}))
    del sys.modules["only_here_for_a_moment"]
    module.unlink()

    with pytest.raises(ConfigError, match=r"cannot load the function in a worker \(ModuleNotFoundError.*only_here"):
        read_call(call_path)


def test_an_unreadable_result_raises_run_failed(work: Any) -> None:
    directory = work(lambda: 1)
    result = directory / "attempt-003-rank-1.result"
    result.write_bytes(b"no pickle")

    with pytest.raises(RunFailed, match="cannot read the result of rank 1"):
        read_result(directory, 3, 1)


def test_what_a_function_needs_is_known_also_of_a_partial_one() -> None:
    def plain() -> None:
        import torch  # noqa: F401

    def named() -> None: ...

    named.preload = ("strata.trainer.work",)  # type: ignore[attr-defined]

    assert "torch" in preload_of(partial(partial(plain)))
    assert "strata.trainer.work" in preload_of(partial(named))
    assert "strata.trainer.work" not in preload_of(plain)
