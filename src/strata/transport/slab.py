"""Shared memory of fixed size, which a process passes to another one over a Unix socket."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

MAX_BYTES = 1 << 36
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Slab:
    """Shared memory of fixed size without a name: it disappears with the last process that has it.

    Its size is sealed, so that no peer can shrink it under another one, which would end that process with SIGBUS.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        self._closing = threading.Lock()
        self._memory = mmap.mmap(fd, num_bytes)
        self.array: Bytes = np.frombuffer(self._memory, np.uint8)
        self._start = self.array.ctypes.data

    @classmethod
    def create(cls, num_bytes: int) -> Self:
        fd = os.memfd_create("strata-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def received(cls, fd: int) -> Self:
        """Map the slab of a peer.

        Raises:
            ValueError: It is something else, or its size can change.
        """
        slab = None
        with contextlib.suppress(OSError):  # not a memfd
            num_bytes = os.fstat(fd).st_size
            is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            slab = cls(fd, num_bytes) if is_sealed and 0 < num_bytes <= MAX_BYTES else None
        if slab is None:
            os.close(fd)
            raise ValueError("this is not memory of a sealed size")
        return slab

    def offset_of(self, buffer: Bytes) -> int | None:
        """Return where a buffer starts in this slab; None if it is not in it."""
        offset = buffer.ctypes.data - self._start
        return offset if 0 <= offset <= self.num_bytes - buffer.nbytes else None

    def view(self, offset: int, num_bytes: int) -> Bytes:
        return self.array[offset : offset + num_bytes]

    def close(self) -> None:
        """Close our descriptor, whichever thread comes first. The memory stays mapped until its last view is gone."""
        with self._closing:
            fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
