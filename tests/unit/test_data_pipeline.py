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

from strata.data.batch.columns import Chunk
from strata.data.batch.dense import Dense
from strata.data.order.assignment import BY_NAME, Strategy, lpt
from strata.data.order.order import make_order
from strata.data.order.schedule import Schedule
from strata.data.order.steps import Steps
from strata.data.runtime import pipeline
from strata.data.runtime.metrics import LoaderRecorder
from strata.data.runtime.pipeline import MAX_BLOCKS_ASSEMBLED, Pipeline, Work
from strata.errors import DataFileInvalid, NoData

DEADLINE_S = 10.0
UNIT_ROWS = 10
UNIT_BYTES = UNIT_ROWS * 8
HEAD = -1
"""What `decide` is asked about instead of a unit."""


class FakeDecoder:
    """Rows of unit n are n × 1000, n × 1000 + 1, …; `decide` is asked before each."""

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
    """A pipeline over units of these sizes, in order, and its parts."""

    def __init__(
        self,
        sizes: list[int],
        *,
        num_workers: int = 2,
        budget_bytes: int = 1 << 20,
        block_rows: int = UNIT_ROWS,
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
                budget_bytes=budget_bytes,
                block_bytes=block_bytes,
                has_head=has_head,
                skips_bad_units=skips,
                on_skip=lambda unit, error: self.skipped.append((unit, str(error))),
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
    """Holds decoders of some units back until it is opened; says when one has come to it."""

    def __init__(self, *units: int) -> None:
        self._units = units
        self.is_reached = threading.Event()
        self._is_open = threading.Event()

    def __call__(self, number: int) -> None:
        if number in self._units:
            self.is_reached.set()
            assert self._is_open.wait(DEADLINE_S)

    def open(self) -> None:
        self._is_open.set()


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    num_workers=st.integers(1, 4),
    budget_bytes=st.sampled_from([0, UNIT_BYTES, 1 << 20]),
    block_rows=st.sampled_from([1, 12, 1000]),
    strategy=st.sampled_from([*BY_NAME.values(), lambda tasks, n: [[t.number for t in tasks[::-1]], *[[]] * (n - 1)]]),
)
@settings(max_examples=50)
def test_every_row_comes_once_and_in_order_whatever_the_bounds_and_whoever_decodes(
    sizes: list[int], num_workers: int, budget_bytes: int, block_rows: int, strategy: Strategy
) -> None:
    with rig(
        sizes, num_workers=num_workers, budget_bytes=budget_bytes, block_rows=block_rows, strategy=strategy
    ) as made:
        assert made.read() == made.expected
        assert made.pipeline.take() is None
        assert made.recorder.snapshot().buffered_bytes == 0


def test_blocks_come_in_order_although_later_units_are_decoded_first() -> None:
    gate = Gate(0)
    seen_last = threading.Event()

    def decide(number: int) -> None:
        gate(number)
        if number == 3:
            seen_last.set()

    with rig([UNIT_ROWS] * 4, decide=decide) as made:
        assert gate.is_reached.wait(DEADLINE_S)
        assert seen_last.wait(DEADLINE_S)  # the other worker went on
        gate.open()
        assert made.read() == made.expected


def test_an_error_comes_where_its_rows_would_have_come_and_not_before() -> None:
    def decide(number: int) -> None:
        if number == 2:
            raise DataFileInvalid("unit 2 is damaged")

    with rig([UNIT_ROWS] * 4, decide=decide) as made:
        assert [made.pipeline.take() is not None for _ in range(2)] == [True, True]
        for _ in range(2):  # and again, for whoever asks again
            with pytest.raises(DataFileInvalid, match="unit 2 is damaged"):
                made.pipeline.take()
        assert made.recorder.snapshot().total.errors == 1


def test_an_error_in_converting_or_assembling_is_heard() -> None:
    def convert(number: int, rows: Any) -> Chunk:
        raise ArithmeticError(f"cannot convert {number}")

    with rig([UNIT_ROWS] * 3, convert=convert) as made, pytest.raises(ArithmeticError, match="cannot convert 0"):
        made.pipeline.take()

    def present(chunk: Chunk, sizes: Any) -> list[Any]:
        raise ArithmeticError("cannot present")

    with rig([UNIT_ROWS] * 3, present=present) as made, pytest.raises(ArithmeticError, match="cannot present"):
        made.pipeline.take()


