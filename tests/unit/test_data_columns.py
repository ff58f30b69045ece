"""Columns are sliced, concatenated and gathered like lists."""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.data.arrow_types import enlarged
from strata.data.batch import columns as columns_module
from strata.data.batch.columns import ArrowColumn, Chunk, Column, Dense, Ragged, deal, gather
from strata.data.batch.output import Presenter
from strata.data.batch.policy import decide
from strata.data.memory import pool
from strata.errors import LimitExceeded


def dense_of(dtype: str, width: int | None) -> Callable[[Sequence[int]], Dense]:
    def make(rows: Sequence[int]) -> Dense:
        values = np.array(rows, np.int64).astype(dtype)
        return Dense(values if width is None else np.repeat(values[:, None], width, axis=1))

    return make


def ragged_of(rows: Sequence[int]) -> Ragged:
    """Row n is n % 4 times n, surrounded by values of no row."""
    lists = [[row] * (row % 4) for row in rows]
    values = np.array([-1, *(value for row in lists for value in row), -2], np.int32)
    return Ragged(values, Ragged.of(values, np.array([len(row) for row in lists], np.int64)).offsets + 1)


def arrow_of(rows: Sequence[int]) -> ArrowColumn:
    return ArrowColumn(pa.array([None if row % 5 == 0 else f"row {row}" for row in rows], pa.large_string()))


def as_rows(column: Column) -> list[Any]:
    if isinstance(column, Dense):
        return list(column.values.tolist())
    if isinstance(column, Ragged):
        return [column.values[first:last].tolist() for first, last in itertools.pairwise(column.offsets)]
    assert isinstance(column, ArrowColumn)
    return list(column.array.to_pylist())


MAKERS: dict[str, Callable[[Sequence[int]], Column]] = {
    **{dtype: dense_of(dtype, None) for dtype in ("int8", "bool", "float16", "float32", "int64")},
    "matrix": dense_of("float32", 3),
    "no width": dense_of("int16", 0),
    "ragged": ragged_of,
    "arrow": arrow_of,
}

pieces_of_rows = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 20)), min_size=1, max_size=6)


@pytest.mark.parametrize("is_packed", [False, True])
@settings(max_examples=40)
@given(indices=st.lists(st.lists(st.integers(0, 126), min_size=1, max_size=20), min_size=1, max_size=5))
def test_deal_returns_what_gather_returns_for_each_index(is_packed: bool, indices: list[list[int]]) -> None:
    words = ArrowColumn(pa.array([f"word {row % 3}" for row in range(127)]).dictionary_encode())
    chunk = Chunk({kind: make(range(127)) for kind, make in MAKERS.items()} | {"words": words}, 127)
    given = chunk.pack() if is_packed else chunk
    for index, dealt in zip(indices, deal(given, [np.array(index, np.uint32) for index in indices]), strict=True):
        assert dealt.num_rows == len(index)
        expected = gather([chunk], np.array(index, np.int64)).columns
        found = dealt.unpack().columns
        assert list(found) == list(expected)
        assert {name: as_rows(each) for name, each in found.items()} == {
            name: as_rows(each) for name, each in expected.items()
        }


def test_the_chunks_that_deal_returns_are_freed_one_by_one() -> None:
    chunk = Chunk({name: Dense(np.arange(100_000)) for name in "ab"}, 100_000).pack()
    before = pool().bytes_allocated()
    parts = deal(chunk, [np.arange(0, 100_000, 2), np.arange(1, 100_000, 2)])
    both = pool().bytes_allocated() - before
    del parts[0]
    assert pool().bytes_allocated() - before <= both * 0.6


