"""Sockets have short paths, wherever temporary files are."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from strata.transport import sockets


@pytest.mark.parametrize("depth", [0, 60, 200])
def test_a_socket_fits_wherever_temporary_files_are(
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
def test_it_is_where_temporary_files_are_as_long_as_it_fits_there(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t-") as base:
        root = Path(base) / ("d" * (length - len(base) - 1))
        root.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(root))
        with sockets.place() as place:
            longest = place.path / ("n" * (sockets.MAX_NAME - 1))
            assert len(bytes(longest)) <= sockets.MAX_PATH
            would_fit = length + len(bytes(longest)) - len(bytes(place.path.parent)) <= sockets.MAX_PATH
            assert (place.path.parent == root) == would_fit
