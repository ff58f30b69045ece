"""The node cache: a directory of files that are written once, by whichever process needs them first.

    <key>.entry    complete; readers map it, and hold a shared lock on it as long as it is mapped
    <key>.draft    claimed by a process that holds the exclusive lock on it, while it decodes and writes
    usage          bytes and number of entries and drafts; may be too large after a kill, never too small
    lock           held for microseconds, to claim, to reserve room, and to publish
    members        a shared lock of every process that uses the cache (`keeper`)

All locks are `flock`s, which the kernel releases when a process dies: a draft without its lock was abandoned. A process
that is stopped holds its locks, so every wait has a limit. After it, a claim is taken over; a draft is renamed only if
it is still the one under its name, so the stopped process cannot publish over its successor. Nothing here raises:
whoever gets no claim and no entry decodes privately.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from strata.clock import SystemClock
from strata.data.memory import pool
from strata.data.shared import keeper
from strata.data.shared.eviction import MAX_ENTRIES, CacheEntry, choose
from strata.data.shared.keeper import is_at, open_file, try_lock
from strata.lifecycle import Descriptor, finalize, renewed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

NAME = "strata-data-"
LINGER_S = 5.0
"""Seconds for which the files outlive the last process, so that the next trial or a restarted worker finds them."""
OUTLIVES = "STRATA_OUTLIVES_WORKER"
"""Marks the keeper for `strata run`, which ends other processes that its workers leave behind."""
LOCK_WAIT_S = 1.0
"""Longest wait for the lock of the directory. Its holder is stopped if it takes longer."""
SUSPENDED_S = 30.0
"""Time without sharing after such a wait."""
POLL_S = 0.001
MAX_POLL_S = 0.02
MAX_WAITS = 4
"""Processes that one call waits for, one after the other."""
JOIN_ATTEMPTS = 200
MAX_ROUNDS = 8
"""Attempts to find enough unmapped entries to evict."""
MAX_MAPPED = 256
"""Entries that a process maps at once, with a descriptor each. Further ones are copied."""
COPY_BYTES = 128 << 10
"""Smaller entries are copied, which takes less time than mapping them."""
_ENTRY, _DRAFT, _LOCK, _USAGE = ".entry", ".draft", "lock", "usage"
_NUMBERS = struct.Struct("<QQ")
_READS = os.O_RDONLY


class _Busy(Exception):
    """Another process holds the lock of the directory for too long."""


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """The right to publish an entry, and its draft."""

    key: str
    draft: Descriptor


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """The draft of another process."""

    fd: int


def shared_memory() -> Path:
    """Return the directory of shared memory, or that of temporary files where there is none."""
    shm = Path("/dev/shm")  # noqa: S108 - its purpose
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def directory_for(max_bytes: int, root: Path | None = None) -> Path:
    """Return the directory of this user's cache with this limit: loaders with the same limit share it."""
    return (root or shared_memory()) / f"{NAME}{os.geteuid()}-{max_bytes}"


def remove_abandoned(root: Path | None = None) -> None:
    """Remove caches of this user that no process uses and no keeper watches."""
    root = root or shared_memory()
    for prefix in (NAME, f".{NAME}"):
        for path in root.glob(f"{prefix}{os.geteuid()}-*"):
            if not _is_kept(str(path)):
                keeper.remove_if_unused(str(path))


