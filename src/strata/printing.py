"""Text of others on our terminal: names of files, of runs, of metrics, the last words of a program.

Whoever made it may have put anything into it, so nothing in it is for the terminal to obey, and it has an end.
"""

from __future__ import annotations


def printable(text: str, *, max_chars: int | None = None) -> str:
    """What would move the cursor, or turn the writing round, is shown instead of done.

    This is not for markup of rich: there it goes through `rich.markup.escape` too, or into a `rich.text.Text`.
    """
    cut = text if max_chars is None else text[: max_chars + 1]
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
    return shown if max_chars is None or len(shown) <= max_chars else f"{shown[: max(max_chars - 1, 0)]}…"
