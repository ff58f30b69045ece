"""The port that every store implements, and what it promises."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from strata.errors import CheckpointAborted, InvalidArgument
from strata.lifecycle import Home, renewed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

MAX_KEY_BYTES = 1_000
MAX_PART_BYTES = 255
"""What file systems allow between two slashes."""
TEMPORARY = ".tmp-"
"""Names that begin with it belong to a store: what is being written and does not exist yet."""


@dataclass(frozen=True, slots=True)
class Listed:
    key: str
    size_bytes: int
    modified_at_s: float


@dataclass(slots=True)
class Watch:
    """How far a long transfer is, and whether to give it up. Shared between threads."""

    on_progress: Callable[[int], None] = lambda _num_bytes: None
    """Hears of bytes as they are done; called in any thread."""
    on_cancel: Callable[[], None] = lambda: None
    """Called by `cancel`, for whoever does not look by itself."""
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def advance(self, num_bytes: int) -> None:
        self.on_progress(num_bytes)

    def unheard(self) -> Watch:
        """The same, for what does not count as progress."""
        return Watch(_cancelled=self._cancelled)

    def cancel(self) -> None:
        self._cancelled.set()
        self.on_cancel()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def check(self) -> None:
        """
        Raises:
            CheckpointAborted: It was cancelled.
        """
        if self._cancelled.is_set():
            raise CheckpointAborted("the transfer was cancelled")


class Store(Protocol):
    """Objects under keys such as `a/b/c`. Every method may be called from several threads at once.

    - What `put` and `put_large` have returned from survives a crash of the process and of the machine.
    - An object appears whole or not at all: nobody reads half of one, and a transfer that was cut off leaves nothing
      that `walk` shows.
    - `put(if_absent=True)` succeeds for exactly one of any number of callers.
    - `walk` and `read_into` see what was put before they began.

    Raises:
        StorageError: One of its kinds says which way it failed; transient failures have been retried by then.
    """

    url: str
    """As a person would write it."""

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        """A small object.

        Raises:
            ObjectExists: With `if_absent`, when there is one.
        """
        ...

    def put_large(self, key: str, data: memoryview, *, watch: Watch | None = None) -> None:
        """A large object, in parallel pieces; `data` must not change meanwhile."""
        ...

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """
        Raises:
            ObjectMissing: There is none.
            StorageError: It is larger than `max_bytes`.
        """
        ...

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fills `out` with the bytes from `offset` on.

        Raises:
            ObjectMissing: There is none.
            StorageError: It ends before `out` is full.
        """
        ...

    def size(self, key: str) -> int:
        """
        Raises:
            ObjectMissing: There is none.
        """
        ...

    def walk(self, prefix: str = "") -> Iterator[Listed]:
        """All objects whose keys begin with `prefix/` (everything, if it is empty), in the order of their keys."""
        ...

    def children(self, prefix: str = "") -> list[str]:
        """The next component of all keys below `prefix`, sorted: the directories, not the objects."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Those that are not there are passed over."""
        ...

    def close(self) -> None: ...


def check_key(key: str) -> str:
    """
    Raises:
        InvalidArgument: It would lead out of the store, or mean different things to different stores.
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts):
        why = "write it as a/b/c, without empty parts, '.' or '..'"
    elif any(ord(character) < 32 or character in "\\\x7f" or 0xD800 <= ord(character) < 0xE000 for character in key):
        why = "leave out control characters, backslashes and what is not Unicode"
    elif any(part.startswith(TEMPORARY) for part in parts):
        why = f"names that begin with {TEMPORARY} are for what is being written"
    elif len(key.encode()) > MAX_KEY_BYTES or max(len(part.encode()) for part in parts) > MAX_PART_BYTES:
        why = f"it may have {MAX_KEY_BYTES} bytes, and {MAX_PART_BYTES} between two slashes"
    else:
        return key
    raise InvalidArgument(f"{key[:80]!r} is not a key; {why}", field="key")


def check_offset(offset: int) -> int:
    """
    Raises:
        InvalidArgument: Objects begin at 0.
    """
    if offset < 0:
        raise InvalidArgument(f"offset {offset} is before the object's first byte", field="offset")
    return offset


def byte_view(data: Any) -> memoryview:
    """Any contiguous buffer, as bytes."""
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


# -- threads -------------------------------------------------------------------------------------------------------


P = ParamSpec("P")
T = TypeVar("T")


class Pool:
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
        """Returns when all work is done and no thread is left; the next `submit` starts new ones."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None and self._home.is_here:
            threads.shutdown()
