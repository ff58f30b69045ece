"""The keeper: a small process that removes a node cache after the last process that used it, however that one ended.

Every process that uses the cache holds a shared lock on its file `members`, which the kernel releases when the process
dies. The keeper waits for the exclusive lock, so it sleeps until the last member is gone; then it gives the next
process some seconds (the next trial, or a restarted worker) before it deletes the files. If the keeper is killed as
well, the next process that opens any cache deletes what is left.

This file is run as a script, by an interpreter without site packages; it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sys
import time

MEMBERS = "members"
KEEPER = "keeper"
PRIVATE = 0o600
ATTEMPTS = 20
ATTEMPT_S = 0.01


def open_directory(path: str) -> int:
    """Open a directory that only this user can access.

    Raises:
        OSError: It is missing, a link, or accessible to others.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(fd)
        raise PermissionError(f"{path} is accessible to another user")
    return fd


def open_file(name: str, directory: int, *, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE, dir_fd=directory)


def try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(path: str, fd: int, directory: int | None = None) -> bool:
    """Return whether a path still leads to an open file."""
    try:
        there = os.stat(path, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def remove_if_unused(path: str) -> bool:
    """Delete a cache that no process uses; return whether it is gone."""
    try:
        directory = open_directory(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    members = -1
    try:
        try:
            members = open_file(MEMBERS, directory, flags=os.O_RDWR)
        except FileNotFoundError:  # made a moment ago, or by something else
            os.rmdir(path)  # noqa: PTH106 - only if it is empty
            return True
        if not try_lock(members, fcntl.LOCK_EX) or not is_at(path, directory):
            return False
        # Renamed first: a process that comes now makes a new directory.
        parent, name = os.path.split(path)
        hidden = os.path.join(parent, f".{name.lstrip('.')[:200]}.{secrets.token_hex(4)}")  # noqa: PTH118
        os.rename(path, hidden)  # noqa: PTH104
        names = os.listdir(directory)  # noqa: PTH208
        for each in sorted(names, key=MEMBERS.__eq__):  # `members` last: a directory with it is a cache
            with contextlib.suppress(OSError):
                os.unlink(each, dir_fd=directory)
        os.rmdir(hidden)  # noqa: PTH106
    except OSError:
        return False
    finally:
        if members >= 0:
            os.close(members)
        os.close(directory)
    return True


def keep(path: str, linger_s: float) -> None:
    """Return once the cache is removed; at once if another keeper is at work."""
    try:
        directory = open_directory(path)
    except OSError:
        return
    ours = open_file(KEEPER, directory)
    for _ in range(ATTEMPTS):  # a process that looks whether there is a keeper holds the lock for microseconds
        if try_lock(ours, fcntl.LOCK_EX):
            break
        time.sleep(ATTEMPT_S)
    else:
        return
    members = open_file(MEMBERS, directory)
    while is_at(path, directory):
        fcntl.flock(members, fcntl.LOCK_EX)
        fcntl.flock(members, fcntl.LOCK_UN)
        time.sleep(linger_s)
        if remove_if_unused(path):
            return


def main() -> None:
    if os.fork():
        os._exit(0)  # the process that started us waits for this one only
    keep(sys.argv[1], float(sys.argv[2]))


if __name__ == "__main__":
    main()
