"""What a run looks like while it is active: its state as a `RunView`, drawn as tables or described in one line.

It knows no clock and no terminal; `display` decides when and where to draw. States, metrics and messages come from
users' programs, so control characters are removed: see `strata.printing`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.table import Table
from rich.text import Text

from strata.coordinator.state.server_figures import figures_of, number_of, total
from strata.identity import process_counts
from strata.launch.environment import METRICS
from strata.launch.record.timeline import hours
from strata.printing import counted, in_bytes, printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import rich.console
    from rich.console import ConsoleOptions, RenderableType, RenderResult

    from strata.coordinator.state.server_figures import ServerFigures
    from strata.coordinator.state.views import WorkerInfo

MAX_WORKERS_SHOWN = 16
_MIN_SHOWN = 4
_OTHER_LINES = 8
"""Lines of the rest of the view, and a few above it, on a small terminal."""
SILENT_S = 3.0
"""Time without a heartbeat after which a worker is highlighted."""
FIRST_METRICS = ("loss", "rows_per_s")
"""Metrics that are shown first; the others follow by name, as far as there is room."""
_MAX_STATE = 14
_MIN_METRIC = 8
_MAX_METRIC_NAME = 12
_METRIC_WIDTH = _MAX_METRIC_NAME + 2
_OTHERS_WIDTH = 52
"""Width of all columns except the metrics."""
_LABEL = 12
_COLORS = {
    "running": "green",
    "done": "green",
    "training": "green",
    "serving": "green",
    "failed": "red",
    "error": "red",
    "dead": "red",
    "ending": "yellow",
    "stopping": "yellow",
    "waiting": "yellow",
    "checkpointing": "cyan",
    "recovering": "cyan",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    rank: int
    state: str
    step: int
    epoch: int
    metrics: Mapping[str, float]
    silent_s: float
    server: int | None = None
    """Its number, if it is a parameter server."""
    figures: ServerFigures | None = None
    """What a server has measured."""

    @classmethod
    def of(cls, rank: int, worker: WorkerInfo) -> WorkerView:
        return cls(
            rank=rank,
            state=worker.state,
            step=worker.step,
            epoch=worker.epoch,
            metrics={name: value for name, value in worker.metrics.items() if not METRICS.is_ours(name)},
            silent_s=worker.silent_s,
            server=number_of(worker.metrics),
            figures=figures_of(worker.metrics),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    name: str
    phase: str
    attempt: int
    world_size: int
    """Processes, with the parameter servers."""
    num_restarts: int
    max_restarts: int
    elapsed_s: float
    workers: Sequence[WorkerView]
    checkpoint: str
    """Such as `step 50, 0.8 s ago; saving step 100, 40%`."""
    last_event: str
    directory: str
    num_servers: int = 0

    @property
    def trainers(self) -> list[WorkerView]:
        """The workers that train."""
        return [each for each in self.workers if each.server is None]

    @property
    def servers(self) -> list[WorkerView]:
        return [each for each in self.workers if each.server is not None]


# -- rendering ---------------------------------------------------------------------------------------------------------


def render(view: RunView) -> RenderableType:
    return _Rendered(view)


@dataclass(frozen=True, slots=True)
class _Rendered:
    view: RunView

    def __rich_console__(self, console: rich.console.Console, options: ConsoleOptions) -> RenderResult:
        yield _header(self.view)
        view = self.view
        room = max(console.height - _OTHER_LINES, _MIN_SHOWN) if console.is_terminal else MAX_WORKERS_SHOWN
        if view.servers:
            room = max((room - 1) // 2, _MIN_SHOWN)  # half of the lines, without another heading
        if view.trainers:
            yield _workers(view.trainers, options.max_width, max_shown=min(room, MAX_WORKERS_SHOWN))
        if view.servers:
            yield server_table(view.servers, max_shown=min(room, MAX_WORKERS_SHOWN))
        yield from _footer(self.view, options.max_width)


def _header(view: RunView) -> RenderableType:
    line = Table.grid(expand=True, padding=(0, 2, 0, 0))
    line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    line.add_column(no_wrap=True, justify="right")
    facts = Text(" · ").join(
        [
            _colored(view.phase),
            Text(_num_workers(view)),
            Text(_restarts(view), style="yellow" if view.num_restarts else ""),
            Text(hours(view.elapsed_s)),
        ]
    )
    line.add_row(Text(f"run {printable(view.name)}", style="bold"), facts)
    return line


def _workers(workers: Sequence[WorkerView], width: int, *, max_shown: int) -> Table:
    shown, folded = fold(workers, max_shown=max_shown)
    names = metric_names(workers, max_names=max((width - _OTHERS_WIDTH) // _METRIC_WIDTH, len(FIRST_METRICS)))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    # Minimum widths keep the columns in place when a state changes.
    for heading, min_width in (("rank", 4), ("state", 13), ("step", 8), ("epoch", 5)):
        justify: Literal["left", "right"] = "left" if heading == "state" else "right"
        table.add_column(heading, justify=justify, min_width=min_width, no_wrap=True)
    for name in names:
        table.add_column(_metric_heading(name), justify="right", min_width=_MIN_METRIC, no_wrap=True)
    table.add_column("silent", justify="right", min_width=8, no_wrap=True)
    slow = len(shown) // 2 if folded else len(shown)
    for worker in shown[:slow]:
        table.add_row(*_cells(worker, names))
    if folded:
        steps = [worker.step for worker in folded]
        span = str(min(steps)) if min(steps) == max(steps) else f"{min(steps)} – {max(steps)}"
        table.add_row("…", Text(f"{len(folded):,} more", style="dim"), Text(span, style="dim"))
    for worker in shown[slow:]:
        table.add_row(*_cells(worker, names))
    return table


def _cells(worker: WorkerView, names: Sequence[str]) -> list[Text]:
    return [
        Text(str(worker.rank)),
        _colored(worker.state),
        Text(str(worker.step)),
        Text(str(worker.epoch)),
        *(_metric(name, worker.metrics.get(name)) for name in names),
        _silence(worker.silent_s),
    ]


def server_table(servers: Sequence[WorkerView], *, max_shown: int = MAX_WORKERS_SHOWN) -> Table:
    """Return a line per parameter server, with the columns for which something was measured."""
    shown, folded = fold(servers, max_shown=max_shown)
    if not folded:
        shown = sorted(shown, key=lambda each: each.server or 0)  # an elastic job may give its ranks another order
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("server", justify="right", no_wrap=True)
    table.add_column("state", min_width=13, no_wrap=True)
    table.add_column("step", justify="right", min_width=4, no_wrap=True)
    cells = {each.rank: server_cells(each.figures) for each in servers}
    headings = [name for name in SERVER_HEADINGS if any(cells[each.rank].get(name) for each in servers)]
    for name in (*headings, "silent"):
        table.add_column(name, justify="right", no_wrap=True)
    slow = len(shown) // 2 if folded else len(shown)
    for place, each in enumerate(shown):
        if folded and place == slow:
            table.add_row("…", Text(f"{len(folded):,} more", style="dim"))
        own = (Text(cells[each.rank].get(name, "")) for name in headings)
        table.add_row(str(each.server), _colored(_state(each)), str(each.step), *own, _silence(each.silent_s))
    return table


def _state(server: WorkerView) -> str:
    """Return `serving` where a worker would be training."""
    return "serving" if server.state == "TRAINING" else server.state


SERVER_HEADINGS = ("rows", "memory", "pulls/s", "pushes/s", "stale", "hits", "evicted")


def server_cells(figures: ServerFigures | None) -> dict[str, str]:
    """Return the measured figures of a server, by heading."""
    if figures is None:
        return {}
    found = {"rows": f"{figures.rows:,}", "memory": in_bytes(figures.bytes)}
    rates = {"pulls/s": figures.pulls_per_s, "pushes/s": figures.pushes_per_s}
    found |= {name: f"{rate:,.1f}" for name, rate in rates.items() if rate is not None}
    if figures.staleness is not None:
        found["stale"] = str(figures.staleness)
    if figures.hit_rate is not None:
        found["hits"] = f"{figures.hit_rate:.1%}"
    if figures.evicted:
        found["evicted"] = f"{figures.evicted:,}"
    return found


def fold(
    workers: Sequence[WorkerView], *, max_shown: int = MAX_WORKERS_SHOWN
) -> tuple[list[WorkerView], list[WorkerView]]:
    """Return all workers by rank; or, if there are too many, the slowest and the fastest, and the rest.

    Among workers of the same step, a silent one counts as slower. For how long does not matter: lines that move all the
    time cannot be read.
    """
    if len(workers) <= max_shown:
        return sorted(workers, key=lambda worker: worker.rank), []
    ordered = sorted(workers, key=lambda worker: (worker.step, worker.silent_s <= SILENT_S, worker.rank))
    half = max_shown // 2
    return [*ordered[:half], *ordered[-half:]], ordered[half:-half]


def metric_names(workers: Sequence[WorkerView], *, max_names: int) -> list[str]:
    """Return the names of reported metrics."""
    known = {name for worker in workers for name in worker.metrics}
    first = [name for name in FIRST_METRICS if name in known]
    return [*first, *sorted(known.difference(first))][:max_names]


def _metric_heading(name: str) -> Text:
    return Text(printable("rows/s" if name == "rows_per_s" else name, max_chars=_MAX_METRIC_NAME))


def _metric(name: str, value: float | None) -> Text:
    if value is None:
        return Text("")
    if not math.isfinite(value):
        return Text(str(value), style="red")
    return Text(f"{value:,.0f}" if name == "rows_per_s" and abs(value) < 1e9 else f"{value:.4g}")


def _silence(silent_s: float) -> Text:
    if not math.isfinite(silent_s):
        return Text("never", style="dim")
    words = f"{silent_s:.1f} s" if silent_s < 100 else hours(silent_s)
    return Text(words, style="red" if silent_s > SILENT_S else "")


def _colored(state: str) -> Text:
    """Return a state such as `LOADING_DATA` as colored text: `loading data`."""
    words = printable(state, max_chars=_MAX_STATE).lower().replace("_", " ")
    return Text(words, style=_COLORS.get(words, ""))


def _num_workers(view: RunView) -> str:
    return process_counts(view.world_size, view.num_servers)


def _restarts(view: RunView) -> str:
    return f"{view.num_restarts} of {counted(view.max_restarts, 'restart')}"


def _footer(view: RunView, width: int) -> list[Text]:
    room = max(width - _LABEL, 1)
    path = printable(view.directory)
    if len(path) > room:
        path = f"…{path[len(path) - room + 1 :]}"  # its end is more specific than its start
    rows = [("checkpoint", printable(view.checkpoint)), ("last event", printable(view.last_event)), ("directory", path)]
    return [
        Text(no_wrap=True, overflow="ellipsis").append(f"{what:<{_LABEL}}", style="dim").append(text)
        for what, text in rows
        if text
    ]


def describe_checkpoint(last: tuple[int, float] | None, saving: Sequence[tuple[int, float]]) -> str:
    """Describe the last checkpoint and the save in progress.

    Args:
        last: Step of the last checkpoint, and its age in seconds.
        saving: For every rank, the step that it is saving (below 0: none) and the completed fraction. The slowest rank
            counts.
    """
    parts = [] if last is None else [f"step {last[0]}, {max(last[1], 0.0):.1f} s ago"]
    newest = max((step for step, _ in saving), default=-1)
    if newest > (-1 if last is None else last[0]):  # reports are up to a second old: it may be done
        parts.append(f"saving step {newest}, {min(done for step, done in saving if step == newest):.0%}")
    return "; ".join(parts)


def progress(view: RunView) -> str:
    """Return `running: step 120 (rank 3: 118), loss 0.25, 8,000 rows/s, 4 workers, checkpoint step 100, 2.1 s ago`."""
    parts = []
    workers = view.trainers
    if workers:
        fastest = max(workers, key=lambda worker: (worker.step, -worker.rank))
        slowest = min(workers, key=lambda worker: (worker.step, worker.rank))
        behind = f" (rank {slowest.rank}: {slowest.step})" if slowest.step < fastest.step else ""
        parts.append(f"step {fastest.step}{behind}")
        losses = [worker.metrics["loss"] for worker in workers if "loss" in worker.metrics]
        if losses:
            parts.append(f"loss {sum(losses) / len(losses):.4g}")
        rates = [worker.metrics["rows_per_s"] for worker in workers if "rows_per_s" in worker.metrics]
        if rates:
            parts.append(f"{_metric('rows_per_s', sum(rates))} rows/s")
    figures = total(each.figures for each in view.servers if each.figures is not None)
    held = "" if figures is None else f" ({describe_servers(figures)})"
    parts.append(f"{_num_workers(view)}{held}")
    if view.num_restarts:
        parts.append(_restarts(view))
    if view.checkpoint:
        parts.append(f"checkpoint {printable(view.checkpoint)}")
    return f"{_colored(view.phase)}: {', '.join(parts)}"


def describe_servers(figures: ServerFigures) -> str:
    """Return `50,000 rows, 5.2 MiB, 120 pulls/s, hit rate 93.1%`."""
    cells = server_cells(figures)
    parts = [f"{cells['rows']} rows", cells["memory"]]
    if figures.pulls_per_s is not None:
        parts.append(f"{cells['pulls/s']} pulls/s")
    if figures.hit_rate is not None:
        parts.append(f"hit rate {cells['hits']}")
    return ", ".join(parts)
