"""The port `Store`, and what its implementations share: key checks, progress and cancellation, a thread pool.

A store keeps objects under keys such as `a/b/c`. The docstring of `Store` states what every implementation promises
about durability and concurrency; `tests/contract/store_contract.py` checks it.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from strata.errors import InvalidArgument, TransferCancelled
from strata.lifecycle import Home, renewed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

MAX_KEY_BYTES = 1_000
MAX_PART_BYTES = 255
"""The limit of file systems for one path component."""
TEMPORARY = ".tmp-"
"""Prefix of files that are being written and are not objects yet. Keys must not use it."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One object in a listing."""

    key: str
    size_bytes: int
    modified_at_s: float


@dataclass(slots=True)
class Watch:
    """Progress of a long transfer, and its cancellation. May be shared between threads."""

    on_progress: Callable[[int], None] = lambda _num_bytes: None
    """Called with the number of bytes of each finished piece, in any thread."""
    on_cancel: Callable[[], None] = lambda: None
    """Called by `cancel`, for transfers that do not poll `check`."""
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def advance(self, num_bytes: int) -> None:
        self.on_progress(num_bytes)

    def without_progress(self) -> Watch:
        """Return a watch with the same cancellation that does not report progress."""
        return Watch(_cancelled=self._cancelled)

    def cancel(self) -> None:
        self._cancelled.set()
        self.on_cancel()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def check(self) -> None:
        """Raise if the transfer was cancelled.

        Raises:
            TransferCancelled: `cancel` was called.
        """
        if self._cancelled.is_set():
            raise TransferCancelled("the transfer was cancelled")


class Store(Protocol):
    """Objects under keys such as `a/b/c`. Every method may be called from several threads at once.

    - Once `put` or `put_large` returns, the object survives a crash of the process and of the machine.
    - Writes are atomic: a reader never sees half an object, and an interrupted write leaves nothing that `walk` lists.
    - Of any number of concurrent `put(if_absent=True)` calls for one key, exactly one succeeds.
    - `walk` and `read_into` see every object that was put before they began.

    Raises:
        StorageError: The subclass names the cause. Transient failures have been retried before it is raised.
    """

    url: str
    """The location as a user would write it."""

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        """Write a small object.

        Raises:
            ObjectExists: `if_absent` is set, and an object has this key.
        """
        ...

    def put_large(self, key: str, data: memoryview, *, watch: Watch | None = None) -> None:
        """Write a large object in parallel pieces. `data` must not change until the call returns.

        Raises:
            TransferCancelled: `watch` was cancelled.
        """
        ...

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Return a small object.

        Raises:
            ObjectMissing: No object has this key.
            StorageError: The object is larger than `max_bytes`.
        """
        ...

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes that start at `offset`.

        Raises:
            ObjectMissing: No object has this key.
            StorageError: The object ends before `out` is full.
        """
        ...

    def size(self, key: str) -> int:
        """Return the size of an object in bytes.

        Raises:
            ObjectMissing: No object has this key.
        """
        ...

    def walk(self, prefix: str = "") -> Iterator[Listed]:
        """List all objects whose keys begin with `prefix/`, or all objects, sorted by key."""
        ...

    def children(self, prefix: str = "") -> list[str]:
        """Return the sorted names of the directories directly below `prefix`, without objects."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. Keys without an object are ignored."""
        ...

    def close(self) -> None: ...


def check_key(key: str) -> str:
    """Return the key if every store accepts it.

    Raises:
        InvalidArgument: The key would lead out of the store, or stores would interpret it differently.
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts):
        why = "write it as a/b/c, without empty parts, '.' or '..'"
    elif any(ord(character) < 32 or character in "\\\x7f" or 0xD800 <= ord(character) < 0xE000 for character in key):
        why = "remove control characters, backslashes and invalid Unicode"
    elif any(part.startswith(TEMPORARY) for part in parts):
        why = f"names that begin with {TEMPORARY} are reserved for temporary files"
    elif len(key.encode()) > MAX_KEY_BYTES or max(len(part.encode()) for part in parts) > MAX_PART_BYTES:
        why = f"shorten it to {MAX_KEY_BYTES} bytes, and to {MAX_PART_BYTES} bytes between two slashes"
    else:
        return key
    raise InvalidArgument(f"{key[:80]!r} is not a valid key; {why}", field="key")


def check_offset(offset: int) -> int:
    """Return the offset if it is not negative.

    Raises:
        InvalidArgument: It is.
    """
    if offset < 0:
        raise InvalidArgument(f"offset={offset} is negative; objects begin at 0", field="offset")
    return offset


def byte_view(data: Any) -> memoryview:
    """Return a contiguous buffer as a view of bytes."""
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


# -- threads -------------------------------------------------------------------------------------------------------


P = ParamSpec("P")
T = TypeVar("T")


class Pool:
    """Threads that start on first use, so that a closed or forked store can be used again."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._lock = renewed(threading.Lock())
        self._threads: ThreadPoolExecutor | None = None
        self._home = Home()

    def submit(self, work: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> Future[T]:
        with self._lock:
            if self._threads is None or not self._home.is_here:
                self._home = Home()
                self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix=self._name)
            return self._threads.submit(work, *arguments, **more)

    def shutdown(self) -> None:
        """Wait for all work and end the threads. The next `submit` starts new ones."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None and self._home.is_here:
            threads.shutdown()
