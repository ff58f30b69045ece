"""A thread pool that can be abandoned.

The interpreter waits for the threads of an executor at exit, and a caller that waits for a result cannot be woken. A
store that does not respond would then block a caller that leaves a loop. This pool wakes every waiting caller when it
is cancelled, and abandons a thread that is still in a call: the thread ends with the call, or with the process.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, TypeVar

from strata.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable

Answer = TypeVar("Answer")


class Threads:
    """Up to `num_threads` threads, started on demand. Safe for use by several threads."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        # Re-entrant: garbage collection may end a pass in a thread that holds the lock.
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._running: set[Future[Any]] = set()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._is_over = False

    def submit(self, call: Callable[[], Answer], *, is_urgent: bool = False) -> Future[Answer]:
        """Queue a call; an urgent one goes first.

        Raises:
            CancelledError: The pool is cancelled.
        """
        future: Future[Answer] = Future()
        with self._changed:
            if self._is_over:
                raise CancelledError
            (self._waiting.appendleft if is_urgent else self._waiting.append)((future, call))
            if len(self._waiting) > self._num_idle and len(self._threads) < self._num_threads:
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return future

    def cancel(self) -> None:
        """Raise CancelledError at once for every caller that waits, also for calls that are running."""
        with self._changed:
            self._is_over = True
            left = [*self._running, *(future for future, _ in self._waiting)]
            self._running.clear()
            self._waiting.clear()
            self._changed.notify_all()
        for future in left:
            future.set_exception(CancelledError())

    def join(self, timeout_s: float) -> bool:
        """Return whether all threads end within this time; call it after `cancel`."""
        now_s = SystemClock.monotonic_s
        end_s = now_s() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():  # garbage collection may run this in one of them
                thread.join(max(0.0, end_s - now_s()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._num_idle += 1
                while not self._waiting and not self._is_over:
                    self._changed.wait()
                self._num_idle -= 1
                if self._is_over:
                    return
                future, call = self._waiting.popleft()
                self._running.add(future)
            self._answer(future, call)
            del future, call  # do not keep them alive while waiting

    def _answer(self, future: Future[Any], call: Callable[[], Any]) -> None:
        answer: Any = None
        failure: BaseException | None = None
        try:
            answer = call()
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            failure = error
        with self._changed:
            if future not in self._running:  # cancelled
                return
            self._running.remove(future)
        if failure is None:
            future.set_result(answer)
        else:
            future.set_exception(failure)
