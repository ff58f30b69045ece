"""What a parameter server reports with its heartbeats: its number, and figures that it has measured.

The server, the agent, the command line and the exporter of metrics share these names. The coordinator itself treats
them like all metrics of workers. A figure that was not measured is absent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SERVER = "strata/server"
"""Name of the metric that makes a worker a parameter server: its number, from 0."""


class ServerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The tables and the traffic of one server, or of several together."""

    rows: int
    bytes: int
    """Memory of the tables."""
    evicted: int
    """Rows that were evicted since the server started."""
    pulls_per_s: float | None = None
    pushes_per_s: float | None = None
    staleness: int | None = None
    """Steps between the fastest and the slowest worker, by the pushes that have arrived."""
    hits: int | None = None
    """Rows pulled from memory, since the server started, of tables of which a part is in a file."""
    misses: int | None = None
    """Rows pulled from the file."""

    @property
    def hit_rate(self) -> float | None:
        """Share of the pulled rows that were in memory; None if no table has a file, or no row was pulled."""
        num_pulled = (self.hits or 0) + (self.misses or 0)
        return (self.hits or 0) / num_pulled if num_pulled else None

    def without_rates(self) -> ServerFigures:
        """Return what still holds when the servers have ended."""
        return msgspec.structs.replace(self, pulls_per_s=None, pushes_per_s=None, staleness=None)

    def as_metrics(self) -> dict[str, float]:
        return {name: float(value) for name, value in msgspec.structs.asdict(self).items() if value is not None}

    def as_plain(self) -> dict[str, float]:
        """Return what was measured, for JSON."""
        found = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return found if self.hit_rate is None else {**found, "hit_rate": self.hit_rate}


def number_of(metrics: Mapping[str, float]) -> int | None:
    """Return the number of a server; None if these are the metrics of a worker that trains."""
    return _whole(metrics.get(SERVER))


def figures_of(metrics: Mapping[str, float]) -> ServerFigures | None:
    """Return the figures of a server; None if it has not measured any yet, or if it is not a server."""
    rows, num_bytes, evicted = (_whole(metrics.get(name)) for name in ("rows", "bytes", "evicted"))
    if SERVER not in metrics or rows is None or num_bytes is None or evicted is None:
        return None
    return ServerFigures(
        rows=rows,
        bytes=num_bytes,
        evicted=evicted,
        pulls_per_s=metrics.get("pulls_per_s"),
        pushes_per_s=metrics.get("pushes_per_s"),
        staleness=_whole(metrics.get("staleness")),
        hits=_whole(metrics.get("hits")),
        misses=_whole(metrics.get("misses")),
    )


def total(figures: Iterable[ServerFigures]) -> ServerFigures | None:
    """Return the figures of all servers together: sums, and the largest staleness. None without any server."""
    found = list(figures)
    if not found:
        return None
    return ServerFigures(
        rows=sum(each.rows for each in found),
        bytes=sum(each.bytes for each in found),
        evicted=sum(each.evicted for each in found),
        pulls_per_s=_sum(each.pulls_per_s for each in found),
        pushes_per_s=_sum(each.pushes_per_s for each in found),
        staleness=max((each.staleness for each in found if each.staleness is not None), default=None),
        hits=_whole(_sum(each.hits for each in found)),
        misses=_whole(_sum(each.misses for each in found)),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return sum(known) if known else None


def _whole(value: float | None) -> int | None:
    """Return a number without its fraction; None also for one that is not finite, since anyone may report metrics."""
    return None if value is None or not math.isfinite(value) else int(value)
