"""The overview on a terminal: what `strata top` draws, from the answer of `/api/overview`.

It knows no clock and no terminal. The structs name the fields that are drawn and ignore all others, so a coordinator
of another version can be watched. Names, values and reasons come from users' programs, so control characters become
visible: see `strata.printing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table
from rich.text import Text

from strata.dashboard.health import seconds
from strata.dashboard.sample import METRIC_PREFIX
from strata.errors import CoordinatorError
from strata.printing import counted, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import rich.console
    from rich.console import ConsoleOptions, RenderableType, RenderResult

MAX_JOBS = 50
"""Jobs that are asked for, and drawn on a terminal that is high enough."""
MAX_VALUES_SHOWN = 48
MAX_FINDINGS_SHOWN = 4
ABSENT = "–"
"""What was not measured."""
_LINES_OF_VALUES = 2
_LINES_AROUND = 4 + _LINES_OF_VALUES
"""Empty lines and headings of both tables, the number of further jobs, and the line of the cursor."""
_MIN_ROWS = 3
_LABEL = 13
_GAP = 2
_MAX_NAME = 32
_SHORT_NAME = 16
"""Names are shortened to this before columns are left out."""
_COLORS = {
    "ok": "green",
    "training": "green",
    "warning": "yellow",
    "starting": "yellow",
    "waiting": "dim",
    "recovering": "yellow",
    "saving": "cyan",
    "error": "red",
}


class TopFinding(msgspec.Struct, frozen=True):
    level: str
    line: str


class TopHealth(msgspec.Struct, frozen=True):
    level: str
    line: str
    findings: list[TopFinding]
    num_findings: int


class TopValue(msgspec.Struct, frozen=True):
    min: float
    mean: float
    max: float
    unit: str


class TopJob(msgspec.Struct, frozen=True):
    job_id: str
    state: str
    num_workers: int
    num_servers: int
    num_suspects: int
    workers_by_state: dict[str, int]
    step: int | None
    epoch: int | None
    steps_per_s: float | None
    rows_per_s: float | None
    checkpoint_step: int | None
    checkpoint_age_s: float | None
    values: dict[str, TopValue]
    num_values: int


class TopJobs(msgspec.Struct, frozen=True):
    items: list[TopJob]
    total: int


class TopOverview(msgspec.Struct, frozen=True):
    version: str
    requests_per_s: float
    barrier_p50_s: float | None
    barrier_p99_s: float | None
    num_sessions: int
    num_workers: int
    health: TopHealth
    jobs: TopJobs


def parse(answer: Any) -> TopOverview:
    """Return the overview in the JSON of an answer.

    Raises:
        CoordinatorError: It is none.
    """
    try:
        return msgspec.convert(answer, TopOverview)
    except msgspec.ValidationError as error:
        raise CoordinatorError(
            f"the answer is not an overview ({error}); check that the address is that of a Strata coordinator, and "
            "that its version is close to this one"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TopView:
    title: str
    """Whose overview it is, such as `run mnist`."""
    address: str
    overview: TopOverview
    problem: str = ""
    """Why there is no newer overview; empty if this is the newest."""
    age_s: float = 0.0
    """Since this overview arrived."""


def render(view: TopView) -> RenderableType:
    return _Rendered(view)


@dataclass(frozen=True, slots=True)
class _Rendered:
    view: TopView

    def __rich_console__(self, console: rich.console.Console, options: ConsoleOptions) -> RenderResult:
        view, overview = self.view, self.view.overview
        width = options.max_width
        header = list(_header(view))
        yield from header
        jobs = overview.jobs
        if not jobs.items:
            return
        values = _values(jobs.items)
        room = MAX_JOBS + MAX_VALUES_SHOWN
        if console.is_terminal:
            room = console.height - len(header) - (_LINES_AROUND if values else _LINES_AROUND - _LINES_OF_VALUES)
        num_jobs = max(room // 2, room - len(values), _MIN_ROWS)
        shown = jobs.items[: min(num_jobs, MAX_JOBS)]
        style = "dim" if view.problem else ""
        yield Text()
        yield _jobs(shown, width, style=style)
        if len(shown) < jobs.total:
            yield _line(Text(f"… {counted(jobs.total - len(shown), 'more job')}", style="dim"))
        if values:
            num_values = min(max(room - len(shown), _MIN_ROWS), MAX_VALUES_SHOWN)
            yield Text()
            yield _value_table(values[:num_values], width, style=style)


# -- header ------------------------------------------------------------------------------------------------------------


def _header(view: TopView) -> Iterator[Text]:
    yield _line(Text.assemble((printable(view.title), "bold"), (f" · {printable(view.address)}", "dim")))
    if view.problem:
        yield _row("no answer", f"for {seconds(view.age_s)}, trying again: {view.problem}", style="bold red")
    yield from _health(view.overview.health)
    yield _row("coordinator", " · ".join(_figures(view.overview)))


def _health(health: TopHealth) -> Iterator[Text]:
    yield _row("health", health.line, style=_COLORS.get(health.level, ""))
    for each in health.findings[1:MAX_FINDINGS_SHOWN]:  # the line is the first
        yield _row("", each.line, style=_COLORS.get(each.level, ""))


def _figures(overview: TopOverview) -> Iterator[str]:
    yield f"{rate(overview.requests_per_s)} requests/s"
    yield counted(overview.num_sessions, "session")
    yield counted(overview.num_workers, "worker")
    if overview.barrier_p50_s is None or overview.barrier_p99_s is None:
        yield f"barrier p50, p99 {ABSENT}"
    else:
        yield f"barrier p50 {short_time(overview.barrier_p50_s)}, p99 {short_time(overview.barrier_p99_s)}"


def _row(label: str, text: str, *, style: str = "") -> Text:
    return _line(Text().append(f"{label:<{_LABEL}}", style="dim").append(printable(text), style))


def _line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


# -- jobs --------------------------------------------------------------------------------------------------------------

# Heading, smallest width, and whether it is a number. Minimum widths keep the columns in place when a value changes.
_COLUMNS: tuple[tuple[str, int, bool], ...] = (
    ("job", 8, False),
    ("state", 10, False),
    ("step", 7, True),
    ("epoch", 5, True),
    ("steps/s", 7, True),
    ("rows/s", 9, True),
    ("checkpoint", 12, False),
    ("workers", 11, False),
)
_DROPPED_FIRST = ("epoch", "rows/s", "checkpoint", "workers", "steps/s")
"""Columns that a narrow terminal has no room for, the least important first."""


def _jobs(jobs: Sequence[TopJob], width: int, *, style: str) -> Table:
    rows = [_cells(job) for job in jobs]
    widths = {name: max(least, *(row[name].cell_len for row in rows)) for name, least, _ in _COLUMNS}
    longest = min(widths["job"], _MAX_NAME)
    names = columns_for(widths | {"job": min(longest, _SHORT_NAME)}, width)
    rest = sum(widths[name] for name in names if name != "job") + _GAP * (len(names) - 1)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim", row_styles=[style])
    for name, least, is_number in _COLUMNS:
        if name not in names:
            continue
        table.add_column(
            name,
            justify="right" if is_number else "left",
            min_width=1 if name == "job" else least,
            max_width=min(longest, max(width - rest, 1)) if name == "job" else None,
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


def columns_for(widths: dict[str, int], width: int) -> list[str]:
    """Return the columns that fit side by side; job, state and step always stay."""
    names = list(widths)
    for dropped in _DROPPED_FIRST:
        if sum(widths[name] for name in names) + _GAP * (len(names) - 1) <= width:
            break
        names.remove(dropped)
    return names


def _cells(job: TopJob) -> dict[str, Text]:
    return {
        "job": Text(printable(job.job_id)),
        "state": Text(printable(job.state), style=_COLORS.get(job.state, "")),
        "step": Text(_number(job.step)),
        "epoch": Text(_number(job.epoch)),
        "steps/s": Text(rate(job.steps_per_s)),
        "rows/s": Text(rate(job.rows_per_s)),
        "checkpoint": Text(_checkpoint(job)),
        "workers": _workers(job),
    }


def _number(value: int | None) -> str:
    return ABSENT if value is None else str(value)


def _checkpoint(job: TopJob) -> str:
    if job.checkpoint_age_s is None:
        return ABSENT
    return f"{seconds(job.checkpoint_age_s)} ago, step {_number(job.checkpoint_step)}"


def _workers(job: TopJob) -> Text:
    by_size = sorted(job.workers_by_state.items(), key=lambda each: (-each[1], each[0]))
    text = Text(", ".join(f"{num:,} {printable(state.lower())}" for state, num in by_size) or "none")
    if job.num_servers:
        text.append(f", {counted(job.num_servers, 'server')}")
    if job.num_suspects:
        text.append(f", {job.num_suspects:,} disconnected", style="red")
    return text


# -- values ------------------------------------------------------------------------------------------------------------


def _values(jobs: Sequence[TopJob]) -> list[tuple[str, str, TopValue]]:
    """Return the metrics that workers report, with their job and name, in an order that stays."""
    return [
        (job.job_id, name.removeprefix(METRIC_PREFIX), value)
        for job in jobs
        for name, value in sorted(job.values.items())
        if name.startswith(METRIC_PREFIX)
    ]


def _value_table(values: Sequence[tuple[str, str, TopValue]], width: int, *, style: str) -> Table:
    with_job = len({job_id for job_id, _, _ in values}) > 1
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim", row_styles=[style])
    if with_job:
        table.add_column("job", no_wrap=True, overflow="ellipsis", max_width=_MAX_NAME)
    table.add_column("value", no_wrap=True, overflow="ellipsis", min_width=8, max_width=_MAX_NAME)
    has_range = width >= 60
    for heading in ("mean", "lowest", "highest") if has_range else ("mean",):
        table.add_column(heading, justify="right", min_width=9, no_wrap=True)
    table.add_column("unit", no_wrap=True)
    for job_id, name, value in values:
        numbers = (value.mean, value.min, value.max) if has_range else (value.mean,)
        cells = [Text(printable(name)), *(Text(f"{number:.4g}") for number in numbers), Text(printable(value.unit))]
        table.add_row(*([Text(printable(job_id))] if with_job else []), *cells)
    return table


# -- words -------------------------------------------------------------------------------------------------------------


def rate(value: float | None) -> str:
    """Return `0.25`, `45.2` or `11,600`."""
    if value is None:
        return ABSENT
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def short_time(value_s: float) -> str:
    """Return `0.8 ms`, `120 ms` or `2.5 s`."""
    if value_s >= 1:
        return f"{value_s:.1f} s"
    return f"{value_s * 1_000:.1f} ms" if value_s < 0.1 else f"{value_s * 1_000:.0f} ms"
