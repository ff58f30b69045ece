"""Threads that decode ahead, and the caller who takes batches, around one lock.

A worker does whatever is due first: assemble a block whose units are all decoded, else decode the unit that is needed
soonest. Two bounds hold it back: what is decoded, assembled or in the caller's hands, in bytes, and the blocks that are
assembled. What the block that the caller takes next needs is always allowed, so neither bound can stop the work.

A window that is too large for one block needs all of its units for the first block, and would hold them until the
last. So the rows of a unit are *dealt* to the blocks of the window as soon as it is decoded, and the unit is freed.
Blocks are then small enough to be gathered within the CPU's cache. Several of them, a *share*, get their rows of a unit
in one piece of memory: fewer copies, while a share that is delivered still makes room for units of the next window.

A plan may have a hundred thousand units, all of which one block needs: what is done under the lock for a unit must not
depend on how many others there are.
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
from strata.data.batch.assembly import assemble
from strata.data.batch.columns import deal, gather
from strata.data.order.assignment import Task
from strata.data.runtime.decoder import HeadDecoder
from strata.data.runtime.metrics import State
from strata.errors import DataError, DataFileInvalid, DataFileMissing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from strata.data.batch.assembly import Batches
    from strata.data.batch.columns import Chunk
    from strata.data.order.assignment import Strategy
    from strata.data.order.schedule import Block, Outline, Rows, Schedule
    from strata.data.plan.plan import Plan
    from strata.data.runtime.decoder import Decoder
    from strata.data.runtime.metrics import LoaderRecorder, WorkerRecorder
    from strata.data.runtime.prefetch import Fetcher

MAX_BLOCKS_AHEAD = 1024
"""How far the schedule is worked out. Blocks are small; their units are what takes memory."""
MAX_BLOCKS_ASSEMBLED = 3
"""One that the caller takes from, and one more for each of two workers."""
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
    users: set[_Pending] = field(default_factory=set)
    """Blocks that are not yet assembled and need it."""
    is_started: bool = False
    is_done: bool = False
    is_dealt: bool = False
    """Its users have their rows of it."""
    chunk: Chunk | None = None
    """None when done and not dealt: it could not be read and is skipped."""
    error: BaseException | None = None
    num_bytes: int = 0
    """Decoded; an estimate until it is done."""


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """Of a block, and which of them are of which unit."""

    block: Block
    places: dict[int, list[int]]

    @classmethod
    def of(cls, block: Block) -> _Pieces:
        places: dict[int, list[int]] = {}
        for place, piece in enumerate(block.pieces):
            places.setdefault(piece.unit, []).append(place)
        return cls(block, places)


@dataclass(slots=True, eq=False)
class _Window:
    """What its blocks have in common."""

    outlines: Sequence[Outline]
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while `pieces` are worked out."""
    pieces: list[_Pieces | None] | None = None
    """Of each block, until it is assembled; all are worked out when the first is asked for."""

    @property
    def is_whole(self) -> bool:
        """Made in one block."""
        return len(self.outlines) == 1

    def pieces_of(self, place: int, schedule: Schedule) -> _Pieces:
        """`place`: of the block in its window."""
        with self.lock:
            if self.pieces is None:
                self.pieces = [_Pieces.of(block) for block in schedule.blocks_of_window(self.outlines)]
        found = self.pieces[place]
        assert found is not None, "a block is assembled once"
        return found

    def forget(self, place: int) -> None:
        if self.pieces is not None:
            self.pieces[place] = None


@dataclass(slots=True, eq=False)
class _Share:
    """Consecutive blocks of a window. They get their rows of a unit in one copy, which is freed with the last block."""

    num_blocks: int = 0
    """Not yet assembled."""
    num_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Part:
    """Where a block is in its window."""

    window: _Window
    place: int
    share: _Share


