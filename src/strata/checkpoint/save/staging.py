"""Staging: `save()` copies the state into warm memory, laid out as the data file will be.

Fresh pages cost more than the copy into them, so the memory is kept from one save to the next and only grows. It is
page-aligned, so that it can be written as it is. It holds one snapshot at a time: the next save waits until the last
snapshot is written. The snapshot stays in memory, so that the next one can be compared with it.

The memory is private, or shared with the saver process. Shared memory has no name, only descriptors: it lives as long
as one of its owners, and nothing remains when the last one is killed. On Linux it is a memfd, whatever the size of
/dev/shm; elsewhere it is a file that is unlinked as soon as it is open. A process killed between these two moments
leaves an empty file, which the next start removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import secrets
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from strata.checkpoint.format.buffers import aligned_memory, copy_strided, raw_bytes
from strata.checkpoint.format.layout import ALIGNMENT
from strata.checkpoint.save import delta
from strata.checkpoint.save.delta import finish_all
from strata.lifecycle import renewed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from strata.checkpoint.format.buffers import Bytes
    from strata.checkpoint.format.layout import Layout, Place
    from strata.checkpoint.format.tree import Leaf

_NAME = "strata-staging-"


class Memory(Protocol):
    """Page-aligned memory that can grow."""

    keeps_contents: bool
    """Whether `grow` keeps the contents."""

    @property
    def size_bytes(self) -> int: ...

    def grow(self, num_bytes: int) -> None:
        """Grow to at least this size. Earlier views stay on the old memory."""
        ...

    def view(self) -> memoryview: ...

    def close(self) -> None: ...


class PrivateMemory:
    """Memory of this process only."""

    keeps_contents = False

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None

    @property
    def size_bytes(self) -> int:
        return len(self._map) if self._map is not None else 0

    def grow(self, num_bytes: int) -> None:
        self._map = None  # first, so that two never exist at once
        self._map = aligned_memory(num_bytes)

    def view(self) -> memoryview:
        assert self._map is not None
        return memoryview(self._map)

    def close(self) -> None:
        self._map = None


class SharedMemory:
    """Memory behind a descriptor that another process may hold too."""

    keeps_contents = True

    def __init__(self) -> None:
        self._fd = -1
        self._map: mmap.mmap | None = None

    @property
    def fd(self) -> int:
        """The descriptor, created on first use: a manager that only loads needs none."""
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
        self._map = None  # remaining views keep the pages
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def nameless_file() -> int:
    """Return a descriptor of memory that is freed when its last owner exits."""
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
    """Return /dev/shm if it is writable, else the directory for temporary files."""
    shm = Path("/dev/shm")  # noqa: S108 - its purpose
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def reap(directory: Path) -> int:
    """Remove files of dead owners; return their number. A live owner holds a lock or has unlinked its file."""
    num_reaped = 0
    for path in directory.glob(f"{_NAME}*"):
        with contextlib.suppress(OSError):  # removed meanwhile, owned by another user, or locked
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                num_reaped += 1
            finally:
                os.close(fd)
    return num_reaped


NUM_THREADS = 2
PIECE_BYTES = 16 << 20
_SMALL_BYTES = 1 << 20
"""Smaller tensors are copied in groups: submitting one to a thread costs more than copying it."""


class Staging:
    """The staged snapshot and the threads that copy it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._places: tuple[Place, ...] = ()
        """The places of the tensors of the staged snapshot; empty if there is none."""
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="strata-stage")

    def reserve(self, num_bytes: int) -> None:
        """Allocate memory and touch its pages, so that the first save is as fast as later ones."""
        had = self._memory.size_bytes
        if num_bytes <= had:
            return
        self._memory.grow(num_bytes)
        if not self._memory.keeps_contents:
            had, self._places = 0, ()
        pages = np.frombuffer(self._memory.view(), np.uint8)[had:]
        step = max(len(pages) // (4 * NUM_THREADS) // ALIGNMENT * ALIGNMENT, ALIGNMENT)
        starts = range(0, len(pages), step)
        list(self._pool.map(lambda start: pages[start : start + step : ALIGNMENT].fill(0), starts))

    def fill(self, layout: Layout, leaves: Sequence[Leaf]) -> None:
        """Copy a snapshot as the bytes of its file. The caller may change its tensors afterwards."""
        self.reserve(layout.size_bytes)
        self._places = ()
        view = self._memory.view()[: layout.size_bytes]
        view[: len(layout.header)] = layout.header
        target = np.frombuffer(view, np.uint8)
        by_name = {leaf.name: leaf for leaf in leaves}
        tasks: list[Callable[[], None]] = []
        small: list[tuple[Leaf, int]] = []
        for place in layout.places:
            leaf = by_name[place.name]
            if place.num_bytes < _SMALL_BYTES:
                small.append((leaf, place.offset))
            else:
                tasks += _copies(leaf, target[place.offset : place.end])
        per_task = max(len(small) // (4 * NUM_THREADS), 64)
        tasks += [_copy_many(small[i : i + per_task], target) for i in range(0, len(small), per_task)]
        finish_all([self._pool.submit(task) for task in tasks])
        self._places = layout.places

    def forget(self) -> None:
        """Drop the snapshot: it was not submitted, or the state changed otherwise, so it is no base for a delta."""
        self._places = ()

    @property
    def has_snapshot(self) -> bool:
        return bool(self._places)

    def has_snapshot_like(self, layout: Layout) -> bool:
        """Return whether the memory holds a snapshot with the same tensors at the same places."""
        return bool(layout.places) and self._places == layout.places

    def update(
        self, layout: Layout, leaves: Sequence[Leaf], dirty: Mapping[str, delta.Rows]
    ) -> dict[str, delta.Changes]:
        """Copy what differs from the staged snapshot; return the changed units of each tensor."""
        self._places = ()
        view = self._memory.view()[: layout.size_bytes]
        view[: len(layout.header)] = layout.header
        changed = delta.stage_changes(self._pool, layout, leaves, np.frombuffer(view, np.uint8), dirty)
        self._places = layout.places
        return changed

    def close(self) -> None:
        self._pool.shutdown()


def _copies(leaf: Leaf, target: Bytes) -> list[Callable[[], None]]:
    source = raw_bytes(leaf)
    if source is None:
        return [lambda: copy_strided(leaf, target)]

    def copy(start: int, source: Bytes) -> None:
        np.copyto(target[start : start + PIECE_BYTES], source[start : start + PIECE_BYTES])

    return [
        lambda start=start: copy(start, source)  # type: ignore[misc]  # mypy does not see the default's type
        for start in range(0, len(source), PIECE_BYTES)
    ]


def _copy_many(leaves: Sequence[tuple[Leaf, int]], target: Bytes) -> Callable[[], None]:
    def copy() -> None:
        for leaf, offset in leaves:
            num_bytes = leaf.num_bytes
            if not num_bytes:
                continue
            piece = target[offset : offset + num_bytes]
            source = raw_bytes(leaf)
            if source is None:
                copy_strided(leaf, piece)
            else:
                piece[:] = source

    return copy


# -- garbage collection --------------------------------------------------------------------------------------------


_lock = renewed(threading.Lock())
_num_pausing = 0


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the garbage collector, which would scan thousands of new objects of which none is garbage.

    A state with 20,000 tensors is flattened in half the time. A collector that the program has disabled stays disabled.
    """
    global _num_pausing  # noqa: PLW0603 - the process has one collector
    if not gc.isenabled() and not _num_pausing:
        yield
        return
    with _lock:
        _num_pausing += 1
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            _num_pausing -= 1
            if not _num_pausing:
                gc.enable()


def _resume_in_child() -> None:
    """Resume the collector in a forked child: the threads that paused it do not exist there."""
    global _num_pausing  # noqa: PLW0603
    if _num_pausing:
        _num_pausing = 0
        gc.enable()


os.register_at_fork(after_in_child=_resume_in_child)
