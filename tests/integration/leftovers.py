"""What runs must not leave behind, for tests that start some."""

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
    """Of runs whose directories are in `place`, when it ends: no process, no socket or other temporary file, no shared
    memory. What an agent that was killed could not remove is removed by the next one, of whatever run.

    `but`: a pattern of temporary files that are not ours, but the script's own, or Ray's.
    """
    memory_before = shared_memory()
    with (
        tempfile.TemporaryDirectory(prefix="runs-", dir="/tmp") as temporary,  # where paths of sockets are short
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", temporary)
        patch.setattr(tempfile, "tempdir", None)  # where this process has found its own, which it remembers
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(place / "inductor"))  # else torch keeps one among temporary files
        yield
        until(lambda: not processes_with(f"STRATA_RUNS_DIR={place}"), "nobody is left")
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
    """By any process. Other tests run at the same time."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                if str(path) in (entry / "maps").read_text():
                    return True
                if any(os.path.realpath(each) == str(path) for each in (entry / "fd").iterdir()):
                    return True
    return not path.exists()


def processes_with(text: str) -> list[int]:
    """Those whose environment holds this text: all that a run has started, whatever they have become."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if text.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
