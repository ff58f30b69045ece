"""`mix`: one loader over several datasets, which delivers their rows in the proportions of given weights.

Which rows a batch has is computed (`order/mixture.py`); nothing is drawn. Each source is read by its own dataset, with
its own threads, order, filter and decoders, in batches of as many rows as the mix needs. This module counts the
position, takes the parts of each batch from the sources, and joins them (`batch/joining.py`).
"""

from __future__ import annotations

import json
import logging
import math
import operator
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, get_args

import msgspec
import numpy as np

from strata.data.batch.joining import check_types, delivered_types
from strata.data.config import MAX_BATCH_ROWS
from strata.data.dataset import Dataset
from strata.data.mix_pass import MixPass, Place, at, moved
from strata.data.order.mix_cursor import MixCursor, read_mix_cursor
from strata.data.order.mixture import MAX_ROWS, MAX_SOURCES, Mixture, Turns
from strata.data.order.steps import Steps
from strata.data.ranks import share
from strata.errors import DataError, InvalidArgument, NoData, PlanChanged, SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from strata.data.runtime.metrics import LoaderMetrics

log = logging.getLogger(__name__)

MixBy: TypeAlias = Literal["row", "batch"]
Stop: TypeAlias = Literal["first_exhausted", "all_exhausted"]


MAX_WEIGHT = 1e100
MIN_SHARE = 1e-9
"""The smallest share of a source. It bounds the positions of a mix that ends when all sources have been read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixConfig:
    """How sources are mixed; `mix` documents each field."""

    weights: Mapping[str, float]
    """Positive; they are divided by their sum."""
    batch_size: int
    mix_by: MixBy = "row"
    stop: Stop = "first_exhausted"
    epoch_size: int | None = None
    source_column: str | None = None
    collate_fn: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        given: Mapping[str, Any] = self.weights
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_WEIGHT:
                raise InvalidArgument(
                    f"weights[{name!r}]={value!r} must be a positive number up to {MAX_WEIGHT:g}; leave out a source "
                    "that should not be read",
                    field="weights",
                )
        whole = math.fsum(given.values())
        if small := [name for name, value in given.items() if value / whole < MIN_SHARE]:
            raise InvalidArgument(
                f"weights[{small[0]!r}]={given[small[0]]!r} is less than one row in {1 / MIN_SHARE:,.0f}; raise it, or "
                "leave out the source",
                field="weights",
            )
        for name, known in (("mix_by", get_args(MixBy)), ("stop", get_args(Stop))):
            if getattr(self, name) not in known:
                raise InvalidArgument(
                    f"{name}={getattr(self, name)!r} is unknown; use one of {', '.join(known)}", field=name
                )
        for name, limit in (("batch_size", MAX_BATCH_ROWS), ("epoch_size", MAX_ROWS)):
            value = getattr(self, name)
            if name == "epoch_size" and value is None:
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__") or not 1 <= operator.index(value) <= limit:
                raise InvalidArgument(f"{name}={value!r} must be a whole number from 1 to {limit}", field=name)
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise InvalidArgument(
                f"collate_fn={self.collate_fn!r} is not callable; pass a function", field="collate_fn"
            )


class SourceMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What a mix has delivered of one source."""

    weight: float
    """Its share of the mix; the weights of all sources sum to 1."""
    rows: int
    """Rows that this rank delivered, including repeated ones."""
    epoch: int
    """How many times all ranks together have read the source to its end."""
    position: int
    """Rows of its current epoch delivered so far, on all ranks together."""
    loader: LoaderMetrics
    """Where the time of its own loader goes."""


class MixMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a mix on this rank."""

    sources: dict[str, SourceMetrics]
    batches: int

    @property
    def rows(self) -> int:
        return sum(source.rows for source in self.sources.values())

    @property
    def consumer_wait_s(self) -> float:
        """Time in which the caller waited for the sources, which are waited for one after the other."""
        return sum(source.loader.consumer_wait_s for source in self.sources.values())

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible dictionary."""
        sources = {
            name: {**msgspec.structs.asdict(source), "loader": source.loader.to_dict()}
            for name, source in self.sources.items()
        }
        return {"rows": self.rows, "batches": self.batches, "consumer_wait_s": self.consumer_wait_s, "sources": sources}


