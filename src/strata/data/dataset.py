"""`StructuredDataset`: a plan, a place in it, and the way to iterate over what is left."""

from __future__ import annotations

import logging
import operator
import os
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from strata.clock import SystemClock
from strata.data.batch.delivery import lanes_that_fit
from strata.data.memory import release
from strata.data.order.assignment import by_name
from strata.data.order.cursor import Cursor, read_cursor
from strata.data.order.order import choose_lanes, choose_window, make_order
from strata.data.order.schedule import Schedule
from strata.data.order.steps import Steps
from strata.data.plan.diff import explain, summary
from strata.data.runtime.bottleneck import Lookout, PlanFacts
from strata.data.runtime.decode_process import ProcessDecoder
from strata.data.runtime.decoder import Recipe, ThreadDecoder, has_head
from strata.data.runtime.iterator import Pass
from strata.data.runtime.metrics import LoaderRecorder
from strata.data.runtime.pipeline import Pipeline, Work
from strata.data.runtime.prefetch import Fetcher
from strata.data.runtime.prometheus import register
from strata.errors import InvalidArgument, PlanChanged

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from strata.clock import Clock
    from strata.data.batch.delivery import Deliverer
    from strata.data.batch.policy import Policy
    from strata.data.batch.vocabulary import Vocabulary
    from strata.data.config import Delivery
    from strata.data.plan.plan import Plan
    from strata.data.runtime.decoder import Decoder
    from strata.data.runtime.metrics import LoaderMetrics
    from strata.identity import Identity

log = logging.getLogger(__name__)

MAX_LANES_PER_RANK = 8
"""More would mix a batch from more places, and hold more decoded units at once."""
BLOCK_BYTES = 16 << 20
MAX_BLOCK_ROWS = 1 << 20
"""Made at once when there is no window: enough that what is done per block does not count."""


