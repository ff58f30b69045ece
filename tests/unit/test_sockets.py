"""Sockets have short paths, wherever temporary files are."""

from __future__ import annotations

import shutil
import socket
import tempfile
from pathlib import Path

import pytest

from strata.transport import sockets


@pytest.mark.parametrize("depth", [0, 60, 200])
def test_a_socket_fits_wherever_temporary_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    place = tmp_path / ("d" * depth)
    place.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    made = sockets.make_directory("strata-run-")
    try:
        assert made.stat().st_mode & 0o777 == 0o700
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(made / "coordinator.sock"))
        assert list(place.iterdir()) in ([], [made])
    finally:
        shutil.rmtree(made)
