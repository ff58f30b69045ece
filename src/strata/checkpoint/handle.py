"""The handle of a save: its progress and result, for the caller and for the manager."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from typing import TYPE_CHECKING, Any

from strata.checkpoint.tools.progress import SHOWN_AFTER_S, ProgressCounter, watching
from strata.errors import CheckpointAborted
from strata.lifecycle import Home, renewed
from strata.storage import Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from strata.checkpoint.catalog import CheckpointMetadata
    from strata.checkpoint.format.manifest import CheckpointType
    from strata.checkpoint.tools.progress import Progress

PAUSE_S = 0.1


class Save:
    """A save in progress. `staged`: the state may change again. `durable`: the checkpoint survives a crash."""

    def __init__(
        self,
        metadata: CheckpointMetadata,
        *,
        num_bytes: int,
        on_progress: Callable[[Progress], None] | None = None,
        show: bool | None = None,
    ) -> None:
        self._metadata = metadata
        self._num_bytes = num_bytes
        self._num_done = 0
        self._lock = renewed(threading.Lock())
        self._ended = renewed(threading.Event())
        self._home = Home()
        self._error: BaseException | None = None
        self.was_reported = False
        """Whether the caller knows the result."""
        self.staged = False
        self.stall_s = 0.0
        """How long `save` blocked the caller, in seconds."""
        self._counter = ProgressCounter(f"saving {metadata.id}", num_bytes, on_progress)
        self._shows_bar = show if show is not None else on_progress is None
        self.watch = Watch(self._advance)

    # -- for the caller --------------------------------------------------------------------------------------------

    @property
    def durable(self) -> bool:
        return self._ended.is_set() and self._error is None

    @property
    def done(self) -> bool:
        """Whether the save is durable, failed or cancelled."""
        return self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why the save failed; None if it has not."""
        return self._error

    @property
    def progress(self) -> float:
        """The share that is written, from 0 to 1."""
        if self.durable:
            return 1.0
        return min(self._num_done / self._num_bytes, 0.999) if self._num_bytes else 0.0

    @property
    def metadata(self) -> CheckpointMetadata:
        return self._metadata

    @property
    def id(self) -> str:
        return self._metadata.id

    @property
    def path(self) -> str:
        return self._metadata.path

    @property
    def step(self) -> int:
        return self._metadata.step

    @property
    def epoch(self) -> int:
        return self._metadata.epoch

    @property
    def size_bytes(self) -> int:
        return self._metadata.size_bytes

    @property
    def checkpoint_type(self) -> CheckpointType:
        return self._metadata.checkpoint_type

    @property
    def model_hash(self) -> str | None:
        return self._metadata.model_hash

    def until_ended(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, successful or not; return whether it has ended. Does not count as reported."""
        if not self._ended.is_set():
            self._home.require(f"the save of checkpoint {self.id}")
        return self._ended.wait(timeout_s)

    def wait(self, timeout_s: float | None = None) -> CheckpointMetadata:
        """Wait until the checkpoint is durable. A long wait shows a progress bar on a terminal.

        Raises:
            TimeoutError: The checkpoint is not durable in time; the save continues.
            CheckpointError, StorageError: The save failed; nothing was committed.
            ForkedProcess: The save belongs to the process that forked this one.
        """
        if not self.until_ended(SHOWN_AFTER_S if timeout_s is None else min(timeout_s, SHOWN_AFTER_S)):
            self._wait_with_bar(None if timeout_s is None else timeout_s - SHOWN_AFTER_S)
        if not self._ended.is_set():
            raise TimeoutError(
                f"checkpoint {self.id} is not durable after {timeout_s:g} s ({self.progress:.0%} written)"
            )
        self.was_reported = True
        if self._error is not None:
            raise self._error
        return self._metadata

    def _wait_with_bar(self, timeout_s: float | None) -> None:
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        num_shown = 0
        with watching(f"saving {self.id}", self._num_bytes, show=self._shows_bar) as watch:
            while not self._ended.wait(max(min(PAUSE_S, deadline_s - time.monotonic()), 0)):
                num_done = self._num_done
                watch.advance(num_done - num_shown)
                num_shown = num_done
                if time.monotonic() >= deadline_s:
                    return

    def cancel(self) -> None:
        """Cancel the save and delete what was written. Has no effect once it is committed."""
        self.was_reported = True
        self.watch.cancel()

    def __repr__(self) -> str:
        state = "durable" if self.durable else "failed" if self._error else f"{self.progress:.0%}"
        return f"<checkpoint {self.path}: {state}>"

    # -- for the manager -------------------------------------------------------------------------------------------

    def num_written(self) -> int:
        """Return the number of bytes written, by all attempts."""
        return self._num_done

    def succeeded(self, metadata: CheckpointMetadata) -> None:
        """End the save with its final metadata."""
        self._metadata = metadata
        self._counter.finish()
        self._ended.set()

    def failed(self, error: BaseException) -> None:
        """End the save with an error."""
        self._error = error
        self._ended.set()

    def skipped(self, why: str) -> None:
        """End a save that was not begun."""
        self.failed(CheckpointAborted(f"checkpoint {self.id} was skipped: {why}"))

    def become(self, **changes: Any) -> None:
        self._metadata = dataclasses.replace(self._metadata, **changes)

    def _advance(self, num_bytes: int) -> None:
        with self._lock:
            self._num_done += num_bytes
        self._counter.advance(num_bytes)
