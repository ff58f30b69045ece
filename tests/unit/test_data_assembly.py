"""Assembly of batches: what is copied, what is shared, and what happens to unreadable rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.data.batch.assembly import assemble
from strata.data.batch.columns import Chunk, Dense
from strata.data.order.schedule import Block, Piece
from strata.errors import NoData


def chunk_of(first: int, num_rows: int) -> Chunk:
    return Chunk({"id": Dense(np.arange(first, first + num_rows))}, num_rows)


def values_of(chunk: Chunk) -> np.ndarray[Any, Any]:
    column = chunk.columns["id"]
    assert isinstance(column, Dense)
    return column.values


def present(chunk: Chunk, sizes: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    assert sum(sizes) == chunk.num_rows
    return np.split(values_of(chunk), np.cumsum(sizes)[:-1])


def ids(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches.batches]


def block_of(sizes: Sequence[int], pieces: Sequence[Piece], index: Sequence[int] | None = None) -> Block:
    return Block(7, tuple(sizes), tuple(pieces), None if index is None else np.array(index, dtype=np.int64))


CHUNKS: Mapping[int, Chunk] = {0: chunk_of(0, 10), 1: chunk_of(100, 3), 2: chunk_of(200, 8)}
WHOLE = (Piece(0, 0, 10), Piece(1, 0, 3), Piece(2, 0, 8))


def test_a_batch_within_one_row_group_shares_its_memory_and_one_across_two_is_copied() -> None:
    made = assemble(block_of([4, 4, 6, 7], WHOLE), CHUNKS, present)
    assert ids(made) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 100, 101, 102, 200], [201, 202, 203, 204, 205, 206, 207]]
    of_first, of_last = values_of(CHUNKS[0]), values_of(CHUNKS[2])
    assert [np.shares_memory(batch, of_first) for batch in made.batches] == [True, True, False, False]
    assert [np.shares_memory(batch, of_last) for batch in made.batches] == [False, False, False, True]
    assert (made.first_batch, made.sizes, made.num_repeated) == (7, (4, 4, 6, 7), (0, 0, 0, 0))
    assert made.num_bytes == 21 * 8


@given(unit_rows=st.lists(st.integers(1, 9), min_size=1, max_size=6), cuts=st.lists(st.integers(1, 12), max_size=40))
def test_without_an_index_no_row_is_lost_repeated_or_moved(unit_rows: list[int], cuts: list[int]) -> None:
    total = sum(unit_rows)
    sizes, left = [], total
    for size in [*cuts, total]:
        if left:
            sizes.append(min(size, left))
            left -= sizes[-1]
    firsts = np.cumsum([0, *unit_rows[:-1]]).tolist()
    chunks = {unit: chunk_of(first, rows) for unit, (first, rows) in enumerate(zip(firsts, unit_rows, strict=True))}
    pieces = [Piece(unit, 0, rows) for unit, rows in enumerate(unit_rows)]
    made = assemble(block_of(sizes, pieces), chunks, present)
    assert [len(batch) for batch in made.batches] == sizes
    assert np.concatenate(made.batches).tolist() == list(range(total))


def test_an_index_orders_the_rows_of_whole_and_picked_pieces() -> None:
    pieces = [Piece(2, 2, 5), Piece(0, 0, 10, np.array([1, 9])), Piece(1, 1, 2)]
    made = assemble(block_of([4, 2], pieces, [5, 0, 3, 4, 1, 2]), CHUNKS, present)
    assert ids(made) == [[101, 202, 1, 9], [203, 204]]


def test_an_unreadable_row_group_makes_batches_smaller_and_an_empty_batch_repeats_a_row() -> None:
    chunks = {**CHUNKS, 0: None}
    made = assemble(block_of([8, 4, 9], WHOLE), chunks, present)
    assert ids(made) == [[100], [100, 101], [102, 200, 201, 202, 203, 204, 205, 206, 207]]
    assert made.sizes == (1, 2, 9)
    assert made.num_repeated == (1, 0, 0)
    assert sum(made.num_skipped) == CHUNKS[0].num_rows
    assert made.num_bytes == 12 * 8


def test_an_unreadable_row_group_in_a_shuffled_block_removes_only_its_rows() -> None:
    index = np.random.RandomState(5).permutation(21).tolist()
    sizes = [6, 6, 9]
    whole = assemble(block_of(sizes, WHOLE, index), CHUNKS, present)
    left = assemble(block_of(sizes, WHOLE, index), {**CHUNKS, 1: None}, present)
    assert ids(left) == [[number for number in batch if not 100 <= number < 200] for batch in ids(whole)]
    assert left.num_repeated == (0, 0, 0)


@given(is_there=st.lists(st.booleans(), min_size=3, max_size=3), cuts=st.permutations([5, 2, 1, 9, 4]))
def test_unreadable_row_groups_never_empty_a_batch_and_remove_only_their_rows(
    is_there: list[bool], cuts: list[int]
) -> None:
    chunks = {unit: chunk if there else None for (unit, chunk), there in zip(CHUNKS.items(), is_there, strict=True)}
    block = block_of(cuts, WHOLE)
    if not any(is_there):
        with pytest.raises(NoData, match=r"batches 7 to 11: none of their row groups \(0, 1, 2"):
            assemble(block, chunks, present)
        return
    made = assemble(block, chunks, present)
    assert len(made.batches) == 5
    assert all(len(batch) for batch in made.batches)
    kept = [number for unit, there in enumerate(is_there) if there for number in values_of(CHUNKS[unit]).tolist()]
    counts = zip(made.sizes, made.num_skipped, made.num_repeated, strict=True)
    assert [size + skipped - repeated for size, skipped, repeated in counts] == cuts
    delivered = [n for batch, repeated in zip(ids(made), made.num_repeated, strict=True) for n in batch[repeated:]]
    assert delivered == kept
