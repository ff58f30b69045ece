"""The iterator over one epoch of a mix: takes the parts of each batch from the sources, and joins them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np

from strata.data.batch.joining import columns_of, join, num_rows, with_column
from strata.data.order.mixture import SourceSteps
from strata.data.runtime.iterator import CLOSED
from strata.errors import SchemaMismatch, StrataError, TransformFailed
from strata.lifecycle import renewed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from strata.data.mixer import Mix
    from strata.data.order.cursor import Cursor
    from strata.data.order.mixture import Turns
    from strata.data.runtime.iterator import Pass

    Ints = npt.NDArray[np.int64]

MAX_PASS_STEPS = 1 << 18
"""Batches of one pass over a source, which are computed when it starts; a longer epoch takes several passes."""
_MIN_PASS_STEPS = 1 << 12
_MAX_PASS_WORK = 1 << 24
"""Batches times squared sources: of many sources, fewer batches are computed at once, so that the first comes soon."""
_STEPS_AT_ONCE = 256
"""Batches whose parts are computed together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A position in a mix, and how it continues from there."""

    epoch: int
    position: int
    turns: Turns
    cursors: tuple[Cursor, ...] = field(repr=False)
    """The order of each source; their epochs and positions do not count."""


def moved(place: Place, position: int, *, epoch: int | None = None) -> Place:
    return Place(
        epoch=place.epoch if epoch is None else epoch,
        position=position,
        turns=place.turns,
        cursors=place.cursors,
    )


def at(cursor: Cursor, taken: int) -> Cursor:
    """Return the cursor of a source of which this many rows were taken."""
    epoch, position = divmod(taken, cursor.num_rows)
    return msgspec.structs.replace(cursor, epoch=epoch, position=position)


class MixPass:
    """An iterator over the batches of one epoch of a mix. Leaving the loop in any way ends the threads.

    Several threads may call `next`: each batch goes to one of them.
    """

    def __init__(self, owner: Mix, place: Place, num_batches: int) -> None:
        self._owner = owner
        self._place = place
        self._num_left = num_batches
        self._names = list(owner.sources)
        self._datasets = list(owner.sources.values())
        self._passes: dict[int, tuple[int, Pass]] = {}
        """The pass over each source, with the epoch of the source that it reads."""
        self._bounds: list[tuple[Ints, Ints]] = []
        """Of this rank, for the next batches in reverse order: the first row of each source, and the one after the
        last, counted over all epochs of the source."""
        self._is_closed = False
        self._turn = renewed(threading.RLock())
        if num_batches:
            self._open_all()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        with self._turn:
            if self._is_closed and self._num_left:
                raise StrataError(CLOSED)
            if not self._num_left:
                if not self._is_closed:
                    self._owner.ended()
                self.close()
                raise StopIteration
            try:
                return self._next()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End the threads; the position stays after the last delivered batch."""
        self._is_closed = True
        passes, self._passes = self._passes, {}
        for _, under_way in passes.values():
            under_way.close()

    def _next(self) -> Any:
        owner, place = self._owner, self._place
        firsts, lasts = self._next_bounds()
        parts = [
            (source, part)
            for source, (first, last) in enumerate(zip(firsts.tolist(), lasts.tolist(), strict=True))
            for part in self._parts(source, first, last)
        ]
        sizes = [num_rows(part) for _, part in parts]
        rows = np.bincount([source for source, _ in parts], sizes, len(self._names)).astype(np.int64)
        # Where on_error="skip" left out rows, the others stay in the order of their sources.
        is_interleaved = len(parts) > 1 and not place.turns.by_batch and bool((rows == lasts - firsts).all())
        order = place.turns.interleaved(firsts, lasts) if is_interleaved else None
        batch = join([(self._names[source], part) for source, part in parts], order)
        config = owner.config
        if config.source_column is not None:
            numbers = np.repeat(np.array([source for source, _ in parts], np.int64), sizes)
            if config.source_column in columns_of(batch):
                raise SchemaMismatch(
                    f"source {self._names[parts[0][0]]!r} has a column {config.source_column!r}; choose another name "
                    "for source_column="
                )
            format = self._datasets[parts[0][0]].config.batch.output_format
            batch = with_column(batch, config.source_column, numbers if order is None else numbers[order], format)
        if config.collate_fn is not None:
            try:
                batch = config.collate_fn(batch)
            except StopIteration as error:  # it would end the loop as if the epoch were complete
                raise TransformFailed("collate_fn raised StopIteration; raise another error") from error
        self._num_left -= 1
        self._place = moved(place, place.position + owner.batch_rows)
        owner.delivered(self._place, rows.tolist())
        return batch

    def _next_bounds(self) -> tuple[Ints, Ints]:
        if not self._bounds:
            owner, size = self._owner, self._owner.batch_size
            steps = np.arange(min(_STEPS_AT_ONCE, self._num_left), dtype=np.int64)
            starts = self._place.position + steps * owner.batch_rows + owner.ranks.rank * size
            taken = self._place.turns.taken_at
            self._bounds = list(zip(taken(starts), taken(starts + size), strict=True))[::-1]
        return self._bounds.pop()

    def _parts(self, source: int, first: int, last: int) -> Iterator[Any]:
        """Yield rows [first, last) of a source, one part for each of its epochs that they belong to."""
        num_rows_of_epoch = self._datasets[source].plan.num_rows
        while first < last:
            epoch = first // num_rows_of_epoch
            begun, under_way = self._passes.get(source, (-1, None))
            if under_way is None or begun != epoch:
                under_way = self._open(source, epoch)
            yield next(under_way)
            self._drop_if_over(source)
            first = (epoch + 1) * num_rows_of_epoch

    def _drop_if_over(self, source: int) -> None:
        _, under_way = self._passes[source]
        if under_way.is_last:
            under_way.close()
            del self._passes[source]

    def _open_all(self) -> None:
        """Start a pass over every source, so that all begin to read at once."""
        place = self._place
        known: dict[int, Ints] = {}

        def taken_at(positions: Ints) -> Ints:
            found = known.get(int(positions[0]))
            if found is None:
                found = known[int(positions[0])] = place.turns.taken_at(positions)
            return found[: len(positions)]

        rows = place.turns.taken_at(np.array([place.position]))[0].tolist()
        epochs = [row // dataset.plan.num_rows for row, dataset in zip(rows, self._datasets, strict=True)]
        sources = range(len(epochs))
        # What the longest pass computes serves the others.
        for source in sorted(sources, key=lambda source: self._num_steps(source, epochs[source]), reverse=True):
            self._open(source, epochs[source], taken_at)
            self._drop_if_over(source)

    def _num_steps(self, source: int, epoch: int) -> int:
        """Return how many batches of the mix a pass over this epoch of a source considers."""
        place, total = self._place, self._datasets[source].plan.num_rows
        last = place.turns.find(source, (epoch + 1) * total - 1)
        most = min(MAX_PASS_STEPS, max(_MIN_PASS_STEPS, _MAX_PASS_WORK // len(self._datasets) ** 2))
        return min((last - place.position) // self._owner.batch_rows + 1, self._num_left, most)

    def _open(self, source: int, epoch: int, taken_at: Callable[[Ints], Ints] | None = None) -> Pass:
        """Start the pass over an epoch of a source, from the batch of the mix that is delivered next."""
        owner, place = self._owner, self._place
        dataset = self._datasets[source]
        total = dataset.plan.num_rows
        steps = SourceSteps(
            place.turns,
            source,
            position=place.position,
            num_steps=self._num_steps(source, epoch),
            rank=owner.ranks.rank,
            world_size=owner.ranks.world_size,
            epoch=epoch,
            num_rows=total,
            taken_at=taken_at,
        )
        under_way = dataset.read(at(place.cursors[source], epoch * total), steps, _ignore)
        self._passes[source] = epoch, under_way
        return under_way


def _ignore(position: int) -> None:
    """The mix counts the position of its sources."""
