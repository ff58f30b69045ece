"""Counters and histograms of a coordinator: plain numbers, updated where events happen and rendered on request.

A heartbeat costs a few microseconds, so counting one may cost a few hundred nanoseconds: a list index and an addition.
This module does not know Prometheus; `http/exposition.py` renders its format. Every name that becomes a label comes
from a fixed set (methods, statuses, causes, kinds), never from a caller.

Everything runs on the event loop; the journal thread hands over its measurements with each batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING

from strata.clock import Clock, SystemClock
from strata.coordinator.state import events as e

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

CALL_BOUNDS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0)
BARRIER_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0, 300.0)
COMMIT_BOUNDS_S = (0.0003, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0, 5.0)
BATCH_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 10_000)
FRAME_BOUNDS_BYTES = (64, 256, 1_024, 4_096, 16_384, 65_536, 262_144, 1_048_576, 16_777_216)

RATE_WINDOW_S = 10.0
"""The window of `strata_coordinator_rps`."""
SAMPLE_S = 1.0
BARRIER_WINDOW_S = 60.0
"""The window of the recent barrier latency."""
MAX_RECENT_BARRIERS = 1_024
EXPIRY_CAUSES: tuple[e.LeaveCause, ...] = ("lease", "connection", "hung")
LEAVE_CAUSES: tuple[e.LeaveCause, ...] = (*EXPIRY_CAUSES, "deregistered", "replaced")


class Histogram:
    """Counts per bucket, and the sum of all values."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """One per bound, and the last one for larger values. Not cumulative."""
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def num(self) -> int:
        return sum(self.counts)


class CallStats:
    """Statistics of one method."""

    __slots__ = ("num_by_refusal", "num_ok", "seconds")

    def __init__(self) -> None:
        self.num_ok = 0
        self.num_by_refusal: dict[str, int] = {}
        """By gRPC status."""
        self.seconds = Histogram(CALL_BOUNDS_S)

    def answered(self, seconds: float) -> None:
        self.num_ok += 1
        times = self.seconds  # inlined `Histogram.add`: this is the busiest line of a coordinator
        times.counts[bisect_left(CALL_BOUNDS_S, seconds)] += 1
        times.total += seconds

    def refused(self, status: str, seconds: float) -> None:
        self.num_by_refusal[status] = self.num_by_refusal.get(status, 0) + 1
        self.seconds.add(seconds)

    @property
    def num(self) -> int:
        return self.num_ok + sum(self.num_by_refusal.values())


class Metrics:
    def __init__(self, clock: Clock | None = None) -> None:
        self.now_s: Callable[[], float] = (clock or SystemClock()).monotonic_s
        self.calls: dict[str, CallStats] = {}
        """By method; only for methods of the service."""
        self.frames_in = Histogram(FRAME_BOUNDS_BYTES)
        self.frames_out = Histogram(FRAME_BOUNDS_BYTES)
        self.num_sessions_opened = 0
        self.num_sessions_dropped = 0
        """Closed by the coordinator because the client did not read."""
        self.barrier_s = Histogram(BARRIER_BOUNDS_S)
        self.num_barriers_broken = 0
        self.commit_s = Histogram(COMMIT_BOUNDS_S)
        self.commit_events = Histogram(BATCH_BOUNDS)
        self.num_commit_bytes = 0
        self.num_commits_failed = 0
        self.num_snapshots = 0
        self.num_generations = 0
        self.num_shards_moved = 0
        self.num_shards_done = 0
        self.num_checkpoints = 0
        self.num_joined = 0
        self.num_left_by_cause: dict[str, int] = dict.fromkeys(LEAVE_CAUSES, 0)
        self._opened_s: dict[Hashable, float] = {}
        """When the first caller of each open barrier arrived; bounded like the barriers."""
        self._recent_barriers: deque[tuple[float, float]] = deque(maxlen=MAX_RECENT_BARRIERS)
        self._samples: deque[tuple[float, int]] = deque(maxlen=int(RATE_WINDOW_S / SAMPLE_S) + 1)
        self._samples.append((self.now_s(), 0))

    # -- calls -----------------------------------------------------------------------------------------------------

    def stats_of(self, method: str) -> CallStats:
        """Return the statistics of a method; call once per method, before its first call."""
        return self.calls.setdefault(method, CallStats())

    @property
    def num_calls(self) -> int:
        return sum(stats.num for stats in self.calls.values())

    def sample(self) -> None:
        """Record the number of calls so far. Call it periodically; it is cheap."""
        now_s = self.now_s()
        if now_s - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((now_s, self.num_calls))

    def calls_per_s(self) -> float:
        """Return the rate over the last ten seconds, or since the start if that is shorter."""
        then_s, num_then = self._samples[0]
        passed_s = self.now_s() - then_s
        return (self.num_calls - num_then) / passed_s if passed_s > 0 else 0.0

    # -- barriers --------------------------------------------------------------------------------------------------

    def barrier_opened(self, ticket: Hashable) -> None:
        self._opened_s[ticket] = self.now_s()

    def barrier_ended(self, ticket: Hashable, *, released: bool) -> None:
        opened_s = self._opened_s.pop(ticket, None)
        if not released:
            self.num_barriers_broken += 1
        elif opened_s is not None:
            now_s = self.now_s()
            self.barrier_s.add(now_s - opened_s)
            self._recent_barriers.append((now_s, now_s - opened_s))

    def recent_barrier_s(self, percent: int = 95) -> float | None:
        """Return a percentile of the last minute, or None if no barrier was released in it."""
        since_s = self.now_s() - BARRIER_WINDOW_S
        recent = sorted(took_s for at_s, took_s in self._recent_barriers if at_s >= since_s)
        return recent[(len(recent) - 1) * percent // 100] if recent else None

    # -- durable events --------------------------------------------------------------------------------------------

    def committed(self, events: Sequence[e.Event], *, seconds: float, num_bytes: int, snapshot: bool) -> None:
        self.commit_s.add(seconds)
        self.commit_events.add(len(events))
        self.num_commit_bytes += num_bytes
        self.num_snapshots += snapshot
        for event in events:
            if isinstance(event, e.ShardsDone):  # by far the most frequent
                self.num_shards_done += len(event.indices)
            elif type(event) in _TAKERS:
                _TAKERS[type(event)](self, event)

    def commit_failed(self) -> None:
        """Forget the open barriers: their callers must retry, which starts a new wait."""
        self.num_commits_failed += 1
        self._opened_s.clear()

    def _joined(self, _event: e.WorkerJoined) -> None:
        self.num_joined += 1

    def _left(self, event: e.WorkerLeft) -> None:
        self.num_left_by_cause[event.cause] += 1

    def _generation(self, _event: e.GenerationStarted) -> None:
        self.num_generations += 1

    def _moved(self, event: e.ShardsAssigned) -> None:
        self.num_shards_moved += event.num_moved

    def _checkpoint(self, _event: e.CheckpointCommitted) -> None:
        self.num_checkpoints += 1


_TAKERS: dict[type, Callable[..., None]] = {
    e.WorkerJoined: Metrics._joined,
    e.WorkerLeft: Metrics._left,
    e.GenerationStarted: Metrics._generation,
    e.ShardsAssigned: Metrics._moved,
    e.CheckpointCommitted: Metrics._checkpoint,
}
