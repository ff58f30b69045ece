"""The reference of the command line as Markdown, generated from the app itself.

.venv/bin/python scripts/cli_reference.py      prints it
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

import typer

from strata.cli.app import app
from strata.cli.exit_codes import MEANINGS

if TYPE_CHECKING:
    from collections.abc import Iterator

MARKER = "<!-- commands -->"
"""Where docs/reference/cli.md has the commands on the site."""


def reference() -> str:
    """Return a section for each command, in the order of `strata --help`, and the exit codes."""
    root = typer.main.get_command(app)
    sections = [_section(path, command) for path, command in commands(root)]
    codes = [f"| {code.value} | {meaning} |" for code, meaning in MEANINGS.items()]
    return "\n\n".join([*sections, "\n".join(["## Exit codes", "", "| Code | Meaning |", "|---|---|", *codes])])


def commands(command: Any, path: tuple[str, ...] = ("strata",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command below `command` with its path, a group before its commands."""
    for name, each in getattr(command, "commands", {}).items():
        if not each.hidden:
            yield (*path, name), each
            yield from commands(each, (*path, name))


def _section(path: tuple[str, ...], command: Any) -> str:
    context = typer.Context(command, info_name=" ".join(path))
    parts = [f"{'#' * len(path)} {' '.join(path)}", inspect.cleandoc(command.help or "")]
    if hasattr(command, "commands"):
        return "\n\n".join(parts)
    usage = " ".join(command.get_usage(context).removeprefix("Usage:").split())
    parts.append(f"```text\n{usage}\n```")
    records = [record for param in command.params if (record := param.get_help_record(context))]
    if records:
        rows = [f"| {_code(names)} | {_cell(text)} |" for names, text in records]
        parts.append("\n".join(["| Argument or flag | Meaning |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def _code(text: str) -> str:
    return f"`{_cell(' '.join(text.split()))}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference() + "\n")
