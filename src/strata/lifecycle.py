"""The end of this process, and the processes that it forks.

Exit: hooks registered with `at_exit` run while threads still work. `atexit` is too late for that: Python has stopped
its thread pools (`concurrent.futures`) by then, and whoever waits for one of them waits for ever.

Fork: a forked child has a copy of every object and none of the threads behind them. Nothing of ours goes on in it: exit
hooks and finalizers stay with the parent, a lock that another thread held is free, a lock on a file stays the
parent's, and an object that needs its threads raises (`Home`) instead of waiting for them.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - its exit hook must be registered before ours: the last one runs first
import contextlib
import itertools
import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from strata.errors import ForkedProcess

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

AnyLock = TypeVar("AnyLock")

# -- exit ----------------------------------------------------------------------------------------------------------

_hooks: dict[int, Callable[[], None]] = {}
_numbers = itertools.count()
_is_registered = False


def at_exit(hook: Callable[[], None]) -> Callable[[], None]:
    """Calls `hook` when the interpreter ends, in this process only; returns a function that withdraws it.

    The last one registered is called first. One that raises is logged, and the others are still called; Ctrl-C skips
    the rest.
    """
    global _is_registered  # noqa: PLW0603 - one list of hooks a process
    if not _is_registered:
        _is_registered = True
        with contextlib.suppress(RuntimeError):  # it is ending already
            threading._register_atexit(_run_hooks)  # type: ignore[attr-defined]  # what concurrent.futures uses, too
    number = next(_numbers)
    _hooks[number] = hook
    return lambda: _withdraw(number)


def _withdraw(number: int) -> None:
    _hooks.pop(number, None)


def _run_hooks() -> None:
    while _hooks:
        _, hook = _hooks.popitem()
        try:
            hook()
        except Exception:  # the edge of the process
            log.exception("an exit hook failed")


# -- fork ----------------------------------------------------------------------------------------------------------


class Home:
    """The process that an object was made in."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """False in a process that was forked since."""
        return os.getpid() == self._pid

    def require(self, what: str) -> None:
        """
        Raises:
            ForkedProcess: This is a forked child.
        """
        if not self.is_here:
            raise ForkedProcess(f"{what} belongs to process {self._pid}, which forked this one; make a new one here")


def renewed(lock: AnyLock) -> AnyLock:
    """Returns the lock, condition or event; in forked children it is free, since its holder does not exist there."""
    _locks.add(lock)
    return lock


class Descriptor:
    """A file descriptor that forked children close, so that a lock on it ends with this process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _descriptors.add(self)

    @property
    def fd(self) -> int:
        """-1 once it is closed, and in forked children."""
        return self._fd

    def close(self) -> None:
        """May be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def finalize(
    owner: object, call: Callable[..., object], *args: Any, runs_at_exit: bool = True
) -> weakref.finalize[..., Any]:
    """As `weakref.finalize`, except that forked children do not call it."""
    finalizer = weakref.finalize(owner, _at_home, Home(), call, *args)
    finalizer.atexit = runs_at_exit
    return finalizer


def _at_home(home: Home, call: Callable[..., object], *args: Any) -> None:
    if home.is_here:
        call(*args)


_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_descriptors: weakref.WeakSet[Descriptor] = weakref.WeakSet()


def _begin_anew() -> None:
    """In the child. No other thread exists."""
    _hooks.clear()
    for lock in list(_locks):
        lock._at_fork_reinit()
    for descriptor in list(_descriptors):
        descriptor.close()


os.register_at_fork(after_in_child=_begin_anew)
