"""The iterator of one pass: takes batches from the pipeline and advances the position as it delivers them."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Self

from strata.errors import StrataError, TransformFailed
from strata.lifecycle import Home, finalize, renewed

if TYPE_CHECKING:
    from collections.abc import Callable

    from strata.clock import Clock
    from strata.data.batch.assembly import Batches
    from strata.data.order.steps import PassSteps
    from strata.data.runtime.bottleneck import Lookout
    from strata.data.runtime.decoded import Blocks
    from strata.data.runtime.metrics import LoaderRecorder

log = logging.getLogger(__name__)

CLOSED = (
    "the loader was closed while it was iterated over: by another loop, by close() or by load_state_dict(); start a "
    "new loop"
)


class Pass:
    """An iterator over the batches of a pass. Leaving the loop in any way ends the threads.

    Several threads may call `next`: each batch goes to one of them.
    """

    def __init__(
        self,
        pipeline: Blocks | None,
        steps: PassSteps,
        *,
        epoch: int,
        rank: int,
        recorder: LoaderRecorder,
        lookout: Lookout,
        clock: Clock,
        collate_fn: Callable[[Any], Any] | None,
        on_position: Callable[[int], None],
    ) -> None:
        self._pipeline = pipeline
        self._steps = steps
        self._epoch = epoch
        self._rank = rank
        self._recorder = recorder
        self._lookout = lookout
        self._clock = clock
        self._collate_fn = collate_fn
        self._on_position = on_position
        self._block: Batches | None = None
        self._place = 0
        self._next_batch = 0
        self.is_exhausted = False
        self._is_closed = False
        self._home = Home()
        self._turn = renewed(threading.RLock())  # re-entrant: collate_fn may call next() as well
        if pipeline is not None:
            # Ends the threads however the caller drops this iterator.
            self._finalizer = finalize(self, pipeline.close)
        recorder.began()

    def __iter__(self) -> Self:
        return self

    @property
    def is_last(self) -> bool:
        """Whether the last delivered batch is the last one."""
        return self._next_batch == self._steps.num_batches

    @property
    def last_batch_rows(self) -> int:
        """Rows of the last delivered batch, summed over ranks, without repeated rows; 0 before the first batch."""
        if not self._next_batch:
            return 0
        start, stop = self._steps.bounds(self._next_batch - 1)
        return stop - start

    def __next__(self) -> Any:
        with self._turn:
            return self._next()

    def _next(self) -> Any:
        if self.is_exhausted or (self._is_closed and self.is_last):
            raise StopIteration
        if self._is_closed:
            raise StrataError(CLOSED)
        self._home.require("this loop over a loader")
        self._recorder.asked()
        try:
            if self._has_next():
                return self._take()
        except BaseException:
            self.close()
            raise
        self.is_exhausted = True
        log.info("epoch %d is complete: %s", self._epoch, self._recorder.snapshot().log_line())
        if not self._steps.num_batches:
            self._drop()
        self._on_position(self._steps.num_rows)
        self.close()
        raise StopIteration

    def close(self) -> None:
        """End the threads; the position stays after the last delivered batch."""
        self._is_closed = True
        self._recorder.ended()
        self._block = None
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            self._finalizer()

    def _has_next(self) -> bool:
        if self._block is not None and self._place < len(self._block.batches):
            return True
        if self._next_batch == self._steps.num_batches:
            return False
        pipeline = self._pipeline  # another thread may close this iterator
        self._block = None if pipeline is None else pipeline.take()
        self._place = 0
        if self._block is None:
            raise StrataError(CLOSED)
        self._look()
        return True

    def _take(self) -> Any:
        block, place = self._block, self._place
        if block is None:  # another thread closed this iterator
            raise StrataError(CLOSED)
        batch = block.batches[place]
        block.batches[place] = None  # the caller owns it now, and frees it by dropping it
        if self._collate_fn is not None:
            try:
                batch = self._collate_fn(batch)
            except StopIteration as error:  # it would end the loop as if the epoch were complete
                raise TransformFailed("collate_fn raised StopIteration; raise another error") from error
        number = self._next_batch
        self._place, self._next_batch = place + 1, number + 1
        self._on_position(self._steps.position_after(number))
        if self.is_last:
            self._drop()
        self._recorder.delivered(
            block.sizes[place],
            padded_rows=self._steps.repeated_rows(number, self._rank) + block.num_repeated[place],
            skipped_rows=block.num_skipped[place],
        )
        return batch

    def _drop(self) -> None:
        self._recorder.dropped(self._steps.dropped_rows if self._rank == 0 else 0)

    def _look(self) -> None:
        now_s = self._clock.monotonic_s()
        if not self._lookout.is_due(now_s):
            return
        diagnosis = self._lookout.look(self._recorder.snapshot(), epoch=self._epoch, now_s=now_s)
        if diagnosis is not None:
            log.log(logging.WARNING if diagnosis.is_warning else logging.INFO, "%s", diagnosis)
