"""Process exit, Ctrl-C and fork.

Exit: hooks registered with `at_exit` run while threads still work. `atexit` hooks run too late: by then Python has shut
down its thread pools (`concurrent.futures`), and waiting for a task in one of them never returns. `leave` exits without
the teardown of modules, for processes that another one waits for.

Fork: a forked child has a copy of every object but none of the threads behind them. Strata does nothing in a forked
child: exit hooks and finalizers run in the parent only, locks that other threads held are released, file locks stay
with the parent, and an object that needs its threads raises (`Home`) instead of waiting for them.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - its exit hook must be registered before ours: the last one runs first
import contextlib
import ctypes
import gc
import io
import itertools
import logging
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

from strata.errors import ForkedProcess

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    ExceptHook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], object]

log = logging.getLogger(__name__)

AnyLock = TypeVar("AnyLock")

# -- exit ----------------------------------------------------------------------------------------------------------

_hooks: dict[int, Callable[[], None]] = {}
_numbers = itertools.count()
_is_registered = False


def at_exit(hook: Callable[[], None]) -> Callable[[], None]:
    """Call `hook` when the interpreter exits, in this process only; return a function that unregisters it.

    Hooks run in reverse order of registration. A hook that raises is logged and the others still run; Ctrl-C skips the
    rest.
    """
    global _is_registered  # noqa: PLW0603 - one list of hooks per process
    if not _is_registered:
        _is_registered = True
        with contextlib.suppress(RuntimeError):  # the interpreter is already exiting
            threading._register_atexit(_run_hooks)  # type: ignore[attr-defined]  # concurrent.futures uses it, too
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
        except Exception:  # process boundary
            log.exception("an exit hook failed")


_PRIVATE = ((threading, "_shutdown"), (atexit, "_run_exitfuncs"))
"""Functions of Python that the interpreter runs at its exit: join threads, and call what was registered. The first one
is also what `multiprocessing` calls."""


def leave(code: int) -> NoReturn:
    """Exit as `sys.exit(code)` does, but without the teardown of modules: in a process that was forked from a warm one,
    it copies and frees the pages of all of them, which takes longer than the start of the next process.

    Threads are joined, exit hooks and `atexit` functions run, the globals of the script are released, and open files
    flushed. Skipped are finalizers of objects that other modules keep, and exit functions of C libraries.
    `multiprocessing` ends its processes in the same way.

    Python has no public function for the first two steps. `sys.exit` goes on to tear down modules, and an `atexit`
    function that called `os._exit` would skip the functions that were registered before it, such as those of a tool
    that started Python. A Python without the private functions exits as with `sys.exit`: more slowly, but completely.
    """
    if code:
        sys.last_value = SystemExit(code)  # exit hooks recognize a failure by it
    joins, runs_functions = (getattr(module, name, None) for module, name in _PRIVATE)
    if joins is None or runs_functions is None:
        sys.exit(code & 0xFF)
    try:
        for step in (joins, runs_functions, _release_globals, _flush_files):
            try:
                step()
            except BaseException:  # process boundary: the next step matters, too
                with contextlib.suppress(Exception):  # stderr may be closed
                    log.exception("an exit function failed")
    finally:
        os._exit(code & 0xFF)


def _release_globals() -> None:
    """Let go of the objects of the script in the order of the interpreter, so that their finalizers run."""
    names = vars(sys.modules["__main__"])
    ours = [name for name in names if not name.startswith("__")]
    for name in sorted(ours, key=lambda name: not name.startswith("_")):
        names[name] = None
    gc.collect()


def _flush_files() -> None:
    """Write the buffers of all files that were opened since the last `gc.freeze`, of the standard streams and of C."""
    buffered = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    opened = [each for each in gc.get_objects() if issubclass(type(each), buffered)]
    for file in (*opened, sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed, or its disk is full
            file.flush()
    ctypes.CDLL(None).fflush(None)


# -- Ctrl-C --------------------------------------------------------------------------------------------------------

_ONE_LINE = "_strata_one_line"
"""Attribute of errors that are printed without their traceback."""


def interrupted(message: str) -> KeyboardInterrupt:
    """Return the error for a Ctrl-C that was carried out. A program that does not catch it ends with its message alone:
    a traceback would suggest that something went wrong.

    The exit code stays that of Ctrl-C, which Python gives to `KeyboardInterrupt` itself, and not to subclasses.
    """
    error = KeyboardInterrupt(message)
    setattr(error, _ONE_LINE, True)
    if not getattr(sys.excepthook, _ONE_LINE, False):
        sys.excepthook = _without_traceback(sys.excepthook)
    return error


def _without_traceback(before: ExceptHook) -> ExceptHook:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if getattr(error, _ONE_LINE, False) and sys.stderr is not None:
            print(f"{kind.__name__}: {error}", file=sys.stderr)
        else:
            before(kind, error, trace)

    setattr(hook, _ONE_LINE, True)
    return hook


# -- fork ----------------------------------------------------------------------------------------------------------


class Home:
    """The process that created an object."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is still that process, not a forked child of it."""
        return os.getpid() == self._pid

    def require(self, what: str) -> None:
        """
        Raises:
            ForkedProcess: This is a forked child.
        """
        if not self.is_here:
            raise ForkedProcess(f"{what} belongs to process {self._pid}, which forked this one; create a new one here")


def renewed(lock: AnyLock) -> AnyLock:
    """Return the lock, condition or event, and release it in forked children, where its holder does not exist."""
    _locks.add(lock)
    return lock


class Descriptor:
    """A file descriptor that forked children close, so that a lock on it is released when this process exits."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _descriptors.add(self)

    @property
    def fd(self) -> int:
        """The descriptor; -1 once it is closed, and in forked children."""
        return self._fd

    def close(self) -> None:
        """Close the descriptor; later calls do nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def finalize(
    owner: object, call: Callable[..., object], *args: Any, runs_at_exit: bool = True
) -> weakref.finalize[..., Any]:
    """Like `weakref.finalize`, but forked children do not run the callback."""
    finalizer = weakref.finalize(owner, _call_at_home, Home(), call, *args)
    finalizer.atexit = runs_at_exit
    return finalizer


def _call_at_home(home: Home, call: Callable[..., object], *args: Any) -> None:
    if home.is_here:
        call(*args)


_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_descriptors: weakref.WeakSet[Descriptor] = weakref.WeakSet()


def _reset_in_child() -> None:
    """Reset hooks, locks and descriptors in a forked child, where no other thread exists."""
    _hooks.clear()
    for lock in list(_locks):
        lock._at_fork_reinit()
    for descriptor in list(_descriptors):
        descriptor.close()


os.register_at_fork(after_in_child=_reset_in_child)
