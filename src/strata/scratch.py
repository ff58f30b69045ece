"""Temporary directories that do not outlive their owner for long.

Whoever has one holds a lock in it. A process that is killed cannot remove its own; but nobody holds that lock any more,
so the next process that makes one of the same kind removes it.
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
"""Characters that a name has behind its prefix."""


class Scratch:
    """A directory that only this user can enter, until `remove`."""

    def __init__(self, prefix: str, root: Path | None = None) -> None:
        """`prefix` is the kind. `root`: where temporary files go, unless another place is named."""
        root = root or Path(tempfile.gettempdir())
        for left in root.glob(f"{prefix}*"):
            _remove_if_left(left)
        # It has its name only when its lock is held: nobody takes it for one that is left.
        draft = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=root))
        self._lock = Descriptor(os.open(draft / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        with contextlib.suppress(OSError):  # a file system without locks: nobody can take it for one that is left
            fcntl.flock(self._lock.fd, fcntl.LOCK_EX)
        self.path = draft.rename(root / f"{prefix}{secrets.token_hex(NUM_RANDOM // 2)}")

    def remove(self) -> None:
        """May be called again. Does nothing in a forked child: the directory is its parent's."""
        if self._lock.fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _remove_if_left(place: Path) -> None:
    with contextlib.suppress(OSError):  # another user's, just removed, or its owner lives
        fd = os.open(place / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(fd).st_uid == os.getuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(place, ignore_errors=True)
        finally:
            os.close(fd)
