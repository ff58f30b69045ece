"""Expand brace patterns as a shell does: `shards-{000000..000999}.tar`, `{train,val}/*.parquet`. Pure.

Ranges are whole numbers, padded to the width of the wider end if one begins with a zero. Braces that are neither a
range nor a list are ordinary characters, and so are unbalanced ones.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from strata.errors import LimitExceeded

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_PATHS: Final = 2_000_000
_BRACES: Final = re.compile(r"\{([^{}]*)\}")
_RANGE: Final = re.compile(r"(\d{1,18})\.\.(\d{1,18})(?:\.\.(\d{1,18}))?")


def expand(text: str, *, max_paths: int = MAX_PATHS) -> list[str]:
    """Return the paths of a pattern, in order; the text itself if it has no braces to expand.

    Raises:
        LimitExceeded: There are too many.
    """
    made = [""]
    position = 0
    for found in _BRACES.finditer(text):
        choices = _choices(found[1])
        if choices is None:
            continue
        before = text[position : found.start()]
        if len(made) * len(choices) > max_paths:
            raise LimitExceeded(
                f"path={text!r} expands to more than {max_paths:,} paths; pass a narrower one", field="path"
            )
        made = [path + before + choice for path in made for choice in choices]
        position = found.end()
    return [path + text[position:] for path in made]


class _Range:
    """The numbers of a range, as text."""

    def __init__(self, first: str, last: str, step: int) -> None:
        is_padded = any(len(end) > 1 and end[0] == "0" for end in (first, last))
        self._width = max(len(first), len(last)) if is_padded else 0
        low, high = int(first), int(last)
        self._numbers = range(low, high + 1, step) if low <= high else range(low, high - 1, -step)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        return (f"{number:0{self._width}}" for number in self._numbers)


def _choices(inside: str) -> _Range | list[str] | None:
    if matched := _RANGE.fullmatch(inside):
        return _Range(matched[1], matched[2], max(1, int(matched[3] or 1)))
    return inside.split(",") if "," in inside else None
