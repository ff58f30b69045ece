"""How often one machine may ask over HTTP, so that a dashboard gone wild takes nothing from the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.coordinator.serve.admission import Bucket
from strata.errors import LimitExceeded

if TYPE_CHECKING:
    from strata.coordinator.config import Limits

MAX_PEERS = 1_000
"""Peers whose rate is remembered; the longest silent are forgotten first."""


class Pace:
    def __init__(self, limits: Limits) -> None:
        self._per_s = limits.max_http_requests_per_s
        self._buckets: dict[str, Bucket] = {}

    def admit(self, peer: str, now_s: float) -> None:
        bucket = self._buckets.pop(peer, None) or Bucket(self._per_s, now_s)
        self._buckets[peer] = bucket
        if len(self._buckets) > MAX_PEERS:
            del self._buckets[next(iter(self._buckets))]
        if not bucket.take(1, now_s):
            raise LimitExceeded(
                f"more than limits.max_http_requests_per_s={self._per_s} requests a second from {peer}; slow down"
            )
