"""Figures of a server while it works, for the views of its run. All of them are measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from strata.clock import Clock, SystemClock
from strata.coordinator.state.server_figures import total
from strata.train.metrics import Rate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.servers.server import Server


class Meter:
    """Measures a server process. Use it from one thread, beside those that serve."""

    def __init__(self, servers: Sequence[Server], clock: Clock | None = None) -> None:
        """`servers`: one for each part of the parameters."""
        self._servers = servers
        self._now_s = (clock or SystemClock()).monotonic_s
        self._pulls, self._pushes = Rate(), Rate()

    def read(self) -> dict[str, float]:
        """Return the metrics for a heartbeat."""
        found = total(each.figures() for each in self._servers)
        if found is None:
            return {}
        now_s = self._now_s()
        return msgspec.structs.replace(
            found,
            pulls_per_s=self._pulls.after(sum(each.num_pulls for each in self._servers), now_s),
            pushes_per_s=self._pushes.after(sum(each.num_pushes for each in self._servers), now_s),
        ).as_metrics()
