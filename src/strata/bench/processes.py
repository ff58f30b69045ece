"""Process trees of a benchmark: every process that a contender starts ends with it.

torchrun and Ray start processes in their own sessions, so killing a process group leaves some behind. While a contender
runs, this process adopts orphaned descendants (`PR_SET_CHILD_SUBREAPER`): none can leave the tree, and the whole tree
is killed. Signals that end the benchmark become exceptions, so that the tree is killed then too.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

KILL_TIMEOUT_S = 10.0
"""A process inside a system call may take a moment to die."""
_PR_SET_CHILD_SUBREAPER = 36
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def killed_with_descendants() -> Iterator[None]:
    """Kill every process started inside the block, with its descendants, however the block ends."""
    here = psutil.Process()
    before = set(here.children())
    _adopt_orphans(is_enabled=True)
    try:
        yield
    finally:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # a second Ctrl-C must not interrupt the cleanup
        try:
            _kill(here, spare=before)
            _adopt_orphans(is_enabled=False)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _kill(here: psutil.Process, *, spare: set[psutil.Process]) -> None:
    """Kill until none is left, because a process may fork between the listing and the kill."""
    deadline_s = time.monotonic() + KILL_TIMEOUT_S
    while time.monotonic() < deadline_s:
        started = [child for child in here.children() if child not in spare]
        if not started:
            return
        for process in (*started, *(each for child in started for each in _descendants(child))):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(started, timeout=1.0)  # only children can be waited for


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _adopt_orphans(*, is_enabled: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_enabled), 0, 0, 0)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into exceptions, like Ctrl-C, so that contenders are killed on exit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    numbers = [number for number in _ENDING[1:] if signal.getsignal(number) is not signal.SIG_IGN]  # as under nohup
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
