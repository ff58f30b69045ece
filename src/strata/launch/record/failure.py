"""The end of a worker's log, quickly: what it wrote last, and of what it died.

A log may be gigabytes, so it is read from its end. What is in it was written by somebody's program: colours, cursor
movements and other control characters are taken out, and a progress bar is what it last showed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, BinaryIO

from strata.launch.environment import NOTE
from strata.launch.processes.warm import PREVIOUS
from strata.printing import log_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MAX_BYTES = 64 << 10
"""Of the end of a log that are looked at for a cause."""
NUM_LAST_LINES = 20
"""Of its log that are shown of a worker that has failed."""
MAX_CHARS = 300
"""Of a cause."""
MAX_AFTER_TRACEBACK = 20
"""Lines that may follow a traceback of which a program died: the rest of a message, and complaints of libraries at
exit. After more than that it was caught, and the program went on.
"""
_BLOCK_BYTES = 64 << 10
_TRACEBACK = "Traceback (most recent call last):"
_IGNORED = "Exception ignored in"
_FATAL = "Fatal Python error: "

_OF_RANK = re.compile(r"\[rank\d+\]: ?")
"""What torch puts before the lines of a traceback."""
_MARGIN = " |+"
"""What Python puts before the lines of the tracebacks in an exception group."""


def last_words(path: Path) -> str:
    """The cause, as far as the log tells it; empty if it tells nothing."""
    return cause(last_lines(path))


def last_lines(path: Path, num_lines: int | None = None, *, max_bytes: int = MAX_BYTES) -> list[str]:
    """The last lines that lie within the last `max_bytes`, cleaned. None of a log that cannot be read: a worker's end
    is told of, with its last words or without.
    """
    data = _end_of(path, num_lines, max_bytes)
    if len(data) < max_bytes and (num_lines is None or data.count(b"\n") < num_lines):  # it was rotated a moment ago
        data = _end_of(path.with_name(path.name + PREVIOUS), num_lines, max_bytes - len(data)) + data
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
    """Where the last lines begin; None: as many as lie within the last bytes, the first of them a whole one."""
    end = file.seek(0, 2)
    if num_lines == 0:
        return end
    lowest = max(end - max_bytes, 0)
    position, left = end, num_lines
    first_newline = None
    while position > lowest:
        start = max(position - _BLOCK_BYTES, lowest)
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


# -- pure --------------------------------------------------------------------------------------------------------------


def cause(lines: Sequence[str]) -> str:
    """Of a Python traceback its exception; of a crash of the interpreter its name; else the last line with a word."""
    bare = [_OF_RANK.sub("", line, count=1) if line.startswith("[rank") else line for line in lines]
    last_fatal = next((n for n in reversed(range(len(bare))) if bare[n].startswith(_FATAL)), -1)
    last_exception = _last_exception(bare)
    if last_exception > last_fatal and len(bare) - 1 - last_exception <= MAX_AFTER_TRACEBACK:
        return _bounded(bare[last_exception].lstrip(_MARGIN))
    if last_fatal >= 0:
        return _bounded(bare[last_fatal])
    return _bounded(next((line for line in reversed(bare) if line.strip() and not line.startswith(NOTE)), ""))


def _last_exception(lines: Sequence[str]) -> int:
    """The line that a traceback ends with; -1 if there is none that a program could have died of."""
    for start in reversed(range(len(lines))):
        if not lines[start].endswith(_TRACEBACK) or (start and lines[start - 1].startswith(_IGNORED)):
            continue
        margin = len(lines[start]) - len(lines[start].lstrip(_MARGIN))
        for n in range(start + 1, len(lines)):
            line = lines[n][margin:]
            if line and not line.startswith(" "):
                return n
    return -1


def _bounded(line: str) -> str:
    line = line.strip()
    return line if len(line) <= MAX_CHARS else f"{line[: MAX_CHARS - 1]}…"
