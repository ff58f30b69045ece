"""`strata doctor`: check this machine and print how to fix what is missing."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from strata.cli.exit_codes import ExitCode
from strata.doctor import Check, Status, examine, is_healthy
from strata.terminal import Console, echo_json

_MARKS = {Status.OK: "[green]✓[/]", Status.WARNING: "[yellow]![/]", Status.MISSING: "[dim]–[/]"}
_ESSENTIAL_MARK = "[bold red]✗[/]"


def doctor(
    path: Annotated[
        Path | None,
        typer.Option("--path", help="Check the disk of this checkpoint directory. Default: the current directory."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this machine: Python, extras, disks, ports, limits.

    ✓ is fine, ! works with a limitation, – is optional and missing, ✗ is
    required and missing. The exit code is 1 only if something required is
    missing.
    """
    checks = examine(path)
    if as_json:
        echo_json({"ok": is_healthy(checks), "checks": [dataclasses.asdict(check) for check in checks]})
    else:
        _print_table(checks)
    raise typer.Exit(ExitCode.OK if is_healthy(checks) else ExitCode.FAILED)


def _print_table(checks: Sequence[Check]) -> None:
    from rich.markup import escape  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("fix", overflow="fold")
    for check in checks:
        mark = _ESSENTIAL_MARK if check.essential and check.status is Status.MISSING else _MARKS[check.status]
        is_optional = check.status is Status.MISSING and not check.essential
        found = f"[dim]optional:[/] {escape(check.detail)}" if is_optional else escape(check.detail)
        table.add_row(mark, escape(check.name), found, escape(check.cure))
    Console().print(table)
