"""The port to leadership: of all coordinators on one state, one may write it and speak for it.

A term is one coordinator's time as the leader; terms are numbered, and a later one always has a higher number. Two
things keep a leader that was paused from doing harm when it wakes up: the journal refuses its writes, because they
carry its old term, and it says nothing once `valid_until_s` has passed, which it knows without asking anybody.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from strata.coordinator.journal.files import FileLock, make_directory, read_owner
from strata.errors import ConfigError, JournalFenced, JournalLocked

if TYPE_CHECKING:
    from pathlib import Path

NEVER_S = -math.inf
ALWAYS_S = math.inf


@dataclass(frozen=True, slots=True)
class Term:
    """The right to write a state, as `open_journal` needs to see it."""

    number: int
    lock: FileLock | None = None
    """For a state in a file: what the leader holds."""


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads, as far as the state knows."""

    term: int
    holder: str
    address: str
    """Where it serves; empty if it did not say."""
    expires_in_s: float
    """When its lease runs out unless it is renewed; infinite where a lock ends with its process."""


class Leadership(Protocol):
    """One coordinator's claim to lead.

    Threads: calls are made by one thread at a time, not always the same one; `valid_until_s` may be read by any.
    """

    valid_until_s: float
    """Until when on the monotonic clock nobody else can have become the leader; `NEVER_S` for one who does not lead."""
    renew_every_s: float
    """How often to call `renew`; infinite where that is not needed."""

    def try_acquire(self, holder: str, address: str) -> Term | None:
        """Become the leader if nobody is; does not wait.

        Raises:
            JournalError: The state cannot be reached.
            ConfigError: It cannot be used.
        """
        ...

    def renew(self) -> None:
        """Stay the leader for one lease more. Also right after the lease ran out, if nobody has taken it.

        Raises:
            JournalFenced: Another has taken it: this term is over.
            JournalError: The state cannot be reached; it may be tried again.
        """
        ...

    def release(self) -> None:
        """Let the next one lead at once, if this one leads; a database that is gone is no reason to raise."""
        ...

    def leader(self) -> Leader | None:
        """Who leads at present; None if nobody does."""
        ...

    def close(self) -> None:
        """Let go of connections, without `release`; a second call does nothing."""
        ...


class MemoryLeadership:
    """A state that nobody else can see is always its owner's."""

    def __init__(self) -> None:
        self.valid_until_s = NEVER_S
        self.renew_every_s = ALWAYS_S
        self._leader: Leader | None = None
        self._num_terms = 0

    def try_acquire(self, holder: str, address: str) -> Term | None:
        if self._leader is not None:
            return None
        self._num_terms += 1
        self._leader = Leader(self._num_terms, holder, address, ALWAYS_S)
        self.valid_until_s = ALWAYS_S
        return Term(self._num_terms)

    def renew(self) -> None:
        if self._leader is None:
            raise JournalFenced("this coordinator does not lead")

    def release(self) -> None:
        self._leader = None
        self.valid_until_s = NEVER_S

    def leader(self) -> Leader | None:
        return self._leader

    def close(self) -> None:
        pass


class FileLeadership:
    """The lock beside a SQLite file: it ends with its process, and nobody can take it away from a paused one."""

    def __init__(self, path: Path) -> None:
        self.valid_until_s = NEVER_S
        self.renew_every_s = ALWAYS_S
        self._path = path.resolve()
        self._lock: FileLock | None = None

    def try_acquire(self, holder: str, address: str) -> Term | None:
        try:
            make_directory(self._path.parent)
            lock = FileLock.take(self._path)
        except JournalLocked:
            return None
        except OSError as error:
            raise ConfigError(
                f"cannot use {self._path}: {error.strerror}; give the coordinator another state", field="state"
            ) from error
        number = lock.sign(holder, address)
        self._lock = lock
        self.valid_until_s = ALWAYS_S
        return Term(number, lock)

    def renew(self) -> None:
        if self._lock is None:
            raise JournalFenced(f"this coordinator does not hold the lock of {self._path}")

    def release(self) -> None:
        self.valid_until_s = NEVER_S
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def leader(self) -> Leader | None:
        owner = read_owner(self._path)
        if owner is None:
            return None
        return Leader(owner.term, owner.holder or f"process {owner.pid}", owner.address, ALWAYS_S)

    def close(self) -> None:
        self.release()


def holder_name() -> str:
    """This process, for people to find it."""
    return f"process {os.getpid()} on {os.uname().nodename}"