def test_an_error_that_no_unit_can_be_blamed_for_is_heard_too() -> None:
    def decide(number: int) -> None:
        raise SystemExit("a thread's own end")

    with rig([UNIT_ROWS] * 3, decide=decide) as made, pytest.raises(SystemExit, match="a thread's own end"):
        made.pipeline.take()

    def strategy(tasks: Any, num_workers: int) -> list[list[int]]:
        raise ArithmeticError("no idea")

    with rig([UNIT_ROWS] * 3, strategy=strategy) as made, pytest.raises(ArithmeticError, match="no idea"):
        made.pipeline.take()


def test_what_cannot_be_read_is_skipped_if_asked_and_other_errors_are_not() -> None:
    def decide(number: int) -> None:
        if number == 1:
            raise DataFileInvalid("unit 1 is damaged")

    with rig([5, 5, 5, 5], decide=decide, skips=True, block_rows=20) as made:
        # The batch of its rows repeats one, so that there are as many batches as on other ranks.
        assert made.read() == [*range(5), 0, *range(2000, 2005), *range(3000, 3005)]
        assert made.skipped == [(1, "unit 1 is damaged")]

    def fail(number: int) -> None:
        raise NoData("not the file's fault")

    with rig([5, 5], decide=fail, skips=True) as made, pytest.raises(NoData, match="not the file's fault"):
        made.pipeline.take()


def test_decoding_ahead_stops_at_the_budget_and_goes_on_when_a_block_is_taken() -> None:
    num_units, num_ahead = 40, 6
    with rig([UNIT_ROWS] * num_units, num_workers=1, budget_bytes=num_ahead * UNIT_BYTES) as made:
        first = made.pipeline.take()
        assert first is not None
        _wait_until_held_back(made)
        # Beyond the budget there is only what the block that is needed next is made of.
        most = num_ahead + 1
        assert made.recorder.snapshot().buffered_bytes <= most * UNIT_BYTES
        assert len(made.decoded) <= most + 1
        before = len(made.decoded)
        for _ in range(3):
            made.pipeline.take()
        _wait_until_held_back(made)
        assert before < len(made.decoded) <= most + 4
        rest = made.read()
        assert rest == made.expected[4 * UNIT_ROWS :]
        assert made.recorder.snapshot().peak_buffered_bytes <= (most + 3) * UNIT_BYTES


def test_without_a_budget_only_what_is_needed_next_is_decoded() -> None:
    with rig([UNIT_ROWS] * 40, num_workers=1, budget_bytes=0) as made:
        assert made.pipeline.take() is not None
        _wait_until_held_back(made)
        # Taken: one. Needed next: one.
        assert len(made.decoded) == 2
        assert made.recorder.snapshot().peak_buffered_bytes <= 3 * UNIT_BYTES  # one of them decoded and assembled
        assert made.read() == made.expected[UNIT_ROWS:]


@pytest.mark.parametrize(("num_blocks", "num_assembled"), [(1, 1), (4, 2), (100, MAX_BLOCKS_ASSEMBLED)])
def test_blocks_are_assembled_ahead_as_far_as_the_budget_reaches(num_blocks: int, num_assembled: int) -> None:
    with rig([UNIT_ROWS] * 40, num_workers=1, budget_bytes=num_blocks * UNIT_BYTES) as made:
        assert made.pipeline.take() is not None
        _wait_until_held_back(made)
        assert sum(pending.is_claimed for pending in made.pipeline._pending) == num_assembled
        assert made.read() == made.expected[UNIT_ROWS:]


