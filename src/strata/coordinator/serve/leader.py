"""Leader election of a coordinator: become the leader, renew the lease, and notice its loss."""

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

RETRY_FACTOR = 5
"""After a failed renewal, the pause is divided by this."""

STARTING = NotLeader("this coordinator is starting; try again, or try the next address in your list")


def standby_error(leader: Leader | None) -> NotLeader:
    """Return the error with which a standby answers its callers."""
    if leader is None or not leader.address:
        return NotLeader("this coordinator is a standby, and there is no leader yet; try the next address in your list")
    return NotLeader(f"this coordinator is a standby; the leader is at {leader.address}")


class Candidate:
    """Competes for the leadership on behalf of one coordinator. `resign` ends every wait."""

    def __init__(self, leadership: Leadership, *, address: str, poll_s: float) -> None:
        self._leadership = leadership
        self._address = address
        self._poll_s = poll_s
        self._resigned = asyncio.Event()
        self._unreachable = ""

    async def lead_or_raise(self, state: str) -> Term:
        """Become the leader, or raise. Wait out the lease of a killed leader; a live one renews it.

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
                raise _locked_error(state, leader)

    async def wait(self, report: Callable[[NotLeader], None]) -> Term | None:
        """Wait until this coordinator leads, or return None after `resign`. `report` receives the error to answer
        with meanwhile.
        """
        while True:
            term = await self.wait_once(report)
            if term is not None or await self.resigned_within(self._poll_s):
                return term

    async def wait_once(self, report: Callable[[NotLeader], None]) -> Term | None:
        """Make one attempt of `wait`."""
        try:
            term = await self._try()
            if term is None:
                report(standby_error(await asyncio.to_thread(self._leadership.leader)))
        except JournalError as error:
            report(NotLeader(f"this coordinator is a standby and cannot find out who leads: {error.message}"))
            if not self._unreachable:
                log.warning("standby: %s", error)
            self._unreachable = error.message
            return None
        self._unreachable = ""
        return term

    def resign(self) -> None:
        self._resigned.set()

    async def _try(self) -> Term | None:
        return await asyncio.to_thread(self._leadership.try_acquire, holder_name(), self._address)

    async def resigned_within(self, seconds: float) -> bool:
        """Sleep until `resign` or for `seconds`; return whether it resigned."""
        try:
            async with asyncio.timeout(seconds):
                return await self._resigned.wait()
        except TimeoutError:
            return False


class LeaseKeeper:
    """Renews the lease from its own thread, so that a busy event loop does not lose it."""

    def __init__(self, leadership: Leadership, on_lost: Callable[[JournalFenced], object]) -> None:
        """Prepare the thread; it calls `on_lost` once if the lease is lost."""
        self._leadership = leadership
        self._on_lost = on_lost
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="strata-leader", daemon=True)

    def start(self) -> None:
        if math.isfinite(self._leadership.renew_every_s):
            self._thread.start()

    def stop(self) -> None:
        """Stop renewing; block until a renewal in progress has finished."""
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
                pause_s /= RETRY_FACTOR
                if not failing:
                    log.warning("cannot renew the leadership: %s", error)
                failing = True
            else:
                if failing:
                    log.warning("the leadership was renewed again")
                failing = False


def _locked_error(state: str, leader: Leader | None) -> JournalLocked:
    who = "another coordinator" if leader is None else leader.holder
    where = f" (at {leader.address})" if leader is not None and leader.address else ""
    return JournalLocked(
        f"{state} is open in {who}{where}; stop that coordinator, use another state for this one, or start it with "
        "--standby to take over when the other one exits"
    )
