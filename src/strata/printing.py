"""Text of other programs, made fit for a terminal: names of files, runs and metrics, reasons, the lines of a log.

Whoever wrote it may have put anything into it, so nothing in it is for the terminal to obey, and it has an end. These
are pure functions; `strata.terminal` prints.
"""

from __future__ import annotations

import re

_ESCAPES = re.compile(
    r"""
      (?: \x1b\[ | \x9b ) [0-?]* [ -/]* [@-~]?                         # CSI: colours, cursor
    | (?: \x1b\] | \x9d ) [^\x07\x1b\x9c]* (?: \x07 | \x1b\\ | \x9c )? # OSC: titles, links, the clipboard
    | (?: \x1b[PX^_] | [\x90\x98\x9e\x9f] ) [^\x1b\x9c]* (?: \x1b\\ | \x9c )?  # DCS and such: until it is ended
    | \x1b [ -/]* [0-~]?                                               # all others
    """,
    re.VERBOSE,
)
_COLOURS = re.compile(r"(\x1b\[[0-9;:]*m)")
_RESET = "\x1b[0m"


def printable(text: str, *, max_chars: int | None = None) -> str:
    """One line without control characters (C0, C1), bidirectional controls or newlines: each becomes a visible escape.

    Markup of rich is left alone; where that is read, `rich.markup.escape` is needed, too.
    """
    cut = text if max_chars is None else text[: max_chars + 1]
    shown = cut if cut.isprintable() else "".join(map(_visible, cut))
    return shown if max_chars is None or len(shown) <= max_chars else f"{shown[: max(max_chars - 1, 0)]}…"


def _visible(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def log_line(line: str, *, with_colours: bool = False) -> str:
    """A line of a worker's log without what only a terminal understands, but for its colours if they are wanted.

    A progress bar writes over itself; what a reader would see is what it showed last.
    """
    shown = line.rstrip("\r\n").rpartition("\r")[2]
    kept = _COLOURS.findall(shown) if with_colours else []
    pieces = _COLOURS.split(shown) if kept else [shown]
    clean = "".join(piece if n % 2 else _without_controls(piece) for n, piece in enumerate(pieces))
    return clean.rstrip() + (_RESET if kept else "")


def _without_controls(text: str) -> str:
    text = _ESCAPES.sub("", text).expandtabs(4)
    return text if text.isprintable() else "".join(c if c.isprintable() else " " if c.isspace() else "" for c in text)


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 worker`, `2 workers`, `1,000 entries`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
