"""One pass over batches, without threads: the position, the metrics, and how it ends."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from strata.data.batch.assembly import Batches
from strata.data.order.steps import Steps
from strata.data.runtime.bottleneck import Lookout, PlanFacts
from strata.data.runtime.iterator import Pass
from strata.data.runtime.metrics import LoaderRecorder
from strata.errors import DataError, StrataError


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s


class FakePipeline:
    """Returns these blocks, or raises them."""

    def __init__(self, blocks: list[Batches | BaseException]) -> None:
        self._blocks = iter(blocks)
        self.num_closed = 0

    def take(self) -> Batches | None:
        found = next(self._blocks, None)
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        self.num_closed += 1


def block(first: int, sizes: list[int], repeated: list[int] | None = None, skipped: list[int] | None = None) -> Batches:
    batches: list[Any] = [f"batch {first + number}" for number in range(len(sizes))]
    none = [0] * len(sizes)
    return Batches(first, batches, tuple(sizes), tuple(repeated or none), tuple(skipped or none), 8 * sum(sizes))


class Made:
    def __init__(
        self,
        blocks: list[Batches | BaseException],
        steps: Steps,
        *,
        rank: int = 0,
        collate: Callable[[Any], Any] | None = None,
    ) -> None:
        self.clock: Any = Clock()
        pipeline: Any = FakePipeline(blocks)
        self.pipeline: FakePipeline = pipeline
        self.recorder = LoaderRecorder(1, self.clock)
        self.positions: list[int] = []
        facts = PlanFacts(
            num_row_groups=8,
            num_splits=8,
            is_local=True,
            world_size=1,
            row_group_name="row group",
            worker_type="thread",
            num_cpus=2,
        )
        self.iterator = Pass(
            pipeline,
            steps,
            epoch=0,
            rank=rank,
            recorder=self.recorder,
            lookout=Lookout(facts, num_workers=1),
            clock=self.clock,
            collate_fn=collate,
            on_position=self.positions.append,
        )


def steps_of(num_rows: int, *, first: int = 0, world_size: int = 1, tail: Any = "uneven") -> Steps:
    return Steps(num_rows=num_rows, first=first, batch_size=4, world_size=world_size, tail=tail)


def test_the_position_advances_when_a_batch_is_delivered_not_when_its_block_is_ready() -> None:
    made = Made([block(0, [4, 4]), block(2, [2])], steps_of(10))
    assert made.positions == []
    assert next(made.iterator) == "batch 0"
    assert made.positions == [4]
    assert (made.iterator.is_last, made.iterator.last_batch_rows) == (False, 4)
    assert list(made.iterator) == ["batch 1", "batch 2"]
    assert made.positions[:3] == [4, 8, 10]
    assert set(made.positions[3:]) <= {10}
    assert (made.iterator.is_last, made.iterator.last_batch_rows) == (True, 2)
    assert made.iterator.is_exhausted
    assert made.pipeline.num_closed == 1
    assert next(made.iterator, "nothing") == "nothing"
    metrics = made.recorder.snapshot()
    assert (metrics.rows, metrics.batches, metrics.padded_rows, metrics.dropped_rows) == (10, 3, 0, 0)


def test_a_loop_that_another_thread_closes_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made([block(0, [4, 4])], steps_of(8))
    monkeypatch.setattr(made.iterator, "_look", made.iterator.close)  # when the block is ready and no batch is taken
    with pytest.raises(StrataError, match="start a new loop"):
        next(made.iterator)


def test_a_pass_that_starts_within_an_epoch_counts_from_there() -> None:
    made = Made([block(0, [4, 2])], steps_of(10, first=4))
    assert list(made.iterator) == ["batch 0", "batch 1"]
    assert made.positions[:2] == [8, 10]


def test_repeated_rows_are_counted_on_the_rank_that_delivers_them() -> None:
    # Ten rows for three ranks of four: the second and third rank get two and four rows of others.
    counts = []
    for rank, sizes in enumerate(([4], [4], [4])):
        made = Made([block(0, sizes)], steps_of(10, world_size=3, tail="pad"), rank=rank)
        assert len(list(made.iterator)) == 1
        assert made.iterator.last_batch_rows == 10
        counts.append(made.recorder.snapshot().padded_rows)
    assert counts == [0, 0, 2]


def test_skipped_rows_are_counted() -> None:
    made = Made([block(0, [1, 3], [1, 0], [4, 1])], steps_of(8))
    next(made.iterator)
    assert made.recorder.snapshot().skipped_rows == 4
    assert len(list(made.iterator)) == 1
    metrics = made.recorder.snapshot()
    assert (metrics.rows, metrics.padded_rows, metrics.skipped_rows) == (4, 1, 5)


def test_dropped_rows_are_counted_by_one_rank() -> None:
    counts = []
    for rank in range(2):
        made = Made([block(0, [4])], steps_of(11, world_size=2, tail="drop"), rank=rank)
        assert len(list(made.iterator)) == 1
        assert made.positions[-1] == 11
        counts.append(made.recorder.snapshot().dropped_rows)
    assert counts == [3, 0]


def test_an_error_ends_the_pass_and_leaves_the_position_after_the_last_batch() -> None:
    made = Made([block(0, [4]), DataError("unit 3 is damaged")], steps_of(12))
    assert next(made.iterator) == "batch 0"
    with pytest.raises(DataError, match="unit 3 is damaged"):
        next(made.iterator)
    assert made.positions == [4]
    assert made.pipeline.num_closed == 1
    assert not made.iterator.is_exhausted
    with pytest.raises(StrataError, match="start a new loop"):
        next(made.iterator)


@pytest.mark.parametrize("error", [ValueError("bad row"), KeyboardInterrupt()])
def test_a_collate_fn_that_raises_ends_the_pass_without_the_batch(error: BaseException) -> None:
    def collate(batch: Any) -> Any:
        if batch == "batch 1":
            raise error
        return batch.upper()

    made = Made([block(0, [4, 4])], steps_of(8), collate=collate)
    assert next(made.iterator) == "BATCH 0"
    with pytest.raises(type(error)):
        next(made.iterator)
    assert made.positions == [4]
    assert made.pipeline.num_closed == 1
    assert made.recorder.snapshot().rows == 4


def test_an_interrupt_while_the_caller_waits_ends_the_threads() -> None:
    made = Made([KeyboardInterrupt()], steps_of(8))
    with pytest.raises(KeyboardInterrupt):
        next(made.iterator)
    assert made.pipeline.num_closed == 1


def test_a_closed_iterator_raises_and_a_dropped_one_ends_its_threads() -> None:
    made = Made([block(0, [4, 4])], steps_of(8))
    next(made.iterator)
    made.iterator.close()
    made.iterator.close()
    assert made.pipeline.num_closed == 1
    with pytest.raises(StrataError, match="closed while it was iterated over"):
        next(made.iterator)

    other = Made([block(0, [4, 4])], steps_of(8))
    next(other.iterator)
    del other.iterator
    gc.collect()
    assert other.pipeline.num_closed == 1


def test_time_inside_next_counts_as_waiting_and_time_between_as_busy() -> None:
    made = Made([block(0, [4, 4])], steps_of(8))
    made.clock.now_s += 50  # before the first batch is requested: counts for neither
    next(made.iterator)
    made.clock.now_s += 3
    next(made.iterator)
    made.clock.now_s += 4
    assert next(made.iterator, None) is None
    made.clock.now_s += 60
    metrics = made.recorder.snapshot()
    assert (metrics.consumer_wait_s, metrics.consumer_busy_s) == (0, 7)
    assert metrics.first_batch_s == 50


def test_the_iterator_keeps_no_reference_to_a_delivered_batch() -> None:
    class Batch:
        pass

    batches: list[Any] = [Batch(), Batch()]
    made = Made([Batches(0, batches, (4, 4), (0, 0), (0, 0), 64)], steps_of(8))
    first = next(made.iterator)
    assert not any(one is first for one in batches), "only the caller holds a reference to it"


def test_an_epoch_without_batches_ends_at_once() -> None:
    made = Made([], steps_of(8, first=8))
    assert list(made.iterator) == []
    assert made.positions == [8]
