"""`strata ps`, `strata logs` and `strata rm`: the runs on this machine, what their workers wrote, and an end of both.

They know a run by what it leaves in its directory, so they work while it runs, after it, and when it was killed.
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

from strata.printing import counted, log_line, printable
from strata.terminal import Console, echo, echo_json, echo_log

if TYPE_CHECKING:
    from strata.launch.record.directory import LogFile, RunDirectory, RunStatus

NUM_RECENT = 10
"""Runs that are over and are listed all the same."""
POLL_S = 0.2
MAX_NAME = 40
MIN_COMMAND = 12
"""Characters of a table."""
_HEADINGS = ("name", "state", "workers", "step", "restarts", "age", "script")
_WIDE = 400
"""Columns, where no terminal says how many there are."""
_STATES = {"running": "green", "starting": "green", "stopping": "yellow", "failed": "red", "interrupted": "yellow"}


# -- ps ----------------------------------------------------------------------------------------------------------------


def ps(
    all_: Annotated[bool, typer.Option("--all", "-a", help="Also those that were over long ago.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List the runs on this machine, the newest first: those under way and the last ten."""
    from strata.clock import SystemClock  # noqa: PLC0415
    from strata.launch.record import directory  # noqa: PLC0415 (msgspec is behind it)

    runs = directory.all_runs()
    rows = [_row(run, run.status) for run in runs.found]
    listed = rows if all_ else recent(rows)
    if as_json:
        for row in listed:
            echo_json(row)
    elif rows:
        console = _console()
        console.print(_table(listed, now_s=SystemClock().wall_s(), width=console.width))
        if len(listed) < len(rows):
            echo(f"{counted(len(rows) - len(listed), 'older one', 'older ones')}: strata ps --all")
    else:
        echo(f"no runs in {printable(str(directory.root()))}")
    for why in runs.passed_over.values():
        echo(f"passed over: {printable(why)}", err=True)