def test_blocks_get_smaller_when_rows_turn_out_to_be_larger_than_they_were_thought_to_be() -> None:
    sizes = []

    def present(chunk: Chunk, batches: Any) -> list[Any]:
        sizes.append(chunk.num_rows)
        return _present(chunk, batches)

    with rig([UNIT_ROWS] * 40, block_rows=400, starts_small=True, block_bytes=2 * UNIT_BYTES, present=present) as made:
        assert made.read() == made.expected
        assert max(sizes[len(sizes) // 2 :]) <= 2 * UNIT_ROWS


def _wait_until_held_back(made: Rig, num_at_work: int = 0) -> None:
    """All other workers wait on the condition: they can only go on when a block is taken, or comes to be."""
    deadline = threading.Event()
    timer = threading.Timer(DEADLINE_S, deadline.set)
    timer.start()
    try:
        while True:
            with made.pipeline._changed:
                if len(made.pipeline._changed._waiters) == len(made.decoders) - num_at_work:  # type: ignore[attr-defined]
                    return
            assert not deadline.is_set(), "the workers do not come to rest"
    finally:
        timer.cancel()


def test_close_aborts_every_decoder_once_and_waits_for_the_one_that_is_at_work() -> None:
    gate = Gate(0)
    made = Rig([UNIT_ROWS] * 3, decide=gate)
    assert gate.is_reached.wait(DEADLINE_S)
    closing = threading.Thread(target=made.pipeline.close)
    closing.start()
    gate.open()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert made.threads() == []
    made.pipeline.close()  # again: nothing
    assert [(decoder.num_aborted, decoder.num_closed) for decoder in made.decoders] == [(1, 1), (1, 1)]


def test_what_is_closed_before_it_starts_decodes_nothing() -> None:
    made = Rig([UNIT_ROWS] * 3, starts=False)
    made.pipeline.close()
    made.pipeline.start()
    assert made.pipeline.take() is None
    assert (made.decoded, made.threads()) == ([], [])
    assert [decoder.num_closed for decoder in made.decoders] == [1, 1]


def test_close_ends_workers_that_are_held_back_by_the_budget() -> None:
    with rig([UNIT_ROWS] * 40, num_workers=3, budget_bytes=0) as made:
        _wait_until_held_back(made)
        made.pipeline.close()
        assert made.threads() == []
        assert made.recorder.snapshot().total.batches < 40


def test_close_waits_once_for_all_threads_that_do_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.data.runtime.pipeline.JOIN_S", 0.5)
    gate, arrivals = Gate(*range(8)), threading.Semaphore(0)

    def decide(number: int) -> None:
        arrivals.release()
        gate(number)

    made = Rig([UNIT_ROWS] * 8, decide=decide, num_workers=8)
    assert all(arrivals.acquire(timeout=DEADLINE_S) for _ in range(8))
    began_s = time.monotonic()
    made.pipeline.close()
    took_s = time.monotonic() - began_s
    gate.open()
    for thread in made.pipeline._threads:
        thread.join(DEADLINE_S)
    assert took_s < 3, "Ctrl-C must not wait for one slow transform after another"


def test_close_wakes_the_caller_who_waits_for_a_block() -> None:
    gate = Gate(0)
    made = Rig([UNIT_ROWS] * 3, decide=gate, num_workers=1)
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


def test_a_unit_of_two_blocks_is_decoded_once_and_let_go_after_the_second() -> None:
    with rig([35], block_rows=10) as made:
        assert made.read() == made.expected
        assert made.decoded == [0]
        assert made.recorder.snapshot().buffered_bytes == 0


# --- the first rows of a unit ---


@pytest.fixture
def small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "HEAD_BYTES", UNIT_BYTES)


@pytest.mark.usefixtures("small_heads")
def test_the_first_batch_is_there_before_its_unit_is_decoded_and_nothing_else_is_decoded_before() -> None:
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
        ([UNIT_ROWS - 1] * 3, True, 100, True),  # small
        ([19, 100], True, 100, True),  # a quarter of it is less than a batch
        ([3, 100], True, 100, True),  # the first batch is of two units
        ([100], True, 100, False),  # the first block is large
        ([100], False, 100, True),
    ],
)
@pytest.mark.usefixtures("small_heads")
def test_a_unit_is_decoded_once_where_its_head_is_no_gain_or_cannot_be_had(
    sizes: list[int], has_head: bool, block_rows: int, starts_small: bool
) -> None:
    with rig(sizes, block_rows=block_rows, starts_small=starts_small, has_head=lambda number: has_head) as made:
        assert made.read() == made.expected
        assert made.heads == []
        assert sorted(made.decoded) == list(range(len(sizes)))


@pytest.mark.usefixtures("small_heads")
def test_an_error_in_the_first_rows_is_heard() -> None:
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
    budget_bytes=st.sampled_from([0, UNIT_BYTES, 1 << 20]),
    block_rows=st.sampled_from([1, 12, 1000]),
)
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("small_heads")
def test_every_row_comes_once_and_in_order_when_it_begins_with_a_head(
    sizes: list[int], num_workers: int, budget_bytes: int, block_rows: int
) -> None:
    with rig(
        sizes,
        num_workers=num_workers,
        budget_bytes=budget_bytes,
        block_rows=block_rows,
        starts_small=True,
        has_head=lambda number: True,
    ) as made:
        assert made.read() == made.expected
        assert len(made.heads) == (sizes[0] >= 4 * 5)
        assert made.recorder.snapshot().buffered_bytes == 0