class Dataset:
    """What `create_dataloader` returns beside the loader. Iterating over it, or over the loader, is the same."""

    has_global_state = True
    """`state_dict()` is the same on all ranks, of any number of them."""

    def __init__(
        self,
        recipe: Recipe,
        deliverer: Deliverer,
        delivery: Delivery,
        ranks: Identity,
        *,
        name: str,
        plan_s: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self.delivery = delivery
        self.ranks = ranks
        self._recipe = recipe
        self._deliverer = deliverer
        self._clock = clock or SystemClock()
        self._num_threads = max(1, delivery.num_workers)
        self._recorder = LoaderRecorder(self._num_threads, self._clock)
        pruning = recipe.plan.pruning
        self._recorder.planned(plan_s, skipped_files=pruning.num_files_skipped, skipped_units=pruning.num_units_skipped)
        self._processes: list[ProcessDecoder] = []
        """Kept from one pass to the next: starting them takes a while."""
        if delivery.worker_type == "process":
            self._processes = [ProcessDecoder(recipe, recorder) for recorder in self._recorder.workers]
        self._lookout = Lookout(self._facts(), num_workers=self._num_threads)
        self._summary = summary(self.plan)
        self._cursor = self._start_of(0)
        self._is_resuming = False
        """The cursor was loaded, and no batch has been taken since."""
        self._is_begun = False
        """A batch has been taken since the cursor was set. A pass that nothing was taken from begins again there."""
        self._is_warm = False
        """There was a pass before, so memory is at hand, and nothing is gained by beginning with a part of a unit."""
        self._pass: weakref.ref[Pass] | None = None
        register(name, self.get_metrics)

    @property
    def plan(self) -> Plan:
        """What will be read; print it for a table of splits."""
        return self._recipe.plan

    @property
    def policies(self) -> tuple[Policy, ...] | None:
        """What becomes of each column; None until a transform has shown them."""
        return self._deliverer.policies

    @property
    def vocabularies(self) -> Mapping[str, Vocabulary]:
        """Of all columns that are delivered as codes."""
        return self._deliverer.vocabularies

    def vocabulary(self, column: str) -> Vocabulary:
        """Of a column that is delivered as codes: which code stands for which value.

        Raises:
            InvalidArgument: It is not delivered as codes.
        """
        known = self.vocabularies
        if column not in known:
            raise InvalidArgument(
                f"column {column!r} has no vocabulary; those with one: {', '.join(sorted(known)) or 'none'}. "
                f"Ask for codes with strings={{{column!r}: 'codes'}}",
                field="column",
            )
        return known[column]

    @property
    def epoch(self) -> int:
        return self._cursor.epoch

    @property
    def position(self) -> int:
        """Rows of this epoch that have been handed over, on all ranks together."""
        return self._cursor.position

    def __len__(self) -> int:
        """Batches of a whole epoch, the same on every rank."""
        return self._steps(first=0).num_batches

    @property
    def num_batches_left(self) -> int:
        """Batches from the position to the end of the epoch, the same on every rank."""
        return self._steps(first=self._cursor.position).num_batches

    def __iter__(self) -> Iterator[Any]:
        return self.begin()

    def begin(self) -> Pass:
        """Goes on from a loaded state; otherwise begins the epoch: the next one if this one was read to its end."""
        self._end_pass()
        if self._is_begun:
            is_over = self._cursor.position == self._cursor.num_rows
            self._cursor = self._start_of(self._cursor.epoch + is_over)
            self._is_begun = False
        cursor, delivery = self._cursor, self.delivery
        steps = self._steps(first=cursor.position)
        order = make_order(
            self.plan,
            seed=cursor.seed,
            epoch=cursor.epoch,
            shuffle=cursor.shuffle,
            num_lanes=cursor.lanes,
            window_rows=cursor.window,
        )
        pipeline = None
        if steps.num_batches:
            fetcher = self._fetcher()
            block_bytes, block_rows = self._block_size(has_windows=bool(order.window_rows))
            work = Work(
                plan=self.plan,
                schedule=Schedule(order, steps, self.ranks.rank, block_rows, starts_small=True),
                decoders=self._decoders(fetcher),
                fetcher=fetcher,
                convert=self._deliverer.convert,
                present=self._deliverer.present,
                strategy=by_name(delivery.split_strategy),
                recorder=self._recorder,
                budget_bytes=delivery.prefetch_bytes,
                row_bytes=self._deliverer.row_bytes,
                block_bytes=block_bytes,
                has_head=(lambda _: False) if self._is_warm else self._has_head,
                skips_bad_units=delivery.on_error == "skip",
                on_skip=partial(self._skipped, set()),
            )
            pipeline = Pipeline(work)
        begun = Pass(
            pipeline,
            steps,
            epoch=cursor.epoch,
            rank=self.ranks.rank,
            recorder=self._recorder,
            lookout=self._lookout,
            clock=self._clock,
            collate=delivery.collate_fn,
            on_position=self._moved,
        )
        self._pass = weakref.ref(begun)  # who leaves the loop forgets it, and its threads end
        if pipeline is not None:
            pipeline.start()
            self._is_warm = True
        return begun

    def set_epoch(self, epoch: int) -> None:
        """The next loop reads this epoch, from its beginning, or from where a state that was loaded says."""
        if operator.index(epoch) < 0:
            raise InvalidArgument(f"epoch={epoch} must not be negative", field="epoch")
        if self._is_resuming and epoch == self._cursor.epoch:
            return
        self._end_pass()
        self._is_resuming = self._is_begun = False
        self._cursor = self._start_of(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands: the same on all ranks after the same number of batches, and small."""
        return self._cursor.to_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, on_change: str = "refuse") -> None:
        """The next loop goes on with exactly the rows that had not been handed over, whatever the number of ranks.

        `on_change="accept"`: goes on at this position even if the dataset is another one than it was.

        Raises:
            PlanChanged: The dataset is not the one that the state was saved for; the message says what changed.
            InvalidArgument: It is no state of a loader.
        """
        if on_change not in ("refuse", "accept"):
            raise InvalidArgument(f"on_change={on_change!r}; use 'refuse' or 'accept'", field="on_change")
        cursor = read_cursor(state)
        if cursor.fingerprint != self.plan.fingerprint:
            what = explain(cursor.plan, self.plan)
            if on_change == "refuse":
                raise PlanChanged(
                    f"the state at row {cursor.position} of epoch {cursor.epoch} belongs to another dataset: {what}. "
                    "Bring back what it was, begin an epoch anew with set_epoch(), or go on at the same position of "
                    "the new order (rows may be missed or repeated) with load_state_dict(state, on_change='accept')"
                )
            log.warning("the dataset has changed: %s; going on at row %d of the new order", what, cursor.position)
            fresh = self._start_of(cursor.epoch)
            cursor = msgspec.structs.replace(fresh, position=min(cursor.position, fresh.num_rows))
        elif cursor.num_rows != self.plan.num_rows:
            raise InvalidArgument(
                f"the state says {cursor.num_rows} rows, and the same dataset has {self.plan.num_rows}; it was changed",
                field="state",
            )
        self._end_pass()
        self._cursor = cursor
        self._is_resuming, self._is_begun = True, False

    def get_metrics(self) -> LoaderMetrics:
        return self._recorder.snapshot()

    def reset_metrics(self) -> None:
        self._recorder.reset()

    def close(self) -> None:
        """Ends what is under way, processes too; the dataset can be used again."""
        self._end_pass()
        for decoder in self._processes:
            decoder.shutdown()
        release()

    def _moved(self, position: int) -> None:
        self._is_begun, self._is_resuming = True, False
        self._cursor = msgspec.structs.replace(self._cursor, position=position)

    def _end_pass(self) -> None:
        under_way = None if self._pass is None else self._pass()
        if under_way is not None:
            under_way.close()
        self._pass = None

    def _start_of(self, epoch: int) -> Cursor:
        delivery, plan = self.delivery, self.plan
        lanes = delivery.lanes
        if lanes is None:
            lanes = choose_lanes(
                num_ranks=self.ranks.world_size,
                batch_size=delivery.batch_size,
                num_units=plan.num_units,
                shuffle=delivery.shuffle,
                max_lanes_per_rank=lanes_that_fit(
                    plan, self._deliverer.row_bytes, delivery.lane_bytes, MAX_LANES_PER_RANK
                ),
            )
        # With lanes that are fixed the order must not depend on batches and ranks, so the window does not either.
        batch_rows = delivery.batch_size * self.ranks.world_size if delivery.lanes is None else lanes
        window = choose_window(num_lanes=lanes, batch_rows=batch_rows, buffer_rows=delivery.shuffle_buffer_size)
        return Cursor(
            fingerprint=plan.fingerprint,
            seed=delivery.shuffle_seed,
            shuffle=delivery.shuffle,
            epoch=epoch,
            position=0,
            num_rows=plan.num_rows,
            lanes=lanes,
            window=window if delivery.shuffle else 0,
            plan=self._summary,
        )

    def _steps(self, *, first: int) -> Steps:
        return Steps(
            num_rows=self.plan.num_rows,
            first=first,
            batch_size=self.delivery.batch_size,
            num_ranks=self.ranks.world_size,
            tail=self.delivery.tail,
        )

    def _decoders(self, fetcher: Fetcher | None) -> Sequence[Decoder]:
        if self._processes:
            for decoder in self._processes:
                decoder.ready()
            return self._processes
        return [ThreadDecoder(self._recipe, recorder, fetcher) for recorder in self._recorder.workers]

    def _fetcher(self) -> Fetcher | None:
        """Only for what is far away, and not for processes: each of them reads for itself."""
        if self._recipe.source.is_local or self._processes:
            return None
        return Fetcher(self._recipe, budget_bytes=self.delivery.prefetch_bytes)

    def _has_head(self, unit: int) -> bool:
        # Of a unit that is skipped no row is delivered, and only at its end is it known that it can be read.
        return not self._processes and self.delivery.on_error == "raise" and has_head(self._recipe, unit)

    def _block_size(self, *, has_windows: bool) -> tuple[int, int]:
        """The most bytes, and the most rows.

        A window is made at once if it may, since gathering it in parts takes longer. Beside the units that it is
        gathered from, the block that the caller has and the next one are held: both together take as much as the
        splits of all workers.
        """
        most = max(1, self.delivery.lane_bytes * self._num_threads // 2)
        num_bytes = most if has_windows else min(BLOCK_BYTES, most)
        num_rows = max(1, num_bytes // self._deliverer.row_bytes)
        return num_bytes, num_rows if has_windows else min(MAX_BLOCK_ROWS, num_rows)

    def _skipped(self, known: set[int], unit: int, error: BaseException) -> None:
        """`known`: units that this pass met before. Blocks that lie apart may need the same one."""
        if unit not in known:
            known.add(unit)
            self._recorder.skipped_unit()
            log.warning("skipped a unit with %d rows: %s", self.plan.unit_rows[unit], error)

    def _facts(self) -> PlanFacts:
        formats = {file.format for file in self.plan.files}
        return PlanFacts(
            num_units=self.plan.num_units,
            num_splits=self.plan.num_splits,
            is_local=self._recipe.source.is_local,
            num_ranks=self.ranks.world_size,
            unit_name=self._recipe.formats[min(formats)].unit_name if formats else "row group",
            worker_type=self.delivery.worker_type,
            num_cpus=len(os.sched_getaffinity(0)),
        )
