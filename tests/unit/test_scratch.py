"""Temporary directories are removed with their owner, or soon afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strata.scratch import Scratch

OWNER = """
import sys, time
from pathlib import Path
from strata.scratch import Scratch
place = Scratch("kind-", Path(sys.argv[1]))
(place.path / "file").write_text("something")
print(place.path, flush=True)
time.sleep(60)
"""


def test_a_directory_exists_until_it_is_removed(tmp_path: Path) -> None:
    with Scratch("kind-", tmp_path) as place:
        (place.path / "a" / "b").mkdir(parents=True)
        assert place.path.name.startswith("kind-")
        assert place.path.stat().st_mode & 0o777 == 0o700
        assert list(tmp_path.iterdir()) == [place.path]
    assert list(tmp_path.iterdir()) == []
    place.remove()


def test_the_next_process_removes_directories_of_killed_processes_only(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().strip())
        with Scratch("kind-", tmp_path) as place:
            assert sorted(tmp_path.iterdir()) == sorted([theirs, place.path])
        owner.kill()
    with Scratch("kind-", tmp_path) as place:
        assert list(tmp_path.iterdir()) == [place.path]


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch], ids=["directory", "file"])
def test_a_directory_without_a_lock_is_not_ours_and_stays(tmp_path: Path, make: object) -> None:
    other = tmp_path / "kind-other"
    make(other)  # type: ignore[operator]
    with Scratch("kind-", tmp_path):
        assert other.exists()


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("still here")
    trap = tmp_path / "kind-trap"
    trap.mkdir()
    (trap / "lock").symlink_to(precious)
    with Scratch("kind-", tmp_path):
        assert trap.exists()
    assert precious.read_text() == "still here"