class NodeCache:
    """One process's view of the cache. Safe for use by several threads; a forked child joins anew."""

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int,
        persists: bool = False,
        linger_s: float | None = None,
        now_s: Callable[[], float] = SystemClock.monotonic_s,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`persists`: the files stay after the last process. They are on a disk, and copied instead of mapped."""
        self._path = str(directory)
        self._max_bytes = max_bytes
        self.persists = persists
        self._linger_s = LINGER_S if linger_s is None else linger_s
        self._now_s = now_s
        self._pause = pause
        self._joining = renewed(threading.Lock())
        self._directory = Descriptor(-1)
        self._members = Descriptor(-1)
        self._is_refused = False
        self._suspended_until_s = 0.0
        self._mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    # -- membership ------------------------------------------------------------------------------------------------

    def join(self) -> bool:
        """Become a member of the cache, if this process is none; return whether it is one now."""
        with self._joining:
            if self._directory.fd >= 0:
                return True
            if self._is_refused:
                return False
            try:
                if self.persists:
                    Path(self._path).parent.mkdir(parents=True, exist_ok=True)
                else:
                    remove_abandoned(Path(self._path).parent)
                self._join()
            except OSError as error:
                log.warning("%s is not used, so processes share nothing: %s", self._path, error)
                self._is_refused = True
                return False
            if not self.persists:
                self._start_keeper()
        return True

    def leave(self) -> None:
        """Stop being a member; tables that are in use stay valid. A later call joins again."""
        with self._joining:
            self._members.close()
            self._directory.close()

    def _join(self) -> None:
        for _ in range(JOIN_ATTEMPTS):
            with contextlib.suppress(FileExistsError):
                Path(self._path).mkdir(mode=0o700)
            members = -1
            try:
                directory = keeper.open_directory(self._path)
            except FileNotFoundError:  # removed meanwhile
                continue
            try:
                members = open_file(keeper.MEMBERS, directory)
                if try_lock(members, fcntl.LOCK_SH) and is_at(self._path, directory):
                    self._directory, self._members = Descriptor(directory), Descriptor(members)
                    finalize(self, _close, self._directory, self._members, runs_at_exit=False)
                    return
            except FileNotFoundError:
                pass
            _close_all(directory, members)
            self._pause(POLL_S)  # someone is about to remove it
        raise TimeoutError(f"{self._path} is locked by a process that is stopped")

    def _start_keeper(self) -> None:
        """Start the process that removes the directory, unless there is one."""
        if _is_kept(self._path):
            return
        command = [sys.executable or "python3", "-I", "-S", keeper.__file__, self._path, str(self._linger_s)]
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, OUTLIVES: "1"},
                cwd="/",
                start_new_session=True,
                check=True,
                timeout=30,
            )
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("%s remains after the last process until the next one starts: %s", self._path, error)

    # -- entries ---------------------------------------------------------------------------------------------------

    def get(self, key: str) -> pa.Buffer | None:
        """Return the contents of an entry if it is complete."""
        if not self.join():
            return None
        try:
            fd = open_file(key + _ENTRY, self._directory.fd, flags=_READS)
        except OSError:
            return None
        try:
            if not try_lock(fd, fcntl.LOCK_SH):  # it is being evicted
                return None
            os.utime(fd)
            return self._contents(fd)
        except OSError:
            return None
        finally:
            os.close(fd)

    def has(self, key: str) -> bool:
        """Return whether an entry exists or a process works on it."""
        if not self.join():
            return False
        return any(self._exists(key + suffix) for suffix in (_ENTRY, _DRAFT))

    def claim(
        self, key: str, wait_limit_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> pa.Buffer | Claim | None:
        """Return the entry, or else the right to make it. None: make it without sharing it.

        Waits for another process that makes it, up to the limit, or until `is_over`. A claim ends with `publish` or
        `abandon`.
        """
        if not self.join():
            return None
        for _ in range(MAX_WAITS):
            found: pa.Buffer | Claim | _Waiting | None = self.get(key)
            if found is None:
                found = self._try_claim(key)
            if not isinstance(found, _Waiting):
                return found
            try:
                has_ended = self._poll(partial(_has_ended, found.fd, is_over), wait_limit_s)
                if is_over():
                    return None
                if not has_ended:  # its owner is stopped, or slower than we are
                    log.info("took over what another process did not make within %g s", wait_limit_s)
                    self._withdraw(key, found.fd)
            finally:
                os.close(found.fd)
        return None

    def publish(self, claim: Claim, num_bytes: int, write: Callable[[int], None]) -> pa.Buffer | None:
        """Write an entry of this size and return its contents; None if there is no room. Ends the claim."""
        fd = claim.draft.fd
        try:
            if not self._reserve(claim, num_bytes):
                return None
            write(fd)
            _check_size(fd, num_bytes)
            contents = self._contents(fd)
            self._rename(claim)  # if another process has taken over, these rows are as good
            try_lock(fd, fcntl.LOCK_SH)
        except (OSError, pa.ArrowException, _Busy) as error:
            log.debug("an entry is not shared: %s", error)
            return None
        else:
            return contents
        finally:
            self.abandon(claim)

    def abandon(self, claim: Claim) -> None:
        """Give up a claim that is not published: another process may make the entry."""
        self._withdraw(claim.key, claim.draft.fd)
        claim.draft.close()

    def discard(self, key: str) -> None:
        """Delete an entry that is no longer needed, or turned out to be invalid."""
        if not self.join():
            return
        with contextlib.suppress(OSError, _Busy), self._locked():
            num_bytes = os.stat(key + _ENTRY, dir_fd=self._directory.fd).st_size
            os.unlink(key + _ENTRY, dir_fd=self._directory.fd)
            self._count(-num_bytes, -1)

    # -- private ---------------------------------------------------------------------------------------------------

    def _try_claim(self, key: str) -> Claim | _Waiting | pa.Buffer | None:
        """Return a claim, the draft of another process, or the entry that it has completed meanwhile."""
        name = key + _DRAFT
        with contextlib.suppress(OSError, _Busy), self._locked():
            if self._exists(key + _ENTRY):
                return self.get(key)
            if self._exists(name):
                fd = open_file(name, self._directory.fd, flags=os.O_RDWR)
                if not try_lock(fd, fcntl.LOCK_SH):
                    return _Waiting(fd)
                self._unlink_draft(name, fd)  # its owner was killed
                os.close(fd)
            fd = open_file(name, self._directory.fd, flags=os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try_lock(fd, fcntl.LOCK_EX)
            return Claim(key, Descriptor(fd))
        return None

    def _reserve(self, claim: Claim, num_bytes: int) -> bool:
        """Give the draft its size, after other entries have made room; return whether it fits."""
        with self._locked():
            if not is_at(claim.key + _DRAFT, claim.draft.fd, self._directory.fd) or not self._make_room(num_bytes):
                return False
            self._count(num_bytes, 1)
            os.ftruncate(claim.draft.fd, num_bytes)  # takes no memory yet
        return True

    def _rename(self, claim: Claim) -> None:
        with self._locked():
            if is_at(claim.key + _DRAFT, claim.draft.fd, self._directory.fd):
                directory = self._directory.fd
                os.rename(claim.key + _DRAFT, claim.key + _ENTRY, src_dir_fd=directory, dst_dir_fd=directory)

    def _withdraw(self, key: str, fd: int) -> None:
        """Delete a draft, if it still is the one under its name."""
        name = key + _DRAFT
        with contextlib.suppress(OSError, _Busy):
            if is_at(name, fd, self._directory.fd):
                with self._locked():
                    if is_at(name, fd, self._directory.fd):
                        self._unlink_draft(name, fd)

    def _unlink_draft(self, name: str, fd: int) -> None:
        num_bytes = os.fstat(fd).st_size
        os.unlink(name, dir_fd=self._directory.fd)
        if num_bytes:
            self._count(-num_bytes, -1)

    def _make_room(self, need_bytes: int) -> bool:
        used_bytes, num_used = self._usage()
        if used_bytes + need_bytes <= self._max_bytes and num_used < MAX_ENTRIES:
            return True
        entries, draft_bytes, num_drafts = self._list()
        pinned: set[str] = set()
        fits = False
        for _ in range(MAX_ROUNDS):
            decided = choose(
                entries,
                need_bytes=need_bytes + draft_bytes,
                max_bytes=self._max_bytes,
                max_entries=MAX_ENTRIES - num_drafts,
                pinned=pinned,
            )
            if not decided.fits:
                break
            gone = {victim.name for victim in decided.victims if self._evict(victim.name)}
            entries = [entry for entry in entries if entry.name not in gone]
            fits = len(gone) == len(decided.victims)
            if fits:
                break
            pinned.update(victim.name for victim in decided.victims if victim.name not in gone)
        self._set_usage(sum(entry.num_bytes for entry in entries) + draft_bytes, len(entries) + num_drafts)
        return fits

    def _list(self) -> tuple[list[CacheEntry], int, int]:
        """Return the entries, and the bytes and number of reserved drafts. Drafts of killed processes are deleted."""
        entries: list[CacheEntry] = []
        draft_bytes = num_drafts = 0
        for name in os.listdir(self._directory.fd):  # noqa: PTH208
            if not name.endswith((_ENTRY, _DRAFT)):
                continue
            status = os.stat(name, dir_fd=self._directory.fd)
            if name.endswith(_ENTRY):
                entries.append(CacheEntry(name, status.st_size, status.st_mtime_ns))
            elif status.st_size and not self._unlink_if(name, fcntl.LOCK_SH):
                draft_bytes += status.st_size
                num_drafts += 1
        return entries, draft_bytes, num_drafts

    def _evict(self, name: str) -> bool:
        """Delete an entry unless a process has mapped it."""
        return self._unlink_if(name, fcntl.LOCK_EX)

    def _unlink_if(self, name: str, lock: int) -> bool:
        """Delete a file if this lock on it is free."""
        fd = open_file(name, self._directory.fd, flags=os.O_RDWR)
        try:
            if not try_lock(fd, lock):
                return False
            os.unlink(name, dir_fd=self._directory.fd)
            return True
        finally:
            os.close(fd)

    def _contents(self, fd: int) -> pa.Buffer:
        """Map a file, or copy it if it is small or this process maps many."""
        num_bytes = os.fstat(fd).st_size
        if self.persists or num_bytes < COPY_BYTES or len(self._mapped) >= MAX_MAPPED:
            copied = pa.allocate_buffer(num_bytes, pool())
            view, at = memoryview(copied), 0
            while at < num_bytes:
                num_read = os.preadv(fd, [view[at:]], at)
                if not num_read:
                    raise OSError(f"the entry ends after {at} of {num_bytes} bytes")
                at += num_read
            return copied
        memory = mmap.mmap(fd, num_bytes, access=mmap.ACCESS_READ)  # holds a descriptor, and so the lock
        self._mapped.add(memory)
        return pa.py_buffer(memory)

    def _exists(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._directory.fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    def _usage(self) -> tuple[int, int]:
        fd = open_file(_USAGE, self._directory.fd)
        try:
            found = os.pread(fd, _NUMBERS.size, 0)
        finally:
            os.close(fd)
        return _NUMBERS.unpack(found) if len(found) == _NUMBERS.size else (0, 0)

    def _set_usage(self, num_bytes: int, number: int) -> None:
        fd = open_file(_USAGE, self._directory.fd)
        try:
            os.pwrite(fd, _NUMBERS.pack(max(0, num_bytes), max(0, number)), 0)
        finally:
            os.close(fd)

    def _count(self, num_bytes: int, number: int) -> None:
        used_bytes, num_used = self._usage()
        self._set_usage(used_bytes + num_bytes, num_used + number)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the directory.

        Raises:
            _Busy: Its holder is stopped.
            OSError: There are no descriptors left.
        """
        if self._now_s() < self._suspended_until_s:
            raise _Busy
        fd = open_file(_LOCK, self._directory.fd)
        try:
            if not self._poll(lambda: try_lock(fd, fcntl.LOCK_EX), LOCK_WAIT_S):
                self._suspended_until_s = self._now_s() + SUSPENDED_S
                log.warning("%s is locked by a stopped process; not sharing for %g s", self._path, SUSPENDED_S)
                raise _Busy
            try:
                yield
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has this descriptor, too
        finally:
            os.close(fd)

    def _poll(self, check: Callable[[], bool], limit_s: float) -> bool:
        """Return whether the check succeeds within the limit."""
        end_s, pause_s = self._now_s() + limit_s, POLL_S
        while not check():
            if self._now_s() >= end_s:
                return False
            self._pause(pause_s)
            pause_s = min(2 * pause_s, MAX_POLL_S)
        return True


def _is_kept(path: str) -> bool:
    """Return whether a keeper watches a cache."""
    try:
        directory = keeper.open_directory(path)
    except OSError:
        return False
    try:
        fd = open_file(keeper.KEEPER, directory, flags=os.O_RDWR)
        try:
            return not try_lock(fd, fcntl.LOCK_SH)  # two that ask do not disturb each other
        finally:
            os.close(fd)
    except OSError:
        return False
    finally:
        os.close(directory)


def _check_size(fd: int, num_bytes: int) -> None:
    found = os.fstat(fd).st_size
    if found != num_bytes:
        raise OSError(f"it has {found} bytes, but room was reserved for {num_bytes}")


def _has_ended(fd: int, is_over: Callable[[], bool]) -> bool:
    """Return whether the process that holds a draft has published it, given it up or died; or the wait is over."""
    return is_over() or try_lock(fd, fcntl.LOCK_SH)


def _close_all(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def _close(*descriptors: Descriptor) -> None:
    for each in descriptors:
        each.close()
