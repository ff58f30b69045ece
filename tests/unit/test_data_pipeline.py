"""The pipeline, with decoders that continue only when a test lets them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.data.batch.columns import Chunk, Dense
from strata.data.order.assignment import BY_NAME, Strategy, lpt
from strata.data.order.order import make_order
from strata.data.order.schedule import Schedule
from strata.data.order.steps import Steps
from strata.data.runtime import pipeline
from strata.data.runtime.metrics import LoaderRecorder
from strata.data.runtime.pipeline import MAX_BLOCKS_ASSEMBLED, Pipeline, Work
from strata.errors import DataFileInvalid, NoData

DEADLINE_S = 10.0
GROUP_ROWS = 10
GROUP_BYTES = GROUP_ROWS * 8
HEAD = -1
"""The argument of `decide` for a head, in place of a row group."""


class FakeDecoder:
    """Decodes row group n to the rows n × 1000, n × 1000 + 1, …, after calling `decide`."""

    def __init__(self, sizes: list[int], decide: Callable[[int], None]) -> None:
        self._sizes = sizes
        self._decide = decide
        self.decoded: list[int] = []
        self.heads: list[tuple[int, int]] = []
        self.num_closed = 0
        self.num_aborted = 0

    def decode(self, number: int) -> Any:
        self.decoded.append(number)
        self._decide(number)
        return np.arange(self._sizes[number]) + number * 1000

    def decode_head(self, number: int, num_rows: int) -> Any:
        self.heads.append((number, num_rows))
        self._decide(HEAD)
        return np.arange(num_rows) + number * 1000

    def close(self) -> None:
        self.num_closed += 1

    def abort(self) -> None:
        self.num_aborted += 1


class Rig:
    """A pipeline over row groups of these sizes, and its parts."""

    def __init__(
        self,
        sizes: list[int],
        *,
        num_workers: int = 2,
        prefetch_bytes: int = 1 << 20,
        block_rows: int = GROUP_ROWS,
        decide: Callable[[int], None] = lambda number: None,
        convert: Callable[[int, Any], Chunk] | None = None,
        present: Callable[[Chunk, Any], list[Any]] | None = None,
        strategy: Strategy = lpt,
        skips: bool = False,
        starts_small: bool = False,
        has_head: Callable[[int], bool] = lambda number: False,
        starts: bool = True,
        block_bytes: int | None = None,
        window_rows: int = 0,
        part_rows: int | None = None,
        num_lanes: int = 1,
    ) -> None:
        rows = np.array(sizes, dtype=np.int64)
        plan: Any = SimpleNamespace(
            unit_rows=rows,
            unit_bytes=rows * 8,
            split_starts=np.arange(len(sizes) + 1, dtype=np.int64),
            num_units=len(sizes),
        )
        order = make_order(
            plan, seed=0, epoch=0, shuffle=bool(window_rows), num_lanes=num_lanes, window_rows=window_rows
        )
        steps = Steps(num_rows=sum(sizes), first=0, batch_size=5, world_size=1, tail="uneven")
        self.decoders = [FakeDecoder(sizes, decide) for _ in range(num_workers)]
        self.recorder = LoaderRecorder(num_workers)
        self.skipped: list[tuple[int, str]] = []
        self.expected = [number * 1000 + row for number, size in enumerate(sizes) for row in range(size)]
        self.pipeline = Pipeline(
            Work(
                plan=plan,
                schedule=Schedule(order, steps, 0, block_rows, part_rows=part_rows, starts_small=starts_small),
                decoders=self.decoders,
                convert=convert or (lambda number, rows: Chunk({"id": Dense(rows)}, len(rows))),
                present=present or _present,
                strategy=strategy,
                recorder=self.recorder,
                prefetch_bytes=prefetch_bytes,
                block_bytes=block_bytes,
                has_head=has_head,
                skips_bad_row_groups=skips,
                on_skip=lambda row_group, error: self.skipped.append((row_group, str(error))),
            )
        )
        if starts:
            self.pipeline.start()

    def read(self) -> list[int]:
        found: list[int] = []
        while (block := self.pipeline.take()) is not None:
            found += [number for batch in block.batches for number in batch.tolist()]
        return found

    @property
    def decoded(self) -> list[int]:
        return [number for decoder in self.decoders for number in decoder.decoded]

    @property
    def heads(self) -> list[tuple[int, int]]:
        return [head for decoder in self.decoders for head in decoder.heads]

    def threads(self) -> list[threading.Thread]:
        return [thread for thread in self.pipeline._threads if thread.is_alive()]


def _present(chunk: Chunk, sizes: Any) -> list[Any]:
    column = chunk.columns["id"]
    assert isinstance(column, Dense)
    return np.split(column.values, np.cumsum(sizes)[:-1])


def _wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.001)


@contextmanager
def rig(sizes: list[int], **arguments: Any) -> Iterator[Rig]:
    made = Rig(sizes, **arguments)
    try:
        yield made
    finally:
        made.pipeline.close()
        assert made.threads() == []
        assert all(decoder.num_closed == 1 for decoder in made.decoders)


class Gate:
    """Blocks the decoding of some row groups until it is opened, and reports when one of them is reached."""

    def __init__(self, *row_groups: int) -> None:
        self._row_groups = row_groups
        self.is_reached = threading.Event()
        self._is_open = threading.Event()

    def __call__(self, number: int) -> None:
        if number in self._row_groups:
            self.is_reached.set()
            assert self._is_open.wait(DEADLINE_S)

    def open(self) -> None:
        self._is_open.set()


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    num_workers=st.integers(1, 4),
    prefetch_bytes=st.sampled_from([0, GROUP_BYTES, 1 << 20]),
    block_rows=st.sampled_from([1, 12, 1000]),
    strategy=st.sampled_from([*BY_NAME.values(), lambda tasks, n: [[t.number for t in tasks[::-1]], *[[]] * (n - 1)]]),
)
@settings(max_examples=50)
def test_every_row_is_delivered_once_and_in_order_for_any_limits_workers_and_strategy(
    sizes: list[int], num_workers: int, prefetch_bytes: int, block_rows: int, strategy: Strategy
) -> None:
    with rig(
        sizes, num_workers=num_workers, prefetch_bytes=prefetch_bytes, block_rows=block_rows, strategy=strategy
    ) as made:
        assert made.read() == made.expected
        assert made.pipeline.take() is None
        assert made.recorder.snapshot().buffered_bytes == 0


def test_blocks_are_delivered_in_order_if_later_row_groups_are_decoded_first() -> None:
    gate = Gate(0)
    seen_last = threading.Event()

    def decide(number: int) -> None:
        gate(number)
        if number == 3:
            seen_last.set()

    with rig([GROUP_ROWS] * 4, decide=decide) as made:
        assert gate.is_reached.wait(DEADLINE_S)
        assert seen_last.wait(DEADLINE_S)  # the other worker continued
        gate.open()
        assert made.read() == made.expected


def test_an_error_is_raised_in_place_of_its_rows_and_not_before() -> None:
    def decide(number: int) -> None:
        if number == 2:
            raise DataFileInvalid("row group 2 is damaged")

    with rig([GROUP_ROWS] * 4, decide=decide) as made:
        assert [made.pipeline.take() is not None for _ in range(2)] == [True, True]
        for _ in range(2):  # every call raises it
            with pytest.raises(DataFileInvalid, match="row group 2 is damaged"):
                made.pipeline.take()
        assert made.recorder.snapshot().total.errors == 1


def test_take_raises_an_error_of_conversion_or_assembly() -> None:
    def convert(number: int, rows: Any) -> Chunk:
        raise ArithmeticError(f"cannot convert {number}")

    with rig([GROUP_ROWS] * 3, convert=convert) as made, pytest.raises(ArithmeticError, match="cannot convert 0"):
        made.pipeline.take()

    def present(chunk: Chunk, sizes: Any) -> list[Any]:
        raise ArithmeticError("cannot present")

    with rig([GROUP_ROWS] * 3, present=present) as made, pytest.raises(ArithmeticError, match="cannot present"):
        made.pipeline.take()


def test_take_raises_an_error_that_belongs_to_no_row_group() -> None:
    def decide(number: int) -> None:
        raise SystemExit("a thread's own end")

    with rig([GROUP_ROWS] * 3, decide=decide) as made, pytest.raises(SystemExit, match="a thread's own end"):
        made.pipeline.take()

    def strategy(tasks: Any, num_workers: int) -> list[list[int]]:
        raise ArithmeticError("no idea")

    with rig([GROUP_ROWS] * 3, strategy=strategy) as made, pytest.raises(ArithmeticError, match="no idea"):
        made.pipeline.take()


def test_an_unreadable_row_group_is_skipped_on_request_and_other_errors_are_raised() -> None:
    def decide(number: int) -> None:
        if number == 1:
            raise DataFileInvalid("row group 1 is damaged")

    with rig([5, 5, 5, 5], decide=decide, skips=True, block_rows=20) as made:
        # Its batch repeats one row, so that every rank has the same number of batches.
        assert made.read() == [*range(5), 0, *range(2000, 2005), *range(3000, 3005)]
        assert made.skipped == [(1, "row group 1 is damaged")]

    def fail(number: int) -> None:
        raise NoData("not the file's fault")

    with rig([5, 5], decide=fail, skips=True) as made, pytest.raises(NoData, match="not the file's fault"):
        made.pipeline.take()


def test_decoding_ahead_stops_at_prefetch_bytes_and_continues_when_a_block_is_taken() -> None:
    num_row_groups, num_ahead = 40, 6
    with rig([GROUP_ROWS] * num_row_groups, num_workers=1, prefetch_bytes=num_ahead * GROUP_BYTES) as made:
        first = made.pipeline.take()
        assert first is not None
        _wait_until_held_back(made)
        # Only the row group of the block that is needed next may exceed prefetch_bytes.
        most = num_ahead + 1
        assert made.recorder.snapshot().buffered_bytes <= most * GROUP_BYTES
        assert len(made.decoded) <= most + 1
        before = len(made.decoded)
        for _ in range(3):
            made.pipeline.take()
        _wait_until_held_back(made)
        assert before < len(made.decoded) <= most + 4
        rest = made.read()
        assert rest == made.expected[4 * GROUP_ROWS :]
        assert made.recorder.snapshot().peak_buffered_bytes <= (most + 3) * GROUP_BYTES


def test_with_prefetch_bytes_0_only_the_row_group_needed_next_is_decoded() -> None:
    with rig([GROUP_ROWS] * 40, num_workers=1, prefetch_bytes=0) as made:
        assert made.pipeline.take() is not None
        _wait_until_held_back(made)
        # Taken: one. Needed next: one.
        assert len(made.decoded) == 2
        assert made.recorder.snapshot().peak_buffered_bytes <= 3 * GROUP_BYTES  # one of them decoded and assembled
        assert made.read() == made.expected[GROUP_ROWS:]


@pytest.mark.parametrize(("num_blocks", "num_assembled"), [(1, 1), (4, 2), (100, MAX_BLOCKS_ASSEMBLED)])
def test_prefetch_bytes_limits_how_many_blocks_are_assembled_ahead(num_blocks: int, num_assembled: int) -> None:
    with rig([GROUP_ROWS] * 40, num_workers=1, prefetch_bytes=num_blocks * GROUP_BYTES) as made:
        assert made.pipeline.take() is not None
        _wait_until_held_back(made)
        assert sum(pending.is_claimed for pending in made.pipeline._pending) == num_assembled
        assert made.read() == made.expected[GROUP_ROWS:]


def test_blocks_get_smaller_if_rows_are_larger_than_estimated() -> None:
    sizes = []

    def present(chunk: Chunk, batches: Any) -> list[Any]:
        sizes.append(chunk.num_rows)
        return _present(chunk, batches)

    with rig(
        [GROUP_ROWS] * 40, block_rows=400, starts_small=True, block_bytes=2 * GROUP_BYTES, present=present
    ) as made:
        assert made.read() == made.expected
        assert max(sizes[len(sizes) // 2 :]) <= 2 * GROUP_ROWS


def _wait_until_held_back(made: Rig, num_at_work: int = 0) -> None:
    """Wait until all other workers wait on the condition, which only a taken or assembled block changes."""
    deadline = threading.Event()
    timer = threading.Timer(DEADLINE_S, deadline.set)
    timer.start()
    try:
        while True:
            with made.pipeline._changed:
                if len(made.pipeline._changed._waiters) == len(made.decoders) - num_at_work:  # type: ignore[attr-defined]
                    return
            assert not deadline.is_set(), "the workers never wait"
    finally:
        timer.cancel()


def test_close_aborts_every_decoder_once_and_waits_for_a_busy_one() -> None:
    gate = Gate(0)
    made = Rig([GROUP_ROWS] * 3, decide=gate)
    assert gate.is_reached.wait(DEADLINE_S)
    closing = threading.Thread(target=made.pipeline.close)
    closing.start()
    gate.open()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert made.threads() == []
    made.pipeline.close()  # a second call does nothing
    assert [(decoder.num_aborted, decoder.num_closed) for decoder in made.decoders] == [(1, 1), (1, 1)]


def test_a_pipeline_closed_before_its_start_decodes_nothing() -> None:
    made = Rig([GROUP_ROWS] * 3, starts=False)
    made.pipeline.close()
    made.pipeline.start()
    assert made.pipeline.take() is None
    assert (made.decoded, made.threads()) == ([], [])
    assert [decoder.num_closed for decoder in made.decoders] == [1, 1]


def test_close_ends_workers_that_are_blocked_by_prefetch_bytes() -> None:
    with rig([GROUP_ROWS] * 40, num_workers=3, prefetch_bytes=0) as made:
        _wait_until_held_back(made)
        made.pipeline.close()
        assert made.threads() == []
        assert made.recorder.snapshot().total.batches < 40


def test_close_waits_once_for_all_threads_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.data.runtime.pipeline.JOIN_S", 0.5)
    gate, arrivals = Gate(*range(8)), threading.Semaphore(0)

    def decide(number: int) -> None:
        arrivals.release()
        gate(number)

    made = Rig([GROUP_ROWS] * 8, decide=decide, num_workers=8)
    assert all(arrivals.acquire(timeout=DEADLINE_S) for _ in range(8))
    began_s = time.monotonic()
    made.pipeline.close()
    took_s = time.monotonic() - began_s
    gate.open()
    for thread in made.pipeline._threads:
        thread.join(DEADLINE_S)
    assert took_s < 3, "Ctrl-C must not wait for one slow transform after another"


def test_close_wakes_a_caller_that_waits_for_a_block() -> None:
    gate = Gate(0)
    made = Rig([GROUP_ROWS] * 3, decide=gate, num_workers=1)
    assert gate.is_reached.wait(DEADLINE_S)
    is_back = threading.Event()

    def take() -> None:
        made.pipeline.take()
        is_back.set()

    threading.Thread(target=take, daemon=True).start()
    closing = threading.Thread(target=made.pipeline.close)
    closing.start()
    try:
        assert is_back.wait(DEADLINE_S)
    finally:
        gate.open()
        closing.join(DEADLINE_S)


def test_a_row_group_of_several_blocks_is_decoded_once_and_freed_after_the_last() -> None:
    with rig([35], block_rows=10) as made:
        assert made.read() == made.expected
        assert made.decoded == [0]
        assert made.recorder.snapshot().buffered_bytes == 0


# --- the first rows of a row group ---


@pytest.fixture
def small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "HEAD_BYTES", GROUP_BYTES)


@pytest.mark.usefixtures("small_heads")
def test_the_first_batch_is_delivered_before_its_row_group_or_any_other_is_decoded() -> None:
    gate, at_head = Gate(0), Gate(HEAD)

    def decide(number: int) -> None:
        at_head(number)
        gate(number)

    with rig([100, 100], decide=decide, block_rows=100, starts_small=True, has_head=lambda number: True) as made:
        assert at_head.is_reached.wait(DEADLINE_S)
        _wait_until_held_back(made, num_at_work=1)
        assert (made.heads, made.decoded) == ([(0, 5)], [])
        at_head.open()
        first = made.pipeline.take()
        assert first is not None
        assert [batch.tolist() for batch in first.batches] == [[0, 1, 2, 3, 4]]
        gate.open()
        assert made.read() == made.expected[5:]
        assert sorted(made.decoded) == [0, 1]
        assert made.recorder.snapshot().buffered_bytes == 0


@pytest.mark.parametrize(
    ("sizes", "has_head", "block_rows", "starts_small"),
    [
        ([GROUP_ROWS - 1] * 3, True, 100, True),  # small
        ([19, 100], True, 100, True),  # a quarter of it is smaller than a batch
        ([3, 100], True, 100, True),  # the first batch needs two row groups
        ([100], True, 100, False),  # the first block is large
        ([100], False, 100, True),
    ],
)
@pytest.mark.usefixtures("small_heads")
def test_a_row_group_is_decoded_once_if_decoding_its_head_does_not_help_or_is_impossible(
    sizes: list[int], has_head: bool, block_rows: int, starts_small: bool
) -> None:
    with rig(sizes, block_rows=block_rows, starts_small=starts_small, has_head=lambda number: has_head) as made:
        assert made.read() == made.expected
        assert made.heads == []
        assert sorted(made.decoded) == list(range(len(sizes)))


@pytest.mark.usefixtures("small_heads")
def test_take_raises_an_error_in_the_first_rows() -> None:
    def decide(number: int) -> None:
        if number == HEAD:
            raise DataFileInvalid("the first page is damaged")

    with rig([100, 100], decide=decide, block_rows=100, starts_small=True, has_head=lambda number: True) as made:
        for _ in range(2):
            with pytest.raises(DataFileInvalid, match="the first page is damaged"):
                made.pipeline.take()


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    num_workers=st.integers(1, 4),
    prefetch_bytes=st.sampled_from([0, GROUP_BYTES, 1 << 20]),
    block_rows=st.sampled_from([1, 12, 1000]),
)
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("small_heads")
def test_every_row_is_delivered_once_and_in_order_after_a_head(
    sizes: list[int], num_workers: int, prefetch_bytes: int, block_rows: int
) -> None:
    with rig(
        sizes,
        num_workers=num_workers,
        prefetch_bytes=prefetch_bytes,
        block_rows=block_rows,
        starts_small=True,
        has_head=lambda number: True,
    ) as made:
        assert made.read() == made.expected
        assert len(made.heads) == (sizes[0] >= 4 * 5)
        assert made.recorder.snapshot().buffered_bytes == 0


def test_a_window_of_several_blocks_frees_memory_for_the_next_as_blocks_are_taken() -> None:
    """Two windows of 8 row groups in blocks of 20 rows; memory for one window and 3 row groups."""
    with rig([GROUP_ROWS] * 16, window_rows=80, block_rows=20, prefetch_bytes=3 * GROUP_BYTES) as made:
        taken = [made.pipeline.take() for _ in range(2)]
        _wait_until(lambda: len(made.decoded) > 8)  # the first window has two blocks left
        peak = made.recorder.snapshot().peak_buffered_bytes
        rows = [number for block in taken if block is not None for batch in block.batches for number in batch.tolist()]
        rows += made.read()
        assert len(rows) == len(set(rows)) == 160
        assert sorted(rows) == made.expected
        assert sorted(made.decoded) == list(range(16))
        # The window, one assembled block and one taken block, and the row groups that are being decoded.
        assert peak <= (8 + 3 + 2) * GROUP_BYTES


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    num_lanes=st.integers(1, 3),
    window_rows=st.integers(1, 80),
    block_rows=st.integers(1, 80),
    part_rows=st.none() | st.integers(1, 40),
    num_workers=st.integers(1, 3),
    prefetch_bytes=st.sampled_from([0, GROUP_BYTES, 1 << 20]),
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_row_is_delivered_once_for_any_cut_of_windows_into_blocks(
    sizes: list[int],
    num_lanes: int,
    window_rows: int,
    block_rows: int,
    part_rows: int | None,
    num_workers: int,
    prefetch_bytes: int,
) -> None:
    options = {
        "window_rows": window_rows,
        "num_lanes": num_lanes,
        "num_workers": num_workers,
        "prefetch_bytes": prefetch_bytes,
    }
    with (
        rig(sizes, block_rows=1 << 20, **options) as whole,
        rig(sizes, block_rows=block_rows, part_rows=part_rows, **options) as cut,
    ):
        rows = whole.read()
        assert sorted(rows) == sorted(whole.expected)
        assert cut.read() == rows
        assert cut.recorder.snapshot().buffered_bytes == 0


def test_a_row_group_that_two_windows_need_is_dealt_to_both() -> None:
    """Windows of 7½ row groups in blocks of 15 rows. A row group that is not dealt would stay in `_row_groups`."""
    with rig([GROUP_ROWS] * 15, window_rows=75, block_rows=15) as made:
        assert made.pipeline.take() is not None
        _wait_until(lambda: len(made.decoded) == 15)
        _wait_until_held_back(made)
        assert not made.pipeline._row_groups
        assert len(made.read()) == 150 - 15
        assert sorted(made.decoded) == list(range(15))


def test_small_blocks_are_dealt_in_shares_and_freed_share_by_share() -> None:
    """A window of 8 row groups in 16 blocks of 5 rows, 4 blocks per share, and nothing decoded ahead."""
    with rig([GROUP_ROWS] * 8, window_rows=80, block_rows=20, part_rows=5, prefetch_bytes=-GROUP_BYTES * 8) as made:
        held = []
        for _ in range(15):
            assert made.pipeline.take() is not None
            _wait_until_held_back(made)
            held.append(made.recorder.snapshot().buffered_bytes * GROUP_ROWS // GROUP_BYTES)
        # The block that was taken, the next one, and the shares with blocks that are not assembled yet.
        assert held == [10 + rows for rows in [80] * 2 + [60] * 4 + [40] * 4 + [20] * 4 + [0]]
        assert made.pipeline.take() is not None
        assert made.pipeline.take() is None
        assert sorted(made.decoded) == list(range(8))


def test_unreadable_row_groups_of_a_window_of_several_blocks_are_skipped() -> None:
    def decide(number: int) -> None:
        if number in (1, 6):
            raise DataFileInvalid("damaged")

    with rig([GROUP_ROWS] * 8, window_rows=40, block_rows=10, decide=decide, skips=True) as made:
        left = [number for number in made.expected if number // 1000 not in (1, 6)]
        assert sorted(set(made.read())) == left
        assert sorted(row_group for row_group, _ in made.skipped) == [1, 6]


def test_the_cost_of_a_row_group_does_not_depend_on_their_number() -> None:
    def cost_s(num_row_groups: int) -> float:
        """Return the least CPU time of several passes: other processes and garbage collection only add to it."""
        found = []
        for _ in range(4):
            begun_s = time.process_time()
            with rig([1] * num_row_groups, window_rows=num_row_groups, block_rows=num_row_groups) as made:
                assert len(made.read()) == num_row_groups
            found.append(time.process_time() - begun_s)
        return min(found)

    few, many = 3_000, 12_000
    assert cost_s(many) < 2 * many / few * cost_s(few)
