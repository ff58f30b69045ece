"""One series, downsampled into rings of fixed size.

A value is added to every ring at once. Each ring has buckets of one length, with the number, mean, minimum and maximum
of their values, so a bucket of a minute is exactly what merging its seconds gives, and a spike of one second stays
visible for as long as the longest ring remembers.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from strata.dashboard.sample import Spread


class Resolution(NamedTuple):
    interval_s: int
    capacity: int

    @property
    def span_s(self) -> int:
        return self.interval_s * self.capacity


RESOLUTIONS = (Resolution(1, 300), Resolution(10, 360), Resolution(60, 720), Resolution(600, 1_008))
"""5 minutes, 1 hour, 12 hours, 7 days."""
MAX_TIME_S = 2**32 - 1
"""Starts of buckets are 32-bit numbers, until the year 2106."""


class Bucket(NamedTuple):
    """The values of one interval."""

    start_s: int
    num: int
    mean: float
    """The mean and not the sum, which could overflow."""
    min: float
    max: float

    def merged(self, other: Bucket) -> Bucket:
        """Return one bucket of both, with the earlier start."""
        num = self.num + other.num
        mean = self.mean * (self.num / num) + other.mean * (other.num / num)
        least, most = min(self.min, other.min), max(self.max, other.max)
        return Bucket(min(self.start_s, other.start_s), num, min(max(mean, least), most), least, most)


class Ring:
    """The newest buckets of one resolution, 36 bytes each."""

    __slots__ = ("_counts", "_maxima", "_means", "_minima", "_next", "_starts", "resolution")

    def __init__(self, resolution: Resolution) -> None:
        self.resolution = resolution
        self._starts, self._counts = array("I"), array("Q")
        self._means, self._minima, self._maxima = array("d"), array("d"), array("d")
        self._next = 0

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, bucket: Bucket) -> int:
        """Add values at their time and return the start of their bucket. Time never goes back in a ring: values that
        are older than the newest bucket, because a clock was set back, count for that bucket.
        """
        start_s = bucket.start_s - bucket.start_s % self.resolution.interval_s
        newest = self.newest()
        if newest is not None and start_s <= newest.start_s:
            self._put((self._next - 1) % len(self._starts), newest.merged(bucket._replace(start_s=newest.start_s)))
            return newest.start_s
        self._append(bucket._replace(start_s=start_s))
        return start_s

    def newest(self) -> Bucket | None:
        return self._at((self._next - 1) % len(self._starts)) if self._starts else None

    def oldest(self) -> Bucket | None:
        return next(iter(self.buckets()), None)

    def buckets(self, since_s: float = 0.0, until_s: float = MAX_TIME_S) -> Iterator[Bucket]:
        """Yield the buckets that overlap a range of time, oldest first."""
        size = len(self._starts)
        first = self._next if size == self.resolution.capacity else 0
        order = [*range(first, size), *range(first)]
        begin = bisect_left(order, since_s, key=lambda place: self._starts[place] + self.resolution.interval_s - 1e-9)
        for place in order[begin:]:
            if self._starts[place] > until_s:
                return
            yield self._at(place)

    def _at(self, place: int) -> Bucket:
        return Bucket(
            self._starts[place], self._counts[place], self._means[place], self._minima[place], self._maxima[place]
        )

    def _append(self, bucket: Bucket) -> None:
        if len(self._starts) < self.resolution.capacity:
            for column, value in zip(self._columns(), bucket, strict=True):
                column.append(value)
        else:
            self._put(self._next, bucket)
        self._next = (self._next + 1) % self.resolution.capacity

    def _put(self, place: int, bucket: Bucket) -> None:
        for column, value in zip(self._columns(), bucket, strict=True):
            column[place] = value

    def _columns(self) -> tuple[array[Any], ...]:
        return self._starts, self._counts, self._means, self._minima, self._maxima


class Series:
    """One series at all resolutions."""

    __slots__ = ("dirty", "rings")

    def __init__(self, resolutions: Sequence[Resolution] = RESOLUTIONS) -> None:
        self.rings = [Ring(each) for each in resolutions]
        self.dirty: set[tuple[int, int]] = set()
        """Interval and start of buckets that changed since they were last written; see `file`."""

    def add(self, at_s: float, value: Spread) -> None:
        bucket = Bucket(min(max(int(at_s), 0), MAX_TIME_S), 1, value.mean, value.min, value.max)
        for ring in self.rings:
            start_s = ring.add(bucket)
            if ring is not self.rings[0]:
                self.dirty.add((ring.resolution.interval_s, start_s))

    def restore(self, interval_s: int, bucket: Bucket) -> None:
        """Add a bucket that was read from a file, in the order of time."""
        for ring in self.rings:
            if ring.resolution.interval_s == interval_s:
                ring.add(bucket)

    def newest(self) -> Bucket | None:
        """Return the newest bucket of the finest ring that has one."""
        return next((newest for ring in self.rings if (newest := ring.newest()) is not None), None)

    def oldest_s(self) -> int | None:
        """Return the start of the oldest bucket that is remembered."""
        starts = [oldest.start_s for ring in self.rings if (oldest := ring.oldest()) is not None]
        return min(starts, default=None)

    def points(self, *, since_s: float, until_s: float, max_points: int) -> tuple[int, list[Bucket]]:
        """Return the length of the buckets and the buckets in a range of time, at most `max_points`.

        The finest ring that has everything since then and needs no more points is chosen. If even the coarsest has too
        many, neighbours are merged.
        """
        for place, ring in enumerate(self.rings):
            if not len(ring) or not self._has_all(place, since_s):
                continue
            found = list(ring.buckets(since_s, until_s))
            if len(found) <= max_points:
                return ring.resolution.interval_s, found
        ring = self.rings[-1]
        found = list(ring.buckets(since_s, until_s))
        size = max(-(-len(found) // max_points), 1)
        return ring.resolution.interval_s * size if found else 0, merge_groups(found, size)

    def _has_all(self, place: int, since_s: float) -> bool:
        """Whether a ring has all values since a time, so that no coarser one knows more."""
        ring = self.rings[place]
        oldest = ring.oldest()
        assert oldest is not None, "the ring is not empty"
        if oldest.start_s <= since_s + ring.resolution.interval_s:
            return True
        coarser = ((each.oldest(), each.resolution.interval_s) for each in self.rings[place + 1 :])
        return all(first is None or first.start_s + length_s > oldest.start_s for first, length_s in coarser)


def merge_groups(buckets: Sequence[Bucket], size: int) -> list[Bucket]:
    """Merge each `size` neighbours into one bucket."""
    merged = []
    for begin in range(0, len(buckets), size):
        bucket = buckets[begin]
        for other in buckets[begin + 1 : begin + size]:
            bucket = bucket.merged(other)
        merged.append(bucket)
    return merged
