"""`AsyncCheckpointManager`: `CheckpointManager` for asyncio programs.

Every method calls that of `CheckpointManager` in a thread, with the same parameters and errors. Cancelling an `await`
only ends the wait: its thread continues, a save becomes durable, and closing waits for all of it. Use `save.cancel()`
to cancel a save.
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
"""Calls in progress at a time; others queue. Waiting for one save takes one thread, however many tasks wait."""

P = ParamSpec("P")
T = TypeVar("T")


class AsyncSave:
    """A save in progress. `await save` (or `save.wait()`) returns when the checkpoint is durable."""

    def __init__(self, save: Save, in_thread: Callable[[Callable[[], None]], Future[None]]) -> None:
        self.save = save
        """The synchronous handle."""
        self._in_thread = in_thread
        self._ended: Future[None] | None = None

    async def wait(self, timeout_s: float | None = None) -> CheckpointMetadata:
        """Wait until the checkpoint is durable.

        Raises:
            TimeoutError: The checkpoint is not durable in time; the save continues.
            CheckpointError, StorageError: The save failed; nothing was committed.
        """
        if not self.save.done:
            if self._ended is None:
                self._ended = self._in_thread(self._until_ended)
            with contextlib.suppress(TimeoutError):
                # Shielded: other tasks may wait for the same future.
                await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._ended)), timeout_s)
        if not self.save.done:
            assert timeout_s is not None
            raise TimeoutError(
                f"checkpoint {self.id} is not durable after {timeout_s:g} s ({self.progress:.0%} written)"
            )
        return self.save.wait()  # returns at once

    def __await__(self) -> Generator[Any, None, CheckpointMetadata]:
        return self.wait().__await__()

    def cancel(self) -> None:
        """Cancel the save and delete what was written. Has no effect once it is committed."""
        self.save.cancel()

    def _until_ended(self) -> None:
        """Wait in the thread without reporting the result: the `await` may be cancelled meanwhile."""
        self.save.until_ended()

    @property
    def staged(self) -> bool:
        return self.save.staged

    @property
    def stall_s(self) -> float:
        """How long the copy of the state took, in seconds."""
        return self.save.stall_s

    @property
    def durable(self) -> bool:
        return self.save.durable

    @property
    def done(self) -> bool:
        """Whether the save is durable, failed or cancelled."""
        return self.save.done

    @property
    def error(self) -> BaseException | None:
        """Why the save failed; None if it has not."""
        return self.save.error

    @property
    def progress(self) -> float:
        """The share that is written, from 0 to 1."""
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
    """Call a method in a thread, with its parameters, docstring and types."""

    @functools.wraps(method)
    async def call(self: AsyncCheckpointManager, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.wrap_future(self._submit(functools.partial(method, self._manager, *args, **kwargs)))

    return call


def _as_of(
    _model: Callable[Concatenate[CheckpointManager, P], Any],
) -> Callable[[Callable[..., T]], Callable[Concatenate[Any, P], T]]:
    """Give a method that forwards its arguments the signature of the method that it calls."""

    def decorate(method: Callable[..., T]) -> Callable[Concatenate[Any, P], T]:
        method.__signature__ = inspect.signature(_model)  # type: ignore[attr-defined]
        return method

    return decorate


class AsyncCheckpointManager:
    """Saves and loads the checkpoints of one directory or URL; takes the arguments of `CheckpointManager`.

    `await save(…)` returns a handle when the state is copied; `await` the handle to wait until it is durable.
    """

    @_as_of(CheckpointManager.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._manager = CheckpointManager(*args, **kwargs)
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="strata-async")
        self._calls: set[Future[Any]] = set()
        """Running or queued calls."""
        self._waiting: set[Future[None]] = set()
        """Those of the calls that wait for the end of a save."""
        self._closing: Future[None] | None = None
        self._home = Home()

    @_as_of(CheckpointManager.save)
    async def save(self, *args: Any, **kwargs: Any) -> AsyncSave:
        """Copy the state and return a handle; `await` it to wait until the checkpoint is durable.

        The state must not change before this returns or, if the `await` is cancelled, before `wait()` has returned.

        Raises:
            InvalidArgument: A value of the state cannot be stored; nothing was written.
            CheckpointBusy: Another save is in progress, and `when_busy="raise"`.
        """
        save = await asyncio.wrap_future(self._submit(functools.partial(self._manager.save, *args, **kwargs)))
        return AsyncSave(save, self._wait_for)

    async def maybe_save(self, state: Any, *, step: int, **save_arguments: Any) -> AsyncSave | None:
        """Save if the strategy decides to. `state` may be a function that returns the state; it is called only then,
        in a thread.
        """
        work = functools.partial(self._manager.maybe_save, state, step=step, **save_arguments)
        save = await asyncio.wrap_future(self._submit(work))
        return AsyncSave(save, self._wait_for) if save is not None else None

    @_as_of(CheckpointManager.should_save)
    def should_save(self, *args: Any, **kwargs: Any) -> Decision:
        """Return whether the strategy saves after `step`, and why. Never blocks, so it is not a coroutine."""
        return self._manager.should_save(*args, **kwargs)

    resumed = _threaded(CheckpointManager.resumed)
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
        """A description of when `maybe_save` saves and which checkpoints are kept."""
        return self._manager.schedule

    @property
    def problems(self) -> dict[str, str]:
        """The checkpoints that the last listing ignored: id → why."""
        return self._manager.problems

    async def wait(self) -> None:
        """Wait until no save is in progress.

        Raises:
            CheckpointError, StorageError: A save failed whose handle was not awaited.
        """
        if self._waiting:  # first, so that each failure is raised once
            await asyncio.wait([asyncio.wrap_future(one) for one in tuple(self._waiting)])
        if self._closing is None:
            await asyncio.wrap_future(self._submit(self._manager.wait))

    async def regroup(self, size: int) -> None:
        """Save with another number of ranks from now on; see `CheckpointManager.regroup`.

        Raises:
            ConfigError: This rank would not be among them, or it saves alone.
        """
        await asyncio.wrap_future(self._submit(lambda: self._manager.regroup(size)))

    async def close(self) -> None:
        """Wait for all calls in progress and close the manager.

        Raises:
            CheckpointError, StorageError: A save failed whose handle was not awaited.
        """
        if not self._home.is_here:
            return
        if self._closing is None:
            calls = tuple(self._calls)
            # A separate thread: all threads of the pool may be waiting.
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
            if error is None:  # otherwise `error` matters more
                raise

    # -- within ----------------------------------------------------------------------------------------------------

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        self._home.require("this AsyncCheckpointManager")
        if self._closing is not None:
            raise InvalidArgument("the AsyncCheckpointManager is closed; create a new one")
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
                with contextlib.suppress(BaseException):  # its caller gets the error
                    call.result()
        finally:
            self._pool.shutdown()
            self._manager.close()