def mix(
    sources: Mapping[str, Any],
    weights: Mapping[str, float],
    *,
    batch_size: int = 1024,
    mix_by: MixBy = "row",
    stop: Stop = "first_exhausted",
    epoch_size: int | None = None,
    source_column: str | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
) -> Mix:
    """Return a loader that mixes datasets in the proportions of their weights, exactly and without random draws.

    Args:
        sources: Loaders, or the datasets behind them, of `StructuredDataset`, `IcebergDataset`,
            `DeltaDataset` or `LanceDataset`, by name. The mix reads them from their start; their own `batch_size` and
            `tail` do not apply.
        weights: The share of each source in the rows of the mix. Only their ratios matter.
        batch_size: Rows per batch on each rank. All batches are full.
        mix_by: "row" fills every batch from all sources, which must deliver the same columns; with "batch", each global
            batch comes from one source, so their columns may differ.
        stop: When an epoch of the mix ends: when the first source has been read ("first_exhausted"), or when all have
            been, so that smaller ones are repeated ("all_exhausted").
        epoch_size: Rows of an epoch of the mix, on all ranks together; replaces `stop`.
        source_column: Adds a column of this name with the number of each row's source, in the order of `sources`.
        collate_fn: Called with each batch; its result is delivered instead.

    Raises:
        InvalidArgument: An argument is invalid; the message names the value and the cure.
        SchemaMismatch: Sources deliver different columns or types.
        NoData: A source has no rows, or an epoch has no full batch.
        DataError: Another rank has other arguments.
    """
    datasets = _datasets(sources)
    _check_weights(datasets, weights)
    ordered = {name: weights[name] for name in datasets}
    config = MixConfig(
        weights=ordered,
        batch_size=batch_size,
        mix_by=mix_by,
        stop=stop,
        epoch_size=epoch_size,
        source_column=source_column,
        collate_fn=collate_fn,
    )
    _check_sources(datasets)
    if mix_by == "row":
        _check_columns(datasets)
    made = Mix(datasets, config)
    _check_same(made)
    return made


