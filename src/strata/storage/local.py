"""A local directory as a store.

Large objects are written with O_DIRECT from several threads: the page cache would hold a second copy in memory, and
flushing it is slower and far less even. Where O_DIRECT is refused (tmpfs, some network and FUSE file systems), the same
threads write through the page cache and flush it at the end; `direct` records which way was used.

A file has a temporary name until it is complete, and temporary files are never listed. A killed process leaves its
temporary file behind: `sweep` removes it, and so does `delete` in directories that become empty.

The directory itself may be a symbolic link. Links inside it are not listed (`links` returns them), and nothing is
deleted through them, because their targets lie elsewhere. A key behind a link can be read.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import time
import uuid
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING

from strata.errors import ObjectExists, ObjectMissing, StorageDenied, StorageError, StorageFull, StorageUnavailable
from strata.storage import files
from strata.storage.base import TEMPORARY, Listed, Pool, byte_view, check_key, check_offset
from strata.storage.files import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from strata.storage.base import Watch

PIECE_BYTES = 8 << 20
NUM_THREADS = 4
LEFT_AFTER_S = 3_600.0
"""A temporary file that has not changed for this long has no live writer."""
_MAX_CREATES = 10


class LocalStore:
    """A directory of files, one per object."""

    def __init__(self, directory: Path | str) -> None:
        self.root = Path(directory).expanduser().absolute()
        self.url = str(self.root)
        self.direct: bool | None = None
        """Whether the last large object bypassed the page cache; None before the first."""
        self._pool = Pool(NUM_THREADS, "strata-disk")

    # -- writing ---------------------------------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        with self._new_file(key, direct=False, if_absent=if_absent) as fd:
            files.write_all(fd, byte_view(data), 0)

    def put_large(self, key: str, data: memoryview, *, watch: Watch | None = None) -> None:
        data = byte_view(data)
        with self._new_file(key, direct=files.is_aligned(data)) as fd:
            self._write_pieces(fd, data, watch, direct=files.is_direct(fd))
            os.ftruncate(fd, data.nbytes)  # the last block was rounded up to the alignment
            self.direct = files.is_direct(fd)

    @contextlib.contextmanager
    def _new_file(self, key: str, *, direct: bool, if_absent: bool = False) -> Iterator[int]:
        """Yield a descriptor to write to. The file gets its name when the block ends, and is removed if it fails."""
        path = self._path(key)
        temporary = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")  # a rename must stay in one directory
        with _translating(path, writing=True):
            fd = self._create(temporary, direct=direct)
            try:
                try:
                    yield fd
                    files.sync(fd)
                finally:
                    os.close(fd)
                _publish(temporary, path, if_absent=if_absent)
            except BaseException:
                temporary.unlink(missing_ok=True)
                self._remove_if_empty(path.parent)
                raise
            files.sync_directory(path.parent)

    def _create(self, temporary: Path, *, direct: bool) -> int:
        for _ in range(_MAX_CREATES):
            with contextlib.suppress(FileNotFoundError):  # `delete` has just removed the empty directory
                self._make_directory(temporary.parent)
                return files.create(temporary, direct=direct)
        raise StorageUnavailable(
            f"{temporary.parent} was removed {_MAX_CREATES} times right after it was created; "
            "stop the other process that removes it"
        )

    def _write_pieces(self, fd: int, data: memoryview, watch: Watch | None, *, direct: bool) -> None:
        whole = data.nbytes - data.nbytes % ALIGNMENT if direct else data.nbytes

        def write(start: int) -> None:
            if watch is not None:
                watch.check()
            piece = data[start : min(start + PIECE_BYTES, whole)]
            files.write_all(fd, piece, start)
            if watch is not None:
                watch.advance(piece.nbytes)

        self._all(write, range(0, whole, PIECE_BYTES))
        if whole < data.nbytes:
            with mmap.mmap(-1, ALIGNMENT) as block:
                block[: data.nbytes - whole] = data[whole:]
                with memoryview(block) as view:
                    files.write_all(fd, view, whole)
            if watch is not None:
                watch.advance(data.nbytes - whole)
        if watch is not None:
            watch.check()

    # -- reading ---------------------------------------------------------------------------------------------------

    def get(self, key: str, *, max_bytes: int) -> bytes:
        path = self._path(key)
        with _translating(path), open(path, "rb", opener=_open_at_once) as file:
            size = _check_is_file(os.fstat(file.fileno()), path).st_size
            if size > max_bytes:
                raise StorageError(f"{path} has {size} bytes, more than the limit of {max_bytes}")
            return file.read(max_bytes)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill `out`, bypassing the page cache where `offset` and `out` are aligned to 4 KiB."""
        path, out = self._path(key), byte_view(out)
        check_offset(offset)
        direct = offset % ALIGNMENT == 0 and out.nbytes >= PIECE_BYTES and files.is_aligned(out)
        whole = out.nbytes - out.nbytes % ALIGNMENT if direct else 0

        def read(start: int) -> None:
            files.read_all(fd, out[start : min(start + PIECE_BYTES, whole)], offset + start, path)

        with (
            _translating(path),
            files.opened(path, direct=direct) as fd,
        ):  # one descriptor: all bytes come from one object
            _check_is_file(os.fstat(fd), path)
            self._all(read, range(0, whole, PIECE_BYTES))
            if whole < out.nbytes:
                files.go_buffered(fd)
                files.read_all(fd, out[whole:], offset + whole, path)

    def size(self, key: str) -> int:
        path = self._path(key)
        with _translating(path):
            return _check_is_file(path.stat(), path).st_size

    def walk(self, prefix: str = "") -> Iterator[Listed]:
        top = self._path(prefix) if prefix else self.root
        found = []
        with _translating(top):
            for directory, _, names in os.walk(top, onerror=_raise_unless_gone):
                for name in names:
                    if name.startswith(TEMPORARY):
                        continue
                    path = Path(directory, name)
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        status = path.stat()
                        found.append(Listed(path.relative_to(self.root).as_posix(), status.st_size, status.st_mtime))
        yield from sorted(found, key=lambda listed: listed.key)

    def children(self, prefix: str = "") -> list[str]:
        top = self._path(prefix) if prefix else self.root
        with _translating(top):
            return sorted(name for name in _directories(top) if _holds_objects(top / name))

    def links(self) -> dict[str, Path]:
        """Return the symbolic links directly in the directory, with their targets, which may not exist."""
        with _translating(self.root):
            try:
                with os.scandir(self.root) as entries:
                    return {entry.name: Path(entry.path).readlink() for entry in entries if entry.is_symlink()}
            except (FileNotFoundError, NotADirectoryError):
                return {}

    # -- removing --------------------------------------------------------------------------------------------------

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, and directories that become empty.

        Raises:
            StorageDenied: A key lies behind a symbolic link.
        """
        parents = set()
        links = self.links()
        for key in keys:
            path = self._path(key)
            link, _, below = key.partition("/")
            if below and link in links:
                raise StorageDenied(
                    f"{self.root / link} is a symbolic link to {links[link]}; nothing is deleted through a link: "
                    "delete the link itself, and its target if it is no longer needed"
                )
            with _translating(path):
                _unlink_file(path)
            parents.add(path.parent)
        for parent in sorted(parents, key=lambda path: -len(path.parts)):
            self._remove_if_empty(parent)

    def sweep(self, older_than_s: float = LEFT_AFTER_S, *, prefix: str = "") -> int:
        """Remove temporary files and empty directories of killed writers below `prefix`; return the number of files.

        Files that changed in the last `older_than_s` stay, because their writers may be alive.
        """
        num_removed = 0
        top = self._path(prefix) if prefix else self.root
        with _translating(top):
            for directory, _, _ in os.walk(top, topdown=False, onerror=_raise_unless_gone):
                num_removed += _remove_left(Path(directory), older_than_s)
                if Path(directory) != self.root and _age_s(Path(directory)) >= older_than_s:
                    with contextlib.suppress(OSError):
                        Path(directory).rmdir()
        return num_removed

    def _remove_if_empty(self, directory: Path) -> None:
        """Remove the directory and its parents while they are empty. Temporary files of dead writers do not count."""
        while directory != self.root and directory.is_relative_to(self.root):
            with contextlib.suppress(OSError):
                if all(name.startswith(TEMPORARY) for name in os.listdir(directory)):  # noqa: PTH208 - names
                    _remove_left(directory, LEFT_AFTER_S)
            try:
                directory.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                return  # not empty
            directory = directory.parent

    def close(self) -> None:
        self._pool.shutdown()

    # -- within ----------------------------------------------------------------------------------------------------

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _make_directory(self, directory: Path) -> None:
        """Create the directory and its parents, each durable before anything is created in it."""
        missing = []
        while not directory.exists():
            missing.append(directory)
            directory = directory.parent
        for one in reversed(missing):
            # Not `exist_ok`: it stats the directory afterwards, which may have been removed again by then.
            with contextlib.suppress(FileExistsError):
                one.mkdir()
            files.sync_directory(one.parent)

    def _all(self, work: Callable[[int], None], starts: Iterable[int]) -> None:
        """Run `work` for each start in the pool. Raise only when all calls have ended, so that none still writes."""
        futures = [self._pool.submit(work, start) for start in starts]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
            wait(futures)


def _publish(temporary: Path, path: Path, *, if_absent: bool) -> None:
    if not if_absent:
        temporary.rename(path)
        return
    try:
        files.publish_if_absent(temporary, path)
    except FileExistsError:
        raise ObjectExists(f"{path} already exists") from None


def _open_at_once(path: str, flags: int) -> int:
    """Open without blocking: a named pipe would wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _check_is_file(status: os.stat_result, path: Path) -> os.stat_result:
    if not stat.S_ISREG(status.st_mode):
        raise ObjectMissing(f"{path} is a directory, not an object")
    return status


