"""Decodes the parts of samples, a few batches ahead of the training loop, in threads of its own.

This stage lies between the pipeline and the caller. The pipeline's blocks hold encoded bytes, which are small; decoded
images are not, so only a few batches are decoded ahead. The rows of a batch are divided among the threads, so that
the first batch is fast as well, and the thread that decodes the last row stacks the batch.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from strata.data.batch.assembly import Batches
from strata.data.batch.decoders import KEY
from strata.data.batch.output import PackedRows, PaddedRows, RaggedRows
from strata.data.runtime.threads import Threads
from strata.errors import DataFileInvalid
from strata.lifecycle import renewed

if TYPE_CHECKING:
    from collections.abc import Callable

    from strata.data.batch.decoders import Decoding

MAX_BATCHES_AHEAD: Final = 8
MIN_BATCHES_AHEAD: Final = 2
"""The batch that the caller takes next, and one that keeps the threads busy meanwhile."""
MIN_PART_ROWS: Final = 4
"""Rows that a thread decodes at once, if the batch has as many."""
JOIN_S: Final = 5.0


class Blocks(Protocol):
    """What `Pipeline` offers to the iterator of a pass."""

    def start(self) -> None: ...

    def take(self, *, waits: bool = True) -> Batches | None: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Job:
    """A batch that is being decoded."""

    raw: dict[str, Any]
    sizes: tuple[int, int, int]
    """Rows, repeated rows and skipped rows, as the pipeline delivered them."""
    decoded: dict[str, list[Any]]
    num_parts_left: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    bad_rows: set[int] = field(default_factory=set)
    error: BaseException | None = None
    result: Future[tuple[Batches, int, int]] = field(default_factory=Future)
    """The decoded batch, the parts that it lacks, and its size in bytes."""


class DecodedBlocks:
    """The blocks of a pipeline, decoded: each has one batch."""

    def __init__(
        self,
        blocks: Blocks,
        decoding: Decoding,
        *,
        num_threads: int,
        prefetch_bytes: int,
        on_lacking: Callable[[int], None],
    ) -> None:
        """`on_lacking`: called with the number of missing parts of each delivered batch."""
        self._blocks = blocks
        self._decoding = decoding
        self._num_threads = num_threads
        self._prefetch_bytes = prefetch_bytes
        self._on_lacking = on_lacking
        self._threads = Threads(num_threads, "strata-data-sample")
        self._jobs: deque[_Job] = deque()
        self._block: Batches | None = None
        self._place = 0
        self._batch_bytes = 0
        """The size of the last decoded batch."""
        self._lock = renewed(threading.RLock())
        self._is_closed = False

    def start(self) -> None:
        self._blocks.start()

    def take(self, *, waits: bool = True) -> Batches | None:  # noqa: ARG002 - the caller always waits
        """Return the next decoded batch, or None after the last and after `close`.

        Raises:
            Whatever reading or decoding the batch raised.
        """
        self._fill()
        with self._lock:
            job = self._jobs[0] if self._jobs else None
        if job is None:
            return None
        try:
            batches, num_lacking, self._batch_bytes = job.result.result()
        except CancelledError:
            return None
        with self._lock:
            if self._is_closed:
                return None
            self._jobs.popleft()
        self._on_lacking(num_lacking)
        self._fill()
        return batches

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            jobs, self._block = list(self._jobs), None
            self._jobs.clear()
        self._threads.cancel()
        for job in jobs:
            with job.lock:
                if not job.result.done():
                    job.result.set_exception(CancelledError())
        self._blocks.close()
        self._threads.join(JOIN_S)

    def _fill(self) -> None:
        """Begin to decode as many batches as may be ahead. Wait for a block only if nothing else is left to deliver."""
        while True:
            with self._lock:
                if not self._has_room():
                    return
                waits = not self._jobs
            block = self._current_block(waits=waits)
            if block is None:
                return
            with self._lock:
                if not self._has_room():  # closed meanwhile
                    return
                self._jobs.append(self._begin(block, self._place))
                self._place += 1

    def _current_block(self, *, waits: bool) -> Batches | None:
        """Return the block of the next batch to decode."""
        block = self._block
        if block is None or self._place == len(block.batches):
            block = self._blocks.take(waits=waits)
            self._block, self._place = block, 0
        return block

    def _has_room(self) -> bool:
        return not self._is_closed and len(self._jobs) < self._num_ahead()

    def _num_ahead(self) -> int:
        fitting = self._prefetch_bytes // self._batch_bytes if self._batch_bytes else MIN_BATCHES_AHEAD
        return max(MIN_BATCHES_AHEAD, min(MAX_BATCHES_AHEAD, fitting))

    def _begin(self, block: Batches, place: int) -> _Job:
        raw, num_rows = block.batches[place], block.sizes[place]
        block.batches[place] = None
        columns = [name for name in self._decoding.decoders if name in raw]
        num_parts = max(1, min(self._num_threads, num_rows // MIN_PART_ROWS))
        job = _Job(
            raw=raw,
            sizes=(num_rows, block.num_repeated[place], block.num_skipped[place]),
            decoded={name: [None] * num_rows for name in columns},
            num_parts_left=num_parts,
        )
        for part in range(num_parts):
            first, last = num_rows * part // num_parts, num_rows * (part + 1) // num_parts
            self._threads.submit(partial(self._decode, job, first, last))
        return job

    # In the threads

    def _decode(self, job: _Job, first: int, last: int) -> None:
        try:
            self._decode_rows(job, first, last)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            with job.lock:
                job.error = job.error or error
        with job.lock:
            job.num_parts_left -= 1
            if job.num_parts_left:
                return
        if job.error is not None:
            _settle(job, error=job.error)
            return
        try:
            result = self._finished(job)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            _settle(job, error=error)
        else:
            _settle(job, result=result)

    def _decode_rows(self, job: _Job, first: int, last: int) -> None:
        keys = job.raw.get(KEY)
        for row in range(first, last):
            if job.error is not None or self._is_closed:
                return
            key = keys[row] if keys is not None else f"number {row} of its batch"
            for column, values in job.decoded.items():
                try:
                    values[row] = self._decoding.value(column, job.raw[column][row], key)
                except DataFileInvalid:
                    if not self._decoding.can_skip:
                        raise
                    with job.lock:
                        job.bad_rows.add(row)

    def _finished(self, job: _Job) -> tuple[Batches, int, int]:
        num_rows, num_repeated, num_skipped = job.sizes
        raw = job.raw
        if job.bad_rows:
            kept = [row for row in range(num_rows) if row not in job.bad_rows]
            if not kept:
                raise DataFileInvalid(
                    f"none of the {num_rows:,} samples of a batch can be decoded, so on_error='skip' has nothing to "
                    "deliver; repair the files"
                )
            raw = {name: _taken(values, kept) for name, values in raw.items()}
            job.decoded = {name: _taken(values, kept) for name, values in job.decoded.items()}
            num_skipped, num_rows = num_skipped + num_rows - len(kept), len(kept)
        num_lacking = sum(sum(value is None for value in values) for values in job.decoded.values())
        made = {
            name: self._decoding.stacked(job.decoded[name]) if name in job.decoded else values
            for name, values in raw.items()
        }
        num_bytes = sum(map(_num_bytes, made.values()))
        batches = Batches(0, [made], (num_rows,), (num_repeated,), (num_skipped,), num_bytes)
        return batches, num_lacking, num_bytes


def _settle(job: _Job, *, result: tuple[Batches, int, int] | None = None, error: BaseException | None = None) -> None:
    with job.lock:
        if job.result.done():  # cancelled
            return
        if error is not None:
            job.result.set_exception(error)
        elif result is not None:
            job.result.set_result(result)


def _taken(values: Any, rows: list[int]) -> Any:
    """Return these rows of a column, whatever its type."""
    if isinstance(values, PaddedRows):
        return PaddedRows(*(part[rows] for part in values))
    if isinstance(values, PackedRows):
        lengths = np.diff(np.asarray(values.cu_seqlens))[rows]
        ragged = RaggedRows(values.values, values.cu_seqlens[:-1])
        kept, positions = _taken(ragged, rows), _taken(ragged._replace(values=values.positions), rows)
        bounds: Any = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        if not isinstance(values.cu_seqlens, np.ndarray):
            bounds = values.cu_seqlens.new_tensor(bounds.tolist())
        return PackedRows(kept.values, bounds, positions.values, int(lengths.max(initial=0)))
    if isinstance(values, RaggedRows):
        offsets = values.offsets
        ends = [*offsets[1:].tolist(), len(values.values)]
        spans = [(int(offsets[row]), ends[row]) for row in rows]
        places = [place for first, last in spans for place in range(first, last)]
        starts = list(itertools.accumulate((last - first for first, last in spans), initial=0))[:-1]
        made = np.array(starts, np.int64)
        return RaggedRows(
            values.values[places], made if isinstance(offsets, np.ndarray) else offsets.new_tensor(starts)
        )
    return [values[row] for row in rows] if isinstance(values, list) else values[rows]


def _num_bytes(values: Any) -> int:
    if isinstance(values, list):
        return sum(map(_num_bytes, values))
    return int(getattr(values, "nbytes", 0) or (len(values) if isinstance(values, bytes | str) else 64))