class Mix:
    """The loader that `mix` returns. Checkpoints contain its position, from which any number of ranks can resume."""

    has_global_state = True
    """`state_dict()` is the same on all ranks, and any number of ranks can load it."""

    def __init__(self, sources: Mapping[str, Dataset], config: MixConfig) -> None:
        self.sources = dict(sources)
        self.config = config
        self.ranks = next(iter(self.sources.values())).ranks
        self.batch_size = operator.index(config.batch_size)
        self._mixture = Mixture(list(config.weights.values()))
        self._rows = [0] * len(self.sources)
        """Rows of each source that this rank has delivered."""
        self._num_batches = 0
        self._running: weakref.ref[MixPass] | None = None
        self._end: tuple[tuple[int, Turns], int] | None = None
        """The last result of `_end_of`, which is needed at every batch."""
        self._place = self._start_of(0)
        self._is_begun = False
        """Whether a batch has been delivered since the place was set. A pass without one starts over."""
        self._is_resuming = False
        """Whether the place was loaded and no batch has been delivered since."""
        if not len(self):
            raise NoData(
                f"an epoch of the mix has {self._end_of(self._place)} rows, which do not fill one batch of "
                f"{self.batch_rows} rows ({self.batch_size} on each of {self.ranks.world_size} ranks); lower "
                "batch_size, or pass stop='all_exhausted' or a larger epoch_size"
            )

    # -- position --------------------------------------------------------------------------------------------------

    @property
    def batch_rows(self) -> int:
        """Rows of a global batch."""
        return self.batch_size * self.ranks.world_size

    @property
    def weights(self) -> dict[str, float]:
        """The share of each source; they sum to 1."""
        return dict(zip(self.sources, self._mixture.weights.tolist(), strict=True))

    @property
    def epoch(self) -> int:
        return self._place.epoch

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and the rows of all epochs delivered so far on all ranks together."""
        return self._place.epoch, self._place.position

    @property
    def is_last(self) -> bool:
        """Whether the last delivered batch is the last one of its epoch."""
        return not self.num_batches_left

    @property
    def num_batches_left(self) -> int:
        """Batches from the position to the end of the epoch, the same on every rank."""
        return self._num_until_end(self._place)

    def __len__(self) -> int:
        """Return the batches of a whole epoch, the same on every rank."""
        return max(self.num_batches_left, self._num_until_end(self._start_of(self._place.epoch)))

    @property
    def dataset(self) -> Self:
        """The mix itself, which has `steps` and `get_metrics` as the dataset of any other loader."""
        return self

    def steps(self, first: int) -> Steps:
        """Return the batches from this position of the mix to the end of the epoch."""
        num_batches = self._num_until_end(moved(self._place, first))
        return Steps(
            num_rows=first + num_batches * self.batch_rows,
            first=first,
            batch_size=self.batch_size,
            world_size=self.ranks.world_size,
            tail="drop",
        )

    def _end_of(self, place: Place) -> int:
        """Return the position at which the epoch of this place ends; it may be in the middle of a batch."""
        key = place.epoch, place.turns
        if self._end is None or self._end[0] != key:
            self._end = key, self._find_end(place)
        return self._end[1]

    def _find_end(self, place: Place) -> int:
        if self.config.epoch_size is not None:
            return (place.epoch + 1) * operator.index(self.config.epoch_size)
        rows = [(place.epoch + 1) * dataset.plan.num_rows for dataset in self.sources.values()]
        if self.config.stop == "all_exhausted":
            return max(place.turns.find(source, count - 1) + 1 for source, count in enumerate(rows))
        return min(place.turns.find(source, count) for source, count in enumerate(rows))

    def _num_until_end(self, place: Place) -> int:
        left = self._end_of(place) - place.position
        is_rounded_up = self.config.epoch_size is None and self.config.stop == "all_exhausted"
        return max(0, -(-left // self.batch_rows) if is_rounded_up else left // self.batch_rows)

    def _start_of(self, epoch: int) -> Place:
        """Return the start of an epoch: the end of the one before it, in batches of the present size."""
        shares = self._mixture.weights.tolist()
        place = Place(
            epoch=max(0, epoch - 1),
            position=0,
            turns=self._turns(0, [0] * len(self.sources)),
            cursors=tuple(
                dataset.start_of_mix(self.batch_size if self.config.mix_by == "batch" else max(1, round(part)))
                for dataset, part in zip(
                    self.sources.values(), (share * self.batch_size for share in shares), strict=True
                )
            ),
        )
        if not epoch:
            return place
        return moved(place, self._num_until_end(place) * self.batch_rows, epoch=epoch)

    def _turns(self, since: int, taken: Sequence[int]) -> Turns:
        return Turns(
            mixture=self._mixture,
            by_batch=self.config.mix_by == "batch",
            batch_rows=self.batch_rows,
            since=since,
            taken=tuple(taken),
        )

    # -- iteration -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Start a pass: resume from a loaded state, or start this epoch, or the next one if this one is complete."""
        self._end_pass()
        if self._is_begun:
            self._place = (
                moved(self._place, self._place.position, epoch=self._place.epoch + 1)
                if self.is_last
                else self._start_of(self._place.epoch)
            )
            self._is_begun = False
        begun = MixPass(self, self._place, self.num_batches_left)
        self._running = weakref.ref(begun)  # leaving the loop drops the pass, which ends its threads
        return begun

    def set_epoch(self, epoch: int) -> None:
        """Make the next loop read this epoch, from its start or from the position of a loaded state.

        The epoch after a complete one continues with the rows that did not fill its last batch.
        """
        if operator.index(epoch) < 0:
            raise InvalidArgument(f"epoch={epoch} must be 0 or more", field="epoch")
        if self._is_resuming and epoch == self._place.epoch:
            return
        self._end_pass()
        if epoch == self._place.epoch + 1 and self.is_last:
            self._place = moved(self._place, self._place.position, epoch=epoch)
        else:
            self._place = self._start_of(epoch)
        self._is_resuming = self._is_begun = False

    def close(self) -> None:
        """End the current pass and the threads and processes of all sources. The mix can be used again."""
        self._end_pass()
        for dataset in self.sources.values():
            dataset.close()

    def delivered(self, place: Place, rows: Sequence[int]) -> None:
        """Record that the caller received a batch with these rows of each source."""
        self._place = place
        self._is_begun, self._is_resuming = True, False
        self._num_batches += 1
        self._rows = [before + more for before, more in zip(self._rows, rows, strict=True)]

    def ended(self) -> None:
        """Record that the pass is complete, including one without batches."""
        self._is_begun, self._is_resuming = True, False

    def _end_pass(self) -> None:
        running = None if self._running is None else self._running()
        if running is not None:
            running.close()
        self._running = None

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position: small, and the same on all ranks after the same number of batches."""
        place = self._place
        cursors = {
            name: at(cursor, taken)
            for name, cursor, taken in zip(self.sources, place.cursors, place.turns.taken, strict=True)
        }
        return MixCursor(
            epoch=place.epoch,
            position=place.position,
            mix_by=self.config.mix_by,
            batch_rows=self.batch_rows,
            weights={name: float(weight) for name, weight in self.config.weights.items()},
            since=place.turns.since,
            sources=cursors,
        ).to_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, on_change: str = "refuse") -> None:
        """Make the next loop resume with exactly the rows that were not delivered, on any number of ranks.

        With other weights than those of the state, the mix continues with the new ones from here on.
        `on_change="accept"` resumes at this position even if a source has changed.

        Raises:
            PlanChanged: A source has changed since the state was saved; the message names the difference.
            InvalidArgument: It is not the state of a mix of these sources.
        """
        saved = read_mix_cursor(state)
        if saved.sources.keys() != self.sources.keys():
            raise InvalidArgument(
                f"the state is of a mix of {', '.join(saved.sources)}, and this is a mix of {', '.join(self.sources)}; "
                "pass the same sources, and change their weights to change their shares",
                field="state",
            )
        cursors = {}
        for name, dataset in self.sources.items():
            try:
                cursors[name] = dataset.checked(saved.sources[name].to_dict(), on_change=on_change)
            except PlanChanged as error:
                raise PlanChanged(f"source {name!r} of the mix: {error.message}") from error
        turns = Turns(
            mixture=Mixture([saved.weights[name] for name in self.sources]),
            by_batch=saved.mix_by == "batch",
            batch_rows=saved.batch_rows,
            since=saved.since,
            taken=tuple(cursor.epoch * cursor.num_rows + cursor.position for cursor in cursors.values()),
        )
        since, taken = turns.since, turns.taken
        has_new_weights = bool((turns.mixture.weights != self._mixture.weights).any())
        has_new_batches = turns.by_batch and turns.batch_rows != self.batch_rows
        if has_new_weights or has_new_batches or saved.mix_by != self.config.mix_by:
            since, taken = saved.position, tuple(turns.taken_at(np.array([saved.position]))[0].tolist())
        if has_new_weights:
            log.info("the weights were %s, and are %s from row %d on", saved.weights, self.weights, saved.position)
        self._end_pass()
        self._place = Place(
            epoch=saved.epoch,
            position=saved.position,
            turns=self._turns(since, taken),
            cursors=tuple(cursors.values()),
        )
        self._is_resuming, self._is_begun = True, False

    # -- metrics ---------------------------------------------------------------------------------------------------

    def get_metrics(self) -> MixMetrics:
        place = self._place
        taken = place.turns.taken_at(np.array([place.position]))[0].tolist()
        sources = {}
        for number, (name, dataset) in enumerate(self.sources.items()):
            epoch, position = divmod(taken[number], dataset.plan.num_rows)
            sources[name] = SourceMetrics(
                weight=self.weights[name],
                rows=self._rows[number],
                epoch=epoch,
                position=position,
                loader=dataset.get_metrics(),
            )
        return MixMetrics(sources=sources, batches=self._num_batches)

    def reset_metrics(self) -> None:
        self._rows, self._num_batches = [0] * len(self.sources), 0
        for dataset in self.sources.values():
            dataset.reset_metrics()

    @property
    def rows_delivered(self) -> int:
        """Rows that this rank delivered in total, for monitoring."""
        return sum(self._rows)


# -- checks ------------------------------------------------------------------------------------------------------------


def _datasets(sources: Any) -> dict[str, Dataset]:
    if not isinstance(sources, Mapping) or not sources:
        raise InvalidArgument(
            f"sources={sources!r} must be a mapping from names to loaders, such as "
            "{'web': loader, 'code': other_loader}",
            field="sources",
        )
    if len(sources) > MAX_SOURCES:
        raise InvalidArgument(f"{len(sources)} sources are more than {MAX_SOURCES}; combine some", field="sources")
    found: dict[str, Dataset] = {}
    for name, source in sources.items():
        candidates = source if isinstance(source, tuple) else (source, getattr(source, "dataset", None))
        dataset = next((each for each in candidates if isinstance(each, Dataset)), None)
        if dataset is None:
            raise InvalidArgument(
                f"source {name!r} is a {type(source).__name__}; pass what create_dataloader of StructuredDataset, "
                "IcebergDataset, DeltaDataset or LanceDataset returned",
                field="sources",
            )
        if (other := next((known for known, each in found.items() if each is dataset), None)) is not None:
            raise InvalidArgument(
                f"sources {other!r} and {name!r} are the same loader; add up their weights, or create a loader for "
                "each, with another shuffle_seed",
                field="sources",
            )
        found[name] = dataset
    return found


def _check_weights(datasets: Mapping[str, Dataset], weights: Any) -> None:
    if not isinstance(weights, Mapping):
        raise InvalidArgument(
            f"weights={weights!r} must be a mapping from the names of the sources to numbers", field="weights"
        )
    for names, others, problem, cure in (
        (weights, datasets, "is no source", f"the sources are {', '.join(datasets)}"),
        (datasets, weights, "has no weight", "give every source a weight"),
    ):
        if odd := [name for name in names if name not in others]:
            raise InvalidArgument(f"weights: {odd[0]!r} {problem}; {cure}", field="weights")


def _check_sources(datasets: Mapping[str, Dataset]) -> None:
    first, *_ = datasets.values()
    for name, dataset in datasets.items():
        if not dataset.plan.num_rows:
            raise NoData(f"source {name!r} has no rows; leave it out of the mix, or correct its filters")
        if dataset.config.batch.collate_fn is not None:
            raise InvalidArgument(
                f"source {name!r} has a collate_fn, whose results cannot be joined; pass collate_fn= to mix",
                field="collate_fn",
            )
        if dataset.config.order.size is not None:
            raise InvalidArgument(
                f"source {name!r} makes batches by {dataset.config.order.size.unit}, and a mix by rows; leave out "
                f"{dataset.config.order.size.option}= and pass batch_size= to mix",
                field="sources",
            )
        if (dataset.ranks.rank, dataset.ranks.world_size) != (first.ranks.rank, first.ranks.world_size):
            raise InvalidArgument(
                f"source {name!r} is read as rank {dataset.ranks.rank} of {dataset.ranks.world_size}, and "
                f"{next(iter(datasets))!r} as rank {first.ranks.rank} of {first.ranks.world_size}; create all sources "
                "with the same rank= and num_ranks=",
                field="sources",
            )


def _check_columns(datasets: Mapping[str, Dataset]) -> None:
    """Check that batches of the sources can be joined, as far as their types are known before anything is read."""
    (first, known), *others = ((name, each.config.batch.output_format) for name, each in datasets.items())
    for name, found in others:
        if found != known:
            raise SchemaMismatch(
                f"source {first!r} has output_format={known!r} and source {name!r} has {found!r}; give all sources the "
                "same output_format"
            )
    check_types(
        {
            name: delivered_types(each.policies, each.vocabularies, each.decoded_columns)
            for name, each in datasets.items()
            if each.policies is not None  # otherwise a transform decides, and the first batch shows the types
        }
    )


def _check_same(made: Mix) -> None:
    """Check that all ranks mix alike, if they can communicate.

    Raises:
        DataError: This rank has other settings than rank 0.
    """
    config = made.config
    mine = {
        **made.state_dict(),
        "batch_size": made.batch_size,
        "stop": config.stop,
        "epoch_size": None if config.epoch_size is None else operator.index(config.epoch_size),
        "source_column": config.source_column,
    }
    first = json.loads(share(made.ranks, lambda: json.dumps(mine).encode()))
    if different := [name for name in mine if first.get(name) != mine[name]]:
        name = different[0]
        raise DataError(
            f"rank {made.ranks.rank} and rank 0 would not mix alike: {name} is {mine[name]!r} here and "
            f"{first.get(name)!r} there; give all ranks the same arguments and the same files"
        )
