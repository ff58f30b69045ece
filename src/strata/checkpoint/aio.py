"""`AsyncCheckpointManager`: the same checkpoints, for programs that run on asyncio.

It is thin: every method is that of `CheckpointManager`, called in a thread, with the same parameters and errors. An
`await` that is cancelled gives up waiting and nothing else: what its thread has begun comes to its end, a save that was
begun becomes durable, and closing waits for all of it. Whoever wants a save undone says `save.cancel()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from strata.checkpoint.manager import CheckpointManager
from strata.errors import InvalidArgument, StrataError
from strata.lifecycle import Home

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator
    from types import TracebackType
    from typing import Self

    from strata.checkpoint.catalog import CheckpointMetadata
    from strata.checkpoint.format.manifest import CheckpointType
    from strata.checkpoint.handle import Save
    from strata.checkpoint.policy import Decision

NUM_THREADS = 8
"""Calls under way at a time; others queue. One save that is waited for takes one, however many wait."""

P = ParamSpec("P")
T = TypeVar("T")


class AsyncSave:
    """A checkpoint under way. `await save` (or `save.wait()`) returns when it is durable."""

    def __init__(self, save: Save, in_thread: Callable[[Callable[[], None]], Future[None]]) -> None:
        self.save = save
        """The handle for threads."""
        self._in_thread = in_thread
        self._ended: Future[None] | None = None

    async def wait(self, timeout_s: float | None = None) -> CheckpointMetadata:
        """Returns when the checkpoint is durable.

        Raises:
            TimeoutError: It is not, in time; it goes on.
            CheckpointError, StorageError: Why it never will be. Nothing was committed.
        """
        if not self.save.done:
            if self._ended is None:
                self._ended = self._in_thread(self._until_ended)
            with contextlib.suppress(TimeoutError):
                # Shielded: others may wait for the same.
                await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._ended)), timeout_s)
        if not self.save.done:
            assert timeout_s is not None
            raise TimeoutError(
                f"checkpoint {self.id} is not durable after {timeout_s:g} s ({self.progress:.0%} written)"
            )
        return self.save.wait()  # at once, now

    def __await__(self) -> Generator[Any, None, CheckpointMetadata]:
        return self.wait().__await__()

    def cancel(self) -> None:
        """Gives it up; what was written is removed. Without effect once it is committed."""
        self.save.cancel()

    def _until_ended(self) -> None:
        """How it ended is heard by whoever awaits it, and not by the thread: its `await` may be cancelled meanwhile."""
        self.save.until_ended()

    @property
    def staged(self) -> bool:
        return self.save.staged

    @property
    def stall_s(self) -> float:
        """How long the state was being copied."""
        return self.save.stall_s

    @property
    def durable(self) -> bool:
        return self.save.durable

    @property
    def done(self) -> bool:
        """Durable, failed or cancelled."""
        return self.save.done

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None if it did not, or not yet."""
        return self.save.error

    @property
    def progress(self) -> float:
        """From 0 to 1."""
        return self.save.progress

    @property
    def metadata(self) -> CheckpointMetadata:
        return self.save.metadata

    @property
    def id(self) -> str:
        return self.save.id

    @property
    def path(self) -> str:
        return self.save.path

    @property
    def step(self) -> int:
        return self.save.step

    @property
    def epoch(self) -> int:
        return self.save.epoch

    @property
    def size_bytes(self) -> int:
        return self.save.size_bytes

    @property
    def checkpoint_type(self) -> CheckpointType:
        return self.save.checkpoint_type

    @property
    def model_hash(self) -> str | None:
        return self.save.model_hash

    def __repr__(self) -> str:
        return repr(self.save)


