"""The files of a SQLite state: its lock, its creation, and the replacement of a damaged file.

Power may fail at every step. A new file is built under another name and then renamed. A rebuilt file is first named
`PATH.rebuilt-N`, from where any later start can finish the replacement.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.errors import JournalDamaged, JournalLocked
from strata.lifecycle import Descriptor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_SIDE_FILES = ("-wal", "-shm")


_OWNER_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class Owner:
    """The current or last holder of a lock, as recorded in the lock file."""

    pid: str = ""
    term: int = 0
    holder: str = ""
    address: str = ""

    @classmethod
    def parse(cls, content: bytes) -> Owner:
        """Parse the file leniently: it may be partly written, or come from an older version that stored only the
        process id.
        """
        pid, term, holder, address, *_ = [*content.decode(errors="replace").split("\n"), "", "", "", ""]
        return cls(pid.strip(), int(term) if term.isdecimal() else 0, holder, address)


class FileLock:
    """An exclusive lock on a file beside the state. It is released when its process exits, and names that process
    meanwhile."""

    def __init__(self, fd: int) -> None:
        self._descriptor = Descriptor(fd)
        self.term = 0
        """The number of holders so far, including this one; 0 while the lock is not held."""

    @classmethod
    def take(cls, path: Path) -> FileLock:
        """Take the lock.

        Raises:
            JournalLocked: Another process, or another journal of this process, holds it.
        """
        lock = cls(os.open(beside(path, ".lock"), os.O_RDWR | os.O_CREAT, 0o600))
        try:
            lock._take(path)
        except BaseException:
            lock.release()
            raise
        return lock

    def sign(self, holder: str, address: str) -> int:
        """Record the holder for other processes; return the number of this term."""
        self._write(self._descriptor.fd, str(os.getpid()), str(self.term), holder, address)
        return self.term

    def release(self) -> None:
        fd = self._descriptor.fd
        if fd >= 0 and self.term:
            with contextlib.suppress(OSError):  # disk full
                self._write(fd, "", str(self.term))
        self._descriptor.close()

    def _write(self, fd: int, *words: str) -> None:
        os.ftruncate(fd, 0)
        os.pwrite(fd, "".join(f"{word}\n" for word in words).encode(), 0)

    def _take(self, path: Path) -> None:
        fd = self._descriptor.fd
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = Owner.parse(os.pread(fd, _OWNER_BYTES, 0)).pid
            raise JournalLocked(
                f"{path} is open in {f'process {pid}' if pid else 'another process'}; "
                "stop that coordinator, or use another state"
            ) from None
        self.term = Owner.parse(os.pread(fd, _OWNER_BYTES, 0)).term + 1
        self.sign("", "")


def read_owner(path: Path) -> Owner | None:
    """Return the recorded holder of the lock beside this file, or None if it was released.

    A killed process stays recorded until the next one takes the lock. Does not try the lock, because a process that
    tries it at the same moment would find it taken.
    """
    try:
        owner = Owner.parse(beside(path, ".lock").read_bytes())
    except FileNotFoundError:
        return None
    return owner if owner.pid else None


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def make_directory(directory: Path) -> None:
    """Create the directory; only the user may access directories that we create."""
    missing = [parent for parent in (directory, *directory.parents) if not parent.exists()]
    for parent in reversed(missing):
        parent.mkdir(mode=0o700, exist_ok=True)


def make_file(path: Path, build: Callable[[Path], None]) -> None:
    """Create the file atomically, unless it exists.

    Raises:
        JournalDamaged: The file is missing or empty, but its log is not.
    """
    if path.exists() and path.stat().st_size > 0:
        return
    log = beside(path, "-wal")
    if log.exists() and log.stat().st_size > 0:
        raise JournalDamaged(
            f"{path} is {'empty' if path.exists() else 'missing'}, but its log {log} is not. "
            "Restore the file from a backup, or move the log away to start empty"
        )
    _build(path, beside(path, ".new"), build)


def replace_file(path: Path, build: Callable[[Path, Path], None]) -> None:
    """Replace a damaged file by what `build(new, kept_at)` creates; keep the damaged one as `PATH.damaged-N`."""
    number = 1
    while _damaged(path, number).exists():
        number += 1
    kept_at = _damaged(path, number)
    _build(beside(path, f".rebuilt-{number}"), beside(path, ".new"), lambda new: build(new, kept_at))
    finish_replacing(path)


def finish_replacing(path: Path) -> None:
    """Move a rebuilt file into place, if there is one; may be repeated."""
    for rebuilt in sorted(path.parent.glob(f"{_escaped(path.name)}.rebuilt-*")):
        kept_at = _damaged(path, int(rebuilt.name.rpartition("-")[2]))
        if path.exists() and not kept_at.exists():
            _link(path, kept_at)
        for suffix in _SIDE_FILES:
            # Before the replacement: the old log must never be applied to the new file.
            side = beside(path, suffix)
            if side.exists():
                _link(side, beside(kept_at, suffix))
                side.unlink()
        rebuilt.replace(path)
        _sync_directory(path.parent)


def _build(path: Path, unfinished: Path, build: Callable[[Path], None]) -> None:
    for leftover in (unfinished, beside(unfinished, "-journal")):
        leftover.unlink(missing_ok=True)
    os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    build(unfinished)
    unfinished.replace(path)
    _sync_directory(path.parent)


def _damaged(path: Path, number: int) -> Path:
    return beside(path, f".damaged-{number}")


def _link(source: Path, target: Path) -> None:
    if target.exists():
        return
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _escaped(name: str) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)