def recent(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those under way, however old, and a few others; the order stays."""
    from strata.launch.record.directory import UNDER_WAY  # noqa: PLC0415

    over = (number for number, row in enumerate(rows) if row["state"] not in UNDER_WAY)
    kept = set(itertools.islice(over, NUM_RECENT))
    return [row for number, row in enumerate(rows) if number in kept or row["state"] in UNDER_WAY]


def _row(run: "RunDirectory", status: "RunStatus | None") -> dict[str, Any]:
    """All that programs are told of a run; its variables are not among it, for they may be secrets."""
    import msgspec  # noqa: PLC0415

    from strata.launch.record.directory import state_now  # noqa: PLC0415

    said = msgspec.to_builtins(status) if status else {}
    return {
        **said,
        "name": run.name,
        "state": state_now(status),
        "path": str(run.path),
        "script": run.spec.script,
        "arguments": list(run.spec.arguments),
        "is_module": run.spec.is_module,
        "workers": str(run.spec.workers),
        "max_restarts": run.spec.max_restarts,
        "created_at_s": run.created_at_s,
        "function": run.spec.function,
        "command": run.spec.command,
    }


def _table(rows: list[dict[str, Any]], *, now_s: float, width: int) -> Table:
    cells = [_cells(row, now_s) for row in rows]
    longest = [max(map(len, column)) for column in zip(_HEADINGS, *cells, strict=True)]
    # A name is folded, should it be very long; what was run is cut to what is left of the line.
    room = width - min(longest[0], MAX_NAME) - sum(longest[1:-1]) - 2 * len(_HEADINGS)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in _HEADINGS:
        is_number = heading in ("workers", "step", "restarts", "age")
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=heading != "name", overflow="fold")
    for name, state, *numbers, command in cells:
        command = printable(command, max_chars=max(room, MIN_COMMAND))
        table.add_row(Text(name), Text(state, style=_STATES.get(state, "")), *map(Text, (*numbers, command)))
    return table


def _cells(row: dict[str, Any], now_s: float) -> tuple[str, ...]:
    return (
        printable(row["name"]),
        row["state"],
        str(row.get("world_size") or row["workers"]),
        str(row.get("step", 0)),
        f"{row.get('num_restarts', 0)} of {row['max_restarts']}",
        age(now_s - row["created_at_s"]),
        printable(row["command"]),
    )


def age(seconds: float) -> str:
    """`5s`, `12m`, `3h`, `4d`; a clock that was set back makes nothing younger than 0."""
    for unit_s, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= unit_s:
            return f"{seconds // unit_s:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"


# -- logs --------------------------------------------------------------------------------------------------------------


def logs(
    name: Annotated[str, typer.Argument(metavar="RUN", help="Its name, or as much of the beginning as no other has.")],
    rank: Annotated[int | None, typer.Option(help="Of this worker only.", min=0)] = None,
    attempt: Annotated[int | None, typer.Option(help="Of this attempt only.", min=0)] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run is over, also through further attempts.")
    ] = False,
    lines: Annotated[int | None, typer.Option("--lines", "-n", help="Only the last so many of each.", min=0)] = None,
) -> None:
    """Print what the workers of a run wrote, in all attempts; in a failed one, the worker that failed first is first.

    With several workers, each line begins with the rank of its writer. On a terminal, colours are kept; all other
    control sequences are left out.
    """
    from strata.launch.record.directory import open_run  # noqa: PLC0415 (msgspec is behind it)

    run = open_run(name)
    wanted = Wanted(rank=rank, attempt=attempt, num_lines=lines, is_followed=follow)
    check(run, wanted)
    prefixes = _Prefixes(run, wanted)
    last_attempt = None
    for log, said in reading(run, wanted, pause=lambda: time.sleep(POLL_S)):
        if last_attempt != log.attempt:
            last_attempt = log.attempt
            failure = run.failure(log.attempt)
            if failure is not None:
                echo(f"attempt {log.attempt} failed: {failure.text}", err=True, style="red")
            elif log.attempt > 0:
                echo(f"attempt {log.attempt}", err=True, bold=True)
        prefix = prefixes.of(log.rank)
        echo_log(*(f"{prefix}{line}" for line in said))


class Wanted(NamedTuple):
    rank: int | None = None
    attempt: int | None = None
    num_lines: int | None = None
    """Of the end of each; None is all."""
    is_followed: bool = False


def check(run: "RunDirectory", wanted: Wanted) -> None:
    """Whether there is, or may still come, what is wanted.

    Raises:
        ConfigError: It is not there.
    """
    from strata.errors import ConfigError  # noqa: PLC0415

    if wanted.is_followed and _is_under_way(run):
        return
    found = run.logs()
    if not found:
        raise ConfigError(f"run {run.name} has no logs; its workers were never started")
    attempts = sorted({log.attempt for log in found})
    if wanted.attempt not in (None, *attempts):
        raise ConfigError(f"run {run.name} has no attempt {wanted.attempt}; it has {_span(attempts)}", field="attempt")
    ranks = sorted({log.rank for log in found if wanted.attempt in (None, log.attempt)})
    if wanted.rank not in (None, *ranks):
        of = f"run {run.name}" if wanted.attempt is None else f"attempt {wanted.attempt} of run {run.name}"
        raise ConfigError(f"{of} has no rank {wanted.rank}; it has {_span(ranks)}", field="rank")


def _span(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def reading(run: "RunDirectory", wanted: Wanted, *, pause: Callable[[], None]) -> "Iterator[tuple[LogFile, list[str]]]":
    """Blocks of lines, and whose they are. Following, it pauses between two looks, and ends with the run."""
    from strata.launch.record.log import LogReader  # noqa: PLC0415

    failed: dict[int, LogFile | None] = {}
    readers: dict[LogFile, LogReader] = {}
    done: set[LogFile] = set()
    num_lines = wanted.num_lines
    while True:
        # Asked before the logs are read: what was written before the end is read after it.
        is_over = not (wanted.is_followed and _is_under_way(run))
        found = run.logs()
        newest = max((log.attempt for log in found), default=0)
        is_over = is_over or (wanted.attempt is not None and newest > wanted.attempt)
        chosen = [log for log in found if _is_wanted(log, wanted) and log not in done]
        failed |= {log.attempt: run.first_failure(log.attempt) for log in chosen if log.attempt not in failed}
        for log in sorted(chosen, key=lambda log: (log.attempt, log != failed[log.attempt], log.rank)):
            if log not in readers:
                readers[log] = LogReader(log.path, num_lines)
            is_last_look = is_over or log.attempt < newest
            for lines in readers[log].lines(is_last_look=is_last_look):
                yield log, [log_line(line, with_colours=sys.stdout.isatty()) for line in lines]
            if is_last_look:
                done.add(log)
        if is_over:
            return
        if found:
            num_lines = None  # what comes from now on is new
        pause()


def _is_wanted(log: "LogFile", wanted: Wanted) -> bool:
    return wanted.rank in (None, log.rank) and wanted.attempt in (None, log.attempt)


def _is_under_way(run: "RunDirectory") -> bool:
    from strata.launch.record.directory import UNDER_WAY, state_now  # noqa: PLC0415

    return state_now(run.status) in UNDER_WAY


class _Prefixes:
    """`[3] `, in the colour of the rank; nothing where there is only one that could have written it."""

    def __init__(self, run: "RunDirectory", wanted: Wanted) -> None:
        highest = max((log.rank for log in run.logs()), default=0)
        highest = max(highest, run.spec.workers.at_most - 1)
        self._width = len(str(highest))
        self._is_used = wanted.rank is None and highest > 0

    def of(self, rank: int) -> str:
        if not self._is_used:
            return ""
        from strata.launch.record.view import rank_style  # noqa: PLC0415

        return typer.style(f"[{rank:{self._width}}] ", fg=rank_style(rank))


# -- rm ----------------------------------------------------------------------------------------------------------------


def rm(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="Names, or as much of the beginning as no other has.")
    ] = None,
    older_than: Annotated[
        str, typer.Option(metavar="TIME", help="All that ended longer ago, as 12h or 7d.", show_default=False)
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete runs that are over, with their logs and the checkpoints in their directories.

    A run that is under way stays, and so do checkpoints that are kept elsewhere (--checkpoints).
    """
    from strata.clock import SystemClock  # noqa: PLC0415
    from strata.errors import ConfigError  # noqa: PLC0415
    from strata.launch.record import directory  # noqa: PLC0415

    if not names and not older_than:
        raise typer.BadParameter("say which runs: names, or --older-than 7d")
    found = {run.name: run for run in map(directory.open_run, names or ())}
    for name in [name for name, run in found.items() if _is_under_way(run)]:
        raise ConfigError(f"run {name} is under way; stop it first: strata stop {name}", field="run")
    if older_than:
        before_s = SystemClock().wall_s() - _seconds(older_than)
        old = [run for run in directory.all_runs().found if _ended_at_s(run) < before_s]
        found |= {run.name: run for run in old if not _is_under_way(run)}
    if not found:
        echo(f"no run ended more than {older_than} ago")
        return
    if not yes:
        for run in found.values():
            echo(f"  {run.name}: {run.spec.command}, {_size(run)}")
        typer.confirm(f"Delete {counted(len(found), 'run')} with logs and checkpoints?", abort=True)
    for run in found.values():
        directory.remove(run)
        echo(f"{run.name} is deleted")


def _seconds(text: str) -> float:
    from strata.errors import ConfigError  # noqa: PLC0415

    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if match is None:
        raise ConfigError(f"--older-than {text!r} is no time; write it as 90m, 12h or 7d", field="older_than")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3_600, "d": 86_400}[match[2]]


def _ended_at_s(run: "RunDirectory") -> float:
    """When it was last heard of."""
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
    """The run of this name; without a name, the only one under way on this machine. None if there is none, or the user
    has said where to look instead.

    Raises:
        ConfigError: There is no such run, or several are under way; or both a run and another place are given.
    """
    from strata.errors import ConfigError  # noqa: PLC0415
    from strata.launch.record.directory import MAX_NAMED, UNDER_WAY, all_runs, open_run, state_now  # noqa: PLC0415

    if name is not None:
        if is_elsewhere:
            raise ConfigError(f"run {name} and an address are two places to look at; give one of them", field="run")
        return open_run(name)
    if is_elsewhere:
        return None
    live = [run for run in all_runs().found if state_now(run.status) in UNDER_WAY]
    if len(live) > 1:
        listed = ", ".join(run.name for run in live[:MAX_NAMED])
        raise ConfigError(f"{len(live)} runs are under way here; name one of them: {listed}", field="run")
    if live:
        echo(f"run {live[0].name}", err=True, bold=True)
    return live[0] if live else None


def _console() -> Console:
    """A pipe has no width: nothing is folded there."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
