"""Temporary directories that are cleaned up even after a crash.

The owner of a directory holds a lock file in it. A killed process leaves its directory behind without
the lock; the next process that creates a directory of the same kind removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

from strata.lifecycle import Descriptor

if TYPE_CHECKING:
    from types import TracebackType

NUM_RANDOM = 8
"""Random characters after the prefix of a name."""


class Scratch:
    """A directory that only this user can access; `remove` deletes it."""

    def __init__(self, prefix: str, root: Path | None = None) -> None:
        """Create a directory whose name starts with `prefix`, in `root` or the default temporary directory."""
        root = root or Path(tempfile.gettempdir())
        for abandoned in root.glob(f"{prefix}*"):
            _remove_if_abandoned(abandoned)
        # It gets its final name only once the lock is held, so that no other process takes it for an abandoned one.
        draft = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=root))
        self._lock = Descriptor(os.open(draft / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        with contextlib.suppress(OSError):  # a file system without locks: nothing is ever cleaned up there
            fcntl.flock(self._lock.fd, fcntl.LOCK_EX)
        self.path = draft.rename(root / f"{prefix}{secrets.token_hex(NUM_RANDOM // 2)}")

    def remove(self) -> None:
        """Delete the directory; later calls, and calls in a forked child, do nothing."""
        if self._lock.fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _remove_if_abandoned(directory: Path) -> None:
    with contextlib.suppress(OSError):  # owned by another user, already removed, or still in use
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(fd).st_uid == os.getuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(fd)
