"""`strata ps` and `strata logs`: which runs there are on this machine, and what their workers wrote.

Both only read what a run leaves in its directory, so they work while it runs, after it, and when it was killed.
"""

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from strata.printing import printable

if TYPE_CHECKING:
    from strata.launch.run_directory import LogFile, RunDirectory, RunStatus
    from strata.launch.spec import RunSpec

NUM_RECENT = 10
"""Runs that are over and are listed all the same."""
POLL_S = 0.2
BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 10
"""A longer line is broken."""
MAX_TAIL_BYTES = 256 << 20
"""Of a log's end that are searched for its last lines."""
MAX_NAME = 40
MIN_COMMAND = 12
"""Characters of a table."""
_HEADINGS = ("name", "state", "workers", "step", "restarts", "age", "script")
_WIDE = 400
"""Columns, where no terminal says how many there are."""
_STATES = {"running": "green", "starting": "green", "stopping": "yellow", "failed": "red", "interrupted": "yellow"}
_RANKS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")


# -- ps ----------------------------------------------------------------------------------------------------------------


def ps(
    all_: Annotated[bool, typer.Option("--all", "-a", help="Also those that were over long ago.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List the runs on this machine, the newest first: those under way and the last ten."""
    from strata.clock import SystemClock  # noqa: PLC0415
    from strata.launch import run_directory  # noqa: PLC0415 (msgspec is behind it)

    runs = run_directory.all_runs()
    rows = [_row(run, run.status) for run in runs.found]
    listed = rows if all_ else recent(rows)
    if as_json:
        for row in listed:
            typer.echo(json.dumps(row))
    elif rows:
        console = _console()
        console.print(_table(listed, now_s=SystemClock().wall_s(), width=console.width))
        if len(listed) < len(rows):
            typer.echo(f"{len(rows) - len(listed)} older ones: strata ps --all")
    else:
        typer.echo(f"no runs in {printable(str(run_directory.root()))}")
    for why in runs.passed_over.values():
        typer.echo(f"passed over: {printable(why)}", err=True)


def recent(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those under way, however old, and a few others; the order stays."""
    from strata.launch.run_directory import UNDER_WAY  # noqa: PLC0415

    over = (number for number, row in enumerate(rows) if row["state"] not in UNDER_WAY)
    kept = set(itertools.islice(over, NUM_RECENT))
    return [row for number, row in enumerate(rows) if number in kept or row["state"] in UNDER_WAY]


def _row(run: "RunDirectory", status: "RunStatus | None") -> dict[str, Any]:
    """All that programs are told of a run; its variables are not among it, for they may be secrets."""
    import msgspec  # noqa: PLC0415

    from strata.launch.run_directory import state_now  # noqa: PLC0415

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
        "command": _command(run.spec),
    }


def _command(spec: "RunSpec") -> str:
    """As one would type it, but for the directory of the script."""
    import shlex  # noqa: PLC0415

    script = ["-m", spec.script] if spec.is_module else [spec.script.rpartition("/")[2]]
    return shlex.join([*script, *spec.arguments])


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
        f"{min(row.get('num_failures', 0), row['max_restarts'])} of {row['max_restarts']}",
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
    attempt: Annotated[int | None, typer.Option(help="Of this attempt; left out, of the newest.", min=0)] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run is over, also through further attempts.")
    ] = False,
    lines: Annotated[int | None, typer.Option("--lines", "-n", help="Only the last so many of each.", min=0)] = None,
) -> None:
    """Print what the workers of a run wrote. Of a failed attempt, the worker that failed first comes first.

    With several workers, each line begins with the rank of its writer. Control sequences are left out.
    """
    from strata.launch.run_directory import open_run  # noqa: PLC0415 (msgspec is behind it)

    run = open_run(name)
    wanted = Wanted(rank=rank, attempt=attempt, num_lines=lines, is_followed=follow)
    check(run, wanted)
    prefixes = _Prefixes(run, wanted)
    if rank is None and (failure := run.failure(attempt)) is not None:
        typer.secho(f"failed first: {printable(failure.text)}", err=True, fg="red")
    last_attempt = None
    for log, said in reading(run, wanted, pause=lambda: time.sleep(POLL_S)):
        if last_attempt not in (None, log.attempt):
            typer.secho(f"attempt {log.attempt}", err=True, bold=True)
        last_attempt = log.attempt
        prefix = prefixes.of(log.rank)
        typer.echo("\n".join(f"{prefix}{line}" for line in said))


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
    attempt = attempts[-1] if wanted.attempt is None else wanted.attempt
    if attempt not in attempts:
        raise ConfigError(f"run {run.name} has no attempt {attempt}; it has {_span(attempts)}", field="attempt")
    ranks = [log.rank for log in found if log.attempt == attempt]
    if wanted.rank is not None and wanted.rank not in ranks:
        raise ConfigError(
            f"attempt {attempt} of run {run.name} has no rank {wanted.rank}; it has {_span(ranks)}", field="rank"
        )


def _span(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def reading(run: "RunDirectory", wanted: Wanted, *, pause: Callable[[], None]) -> "Iterator[tuple[LogFile, list[str]]]":
    """Blocks of lines, and whose they are. Following, it pauses between two looks, and ends with the run."""
    failed = run.first_failure(wanted.attempt)
    readers: dict[LogFile, _Reader] = {}
    done: set[LogFile] = set()
    oldest = wanted.attempt
    num_lines = wanted.num_lines
    while True:
        # Asked before the logs are read: what was written before the end is read after it.
        is_over = not (wanted.is_followed and _is_under_way(run))
        found = run.logs()
        newest = max((log.attempt for log in found), default=0)
        if found and oldest is None:
            oldest = newest
        is_over = is_over or (wanted.attempt is not None and newest > wanted.attempt)
        chosen = [log for log in found if _is_wanted(log, wanted, oldest) and log not in done]
        for log in sorted(chosen, key=lambda log: (log.attempt, log != failed, log.rank)):
            if log not in readers:
                readers[log] = _Reader(log, num_lines)
            is_last_look = is_over or log.attempt < newest
            for lines in readers[log].read(is_last_look=is_last_look):
                yield log, lines
            if is_last_look:
                done.add(log)
        if is_over:
            return
        if found:
            num_lines = None  # what comes from now on is new
        pause()


def _is_wanted(log: "LogFile", wanted: Wanted, oldest: int | None) -> bool:
    if oldest is None or wanted.rank not in (None, log.rank):
        return False
    return log.attempt == wanted.attempt if wanted.attempt is not None else log.attempt >= oldest


def _is_under_way(run: "RunDirectory") -> bool:
    from strata.launch.run_directory import UNDER_WAY, state_now  # noqa: PLC0415

    return state_now(run.status) in UNDER_WAY


class _Reader:
    """Reads a log on from where it was. The file is not kept open: there may be thousands."""

    def __init__(self, log: "LogFile", num_lines: int | None) -> None:
        self._path = log.path
        self._num_lines = num_lines
        self._offset: int | None = None
        self._rest = b""
        """A line that is not ended yet."""

    def read(self, *, is_last_look: bool) -> Iterator[list[str]]:
        from strata.launch.last_words import clean, tail_start  # noqa: PLC0415

        try:
            with self._path.open("rb") as file:
                if self._offset is None:
                    of_all = self._num_lines is None
                    self._offset = 0 if of_all else tail_start(file, self._num_lines, max_bytes=MAX_TAIL_BYTES)
                file.seek(self._offset)
                while block := file.read(BLOCK_BYTES):
                    self._offset += len(block)
                    *whole, self._rest = (self._rest + block).split(b"\n")
                    if len(self._rest) > MAX_LINE_BYTES:
                        whole.append(self._rest)
                        self._rest = b""
                    if whole:
                        yield [clean(line.decode(errors="replace")) for line in whole]
        except FileNotFoundError:  # the run was removed meanwhile
            return
        if is_last_look and self._rest:
            yield [clean(self._rest.decode(errors="replace"))]
            self._rest = b""


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
        return typer.style(f"[{rank:{self._width}}] ", fg=_RANKS[rank % len(_RANKS)])


def _console() -> Console:
    """A pipe has no width: nothing is folded there."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
