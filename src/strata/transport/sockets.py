"""Unix sockets: a directory whose path is short enough for them, and a lock for those that have a fixed path."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import weakref
from pathlib import Path

from strata.errors import ConfigError
from strata.scratch import NUM_RANDOM, Scratch

MAX_PATH = 107
"""Of a socket, in bytes; Linux has no room for more."""
MAX_NAME = 24
"""Of a socket within the directory, with the slash."""
PREFIX = "strata-sockets-"
SHORT = "/tmp"  # noqa: S108 - a directory is made in it that only its user can enter


def place() -> Scratch:
    """A new one."""
    room = MAX_PATH - MAX_NAME - NUM_RANDOM - len(f"/{PREFIX}")
    is_long = len(tempfile.gettempdir().encode()) > room
    return Scratch(PREFIX, Path(SHORT) if is_long else None)


class SocketLock:
    """The right to serve a Unix socket, until `release` or the end of the process.

    A process that binds a socket's path takes it from the one that serves there, and neither of them notices. So each
    holds a lock on a file beside it, which names the process. The kernel drops the lock of a process that was killed,
    so a socket that was left behind is simply bound again.
    """

    def __init__(self, path: str, *, field: str) -> None:
        """
        Raises:
            ConfigError: Another process serves there, or the lock cannot be made; it names `field`.
        """
        self._path = Path(f"{path}.lock")
        self._fd = -1
        try:
            while self._fd < 0:
                self._fd = self._locked()
        except BlockingIOError:
            raise ConfigError(
                f"{field}='unix:{path}' is served by {self._holder()}; stop it, or choose another path", field=field
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{field}='unix:{path}' cannot be locked with {self._path} ({error.strerror}); choose another path",
                field=field,
            ) from error
        _held.add(self)

    def release(self) -> None:
        """May be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._path.unlink(missing_ok=True)  # while it is locked: nobody else's can be meant
            os.close(fd)

    def forget(self) -> None:
        """For a forked child: the lock is its parent's, for as long as any process has the file open."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _locked(self) -> int:
        """The locked file; below 0: its owner removed it in this moment."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), self._path.stat()):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return -1

    def _holder(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            return f"process {int(self._path.read_text())}"
        return "another process"


_held: weakref.WeakSet[SocketLock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)