def test_deal_rejects_rows_that_do_not_exist_and_empty_indices() -> None:
    chunk = Chunk({name: Dense(np.arange(10)) for name in "ab"}, 10).pack()
    for wrong in ([10], [-1], []):
        with pytest.raises(AssertionError):
            deal(chunk, [np.arange(10), np.array(wrong, np.int64)])


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=40)
@given(pieces=pieces_of_rows, data=st.data())
def test_gather_selects_rows_of_slices_like_rows_of_lists(
    kind: str, pieces: list[tuple[int, int]], data: st.DataObject
) -> None:
    whole = MAKERS[kind](range(127))
    expected = as_rows(whole)
    columns = [whole.slice(first, first + size) for first, size in pieces]
    rows = [row for first, size in pieces for row in expected[first : first + size]]
    assert [row for column in columns for row in as_rows(column)] == rows
    index = data.draw(st.none() | st.lists(st.integers(0, len(rows) - 1), max_size=40) if rows else st.none())
    gathered = type(whole).gather(columns, None if index is None else np.array(index, np.int64))
    assert as_rows(gathered) == (rows if index is None else [rows[place] for place in index])
    assert len(gathered) == len(rows if index is None else index)
    # And what was gathered is a column like any other.
    assert as_rows(gathered.slice(0, len(gathered) // 2)) == as_rows(gathered)[: len(gathered) // 2]


def test_gather_selects_the_same_rows_of_every_column() -> None:
    rows = range(50)
    chunk = Chunk({kind: make(rows) for kind, make in MAKERS.items()}, len(rows))
    index = np.array([13, 0, 3, 3, 18])
    gathered = gather([chunk.slice(40, 50), chunk.slice(0, 10)], index)
    expected = [3, 40, 43, 43, 8]
    assert gathered.num_rows == 5
    for kind, make in MAKERS.items():
        assert as_rows(gathered.columns[kind]) == as_rows(make(expected)), kind


def test_gather_does_not_copy_a_whole_chunk() -> None:
    chunk = Chunk({"x": dense_of("int64", None)(range(9))}, 9)
    assert gather([chunk], None) is chunk
    assert chunk.slice(0, 9) is chunk
    part = chunk.slice(2, 5).columns["x"]
    assert isinstance(part, Dense)
    assert np.shares_memory(part.values, chunk.columns["x"].values)  # type: ignore[attr-defined]


@pytest.mark.parametrize("place", [-1, 20])
def test_gather_never_clips_an_index_out_of_range_to_another_row(place: int) -> None:
    chunk = Chunk({"x": dense_of("int64", None)(range(10))}, 10)
    with pytest.raises(AssertionError, match="no such row"):
        gather([chunk, chunk], np.array([0, place]))


def test_the_size_of_a_slice_counts_only_its_rows() -> None:
    assert dense_of("float32", 3)(range(10)).slice(2, 4).nbytes == 2 * 3 * 4
    assert ragged_of([1, 2, 3]).slice(1, 2).nbytes == 2 * 4 + 2 * 8
    chunk = Chunk({"a": dense_of("int8", None)(range(10)), "b": dense_of("int64", None)(range(10))}, 10)
    assert chunk.slice(0, 3).nbytes == 3 + 24


def test_a_gathered_chunk_survives_the_next_gather_of_its_thread() -> None:
    column = dense_of("int64", None)(range(1000))
    halves = [column.slice(0, 500), column.slice(500, 1000)]
    index = np.arange(999, -1, -1)
    first = Dense.gather(halves, index)
    Dense.gather([Dense(-half.values) for half in halves], index)
    assert first.values.tolist() == list(range(999, -1, -1))


@pytest.mark.parametrize("width", [None, 2])
def test_large_gathers_are_writable_and_share_no_memory(width: int | None) -> None:
    column = dense_of("int32", width)(range(30_000))
    index = np.random.default_rng(1).permutation(60_000)
    shuffled = Dense.gather([column, column], index).values
    in_order = Dense.gather([column, column], None).values
    assert shuffled.flags.writeable
    assert shuffled.flags.c_contiguous
    assert in_order.flags.writeable
    in_order[:] = -1
    expected = column.values[index % 30_000]
    assert np.array_equal(shuffled, expected)


def test_the_scratch_memory_of_a_thread_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns_module, "SCRATCH_BYTES", 4096)
    monkeypatch.setattr(columns_module, "_thread_memory", threading.local())
    column = dense_of("int64", None)(range(1000))
    large = Dense.gather([column, column], np.arange(2000))
    assert large.values[1999] == 999
    assert not hasattr(columns_module._thread_memory, "buffer")
    Dense.gather([column.slice(0, 200), column.slice(0, 200)], np.arange(400))
    assert len(columns_module._thread_memory.buffer) == 3200


def test_threads_gather_in_parallel_without_mixing_rows() -> None:
    index = np.random.default_rng(5).permutation(20_000)
    wrong: list[int] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        column = Dense(np.arange(10_000) + number * 1_000_000)
        start.wait()
        for _ in range(20):
            values = Dense.gather([column, column], index).values
            if not np.array_equal(values, index % 10_000 + number * 1_000_000):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


HUGE = pa.py_buffer(np.array([0, 2**30], np.int32))
"""Offsets of one row with as many values as half of what 32 bits can address."""


@pytest.mark.parametrize("is_packed", [False, True])
def test_rows_that_exceed_32_bit_offsets_are_joined_with_64_bit_offsets(is_packed: bool) -> None:
    # Nulls need no memory; strings and lists have the same offsets.
    nulls = pa.Array.from_buffers(pa.list_(pa.null()), 1, [None, HUGE], children=[pa.nulls(2**30)])
    columns: dict[str, Column] = {"s": ArrowColumn(nulls)}
    if is_packed:
        columns["n"] = Dense(np.zeros(1))
    chunk = Chunk(columns, 1).pack()
    assert (chunk.packed is not None) is is_packed
    joined = gather([chunk, chunk, chunk], None)
    for made in (joined, gather([joined, chunk], None)):
        column = made.unpack().columns["s"]
        assert isinstance(column, ArrowColumn)
        assert column.array.type == pa.large_list(pa.null())
        assert pc.list_value_length(column.array).to_pylist() == [2**30] * made.num_rows


def test_a_column_joined_as_a_large_type_is_delivered_in_the_planned_type() -> None:
    kinds = (pa.string(), pa.list_(pa.binary()), pa.struct([("s", pa.string())]))
    values: list[list[Any]] = [["a", None, "b"], [[b"a"], None, []], [{"s": "a"}, None, {"s": None}]]
    policies = decide(pa.schema([(f"c{place}", kind) for place, kind in enumerate(kinds)]), {}, output_format="arrow")
    large = {
        f"c{place}": ArrowColumn(pa.array(column, enlarged(kind)))
        for place, (kind, column) in enumerate(zip(kinds, values, strict=True))
    }
    batches = Presenter("arrow", policies).present(Chunk(dict(large), 3), [1, 2])
    assert [batch.schema.types for batch in batches] == [list(kinds)] * 2
    assert [column.to_pylist() for column in pa.Table.from_batches(batches).columns] == values


def test_rows_that_no_type_can_address_are_rejected_with_the_cure() -> None:
    numbers = pa.Array.from_buffers(pa.int8(), 2**30, [None, pa.py_buffer(mmap.mmap(-1, 2**30))])
    entries = pa.StructArray.from_arrays([numbers, numbers], ["key", "value"])
    kind = pa.map_(pa.int8(), pa.int8())
    maps = ArrowColumn(pa.Array.from_buffers(kind, 1, [None, HUGE], children=[entries]))
    with pytest.raises(LimitExceeded, match=r"2 rows of a map<.* lower shuffle_buffer_size or batch_size"):
        ArrowColumn.gather([maps, maps], None)
