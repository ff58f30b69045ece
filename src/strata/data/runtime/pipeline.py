"""The pipeline: decode threads that work ahead, and the caller that takes batches, around one lock.

A worker, one of the decode threads, assembles the next block if all of its row groups are decoded; otherwise it decodes
the row group that is needed soonest. Two limits hold it back: the bytes that are decoded, assembled or held by the
caller, and the number of assembled blocks. The block that the caller takes next is exempt from both, so the limits
cannot cause a deadlock.

A *window* is one filling of the shuffle buffer. A window that is too large for one block needs all of its row groups
for its first block, and would hold them until the last. Therefore the rows of a row group are *dealt* to the blocks of
the window as soon as it is decoded, and the row group is freed. Such blocks are small enough to be gathered within the
CPU cache. Several consecutive blocks, a *share*, get their rows of a row group in one allocation: this needs fewer
copies, and a delivered share still frees memory for row groups of the next window.

One block may need all row groups of a plan, a hundred thousand or more. The work per row group under the lock must
therefore not depend on their number.
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
    from strata.data.order.bins import BinSchedule
    from strata.data.order.schedule import Block, Outline, Rows, Schedule
    from strata.data.plan.plan import Plan
    from strata.data.runtime.decoder import Decoder
    from strata.data.runtime.metrics import LoaderRecorder, WorkerRecorder
    from strata.data.runtime.prefetch import Fetcher

MAX_BLOCKS_AHEAD = 1024
"""Maximum number of blocks scheduled ahead. A scheduled block takes little memory; its row groups take much."""
MAX_BLOCKS_ASSEMBLED = 3
"""The block that the caller takes from, and one more for each of two workers."""
HEAD_BYTES = 4 << 20
"""Encoded size from which the first rows of a row group are decoded separately, if the first block needs no others."""
HEAD_SHARE = 0.25
"""Maximum share of the row group for this, because its first rows are decoded again with the rest."""
JOIN_S = 5.0
"""Seconds that `close` waits for threads in native code."""


@dataclass(slots=True, eq=False)
class _RowGroup:
    """A row group that pending blocks need."""

    number: int
    head_rows: int = 0
    """Decode only this many rows, from the first; 0: all rows."""
    users: set[_PendingBlock] = field(default_factory=set)
    """Blocks that need it and are not assembled yet."""
    is_started: bool = False
    is_done: bool = False
    is_dealt: bool = False
    """Each user holds its own rows of it."""
    chunk: Chunk | None = None
    """None if done but not dealt: the row group is unreadable and skipped."""
    error: BaseException | None = None
    num_bytes: int = 0
    """Decoded size; an estimate until it is done."""


@dataclass(frozen=True, slots=True, eq=False)
class _IndexedBlock:
    """A block, and the indices of its pieces by row group."""

    block: Block
    pieces_of: dict[int, list[int]]

    @classmethod
    def of(cls, block: Block) -> _IndexedBlock:
        pieces_of: dict[int, list[int]] = {}
        for index, piece in enumerate(block.pieces):
            pieces_of.setdefault(piece.row_group, []).append(index)
        return cls(block, pieces_of)


@dataclass(slots=True, eq=False)
class _Window:
    """The blocks of one window, computed together."""

    outlines: Sequence[Outline]
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while `blocks` is computed."""
    blocks: list[_IndexedBlock | None] | None = None
    """Computed on the first access; an entry becomes None once its block is assembled."""

    @property
    def is_whole(self) -> bool:
        """Whether one block delivers the whole window."""
        return len(self.outlines) == 1

    def block_at(self, index: int, schedule: Schedule | BinSchedule) -> _IndexedBlock:
        """Return the block with this index in the window."""
        with self.lock:
            if self.blocks is None:
                self.blocks = [_IndexedBlock.of(block) for block in schedule.blocks_of_window(self.outlines)]
        found = self.blocks[index]
        assert found is not None, "a block is assembled only once"
        return found

    def drop(self, index: int) -> None:
        if self.blocks is not None:
            self.blocks[index] = None


@dataclass(slots=True, eq=False)
class _Share:
    """Consecutive blocks of a window that get their rows of a row group in one copy, freed with the last block."""

    num_blocks: int = 0
    """Blocks that are not assembled yet."""
    num_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Part:
    """The position of a block in its window."""

    window: _Window
    index: int
    share: _Share


