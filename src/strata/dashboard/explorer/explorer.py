"""Answers questions about checkpoints, each within the `Budget` of its request.

Statistics come from the file that a save wrote, wherever it has them; data is read only for what they do not hold.
Results that were computed are kept with the open checkpoint, so a scan of many tensors continues where the last request
stopped.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.load.statistics import Statistics, Tally, numbers_in
from strata.checkpoint.save.staging import paused_collector
from strata.checkpoint.tools import diff
from strata.dashboard.explorer import matrix, timeline, tree
from strata.dashboard.explorer.change import Change, PairedCheckpoints, rank
from strata.dashboard.explorer.contents import PlainFile, SavedCheckpoint
from strata.dashboard.explorer.histogram import Bins, Extent, Histogram, ValueCounts, has_few_values
from strata.dashboard.explorer.scan import Scan, scan_tensors
from strata.dashboard.explorer.values import box_within, plain_values
from strata.errors import CheckpointInvalid, InvalidArgument, NoCheckpoint, ReadTooLarge

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from strata.checkpoint.format.manifest import Manifest, TensorEntry
    from strata.checkpoint.format.shards import Box
    from strata.dashboard.explorer.contents import Contents
    from strata.dashboard.explorer.limits import Budget, ExplorerConfig
    from strata.dashboard.explorer.places import Places
    from strata.dashboard.explorer.timeline import Lineage
    from strata.dashboard.explorer.tree import Node, Property, Sort

MAX_FOLLOWED = 100_000
"""Statistics of single tensors that are kept for `follow`."""

RangeSource = Literal["statistics", "data", "request"]
K = TypeVar("K")
V = TypeVar("V")


class OpenCheckpoint:
    """A checkpoint and what was computed of it. May be used from several threads."""

    def __init__(self, place: str, contents: SavedCheckpoint | PlainFile) -> None:
        self.place, self.contents = place, contents
        self.statistics: dict[str, Statistics] = dict(contents.statistics())
        self.num_dead_rows: dict[str, int] = {}
        self.problems: dict[tuple[str, str], str] = {}
        """(question, tensor) → why it cannot be answered."""

    def tensor(self, name: str) -> TensorEntry:
        """Return a tensor.

        Raises:
            NoCheckpoint: The checkpoint has no such tensor.
        """
        found = self.contents.tensors.get(name)
        if found is None:
            raise NoCheckpoint(f"{self.contents.id} has no tensor {name[:200]!r}", field="name")
        return found


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint in a timeline; `manifest` is None for a plain file."""

    id: str
    manifest: Manifest | None
    lineage: Lineage | None
    file: PlainFile | None


@dataclass(frozen=True, slots=True)
class Followed:
    """One tensor in one checkpoint."""

    entry: Entry
    tensor: TensorEntry | None
    statistics: Statistics | None
    is_stored: bool
    changed: bool | None


@dataclass(frozen=True, slots=True)
class TensorQuery:
    """Which tensors to list, and in which order."""

    search: str = ""
    under: str | None = None
    dtype: str = ""
    property_: Property | None = None
    sort: Sort = "order"
    descending: bool = False

    @property
    def needs_change(self) -> bool:
        """Whether it needs the differences from another checkpoint."""
        return self.sort == "change" or self.property_ == "changed"


class Kept(OrderedDict[K, V]):
    """The most recently used items."""

    def __init__(self, max_items: int) -> None:
        super().__init__()
        self._max_items = max_items
        self._lock = threading.Lock()

    def find(self, key: K) -> V | None:
        with self._lock:
            if key not in self:
                return None
            self.move_to_end(key)
            return self[key]

    def keep(self, key: K, value: V) -> V:
        with self._lock:
            self[key] = value
            self.move_to_end(key)
            if len(self) > self._max_items:
                self.popitem(last=False)
        return value


