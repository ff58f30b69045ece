"""Barriers: no worker continues until all members have arrived.

A barrier is identified by (name, step) within a generation. It counts workers, not arrivals, so arriving twice is
harmless, and arriving after the release is answered at once. Arrivals are not durable, but the release is: after a
coordinator dies, the members arrive again, and late ones find the release recorded. A barrier that cannot complete ends
at once for all waiting callers, with the names of the missing workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from strata.coordinator.state import limits
from strata.coordinator.state.events import BarrierReleased
from strata.errors import BarrierBroken, BarrierMismatch, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from strata.coordinator.config import Limits
    from strata.coordinator.state.membership import Member, Membership

MAX_MISSING_NAMED = 32


class Ticket(NamedTuple):
    """What a caller waits for."""

    job_id: str
    generation: int
    barrier_id: str
    step: int
    round: int
    """The number of this opening of the barrier: a barrier that broke and is entered again is another wait."""


@dataclass(frozen=True, slots=True)
class Released:
    """All members arrived."""

    generation: int
    num_members: int


class Release(NamedTuple):
    """The record of a released barrier."""

    num_members: int
    named: str
    """A digest of the named members; empty if all members of the generation were meant."""


@dataclass(frozen=True, slots=True)
class BarrierEnded:
    """Sent to every holder of the ticket."""

    ticket: Ticket
    outcome: Released | BarrierBroken


@dataclass(slots=True)
class OpenBarrier:
    ticket: Ticket
    members: frozenset[str] | None
    """None for every member of the generation."""
    opened_s: float
    deadline_s: float
    arrived: set[str] = field(default_factory=set)


class Barriers:
    def __init__(self, job_id: str, *, limits: Limits) -> None:
        self.job_id = job_id
        self.open: dict[tuple[str, int], OpenBarrier] = {}
        self.released: dict[tuple[str, int], Release] = {}
        """Released in this generation, by (name, step)."""
        self._num_opened = 0
        self._limits = limits

    # -- decisions -------------------------------------------------------------------------------------------------

    def check(self, membership: Membership, worker_id: str, barrier_id: str, step: int, named: frozenset[str]) -> None:
        """Reject an invalid arrival; changes nothing."""
        limits.check_id(barrier_id, "barrier_id")
        limits.check_count(step, "step")
        unknown = [worker for worker in named if worker not in membership.members]
        if unknown:
            raise InvalidArgument(
                f"members contains {_shown(unknown)}, not in generation {membership.generation}; remove them",
                field="members",
            )
        if named and worker_id not in named:
            raise InvalidArgument(f"members does not contain the caller {worker_id!r}; add it", field="members")
        release = self.released.get((barrier_id, step))
        if release is not None and release.named != _digest(named):
            raise BarrierMismatch(
                f"barrier {barrier_id!r} at step {step} was released to {release.num_members} members, this call names "
                f"{_shown(named) if named else 'all members'}; use a separate barrier_id for every set of members",
                field="members",
            )
        standing = self.open.get((barrier_id, step))
        if release is None and standing is None:
            limits.check_room(
                len(self.open),
                self._limits.max_open_barriers_per_job,
                "open barriers",
                "max_open_barriers_per_job",
                field="barrier_id",
            )
        elif standing is not None and standing.members != (named or None):
            theirs = "all members" if standing.members is None else _shown(standing.members)
            raise BarrierMismatch(
                f"barrier {barrier_id!r} at step {step} waits for {theirs}, but this call names "
                f"{_shown(named) if named else 'all members'}; all callers must name the same members",
                field="members",
            )

    def arrive(
        self,
        membership: Membership,
        worker_id: str,
        barrier_id: str,
        step: int,
        named: frozenset[str],
        *,
        now_s: float,
        deadline_s: float,
    ) -> tuple[Ticket, list[BarrierReleased]]:
        """Count a checked arrival; return its ticket, and the release if it was the last."""
        barrier = self.open.get((barrier_id, step))
        if barrier is None:
            self._num_opened += 1
            ticket = Ticket(self.job_id, membership.generation, barrier_id, step, self._num_opened)
            barrier = OpenBarrier(ticket, named or None, opened_s=now_s, deadline_s=deadline_s)
            self.open[barrier_id, step] = barrier
        barrier.arrived.add(worker_id)
        barrier.deadline_s = min(barrier.deadline_s, deadline_s)
        num_members = len(membership.members) if barrier.members is None else len(barrier.members)
        if len(barrier.arrived) < num_members:
            return barrier.ticket, []
        released = BarrierReleased(
            job_id=self.job_id,
            generation=membership.generation,
            barrier_id=barrier_id,
            step=step,
            num_members=num_members,
            named=_digest(named),
        )
        return barrier.ticket, [released]

    # -- ends ------------------------------------------------------------------------------------------------------

    def expire(self, membership: Membership, now_s: float) -> list[BarrierEnded]:
        """Break the barriers whose deadline has passed."""
        late = [b for b in self.open.values() if b.deadline_s <= now_s]
        return [
            self._break(
                b,
                f"not all members arrived within {b.deadline_s - b.opened_s:.1f} s",
                {w: _last_state(m, now_s) for w, m in self._missing(b, membership)},
                membership.generation,
            )
            for b in late
        ]

    def break_all(self, membership: Membership, departed: Mapping[str, str]) -> list[BarrierEnded]:
        """End every barrier of the previous generation; `departed` maps the workers that left to their reasons."""
        why = f"generation {membership.generation} started: {membership.generation_reason}"
        ended = []
        for barrier in list(self.open.values()):
            missing = {
                worker: reason
                for worker, reason in departed.items()
                if barrier.members is None or worker in barrier.members
            }
            ended.append(self._break(barrier, why, missing, membership.generation))
        return ended

    def excuse(self, seconds: float) -> None:
        """Extend the deadlines by a pause of the coordinator, during which no worker could arrive."""
        for barrier in self.open.values():
            barrier.deadline_s += seconds

    def _break(self, barrier: OpenBarrier, why: str, missing: Mapping[str, str], generation: int) -> BarrierEnded:
        ticket = barrier.ticket
        del self.open[ticket.barrier_id, ticket.step]
        named = dict(sorted(missing.items())[:MAX_MISSING_NAMED])
        who = "; ".join(f"{worker}: {reason}" for worker, reason in named.items())
        more = len(missing) - len(named)
        message = f"barrier {ticket.barrier_id!r} at step {ticket.step} broke: {why}"
        if who:
            message += f" — missing {who}" + (f"; and {more} more" if more else "")
        message += f"; arrive again in generation {generation}"
        return BarrierEnded(ticket, BarrierBroken(message, field="barrier_id", generation=generation, missing=named))

    def _missing(self, barrier: OpenBarrier, membership: Membership) -> Iterable[tuple[str, Member]]:
        awaited = membership.members if barrier.members is None else barrier.members
        return [(w, membership.members[w]) for w in awaited if w not in barrier.arrived]

    # -- apply -----------------------------------------------------------------------------------------------------

    def apply_released(self, event: BarrierReleased) -> None:
        key = (event.barrier_id, event.step)
        self.open.pop(key, None)
        self.released[key] = Release(event.num_members, event.named)
        while len(self.released) > self._limits.max_released_barriers_per_job:
            del self.released[next(iter(self.released))]

    def apply_generation(self) -> None:
        self.released.clear()

    # -- snapshot --------------------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[tuple[str, int, int, str], ...]:
        return tuple((name, step, *release) for (name, step), release in self.released.items())

    def restore(self, released: Iterable[tuple[str, int, int, str]]) -> None:
        self.released = {(name, step): Release(num_members, named) for name, step, num_members, named in released}


def _last_state(member: Member, now_s: float) -> str:
    return f"{member.state} at step {member.step}, last heard {now_s - member.last_seen_s:.1f} s ago"


def _digest(named: frozenset[str]) -> str:
    """Return a digest of 16 characters, instead of storing thousands of names."""
    return xxhash.xxh3_64_hexdigest("\n".join(sorted(named)).encode()) if named else ""


def _shown(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")
