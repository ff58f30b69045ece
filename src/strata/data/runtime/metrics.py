"""Loader metrics: where the time of a loader goes, and how much it reads and delivers. Measured, never estimated.

A worker is in one state at any time and reads the clock when it enters the next, so every second of its life is in
exactly one sum. This costs a few microseconds per row group, block or batch, and nothing per row. Any thread can take a
snapshot; the difference of two snapshots (`between`) is what happened in the meantime.
"""

from __future__ import annotations

import enum
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec

from strata.clock import SystemClock
from strata.lifecycle import renewed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from strata.clock import Clock


class State(enum.IntEnum):
    """What a worker does. The numbers are indices into its sums."""

    OFF = 0
    """Not started or ended; this time is not counted."""
    IDLE = 1
    """Waiting for work, or for a row group that another process decodes."""
    BLOCKED = 2
    """Waiting because decoded data fill the memory limit."""
    READ = 3
    """Waiting for bytes, where that can be separated from decoding."""
    DECODE = 4
    TRANSFORM = 5
    """Running the user's transform."""
    ASSEMBLE = 6
    """Gathering decoded rows into batches."""


class WorkerMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of one worker."""

    worker: int | None
    """The number of the worker; None for the sum of all."""
    rows: int = 0
    """Rows decoded, after the filter."""
    batches: int = 0
    """Batches assembled."""
    units: int = 0
    """Row groups decoded."""
    files: int = 0
    """Files opened; a file that is opened twice counts twice."""
    errors: int = 0
    bytes_read: int = 0
    bytes_decoded: int = 0
    shared_units: int = 0
    """Row groups taken from the node cache: decoded before, by any process of this machine."""
    shared_bytes: int = 0
    unshared_units: int = 0
    """Row groups decoded without the node cache although it is on: no room, or another process was too slow."""
    cached_bytes: int = 0
    """Part of `bytes_read` that needed no request: kept on disk, or fetched by another process of this machine."""
    idle_s: float = 0.0
    blocked_s: float = 0.0
    read_s: float = 0.0
    decode_s: float = 0.0
    transform_s: float = 0.0
    assemble_s: float = 0.0

    @property
    def busy_s(self) -> float:
        return self.read_s + self.decode_s + self.transform_s + self.assemble_s

    @property
    def alive_s(self) -> float:
        return self.busy_s + self.idle_s + self.blocked_s

    @property
    def utilisation(self) -> float:
        """The fraction of its life that it was busy, from 0 to 1."""
        return self.busy_s / self.alive_s if self.alive_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**msgspec.structs.asdict(self), "busy_s": self.busy_s, "utilisation": self.utilisation}


_SUMMED: Final = tuple(name for name in WorkerMetrics.__struct_fields__ if name != "worker")


class LoaderMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a loader."""

    workers: tuple[WorkerMetrics, ...]
    rows: int = 0
    """Rows delivered, including padding."""
    batches: int = 0
    padded_rows: int = 0
    dropped_rows: int = 0
    """Rows left out by `tail="drop"`."""
    skipped_rows: int = 0
    """Rows of this rank that `on_error="skip"` left out of delivered batches."""
    skipped_units: int = 0
    """Row groups that a pass left out. Every rank that needs a row group counts it."""
    missing_parts: int = 0
    """Parts that delivered samples lacked, with `missing="none"`."""
    consumer_wait_s: float = 0.0
    """Time in which the caller waited for the loader: inside `next()`."""
    consumer_busy_s: float = 0.0
    """Time in which the loader waited for the caller: between calls of `next()`."""
    plan_s: float = 0.0
    plan_skipped_files: int = 0
    """Files that `on_error="skip"` left out of the plan, the same on every rank; their rows are unknown."""
    plan_skipped_units: int = 0
    """Row groups of other files that were left out because the rows that pass could not be counted."""
    plan_incomplete_rows: int = 0
    """Samples that `missing="skip"` left out of the plan because they lack a part, the same on every rank."""
    first_batch_s: float | None = None
    """Time from the start of the last epoch to its first batch; None before the first batch."""
    buffered_bytes: int = 0
    """Bytes decoded and not yet delivered."""
    peak_buffered_bytes: int = 0
    num_resets: int = 0

    @property
    def total(self) -> WorkerMetrics:
        return WorkerMetrics(
            worker=None, **{name: sum(getattr(worker, name) for worker in self.workers) for name in _SUMMED}
        )

    @property
    def elapsed_s(self) -> float:
        """Time of iteration, without the time before the first `next()` and between epochs."""
        return self.consumer_wait_s + self.consumer_busy_s

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible dictionary."""
        own = {name: getattr(self, name) for name in self.__struct_fields__ if name != "workers"}
        workers = [worker.to_dict() for worker in self.workers]
        return {**own, "rows_per_s": self.rows_per_s, "total": self.total.to_dict(), "workers": workers}

    def log_line(self) -> str:
        total = self.total
        parts = [
            f"{self.rows:,} rows in {self.batches:,} batches",
            f"{self.rows_per_s:,.0f} rows/s",
            f"read {_bytes(total.bytes_read)}",
            *([f"{_bytes(total.cached_bytes)} of it from the cache"] if total.cached_bytes else []),
            f"decoded {_bytes(total.bytes_decoded)}",
            *([f"shared {_bytes(total.shared_bytes)}"] if total.shared_units else []),
            f"{len(self.workers)} workers {total.utilisation:.0%} busy",
            f"waited for data {self.consumer_wait_s:.1f} of {self.elapsed_s:.1f} s",
            f"at most {_bytes(self.peak_buffered_bytes)} buffered",
        ]
        lost = {name.replace("_", " "): getattr(self, name) for name in ("padded_rows", "dropped_rows", "skipped_rows")}
        lost |= {
            "skipped row groups": self.skipped_units,
            "files left out of the plan": self.plan_skipped_files,
            "row groups left out of the plan": self.plan_skipped_units,
            "incomplete samples left out of the plan": self.plan_incomplete_rows,
            "missing parts": self.missing_parts,
            "row groups not shared": total.unshared_units,
        }
        return ", ".join([*parts, *(f"{number:,} {name}" for name, number in lost.items() if number)])


def between(before: LoaderMetrics, after: LoaderMetrics) -> LoaderMetrics:
    """Return what happened between two snapshots, or since the reset if there was one between them."""
    if before.num_resets != after.num_resets or len(before.workers) != len(after.workers):
        return after
    workers = tuple(
        msgspec.structs.replace(late, **{name: getattr(late, name) - getattr(early, name) for name in _SUMMED})
        for early, late in zip(before.workers, after.workers, strict=True)
    )
    counts = {name: getattr(after, name) - getattr(before, name) for name in (*_DELIVERY, *_CONSUMER)}
    return msgspec.structs.replace(after, workers=workers, **counts)


def describe(metrics: LoaderMetrics) -> Table:
    """Return a table for a terminal: a row per worker, and a summary of the loader as the caption."""
    from rich.table import Table  # noqa: PLC0415 - only for printing

    table = Table(title="Workers", caption=metrics.log_line())
    for name in ("worker", "rows", "batches", "row groups", "files", "errors", "read", "decoded"):
        table.add_column(name, justify="right")
    for name in ("busy", "idle", "blocked", "utilisation"):
        table.add_column(name, justify="right")
    lines = [*metrics.workers, *([metrics.total] if len(metrics.workers) != 1 else [])]
    for one in lines:
        if one.worker is None:
            table.add_section()
        table.add_row(
            "all" if one.worker is None else str(one.worker),
            *(f"{number:,}" for number in (one.rows, one.batches, one.units, one.files, one.errors)),
            *(_bytes(number) for number in (one.bytes_read, one.bytes_decoded)),
            *(f"{seconds:.1f} s" for seconds in (one.busy_s, one.idle_s, one.blocked_s)),
            f"{one.utilisation:.0%}",
        )
    return table


class WorkerRecorder:
    """Records the metrics of one worker. Only the worker enters states and counts; any thread may take a snapshot."""

    __slots__ = ("_counts", "_lock", "_now_s", "_seconds", "_since_s", "_state", "worker")

    def __init__(self, worker: int, clock: Clock | None = None) -> None:
        self.worker = worker
        self._now_s = (clock or SystemClock()).monotonic_s
        # Re-entrant: a snapshot may trigger garbage collection, which may end an iterator that calls this.
        self._lock = renewed(threading.RLock())
        self._state = State.OFF
        self._since_s = self._now_s()
        self._seconds = [0.0] * len(State)
        self._counts = dict.fromkeys(_COUNTED, 0)

    def enter(self, state: State) -> State:
        """Enter a state and return the previous one."""
        with self._lock:
            now_s, before = self._now_s(), self._state
            self._seconds[before] += now_s - self._since_s
            self._since_s, self._state = now_s, state
        return before

    @contextmanager
    def during(self, state: State) -> Iterator[None]:
        """Enter a state, and return to the previous one afterwards."""
        before = self.enter(state)
        try:
            yield
        finally:
            self.enter(before)

    def move(self, seconds: float, state: State) -> None:
        """Move time from the current state to another, for example the time that a reader measured as waiting."""
        with self._lock:
            self._seconds[self._state] -= seconds
            self._seconds[state] += seconds

    def decoded_row_group(self, *, rows: int, bytes_read: int, bytes_decoded: int) -> None:
        with self._lock:
            counts = self._counts
            counts["units"] += 1
            counts["rows"] += rows
            counts["bytes_read"] += bytes_read
            counts["bytes_decoded"] += bytes_decoded

    def shared_row_group(self, num_bytes: int) -> None:
        """Count a row group that was taken from the node cache."""
        with self._lock:
            self._counts["shared_units"] += 1
            self._counts["shared_bytes"] += num_bytes

    def took_from_cache(self, num_bytes: int) -> None:
        """Count fetched bytes that needed no request."""
        with self._lock:
            self._counts["cached_bytes"] += num_bytes

    def unshared_row_group(self) -> None:
        """Count a row group that could not be shared, besides decoding it."""
        with self._lock:
            self._counts["unshared_units"] += 1

    def add(self, counts: WorkerMetrics) -> None:
        """Add the counts of a process that decoded for this worker. Its times are not added."""
        with self._lock:
            for name in _COUNTED:
                self._counts[name] += getattr(counts, name)

    def assembled(self, num_batches: int) -> None:
        with self._lock:
            self._counts["batches"] += num_batches

    def opened_file(self) -> None:
        with self._lock:
            self._counts["files"] += 1

    def failed(self) -> None:
        with self._lock:
            self._counts["errors"] += 1

    def snapshot(self) -> WorkerMetrics:
        with self._lock:
            seconds, counts = self._seconds.copy(), self._counts.copy()
            seconds[self._state] += self._now_s() - self._since_s
        timed: dict[str, Any] = {f"{state.name.lower()}_s": seconds[state] for state in _TIMED}
        return WorkerMetrics(worker=self.worker, **counts, **timed)

    def reset(self) -> None:
        """Reset the sums to zero; the state stays."""
        with self._lock:
            self._since_s = self._now_s()
            self._seconds = [0.0] * len(State)
            self._counts = dict.fromkeys(_COUNTED, 0)


_TIMED: Final = tuple(state for state in State if state is not State.OFF)
_COUNTED: Final = tuple(name for name in _SUMMED if not name.endswith("_s"))
_DELIVERY: Final = ("rows", "batches", "padded_rows", "dropped_rows", "skipped_rows", "skipped_units", "missing_parts")
_CONSUMER: Final = ("consumer_wait_s", "consumer_busy_s")


class LoaderRecorder:
    """Records the metrics of a loader and its workers. Any thread may call it; one thread iterates at a time."""

    def __init__(self, num_workers: int, clock: Clock | None = None) -> None:
        clock = clock or SystemClock()
        self.workers = tuple(WorkerRecorder(worker, clock) for worker in range(num_workers))
        self._now_s = clock.monotonic_s
        # Re-entrant: a snapshot may trigger garbage collection, which may end an iterator that calls this.
        self._lock = renewed(threading.RLock())
        self._num_resets = 0
        self._plan_s = 0.0
        self._plan_skipped = (0, 0, 0)
        self._buffered_bytes = 0
        self._began_s: float | None = None
        """When the epoch started; None once its first batch was delivered."""
        self._timing: str | None = None
        """The consumer sum that time is currently added to."""
        self._since_s = 0.0
        self._first_batch_s: float | None = None
        self._peak_buffered_bytes = 0
        self._counts = dict.fromkeys(_DELIVERY, 0)
        self._caller_s: dict[str, Any] = dict.fromkeys(_CONSUMER, 0.0)

    def planned(
        self, seconds: float, *, skipped_files: int = 0, skipped_units: int = 0, incomplete_rows: int = 0
    ) -> None:
        with self._lock:
            self._plan_s += seconds
            self._plan_skipped = (skipped_files, skipped_units, incomplete_rows)

    def began(self) -> None:
        """Record the start of a pass."""
        with self._lock:
            self._began_s = self._now_s()

    def asked(self) -> None:
        """Record that the caller called `next()`."""
        with self._lock:
            self._time("consumer_wait_s")

    def delivered(self, num_rows: int, *, padded_rows: int = 0, skipped_rows: int = 0) -> None:
        """Record a delivered batch; `num_rows` includes padding but not skipped rows."""
        with self._lock:
            self._time("consumer_busy_s")
            self._counts["rows"] += num_rows
            self._counts["batches"] += 1
            self._counts["padded_rows"] += padded_rows
            self._counts["skipped_rows"] += skipped_rows
            if self._began_s is not None:
                self._first_batch_s, self._began_s = self._since_s - self._began_s, None

    def ended(self) -> None:
        """Record the end of a pass: from now on neither side waits."""
        with self._lock:
            self._time(None)
            self._began_s = None

    def dropped(self, num_rows: int) -> None:
        with self._lock:
            self._counts["dropped_rows"] += num_rows

    def skipped_row_group(self) -> None:
        """Record a skipped row group. Its rows are counted with the batches that lack them."""
        with self._lock:
            self._counts["skipped_units"] += 1

    def lacked(self, num_parts: int) -> None:
        """Record parts that the samples of a delivered batch lack."""
        with self._lock:
            self._counts["missing_parts"] += num_parts

    def buffered(self, num_bytes: int) -> None:
        """Record how many bytes are decoded and not yet delivered."""
        with self._lock:
            self._buffered_bytes = num_bytes
            self._peak_buffered_bytes = max(self._peak_buffered_bytes, num_bytes)

    def snapshot(self) -> LoaderMetrics:
        workers = tuple(worker.snapshot() for worker in self.workers)
        with self._lock:
            self._time(self._timing)
            return LoaderMetrics(
                workers=workers,
                **self._counts,
                **self._caller_s,
                plan_s=self._plan_s,
                plan_skipped_files=self._plan_skipped[0],
                plan_skipped_units=self._plan_skipped[1],
                plan_incomplete_rows=self._plan_skipped[2],
                first_batch_s=self._first_batch_s,
                buffered_bytes=self._buffered_bytes,
                peak_buffered_bytes=self._peak_buffered_bytes,
                num_resets=self._num_resets,
            )

    def reset(self) -> None:
        """Reset the sums to zero, except for planning and the current buffer."""
        for worker in self.workers:
            worker.reset()
        with self._lock:
            self._time(self._timing)
            self._num_resets += 1
            self._first_batch_s = None
            self._peak_buffered_bytes = self._buffered_bytes
            self._counts = dict.fromkeys(_DELIVERY, 0)
            self._caller_s = dict.fromkeys(_CONSUMER, 0.0)

    def _time(self, timing: str | None) -> None:
        now_s = self._now_s()
        if self._timing is not None:
            self._caller_s[self._timing] += now_s - self._since_s
        self._since_s, self._timing = now_s, timing


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
