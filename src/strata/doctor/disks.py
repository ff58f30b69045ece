"""Checks of the file system that holds a directory: direct I/O, exclusive file names, flushed directories.

Each check tries the operation on temporary files with the functions that a save uses, because the type of a file system
does not report what it supports.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from strata.doctor.check import Check, Status
from strata.storage import files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK_BYTES = files.ALIGNMENT
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY, errno.EBADF)


def direct_io(name: str, directory: Path) -> Check:
    """Check that the file system supports reads and writes that bypass the page cache."""

    def look(existing: Path, scratch: Path) -> Check:
        refused = _try_direct(scratch / "direct")
        if refused:
            detail = f"the file system of {existing} does not support {refused}; saves use the page cache instead"
            cure = "for faster saves, keep checkpoints on ext4 or xfs"
            return Check(name=name, status=Status.WARNING, detail=detail, cure=cure)
        return Check(name=name, status=Status.OK, detail=f"works in {existing}")

    return _tried(name, directory, look)


def _try_direct(path: Path) -> str:
    """Return the unsupported operation; empty if all work."""
    with mmap.mmap(-1, BLOCK_BYTES) as block, memoryview(block) as view:  # mapped memory is aligned to pages
        fd = files.create(path, direct=True)
        try:
            if not files.is_direct(fd):
                return "O_DIRECT"
            files.write_all(fd, view, 0)
            files.sync(fd)
            if not files.is_direct(fd):
                return "writes with O_DIRECT"
        finally:
            os.close(fd)
        with files.opened(path, direct=True) as fd:
            files.read_all(fd, view, 0, path)
            return "" if files.is_direct(fd) else "reads with O_DIRECT"


def exclusive_create(name: str, directory: Path) -> Check:
    """Check that a name can be taken only once. A commit depends on it: of two writers, only one may succeed."""

    def look(existing: Path, scratch: Path) -> Check:
        first, second, link, target = (scratch / one for one in ("first", "second", "link", "target"))
        first.touch()
        second.touch()
        linked = True
        try:
            os.link(first, link)
        except OSError:
            linked = False
        try:
            files.publish_if_absent(first, target)
            with contextlib.suppress(FileExistsError):
                files.publish_if_absent(second, target)
                cure = "keep checkpoints on a local disk or in an object store, or let only one process write"
                detail = f"a second file replaced the first in {existing}; two writers may overwrite each other"
                return Check(name=name, status=Status.MISSING, detail=detail, cure=cure)
        except OSError as error:
            detail = f"{existing}: {error.strerror}; checkpoints cannot be committed there"
            cure = "keep checkpoints on another file system or in an object store"
            return Check(name=name, status=Status.MISSING, detail=detail, cure=cure)
        how = "works by hard links" if linked else "works by exclusive renames (no hard links)"
        return Check(name=name, status=Status.OK, detail=f"{how} in {existing}")

    return _tried(name, directory, look)


def directory_fsync(name: str, directory: Path, *, sync: Callable[[int], None] = files.sync) -> Check:
    """Check that a directory can be flushed. If not, a power failure may lose the name of a file that is on disk."""

    def look(existing: Path, scratch: Path) -> Check:
        fd = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync(fd)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            detail = (
                f"the file system of {existing} cannot flush directories ({error.strerror}); "
                "a power failure may lose the newest checkpoints, but not older ones"
            )
            cure = "to survive power failures, keep checkpoints on ext4 or xfs, or in an object store"
            return Check(name=name, status=Status.WARNING, detail=detail, cure=cure)
        finally:
            os.close(fd)
        return Check(name=name, status=Status.OK, detail=f"works in {existing}")

    return _tried(name, directory, look)


def nearest_existing(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if each.is_dir())


def _tried(name: str, directory: Path, look: Callable[[Path, Path], Check]) -> Check:
    existing = nearest_existing(directory.absolute())
    try:
        with _scratch(existing) as scratch:
            return look(existing, scratch)
    except OSError as error:
        cure = "make the directory writable and free some disk space"
        return Check(name=name, status=Status.WARNING, detail=f"{existing}: {error.strerror}", cure=cure)


@contextlib.contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=".strata-doctor-", dir=directory) as scratch:
        yield Path(scratch)
