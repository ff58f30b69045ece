"""The journal of a study: its facts as JSON lines in one file, appended and never rewritten.

`append` returns once the lines are in the file; with `is_durable`, or after `sync`, they survive a crash of the
machine, too. A driver that is killed while it writes leaves at most a torn last line, which is dropped when the journal
is next opened: nothing that follows from it has been done. Any other damage is an error. A lock keeps a second driver
out. No pickle.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import msgspec

from strata.errors import JournalDamaged, JournalLocked, JournalWriteFailed, LimitExceeded
from strata.tune.state import events as e

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

JOURNAL = "study.jsonl"
"""Its name in the directory of a study."""
MAX_LINE_BYTES = 256 << 10
MAX_BYTES = 4 << 30
"""A study of 100,000 trials with 100 reports each takes about a quarter of this."""


READ_BYTES = 8 << 20
"""What a follower reads at a time."""


class StudyJournal:
    """Belongs to one thread."""

    def __init__(self, path: Path) -> None:
        """Open the journal; create it if it does not exist.

        Raises:
            JournalLocked: Another process has it open.
            JournalWriteFailed: It cannot be created or written.
        """
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise JournalWriteFailed(f"cannot open {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise JournalWriteFailed(f"cannot lock {path}: {error.strerror}") from error
            raise JournalLocked(f"{path} is in use: the study already runs; stop it first") from None
        self._num_bytes = os.fstat(self._fd).st_size
        self._is_durable = False
        """All lines survive a crash of the machine."""

    def load(self) -> list[e.Event]:
        """Return all facts, and drop a torn last line.

        Raises:
            JournalDamaged: A line before the last one is not a fact.
        """
        facts, num_bytes = read_journal(self.path)
        if num_bytes != self._num_bytes:
            os.ftruncate(self._fd, num_bytes)
            os.fsync(self._fd)
            self._num_bytes = num_bytes
        return facts

    def append(self, facts: Sequence[e.Event], *, is_durable: bool = True) -> None:
        """
        Raises:
            LimitExceeded: A fact, or the journal, is too large; nothing was written.
            JournalWriteFailed: The disk is full or failed; nothing was written.
        """
        lines = [e.encode(fact) + b"\n" for fact in facts]
        if any(len(line) > MAX_LINE_BYTES for line in lines):
            raise LimitExceeded(f"a line of {self.path} would exceed {MAX_LINE_BYTES:,} bytes")
        data = b"".join(lines)
        if self._num_bytes + len(data) > MAX_BYTES:
            raise LimitExceeded(
                f"{self.path} would exceed {MAX_BYTES >> 30} GiB; report less often, or start a new study"
            )
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._fd, left) :]
            if is_durable and data:
                os.fdatasync(self._fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._num_bytes)
            raise self._failed(error) from error
        self._num_bytes += len(data)
        self._is_durable = is_durable if data else self._is_durable

    def sync(self) -> None:
        """Return when all lines survive a crash of the machine.

        Raises:
            JournalWriteFailed: The disk failed.
        """
        if self._is_durable:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise self._failed(error) from error
        self._is_durable = True

    def _failed(self, error: OSError) -> JournalWriteFailed:
        return JournalWriteFailed(f"cannot write {self.path}: {error.strerror}; free space, then resume the study")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_journal(path: Path) -> tuple[list[e.Event], int]:
    """Return the facts in a journal, which may be in use, and the number of bytes that they take.

    Raises:
        JournalDamaged: A line before the last one is not a fact, or the first one does not open a study.
    """
    facts: list[e.Event] = []
    num_bytes = 0
    for number, line, is_last in _lines(path):
        try:
            fact = e.decode(line) if line.endswith(b"\n") else None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if not is_last:
                raise JournalDamaged(f"{path}, line {number}: {error}; restore the file from a backup") from error
            fact = None
        if fact is None:
            break
        if isinstance(fact, e.Opened) != (number == 1):
            raise JournalDamaged(f"{path}, line {number}: a journal has one opening fact, in its first line")
        if isinstance(fact, e.Opened) and fact.spec.format > e.FORMAT:
            raise JournalDamaged(
                f"{path} has format {fact.spec.format}, this version reads up to {e.FORMAT}; upgrade Strata"
            )
        facts.append(fact)
        num_bytes += len(line)
    return facts, num_bytes


def _lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Yield number and content of each line, and whether it is the last. A line that is too long counts as torn."""
    with path.open("rb") as file:
        line = file.readline(MAX_LINE_BYTES)
        number = 1
        while line:
            following = file.readline(MAX_LINE_BYTES)
            if not line.endswith(b"\n") and following:
                raise JournalDamaged(f"{path}, line {number} exceeds {MAX_LINE_BYTES:,} bytes; restore the file")
            yield number, line, not following
            line, number = following, number + 1


@dataclass(frozen=True, slots=True)
class Followed:
    """What has been added to a journal."""

    facts: list[e.Event]
    is_anew: bool
    """The journal is another one than before: these facts are its first."""
    is_more: bool
    """It has more facts, to be read next."""


class JournalFollower:
    """Reads the journal of a study that may be running: each read returns the facts since the one before. It needs no
    lock, and keeps no file open.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._last = b""
        """The last line that was read."""

    def read(self, max_bytes: int = READ_BYTES) -> Followed:
        """Return the next facts.

        Raises:
            FileNotFoundError: There is no journal.
            JournalDamaged: A line before the last one is not a fact.
        """
        with self._path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(self._offset - len(self._last))
            # A full disk takes lines back, and a removed study may have been started anew.
            is_anew = self._offset > size or file.read(len(self._last)) != self._last
            if is_anew:
                self._offset, self._last = 0, b""
                file.seek(0)
            data = file.read(max_bytes)
        facts: list[e.Event] = []
        end = 0
        while (after := data.find(b"\n", end) + 1) > 0:
            line = data[end:after]
            try:
                fact = e.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if self._offset + after >= size:
                    break  # a torn last line
                raise JournalDamaged(
                    f"{self._path}, byte {self._offset + end:,}: {error}; restore the file from a backup"
                ) from error
            if isinstance(fact, e.Opened) != (self._offset + end == 0):
                raise JournalDamaged(f"{self._path}: a journal has one opening fact, in its first line")
            facts.append(fact)
            end, self._last = after, line
        if not end and len(data) > MAX_LINE_BYTES:
            raise JournalDamaged(f"{self._path}: a line exceeds {MAX_LINE_BYTES:,} bytes; restore the file")
        self._offset += end
        return Followed(facts, is_anew=is_anew, is_more=end > 0 and self._offset < size)
