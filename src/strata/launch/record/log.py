"""Reading the log of a worker on and on, while it grows and through its rotations.

A log is two files: `rank-0.log`, which grows, and `rank-0.log.1`, what was written before it. When the first has half
of what a log may have, it takes the place of the second (see `warm`). A reader knows by the file's number on its disk,
and by how it begins, since numbers are used again, whether it has been moved since it last looked.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import TYPE_CHECKING, BinaryIO

from strata.launch.processes.warm import PREVIOUS
from strata.launch.record.failure import tail_start

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK_BYTES = 1 << 20
HEAD_BYTES = 64
MAX_LINE_BYTES = 64 << 10
"""A longer line is broken."""
MAX_TAIL_BYTES = 256 << 20
"""Of a log's end that are searched for its last lines."""
SKIPPED = b"\n[strata: lines are missing here; the log has outgrown its limit]\n"


def previous(path: Path) -> Path:
    """Where the older half of a log is, if it was ever rotated."""
    return path.with_name(path.name + PREVIOUS)


def append(path: Path, data: bytes, *, max_bytes: int) -> None:
    """Add to a log that came from another machine, within the same limit as there; 0 is none."""
    with contextlib.suppress(FileNotFoundError):
        if max_bytes and path.stat().st_size + len(data) > max_bytes // 2:
            path.replace(previous(path))
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)


class LogReader:
    """Reads on from where it was. The file is not kept open: there may be thousands."""

    def __init__(self, path: Path, num_lines: int | None = None) -> None:
        """`num_lines`: begin with the last so many; left out, with the oldest that there is."""
        self._path = path
        self._num_lines = num_lines
        self._inode = -1
        self._head = b""
        """What the file begins with."""
        self._offset = 0
        self._rest = b""
        """A line that is not ended yet."""

    def blocks(self) -> Iterator[bytes]:
        """What is new."""
        try:
            with self._path.open("rb") as file:
                if not self._is_same(file):
                    yield from self._finish_previous(file)
                self._head = self._head or _head(file)
                yield from self._read_on(file)
        except OSError:  # not there yet, or removed meanwhile
            return

    @property
    def unfinished(self) -> str:
        """The line that has no end yet; a progress bar has none for long."""
        return self._rest.decode(errors="replace")

    def lines(self, *, is_last_look: bool = False, max_blocks: int | None = None) -> Iterator[list[str]]:
        """What is new, in whole lines; at the last look, also the one that has no end. With `max_blocks` the rest is
        left for the next look.
        """
        for block in itertools.islice(self.blocks(), max_blocks):
            *whole, rest = (self._rest + block).split(b"\n")
            self._rest = rest[max(rest.rfind(b"\r", 0, -1), 0) :]  # a progress bar writes over itself
            if len(self._rest) > MAX_LINE_BYTES:
                whole.append(self._rest)
                self._rest = b""
            if whole:
                yield [line.decode(errors="replace") for line in whole]
        if is_last_look and self._rest:
            yield [self._rest.decode(errors="replace")]
            self._rest = b""

    def _finish_previous(self, current: BinaryIO) -> Iterator[bytes]:
        """What is left in the file before this one; then the reader stands at the beginning of this one."""
        is_first, num_lines, start = self._inode < 0, self._num_lines, 0
        if is_first and num_lines is not None:
            start = tail_start(current, num_lines, max_bytes=MAX_TAIL_BYTES)
        with contextlib.suppress(FileNotFoundError), previous(self._path).open("rb") as file:
            if not self._is_same(file):
                if not is_first:
                    yield SKIPPED
                self._begin(file)
                if is_first and num_lines is not None:
                    missing = num_lines - _num_lines(current) if start == 0 else 0
                    self._offset = tail_start(file, max(missing, 0), max_bytes=MAX_TAIL_BYTES)
            yield from self._read_on(file)
        self._begin(current)
        self._offset = start

    def _begin(self, file: BinaryIO) -> None:
        self._inode, self._head, self._offset = os.fstat(file.fileno()).st_ino, _head(file), 0

    def _is_same(self, file: BinaryIO) -> bool:
        return os.fstat(file.fileno()).st_ino == self._inode and _head(file).startswith(self._head)

    def _read_on(self, file: BinaryIO) -> Iterator[bytes]:
        file.seek(self._offset)
        while block := file.read(BLOCK_BYTES):
            self._offset += len(block)
            yield block


def _head(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read(HEAD_BYTES)


def _num_lines(file: BinaryIO) -> int:
    file.seek(0)
    return sum(block.count(b"\n") for block in iter(lambda: file.read(BLOCK_BYTES), b""))
