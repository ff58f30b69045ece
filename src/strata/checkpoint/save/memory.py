"""Memory that a snapshot is staged in: private, or shared with the process that writes it.

Shared memory has no name, only descriptors: it lives as long as one of its owners does, and nothing is left of it when
the last one is killed. `memfd` gives such memory on Linux, whatever the size of /dev/shm; elsewhere it is a file that
loses its name as soon as it is open. Whoever is killed between these two moments leaves an empty file: the next start
removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import tempfile
from pathlib import Path
from typing import Protocol

from strata.checkpoint.format.buffers import aligned_memory
from strata.checkpoint.format.layout import ALIGNMENT

_NAME = "strata-staging-"


class Memory(Protocol):
    keeps_contents: bool
    """When it grows."""

    @property
    def size_bytes(self) -> int: ...

    def grow(self, num_bytes: int) -> None:
        """To at least so many; views from before are of the old memory."""
        ...

    def view(self) -> memoryview: ...

    def close(self) -> None: ...


class PrivateMemory:
    keeps_contents = False

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None

    @property
    def size_bytes(self) -> int:
        return len(self._map) if self._map is not None else 0

    def grow(self, num_bytes: int) -> None:
        self._map = None  # before the new one: never two of them at once
        self._map = aligned_memory(num_bytes)

    def view(self) -> memoryview:
        assert self._map is not None
        return memoryview(self._map)

    def close(self) -> None:
        self._map = None


class SharedMemory:
    """By a descriptor that another process has, too."""

    keeps_contents = True

    def __init__(self) -> None:
        self._fd = -1
        self._map: mmap.mmap | None = None

    @property
    def fd(self) -> int:
        """Made when it is first wanted: who only loads needs none."""
        if self._fd < 0:
            self._fd = nameless_file()
        return self._fd

    @property
    def size_bytes(self) -> int:
        return len(self._map) if self._map is not None else 0

    def grow(self, num_bytes: int) -> None:
        size = max(-(-num_bytes // ALIGNMENT) * ALIGNMENT, os.fstat(self.fd).st_size)
        os.ftruncate(self.fd, size)
        self._map = mmap.mmap(self.fd, size)

    def view(self) -> memoryview:
        assert self._map is not None
        return memoryview(self._map)

    def close(self) -> None:
        self._map = None  # whoever still has a view of it keeps the pages
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def nameless_file() -> int:
    """A descriptor of memory that goes when its owners do."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):
            return os.memfd_create("strata-staging", os.MFD_CLOEXEC)
    directory = shared_directory()
    reap(directory)
    path = directory / f"{_NAME}{os.getpid()}-{secrets.token_hex(8)}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    path.unlink(missing_ok=True)
    return fd


def shared_directory() -> Path:
    """In memory where there is such a directory, else where temporary files go."""
    shm = Path("/dev/shm")  # noqa: S108 - its purpose
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def reap(directory: Path) -> int:
    """Removes files of dead owners; gives how many. A live one holds a lock, or has given up the name already."""
    num_reaped = 0
    for path in directory.glob(f"{_NAME}*"):
        with contextlib.suppress(OSError):  # gone meanwhile, another user's, or locked
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                num_reaped += 1
            finally:
                os.close(fd)
    return num_reaped
