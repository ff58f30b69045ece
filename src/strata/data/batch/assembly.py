"""Assembly: gathers decoded row groups into the batches of a block. No threads, no files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.data.batch.columns import Chunk, gather
from strata.errors import NoData

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from strata.data.order.schedule import Block, Piece

    Present = Callable[[Chunk, Sequence[int]], list[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """The batches of one block, ready for delivery."""

    first_batch: int
    batches: list[Any]
    sizes: tuple[int, ...]
    num_repeated: tuple[int, ...]
    """For each batch: rows repeated so that it is not empty, because its own could not be read."""
    num_skipped: tuple[int, ...]
    """For each batch: its rows that could not be read."""
    num_bytes: int


def assemble(
    block: Block,
    chunks: Mapping[int, Chunk | None],
    present: Present,
    find_spare: Callable[[], Chunk | None] = lambda: None,
    *,
    dealt: Mapping[int, Chunk] | None = None,
) -> Batches:
    """Gather the batches of a block.

    `chunks`: the decoded row groups of the block; None for one that could not be read and is left out.
    `find_spare`: returns any row of the dataset, in case nothing of the block is left.
    `dealt`: pieces that are cut already, by their index in the block; `chunks` may lack their row groups.
    """
    ready = dealt or {}
    pieces = [
        ready.get(place) or _cut_if_there(piece, chunks[piece.row_group]) for place, piece in enumerate(block.pieces)
    ]
    if any(piece is None for piece in pieces):
        if all(piece is None for piece in pieces) and (spare := find_spare()) is not None:
            rows = gather([spare], np.zeros(block.num_batches, dtype=np.int64))
            ones = (1,) * block.num_batches
            return Batches(block.first_batch, present(rows, ones), ones, ones, block.sizes, rows.nbytes)
        return _assemble_what_is_left(block, pieces, present)
    whole = [piece for piece in pieces if piece is not None]
    if block.index is None:
        parts = list(_as_they_lie(whole, block.sizes))
    else:
        parts = [(gather(whole, block.index), block.sizes)]
    batches = [batch for chunk, sizes in parts for batch in present(chunk, sizes)]
    num_bytes = sum(chunk.nbytes for chunk, _ in parts)
    none = (0,) * len(block.sizes)
    return Batches(block.first_batch, batches, block.sizes, none, none, num_bytes)


def cut(piece: Piece, chunk: Chunk) -> Chunk:
    """Return the rows of a piece: a view if they are contiguous, otherwise a copy."""
    if piece.rows is not None:
        return gather([chunk], piece.rows)
    return chunk.slice(piece.first, piece.last)


def _cut_if_there(piece: Piece, chunk: Chunk | None) -> Chunk | None:
    return None if chunk is None else cut(piece, chunk)


def _as_they_lie(pieces: Sequence[Chunk], sizes: Sequence[int]) -> Iterator[tuple[Chunk, Sequence[int]]]:
    """Cut pieces into batches in order. A batch within one piece shares its memory; one across two is copied."""
    begun: list[Chunk] = []
    num_begun = 0
    batch = 0
    for piece in pieces:
        first = 0
        if begun:
            first = min(piece.num_rows, sizes[batch] - num_begun)
            begun.append(piece.slice(0, first))
            num_begun += first
            if num_begun < sizes[batch]:
                continue
            yield gather(begun, None), sizes[batch : batch + 1]
            begun, num_begun, batch = [], 0, batch + 1
        last, end = first, batch
        while end < len(sizes) and last + sizes[end] <= piece.num_rows:
            last, end = last + sizes[end], end + 1
        if end > batch:
            yield piece.slice(first, last), sizes[batch:end]
        if last < piece.num_rows:
            begun, num_begun = [piece.slice(last, piece.num_rows)], piece.num_rows - last
        batch = end
    assert batch == len(sizes)
    assert not begun


def _assemble_what_is_left(block: Block, pieces: Sequence[Chunk | None], present: Present) -> Batches:
    """Gather smaller batches, but the same number, so that ranks stay in step. An empty batch repeats a row."""
    counts = [piece.num_rows for piece in block.pieces]
    is_there = np.repeat([piece is not None for piece in pieces], counts)
    index: npt.NDArray[np.integer[Any]] = np.arange(sum(counts)) if block.index is None else block.index
    if not is_there.any():
        missing = ", ".join(map(str, block.row_groups[:3]))
        raise NoData(
            f"nothing is left of batches {block.first_batch} to {block.first_batch + block.num_batches - 1}: none of "
            f"their row groups ({missing}, …) could be read, so on_error='skip' has no rows; repair the files"
        )
    place = np.cumsum(is_there) - 1
    whole = [piece for piece in pieces if piece is not None]
    ends = np.cumsum(block.sizes)
    rows, sizes, repeated, skipped = [], [], [], []
    for size, end in zip(block.sizes, ends.tolist(), strict=True):
        mine = index[end - size : end]
        kept = place[mine[is_there[mine]]]
        repeated.append(0 if len(kept) else 1)
        skipped.append(size - len(kept))
        kept = kept if len(kept) else np.zeros(1, dtype=np.int64)
        rows.append(kept)
        sizes.append(len(kept))
    chunk = gather(whole, np.concatenate(rows))
    return Batches(
        block.first_batch, present(chunk, sizes), tuple(sizes), tuple(repeated), tuple(skipped), chunk.nbytes
    )
