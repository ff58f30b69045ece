"""Checks that runs leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import until

from strata.scratch import Scratch
from strata.transport import sockets


@contextlib.contextmanager
def nothing_is_left(place: Path, *, but: str = "") -> Iterator[None]:
    """Check at the end that the runs in `place` left no process, socket, temporary file or shared memory.

    Files that a killed agent could not remove are removed by the next agent, whatever its run. `but` is a pattern of
    temporary files of the script or of Ray, which are ignored.
    """
    memory_before = shared_memory()
    with (
        tempfile.TemporaryDirectory(prefix="runs-", dir="/tmp") as temporary,  # so that paths of sockets are short
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", temporary)
        patch.setattr(tempfile, "tempdir", None)  # clears the cached directory of this process
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(place / "inductor"))  # else torch puts it among temporary files
        yield
        until(lambda: not processes_with(f"STRATA_RUNS_DIR={place}"), "no process is left")
        Scratch(sockets.PREFIX, Path(temporary)).remove()
        left = [path for path in Path(temporary).iterdir() if not path.match(but or "-")]
        assert not left, left
    until(
        lambda: all(map(is_in_use, shared_memory() - memory_before)),
        "no shared memory is left",
    )


def shared_memory() -> set[Path]:
    return set(Path("/dev/shm").iterdir())


def is_in_use(path: Path) -> bool:
    """Return whether any process uses the file; other tests run at the same time."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has exited
                if str(path) in (entry / "maps").read_text():
                    return True
                if any(os.path.realpath(each) == str(path) for each in (entry / "fd").iterdir()):
                    return True
    return not path.exists()


def processes_with(text: str) -> list[int]:
    """Return the processes whose environment contains this text: everything that a run has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if text.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
