"""`strata ps`, `logs` and `rm`: list the runs on this machine, print their output, delete them.

These commands read only the run's directory, so they work while a run is active, after it has ended and after it was
killed. `choose_run` picks the run that `strata status` and `strata events` report on.
"""

import contextlib
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.table import Table
from rich.text import Text

from strata.printing import counted, in_bytes, log_line, printable
from strata.terminal import Console, echo, echo_json, echo_log

if TYPE_CHECKING:
    from strata.launch.record.directory import LogFile, RunDirectory, RunStatus

NUM_RECENT = 10
"""Ended runs that `strata ps` lists without `--all`."""
POLL_S = 0.2
MAX_NAME = 40
MIN_COMMAND = 12
"""Widths of table columns, in characters."""
_HEADINGS = ("name", "state", "workers", "servers", "step", "restarts", "age", "script")
_WIDE = 400
"""Width in characters when the output is not a terminal."""
STATE_COLORS = {"running": "green", "starting": "green", "stopping": "yellow", "failed": "red", "interrupted": "yellow"}


# -- ps ----------------------------------------------------------------------------------------------------------------


def ps(
    all_: Annotated[bool, typer.Option("--all", "-a", help="List all runs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List the runs on this machine, newest first.

    Lists active runs and the last ten that ended; --all lists all runs.
    """
    from strata.clock import SystemClock  # noqa: PLC0415
    from strata.launch.record import directory  # noqa: PLC0415 (imports msgspec)

    runs = directory.all_runs()
    rows = [_row(run, run.status) for run in runs.found]
    listed = rows if all_ else recent(rows)
    if as_json:
        for row in listed:
            echo_json(row)
    elif rows:
        screen = console()
        screen.print(_table(listed, now_s=SystemClock().wall_s(), width=screen.width))
        if len(listed) < len(rows):
            echo(f"{counted(len(rows) - len(listed), 'older run')} not shown; strata ps --all lists all")
    else:
        echo(f"no runs in {printable(str(directory.root()))}")
    for why in runs.unreadable.values():
        echo(f"skipped: {printable(why)}", err=True)


def recent(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the active runs and the newest of the others, in the same order."""
    from strata.launch.record.directory import UNDER_WAY  # noqa: PLC0415

    ended = (number for number, row in enumerate(rows) if row["state"] not in UNDER_WAY)
    kept = set(itertools.islice(ended, NUM_RECENT))
    return [row for number, row in enumerate(rows) if number in kept or row["state"] in UNDER_WAY]


def _row(run: "RunDirectory", status: "RunStatus | None") -> dict[str, Any]:
    """Return the JSON object of a run. It omits the environment variables, which may be secret."""
    import msgspec  # noqa: PLC0415

    from strata.launch.record.directory import state_now  # noqa: PLC0415

    reported = msgspec.to_builtins(status) if status else {}
    return {
        **reported,
        "name": run.name,
        "state": state_now(status),
        "path": str(run.path),
        "script": run.spec.script,
        "arguments": list(run.spec.arguments),
        "is_module": run.spec.is_module,
        "workers": str(run.spec.workers),
        "num_servers": status.num_servers if status else run.spec.num_servers,
        "servers": status.servers.as_plain() if status and status.servers else None,
        "max_restarts": run.spec.max_restarts,
        "created_at_s": run.created_at_s,
        "function": run.spec.function,
        "command": run.spec.command,
    }


def _table(rows: list[dict[str, Any]], *, now_s: float, width: int) -> Table:
    has_servers = any(row["num_servers"] for row in rows)
    headings = [heading for heading in _HEADINGS if has_servers or heading != "servers"]
    cells = [[cell for heading, cell in _cells(row, now_s).items() if heading in headings] for row in rows]
    longest = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    # A very long name wraps; the command is cut to the rest of the line.
    command_width = width - min(longest[0], MAX_NAME) - sum(longest[1:-1]) - 2 * len(headings)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        is_number = heading in ("workers", "step", "restarts", "age")
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=heading != "name", overflow="fold")
    for name, state, *numbers, command in cells:
        command = printable(command, max_chars=max(command_width, MIN_COMMAND))
        table.add_row(Text(name), Text(state, style=STATE_COLORS.get(state, "")), *map(Text, (*numbers, command)))
    return table


def _cells(row: dict[str, Any], now_s: float) -> dict[str, str]:
    world_size, num_servers = row.get("world_size", 0), row["num_servers"]
    return {
        "name": printable(row["name"]),
        "state": row["state"],
        "workers": str(world_size - num_servers if world_size else row["workers"]),
        "servers": _servers(row),
        "step": str(row.get("step", 0)),
        "restarts": f"{row.get('num_restarts', 0)} of {row['max_restarts']}",
        "age": age(now_s - row["created_at_s"]),
        "script": printable(row["command"]),
    }


def _servers(row: dict[str, Any]) -> str:
    """Return the number of servers, and what they hold: `2: 50,000 rows, 5.2 MiB`."""
    if not row["num_servers"]:
        return ""
    held = row["servers"]
    if held is None:
        return str(row["num_servers"])
    rate = "" if "pulls_per_s" not in held else f", {held['pulls_per_s']:,.0f} pulls/s"
    return f"{row['num_servers']}: {held['rows']:,} rows, {in_bytes(held['bytes'])}{rate}"


def age(seconds: float) -> str:
    """Return `5s`, `12m`, `3h` or `4d`; at least `0s`, even if the clock was set back."""
    for unit_s, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= unit_s:
            return f"{seconds // unit_s:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"


# -- logs --------------------------------------------------------------------------------------------------------------


def logs(
    name: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or a unique prefix of it.")],
    rank: Annotated[int | None, typer.Option(help="Print only the output of this rank.", min=0)] = None,
    server: Annotated[int | None, typer.Option(help="Print only the output of this parameter server.", min=0)] = None,
    attempt: Annotated[
        int | None, typer.Option(help="Print only this attempt; 0 is the first start of the run.", min=0)
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines until the run ends, across restarts.")
    ] = False,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", help="Print only the last N lines of each log.", min=0)
    ] = None,
) -> None:
    """Print the output of a run's workers and parameter servers.

    Prints all attempts in order; within a failed attempt, the worker that failed
    first comes first. With several workers, each line starts with the rank, or
    with the number of the server.
    Colors are kept on a terminal; other control sequences are removed.
    """
    from strata.launch.record.directory import open_run  # noqa: PLC0415 (imports msgspec)

    run = open_run(name)
    if server is not None:
        rank = rank_of_server(run, server, rank)
    selection = LogSelection(rank=rank, attempt=attempt, num_lines=lines, is_followed=follow)
    check_selection(run, selection)
    prefixes = _Prefixes(run, selection)
    last_attempt = None
    for log, block in read_logs(run, selection, pause=lambda: time.sleep(POLL_S)):
        if last_attempt != log.attempt:
            last_attempt = log.attempt
            failure = run.failure(log.attempt)
            if failure is not None:
                echo(f"attempt {log.attempt} failed: {failure.text}", err=True, style="red")
            elif log.attempt > 0:
                echo(f"attempt {log.attempt}", err=True, bold=True)
        prefix = prefixes.of(log.rank)
        echo_log(*(f"{prefix}{line}" for line in block))


def rank_of_server(run: "RunDirectory", server: int, rank: int | None) -> int:
    """Return the rank of a parameter server.

    Raises:
        ConfigError: The run has no such server, or a rank is given, too.
    """
    from strata.errors import ConfigError  # noqa: PLC0415

    if rank is not None:
        raise ConfigError("give either --rank or --server, not both", field="server")
    world_size, num_servers = _num_processes(run)
    if server >= num_servers:
        have = f"it has servers {_span(list(range(num_servers)))}" if num_servers else "it has none"
        raise ConfigError(f"run {run.name} has no server {server}; {have}", field="server")
    return world_size - num_servers + server


def _num_processes(run: "RunDirectory") -> tuple[int, int]:
    """Return the number of processes of a run, and how many of the last ones are servers."""
    status = run.status
    if status is None or not status.world_size:
        return run.spec.workers.at_most, run.spec.num_servers
    return status.world_size, status.num_servers


class LogSelection(NamedTuple):
    """Which lines `strata logs` prints; None selects everything."""

    rank: int | None = None
    attempt: int | None = None
    num_lines: int | None = None
    """Lines at the end of each log."""
    is_followed: bool = False


def check_selection(run: "RunDirectory", selection: LogSelection) -> None:
    """Check that the selected logs exist or may still appear.

    Raises:
        ConfigError: They do not exist, and the run has ended or is not followed.
    """
    from strata.errors import ConfigError  # noqa: PLC0415

    if selection.is_followed and _is_active(run):
        return
    found = run.logs()
    if not found:
        raise ConfigError(f"run {run.name} has no logs; its workers were never started")
    attempts = sorted({log.attempt for log in found})
    if selection.attempt not in (None, *attempts):
        raise ConfigError(
            f"run {run.name} has no attempt {selection.attempt}; it has {_span(attempts)}", field="attempt"
        )
    ranks = sorted({log.rank for log in found if selection.attempt in (None, log.attempt)})
    if selection.rank not in (None, *ranks):
        of = f"run {run.name}" if selection.attempt is None else f"attempt {selection.attempt} of run {run.name}"
        raise ConfigError(f"{of} has no rank {selection.rank}; it has {_span(ranks)}", field="rank")


def _span(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def read_logs(
    run: "RunDirectory", selection: LogSelection, *, pause: Callable[[], None]
) -> "Iterator[tuple[LogFile, list[str]]]":
    """Yield blocks of lines with their log file; when following, poll with pauses until the run ends."""
    from strata.launch.record.log import LogReader  # noqa: PLC0415

    failed: dict[int, LogFile | None] = {}
    readers: dict[LogFile, LogReader] = {}
    done: set[LogFile] = set()
    num_lines = selection.num_lines
    while True:
        # Checked before the logs are read, so that the last read includes everything written before the end.
        is_last = not (selection.is_followed and _is_active(run))
        found = run.logs()
        newest = max((log.attempt for log in found), default=0)
        is_last = is_last or (selection.attempt is not None and newest > selection.attempt)
        chosen = [log for log in found if _is_selected(log, selection) and log not in done]
        failed |= {log.attempt: run.first_failure(log.attempt) for log in chosen if log.attempt not in failed}
        for log in sorted(chosen, key=lambda log: (log.attempt, log != failed[log.attempt], log.rank)):
            if log not in readers:
                readers[log] = LogReader(log.path, num_lines)
            is_last_look = is_last or log.attempt < newest
            for lines in readers[log].lines(is_last_look=is_last_look):
                yield log, [log_line(line, with_colours=sys.stdout.isatty()) for line in lines]
            if is_last_look:
                done.add(log)
        if is_last:
            return
        if found:
            num_lines = None  # the limit applies to old lines only
        pause()


def _is_selected(log: "LogFile", selection: LogSelection) -> bool:
    return selection.rank in (None, log.rank) and selection.attempt in (None, log.attempt)


def _is_active(run: "RunDirectory") -> bool:
    from strata.launch.record.directory import UNDER_WAY, state_now  # noqa: PLC0415

    return state_now(run.status) in UNDER_WAY


class _Prefixes:
    """Line prefixes such as `[3] `, in the colour of the rank; empty if only one rank can appear."""

    def __init__(self, run: "RunDirectory", selection: LogSelection) -> None:
        highest = max((log.rank for log in run.logs()), default=0)
        highest = max(highest, run.spec.workers.at_most - 1)
        self._world_size, self._num_servers = _num_processes(run)
        self._width = 0 if self._num_servers else len(str(highest))
        self._is_used = selection.rank is None and highest > 0

    def of(self, rank: int) -> str:
        if not self._is_used:
            return ""
        from strata.launch.record.log import log_name  # noqa: PLC0415
        from strata.launch.record.screen import rank_style  # noqa: PLC0415

        name = log_name(rank, world_size=self._world_size, num_servers=self._num_servers)
        return typer.style(f"[{name:>{self._width}}] ", fg=rank_style(rank))


# -- rm ----------------------------------------------------------------------------------------------------------------


def rm(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="Names of runs, or unique prefixes of them.")
    ] = None,
    older_than: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Delete all runs that ended longer ago than this: 90m, 12h, 7d.", show_default=False
        ),
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
) -> None:
    """Delete ended runs with their logs and checkpoints.

    Never deletes active runs, or checkpoints that were saved outside the run's
    directory (--checkpoints).
    """
    from strata.clock import SystemClock  # noqa: PLC0415
    from strata.errors import ConfigError  # noqa: PLC0415
    from strata.launch.record import directory  # noqa: PLC0415

    if not names and not older_than:
        raise typer.BadParameter("name the runs to delete, or give --older-than 7d")
    found = {run.name: run for run in map(directory.open_run, names or ())}
    for name in [name for name, run in found.items() if _is_active(run)]:
        raise ConfigError(f"run {name} is active; stop it first: strata stop {name}", field="run")
    if older_than:
        before_s = SystemClock().wall_s() - duration_s(older_than, "older-than")
        old = [run for run in directory.all_runs().found if _ended_at_s(run) < before_s]
        found |= {run.name: run for run in old if not _is_active(run)}
    if not found:
        echo(f"no run ended more than {older_than} ago")
        return
    if not yes:
        for run in found.values():
            echo(f"  {run.name}: {run.spec.command}, {_size(run)}")
        typer.confirm(f"Delete {counted(len(found), 'run')} with logs and checkpoints?", abort=True)
    for run in found.values():
        directory.remove(run)
        echo(f"deleted {run.name}")