def _threaded(
    method: Callable[Concatenate[CheckpointManager, P], T],
) -> Callable[Concatenate[AsyncCheckpointManager, P], Coroutine[Any, Any, T]]:
    """The method, called in a thread: with its parameters, its words and its types."""

    @functools.wraps(method)
    async def call(self: AsyncCheckpointManager, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.wrap_future(self._submit(functools.partial(method, self._manager, *args, **kwargs)))

    return call


def _as_of(
    _model: Callable[Concatenate[CheckpointManager, P], Any],
) -> Callable[[Callable[..., T]], Callable[Concatenate[Any, P], T]]:
    """Gives a method that passes everything on the parameters of the one that takes it."""

    def decorate(method: Callable[..., T]) -> Callable[Concatenate[Any, P], T]:
        method.__signature__ = inspect.signature(_model)  # type: ignore[attr-defined]
        return method

    return decorate


class AsyncCheckpointManager:
    """Saves and loads checkpoints in one place. See `CheckpointManager`, also for the arguments.

    `await save(…)` returns when the state is copied; `await` what it returned to wait until it is durable.
    """

    @_as_of(CheckpointManager.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._manager = CheckpointManager(*args, **kwargs)
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="strata-async")
        self._calls: set[Future[Any]] = set()
        """Under way, or not begun yet."""
        self._waiting: set[Future[None]] = set()
        """Of these, the ones that wait for the end of a save."""
        self._closing: Future[None] | None = None
        self._home = Home()

    @_as_of(CheckpointManager.save)
    async def save(self, *args: Any, **kwargs: Any) -> AsyncSave:
        """Copies the state and returns; `await` what is returned to wait until it is durable.

        The state must not change before this returns; if the `await` is cancelled, not before `wait()` has returned.

        Raises:
            InvalidArgument: Something in the state cannot be stored; nothing was written.
            CheckpointBusy: Another save is under way, and `when_busy="raise"`.
        """
        save = await asyncio.wrap_future(self._submit(functools.partial(self._manager.save, *args, **kwargs)))
        return AsyncSave(save, self._wait_for)

    async def maybe_save(self, state: Any, *, step: int, **save_arguments: Any) -> AsyncSave | None:
        """Saves if the strategy finds that it is time. `state` may be a function that makes it: called only then, in
        a thread.
        """
        work = functools.partial(self._manager.maybe_save, state, step=step, **save_arguments)
        save = await asyncio.wrap_future(self._submit(work))
        return AsyncSave(save, self._wait_for) if save is not None else None

    @_as_of(CheckpointManager.should_save)
    def should_save(self, *args: Any, **kwargs: Any) -> Decision:
        """Whether it is time, and why. Waits for nothing, so it is no coroutine."""
        return self._manager.should_save(*args, **kwargs)

    prepare = _threaded(CheckpointManager.prepare)
    list = _threaded(CheckpointManager.list)
    get = _threaded(CheckpointManager.get)
    latest = _threaded(CheckpointManager.latest)
    load = _threaded(CheckpointManager.load)
    restore = _threaded(CheckpointManager.restore)
    verify = _threaded(CheckpointManager.verify)
    delete = _threaded(CheckpointManager.delete)
    compact = _threaded(CheckpointManager.compact)

    @property
    def place(self) -> str:
        """The directory or URL."""
        return self._manager.place

    @property
    def schedule(self) -> str:
        """When `maybe_save` saves and what stays, in words."""
        return self._manager.schedule

    @property
    def problems(self) -> dict[str, str]:
        """What the last look passed over: id → why."""
        return self._manager.problems

    async def wait(self) -> None:
        """Returns when no save is under way.

        Raises:
            CheckpointError, StorageError: Why one has failed that nobody waited for.
        """
        if self._waiting:  # first, so that they do not hear what is raised here
            await asyncio.wait([asyncio.wrap_future(one) for one in tuple(self._waiting)])
        if self._closing is None:
            await asyncio.wrap_future(self._submit(self._manager.wait))

    async def close(self) -> None:
        """Waits for all that is under way.

        Raises:
            CheckpointError, StorageError: Why a save has failed that nobody waited for.
        """
        if not self._home.is_here:
            return
        if self._closing is None:
            calls = tuple(self._calls)
            # A thread of its own: those of the pool may all be waiting.
            closer = ThreadPoolExecutor(1, thread_name_prefix="strata-async-close")
            self._closing = closer.submit(self._close, calls)
            closer.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(self._closing))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except StrataError:
            if error is None:  # else that one matters more
                raise

    # -- within ----------------------------------------------------------------------------------------------------

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        self._home.require("this AsyncCheckpointManager")
        if self._closing is not None:
            raise InvalidArgument("the AsyncCheckpointManager is closed; make a new one")
        call = self._pool.submit(contextvars.copy_context().run, work)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    def _wait_for(self, work: Callable[[], None]) -> Future[None]:
        waiting = self._submit(work)
        self._waiting.add(waiting)
        waiting.add_done_callback(self._waiting.discard)
        return waiting

    def _close(self, calls: tuple[Future[Any], ...]) -> None:
        try:
            for call in calls:
                with contextlib.suppress(BaseException):  # whoever called hears it
                    call.result()
        finally:
            self._pool.shutdown()
            self._manager.close()