@dataclass(slots=True, eq=False)
class _PendingBlock:
    """A block that is scheduled and not taken yet."""

    outline: Outline
    part: _Part | None = None
    row_groups: list[_RowGroup] = field(default_factory=list)
    num_missing: int = 0
    """Row groups that are not decoded yet."""
    next_row_group: int = 0
    """Index in `row_groups`; decoding of all row groups before it has started."""
    is_head: bool = False
    """Needs only the first rows of a row group; no other row group is decoded until it is assembled."""
    is_claimed: bool = False
    dealt: dict[int, Chunk] = field(default_factory=dict)
    """Rows of row groups that are already freed, by the index of the piece in the block."""
    num_bytes: int = 0
    """Size of its batches; an estimate from when it is claimed until it is assembled."""
    batches: Batches | None = None
    error: BaseException | None = None

    @property
    def shares_window(self) -> bool:
        """Whether its window has other blocks too."""
        return self.part is not None and not self.part.window.is_whole

    @property
    def is_ready(self) -> bool:
        return not self.num_missing

    def first_unstarted(self) -> _RowGroup | None:
        """Return the first row group whose decoding has not started."""
        while self.next_row_group < len(self.row_groups) and self.row_groups[self.next_row_group].is_started:
            self.next_row_group += 1
        return self.row_groups[self.next_row_group] if self.next_row_group < len(self.row_groups) else None


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """What a pipeline reads, and how."""

    plan: Plan
    schedule: Schedule | BinSchedule
    decoders: Sequence[Decoder]
    convert: Callable[[int, Any], Chunk]
    """Converts the decoded rows of a row group, given its number, to columns."""
    present: Callable[[Chunk, Sequence[int]], list[Any]]
    """Cuts a chunk into batches of these sizes, in the output format."""
    strategy: Strategy
    recorder: LoaderRecorder
    prefetch_bytes: int
    """Maximum bytes in memory, in addition to one window."""
    row_bytes: int = 1
    """Estimated bytes of a delivered row, used until rows have been decoded."""
    block_bytes: int | None = None
    """Maximum size of a block; None: only the schedule limits it."""
    has_head: Callable[[int], bool] = field(default=lambda _row_group: False)
    """Whether the decoders can decode only the first rows of a row group; they are `HeadDecoder`s then."""
    fetcher: Fetcher | None = None
    """Prefetches the bytes of scheduled row groups."""
    skips_bad_row_groups: bool = False
    on_skip: Callable[[int, BaseException], None] = field(default=lambda _row_group, _error: None)


