"""The port of leadership: of all coordinators on one state, one may write it and answer for it.

A term is one coordinator's time as the leader; terms are numbered in increasing order. Two mechanisms keep a paused
leader from doing harm when it resumes: the journal rejects its writes, because they carry an old term, and the leader
stops answering once `valid_until_s` has passed, which it can check locally.
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
    """The right to write a state, as required by `open_journal`."""

    number: int
    lock: FileLock | None = None
    """For a state in a file: the lock that the leader holds."""


@dataclass(frozen=True, slots=True)
class Leader:
    """The current leader, as recorded in the state."""

    term: int
    holder: str
    address: str
    """The address where it serves; empty if unknown."""
    expires_in_s: float
    """Seconds until its lease expires unless renewed; infinite for a lock that is released at process exit."""


class Leadership(Protocol):
    """One coordinator's claim to the leadership.

    Threads: methods are called by one thread at a time, not always the same one; any thread may read `valid_until_s`.
    """

    valid_until_s: float
    """Until this time on the monotonic clock, no other coordinator can lead; `NEVER_S` if this one does not lead."""
    renew_every_s: float
    """Seconds between two calls of `renew`; infinite if it is not needed."""

    def try_acquire(self, holder: str, address: str) -> Term | None:
        """Become the leader if there is none; does not wait.

        Raises:
            JournalError: The state cannot be reached.
            ConfigError: The state cannot be used.
        """
        ...

    def renew(self) -> None:
        """Extend the leadership by one lease. Works even after the lease expired, if no other coordinator has taken it.

        Raises:
            JournalFenced: Another coordinator leads; this term is over.
            JournalError: The state cannot be reached; retry.
        """
        ...

    def release(self) -> None:
        """Let the next coordinator lead at once, if this one leads; does not raise if the database is down."""
        ...

    def leader(self) -> Leader | None:
        """Return the current leader, or None."""
        ...

    def close(self) -> None:
        """Close connections without `release`; later calls do nothing."""
        ...


class MemoryLeadership:
    """The leadership of a state in memory, which no other process can access."""

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
    """The lock beside a SQLite file: released when its process exits, and never lost by a paused process."""

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
                f"cannot use {self._path}: {error.strerror}; choose another state", field="state"
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
    """Return a name for this process that operators can find."""
    return f"process {os.getpid()} on {os.uname().nodename}"
