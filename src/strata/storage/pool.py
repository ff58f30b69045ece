"""Threads that are there while they are needed: a store that was closed, or came here by a fork, can be used again."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from strata.lifecycle import Home, renewed

if TYPE_CHECKING:
    from collections.abc import Callable

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
