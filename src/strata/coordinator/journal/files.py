"""The files of a SQLite state: who may open it, how it comes into being, how a rebuilt one replaces a damaged one.

Every step may be the last before the power goes. A new file is built under another name and then renamed; a rebuilt one
first gets the name `PATH.rebuilt-N`, from where any later start can finish the exchange.
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
    """What the lock file says of whoever has the lock, or had it last."""

    pid: str = ""
    term: int = 0
    holder: str = ""
    address: str = ""

    @classmethod
    def parse(cls, content: bytes) -> Owner:
        """Forgiving: the file may be just being written, or of an older version that knew only the process."""
        pid, term, holder, address, *_ = [*content.decode(errors="replace").split("\n"), "", "", "", ""]
        return cls(pid.strip(), int(term) if term.isdecimal() else 0, holder, address)


class FileLock:
    """An exclusive lock beside a file; it ends with its process, whoever was forked from it, and names it meanwhile."""

    def __init__(self, fd: int) -> None:
        self._descriptor = Descriptor(fd)
        self.term = 0
        """How many have had it so far, this one included; 0 while it is not ours."""

    @classmethod
    def take(cls, path: Path) -> FileLock:
        """
        Raises:
            JournalLocked: Another process has it, or another journal in this one.
        """
        lock = cls(os.open(beside(path, ".lock"), os.O_RDWR | os.O_CREAT, 0o600))
        try:
            lock._take(path)
        except BaseException:
            lock.release()
            raise
        return lock

    def sign(self, holder: str, address: str) -> int:
        """Leave word of who has it, for those who wait; returns the number of this term."""
        self._write(self._descriptor.fd, str(os.getpid()), str(self.term), holder, address)
        return self.term

    def release(self) -> None:
        fd = self._descriptor.fd
        if fd >= 0 and self.term:
            with contextlib.suppress(OSError):  # a full disk
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
                "stop that coordinator, or give this one another state"
            ) from None
        self.term = Owner.parse(os.pread(fd, _OWNER_BYTES, 0)).term + 1
        self.sign("", "")


def read_owner(path: Path) -> Owner | None:
    """Who has the lock beside this file; None if it was let go of.

    A process that was killed stands there until the next one comes.

    Without trying the lock: whoever tries it at the same moment would find it taken.
    """
    try:
        owner = Owner.parse(beside(path, ".lock").read_bytes())
    except FileNotFoundError:
        return None
    return owner if owner.pid else None


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def make_directory(directory: Path) -> None:
    """Only the user may look into the directories that we make."""
    missing = [parent for parent in (directory, *directory.parents) if not parent.exists()]
    for parent in reversed(missing):
        parent.mkdir(mode=0o700, exist_ok=True)


def make_file(path: Path, build: Callable[[Path], None]) -> None:
    """Make the file, unless there is one, in one step: it is whole or not there.

    Raises:
        JournalDamaged: The file is gone or empty, but its log is not.
    """
    if path.exists() and path.stat().st_size > 0:
        return
    log = beside(path, "-wal")
    if log.exists() and log.stat().st_size > 0:
        raise JournalDamaged(
            f"{path} is {'empty' if path.exists() else 'gone'}, but its log {log} is not. "
            "Restore the file from a backup, or move the log away to start empty"
        )
    _build(path, beside(path, ".new"), build)


def replace_file(path: Path, build: Callable[[Path, Path], None]) -> None:
    """Exchange a damaged file for what `build(new, kept_at)` makes; the damaged one is kept at `PATH.damaged-N`."""
    number = 1
    while _damaged(path, number).exists():
        number += 1
    kept_at = _damaged(path, number)
    _build(beside(path, f".rebuilt-{number}"), beside(path, ".new"), lambda new: build(new, kept_at))
    finish_replacing(path)


def finish_replacing(path: Path) -> None:
    """Put a rebuilt file in its place, if there is one; as often as needed."""
    for rebuilt in sorted(path.parent.glob(f"{_escaped(path.name)}.rebuilt-*")):
        kept_at = _damaged(path, int(rebuilt.name.rpartition("-")[2]))
        if path.exists() and not kept_at.exists():
            _link(path, kept_at)
        for suffix in _SIDE_FILES:
            # Before the exchange: the old log must never meet the new file.
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