class Explorer:
    """All questions that a request can ask. Methods block, and may be called from several threads."""

    def __init__(self, places: Places, config: ExplorerConfig) -> None:
        self.places = places
        self.config = config
        self._open: Kept[tuple[str, str], OpenCheckpoint] = Kept(config.max_open)
        self._pairs: Kept[tuple[str, str], PairedCheckpoints] = Kept(config.max_open)
        self._followed: Kept[tuple[str, str], tuple[Statistics, bool]] = Kept(MAX_FOLLOWED)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def open(self, place: str, id: str) -> OpenCheckpoint:
        """Open a checkpoint, or return it if it is open and has not changed.

        Raises:
            NoCheckpoint: There is no such place or checkpoint.
            CheckpointInvalid: It is damaged.
        """
        found = self._open.find((place, id))
        if found is not None and isinstance(found.contents, SavedCheckpoint):
            return found
        with paused_collector():
            contents = self.places.get(place).open(id)
            if found is not None and found.contents.version == contents.version:
                return found
            return self._open.keep((place, id), OpenCheckpoint(place, contents))

    def timeline(self, place: str) -> tuple[list[Entry], Mapping[str, str]]:
        """Return the checkpoints of a place, oldest first, then plain files; and the reasons why others are ignored."""
        where = self.places.get(place)
        with paused_collector():
            listing = where.listing()
        lineage = timeline.lineage(listing.manifests)
        entries = [Entry(one.id, one, lineage[one.id], None) for one in listing.manifests]
        problems = dict(listing.problems)
        for name in listing.files:
            try:
                entries.append(Entry(name, None, None, where.open_file(name)))
            except CheckpointInvalid as error:
                problems[name] = error.message
        return entries, problems

    def entry(self, place: str, id: str) -> Entry:
        """Return one checkpoint of a timeline.

        Raises:
            NoCheckpoint: There is no such place or checkpoint.
        """
        entries, problems = self.timeline(place)
        found = next((entry for entry in entries if entry.id == id), None)
        if found is None:
            why = f": {problems[id]}" if id in problems else ""
            raise NoCheckpoint(f"{place} has no checkpoint {id[:200]!r}{why}", field="id")
        return found

    # -- tensors ---------------------------------------------------------------------------------------------------

    def children(self, opened: OpenCheckpoint, under: str | None) -> list[Node]:
        return tree.children(opened.contents.tensors.values(), opened.statistics, under)

    def search(
        self, opened: OpenCheckpoint, query: TensorQuery, against: OpenCheckpoint | None, budget: Budget
    ) -> tuple[list[TensorEntry], Scan]:
        """Return the tensors that match, sorted. The scan reports how many are not decided yet.

        Raises:
            InvalidArgument: The query needs another checkpoint.
        """
        if against is None and query.needs_change:
            raise InvalidArgument(
                "sort=change and property=changed need against=ID, the older checkpoint", field="against"
            )
        found = [
            tensor
            for tensor in opened.contents.tensors.values()
            if tree.matches(tensor.name, search=query.search, under=query.under)
            and (not query.dtype or tensor.dtype == query.dtype)
        ]
        scan = Scan()
        pair = self.pair(against, opened) if against is not None else None
        if pair is not None and against is not None and query.needs_change:
            scan = self._measure(pair, [tensor.name for tensor in found], against, budget)
        elif query.property_ == "dead_rows" or query.sort == "dead_rows":
            scan = self._count_dead_rows(opened, found, budget)
        elif query.property_ is not None or query.sort in ("norm", "max_abs", "std", "nan"):
            scan = self._compute_statistics(opened, found, budget)
        if query.property_ is not None:
            found = [tensor for tensor in found if _has(opened, tensor, query.property_, pair)]
        return _sorted(opened, found, query, pair), scan

    def _compute_statistics(self, opened: OpenCheckpoint, tensors: Iterable[TensorEntry], budget: Budget) -> Scan:
        needed = [tensor for tensor in tensors if tensor.name not in opened.statistics]
        return scan_tensors(
            opened.problems,
            "statistics",
            needed,
            lambda tensor: self.statistics(opened, tensor, budget),
            lambda tensor: tensor.name in opened.statistics,
            budget,
        )

    def _count_dead_rows(self, opened: OpenCheckpoint, tensors: Iterable[TensorEntry], budget: Budget) -> Scan:
        def is_clear(tensor: TensorEntry) -> bool:
            """Return whether the number is known; if zero is not between minimum and maximum, no row is dead."""
            known = opened.statistics.get(tensor.name)
            if known is None or known.min is None or known.max is None:
                return False
            if known.min > 0 or known.max < 0:
                opened.num_dead_rows[tensor.name] = 0
            return tensor.name in opened.num_dead_rows

        needed = [tensor for tensor in tensors if len(tensor.shape) > 1 and not is_clear(tensor)]

        def count(tensor: TensorEntry) -> None:
            opened.num_dead_rows[tensor.name] = self.rows(opened, tensor, budget, max_points=1).num_dead

        return scan_tensors(
            opened.problems, "rows", needed, count, lambda tensor: tensor.name in opened.num_dead_rows, budget
        )

    # -- one tensor ------------------------------------------------------------------------------------------------

    def statistics(self, opened: OpenCheckpoint, tensor: TensorEntry, budget: Budget) -> Statistics:
        """Return the statistics of a tensor; compute them if they are not known."""
        known = opened.statistics.get(tensor.name)
        if known is None:
            known = opened.statistics[tensor.name] = _statistics(opened.contents, tensor, budget)
        return known

    def histogram(
        self,
        opened: OpenCheckpoint,
        tensor: TensorEntry,
        budget: Budget,
        *,
        num_bins: int,
        low: float | None = None,
        high: float | None = None,
    ) -> tuple[Histogram, RangeSource]:
        """Return the histogram of a tensor, and where its range is from.

        Raises:
            InvalidArgument: The range is empty.
        """
        if low is not None and high is not None and low > high:
            raise InvalidArgument(f"low={low:g} is above high={high:g}; swap them", field="low")
        source: RangeSource = "request" if low is not None and high is not None else "data"
        if has_few_values(BY_NAME[tensor.dtype]):
            counts = _value_counts(opened.contents, tensor, budget)
            span = _narrowed(counts.range(), low, high)
            num_nan, num_inf = counts.not_finite()
            return (_binned(counts, span, num_bins) if span else Histogram((), (), 0, 0, num_nan, num_inf)), source
        known = opened.statistics.get(tensor.name)
        if source == "data" and known is not None:
            source = "statistics"
        span = (low, high) if low is not None and high is not None else _narrowed(_range_of(known), low, high)
        if known is None and source == "data":
            extent = _extent(opened.contents, tensor, budget)
            span = _narrowed(extent.range(), low, high)
            if span is None:
                return Histogram((), (), 0, 0, extent.num_nan, extent.num_inf), source
        if span is None:
            assert known is not None
            return Histogram((), (), 0, 0, known.num_nan, known.num_inf), source
        found = _bins_of(opened.contents, tensor, span, num_bins, budget)
        if source == "statistics" and low is None and high is None and found.num_below + found.num_above:
            # The file of statistics is not of this data: nothing protects it by a hash.
            span, source = _extent(opened.contents, tensor, budget).range() or span, "data"
            found = _bins_of(opened.contents, tensor, span, num_bins, budget)
        return found, source

    def heat_map(
        self, opened: OpenCheckpoint, tensor: TensorEntry, budget: Budget, *, max_rows: int, max_columns: int
    ) -> matrix.HeatMap:
        found = matrix.HeatMap(*matrix.as_matrix(tensor.shape), max_rows=max_rows, max_columns=max_columns)
        for start, numbers in _numbers(opened.contents, tensor, budget):
            found.add(start, numbers)
        return found

    def rows(self, opened: OpenCheckpoint, tensor: TensorEntry, budget: Budget, *, max_points: int) -> matrix.RowNorms:
        scan = matrix.RowScan(*matrix.as_rows(tensor.shape), max_points=max_points)
        for start, numbers in _numbers(opened.contents, tensor, budget):
            scan.add(start, numbers)
        found = scan.result()
        if len(tensor.shape) > 1:
            opened.num_dead_rows[tensor.name] = found.num_dead
        return found

    def spectrum(self, opened: OpenCheckpoint, tensor: TensorEntry, budget: Budget) -> matrix.Spectrum:
        """Return the singular values of a tensor as a matrix.

        Raises:
            ReadTooLarge: The matrix is too large.
            InvalidArgument: It has elements that are not finite.
        """
        num_rows, num_columns = matrix.as_matrix(tensor.shape)
        side, limits = min(num_rows, num_columns), self.config
        if side > limits.max_singular_side or num_rows * num_columns > limits.max_singular_elements:
            raise ReadTooLarge(
                f"tensor {tensor.name[:200]!r} is a {num_rows} × {num_columns} matrix; singular values are computed up "
                f"to max_singular_side={limits.max_singular_side} and "
                f"max_singular_elements={limits.max_singular_elements}; export the tensor and use numpy.linalg.svd",
                field="name",
            )
        whole = np.empty(num_rows * num_columns, np.float64)
        for start, numbers in _numbers(opened.contents, tensor, budget):
            with np.errstate(invalid="ignore"):  # signalling NaN
                whole[start : start + numbers.size] = numbers
        if not np.isfinite(whole).all():
            raise InvalidArgument(
                f"tensor {tensor.name[:200]!r} has NaN or infinite elements, so it has no singular values", field="name"
            )
        if not whole.size:  # its dimensions may be larger than those of an array
            return matrix.Spectrum((), None, None, None)
        budget.check()
        return matrix.spectrum_of(whole.reshape(num_rows, num_columns))

    def values(
        self,
        opened: OpenCheckpoint,
        tensor: TensorEntry,
        budget: Budget,
        *,
        start: Sequence[int] | None,
        shape: Sequence[int] | None,
    ) -> tuple[Box, list[Any]]:
        """Return a box of a tensor and its elements, in row-major order, as JSON has them.

        Raises:
            InvalidArgument: The box is not within the tensor, or is too large.
        """
        box = box_within(tensor, start, shape)
        if math.prod(box.shape) > self.config.max_values:
            raise InvalidArgument(
                f"a sample of shape {box.shape} has {math.prod(box.shape)} elements, more than "
                f"max_values={self.config.max_values}; request fewer",
                field="shape",
            )
        if 0 in box.shape:
            return box, []
        return box, plain_values(opened.contents.box(tensor, box, budget), tensor.dtype)

    # -- two checkpoints -------------------------------------------------------------------------------------------

    def pair(self, old: OpenCheckpoint, new: OpenCheckpoint) -> PairedCheckpoints:
        key = (old.contents.version, new.contents.version)
        found = self._pairs.find(key)
        if found is None:
            found = self._pairs.keep(key, PairedCheckpoints(old.contents, new.contents))
        found.bound(old.statistics, new.statistics)
        return found

    def compare(
        self, old: OpenCheckpoint, new: OpenCheckpoint, budget: Budget, *, search: str, include_same: bool
    ) -> tuple[list[tuple[str, Change]], PairedCheckpoints, Scan]:
        """Return the tensors that differ, the largest relative change first."""
        pair = self.pair(old, new)
        names = [name for name in pair.names if tree.matches(name, search=search, under=None)]
        scan = self._measure(pair, names, old, budget)
        found = [(name, pair.change(name)) for name in names]
        if not include_same:
            found = [(name, change) for name, change in found if change.state != "same"]
        return sorted(found, key=lambda item: rank(item[1])), pair, scan

    def compare_histograms(
        self, old: OpenCheckpoint, new: OpenCheckpoint, name: str, budget: Budget, *, num_bins: int
    ) -> tuple[Histogram, Histogram, Change]:
        """Return the histograms of a tensor in two checkpoints with the same bins, and how much it changed."""
        sides = [(side, side.tensor(name)) for side in (old, new)]
        spans = [_range_of(self.statistics(side, tensor, budget)) for side, tensor in sides]
        found = [span for span in spans if span is not None]
        low, high = (min(span[0] for span in found), max(span[1] for span in found)) if found else (0.0, 0.0)
        before, after = (
            self.histogram(side, tensor, budget, num_bins=num_bins, low=low, high=high)[0] for side, tensor in sides
        )
        pair = self.pair(old, new)
        change = pair.change(name)
        if not change.is_measured:
            change = pair.measure(name, self.statistics(*sides[0], budget).norm, budget)
        return before, after, change

    def _measure(self, pair: PairedCheckpoints, names: Iterable[str], old: OpenCheckpoint, budget: Budget) -> Scan:
        """Measure changed tensors, those with the largest lower bound first."""
        wanted = [name for name in names if pair.change(name).state == "changed" or name in pair.comparison.changed]
        needed = sorted(wanted, key=lambda name: rank(pair.change(name)))

        def measure(tensor: TensorEntry) -> None:
            pair.measure(tensor.name, self.statistics(old, tensor, budget).norm, budget)

        return scan_tensors(
            old.problems,
            f"change to {pair.new.version}",
            [pair.old.tensors[name] for name in needed],
            measure,
            lambda tensor: pair.change(tensor.name).is_measured,
            budget,
            num_sides=2,
        )

    # -- one tensor over time --------------------------------------------------------------------------------------

    def follow(
        self, place: str, name: str, budget: Budget, *, offset: int, limit: int
    ) -> tuple[list[Followed], int, Scan]:
        """Return a tensor in the checkpoints of a place, oldest first, and the number of checkpoints.

        Raises:
            NoCheckpoint: No checkpoint has the tensor.
        """
        where = self.places.get(place)
        entries, _ = self.timeline(place)
        found: list[Followed] = []
        scan = Scan()
        previous: tuple[Manifest, TensorEntry] | None = None
        for number, entry in enumerate(entries):
            contents = entry.file or (SavedCheckpoint(where.store, entry.manifest) if entry.manifest else None)
            assert contents is not None
            tensor = contents.tensors.get(name)
            changed = None
            if tensor is not None and entry.manifest is not None:
                if previous is not None:
                    changed = diff.differs(*previous, entry.manifest, tensor)
                previous = (entry.manifest, tensor)
            if not offset <= number < offset + limit:
                if tensor is not None and number >= offset + limit:
                    break
                continue
            if tensor is None:
                found.append(Followed(entry, None, None, is_stored=False, changed=None))
                continue
            found.append(self._followed_one(entry, contents, tensor, changed, scan, budget))
        if previous is None and not any(one.tensor is not None for one in found):
            raise NoCheckpoint(f"no checkpoint of {place} has a tensor {name[:200]!r}", field="name")
        return found, len(entries), scan

    def _followed_one(
        self,
        entry: Entry,
        contents: SavedCheckpoint | PlainFile,
        tensor: TensorEntry,
        changed: bool | None,
        scan: Scan,
        budget: Budget,
    ) -> Followed:
        key = (contents.version, tensor.name)
        kept = self._followed.find(key)
        if kept is not None:
            return Followed(entry, tensor, kept[0], is_stored=kept[1], changed=changed)
        scan.num_needed += 1
        if scan.num_done and budget.is_scan_over():
            return Followed(entry, tensor, None, is_stored=False, changed=changed)
        known = contents.statistics().get(tensor.name)
        is_stored = known is not None
        try:
            known = known or _statistics(contents, tensor, budget)
        except (CheckpointInvalid, ReadTooLarge) as error:
            scan.problems[entry.id] = error.message
        else:
            self._followed.keep(key, (known, is_stored))
        scan.num_done += 1
        return Followed(entry, tensor, known, is_stored=is_stored, changed=changed)


