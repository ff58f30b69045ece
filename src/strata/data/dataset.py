"""The base class of all datasets: a plan, a position in it, and the iteration over the remaining rows."""

from __future__ import annotations

import logging
import math
import operator
import os
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from strata.clock import SystemClock
from strata.data.batch.decoders import choose
from strata.data.batch.delivery import lanes_that_fit
from strata.data.memory import release
from strata.data.order.assignment import by_name
from strata.data.order.bins import Bins, BinSchedule, BinSteps, Budget, Pools
from strata.data.order.cursor import VERSION, VERSION_OF_CUTS, Cursor, Cuts, read_cursor
from strata.data.order.order import choose_lanes, choose_window, make_order
from strata.data.order.schedule import Schedule
from strata.data.order.steps import Steps
from strata.data.plan.report import explain, summary
from strata.data.runtime.bottleneck import Lookout, PlanFacts
from strata.data.runtime.decode_process import ProcessDecoder
from strata.data.runtime.decoded import DecodedBlocks
from strata.data.runtime.decoder import Recipe, ThreadDecoder, has_head, open_shared
from strata.data.runtime.iterator import Pass
from strata.data.runtime.metrics import LoaderRecorder
from strata.data.runtime.pipeline import Pipeline, Work
from strata.data.runtime.prefetch import Fetcher
from strata.data.runtime.prometheus import register
from strata.data.shared.fetched import FetchedBytes, cache_on_disk
from strata.errors import InvalidArgument, PlanChanged

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from strata.clock import Clock
    from strata.data.batch.delivery import Deliverer
    from strata.data.batch.policy import Policy
    from strata.data.batch.vocabulary import Vocabulary
    from strata.data.config import LoaderConfig
    from strata.data.order.order import Order
    from strata.data.order.steps import EpochSteps
    from strata.data.plan.plan import Plan
    from strata.data.runtime.decoded import Blocks
    from strata.data.runtime.decoder import Decoder
    from strata.data.runtime.metrics import LoaderMetrics
    from strata.identity import Identity

log = logging.getLogger(__name__)

MAX_LANES_PER_RANK = 8
"""More lanes mix a batch from more places, and hold more decoded row groups at once."""
BLOCK_BYTES = 16 << 20
PART_ROWS = 1 << 17
"""Rows of a block whose window is too large for one block. A column of 8 bytes per row, 1 MiB, then fits the cache."""
PIECE_ROWS = 1 << 10
"""Minimum average rows of a row group in such a block; with fewer, the fixed cost per piece would dominate."""
MAX_BLOCK_ROWS = 1 << 20
"""Size of a block without shuffle: large enough that the work per block is negligible."""


