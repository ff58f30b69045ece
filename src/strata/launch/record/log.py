"""Logs of workers: follow one while it grows, find the last lines and the cause of a failure, show new lines live.

A log is two files: `rank-0.log`, which grows, and `rank-0.log.1`, which holds what was written before. Once the first
has half of the bytes that a log may have, it replaces the second (see `warm`). A log may be gigabytes large, so its end
is read from the back. Its content comes from users' programs: control characters are removed before it is shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Literal, get_args

from strata.errors import ConfigError
from strata.identity import process_name
from strata.launch.environment import NOTE
from strata.launch.processes.warm import PREVIOUS
from strata.printing import log_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from strata.launch.record.directory import LogFile, RunDirectory
    from strata.launch.record.display import Display
    from strata.launch.record.timeline import RunEvent
    from strata.launch.record.view import RunView

BLOCK_BYTES = 1 << 20
HEAD_BYTES = 64
MAX_LINE_BYTES = 64 << 10
"""A longer line is broken."""
MAX_TAIL_BYTES = 256 << 20
"""Bytes at the end of a log that are searched for its last lines."""
SKIPPED = b"\n[strata: lines are missing here; the log has outgrown its limit]\n"


def previous(path: Path) -> Path:
    """Return the path of the older half of a log."""
    return path.with_name(path.name + PREVIOUS)


def append(path: Path, data: bytes, *, max_bytes: int) -> None:
    """Append to a log that comes from another machine, within the limit that holds there; 0: no limit."""
    with contextlib.suppress(FileNotFoundError):
        if max_bytes and path.stat().st_size + len(data) > max_bytes // 2:
            path.replace(previous(path))
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)


class LogReader:
    """Read a log from where the last read ended, across rotations.

    The file is not kept open, since there may be thousands. Its inode and its first bytes (inodes are reused) show
    whether it was rotated since.
    """

    def __init__(self, path: Path, num_lines: int | None = None) -> None:
        """`num_lines`: start with the last lines of this number; None: start with the oldest line."""
        self._path = path
        self._num_lines = num_lines
        self._inode = -1
        self._head = b""
        """First bytes of the file."""
        self._offset = 0
        self._rest = b""
        """The last line, as long as it has no end."""
        self._seen = (-1, 0, 0)
        """Inode, size and time of the file when all of it had been read."""

    def blocks(self) -> Iterator[bytes]:
        """Yield what is new."""
        try:
            found = os.stat(self._path)  # noqa: PTH116 - runs many times per second, and Path.stat takes twice as long
            seen = found.st_ino, found.st_size, found.st_mtime_ns
            if seen == self._seen:
                return
            with self._path.open("rb") as file:
                if not self._is_same(file):
                    yield from self._finish_previous(file)
                self._head = self._head or _head(file)
                yield from self._read_on(file)
            self._seen = seen
        except OSError:  # not created yet, or removed
            return

    @property
    def unfinished(self) -> str:
        """The line that has no end yet, such as a progress bar."""
        return self._rest.decode(errors="replace")

    def lines(self, *, is_last_look: bool = False, max_blocks: int | None = None) -> Iterator[list[str]]:
        """Yield what is new in whole lines; at the last look, also the line without an end. What `max_blocks` cuts off
        is left for the next look.
        """
        for block in itertools.islice(self.blocks(), max_blocks):
            *whole, rest = (self._rest + block).split(b"\n")
            self._rest = rest[max(rest.rfind(b"\r", 0, -1), 0) :]  # a progress bar overwrites itself
            if len(self._rest) > MAX_LINE_BYTES:
                whole.append(self._rest)
                self._rest = b""
            if whole:
                yield [line.decode(errors="replace") for line in whole]
        if is_last_look and self._rest:
            yield [self._rest.decode(errors="replace")]
            self._rest = b""

    def _finish_previous(self, current: BinaryIO) -> Iterator[bytes]:
        """Yield the rest of the file before this one, and move to the beginning of this one."""
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


# -- the end of a log --------------------------------------------------------------------------------------------------

MAX_END_BYTES = 64 << 10
"""Bytes at the end of a log that are searched for a cause."""
NUM_LAST_LINES = 20
"""Log lines of a failed worker that are shown."""
_TAIL_BLOCK_BYTES = 64 << 10


def last_words(path: Path) -> str:
    """Return the cause of a worker's end as far as its log has it, or an empty string."""
    return cause(last_lines(path))


