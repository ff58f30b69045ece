"""Threads that decode ahead, and the caller who takes batches, around one lock.

A worker does whatever is due first: assemble a block whose units are all there, else decode the unit that is needed
soonest. Two bounds hold it back: what is decoded, assembled or in the caller's hands, in bytes, and the blocks that are
assembled. What the block that the caller takes next needs is always allowed, so neither bound can stop the work.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.clock import SystemClock
from strata.data.assembling import assemble
from strata.data.columns import gather
from strata.data.decoding import HeadDecoder
from strata.data.metrics import State
from strata.data.strategies import Task
from strata.errors import DataError, DataFileInvalid, DataFileMissing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from strata.data.assembling import Batches
    from strata.data.columns import Chunk
    from strata.data.decoding import Decoder
    from strata.data.fetching import Fetcher
    from strata.data.metrics import LoaderRecorder, WorkerRecorder
    from strata.data.plan import Plan
    from strata.data.schedule import Outline, Schedule
    from strata.data.strategies import Strategy

MAX_BLOCKS_AHEAD = 256
"""How far the schedule is worked out. Blocks are small; their units are what takes memory."""
MAX_BLOCKS_ASSEMBLED = 3
"""One that the caller takes from, and one more for each of two workers."""
FIRST_GUESS = 3
"""How much larger a unit is decoded than read, until one has been."""
HEAD_BYTES = 4 << 20
"""Of a unit that is so large (as it is read) the first rows are decoded apart, if the first block needs no others."""
HEAD_SHARE = 0.25
"""… and if they are no more than this share of it: they are decoded once more with the rest."""
JOIN_S = 5.0
"""How long to wait for threads that are in native code when the loop is left."""


@dataclass(slots=True, eq=False)
class _Unit:
    """One that somebody needs."""

    number: int
    head_rows: int = 0
    """Only so many of its rows, the first; 0: all of them."""
    num_users: int = 0
    """Blocks that are not yet assembled and need it."""
    is_started: bool = False
    is_done: bool = False
    chunk: Chunk | None = None
    """None when done: it could not be read and is skipped."""
    error: BaseException | None = None
    num_bytes: int = 0
    """Decoded; an estimate until it is done."""


@dataclass(slots=True, eq=False)
class _Pending:
    outline: Outline
    units: list[_Unit]
    is_head: bool = False
    """Of a unit that is not decoded as a whole: nothing else is decoded until this is there."""
    is_claimed: bool = False
    num_bytes: int = 0
    """Of its batches; an estimate from when it is claimed until they are there."""
    batches: Batches | None = None
    error: BaseException | None = None

    @property
    def is_ready(self) -> bool:
        return all(unit.is_done for unit in self.units)


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """What a pipeline is to do."""

    plan: Plan
    schedule: Schedule
    decoders: Sequence[Decoder]
    convert: Callable[[int, Any], Chunk]
    """A unit's number and rows to columns."""
    present: Callable[[Chunk, Sequence[int]], list[Any]]
    strategy: Strategy
    recorder: LoaderRecorder
    budget_bytes: int
    """What may be held in memory, beside one window."""
    row_bytes: int = 1
    """Of a delivered row, until some have been decoded."""
    block_bytes: int | None = None
    """Blocks get no larger; None: the schedule alone says how large they are."""
    has_head: Callable[[int], bool] = field(default=lambda _unit: False)
    """Whether decoders can give the first rows of a unit alone; then they are `HeadDecoder`s."""
    fetcher: Fetcher | None = None
    """Asked for the bytes of units that are due."""
    skips_bad_units: bool = False
    on_skip: Callable[[int, BaseException], None] = field(default=lambda _unit, _error: None)