class Dataset:
    """The dataset that `create_dataloader` returns with the loader. Iterating over either is the same."""

    has_global_state = True
    """`state_dict()` is the same on all ranks, and any number of ranks can load it."""

    def __init__(
        self,
        recipe: Recipe,
        deliverer: Deliverer,
        config: LoaderConfig,
        ranks: Identity,
        *,
        plan_s: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        self.name = config.name
        self.config = config
        self.ranks = ranks
        self._recipe = recipe
        self._deliverer = deliverer
        self._clock = clock or SystemClock()
        num_threads = config.runtime.num_threads
        self._recorder = LoaderRecorder(num_threads, self._clock)
        pruning = recipe.plan.pruning
        self._recorder.planned(
            plan_s,
            skipped_files=pruning.num_files_skipped,
            skipped_units=pruning.num_units_skipped,
            incomplete_rows=pruning.num_rows_incomplete,
        )
        self._decoding = choose(
            recipe.plan.columns,
            config.batch.decode,
            is_default="webdataset" in recipe.formats,
            output_format=config.batch.output_format,
            missing=config.batch.missing if "webdataset" in recipe.formats else "none",
            can_skip=config.plan.on_error == "skip",
        )
        self._processes: list[ProcessDecoder] = []
        """Kept from one pass to the next, because starting a process is slow."""
        if config.runtime.worker_type == "process":
            self._processes = [ProcessDecoder(recipe, recorder) for recorder in self._recorder.workers]
        self._shared = None if self._processes else open_shared(recipe)
        self._fetched = self._fetched_bytes()
        self._lookout = Lookout(self._facts(), num_workers=num_threads)
        self._summary = summary(self.plan)
        self._lengths_digest = "" if deliverer.lengths is None else deliverer.lengths.digest
        self._known_bins: tuple[tuple[int, ...], Bins] | None = None
        self._cursor = self._start_of(0)
        self._is_resuming = False
        """Whether the cursor was loaded and no batch has been delivered since."""
        self._is_begun = False
        """Whether a batch has been delivered since the cursor was set. A pass without one starts over."""
        self._is_warm = False
        """Whether a pass came before: its memory is reused, and decoding part of a row group first gains nothing."""
        self._pass: weakref.ref[Pass] | None = None
        register(config.name, self.get_metrics)

    @property
    def plan(self) -> Plan:
        """The plan of what is read; print it for a table of splits."""
        return self._recipe.plan

    @property
    def policies(self) -> tuple[Policy, ...] | None:
        """How each column is delivered; with a transform, None until it has run."""
        return self._deliverer.policies

    @property
    def decoded_columns(self) -> Collection[str]:
        """The columns whose values a decoder makes of bytes."""
        return () if self._decoding is None else self._decoding.decoders.keys()

    @property
    def vocabularies(self) -> Mapping[str, Vocabulary]:
        """The vocabularies of all columns that are delivered as codes."""
        return self._deliverer.vocabularies

    def vocabulary(self, column: str) -> Vocabulary:
        """Return the vocabulary of a column that is delivered as codes.

        Raises:
            InvalidArgument: The column is not delivered as codes.
        """
        known = self.vocabularies
        if column not in known:
            raise InvalidArgument(
                f"column {column!r} has no vocabulary; columns with one: {', '.join(sorted(known)) or 'none'}. "
                f"To get codes, pass strings={{{column!r}: 'codes'}}",
                field="column",
            )
        return known[column]

    @property
    def epoch(self) -> int:
        return self._cursor.epoch

    @property
    def position(self) -> int:
        """Rows of this epoch delivered so far, summed over all ranks."""
        return self._cursor.position

    def __len__(self) -> int:
        """Return the batches of a whole epoch, the same on every rank.

        With batch_tokens= and batch_bytes=, epochs differ a little; this is the number of the current one.
        """
        return self.steps(0).num_batches

    @property
    def num_batches_left(self) -> int:
        """Batches from the position to the end of the epoch, the same on every rank."""
        return self.steps(self._cursor.position).num_batches

    def __iter__(self) -> Iterator[Any]:
        return self.begin()

    def begin(self) -> Pass:
        """Start a pass: resume from a loaded state, or start this epoch, or the next one if this one is complete."""
        if self._is_begun:
            is_over = self._cursor.position == self._cursor.num_rows
            self._cursor = self._start_of(self._cursor.epoch + is_over)
            self._is_begun = False
        return self.read(self._cursor, self.steps(self._cursor.position), self._moved)

    def read(self, cursor: Cursor, steps: EpochSteps | BinSteps, on_position: Callable[[int], None]) -> Pass:
        """Start a pass over these batches of an epoch; `on_position` is called with the position after each batch."""
        config = self.config
        self._end_pass()
        pipeline: Blocks | None = None
        if steps.num_batches:
            fetcher = self._fetcher()
            block_bytes, block_rows = self._block_size(has_windows=cursor.window > 0)
            part_rows = self._part_rows(cursor.window * cursor.lanes)
            work = Work(
                plan=self.plan,
                schedule=self._schedule(cursor, steps, block_rows, part_rows),
                decoders=self._decoders(fetcher),
                fetcher=fetcher,
                convert=self._deliverer.convert,
                present=self._deliverer.present,
                strategy=by_name(config.runtime.split_strategy),
                recorder=self._recorder,
                prefetch_bytes=config.runtime.prefetch_bytes,
                row_bytes=self._deliverer.row_bytes,
                block_bytes=block_bytes,
                has_head=(lambda _: False) if self._is_warm else self._has_head,
                skips_bad_row_groups=config.plan.on_error == "skip",
                on_skip=partial(self._skipped, set()),
            )
            pipeline = self._decoded(Pipeline(work))
        begun = Pass(
            pipeline,
            steps,
            epoch=cursor.epoch,
            rank=self.ranks.rank,
            recorder=self._recorder,
            lookout=self._lookout,
            clock=self._clock,
            collate_fn=config.batch.collate_fn,
            on_position=on_position,
        )
        self._pass = weakref.ref(begun)  # leaving the loop drops the pass, which ends its threads
        if pipeline is not None:
            pipeline.start()
            self._is_warm = True
        return begun

    def set_epoch(self, epoch: int) -> None:
        """Make the next loop read this epoch, from its start or from the position of a loaded state."""
        if operator.index(epoch) < 0:
            raise InvalidArgument(f"epoch={epoch} must be 0 or more", field="epoch")
        if self._is_resuming and epoch == self._cursor.epoch:
            return
        self._end_pass()
        self._is_resuming = self._is_begun = False
        self._cursor = self._start_of(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch: small, and the same on all ranks after the same number of batches."""
        return self._cursor.to_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, on_change: str = "refuse") -> None:
        """Make the next loop resume with exactly the rows that were not delivered, on any number of ranks.

        `on_change="accept"` resumes at this position even if the dataset has changed.

        Raises:
            PlanChanged: The dataset has changed since the state was saved; the message names the difference.
            InvalidArgument: It is not the state of a loader.
        """
        cursor = self.checked(state, on_change=on_change)
        self._end_pass()
        self._cursor = cursor
        self._is_resuming, self._is_begun = True, False

    def checked(self, state: Mapping[str, Any], *, on_change: str) -> Cursor:
        """Return the position of a state, for this dataset. Raises what `load_state_dict` raises."""
        if on_change not in ("refuse", "accept"):
            raise InvalidArgument(f"on_change={on_change!r} is unknown; use 'refuse' or 'accept'", field="on_change")
        cursor = read_cursor(state)
        if cursor.fingerprint != self.plan.fingerprint:
            what = explain(cursor.plan, self.plan)
            if on_change == "refuse":
                raise PlanChanged(
                    f"the state at row {cursor.position} of epoch {cursor.epoch} belongs to another dataset: {what}. "
                    "Restore the dataset, start an epoch with set_epoch(), or resume at the same position of the new "
                    "order (which may miss or repeat rows) with load_state_dict(state, on_change='accept')"
                )
            log.warning("the dataset has changed: %s; resuming at row %d of the new order", what, cursor.position)
            fresh = self._start_of(cursor.epoch)
            cursor = msgspec.structs.replace(fresh, position=self._nearest(fresh, cursor.position))
        elif cursor.num_rows != self.plan.num_rows:
            raise InvalidArgument(
                f"the state has num_rows={cursor.num_rows}, but the same dataset has {self.plan.num_rows} rows; load "
                "the dictionary as it was saved",
                field="state",
            )
        else:
            cursor = self._with_cuts(cursor)
        return cursor

    def get_metrics(self) -> LoaderMetrics:
        return self._recorder.snapshot()

    def reset_metrics(self) -> None:
        self._recorder.reset()

    def close(self) -> None:
        """End the current pass, its threads and its processes. The dataset can be used again."""
        self._end_pass()
        for decoder in self._processes:
            decoder.shutdown()
        for shared in (self._shared, self._fetched):
            if shared is not None:
                shared.cache.leave()
        release()

    def _moved(self, position: int) -> None:
        self._is_begun, self._is_resuming = True, False
        self._cursor = msgspec.structs.replace(self._cursor, position=position)

    def _end_pass(self) -> None:
        under_way = None if self._pass is None else self._pass()
        if under_way is not None:
            under_way.close()
        self._pass = None

    def start_of_mix(self, batch_size: int) -> Cursor:
        """Return the start of the first epoch for a mix, which takes about this many rows for each batch of a rank."""
        # No number divides batches that vary in size, and a power of two restricts the number of lanes least.
        cursor = self._start_of(0, 1 << batch_size.bit_length() - 1)
        if not cursor.shuffle:
            return cursor
        rows = self.config.order.shuffle_buffer_size
        window = choose_window(num_lanes=cursor.lanes, batch_rows=cursor.lanes, shuffle_buffer_size=rows)
        return msgspec.structs.replace(cursor, window=window)

    def _start_of(self, epoch: int, batch_size: int | None = None) -> Cursor:
        order, plan = self.config.order, self.plan
        if batch_size is None:
            # Bins take rows of all lanes of a track, so any number of lanes will do.
            batch_size = order.batch_size if order.size is None else math.lcm(*range(1, MAX_LANES_PER_RANK + 1))
        lanes = order.lanes
        if lanes is None:
            lanes = choose_lanes(
                world_size=self.ranks.world_size,
                batch_size=batch_size,
                num_row_groups=plan.num_units,
                shuffle=order.shuffle,
                max_lanes_per_rank=lanes_that_fit(
                    plan, self._deliverer.row_bytes, self.config.plan.split_bytes, MAX_LANES_PER_RANK
                ),
            )
        # If the user fixed the lanes, the order must not depend on batches and ranks, so the window must not either.
        has_fixed_batches = order.lanes is None and order.size is None
        batch_rows = batch_size * self.ranks.world_size if has_fixed_batches else lanes
        window = choose_window(num_lanes=lanes, batch_rows=batch_rows, shuffle_buffer_size=order.shuffle_buffer_size)
        return Cursor(
            fingerprint=plan.fingerprint,
            seed=order.shuffle_seed,
            shuffle=order.shuffle,
            epoch=epoch,
            position=0,
            num_rows=plan.num_rows,
            lanes=lanes,
            window=window if order.shuffle else 0,
            plan=self._summary,
            cuts=self._cuts(self.ranks.world_size if order.lanes is None else lanes),
            version=VERSION if order.size is None else VERSION_OF_CUTS,
        )

    def _cuts(self, num_tracks: int) -> Cuts | None:
        size, lengths = self.config.order.size, self._deliverer.lengths
        if size is None or lengths is None:
            return None
        return Cuts(
            unit=size.unit,
            limit=size.limit,
            columns=list(lengths.columns),
            lengths=self._lengths_digest,
            padded=self.config.batch.sequences == "padded",
            length_buckets=size.length_buckets,
            long_rows=size.long_rows,
            tracks=num_tracks,
        )

    def _with_cuts(self, cursor: Cursor) -> Cursor:
        """Check that the batches of a state are cut as those of this loader.

        Raises:
            InvalidArgument: They are not, and the state is in the middle of an epoch.
        """
        fresh = self._start_of(cursor.epoch)
        if (cursor.cuts is None) == (fresh.cuts is None):
            if cursor.cuts is None or fresh.cuts is None:
                return cursor
            mine = msgspec.structs.replace(fresh.cuts, tracks=cursor.cuts.tracks)
            if mine == cursor.cuts:
                self._steps_of(cursor, cursor.position)  # refuses an impossible position
                return cursor
        if cursor.position in (0, cursor.num_rows):
            return msgspec.structs.replace(fresh, position=cursor.position)
        there, here = (
            {"unit": "rows"} if cuts is None else msgspec.to_builtins(cuts) for cuts in (cursor.cuts, fresh.cuts)
        )
        names = ["unit"] if there["unit"] != here["unit"] else [name for name in here if there[name] != here[name]]
        listed = ", ".join(f"{name} was {there[name]!r} and is {here[name]!r}" for name in names if name != "tracks")
        raise InvalidArgument(
            f"the state at row {cursor.position} of epoch {cursor.epoch} is from batches that were cut differently: "
            f"{listed}. Restore these arguments until the end of the epoch, or start an epoch with set_epoch()",
            field="state",
        )

    def _nearest(self, cursor: Cursor, position: int) -> int:
        """Return the position of the last batch border up to a position."""
        if cursor.cuts is None or position >= cursor.num_rows:
            return min(position, cursor.num_rows)
        starts = self._bins(cursor).starts
        return int(starts[np.searchsorted(starts, position, side="right") - 1])

    def _order(self, cursor: Cursor) -> Order:
        return make_order(
            self.plan,
            seed=cursor.seed,
            epoch=cursor.epoch,
            shuffle=cursor.shuffle,
            num_lanes=cursor.lanes,
            window_rows=cursor.window,
        )

    def _bins(self, cursor: Cursor) -> Bins:
        """Return the bins of the cursor's epoch, which are kept until another one is needed."""
        cuts, lengths = cursor.cuts, self._deliverer.lengths
        assert cuts is not None
        assert lengths is not None
        key = (cursor.seed, cursor.shuffle, cursor.epoch, cursor.lanes, cursor.window, cuts.tracks)
        if self._known_bins is None or self._known_bins[0] != key:
            budget = Budget(
                limit=cuts.limit,
                is_padded=cuts.padded,
                has_buckets=cuts.length_buckets,
                skips_long=cuts.long_rows == "skip",
            )
            unit_starts = np.concatenate([[0], np.cumsum(self.plan.unit_rows)])
            pools = Pools(self._order(cursor), budget.costs(lengths.values), unit_starts, cuts.tracks, budget)
            self._known_bins = (key, Bins.of(pools))
        return self._known_bins[1]

    def _schedule(
        self, cursor: Cursor, steps: EpochSteps | BinSteps, block_rows: int, part_rows: int
    ) -> Schedule | BinSchedule:
        rank = self.ranks.rank
        if isinstance(steps, BinSteps):
            return BinSchedule(steps, rank, block_rows, part_rows=part_rows)
        order = self._order(cursor)
        return Schedule(order, steps, rank, block_rows, part_rows=part_rows, starts_small=True)

    def steps(self, first: int = 0) -> Steps | BinSteps:
        """Return the batches of the epoch from this position on."""
        return self._steps_of(self._cursor, first)

    def _steps_of(self, cursor: Cursor, first: int) -> Steps | BinSteps:
        if cursor.cuts is not None:
            return BinSteps(
                bins=self._bins(cursor),
                num_rows=self.plan.num_rows,
                first=first,
                world_size=self.ranks.world_size,
                tail=self.config.order.tail,
            )
        return Steps(
            num_rows=self.plan.num_rows,
            first=first,
            batch_size=self.config.order.batch_size,
            world_size=self.ranks.world_size,
            tail=self.config.order.tail,
        )

    def _decoded(self, pipeline: Pipeline) -> Blocks:
        if self._decoding is None:
            return pipeline
        return DecodedBlocks(
            pipeline,
            self._decoding,
            num_threads=self.config.runtime.num_threads,
            prefetch_bytes=self.config.runtime.prefetch_bytes,
            on_lacking=self._recorder.lacked,
        )

    def _decoders(self, fetcher: Fetcher | None) -> Sequence[Decoder]:
        if self._processes:
            for decoder in self._processes:
                decoder.ready()
            return self._processes
        return [ThreadDecoder(self._recipe, recorder, fetcher, self._shared) for recorder in self._recorder.workers]

    def _fetcher(self) -> Fetcher | None:
        """Return a prefetcher for remote files; processes read for themselves."""
        if self._recipe.source.is_local or self._processes:
            return None
        return Fetcher(
            self._recipe,
            prefetch_bytes=self.config.runtime.prefetch_bytes,
            shared=self._shared,
            fetched=self._fetched,
        )

    def _fetched_bytes(self) -> FetchedBytes | None:
        """Return where the fetched bytes of remote files are kept, if they are."""
        runtime = self.config.runtime
        if self._recipe.source.is_local or self._processes:
            return None
        if runtime.cache_dir is not None:
            return FetchedBytes(cache_on_disk(runtime.cache_dir, runtime.cache_bytes), self._recipe.source)
        return None if self._shared is None else FetchedBytes(self._shared.cache, self._recipe.source)

    def _has_head(self, row_group: int) -> bool:
        # With on_error="skip", no row of a damaged row group is delivered, and only its end shows that it is intact.
        # Shared row groups are decoded once, whole.
        return (
            not self._processes
            and self._shared is None
            and self.config.plan.on_error == "raise"
            and has_head(self._recipe, row_group)
        )

    def _block_size(self, *, has_windows: bool) -> tuple[int, int]:
        """Return the maximum bytes and rows of a block.

        A window that fits is gathered in one block, since gathering it in parts copies its rows once more. Besides the
        row groups, memory holds the block that the caller consumes and the next one: together they take as much as
        the splits of all workers.
        """
        most = max(1, self.config.plan.split_bytes * self.config.runtime.num_threads // 2)
        num_bytes = most if has_windows else min(BLOCK_BYTES, most)
        num_rows = max(1, num_bytes // self._deliverer.row_bytes)
        return num_bytes, num_rows if has_windows else min(MAX_BLOCK_ROWS, num_rows)

    def _part_rows(self, shuffle_buffer_rows: int) -> int:
        """Return the maximum rows of a block if the shuffle buffer is too large for one block.

        `shuffle_buffer_rows`: of all ranks together.
        """
        row_groups_per_buffer = shuffle_buffer_rows * self.plan.num_units / max(1, int(self.plan.unit_rows.sum()))
        return max(PART_ROWS, int(row_groups_per_buffer / self.ranks.world_size) * PIECE_ROWS)

    def _skipped(self, known: set[int], row_group: int, error: BaseException) -> None:
        """Log and count a skipped row group once per pass (`known`), although several blocks may need it."""
        if row_group not in known:
            known.add(row_group)
            self._recorder.skipped_row_group()
            log.warning("skipped a row group with %d rows: %s", self.plan.unit_rows[row_group], error)

    def _facts(self) -> PlanFacts:
        formats = {file.format for file in self.plan.files}
        return PlanFacts(
            num_row_groups=self.plan.num_units,
            num_splits=self.plan.num_splits,
            is_local=self._recipe.source.is_local,
            world_size=self.ranks.world_size,
            row_group_name=self._recipe.formats[min(formats)].unit_name if formats else "row group",
            worker_type=self.config.runtime.worker_type,
            num_cpus=len(os.sched_getaffinity(0)),
        )
