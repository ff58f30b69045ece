"""Threads that nobody has to wait for.

An executor's threads are waited for when the interpreter ends, and who waits for what one of them does cannot be woken.
A store that does not answer would so hold up whoever leaves a loop. Here, who waits is told that it is over, and a
thread that is still in a call is left behind: it ends with the call, or with the process.
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
    """Up to so many, started as they are needed. Can be used by several threads at once."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        # Re-entrant: the collector may end a pass in a thread that has the lock.
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._running: set[Future[Any]] = set()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._is_over = False

    def submit(self, call: Callable[[], Answer], *, is_urgent: bool = False) -> Future[Answer]:
        """Urgent: before all that waits.

        Raises:
            CancelledError: It is over.
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
        """Whoever waits for an answer gets CancelledError at once, also for a call that is under way."""
        with self._changed:
            self._is_over = True
            left = [*self._running, *(future for future, _ in self._waiting)]
            self._running.clear()
            self._waiting.clear()
            self._changed.notify_all()
        for future in left:
            future.set_exception(CancelledError())

    def join(self, timeout_s: float) -> bool:
        """After `cancel`: whether all threads have ended within this time."""
        now_s = SystemClock.monotonic_s
        end_s = now_s() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():  # the collector may have come here in one of them
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
            del future, call  # else kept while it waits for the next

    def _answer(self, future: Future[Any], call: Callable[[], Any]) -> None:
        answer: Any = None
        failure: BaseException | None = None
        try:
            answer = call()
        except BaseException as error:  # noqa: BLE001 - raised by who waits
            failure = error
        with self._changed:
            if future not in self._running:  # cancelled meanwhile
                return
            self._running.remove(future)
        if failure is None:
            future.set_result(answer)
        else:
            future.set_exception(failure)
