"""What all readers of a survey share: what to look for, threads to read files in, and progress reports.

`surveyor`, `row_counts` and the Iceberg survey use it.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar

import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from strata.errors import DataError, DataFileInvalid, DataFileMissing, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.progress import TaskID

    from strata.data.config import OnError
    from strata.data.filter.filter import Condition
    from strata.data.formats.base import Format
    from strata.data.source.source import Source


T = TypeVar("T")
R = TypeVar("R")

UNREADABLE: Final = (DataFileInvalid, DataFileMissing)
"""Errors for which on_error="skip" leaves data out. Unreachable storage does not mean that a file is bad, and a schema
mismatch is a mistake that skipping would hide."""
MAX_NAMED: Final = 5
"""Skipped files that the log names; the others are counted."""

log = logging.getLogger(__name__)


class Progress(Protocol):
    """Receives progress reports, from any thread but one at a time."""

    def __call__(self, what: str, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Probe:
    """What to look for in files, and how."""

    source: Source
    format: Format
    columns: list[str] | None
    """The delivered columns; None means all."""
    read_columns: list[str] | None
    """The columns that are read: the delivered ones and those that the filter needs."""
    schema: pa.Schema | None
    condition: Condition | None
    partition_fields: list[pa.Field]
    unit_bytes: int
    num_threads: int
    on_error: OnError
    progress: Progress | None


def known_values(fields: Sequence[pa.Field], rows: Sequence[dict[str, object]]) -> pa.Table:
    """Return a table of columns that are known without reading; a value missing from a row is null."""
    arrays = [pa.array([row.get(field.name) for row in rows], field.type) for field in fields]
    return pa.Table.from_arrays(arrays, names=[field.name for field in fields])


def attempts(
    probe: Probe, function: Callable[[T], R], items: Sequence[T], what: str
) -> list[R | DataError | StorageError]:
    """Call the function for each item and return the results in order; with on_error="skip", errors are results."""

    def attempt(item: T) -> R | DataError | StorageError:
        try:
            return function(item)
        except (DataError, StorageError) as error:
            return error

    return attempts_together(probe, lambda group: [attempt(item) for item in group], items, what, num_together=1)


def attempts_together(
    probe: Probe,
    function: Callable[[Sequence[T]], Sequence[R | DataError | StorageError]],
    items: Sequence[T],
    what: str,
    *,
    num_together: int,
) -> list[R | DataError | StorageError]:
    """As `attempts`, for a function that takes several items and returns a result or an error for each."""
    results: list[Any] = [None] * len(items)
    failed: dict[int, BaseException] = {}
    lock = threading.Lock()
    stop = threading.Event()
    left = iter(range(0, len(items), num_together))
    done = 0

    def attempt(first: int) -> None:
        found = function(items[first : first + num_together])
        results[first : first + num_together] = found
        skipped = UNREADABLE if probe.on_error == "skip" else ()
        errors = (result for result in found if isinstance(result, (DataError, StorageError)))
        if (error := next((error for error in errors if not isinstance(error, skipped)), None)) is not None:
            raise error

    def work() -> None:
        nonlocal done
        while not stop.is_set():
            with lock:
                first = next(left, -1)
            if first < 0:
                return
            try:
                attempt(first)
                if probe.progress is not None:
                    with lock:
                        done += len(items[first : first + num_together])
                        probe.progress(what, done, len(items))
            except BaseException as error:
                stop.set()
                failed[first] = error
                raise

    _in_threads(work, min(probe.num_threads, -(-len(items) // num_together)), stop)
    if failed:
        raise failed[min(failed)]  # the error of the first file
    return results


def log_skipped(skipped: Sequence[tuple[str, str]]) -> None:
    """Log the names of skipped files, and the reasons."""
    for name, reason in skipped[:MAX_NAMED]:
        log.warning("left out of the plan because it is unreadable: %s: %s", name, reason)
    if len(skipped) > MAX_NAMED:
        log.warning("left out of the plan because they are unreadable: %d more", len(skipped) - MAX_NAMED)


def _in_threads(work: Callable[[], None], num_threads: int, stop: threading.Event) -> None:
    """Run `work` in threads until all of them return. `work` records its own errors."""
    if num_threads <= 1:
        work()
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="strata-survey") as pool:
        try:
            wait([pool.submit(work) for _ in range(num_threads)])
        except BaseException:  # Ctrl-C: no thread starts another file
            stop.set()
            raise


class SurveyProgress:
    """Draws the progress of a survey on standard error, if it is shown."""

    def __init__(self, *, is_shown: bool) -> None:
        self._bar: ProgressBar | None = None
        if is_shown:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = ProgressBar(*columns, console=Console(stderr=True))
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._bar is None:
            return
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total)
        self._bar.update(self._tasks[what], completed=done, total=total)
