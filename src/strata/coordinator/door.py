"""Who comes in: tokens, roles and rates, the same for unary calls and sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strata.errors import LimitExceeded
from strata.transport.tokens import METADATA_KEY, Guard, Role, require

if TYPE_CHECKING:
    import grpc

    from strata.clock import Clock
    from strata.coordinator.config import Limits
    from strata.coordinator.service import Method

MAX_PEERS = 10_000
"""Peers whose rate of unary calls is remembered; the longest silent are forgotten first."""


class Bucket:
    """So many calls a second, and at most one second's worth at once."""

    __slots__ = ("_per_s", "_room", "_seen_s")

    def __init__(self, per_s: float, now_s: float) -> None:
        self._per_s = per_s
        self._room = per_s
        self._seen_s = now_s

    def take(self, now_s: float) -> bool:
        self._room = min(self._per_s, self._room + (now_s - self._seen_s) * self._per_s)
        self._seen_s = now_s
        if self._room < 1:
            return False
        self._room -= 1
        return True


class Door:
    def __init__(self, guard: Guard, limits: Limits, clock: Clock) -> None:
        self._guard = guard
        self._limits = limits
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}

    def role(self, context: grpc.aio.ServicerContext[Any, Any]) -> Role:
        """The role of whoever opened this call or stream; refuses strangers."""
        if self._guard.is_open:
            return Role.ADMIN
        sent = {key: value for key, value in context.invocation_metadata() or () if key == METADATA_KEY}
        return self._guard.role_of(str(sent.get(METADATA_KEY, "")))

    def admit_call(self, context: grpc.aio.ServicerContext[Any, Any], method: Method) -> None:
        """A unary call."""
        require(self.role(context), method.role, method.name)
        peer = str(context.peer()).rpartition(":")[0]  # without the port: one machine is one peer
        bucket = self._buckets.pop(peer, None) or self.bucket()
        self._buckets[peer] = bucket
        if len(self._buckets) > MAX_PEERS:
            del self._buckets[next(iter(self._buckets))]
        self.pace(bucket, self._clock.monotonic_s())

    def bucket(self) -> Bucket:
        return Bucket(self._limits.max_calls_per_s, self._clock.monotonic_s())

    def pace(self, bucket: Bucket, now_s: float) -> None:
        if not bucket.take(now_s):
            raise LimitExceeded(
                f"more than limits.max_calls_per_s={self._limits.max_calls_per_s} calls a second; slow down"
            )
