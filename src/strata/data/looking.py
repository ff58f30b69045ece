"""What those who look at files have in common: what to look for, and threads to do it in."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import pyarrow as pa

from strata.errors import DataError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from strata.data.filters import Condition
    from strata.data.formats.base import Format
    from strata.data.source import Source

T = TypeVar("T")
R = TypeVar("R")

OnError = Literal["raise", "skip"]


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
    """The function's result for each item, in order; with on_error="skip", the error where it failed."""
    results: list[Any] = [None] * len(items)
    failed: dict[int, BaseException] = {}
    lock = threading.Lock()
    stop = threading.Event()
    left = iter(range(len(items)))
    done = 0

    def attempt(number: int) -> None:
        try:
            results[number] = function(items[number])
        except (DataError, StorageError) as error:
            if looking.on_error == "raise":
                raise
            results[number] = error

    def work() -> None:
        nonlocal done
        while not stop.is_set():
            with lock:
                number = next(left, -1)
            if number < 0:
                return
            try:
                attempt(number)
                if looking.progress is not None:
                    with lock:
                        done += 1
                        looking.progress(what, done, len(items))
            except BaseException as error:
                stop.set()
                failed[number] = error
                raise

    _in_threads(work, min(looking.num_threads, len(items)), stop)
    if failed:
        raise failed[min(failed)]  # of several, the first file's
    return results


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
