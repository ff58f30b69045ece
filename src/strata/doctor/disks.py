"""What the file system of a directory can do for checkpoints, and what happens instead where it cannot.

It is tried, with the functions that a save uses, on files that are removed again: no table of file systems is right.
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
    """Does the file system take a write past the page cache, and give it back?"""

    def look(place: Path, scratch: Path) -> Check:
        refused = _try_direct(scratch / "direct")
        if refused:
            detail = f"the file system of {place} refuses {refused}; saves go through the page cache instead"
            cure = "for speed, keep checkpoints on ext4 or xfs"
            return Check(name=name, status=Status.WARNING, detail=detail, cure=cure)
        return Check(name=name, status=Status.OK, detail=f"works in {place}")

    return _tried(name, directory, look)


def _try_direct(path: Path) -> str:
    """What was refused; empty: nothing was."""
    with mmap.mmap(-1, BLOCK_BYTES) as block, memoryview(block) as view:  # mapped memory starts on a page: aligned
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


def exclusive_names(name: str, directory: Path) -> Check:
    """Can a file get a name only if there is none such? A commit is one: of two writers, one may succeed."""

    def look(place: Path, scratch: Path) -> Check:
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
                cure = "keep checkpoints on a local disk or in an object store, or let only one process write there"
                detail = f"a second file took the name of the first in {place}; two writers may overwrite each other"
                return Check(name=name, status=Status.MISSING, detail=detail, cure=cure)
        except OSError as error:
            detail = f"{place}: {error.strerror}; no checkpoint can be committed there"
            cure = "keep checkpoints on another file system, or in an object store"
            return Check(name=name, status=Status.MISSING, detail=detail, cure=cure)
        how = "hard links" if linked else "no hard links; saves are committed by exclusive renames instead,"
        return Check(name=name, status=Status.OK, detail=f"{how} in {place}")

    return _tried(name, directory, look)


def flushed_names(name: str, directory: Path, *, sync: Callable[[int], None] = files.sync) -> Check:
    """Can a directory be flushed? Else a file may be safe on the disk, and its name may not."""

    def look(place: Path, scratch: Path) -> Check:
        fd = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync(fd)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            detail = (
                f"the file system of {place} flushes no directories ({error.strerror}); "
                "when the machine loses power, the newest checkpoints may be gone, those before them are not"
            )
            cure = "if that matters, keep checkpoints on ext4 or xfs, or in an object store"
            return Check(name=name, status=Status.WARNING, detail=detail, cure=cure)
        finally:
            os.close(fd)
        return Check(name=name, status=Status.OK, detail=f"a directory can be flushed in {place}")

    return _tried(name, directory, look)


def nearest_existing(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.is_dir())


def _tried(name: str, directory: Path, look: Callable[[Path, Path], Check]) -> Check:
    place = nearest_existing(directory.absolute())
    try:
        with _scratch(place) as scratch:
            return look(place, scratch)
    except OSError as error:
        cure = "make the directory writable, with room on the disk"
        return Check(name=name, status=Status.WARNING, detail=f"{place}: {error.strerror}", cure=cure)


@contextlib.contextmanager
def _scratch(place: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=".strata-doctor-", dir=place) as scratch:
        yield Path(scratch)
