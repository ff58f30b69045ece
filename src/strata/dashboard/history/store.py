"""All series of a coordinator, within their bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from strata.dashboard.history.rings import Bucket, Series

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from strata.dashboard.sample import Spread

MAX_SERIES = 500
"""At 86 KB each when all of their rings are full, 43 MB."""


class SeriesKey(NamedTuple):
    job_id: str
    """Empty for the coordinator itself, which no job can be called."""
    name: str


class Row(NamedTuple):
    """A bucket of a series, for a file."""

    key: SeriesKey
    interval_s: int
    bucket: Bucket


class Changes(NamedTuple):
    """What a file must take over to hold the same as the store."""

    rows: list[Row]
    removed: list[SeriesKey]


class HistoryStore:
    def __init__(self, max_series: int = MAX_SERIES) -> None:
        self._max_series = max_series
        self._series: dict[SeriesKey, Series] = {}
        """The least recently updated first."""
        self._removed: set[SeriesKey] = set()

    def __len__(self) -> int:
        return len(self._series)

    def add(self, job_id: str, at_s: float, values: Mapping[str, Spread]) -> None:
        for name, value in values.items():
            self._touched(SeriesKey(job_id, name)).add(at_s, value)
        while len(self._series) > self._max_series:
            oldest = next(iter(self._series))
            del self._series[oldest]
            self._removed.add(oldest)

    def _touched(self, key: SeriesKey) -> Series:
        series = self._series.pop(key, None) or Series()
        self._series[key] = series
        self._removed.discard(key)
        return series

    def get(self, job_id: str, name: str) -> Series | None:
        return self._series.get(SeriesKey(job_id, name))

    def keys(self, job_id: str | None = None) -> list[SeriesKey]:
        """Return the series of a job, or of all; sorted."""
        return sorted(key for key in self._series if job_id is None or key.job_id == job_id)

    # -- persistence -----------------------------------------------------------------------------------------------

    def restore(self, rows: Iterable[Row]) -> None:
        """Take over the rows of a file, those of one series and resolution in the order of time. Series that have
        values by now keep them: the file is older.
        """
        found: dict[SeriesKey, Series] = {}
        for key, interval_s, bucket in rows:
            found.setdefault(key, Series()).restore(interval_s, bucket)
        known, self._series = self._series, found
        for key, series in known.items():
            self._series.pop(key, None)
            self._series[key] = series
        for key in list(self._series)[: max(len(self._series) - self._max_series, 0)]:
            del self._series[key]

    def take_changes(self) -> Changes:
        """Return what changed since the last call."""
        removed, self._removed = sorted(self._removed), set()
        return Changes(list(self._take_rows()), removed)

    def _take_rows(self) -> Iterator[Row]:
        for key, series in self._series.items():
            if not series.dirty:
                continue
            dirty, series.dirty = series.dirty, set()
            for ring in series.rings:
                interval_s = ring.resolution.interval_s
                starts = [start_s for length_s, start_s in dirty if length_s == interval_s]
                if starts:
                    changed = ring.buckets(min(starts))
                    yield from (Row(key, interval_s, each) for each in changed if (interval_s, each.start_s) in dirty)
