"""Who comes in: tokens, roles and rates, the same for unary calls and sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strata.errors import LimitExceeded
from strata.transport.tokens import METADATA_KEY, Guard, Role, bearer, require

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

    def take(self, num: int, now_s: float) -> int:
        """How many of `num` calls may go on, the first of them."""
        self._room = min(self._per_s, self._room + (now_s - self._seen_s) * self._per_s)
        self._seen_s = now_s
        taken = min(num, int(self._room))
        self._room -= taken
        return taken


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

    def role_of(self, token: str) -> Role:
        """The same, of a token that came by itself."""
        return self._guard.role_of(bearer(token) if token else "")

    def admit_call(self, context: grpc.aio.ServicerContext[Any, Any], method: Method, request: Any) -> None:
        """A unary call."""
        require(self.role(context), method.needed(request), method.name)
        peer = str(context.peer()).rpartition(":")[0]  # without the port: one machine is one peer
        bucket = self._buckets.pop(peer, None) or self.bucket()
        self._buckets[peer] = bucket
        if len(self._buckets) > MAX_PEERS:
            del self._buckets[next(iter(self._buckets))]
        if not bucket.take(1, self._clock.monotonic_s()):
            raise self.too_fast()

    def bucket(self) -> Bucket:
        return Bucket(self._limits.max_calls_per_s, self._clock.monotonic_s())

    def too_fast(self) -> LimitExceeded:
        return LimitExceeded(
            f"more than limits.max_calls_per_s={self._limits.max_calls_per_s} calls a second; slow down"
        )
