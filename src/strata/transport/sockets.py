"""Unix sockets: a directory whose path is short enough for them, and a lock for those that have a fixed path."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

from strata.errors import ConfigError
from strata.lifecycle import Descriptor
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
        fd = -1
        try:
            while fd < 0:
                fd = self._locked()
        except BlockingIOError:
            raise ConfigError(
                f"{field}='unix:{path}' is served by {self._holder()}; stop it, or choose another path", field=field
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{field}='unix:{path}' cannot be locked with {self._path} ({error.strerror}); choose another path",
                field=field,
            ) from error
        self._descriptor = Descriptor(fd)

    def release(self) -> None:
        """May be called again; does nothing in a forked child, whose parent has the lock."""
        if self._descriptor.fd >= 0:
            self._path.unlink(missing_ok=True)  # while it is locked, so it is ours
        self._descriptor.close()

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