class Pipeline:
    """Made for one pass; `start` begins to decode, `take` gives block after block, `close` ends the threads."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._changed = threading.Condition()
        self._is_closed = False
        self._error: BaseException | None = None
        """A worker is lost: whoever waits gets this."""
        self._pending: deque[_Pending] = deque()
        self._units: dict[int, _Unit] = {}
        self._queues: list[deque[_Unit]] = [deque() for _ in work.decoders]
        self._outlines = work.schedule.outlines(most_rows=None if work.block_bytes is None else self._most_rows)
        self._has_more = True
        self._held_bytes = 0
        """Units started and not released, blocks claimed and not taken, and the one that was taken last."""
        self._taken_bytes = 0
        """The caller has it until the next is asked for: batches are views of one piece of memory."""
        self._bytes_planned = 0
        self._rows_decoded = 0
        self._bytes_decoded = 0
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Apart from making it: who may close it must know of it before a thread works, for that may be at once."""
        with self._changed:
            if self._is_closed:
                for decoder in self._work.decoders:
                    decoder.close()
                return
            for worker in range(len(self._work.decoders)):
                thread = threading.Thread(target=self._run, args=(worker,), name=f"strata-data-{worker}", daemon=True)
                thread.start()
                self._threads.append(thread)

    def take(self) -> Batches | None:
        """The next block's batches; None after the last.

        Raises:
            Whatever decoding it raised; the pipeline is of no more use then.
        """
        with self._changed:
            while True:
                if self._is_closed:
                    return None
                if self._error is not None:
                    raise self._error
                if self._pending:
                    head = self._pending[0]
                    if head.error is not None:
                        raise head.error
                    if head.batches is not None:
                        self._pending.popleft()
                        self._hold(-self._taken_bytes)
                        self._taken_bytes = head.num_bytes
                        self._changed.notify_all()
                        return head.batches
                elif not self._has_more:
                    self._hold(-self._taken_bytes)
                    self._taken_bytes = 0
                    return None
                self._changed.wait()

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        for decoder in self._work.decoders:
            decoder.abort()
        if self._work.fetcher is not None:
            self._work.fetcher.cancel()  # workers may be waiting for it
        now_s = SystemClock.monotonic_s
        end_s = now_s() + JOIN_S
        # The collector may end a pass in a worker, which may have the lock: the others could not come to their end.
        for thread in () if threading.current_thread() in self._threads else self._threads:
            thread.join(max(0.0, end_s - now_s()))
        if self._work.fetcher is not None:
            self._work.fetcher.close()
        with self._changed:
            self._pending.clear()
            self._units.clear()
            self._hold(-self._held_bytes)

    # Workers

    def _run(self, worker: int) -> None:
        recorder, decoder = self._work.recorder.workers[worker], self._work.decoders[worker]
        try:
            while True:
                job = self._next_job(worker, recorder)
                if job is None:
                    return
                if isinstance(job, _Unit):
                    self._decode(job, decoder, recorder)
                else:
                    self._assemble(job, decoder, recorder)
        except BaseException as error:  # noqa: BLE001 - the caller must hear of it, whatever it is
            with self._changed:
                self._error = _told(error)
                self._changed.notify_all()
        finally:
            recorder.enter(State.OFF)
            decoder.close()

    def _next_job(self, worker: int, recorder: WorkerRecorder) -> _Unit | _Pending | None:
        with self._changed:
            while not self._is_closed:
                self._look_ahead()
                job = self._block_to_assemble() or self._unit_to_decode(worker)
                if job is not None:
                    return job
                is_held_back = any(self._queues) or any(not p.is_claimed and p.is_ready for p in self._pending)
                recorder.enter(State.BLOCKED if is_held_back else State.IDLE)
                if not self._has_more and not self._pending:
                    return None
                self._changed.wait()
        return None

    def _look_ahead(self) -> None:
        """Works out blocks until there is a unit to decode for every worker, and some more."""
        fresh: list[_Unit] = []
        while (
            self._has_more
            and len(self._pending) < MAX_BLOCKS_AHEAD
            and sum(map(len, self._queues)) + len(fresh) < 2 * len(self._queues)
        ):
            outline = next(self._outlines, None)
            if outline is None:
                self._has_more = False
                self._changed.notify_all()
                break
            pending = _Pending(outline, [])
            self._pending.append(pending)
            if not outline.first_batch and (head := self._head_of(outline)) is not None:
                pending.units.append(head)
                pending.is_head = True
                self._queues[0].append(head)
                continue
            for number in outline.units:
                unit = self._units.get(number)
                if unit is None:
                    unit = self._units[number] = _Unit(number)
                    fresh.append(unit)
                unit.num_users += 1
                pending.units.append(unit)
        if fresh:
            self._deal(fresh)

    def _head_of(self, outline: Outline) -> _Unit | None:
        """If the first block is a small part of a large unit: that part, which is there sooner than the whole."""
        plan, number = self._work.plan, outline.units[0]
        if len(outline.units) > 1 or plan.unit_bytes[number] < HEAD_BYTES or not self._work.has_head(number):
            return None
        pieces = self._work.schedule.block(outline).pieces
        num_rows = max(piece.last for piece in pieces)
        if num_rows > HEAD_SHARE * plan.unit_rows[number]:
            return None
        return _Unit(number, head_rows=num_rows, num_users=1)

    def _deal(self, fresh: list[_Unit]) -> None:
        plan = self._work.plan
        tasks = [Task(u.number, int(plan.unit_bytes[u.number]), int(plan.unit_rows[u.number])) for u in fresh]
        for queue, numbers in zip(self._queues, self._work.strategy(tasks, len(self._queues)), strict=True):
            queue.extend(self._units[number] for number in numbers)
        if self._work.fetcher is not None:
            for unit in fresh:
                self._work.fetcher.ahead(unit.number)

    def _block_to_assemble(self) -> _Pending | None:
        for place, pending in enumerate(itertools.islice(self._pending, MAX_BLOCKS_ASSEMBLED)):
            if pending.is_claimed:
                continue
            num_bytes = int(self._rows_of_block(pending) * self._row_bytes())
            if not pending.is_ready or (place and not self._fits(num_bytes)):
                return None
            pending.is_claimed = True
            pending.num_bytes = num_bytes
            self._hold(num_bytes)
            return pending
        return None

    def _rows_of_block(self, pending: _Pending) -> int:
        return pending.outline.num_batches * self._work.schedule.steps.batch_size

    def _unit_to_decode(self, worker: int) -> _Unit | None:
        queue = self._queues[worker] or max(self._queues, key=len)
        if not queue or self._is_beginning():
            return None
        urgent = next((pending for pending in self._pending if not pending.is_claimed), None)
        wanted = [] if urgent is None else [unit for unit in urgent.units if not unit.is_started]
        unit = queue[0]
        if wanted and unit not in wanted:  # whoever's it is: the caller waits for it
            unit = wanted[0]
            queue = next(queue for queue in self._queues if unit in queue)
        is_needed = bool(wanted) and urgent is self._pending[0]
        if not is_needed and not self._fits(self._estimate(unit)):
            return None
        queue.remove(unit)
        unit.is_started = True
        unit.num_bytes = self._estimate(unit)
        self._hold(unit.num_bytes)
        return unit

    def _is_beginning(self) -> bool:
        """Whether a head is being made: whoever takes fresh memory for something else meanwhile holds it up."""
        first = self._pending[0] if self._pending else None
        return (
            first is not None
            and first.is_head
            and first.batches is None
            and first.error is None
            and all(unit.is_started for unit in first.units)
        )

    def _planned_bytes(self, unit: _Unit) -> int:
        plan = self._work.plan
        whole = int(plan.unit_bytes[unit.number])
        return whole * unit.head_rows // int(plan.unit_rows[unit.number]) if unit.head_rows else whole

    def _estimate(self, unit: _Unit) -> int:
        ratio = self._bytes_decoded / self._bytes_planned if self._bytes_planned else FIRST_GUESS
        return int(self._planned_bytes(unit) * ratio)

    def _row_bytes(self) -> float:
        return self._bytes_decoded / self._rows_decoded if self._rows_decoded else self._work.row_bytes

    def _most_rows(self) -> int:
        assert self._work.block_bytes is not None
        return int(self._work.block_bytes / max(1.0, self._row_bytes()))

    def _fits(self, num_bytes: int) -> bool:
        window_bytes = self._work.schedule.window_rows * self._row_bytes()
        return self._held_bytes + num_bytes <= self._work.budget_bytes + window_bytes

    def _decode(self, unit: _Unit, decoder: Decoder, recorder: WorkerRecorder) -> None:
        recorder.enter(State.DECODE)
        chunk: Chunk | None = None
        error: BaseException | None = None
        try:
            chunk = self._work.convert(unit.number, _rows_of(unit, decoder))
        except Exception as found:  # noqa: BLE001 - told to whoever waits for the unit
            if self._is_closed:  # what was stopped has not failed
                return
            recorder.failed()
            if self._work.skips_bad_units and isinstance(found, (DataFileInvalid, DataFileMissing)):
                self._work.on_skip(unit.number, found)
            else:
                error = _told(found)
        with self._changed:
            num_bytes = 0 if chunk is None else chunk.nbytes
            self._hold(num_bytes - unit.num_bytes)
            unit.chunk, unit.error, unit.num_bytes, unit.is_done = chunk, error, num_bytes, True
            if chunk is not None:
                self._bytes_planned += max(1, self._planned_bytes(unit))
                self._bytes_decoded += num_bytes
                self._rows_decoded += chunk.num_rows
            self._changed.notify_all()

    def _assemble(self, pending: _Pending, decoder: Decoder, recorder: WorkerRecorder) -> None:
        recorder.enter(State.ASSEMBLE)
        batches: Batches | None = None
        error = next((unit.error for unit in pending.units if unit.error is not None), None)
        if error is None:
            try:
                block = self._work.schedule.block(pending.outline)
                chunks = {unit.number: unit.chunk for unit in pending.units}
                batches = assemble(block, chunks, self._work.present, lambda: self._find_spare(decoder))
                recorder.assembled(block.num_batches)
            except Exception as found:  # noqa: BLE001 - told to whoever waits for the block
                error = _told(found)
        with self._changed:
            pending.batches, pending.error = batches, error
            num_bytes = 0 if batches is None else batches.num_bytes
            self._hold(num_bytes - pending.num_bytes)
            pending.num_bytes = num_bytes
            for unit in pending.units:
                unit.num_users -= 1
                if not unit.num_users:
                    if not unit.head_rows:
                        del self._units[unit.number]
                    self._hold(-unit.num_bytes)
            pending.units = []
            self._changed.notify_all()

    def _find_spare(self, decoder: Decoder) -> Chunk | None:
        """A row that can be read, from wherever: rare, so it is looked for only when it is needed."""
        for number in range(self._work.plan.num_units):
            with contextlib.suppress(DataFileInvalid, DataFileMissing):
                return gather([self._work.convert(number, decoder.decode(number))], np.zeros(1, dtype=np.int64))
        return None

    def _hold(self, num_bytes: int) -> None:
        self._held_bytes += num_bytes
        self._work.recorder.buffered(self._held_bytes)


def _rows_of(unit: _Unit, decoder: Decoder) -> Any:
    if not unit.head_rows:
        return decoder.decode(unit.number)
    assert isinstance(decoder, HeadDecoder)
    return decoder.decode_head(unit.number, unit.head_rows)


def _told(error: BaseException) -> BaseException:
    """As it may be raised in a loop: a StopIteration would end it as if the epoch were over."""
    if not isinstance(error, StopIteration):
        return error
    told = DataError("a worker met a StopIteration, from split_strategy or from a file system")
    told.__cause__ = error
    return told
