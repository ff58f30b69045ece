"""The one place where commands print. Whatever is handed over here is printed, never obeyed: see `strata.printing`.

- `echo` prints lines; a newline within one becomes visible, so that no text can pretend to be a line of ours.
- `echo_json` prints one object for programs, in ASCII.
- `Console` is rich's, for tables and styles. Foreign text in markup goes through `rich.markup.escape` first.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import rich.console
import typer
from rich.segment import Segment

from strata.printing import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import ConsoleOptions, RenderableType
    from rich.text import Text


def echo(*lines: str, err: bool = False, style: str | None = None, bold: bool | None = None) -> None:
    """Print lines; `style` is the name of a colour."""
    typer.secho("\n".join(map(printable, lines)), err=err, fg=style, bold=bold)


def echo_log(*lines: str) -> None:
    """Print lines of logs that have gone through `printing.log_line`, which has left them their colours at most."""
    typer.echo("\n".join(lines))


def echo_json(value: Any) -> None:
    """Print one object as a line of JSON."""
    typer.echo(as_json(value))


def as_json(value: Any) -> str:
    return json.dumps(value, default=str).replace("\x7f", "\\u007f")  # ASCII's only control that JSON leaves as it is


class Console(rich.console.Console):
    """A string is one line: newlines in it are shown, not printed. A `rich.text.Text` may have several."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "emoji": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable() or segment.text == "\n":
                yield segment
            else:
                lines = "\n".join(map(printable, segment.text.split("\n")))
                yield Segment(lines, segment.style)


def tame_logging() -> None:
    """Let warnings, which name files and quote other programs, be printed as safely as everything else."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Formatter())


class _Formatter(logging.Formatter):
    """A message is one line; the traceback below it has several."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).split("\n")))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return printable(super().formatMessage(record))