def test_a_window_in_parts_makes_room_for_the_next_as_it_is_taken() -> None:
    """Two windows of 8 units, in blocks of 2 units' rows, and room for one window and little more."""
    with rig([UNIT_ROWS] * 16, window_rows=80, block_rows=20, budget_bytes=3 * UNIT_BYTES) as made:
        taken = [made.pipeline.take() for _ in range(2)]
        _wait_until(lambda: len(made.decoded) > 8)  # the first window has two blocks left
        peak = made.recorder.snapshot().peak_buffered_bytes
        rows = [number for block in taken if block is not None for batch in block.batches for number in batch.tolist()]
        rows += made.read()
        assert len(rows) == len(set(rows)) == 160
        assert sorted(rows) == made.expected
        assert sorted(made.decoded) == list(range(16))
        # The window, what one block that is made and one that is taken hold, and the units under way.
        assert peak <= (8 + 3 + 2) * UNIT_BYTES


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    num_lanes=st.integers(1, 3),
    window_rows=st.integers(1, 80),
    block_rows=st.integers(1, 80),
    part_rows=st.none() | st.integers(1, 40),
    num_workers=st.integers(1, 3),
    budget_bytes=st.sampled_from([0, UNIT_BYTES, 1 << 20]),
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_row_comes_once_however_windows_are_cut_into_blocks(
    sizes: list[int],
    num_lanes: int,
    window_rows: int,
    block_rows: int,
    part_rows: int | None,
    num_workers: int,
    budget_bytes: int,
) -> None:
    options = {
        "window_rows": window_rows,
        "num_lanes": num_lanes,
        "num_workers": num_workers,
        "budget_bytes": budget_bytes,
    }
    with (
        rig(sizes, block_rows=1 << 20, **options) as whole,
        rig(sizes, block_rows=block_rows, part_rows=part_rows, **options) as cut,
    ):
        rows = whole.read()
        assert sorted(rows) == sorted(whole.expected)
        assert cut.read() == rows
        assert cut.recorder.snapshot().buffered_bytes == 0


def test_units_that_reach_into_the_next_window_are_dealt_as_well() -> None:
    """Windows of 7½ units in blocks of 15 rows. A unit that is held whole is in `_units` until its blocks are made."""
    with rig([UNIT_ROWS] * 15, window_rows=75, block_rows=15) as made:
        assert made.pipeline.take() is not None
        _wait_until(lambda: len(made.decoded) == 15)
        _wait_until_held_back(made)
        assert not made.pipeline._units
        assert len(made.read()) == 150 - 15
        assert sorted(made.decoded) == list(range(15))


def test_small_blocks_of_a_window_are_dealt_in_shares_of_a_large_one_and_freed_with_them() -> None:
    """A window of 8 units in 16 blocks of half a unit; 4 of them are a share. Nothing is made before it is needed."""
    with rig([UNIT_ROWS] * 8, window_rows=80, block_rows=20, part_rows=5, budget_bytes=-UNIT_BYTES * 8) as made:
        held = []
        for _ in range(15):
            assert made.pipeline.take() is not None
            _wait_until_held_back(made)
            held.append(made.recorder.snapshot().buffered_bytes * UNIT_ROWS // UNIT_BYTES)
        # The block that was taken, the next one, and the shares whose blocks are not all made.
        assert held == [10 + rows for rows in [80] * 2 + [60] * 4 + [40] * 4 + [20] * 4 + [0]]
        assert made.pipeline.take() is not None
        assert made.pipeline.take() is None
        assert sorted(made.decoded) == list(range(8))


def test_units_of_a_window_in_parts_that_cannot_be_read_are_left_out() -> None:
    def decide(number: int) -> None:
        if number in (1, 6):
            raise DataFileInvalid("damaged")

    with rig([UNIT_ROWS] * 8, window_rows=40, block_rows=10, decide=decide, skips=True) as made:
        left = [number for number in made.expected if number // 1000 not in (1, 6)]
        assert sorted(set(made.read())) == left
        assert sorted(unit for unit, _ in made.skipped) == [1, 6]


def test_what_a_unit_costs_does_not_depend_on_how_many_there_are() -> None:
    def cost_s(num_units: int) -> float:
        """In CPU time, which a busy machine does not change much."""
        begun_s = time.process_time()
        with rig([1] * num_units, window_rows=num_units, block_rows=num_units) as made:
            assert len(made.read()) == num_units
        return time.process_time() - begun_s

    few, many = 3_000, 12_000
    cost_s(few)  # imports, caches
    assert cost_s(many) < 2 * many / few * cost_s(few)
