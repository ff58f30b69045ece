"""Threads for the explorer's requests, and verifications in the background.

Requests wait for a thread in a bounded queue. A request whose time is over, or whose browser has gone, cancels its
budget; the thread notices it at the next piece that it reads.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from strata.checkpoint.load import integrity
from strata.dashboard.explorer.limits import Budget
from strata.errors import CheckpointAborted, NoCheckpoint, ReadTooLarge, StrataError, TooManyReads, TransferCancelled
from strata.storage import Watch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from strata.clock import Clock
    from strata.dashboard.explorer.contents import SavedCheckpoint
    from strata.dashboard.explorer.limits import ExplorerConfig

log = logging.getLogger(__name__)

POLL_S = 0.25
"""How often it is checked whether the browser still waits."""
GRACE_S = 2.0
"""Time for a thread to notice that its deadline has passed before the request is answered without it."""
MAX_KEPT_TASKS = 100

T = TypeVar("T")
TaskState = Literal["running", "done", "failed", "cancelled"]


class Workroom:
    """A bounded number of threads, and of requests that wait for one."""

    def __init__(self, config: ExplorerConfig, clock: Clock, *, name: str) -> None:
        self._config, self._clock = config, clock
        self._pool = ThreadPoolExecutor(config.num_readers, thread_name_prefix=f"strata-explorer-{name}")
        self._num_pending = 0

    async def run(self, work: Callable[[Budget], T], is_gone: Callable[[], Awaitable[bool]]) -> T:
        """Run `work` in a thread.

        Raises:
            TooManyReads: Too many requests wait.
            ReadTooLarge: The deadline has passed.
            TransferCancelled: The caller has gone.
        """
        limits = self._config
        if self._num_pending >= limits.num_readers + limits.max_waiting:
            raise TooManyReads(f"more than max_waiting={limits.max_waiting} requests wait for a read; try again later")
        budget = Budget(limits, self._clock)
        self._num_pending += 1
        task = asyncio.wrap_future(self._pool.submit(self._begin, work, budget))
        task.add_done_callback(self._ended)
        try:
            while not (await asyncio.wait({task}, timeout=POLL_S))[0]:
                if budget.elapsed_s > limits.request_timeout_s + GRACE_S:
                    raise ReadTooLarge(
                        f"the request took longer than request_timeout_s={limits.request_timeout_s:g}; "
                        "look at a smaller tensor, or try again when fewer requests run"
                    )
                if await is_gone():
                    raise TransferCancelled("the browser closed the connection")
            return task.result()
        finally:
            if not task.done():
                budget.cancel()
                task.cancel()

    @staticmethod
    def _begin(work: Callable[[Budget], T], budget: Budget) -> T:
        budget.check()  # it may have waited for too long
        return work(budget)

    def _ended(self, task: asyncio.Future[T]) -> None:
        self._num_pending -= 1
        if not task.cancelled():
            task.exception()  # an abandoned request has no reader for it

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


# -- verifications -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Task:
    """One verification."""

    id: str
    place: str
    checkpoint: str
    total_bytes: int
    started_at_s: float
    watch: Watch
    state: TaskState = "running"
    done_bytes: int = 0
    problem: str = ""
    ended_at_s: float | None = None


class Tasks:
    """Verifications, which read whole checkpoints and so take as long as they need."""

    def __init__(self, config: ExplorerConfig, clock: Clock) -> None:
        self._max_tasks, self._clock = config.max_tasks, clock
        self._pool = ThreadPoolExecutor(config.max_tasks, thread_name_prefix="strata-explorer-verify")
        self._lock = threading.Lock()
        self._tasks: dict[str, Task] = {}

    def verify(self, place: str, contents: SavedCheckpoint) -> Task:
        """Start a verification, or return the one of this checkpoint that runs.

        Raises:
            TooManyReads: Too many run.
        """
        with self._lock:
            running = [task for task in self._tasks.values() if task.state == "running"]
            same = [task for task in running if (task.place, task.checkpoint) == (place, contents.id)]
            if same:
                return same[0]
            if len(running) >= self._max_tasks:
                raise TooManyReads(f"max_tasks={self._max_tasks} verifications run already; wait, or cancel one")
            task = self._new(place, contents)
            self._tasks[task.id] = task
            ended = [id for id, one in self._tasks.items() if one.state != "running"]
            for id in ended[: max(len(self._tasks) - MAX_KEPT_TASKS, 0)]:
                del self._tasks[id]
        self._pool.submit(self._run, task, contents)
        return task

    def all(self) -> list[Task]:
        with self._lock:
            return list(self._tasks.values())

    def get(self, id: str) -> Task:
        """Return a task by its id.

        Raises:
            NoCheckpoint: There is no such task, or it ended long ago.
        """
        with self._lock:
            found = self._tasks.get(id)
        if found is None:
            raise NoCheckpoint(f"no task has the id {id[:80]!r}; it may have ended long ago", field="task")
        return found

    def cancel(self, id: str) -> Task:
        task = self.get(id)
        task.watch.cancel()
        return task

    def close(self) -> None:
        for task in self.all():
            task.watch.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _new(self, place: str, contents: SavedCheckpoint) -> Task:
        def advance(num_bytes: int) -> None:
            with self._lock:
                task.done_bytes += num_bytes

        watch = Watch(advance)
        id, total_bytes = f"t-{secrets.token_hex(8)}", contents.manifest.size_bytes
        task = Task(id, place, contents.id, total_bytes, self._clock.wall_s(), watch)
        return task

    def _run(self, task: Task, contents: SavedCheckpoint) -> None:
        state, problem = self._outcome(task, contents)
        with self._lock:
            task.state, task.problem, task.ended_at_s = state, problem, self._clock.wall_s()

    @staticmethod
    def _outcome(task: Task, contents: SavedCheckpoint) -> tuple[TaskState, str]:
        try:
            integrity.verify(contents.store, contents.manifest, watch=task.watch)
        except (CheckpointAborted, TransferCancelled):
            return "cancelled", ""
        except StrataError as error:
            return "failed", error.message
        except Exception as error:  # the boundary of a thread: a task must not stay "running"
            log.exception("verifying %s failed", contents.id)
            return "failed", f"the verification failed ({type(error).__name__}); see the log of the server"
        return "done", ""