class Pipeline:
    """Runs one pass: `start` starts the decode threads, `take` returns block after block, `close` ends the threads."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._changed = threading.Condition()
        self._is_closed = False
        self._error: BaseException | None = None
        """Why a worker died; `take` raises it."""
        self._pending: deque[_PendingBlock] = deque()
        self._row_groups: dict[int, _RowGroup] = {}
        self._queues: list[deque[_RowGroup]] = [deque() for _ in work.decoders]
        """Row groups to decode, by worker. One that another worker took out of turn is dropped when it comes first."""
        self._num_queued = 0
        """Row groups in the queues whose decoding has not started."""
        self._windows = _group_by_window(work.schedule.outlines(max_rows=self._max_block_rows))
        self._has_more = True
        self._held_bytes = 0
        """Bytes of row groups in memory, of blocks claimed and not taken, and of the block taken last."""
        self._taken_bytes = 0
        """Bytes of the block taken last: its batches are views of one allocation, held until the next `take`."""
        self._bytes_planned = 0
        self._rows_decoded = 0
        self._bytes_decoded = 0
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads.

        Separate from the constructor, so that the owner can already close the pipeline when the first thread runs.
        """
        with self._changed:
            if self._is_closed:
                for decoder in self._work.decoders:
                    decoder.close()
                return
            for worker in range(len(self._work.decoders)):
                thread = threading.Thread(target=self._run, args=(worker,), name=f"strata-data-{worker}", daemon=True)
                thread.start()
                self._threads.append(thread)

    def take(self, *, waits: bool = True) -> Batches | None:
        """Return the batches of the next block, or None after the last; with `waits=False` also if none is assembled.

        Raises:
            Whatever decoding the block raised. Every further call raises it again.
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
                if not waits:
                    return None
                self._changed.wait()

    def close(self) -> None:
        """Stop the threads and free everything that is decoded. A second call does nothing."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        for decoder in self._work.decoders:
            decoder.abort()
        if self._work.fetcher is not None:
            self._work.fetcher.cancel()  # workers may wait for it
        now_s = SystemClock.monotonic_s
        end_s = now_s() + JOIN_S
        # The garbage collector may close a pass in a worker that holds the lock; the other workers could not end then.
        for thread in () if threading.current_thread() in self._threads else self._threads:
            thread.join(max(0.0, end_s - now_s()))
        if self._work.fetcher is not None:
            self._work.fetcher.close()
        with self._changed:
            self._pending.clear()
            self._row_groups.clear()
            self._hold(-self._held_bytes)

    # Run by workers

    def _run(self, worker: int) -> None:
        recorder, decoder = self._work.recorder.workers[worker], self._work.decoders[worker]
        try:
            while True:
                job = self._next_job(worker, recorder)
                if job is None:
                    return
                if isinstance(job, _RowGroup):
                    self._decode(job, decoder, recorder)
                else:
                    self._assemble(job, decoder, recorder)
        except BaseException as error:  # noqa: BLE001 - `take` raises it, whatever it is
            with self._changed:
                self._error = _raisable(error)
                self._changed.notify_all()
        finally:
            recorder.enter(State.OFF)
            decoder.close()

    def _next_job(self, worker: int, recorder: WorkerRecorder) -> _RowGroup | _PendingBlock | None:
        with self._changed:
            while not self._is_closed:
                self._schedule_ahead()
                job = self._block_to_assemble() or self._row_group_to_decode(worker)
                if job is not None:
                    return job
                is_held_back = self._num_queued > 0 or any(not p.is_claimed and p.is_ready for p in self._pending)
                recorder.enter(State.BLOCKED if is_held_back else State.IDLE)
                if not self._has_more and not self._pending:
                    return None
                self._changed.wait()
        return None

    def _schedule_ahead(self) -> None:
        """Schedule whole windows until the queues have two row groups per worker."""
        fresh: list[_RowGroup] = []
        while self._num_queued + len(fresh) < 2 * len(self._queues) and self._can_schedule_more():
            fresh += self._add_window()
        if fresh:
            self._enqueue(fresh)

    def _schedule_beyond(self, row_group: _RowGroup) -> None:
        """Schedule one more window if the last one has several blocks and needs this row group.

        At the border of two windows, every lane has a row group that both need. It can be dealt only if all of its
        users are known.
        """
        last = self._pending[-1] if self._pending and not self._is_closed else None
        if last is None or last not in row_group.users or not last.shares_window or not self._can_schedule_more():
            return
        if fresh := self._add_window():
            self._enqueue(fresh)

    def _can_schedule_more(self) -> bool:
        return self._has_more and len(self._pending) < MAX_BLOCKS_AHEAD

    def _add_window(self) -> list[_RowGroup]:
        """Append the blocks of the next window. Return the row groups that no earlier block needs."""
        outlines = next(self._windows, None)
        if outlines is None:
            self._has_more = False
            self._changed.notify_all()
            return []
        fresh = []
        for pending in self._make_pending(outlines):
            self._pending.append(pending)
            fresh += self._attach_row_groups(pending)
        return fresh

    def _make_pending(self, outlines: Sequence[Outline]) -> list[_PendingBlock]:
        schedule = self._work.schedule
        if not schedule.has_windows:
            return [_PendingBlock(outline) for outline in outlines]
        rows_of_block = max(1, outlines[0].num_rows)
        per_share = max(1, min(schedule.block_rows, self._max_block_rows()) // rows_of_block)
        window, shares = _Window(outlines), [_Share() for _ in range(0, len(outlines), per_share)]
        pendings = []
        for index, outline in enumerate(outlines):
            share = shares[index // per_share]
            share.num_blocks += 1
            pendings.append(_PendingBlock(outline, _Part(window, index, share)))
        return pendings

    def _attach_row_groups(self, pending: _PendingBlock) -> list[_RowGroup]:
        """Attach the row groups of a block. Return those that no earlier block needs."""
        if not pending.outline.first_batch and (head := self._find_head(pending.outline)) is not None:
            pending.is_head = True
            self._attach(pending, head)
            self._queues[0].append(head)
            self._num_queued += 1
            return []
        fresh = []
        for number in pending.outline.row_groups:
            row_group = self._row_groups.get(number)
            if row_group is None:
                row_group = self._row_groups[number] = _RowGroup(number)
                fresh.append(row_group)
            self._attach(pending, row_group)
        return fresh

    def _attach(self, pending: _PendingBlock, row_group: _RowGroup) -> None:
        pending.row_groups.append(row_group)
        row_group.users.add(pending)
        pending.num_missing += not row_group.is_done

    def _find_head(self, outline: Outline) -> _RowGroup | None:
        """Return the first rows of a large row group, if the first block needs only these: they are decoded sooner."""
        plan, number = self._work.plan, outline.row_groups[0]
        if len(outline.row_groups) > 1 or plan.unit_bytes[number] < HEAD_BYTES or not self._work.has_head(number):
            return None
        pieces = self._work.schedule.block(outline).pieces
        num_rows = max(piece.last for piece in pieces)
        if num_rows > HEAD_SHARE * plan.unit_rows[number]:
            return None
        return _RowGroup(number, head_rows=num_rows)

    def _enqueue(self, fresh: list[_RowGroup]) -> None:
        """Distribute row groups to the queues of the workers, and prefetch their bytes."""
        plan = self._work.plan
        tasks = [Task(g.number, int(plan.unit_bytes[g.number]), int(plan.unit_rows[g.number])) for g in fresh]
        for queue, numbers in zip(self._queues, self._work.strategy(tasks, len(self._queues)), strict=True):
            queue.extend(self._row_groups[number] for number in numbers)
        self._num_queued += len(fresh)
        if self._work.fetcher is not None:
            for row_group in fresh:
                self._work.fetcher.ahead(row_group.number)

    def _block_to_assemble(self) -> _PendingBlock | None:
        for index, pending in enumerate(itertools.islice(self._pending, MAX_BLOCKS_ASSEMBLED)):
            if pending.is_claimed:
                continue
            num_bytes = int(pending.outline.num_rows * self._row_bytes())
            if not pending.is_ready or (index and not self._fits(num_bytes)):
                return None
            pending.is_claimed = True
            pending.num_bytes = num_bytes
            self._hold(num_bytes)
            return pending
        return None

    def _row_group_to_decode(self, worker: int) -> _RowGroup | None:
        if not self._num_queued or self._is_making_head():
            return None
        urgent = next((pending for pending in self._pending if not pending.is_claimed), None)
        wanted = None if urgent is None else urgent.first_unstarted()
        row_group = self._first_queued(worker)
        if wanted is not None and urgent not in row_group.users:  # in any queue: the caller waits for it
            row_group = wanted
        is_needed = wanted is not None and urgent is self._pending[0]
        if not is_needed and not self._fits(self._estimate_bytes(row_group)):
            return None
        self._num_queued -= 1
        row_group.is_started = True
        row_group.num_bytes = self._estimate_bytes(row_group)
        self._hold(row_group.num_bytes)
        return row_group

    def _first_queued(self, worker: int) -> _RowGroup:
        """Return the first row group of the worker's own queue, or of the longest one if its own is empty."""
        own = self._queues[worker]
        while True:
            queue = own or max(self._queues, key=len)
            if not queue[0].is_started:
                return queue[0]
            queue.popleft()

    def _is_making_head(self) -> bool:
        """Return whether a head is in progress. Other work, which allocates fresh memory, would delay it."""
        first = self._pending[0] if self._pending else None
        return (
            first is not None
            and first.is_head
            and first.batches is None
            and first.error is None
            and all(row_group.is_started for row_group in first.row_groups)
        )

    def _planned_bytes(self, row_group: _RowGroup) -> int:
        plan = self._work.plan
        whole = int(plan.unit_bytes[row_group.number])
        return whole * row_group.head_rows // int(plan.unit_rows[row_group.number]) if row_group.head_rows else whole

    def _estimate_bytes(self, row_group: _RowGroup) -> int:
        if not self._bytes_planned:
            return self._work.row_bytes * (row_group.head_rows or int(self._work.plan.unit_rows[row_group.number]))
        return int(self._planned_bytes(row_group) * self._bytes_decoded / self._bytes_planned)

    def _row_bytes(self) -> float:
        return self._bytes_decoded / self._rows_decoded if self._rows_decoded else self._work.row_bytes

    def _max_block_rows(self) -> int:
        """Return the maximum number of rows of a block."""
        if self._work.block_bytes is None:
            return self._work.schedule.block_rows
        return int(self._work.block_bytes / max(1.0, self._row_bytes()))

    def _fits(self, num_bytes: int) -> bool:
        shuffle_buffer_bytes = self._work.schedule.shuffle_buffer_rows * self._row_bytes()
        return self._held_bytes + num_bytes <= self._work.prefetch_bytes + shuffle_buffer_bytes

    def _decode(self, row_group: _RowGroup, decoder: Decoder, recorder: WorkerRecorder) -> None:
        recorder.enter(State.DECODE)
        chunk: Chunk | None = None
        error: BaseException | None = None
        try:
            chunk = self._work.convert(row_group.number, _decode_rows(row_group, decoder))
        except Exception as found:  # noqa: BLE001 - raised by the blocks that need the row group
            if self._is_closed:  # aborted, not failed
                return
            recorder.failed()
            if self._work.skips_bad_row_groups and isinstance(found, (DataFileInvalid, DataFileMissing)):
                self._work.on_skip(row_group.number, found)
            else:
                error = _raisable(found)
        num_bytes = 0 if chunk is None else chunk.nbytes
        with self._changed:
            self._hold(num_bytes - row_group.num_bytes)
            row_group.error, row_group.num_bytes = error, num_bytes
            if chunk is not None:
                self._bytes_planned += max(1, self._planned_bytes(row_group))
                self._bytes_decoded += num_bytes
                self._rows_decoded += chunk.num_rows
                self._schedule_beyond(row_group)
            # A user that is added after this, while the rows are dealt, needs the whole row group.
            users = tuple(row_group.users)
        dealt: list[_DealtRows] = []
        if chunk is not None and not row_group.head_rows and any(user.shares_window for user in users):
            try:
                dealt = self._deal(row_group.number, chunk, users)
            except Exception as found:  # noqa: BLE001 - raised by the blocks that need the row group
                row_group.error = _raisable(found)
        with self._changed:
            if self._is_closed:
                return
            if dealt and len(row_group.users) == len(users):
                self._replace_by_dealt(row_group, dealt)
            else:
                row_group.chunk = chunk
            row_group.is_done = True
            for user in row_group.users:
                user.num_missing -= 1
            self._changed.notify_all()

    def _deal(self, number: int, chunk: Chunk, users: Sequence[_PendingBlock]) -> list[_DealtRows]:
        """Copy the rows of a row group for each share; return [] if blocks not scheduled yet need some of them."""
        shares: dict[_Share, list[tuple[_PendingBlock, int, Rows]]] = {}
        num_rows = 0
        for user in sorted(users, key=lambda user: user.outline.first_batch):
            assert user.part is not None, "either all blocks have a window or none has"
            found = user.part.window.block_at(user.part.index, self._work.schedule)
            for index in found.pieces_of.get(number, ()):
                piece = found.block.pieces[index]
                rows = piece.rows
                if rows is None:
                    if not user.part.window.is_whole:
                        return []
                    rows = np.arange(piece.first, piece.last)
                shares.setdefault(user.part.share, []).append((user, index, rows))
                num_rows += len(rows)
        if num_rows != chunk.num_rows:
            return []
        copies = deal(chunk, [np.concatenate([rows for _, _, rows in pieces]) for pieces in shares.values()])
        return [
            _DealtRows.of(share, pieces, copy) for (share, pieces), copy in zip(shares.items(), copies, strict=True)
        ]

    def _replace_by_dealt(self, row_group: _RowGroup, dealt: Sequence[_DealtRows]) -> None:
        """Free a row group whose users now hold their own rows of it."""
        for each in dealt:
            for user, index, piece in each.pieces:
                user.dealt[index] = piece
            each.share.num_bytes += each.num_bytes
            self._hold(each.num_bytes)
        self._hold(-row_group.num_bytes)
        row_group.num_bytes, row_group.is_dealt = 0, True
        del self._row_groups[row_group.number]

    def _assemble(self, pending: _PendingBlock, decoder: Decoder, recorder: WorkerRecorder) -> None:
        recorder.enter(State.ASSEMBLE)
        batches: Batches | None = None
        error = next((row_group.error for row_group in pending.row_groups if row_group.error is not None), None)
        if error is None:
            try:
                block = self._block(pending)
                chunks = {
                    row_group.number: row_group.chunk for row_group in pending.row_groups if not row_group.is_dealt
                }
                batches = assemble(
                    block, chunks, self._work.present, lambda: self._find_spare(decoder), dealt=pending.dealt
                )
                recorder.assembled(block.num_batches)
            except Exception as found:  # noqa: BLE001 - `take` raises it
                error = _raisable(found)
        with self._changed:
            pending.batches, pending.error = batches, error
            num_bytes = 0 if batches is None else batches.num_bytes
            self._hold(num_bytes - pending.num_bytes)
            pending.num_bytes = num_bytes
            for row_group in pending.row_groups:
                row_group.users.discard(pending)
                if not row_group.users and not row_group.is_dealt:
                    if not row_group.head_rows:
                        del self._row_groups[row_group.number]
                    self._hold(-row_group.num_bytes)
            if pending.part is not None:
                self._release_part(pending.part)
            pending.row_groups, pending.dealt, pending.part = [], {}, None
            self._changed.notify_all()

    def _block(self, pending: _PendingBlock) -> Block:
        if pending.part is None:
            return self._work.schedule.block(pending.outline)
        return pending.part.window.block_at(pending.part.index, self._work.schedule).block

    def _release_part(self, part: _Part) -> None:
        """Release what the window and the share keep for a block that is assembled."""
        part.window.drop(part.index)
        part.share.num_blocks -= 1
        if not part.share.num_blocks:
            self._hold(-part.share.num_bytes)

    def _find_spare(self, decoder: Decoder) -> Chunk | None:
        """Return any readable row of the dataset. Rarely needed, so it is not kept."""
        for number in range(self._work.plan.num_units):
            with contextlib.suppress(DataFileInvalid, DataFileMissing):
                return gather([self._work.convert(number, decoder.decode(number))], np.zeros(1, dtype=np.int64))
        return None

    def _hold(self, num_bytes: int) -> None:
        """Add to the bytes in memory, or subtract if negative."""
        self._held_bytes += num_bytes
        self._work.recorder.buffered(self._held_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class _DealtRows:
    """The rows of one row group that the blocks of a share get."""

    share: _Share
    pieces: list[tuple[_PendingBlock, int, Chunk]]
    """The block, the index of the piece in it, and its rows: a slice of the share's copy."""
    num_bytes: int

    @classmethod
    def of(cls, share: _Share, wanted: Sequence[tuple[_PendingBlock, int, Rows]], copied: Chunk) -> _DealtRows:
        """Slice `copied`, the concatenated rows of all wanted pieces."""
        ends = itertools.accumulate(len(rows) for _, _, rows in wanted)
        pieces = [
            (user, index, copied.slice(end - len(rows), end))
            for (user, index, rows), end in zip(wanted, ends, strict=True)
        ]
        return cls(share, pieces, copied.nbytes)


def _group_by_window(outlines: Iterator[Outline]) -> Iterator[list[Outline]]:
    """Group the blocks by window; without a shuffle, each block is alone."""
    found: list[Outline] = []
    for outline in outlines:
        found.append(outline)
        if outline.ends_window:
            yield found
            found = []


def _decode_rows(row_group: _RowGroup, decoder: Decoder) -> Any:
    if not row_group.head_rows:
        return decoder.decode(row_group.number)
    assert isinstance(decoder, HeadDecoder)
    return decoder.decode_head(row_group.number, row_group.head_rows)


def _raisable(error: BaseException) -> BaseException:
    """Return the error, wrapped if it is a StopIteration, which would end the caller's loop like a complete epoch."""
    if not isinstance(error, StopIteration):
        return error
    wrapped = DataError("a worker raised StopIteration; check split_strategy and the file system")
    wrapped.__cause__ = error
    return wrapped