# -- reading -------------------------------------------------------------------------------------------------------


def _numbers(contents: Contents, tensor: TensorEntry, budget: Budget) -> Iterator[tuple[int, Any]]:
    dtype = BY_NAME[tensor.dtype]
    for start, data in contents.pieces(tensor, budget):
        budget.check()
        with np.errstate(invalid="ignore"):  # signalling NaN
            numbers = numbers_in(data, dtype)
        yield start, numbers


def _statistics(contents: Contents, tensor: TensorEntry, budget: Budget) -> Statistics:
    tally = Tally(BY_NAME[tensor.dtype])
    for _, data in contents.pieces(tensor, budget):
        budget.check()
        tally.add(data)
    return tally.result()


def _value_counts(contents: Contents, tensor: TensorEntry, budget: Budget) -> ValueCounts:
    counts = ValueCounts(BY_NAME[tensor.dtype])
    for _, data in contents.pieces(tensor, budget):
        budget.check()
        counts.add(data)
    return counts


def _extent(contents: Contents, tensor: TensorEntry, budget: Budget) -> Extent:
    extent = Extent()
    for _, numbers in _numbers(contents, tensor, budget):
        extent.add(numbers)
    return extent


def _bins_of(
    contents: Contents, tensor: TensorEntry, span: tuple[float, float], num_bins: int, budget: Budget
) -> Histogram:
    bins = Bins(*span, num_bins)
    for _, numbers in _numbers(contents, tensor, budget):
        bins.add(numbers)
    return bins.result()