def last_lines(path: Path, num_lines: int | None = None, *, max_bytes: int = MAX_END_BYTES) -> list[str]:
    """Return the last lines within the last `max_bytes`, without control characters; none if the log is unreadable."""
    data = _end_of(path, num_lines, max_bytes)
    if len(data) < max_bytes and (num_lines is None or data.count(b"\n") < num_lines):  # it was rotated a moment ago
        data = _end_of(previous(path), num_lines, max_bytes - len(data)) + data
    lines = [log_line(line) for line in data.decode(errors="replace").split("\n")]
    lines = lines[:-1] if lines and not lines[-1] else lines
    return lines if num_lines is None else lines[-num_lines:]


def _end_of(path: Path, num_lines: int | None, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(tail_start(file, num_lines, max_bytes=max_bytes))
            return file.read(max_bytes)
    except OSError:
        return b""


def tail_start(file: BinaryIO, num_lines: int | None, *, max_bytes: int) -> int:
    """Return the offset of the last lines; with None, of the first whole line within the last bytes."""
    end = file.seek(0, 2)
    if num_lines == 0:
        return end
    lowest = max(end - max_bytes, 0)
    position, left = end, num_lines
    first_newline = None
    while position > lowest:
        start = max(position - _TAIL_BLOCK_BYTES, lowest)
        file.seek(start)
        block = file.read(position - start)
        at = len(block)
        while (at := block.rfind(b"\n", 0, at)) >= 0:
            if start + at == end - 1:
                continue  # it ends the last line
            first_newline = start + at
            if left is not None:
                left -= 1
                if left <= 0:
                    return first_newline + 1
        position = start
    if lowest == 0:
        return 0
    return lowest if first_newline is None else first_newline + 1


# -- the cause of a failure --------------------------------------------------------------------------------------------

MAX_CAUSE_CHARS = 300
MAX_AFTER_TRACEBACK = 20
"""Lines that may follow the traceback of which a program died: the rest of a message, and library messages at exit.
If more follow, the exception was caught and the program continued.
"""
_TRACEBACK = "Traceback (most recent call last):"
_IGNORED = "Exception ignored in"
_FATAL = "Fatal Python error: "
_RANK_PREFIX = re.compile(r"\[rank\d+\]: ?")
"""Prefix that torch adds to the lines of a traceback."""
_MARGIN = " |+"
"""Characters that Python puts before the tracebacks of an exception group."""


def cause(lines: Sequence[str]) -> str:
    """Return the exception of a traceback, the name of an interpreter crash, or else the last line with text."""
    bare = [_RANK_PREFIX.sub("", line, count=1) if line.startswith("[rank") else line for line in lines]
    last_fatal = next((n for n in reversed(range(len(bare))) if bare[n].startswith(_FATAL)), -1)
    last_exception = _last_exception(bare)
    if last_exception > last_fatal and len(bare) - 1 - last_exception <= MAX_AFTER_TRACEBACK:
        return _shorten(bare[last_exception].lstrip(_MARGIN))
    if last_fatal >= 0:
        return _shorten(bare[last_fatal])
    return _shorten(next((line for line in reversed(bare) if line.strip() and not line.startswith(NOTE)), ""))


def _last_exception(lines: Sequence[str]) -> int:
    """Return the index of the last line of the last traceback that a program can die of, or -1."""
    for start in reversed(range(len(lines))):
        if not lines[start].endswith(_TRACEBACK) or (start and lines[start - 1].startswith(_IGNORED)):
            continue
        margin = len(lines[start]) - len(lines[start].lstrip(_MARGIN))
        for n in range(start + 1, len(lines)):
            line = lines[n][margin:]
            if line and not line.startswith(" "):
                return n
    return -1


def _shorten(line: str) -> str:
    line = line.strip()
    return line if len(line) <= MAX_CAUSE_CHARS else f"{line[: MAX_CAUSE_CHARS - 1]}…"


# -- live output -------------------------------------------------------------------------------------------------------

UPDATE_S = 0.1
LIST_S = 0.5
"""Seconds between two listings of the logs, which take longer than to look for new lines."""
UNFINISHED_S = 10.0
"""Seconds without a new line after which one without an end, such as a progress bar, is shown."""
MAX_BLOCKS = 4
"""Blocks of a rank's log per update. The output of a worker that writes more for long is shown in part."""
REST = "[strata: the rest of this attempt's output is in its log]"
Which = Literal["auto", "all", "rank0", "none"]
"""Whose output to show. `auto` is rank 0."""


def log_name(rank: int, *, world_size: int, num_servers: int) -> str:
    """Return the prefix of a line: `1`, or `server 0`."""
    return process_name(rank, world_size=world_size, num_servers=num_servers).removeprefix("rank ")


def parse_which(text: str) -> Which:
    """
    Raises:
        ConfigError: The text is not one of the choices.
    """
    for each in get_args(Which):
        if text == each:
            found: Which = each
            return found
    choices = ", ".join(get_args(Which))
    raise ConfigError(f"logs={text!r} is not one of {choices}; choose one of them", field="logs")


@dataclass(slots=True)
class _Reading:
    reader: LogReader
    shown_s: float
    unfinished: str = ""


class LogStream:
    """A `Display` that shows the new lines of workers before everything else that it is given.

    It reads the logs in the run's directory, as `strata logs --follow` does. So it works alike for workers on this
    machine and on a cluster, and cannot slow them down.
    """

    def __init__(self, directory: RunDirectory, display: Display, which: Which) -> None:
        self._directory = directory
        self._display = display
        self._which = which
        before = directory.status
        self._first_attempt = 0 if before is None else before.attempt + 1  # earlier ones were shown while they ran
        self._readings: dict[LogFile, _Reading] = {}
        self._logs: list[LogFile] = []
        self._listed_s = -LIST_S
        self._has_prefix = directory.spec.workers.at_most > 1
        self._world_size, self._num_servers = directory.spec.workers.at_most, directory.spec.num_servers

    def show(self, view: RunView) -> None:
        self._world_size, self._num_servers = view.world_size, view.num_servers
        self.update()
        self._display.show(view)

    def print_event(self, event: RunEvent) -> None:
        self._logs = []  # an event may concern a new attempt, whose output comes first
        self.update()
        self._display.print_event(event)

    def write(self, rank: int | None, lines: list[str], *, name: str = "") -> None:
        self._display.write(rank, lines, name=name)

    def close(self) -> None:
        self.update(is_last=True)
        self._display.close()

    async def run(self) -> None:
        """Update until it is cancelled, if there is anything to show."""
        while self._which != "none":
            self.update()
            await asyncio.sleep(UPDATE_S)

    def update(self, *, is_last: bool = False) -> None:
        if self._which == "none":
            return
        now_s = time.monotonic()
        if is_last or not self._logs or now_s >= self._listed_s + LIST_S:
            logs = self._directory.logs(first_attempt=self._first_attempt)
            self._logs = [log for log in logs if self._is_wanted(log)]
            self._listed_s = now_s
        newest = max((log.attempt for log in self._logs), default=self._first_attempt)
        for log in self._logs:
            reading = self._readings.setdefault(log, _Reading(LogReader(log.path), now_s))
            is_over = is_last or log.attempt < newest
            num_blocks = 0
            for lines in reading.reader.lines(is_last_look=is_over, max_blocks=None if is_last else MAX_BLOCKS):
                self._write(log, lines)
                reading.shown_s = now_s
                num_blocks += 1
            if is_over and not is_last and num_blocks >= MAX_BLOCKS:  # do not delay the next attempt
                self._write(log, [REST])
            if now_s - reading.shown_s > UNFINISHED_S and reading.reader.unfinished not in ("", reading.unfinished):
                reading.unfinished, reading.shown_s = reading.reader.unfinished, now_s
                self._write(log, [reading.unfinished])
        self._first_attempt = newest
        self._logs = [log for log in self._logs if log.attempt == newest]
        self._readings = {log: reading for log, reading in self._readings.items() if log.attempt == newest}

    def _write(self, log: LogFile, lines: list[str]) -> None:
        name = log_name(log.rank, world_size=self._world_size, num_servers=self._num_servers)
        self._display.write(log.rank if self._has_prefix else None, lines, name=name)

    def _is_wanted(self, log: LogFile) -> bool:
        return self._which == "all" or log.rank == 0
