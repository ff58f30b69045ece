"""Sanitize untrusted text for a terminal: names of files, runs and metrics, failure reasons, log lines.

Such text may contain escape sequences of any kind and length, so control characters become visible and lengths are
bounded. The functions are pure; `strata.terminal` prints.
"""

from __future__ import annotations

import re

_ESCAPES = re.compile(
    r"""
      (?: \x1b\[ | \x9b ) [0-?]* [ -/]* [@-~]?                         # CSI: colours, cursor
    | (?: \x1b\] | \x9d ) [^\x07\x1b\x9c]* (?: \x07 | \x1b\\ | \x9c )? # OSC: titles, links, the clipboard
    | (?: \x1b[PX^_] | [\x90\x98\x9e\x9f] ) [^\x1b\x9c]* (?: \x1b\\ | \x9c )?  # DCS, SOS, PM, APC: up to the terminator
    | \x1b [ -/]* [0-~]?                                               # all other sequences
    """,
    re.VERBOSE,
)
_COLOURS = re.compile(r"(\x1b\[[0-9;:]*m)")
_RESET = "\x1b[0m"


def printable(text: str, *, max_chars: int | None = None) -> str:
    """Return `text` as one line: control characters, bidirectional controls and newlines become visible escapes.

    Rich markup stays; escape it with `rich.markup.escape` where rich interprets it.
    """
    cut = text if max_chars is None else text[: max_chars + 1]
    shown = cut if cut.isprintable() else "".join(map(_visible, cut))
    return shown if max_chars is None or len(shown) <= max_chars else f"{shown[: max(max_chars - 1, 0)]}…"


def _visible(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def log_line(line: str, *, with_colours: bool = False) -> str:
    """Return a line of a worker's log without terminal control sequences; optionally keep its colours.

    Of a progress bar that overwrites itself, only the last state remains.
    """
    shown = line.rstrip("\r\n").rpartition("\r")[2]
    kept = _COLOURS.findall(shown) if with_colours else []
    pieces = _COLOURS.split(shown) if kept else [shown]
    clean = "".join(piece if n % 2 else _without_controls(piece) for n, piece in enumerate(pieces))
    return clean.rstrip() + (_RESET if kept else "")


def _without_controls(text: str) -> str:
    text = _ESCAPES.sub("", text).expandtabs(4)
    return text if text.isprintable() else "".join(c if c.isprintable() else " " if c.isspace() else "" for c in text)


def in_bytes(number: int) -> str:
    """Return a size with its unit: `950 B`, `5.2 MiB`, `1.3 GiB`."""
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1_024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1_024
    return f"{size:,.1f} TiB"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun: `1 worker`, `2 workers`, `1,000 entries`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
