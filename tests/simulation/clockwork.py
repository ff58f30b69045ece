"""Simulated time: one heap of events, processes that can be paused and killed, and an event loop for the real engine.

All randomness comes from one `random.Random`, including the order of simultaneous events, so that one number determines
the whole simulation.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

Act = Callable[[], None]


class Scheduler:
    def __init__(self, rng: random.Random) -> None:
        self.now_s = 0.0
        self.rng = rng
        self.num_events = 0
        self._heap: list[tuple[float, float, int, Act]] = []
        self._count = itertools.count()

    def at(self, when_s: float, act: Act, *, in_order: bool = False) -> None:
        """`in_order`: after what is already due at the same time; else the order is random."""
        tie = 1.0 if in_order else self.rng.random()
        heapq.heappush(self._heap, (max(when_s, self.now_s), tie, next(self._count), act))

    def after(self, delay_s: float, act: Act) -> None:
        self.at(self.now_s + delay_s, act)

    def step(self) -> bool:
        if not self._heap:
            return False
        self.now_s, _, _, act = heapq.heappop(self._heap)
        self.num_events += 1
        act()
        return True


class Process:
    """A process that runs, can be paused, and can die."""

    def __init__(self, scheduler: Scheduler, *, clock_rate: float = 1.0) -> None:
        self.scheduler = scheduler
        self.alive = True
        self.paused_until_s = 0.0
        self.clock_rate = clock_rate
        self.clock_offset_s = scheduler.rng.uniform(0, 10_000)
        self.wall_offset_s = 1.7e9
        self._waiting: list[Act] = []

    def monotonic_s(self) -> float:
        return self.scheduler.now_s * self.clock_rate + self.clock_offset_s

    def wall_s(self) -> float:
        return self.scheduler.now_s + self.wall_offset_s

    def after(self, delay_s: float, act: Act) -> None:
        """Return the time on this process's own clock."""
        self.scheduler.after(delay_s / self.clock_rate, lambda: self.run(act))

    def run(self, act: Act) -> None:
        """Run now, or in the same order after a pause; never after death."""
        if not self.alive:
            return
        if self._waiting or self.scheduler.now_s < self.paused_until_s:
            self._waiting.append(act)
            return
        self.inside(act)

    def inside(self, act: Act) -> None:
        act()

    def pause(self, seconds: float) -> None:
        self.paused_until_s = max(self.paused_until_s, self.scheduler.now_s + seconds)
        self.scheduler.at(self.paused_until_s, self._wake)

    def _wake(self) -> None:
        if self.scheduler.now_s < self.paused_until_s:
            return
        waiting, self._waiting = self._waiting, []
        for act in waiting:
            if self.alive:
                self.inside(act)


class Handle:
    def __init__(self, act: Act) -> None:
        self.act: Act | None = act

    def cancel(self) -> None:
        self.act = None

    def __call__(self) -> None:
        if self.act is not None:
            self.act()


class SimulatedLoop:
    """The part of an asyncio loop that the engine uses, on a simulated process."""

    def __init__(self, process: Process, execute: Callable[[Callable[[], Any], asyncio.Future[Any]], None]) -> None:
        self._process = process
        self._execute = execute
        self.tasks: list[asyncio.Task[Any]] = []

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Handle:
        handle = Handle(lambda: callback(*args))
        scheduler = self._process.scheduler
        scheduler.at(scheduler.now_s, lambda: self._process.run(handle), in_order=True)
        return handle

    def call_later(self, delay_s: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Handle:
        handle = Handle(lambda: callback(*args))
        self._process.after(delay_s, handle)
        return handle

    def time(self) -> float:
        return self._process.monotonic_s()

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)  # type: ignore[arg-type]

    def create_task(self, coroutine: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=self, name=name)  # type: ignore[arg-type]
        self.tasks.append(task)
        return task

    def run_in_executor(self, _executor: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()
        self._execute(lambda: function(*args), future)
        return future

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Suppress warnings about the unfinished tasks of a killed process."""