def duration_s(text: str, option: str) -> float:
    """Return the seconds of `90s`, `90m`, `12h` or `7d`.

    Raises:
        ConfigError: It is not a duration.
    """
    from strata.errors import ConfigError  # noqa: PLC0415

    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if match is None:
        raise ConfigError(
            f"--{option} {text!r} is not a duration; write it as 90m, 12h or 7d", field=option.replace("-", "_")
        )
    return float(match[1]) * {"s": 1, "m": 60, "h": 3_600, "d": 86_400}[match[2]]


def _ended_at_s(run: "RunDirectory") -> float:
    """Return the time of the run's last status."""
    status = run.status
    return max(run.created_at_s, status.updated_at_s if status is not None else 0.0)


def _size(run: "RunDirectory") -> str:
    num_bytes = 0
    for path in run.path.rglob("*"):
        with contextlib.suppress(OSError):
            num_bytes += path.lstat().st_blocks * 512
    return f"{num_bytes / (1 << 20):,.1f} MiB"


# -- shared by `strata status` and `strata events` --------------------------------------------------------------------


def choose_run(name: str | None, *, is_elsewhere: bool) -> "RunDirectory | None":
    """Return the run of this name; without a name, the only active run on this machine.

    Args:
        is_elsewhere: The user has given an address or a state instead, so without a name the result is None.

    Raises:
        ConfigError: The run does not exist, several runs are active, or both a run and an address are given.
    """
    from strata.errors import ConfigError  # noqa: PLC0415
    from strata.launch.record.directory import MAX_NAMED, UNDER_WAY, all_runs, open_run, state_now  # noqa: PLC0415

    if name is not None:
        if is_elsewhere:
            raise ConfigError(f"give either run {name} or an address, not both", field="run")
        return open_run(name)
    if is_elsewhere:
        return None
    active = [run for run in all_runs().found if state_now(run.status) in UNDER_WAY]
    if len(active) > 1:
        listed = ", ".join(run.name for run in active[:MAX_NAMED])
        raise ConfigError(f"{len(active)} runs are active on this machine; name one of them: {listed}", field="run")
    if active:
        echo(f"run {active[0].name}", err=True, bold=True)
    return active[0] if active else None


def console() -> Console:
    """Return a console that wraps lines only on a terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
