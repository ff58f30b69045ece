"""The only module that prints to the terminal. All text is sanitized by `strata.printing`.

- `echo` prints lines and makes newlines inside a line visible, so that untrusted text cannot imitate our output.
- `echo_json` prints one object for programs, in ASCII.
- `Console` is a rich console for tables and styles. Escape untrusted text in markup with `rich.markup.escape`.
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
    """Print lines; `style` names a colour."""
    typer.secho("\n".join(map(printable, lines)), err=err, fg=style, bold=bold)


def echo_log(*lines: str) -> None:
    """Print log lines that `printing.log_line` has sanitized; they may contain colours."""
    typer.echo("\n".join(lines))


def echo_json(value: Any) -> None:
    """Print one object as a line of JSON."""
    typer.echo(as_json(value))


def as_json(value: Any) -> str:
    return json.dumps(value, default=str).replace(
        "\x7f", "\\u007f"
    )  # the only ASCII control character that JSON does not escape


class Console(rich.console.Console):
    """A rich console that prints every string as one line, newlines made visible; a `rich.text.Text` may span lines."""

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
    """Sanitize log messages on stderr, which name files and quote other programs."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Formatter())


class _Formatter(logging.Formatter):
    """Format a message as one line; the traceback below it keeps its lines."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).split("\n")))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return printable(super().formatMessage(record))
