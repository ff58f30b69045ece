"""Sockets: a directory with a short enough path for Unix sockets, a lock for those at fixed paths, and the options of
TCP connections.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from pathlib import Path

from strata.errors import ConfigError
from strata.lifecycle import Descriptor
from strata.scratch import NUM_RANDOM, Scratch

MAX_PATH = 107
"""Bytes in the path of a socket; the limit of Linux."""
MAX_NAME = 24
"""Bytes reserved for the socket's name in the directory, including the slash."""
PREFIX = "strata-sockets-"
SHORT = "/tmp"  # noqa: S108 - it only holds a directory with mode 0700


def tune(sock: socket.socket, *, gone_after_s: float) -> None:
    """Disable Nagle's algorithm, and detect a vanished peer within `gone_after_s`, even on an idle connection."""
    if sock.family == socket.AF_UNIX:
        return
    with contextlib.suppress(OSError):  # some systems lack some options
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(gone_after_s * 1_000))
            pause_s = max(round(gone_after_s / 2), 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)


def place() -> Scratch:
    """Create a private directory for sockets."""
    room = MAX_PATH - MAX_NAME - NUM_RANDOM - len(f"/{PREFIX}")
    is_long = len(tempfile.gettempdir().encode()) > room
    return Scratch(PREFIX, Path(SHORT) if is_long else None)


class SocketLock:
    """The exclusive right to serve a Unix socket, until `release` or process exit.

    Binding a socket's path silently takes it away from the process that serves there. Each server therefore locks a
    file beside the socket, which contains its process id. The kernel releases the lock of a killed process, so a socket
    left behind can be bound again.
    """

    def __init__(self, path: str, *, field: str) -> None:
        """Take the lock.

        Raises:
            ConfigError: Another process serves there, or the lock file cannot be created. Names `field`.
        """
        self._path = Path(f"{path}.lock")
        fd = -1
        try:
            while fd < 0:
                fd = self._locked()
        except BlockingIOError:
            raise ConfigError(
                f"{field}='unix:{path}' is served by {self._holder()}; stop it or choose another path", field=field
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{field}='unix:{path}' cannot be locked with {self._path} ({error.strerror}); choose another path",
                field=field,
            ) from error
        self._descriptor = Descriptor(fd)

    def release(self) -> None:
        """Release the lock; later calls do nothing. In a forked child, does nothing: the parent holds the lock."""
        if self._descriptor.fd >= 0:
            self._path.unlink(missing_ok=True)  # while the lock is held
        self._descriptor.close()

    def _locked(self) -> int:
        """Return the locked file, or -1 if its owner removed it just now."""
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
