"""What those who look at files have in common: what to look for, and threads to do it in."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self, TypeVar

import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from strata.errors import DataError, DataFileInvalid, DataFileMissing, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.progress import TaskID

    from strata.data.filter.filter import Condition
    from strata.data.formats.base import Format
    from strata.data.source.source import Source


T = TypeVar("T")
R = TypeVar("R")

OnError = Literal["raise", "skip"]

UNREADABLE: Final = (DataFileInvalid, DataFileMissing)
"""What on_error="skip" leaves out. Storage that cannot be reached says nothing of a file, and a schema that does not
fit is a mistake: leaving these out would hide it."""
MAX_NAMED: Final = 5
"""Of what is skipped, so many are named in the log; the others are counted."""

log = logging.getLogger(__name__)


class Progress(Protocol):
    """Told what is being done, and how much of it is; from any thread, one at a time."""

    def __call__(self, what: str, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Looking:
    source: Source
    format: Format
    columns: list[str] | None
    """What is delivered."""
    read_columns: list[str] | None
    """Whose bytes count: the filter needs some too."""
    schema: pa.Schema | None
    condition: Condition | None
    partition_fields: list[pa.Field]
    unit_bytes: int
    num_threads: int
    on_error: OnError
    progress: Progress | None


def known_values(fields: Sequence[pa.Field], rows: Sequence[dict[str, object]]) -> pa.Table:
    """Columns that are known without reading, a row for each of `rows`; what a row does not have is null."""
    arrays = [pa.array([row.get(field.name) for row in rows], field.type) for field in fields]
    return pa.Table.from_arrays(arrays, names=[field.name for field in fields])


def attempts(
    looking: Looking, function: Callable[[T], R], items: Sequence[T], what: str
) -> list[R | DataError | StorageError]:
    """The function's result for each item, in order; with on_error="skip", the error where it cannot be read."""

    def attempt(item: T) -> R | DataError | StorageError:
        try:
            return function(item)
        except (DataError, StorageError) as error:
            return error

    return attempts_together(looking, lambda group: [attempt(item) for item in group], items, what, num_together=1)


def attempts_together(
    looking: Looking,
    function: Callable[[Sequence[T]], Sequence[R | DataError | StorageError]],
    items: Sequence[T],
    what: str,
    *,
    num_together: int,
) -> list[R | DataError | StorageError]:
    """The same for a function that takes so many items at once, and gives a result or an error for each."""
    results: list[Any] = [None] * len(items)
    failed: dict[int, BaseException] = {}
    lock = threading.Lock()
    stop = threading.Event()
    left = iter(range(0, len(items), num_together))
    done = 0

    def attempt(first: int) -> None:
        found = function(items[first : first + num_together])
        results[first : first + num_together] = found
        skipped = UNREADABLE if looking.on_error == "skip" else ()
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
                if looking.progress is not None:
                    with lock:
                        done += len(items[first : first + num_together])
                        looking.progress(what, done, len(items))
            except BaseException as error:
                stop.set()
                failed[first] = error
                raise

    _in_threads(work, min(looking.num_threads, -(-len(items) // num_together)), stop)
    if failed:
        raise failed[min(failed)]  # of several, the first file's
    return results


def tell_skipped(skipped: Sequence[tuple[str, str]]) -> None:
    """Names and reasons, in the log."""
    for name, reason in skipped[:MAX_NAMED]:
        log.warning("left out of the plan, because it cannot be read: %s: %s", name, reason)
    if len(skipped) > MAX_NAMED:
        log.warning("left out of the plan, because they cannot be read: %d more", len(skipped) - MAX_NAMED)


def _in_threads(work: Callable[[], None], num_threads: int, stop: threading.Event) -> None:
    """Until all are done. What they raise they have noted themselves."""
    if num_threads <= 1:
        work()
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="strata-survey") as pool:
        try:
            wait([pool.submit(work) for _ in range(num_threads)])
        except BaseException:  # Ctrl-C: nobody begins another file
            stop.set()
            raise


class SurveyProgress:
    """What `survey` reports, drawn on standard error; or nothing."""

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
