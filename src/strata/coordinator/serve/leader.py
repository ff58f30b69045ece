"""How a coordinator comes to lead, stays the leader, and hears that it is none any more."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from typing import TYPE_CHECKING

from strata.coordinator.journal.leadership import holder_name
from strata.errors import JournalError, JournalFenced, JournalLocked, NotLeader

if TYPE_CHECKING:
    from collections.abc import Callable

    from strata.coordinator.journal import Leader, Leadership, Term

log = logging.getLogger(__name__)

HURRY = 5
"""A renewal that failed is tried again in this part of the usual pause."""

STARTING = NotLeader("this coordinator is starting; try again, or the next address of your list")


def standing_by(leader: Leader | None) -> NotLeader:
    """What a standby tells its callers."""
    if leader is None or not leader.address:
        return NotLeader("this coordinator stands by, and nobody leads yet; try the next address of your list")
    return NotLeader(f"this coordinator stands by; the leader is at {leader.address}")


class Candidate:
    """One coordinator's way to the leadership. `resign` ends every wait."""

    def __init__(self, leadership: Leadership, *, address: str, poll_s: float) -> None:
        self._leadership = leadership
        self._address = address
        self._poll_s = poll_s
        self._resigned = asyncio.Event()
        self._unreachable = ""

    async def insist(self, state: str) -> Term:
        """Leads, or says who does. A killed leader's lease is waited for; a living one renews it, which shows.

        Raises:
            JournalLocked: Another coordinator leads.
        """
        loop = asyncio.get_running_loop()
        give_up_s: float | None = None
        while True:
            term = await self._try()
            if term is not None:
                return term
            leader = await asyncio.to_thread(self._leadership.leader)
            if give_up_s is None:
                remaining_s = leader.expires_in_s if leader is not None else 0.0
                give_up_s = loop.time() + (remaining_s + 2 * self._poll_s if math.isfinite(remaining_s) else 0.0)
            if loop.time() >= give_up_s or await self.resigned_within(self._poll_s):
                raise _taken(state, leader)

    async def wait(self, tell: Callable[[NotLeader], None]) -> Term | None:
        """Stands by until nobody else leads; `tell` hears what to say meanwhile. None: resigned."""
        while True:
            term = await self.wait_once(tell)
            if term is not None or await self.resigned_within(self._poll_s):
                return term

    async def wait_once(self, tell: Callable[[NotLeader], None]) -> Term | None:
        """One look of `wait`."""
        try:
            term = await self._try()
            if term is None:
                tell(standing_by(await asyncio.to_thread(self._leadership.leader)))
        except JournalError as error:
            tell(NotLeader(f"this coordinator stands by, and does not know who leads: {error.message}"))
            if not self._unreachable:
                log.warning("standing by: %s", error)
            self._unreachable = error.message
            return None
        self._unreachable = ""
        return term

    def resign(self) -> None:
        self._resigned.set()

    async def _try(self) -> Term | None:
        return await asyncio.to_thread(self._leadership.try_acquire, holder_name(), self._address)

    async def resigned_within(self, seconds: float) -> bool:
        """A pause that `resign` ends."""
        try:
            async with asyncio.timeout(seconds):
                return await self._resigned.wait()
        except TimeoutError:
            return False


class LeaseKeeper:
    """Renews the lease from a thread of its own, so that a busy event loop does not lose it."""

    def __init__(self, leadership: Leadership, on_lost: Callable[[JournalFenced], object]) -> None:
        """`on_lost` is called in that thread, once."""
        self._leadership = leadership
        self._on_lost = on_lost
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="strata-leader", daemon=True)

    def start(self) -> None:
        if math.isfinite(self._leadership.renew_every_s):
            self._thread.start()

    def stop(self) -> None:
        """Blocks until a renewal under way is over."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _keep(self) -> None:
        pause_s = self._leadership.renew_every_s
        failing = False
        while not self._stopping.wait(pause_s):
            pause_s = self._leadership.renew_every_s
            try:
                self._leadership.renew()
            except JournalFenced as error:
                self._on_lost(error)
                return
            except JournalError as error:
                pause_s /= HURRY
                if not failing:
                    log.warning("the leadership cannot be renewed at present: %s", error)
                failing = True
            else:
                if failing:
                    log.warning("the leadership is renewed again")
                failing = False


def _taken(state: str, leader: Leader | None) -> JournalLocked:
    who = "another coordinator" if leader is None else leader.holder
    where = f" (at {leader.address})" if leader is not None and leader.address else ""
    return JournalLocked(
        f"{state} is open in {who}{where}; stop that coordinator, or give this one another state, or start it with "
        "--standby: then it takes over when that one ends"
    )