@dataclass(slots=True, eq=False)
class _Pending:
    outline: Outline
    part: _Part | None = None
    units: list[_Unit] = field(default_factory=list)
    num_missing: int = 0
    """Units that are not decoded."""
    next_unit: int = 0
    """All units before this one are started."""
    is_head: bool = False
    """Of a unit that is not decoded as a whole: nothing else is decoded until this is there."""
    is_claimed: bool = False
    dealt: dict[int, Chunk] = field(default_factory=dict)
    """Rows of units that are freed, by the place of the piece in the block."""
    num_bytes: int = 0
    """Of its batches; an estimate from when it is claimed until they are there."""
    batches: Batches | None = None
    error: BaseException | None = None

    @property
    def is_part(self) -> bool:
        """Whether there are other blocks in its window."""
        return self.part is not None and not self.part.window.is_whole

    @property
    def is_ready(self) -> bool:
        return not self.num_missing

    def first_unstarted(self) -> _Unit | None:
        while self.next_unit < len(self.units) and self.units[self.next_unit].is_started:
            self.next_unit += 1
        return self.units[self.next_unit] if self.next_unit < len(self.units) else None


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
        """Units to decode. One that another worker took out of turn stays until it is the first, and is passed over."""
        self._num_queued = 0
        """Units in the queues that are not started."""
        self._windows = _windows(work.schedule.outlines(most_rows=self._most_rows))
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
                is_held_back = self._num_queued > 0 or any(not p.is_claimed and p.is_ready for p in self._pending)
                recorder.enter(State.BLOCKED if is_held_back else State.IDLE)
                if not self._has_more and not self._pending:
                    return None
                self._changed.wait()
        return None

    def _look_ahead(self) -> None:
        """Works out blocks until there is a unit to decode for every worker, and some more; all of a window at once."""
        fresh: list[_Unit] = []
        while self._num_queued + len(fresh) < 2 * len(self._queues) and self._can_look_further():
            fresh += self._add_window()
        if fresh:
            self._deal(fresh)

    def _look_beyond(self, unit: _Unit) -> None:
        """Works out one more window if the last one is made in parts and the unit lies in it.

        Where two windows meet there is a unit in every lane, and it can be dealt only if all that need it are known.
        """
        last = self._pending[-1] if self._pending and not self._is_closed else None
        if last is None or last not in unit.users or not last.is_part or not self._can_look_further():
            return
        if fresh := self._add_window():
            self._deal(fresh)

    def _can_look_further(self) -> bool:
        return self._has_more and len(self._pending) < MAX_BLOCKS_AHEAD

    def _add_window(self) -> list[_Unit]:
        """The next window's blocks; gives back the units that are not known."""
        outlines = next(self._windows, None)
        if outlines is None:
            self._has_more = False
            self._changed.notify_all()
            return []
        fresh = []
        for pending in self._pendings_of(outlines):
            self._pending.append(pending)
            fresh += self._begin(pending)
        return fresh

    def _pendings_of(self, outlines: Sequence[Outline]) -> list[_Pending]:
        schedule = self._work.schedule
        if not schedule.order.window_rows:
            return [_Pending(outline) for outline in outlines]
        rows_of_block = outlines[0].num_batches * schedule.steps.batch_size
        per_share = max(1, min(schedule.block_rows, self._most_rows()) // rows_of_block)
        window, shares = _Window(outlines), [_Share() for _ in range(0, len(outlines), per_share)]
        pendings = []
        for place, outline in enumerate(outlines):
            share = shares[place // per_share]
            share.num_blocks += 1
            pendings.append(_Pending(outline, _Part(window, place, share)))
        return pendings

    def _begin(self, pending: _Pending) -> list[_Unit]:
        """Finds a block's units; gives back those that were not known."""
        if not pending.outline.first_batch and (head := self._head_of(pending.outline)) is not None:
            pending.is_head = True
            self._use(pending, head)
            self._queues[0].append(head)
            self._num_queued += 1
            return []
        fresh = []
        for number in pending.outline.units:
            unit = self._units.get(number)
            if unit is None:
                unit = self._units[number] = _Unit(number)
                fresh.append(unit)
            self._use(pending, unit)
        return fresh

    def _use(self, pending: _Pending, unit: _Unit) -> None:
        pending.units.append(unit)
        unit.users.add(pending)
        pending.num_missing += not unit.is_done

    def _head_of(self, outline: Outline) -> _Unit | None:
        """If the first block is a small part of a large unit: that part, which is there sooner than the whole."""
        plan, number = self._work.plan, outline.units[0]
        if len(outline.units) > 1 or plan.unit_bytes[number] < HEAD_BYTES or not self._work.has_head(number):
            return None
        pieces = self._work.schedule.block(outline).pieces
        num_rows = max(piece.last for piece in pieces)
        if num_rows > HEAD_SHARE * plan.unit_rows[number]:
            return None
        return _Unit(number, head_rows=num_rows)

    def _deal(self, fresh: list[_Unit]) -> None:
        plan = self._work.plan
        tasks = [Task(u.number, int(plan.unit_bytes[u.number]), int(plan.unit_rows[u.number])) for u in fresh]
        for queue, numbers in zip(self._queues, self._work.strategy(tasks, len(self._queues)), strict=True):
            queue.extend(self._units[number] for number in numbers)
        self._num_queued += len(fresh)
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
        if not self._num_queued or self._is_beginning():
            return None
        urgent = next((pending for pending in self._pending if not pending.is_claimed), None)
        wanted = None if urgent is None else urgent.first_unstarted()
        unit = self._first_queued(worker)
        if wanted is not None and urgent not in unit.users:  # whoever's it is: the caller waits for it
            unit = wanted
        is_needed = wanted is not None and urgent is self._pending[0]
        if not is_needed and not self._fits(self._estimate(unit)):
            return None
        self._num_queued -= 1
        unit.is_started = True
        unit.num_bytes = self._estimate(unit)
        self._hold(unit.num_bytes)
        return unit

    def _first_queued(self, worker: int) -> _Unit:
        """Of the worker's own queue, or of the longest one."""
        own = self._queues[worker]
        while True:
            queue = own or max(self._queues, key=len)
            if not queue[0].is_started:
                return queue[0]
            queue.popleft()

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
        if not self._bytes_planned:
            return self._work.row_bytes * (unit.head_rows or int(self._work.plan.unit_rows[unit.number]))
        return int(self._planned_bytes(unit) * self._bytes_decoded / self._bytes_planned)

    def _row_bytes(self) -> float:
        return self._bytes_decoded / self._rows_decoded if self._rows_decoded else self._work.row_bytes

    def _most_rows(self) -> int:
        """Of a block."""
        if self._work.block_bytes is None:
            return self._work.schedule.block_rows
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
        num_bytes = 0 if chunk is None else chunk.nbytes
        with self._changed:
            self._hold(num_bytes - unit.num_bytes)
            unit.error, unit.num_bytes = error, num_bytes
            if chunk is not None:
                self._bytes_planned += max(1, self._planned_bytes(unit))
                self._bytes_decoded += num_bytes
                self._rows_decoded += chunk.num_rows
                self._look_beyond(unit)
            # Whoever is added from here on, while rows are dealt out, needs the unit itself.
            users = tuple(unit.users)
        dealt: list[_Dealt] = []
        if chunk is not None and not unit.head_rows and any(user.is_part for user in users):
            try:
                dealt = self._dealt(unit.number, chunk, users)
            except Exception as found:  # noqa: BLE001 - told to whoever waits for the unit
                unit.error = _told(found)
        with self._changed:
            if self._is_closed:
                return
            if dealt and len(unit.users) == len(users):
                self._give(unit, dealt)
            else:
                unit.chunk = chunk
            unit.is_done = True
            for user in unit.users:
                user.num_missing -= 1
            self._changed.notify_all()

    def _dealt(self, number: int, chunk: Chunk, users: Sequence[_Pending]) -> list[_Dealt]:
        """The unit's rows by the blocks that they belong to; nothing if blocks that are not known yet need some."""
        shares: dict[_Share, list[tuple[_Pending, int, Rows]]] = {}
        num_rows = 0
        for user in sorted(users, key=lambda user: user.outline.first_batch):
            assert user.part is not None, "all blocks are of windows, or none is"
            found = user.part.window.pieces_of(user.part.place, self._work.schedule)
            for place in found.places.get(number, ()):
                piece = found.block.pieces[place]
                rows = piece.rows
                if rows is None:
                    if not user.part.window.is_whole:
                        return []
                    rows = np.arange(piece.first, piece.last)
                shares.setdefault(user.part.share, []).append((user, place, rows))
                num_rows += len(rows)
        if num_rows != chunk.num_rows:
            return []
        copies = deal(chunk, [np.concatenate([rows for _, _, rows in pieces]) for pieces in shares.values()])
        return [_Dealt.of(share, pieces, copy) for (share, pieces), copy in zip(shares.items(), copies, strict=True)]

    def _give(self, unit: _Unit, dealt: Sequence[_Dealt]) -> None:
        """Instead of the unit, its users hold what they need of it."""
        for each in dealt:
            for user, place, piece in each.pieces:
                user.dealt[place] = piece
            each.share.num_bytes += each.num_bytes
            self._hold(each.num_bytes)
        self._hold(-unit.num_bytes)
        unit.num_bytes, unit.is_dealt = 0, True
        del self._units[unit.number]

    def _assemble(self, pending: _Pending, decoder: Decoder, recorder: WorkerRecorder) -> None:
        recorder.enter(State.ASSEMBLE)
        batches: Batches | None = None
        error = next((unit.error for unit in pending.units if unit.error is not None), None)
        if error is None:
            try:
                block = self._block(pending)
                chunks = {unit.number: unit.chunk for unit in pending.units if not unit.is_dealt}
                batches = assemble(
                    block, chunks, self._work.present, lambda: self._find_spare(decoder), dealt=pending.dealt
                )
                recorder.assembled(block.num_batches)
            except Exception as found:  # noqa: BLE001 - told to whoever waits for the block
                error = _told(found)
        with self._changed:
            pending.batches, pending.error = batches, error
            num_bytes = 0 if batches is None else batches.num_bytes
            self._hold(num_bytes - pending.num_bytes)
            pending.num_bytes = num_bytes
            for unit in pending.units:
                unit.users.discard(pending)
                if not unit.users and not unit.is_dealt:
                    if not unit.head_rows:
                        del self._units[unit.number]
                    self._hold(-unit.num_bytes)
            if pending.part is not None:
                self._leave(pending.part)
            pending.units, pending.dealt, pending.part = [], {}, None
            self._changed.notify_all()

    def _block(self, pending: _Pending) -> Block:
        if pending.part is None:
            return self._work.schedule.block(pending.outline)
        return pending.part.window.pieces_of(pending.part.place, self._work.schedule).block

    def _leave(self, part: _Part) -> None:
        """Its block is assembled."""
        part.window.forget(part.place)
        part.share.num_blocks -= 1
        if not part.share.num_blocks:
            self._hold(-part.share.num_bytes)

    def _find_spare(self, decoder: Decoder) -> Chunk | None:
        """A row that can be read, from wherever: rare, so it is looked for only when it is needed."""
        for number in range(self._work.plan.num_units):
            with contextlib.suppress(DataFileInvalid, DataFileMissing):
                return gather([self._work.convert(number, decoder.decode(number))], np.zeros(1, dtype=np.int64))
        return None

    def _hold(self, num_bytes: int) -> None:
        self._held_bytes += num_bytes
        self._work.recorder.buffered(self._held_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class _Dealt:
    """What the blocks of a share get of a unit."""

    share: _Share
    pieces: list[tuple[_Pending, int, Chunk]]
    """Whose, its place in the block, and the rows: a part of what was copied at once."""
    num_bytes: int

    @classmethod
    def of(cls, share: _Share, wanted: Sequence[tuple[_Pending, int, Rows]], copied: Chunk) -> _Dealt:
        """`copied`: what is wanted, behind one another."""
        ends = itertools.accumulate(len(rows) for _, _, rows in wanted)
        pieces = [
            (user, place, copied.slice(end - len(rows), end))
            for (user, place, rows), end in zip(wanted, ends, strict=True)
        ]
        return cls(share, pieces, copied.nbytes)


def _windows(outlines: Iterator[Outline]) -> Iterator[list[Outline]]:
    """The blocks of each window together; without windows, each block alone."""
    found: list[Outline] = []
    for outline in outlines:
        found.append(outline)
        if outline.ends_window:
            yield found
            found = []


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
