"""File operations that hide the differences between file systems and kernels.

O_DIRECT may be missing (macOS), or refused when a file is opened (tmpfs) or written (some network and FUSE file
systems). Some file systems lack hard links, `fsync` of a directory or exclusive renames. A failed `fsync` is never
retried: the kernel has already dropped the pages and would report success.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import sys
from typing import TYPE_CHECKING

from strata.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ALIGNMENT = 4_096
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_F_NOCACHE = 48
"""The macOS counterpart of O_DIRECT."""
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY)
_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCL = -100, 1, 4


def is_aligned(data: memoryview) -> bool:
    """Return whether O_DIRECT accepts this memory."""
    import numpy as np  # noqa: PLC0415 - only large objects need it

    return data.nbytes >= ALIGNMENT and bool(np.frombuffer(data, np.uint8).ctypes.data % ALIGNMENT == 0)


def create(path: Path, *, direct: bool) -> int:
    """Create a file and return its descriptor; with `direct`, bypass the page cache if the file system allows it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if direct and _O_DIRECT:
        try:
            return os.open(path, flags | _O_DIRECT, 0o666)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            path.unlink(missing_ok=True)  # refused after the file was created
    fd = os.open(path, flags, 0o666)
    _bypass_on_mac(fd, direct=direct)
    return fd


@contextlib.contextmanager
def opened(path: Path, *, direct: bool) -> Iterator[int]:
    """Open a file for reading; with `direct`, bypass the page cache if the file system allows it."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | (_O_DIRECT if direct else 0))
    except OSError as error:
        if not (direct and _O_DIRECT) or error.errno not in _UNSUPPORTED:
            raise
        fd = os.open(path, flags)
    try:
        _bypass_on_mac(fd, direct=direct)
        yield fd
    finally:
        os.close(fd)


def is_direct(fd: int) -> bool:
    """Return whether the descriptor bypasses the page cache."""
    return bool(_O_DIRECT and fcntl.fcntl(fd, fcntl.F_GETFL) & _O_DIRECT)


def go_buffered(fd: int) -> None:
    """Use the page cache from now on, in every thread that uses the descriptor."""
    if is_direct(fd):
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_O_DIRECT)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`."""
    while data.nbytes:
        direct = is_direct(fd)  # read first: another thread may switch it to buffered meanwhile
        try:
            num = os.pwrite(fd, data, offset)
        except OSError as error:
            if error.errno not in _UNSUPPORTED or not direct:
                raise
            go_buffered(fd)  # the open with O_DIRECT succeeded, the write did not
            continue
        if num == 0:
            raise OSError(errno.EIO, "the system wrote nothing and reported no error")
        data, offset = data[num:], offset + num


def read_all(fd: int, out: memoryview, offset: int, path: Path) -> None:
    """Fill `out` from `offset`.

    Raises:
        StorageError: The file ends before `out` is full.
    """
    while out.nbytes:
        direct = is_direct(fd)
        try:
            num = _pread_into(fd, out, offset)
        except OSError as error:
            if error.errno not in _UNSUPPORTED or not direct:
                raise
            go_buffered(fd)
            continue
        if num == 0:
            raise StorageError(f"{path} ends at byte {offset}, before byte {offset + out.nbytes}")
        out, offset = out[num:], offset + num


def _pread_into(fd: int, out: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [out], offset)
    piece = os.pread(fd, out.nbytes, offset)  # macOS before 11
    out[: len(piece)] = piece
    return len(piece)


def sync(fd: int) -> None:
    """Flush the file to the medium. A failure is final."""
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync leaves the bytes in the drive's cache
    if full is not None:
        try:
            fcntl.fcntl(fd, full)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        else:
            return
    os.fsync(fd)


def sync_directory(directory: Path) -> None:
    """Flush a directory, so that its names survive a crash. File systems without support are skipped."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(fd)
    except OSError as error:
        if error.errno not in (*_UNSUPPORTED, errno.EBADF):
            raise
    finally:
        os.close(fd)


def publish_if_absent(temporary: Path, path: Path) -> None:
    """Give a file its final name, unless another file has it.

    Raises:
        FileExistsError: Another file has the name.
    """
    try:
        os.link(temporary, path)  # unlike a rename, it fails if the name exists
    except FileExistsError:
        if temporary.stat().st_nlink < 2:
            raise
        # NFS: the link was created, the answer was lost, and the retry found the link.
    except OSError as error:
        if error.errno not in (*_UNSUPPORTED, errno.EPERM, errno.EMLINK):
            raise
        _rename_if_absent(temporary, path)  # exFAT and many FUSE and SMB file systems have no hard links
        return
    temporary.unlink()


def _rename_if_absent(temporary: Path, path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    source, target = os.fsencode(temporary), os.fsencode(path)
    if sys.platform == "darwin":
        failed = libc.renamex_np(source, target, _RENAME_EXCL)
    else:
        failed = libc.renameat2(_AT_FDCWD, source, _AT_FDCWD, target, _RENAME_NOREPLACE)
    if not failed:
        return
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        raise OSError(number, "this file system has neither hard links nor exclusive renames")
    raise OSError(number, os.strerror(number), str(path))


def _bypass_on_mac(fd: int, *, direct: bool) -> None:
    if direct and sys.platform == "darwin":
        fcntl.fcntl(fd, _F_NOCACHE, 1)
