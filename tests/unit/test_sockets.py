"""Sockets have short paths, whatever the temporary directory."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from strata.errors import ConfigError
from strata.transport import sockets


@pytest.mark.parametrize("depth", [0, 60, 200])
def test_a_socket_path_fits_whatever_the_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    root = tmp_path / ("d" * depth)
    root.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    with sockets.place() as place:
        assert place.path.stat().st_mode & 0o777 == 0o700
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(place.path / "coordinator.sock"))
        assert list(root.iterdir()) in ([], [place.path])
    assert not place.path.exists()


@pytest.mark.parametrize("length", range(50, 66))
def test_a_socket_is_in_the_temporary_directory_if_it_fits(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t-") as base:
        root = Path(base) / ("d" * (length - len(base) - 1))
        root.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(root))
        with sockets.place() as place:
            longest = place.path / ("n" * (sockets.MAX_NAME - 1))
            assert len(bytes(longest)) <= sockets.MAX_PATH
            would_fit = length + len(bytes(longest)) - len(bytes(place.path.parent)) <= sockets.MAX_PATH
            assert (place.path.parent == root) == would_fit


def test_a_socket_is_served_by_one_process_and_the_error_names_it(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    lock = sockets.SocketLock(path, field="listen")
    with pytest.raises(ConfigError, match=rf"listen='unix:.*s\.sock' is served by process {os.getpid()}; stop it"):
        sockets.SocketLock(path, field="listen")
    lock.release()
    sockets.SocketLock(path, field="listen").release()
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_does_not_keep_its_parents_lock(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    lock = sockets.SocketLock(path, field="listen")
    asleep, wake = os.pipe()
    child = os.fork()
    if not child:
        os.read(asleep, 1)
        os._exit(0)
    try:
        lock._descriptor.close()  # like the kernel when the parent is killed: the file stays
        lock._fd = -1
        until(lambda: is_free(path), "the child has let go")
    finally:
        os.write(wake, b"x")
        os.waitpid(child, 0)


def until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.005)


def is_free(path: str) -> bool:
    try:
        sockets.SocketLock(path, field="listen").release()
    except ConfigError:
        return False
    return True


def test_a_lock_that_cannot_be_created_gives_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be locked with .*No such file"):
        sockets.SocketLock(str(tmp_path / "missing" / "s.sock"), field="listen")