def _binned(counts: ValueCounts, span: tuple[float, float], num_bins: int) -> Histogram:
    bins = Bins(*span, num_bins)
    counts.add_to(bins)
    return bins.result()


def _range_of(known: Statistics | None) -> tuple[float, float] | None:
    if known is None:
        return None
    low, high = tree.as_float(known.min), tree.as_float(known.max)
    return (low, high) if low is not None and high is not None else None


def _narrowed(span: tuple[float, float] | None, low: float | None, high: float | None) -> tuple[float, float] | None:
    if low is not None and high is not None:
        return low, high
    if span is None:
        return None
    start, end = span[0] if low is None else low, span[1] if high is None else high
    return (start, end) if start <= end else (start, start) if low is not None else (end, end)


# -- lists ---------------------------------------------------------------------------------------------------------


def _has(opened: OpenCheckpoint, tensor: TensorEntry, wanted: Property, pair: PairedCheckpoints | None) -> bool:
    if wanted == "dead_rows":
        return opened.num_dead_rows.get(tensor.name, 0) > 0
    if wanted == "changed":
        assert pair is not None
        return pair.change(tensor.name).state in ("changed", "added", "reshaped")
    known = opened.statistics.get(tensor.name)
    return known is not None and tree.has_property(known, wanted)


def _sorted(
    opened: OpenCheckpoint, tensors: list[TensorEntry], query: TensorQuery, pair: PairedCheckpoints | None
) -> list[TensorEntry]:
    """Sort tensors; those without a value come last in both directions."""
    if query.sort == "order":
        return tensors[::-1] if query.descending else tensors
    if query.sort == "name":
        return sorted(tensors, key=lambda tensor: tree.natural_key(tensor.name), reverse=query.descending)
    if query.sort == "change":
        assert pair is not None
        paired = pair
        return sorted(tensors, key=lambda tensor: rank(paired.change(tensor.name)))
    sign = -1.0 if query.descending else 1.0

    def key(tensor: TensorEntry) -> tuple[bool, float]:
        value = _value(opened, tensor, query.sort)
        return value is None, sign * value if value is not None else 0.0

    return sorted(tensors, key=key)


def _value(opened: OpenCheckpoint, tensor: TensorEntry, sort: Sort) -> float | None:
    if sort == "bytes":
        return float(tensor.num_bytes)
    if sort == "dead_rows":
        return opened.num_dead_rows.get(tensor.name)
    known = opened.statistics.get(tensor.name)
    if known is None:
        return None
    if sort == "nan":
        return float(known.num_nan + known.num_inf)
    return {"norm": known.norm, "max_abs": tree.max_abs_of(known), "std": tree.std_of(known)}[sort]