def _unlink_file(path: Path) -> None:
    """Delete the file if it exists; ignore a directory of that name, or a file in the place of its directory."""
    try:
        path.unlink(missing_ok=True)
    except (IsADirectoryError, NotADirectoryError):
        pass
    except PermissionError:  # what macOS raises for a directory
        if not path.is_dir():
            raise


def _directories(top: Path) -> list[str]:
    try:
        with os.scandir(top) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _holds_objects(directory: Path) -> bool:
    """Return whether the directory holds more than temporary files and empty directories."""
    below = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    below.append(Path(entry.path))
                elif not entry.name.startswith(TEMPORARY):
                    return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    return any(_holds_objects(one) for one in below)


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _remove_left(directory: Path, older_than_s: float) -> int:
    num_removed = 0
    for path in directory.glob(f"{TEMPORARY}*"):
        if _age_s(path) >= older_than_s:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                num_removed += 1
    return num_removed


def _raise_unless_gone(error: OSError) -> None:
    """Raise unless the directory was removed: an unreadable directory is not an empty one."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


@contextlib.contextmanager
def _translating(path: Path, *, writing: bool = False) -> Iterator[None]:
    """Translate errors of the system into `StorageError`."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise _translate(error, path, writing=writing) from error


def _translate(error: OSError, path: Path, *, writing: bool) -> StorageError:
    text = error.strerror or str(error)
    is_loop = error.errno == errno.ELOOP  # of symbolic links
    if is_loop or isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError | FileExistsError):
        if not writing:
            return ObjectMissing(f"{path} does not exist")
        return StorageError(
            f"{path}: {text}; in a directory, a key cannot be both an object and a prefix of others: choose another key"
        )
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return StorageDenied(f"{path}: {text}; check its owner and permissions, and whether it is mounted read-only")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StorageFull(f"{path}: {text}; free some space, keep fewer checkpoints, or raise the quota (ulimit -f)")
    return StorageUnavailable(f"{path}: {text}; check the system log (dmesg) and the health of the disk")
