"""Who comes in: tokens, roles and rates, the same for unary calls and sessions."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from strata.coordinator.serve.intake import NUM_BODIES, NUM_READERS_BODIES, Account, Bodies, Lane, receivable_bytes
from strata.errors import LimitExceeded
from strata.transport.tokens import METADATA_KEY, Guard, Role, bearer, require

if TYPE_CHECKING:
    from collections.abc import Iterator

    import grpc

    from strata.clock import Clock
    from strata.coordinator.config import Limits
    from strata.coordinator.serve.service import Method

    Context = grpc.aio.ServicerContext[Any, Any]

MAX_PEERS = 10_000
"""Peers whose rate of unary calls is remembered; the longest silent are forgotten first."""


class Bucket:
    """So many calls a second, and at most one second's worth at once."""

    __slots__ = ("_per_s", "_room", "_seen_s", "account")

    def __init__(self, per_s: float, now_s: float) -> None:
        self.account = Account()
        """Of the same caller."""
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
        self._calls: dict[str, int] = {}
        """Peer → unary calls under way."""
        self._num_calls = 0
        self._bodies = Bodies(NUM_BODIES)
        self._readers_bodies = Bodies(NUM_READERS_BODIES)
        self.lane = Lane()
        """Where large requests wait for their turn, through whichever connection they came."""

    def role(self, context: Context) -> Role:
        """The role of whoever opened this call or stream, from its metadata; refuses strangers."""
        if self._guard.is_open:
            return Role.ADMIN
        sent = {key: value for key, value in context.invocation_metadata() or () if key == METADATA_KEY}
        return self._guard.role_of(str(sent.get(METADATA_KEY, "")))

    def role_of(self, token: str) -> Role:
        """The same, of a token that came by itself."""
        return self._guard.role_of(bearer(token) if token else "")

    @contextlib.contextmanager
    def call(self, context: Context, method: Method) -> Iterator[tuple[Role, Account]]:
        """A unary call, from its headers to its answer: who makes it. Its body has not been read yet.

        Raises:
            StrataError: Why it is refused.
        """
        role = self.role(context)
        require(role, method.role, method.name)
        peer = str(context.peer()).rpartition(":")[0]  # without the port: one machine is one peer
        account = self._admit(peer)
        self._calls[peer] = self._calls.get(peer, 0) + 1
        self._num_calls += 1
        try:
            yield role, account
        finally:
            self._num_calls -= 1
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]

    def _admit(self, peer: str) -> Account:
        bucket = self._buckets.pop(peer, None) or self.bucket()
        self._buckets[peer] = bucket
        if len(self._buckets) > MAX_PEERS:
            del self._buckets[next(iter(self._buckets))]
        if not bucket.take(1, self._clock.monotonic_s()):
            raise self.too_fast()
        most = self._limits.max_unary_calls
        if self._num_calls >= most or self._calls.get(peer, 0) >= max(most // 2, 1):
            raise LimitExceeded(
                f"limits.max_unary_calls={most} are under way, or half of them from this machine; wait for some, or "
                "use a session"
            )
        return bucket.account

    def bodies(self, role: Role) -> Bodies:
        """Where the bodies of a role's unary calls are received."""
        return self._readers_bodies if role <= Role.READER else self._bodies

    def check_size(self, role: Role, num_bytes: int) -> None:
        """Refuses a unary request that is too large for its caller's role."""
        most = receivable_bytes(role, self._limits.max_message_bytes)
        if num_bytes > most:
            raise LimitExceeded(f"the call holds {num_bytes} bytes; the role {role.name.lower()} may send {most}")

    def bucket(self) -> Bucket:
        return Bucket(self._limits.max_calls_per_s, self._clock.monotonic_s())

    def too_fast(self) -> LimitExceeded:
        return LimitExceeded(
            f"more than limits.max_calls_per_s={self._limits.max_calls_per_s} calls a second; slow down"
        )
