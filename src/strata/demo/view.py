"""What the demo shows: progress of a run, its recovery and the results. Pure functions from facts to renderables."""

from __future__ import annotations

import io
import re
import textwrap
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, Group
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from strata.demo.outcome import MAX_NAMED
from strata.launch.record.view import describe_servers
from strata.printing import counted, in_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from strata.coordinator.state.server_figures import ServerFigures
    from strata.demo.clicks import ClickFiles
    from strata.demo.outcome import Outcome, Recovery, RowsCheck, RunFigures, WeightsCheck

MAX_WIDTH = 100
MIN_WIDTH = 80
INDENT = 4
_BLOCKS = "▁▂▃▄▅▆▇█"
_LABEL = 18
_MAX_BAR = 40


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    name: str
    """`rank 0`, or `server 0`."""
    step: int | None
    """None for a parameter server."""
    loss: float | None
    state: str
    """`training`, `serving`, `starting` or `killed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The state of an active run."""

    workers: Sequence[WorkerFacts]
    num_steps: int
    losses: Sequence[float]
    saved_step: int
    recoveries: Sequence[Recovery]
    elapsed_s: float
    servers: ServerFigures | None = None


# -- progress ----------------------------------------------------------------------------------------------------------


def title(num_workers: int, num_kills: int, num_servers: int) -> Text:
    kills = "kill one" if num_kills == 1 and num_workers > 1 else f"kill -9 {num_kills} times"
    workers = counted(num_workers, "worker")
    if num_servers:
        kills = "kill a server" if num_kills == 1 else f"kill -9 servers {num_kills} times"
        workers = f"{workers} and {counted(num_servers, 'parameter server')}"
    return Text.assemble(("Strata demo", "bold"), f": train on {workers}, {kills}, lose nothing")


def heading(number: int, text: str) -> Text:
    return Text.assemble("\n", (f"{number}  ", "dim"), (text, "bold"))


def command(words: Sequence[str], width: int) -> RenderableType:
    """Return a command line that wraps only between options, so that each keeps its value."""
    text = re.sub(r"(--[a-z-]+) (?!-)", "\\g<1>\N{NO-BREAK SPACE}", " ".join(words))
    lines = textwrap.wrap(text, max(width - INDENT - 8, 20), break_on_hyphens=False, break_long_words=False)
    whole = " \\\n    ".join(lines).replace("\N{NO-BREAK SPACE}", " ")
    return indented(Text(whole, style="cyan", no_wrap=True, overflow="ignore"), "$ ")


def data_line(files: ClickFiles, seconds: float) -> RenderableType:
    return indented(
        Text(
            f"{files.num_rows:,} random clicks in {files.num_files} Parquet files, "
            f"{files.num_bytes / 1e6:.1f} MB ({seconds:.1f} s)"
        )
    )


def live(facts: RunFacts, width: int) -> RenderableType:
    """Return the view that is redrawn during a run: one line per worker, the loss curve, and the recoveries so far."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(4):
        table.add_column(no_wrap=True)
    bar_width = min(max(width - 50, 10), _MAX_BAR)
    for worker in facts.workers:
        bar = "" if worker.step is None else ProgressBar(facts.num_steps, worker.step, width=bar_width, pulse=False)
        table.add_row(worker.name, bar, *_state(worker, facts.num_steps))
    lines: list[RenderableType] = [indented(table)]
    name_width = max((len(worker.name) for worker in facts.workers), default=0) + 2
    if facts.servers is not None:
        lines.append(indented(Text(f"{'tables':<{name_width}}{describe_servers(facts.servers)}")))
    if facts.losses:
        done = min(max(round(bar_width * len(facts.losses) / facts.num_steps), 1), bar_width)
        curve = sparkline(facts.losses, done).ljust(bar_width)  # as wide as the bars above
        lines.append(indented(Text.assemble("loss".ljust(name_width), (curve, "green"), f"  {facts.losses[-1]:.3f}")))
    lines += [Group(*recovery(each, width)) for each in facts.recoveries]
    saved = f", saved up to step {facts.saved_step}" if facts.saved_step else ""
    lines.append(indented(Text(f"{facts.elapsed_s:.0f} s{saved}", style="dim")))
    return Group(*lines)


def _state(worker: WorkerFacts, num_steps: int) -> tuple[Text, Text]:
    if worker.state == "killed":
        return Text("killed", style="bold red"), Text("")
    if worker.state == "starting":
        return Text("starting", style="yellow"), Text("")
    if worker.step is None:
        return Text(worker.state), Text("")
    width = len(str(num_steps))
    loss = "" if worker.loss is None else f"loss {worker.loss:.3f}"
    return Text(f"step {worker.step:>{width}} of {num_steps}"), Text(loss)


def progress_line(facts: RunFacts) -> str:
    """Return a line of progress for output that is not a terminal."""
    loss = f", loss {facts.losses[-1]:.3f}" if facts.losses else ""
    return f"{' ' * INDENT}step {max(worker.step or 0 for worker in facts.workers)} of {facts.num_steps}{loss}"


def sparkline(numbers: Sequence[float], width: int) -> str:
    """Return a curve of `width` characters; each shows the mean of its part."""
    width = min(width, len(numbers))
    cuts = [round(index * len(numbers) / width) for index in range(width + 1)]
    means = [sum(numbers[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)


# -- recovery ----------------------------------------------------------------------------------------------------------


def recovery(found: Recovery, width: int) -> list[RenderableType]:
    """Return a recovery as a waterfall: each bar starts where the previous one ended."""
    moments = [
        ("detected", found.detected_ms),
        ("workers restarted", found.started_ms),
        (_restored(found), found.restored_ms),
        ("first step done", found.first_step_ms),
    ]
    known = [(what, at_ms) for what, at_ms in moments if at_ms is not None]
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True)
    bar_width = min(max(width - INDENT - 46, 8), _MAX_BAR)
    longest = max((at_ms for _, at_ms in known), default=0.0) or 1.0
    before = 0.0
    for what, at_ms in known:
        start, end = round(before / longest * bar_width), round(at_ms / longest * bar_width)
        bar = " " * min(start, bar_width - 1) + "━" * max(end - start, 1)
        table.add_row(what, Text(f"+{at_ms:,.0f} ms", style="bold"), Text(bar, style="yellow"))
        before = at_ms
    killed = Text.assemble(("kill -9 ", "bold red"), f"{found.name} (pid {found.pid}) after step {found.step}")
    return [indented(killed), Padding(table, (0, 0, 0, INDENT + 2), expand=False)]


def _restored(found: Recovery) -> str:
    if found.restored_step is None:
        return "restored"
    return f"step {found.restored_step} restored" if found.restored_step else "started over"


def run_line(figures: RunFigures) -> RenderableType:
    return indented(
        Text.assemble(
            ("done ", "green"),
            f"in {figures.duration_s:.1f} s: {figures.num_steps} steps, loss {figures.first_loss:.3f} → "
            f"{figures.last_loss:.3f}, {figures.num_checkpoints} checkpoints",
        )
    )


# -- results -----------------------------------------------------------------------------------------------------------


def summary(outcome: Outcome) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, width=1)
    table.add_column(no_wrap=True, min_width=_LABEL)
    table.add_column()
    rows, weights = outcome.rows, outcome.weights
    table.add_row(_mark(rows.is_good), "every row once", describe_rows(rows))
    if not outcome.rows_undisturbed.is_good:
        table.add_row(_mark(False), "… undisturbed run", describe_rows(outcome.rows_undisturbed))
    table.add_row(_mark(weights.is_good), "same weights", describe_weights(weights))
    is_back = len(outcome.recoveries) == outcome.num_kills_planned and all(r.is_complete for r in outcome.recoveries)
    table.add_row(_mark(is_back), "recovered", _describe_recovery(outcome))
    table.add_row("", "steps repeated", _describe_repeated_steps(outcome))
    if outcome.servers is not None:
        table.add_row("", "parameter servers", _describe_servers(outcome))
    table.add_row("", "checkpoints", _describe_checkpoints(outcome.killed))
    return indented(table)


def _mark(is_good: bool) -> Text:
    return Text("✓", style="bold green") if is_good else Text("✗", style="bold red")


def describe_rows(rows: RowsCheck) -> str:
    text = f"{rows.num_exact:,} of {rows.num_rows:,} rows trained on exactly once in each of {rows.num_epochs} epochs"
    wrong = [
        f"{number:,} {what}"
        for number, what in (
            (rows.num_lost, "lost"),
            (rows.num_again, "repeated"),
            (rows.num_unknown, "not in the data"),
        )
        if number
    ]
    return f"{text}; {', '.join(wrong)}" if wrong else text


def describe_weights(weights: WeightsCheck) -> str:
    if weights.steps[0] != weights.steps[1]:
        return f"the runs ended at different steps: {weights.steps[0]} and {weights.steps[1]}"
    if weights.different:
        named = ", ".join(weights.different[:MAX_NAMED])
        more = "" if len(weights.different) <= MAX_NAMED else ", …"
        return f"{len(weights.different)} of {weights.num_tensors} tensors differ: {named}{more}"
    return (
        f"bit-identical to the undisturbed run: {weights.num_tensors} tensors, {weights.num_elements:,} elements "
        "of model and optimizer"
    )


def _describe_recovery(outcome: Outcome) -> str:
    missing = outcome.num_kills_planned - len(outcome.recoveries)
    if missing:
        return f"{missing} of {outcome.num_kills_planned} kills had no effect: the run ended first"
    times = [each.first_step_ms for each in outcome.recoveries if each.first_step_ms is not None]
    if len(times) < len(outcome.recoveries):
        return "the run did not continue after a kill"
    longest = f" (longest of {len(times)})" if len(times) > 1 else ""
    who = "rank 0" if outcome.num_servers else "all workers"
    return f"in {max(times) / 1_000:.2f} s{longest}, from SIGKILL until {who} had finished a step"


def _describe_repeated_steps(outcome: Outcome) -> str:
    steps = sum(each.num_steps_again or 0 for each in outcome.recoveries)
    return (
        f"{steps} of {outcome.killed.num_steps}: finished before the kill but not yet saved "
        f"({outcome.rows.num_rolled_back:,} rows; each counts once in the final model)"
    )


def _describe_servers(outcome: Outcome) -> str:
    held = outcome.servers or {}
    size = in_bytes(int(held["bytes"]))
    return f"{outcome.num_servers} held {held['rows']:,.0f} rows, {size} with optimizer state and index"


def _describe_checkpoints(figures: RunFigures) -> str:
    return (
        f"{figures.num_checkpoints}, written in the background; each stalled training for "
        f"{figures.median_stall_ms:.1f} ms (median; longest {figures.longest_stall_ms:,.0f} ms)"
    )


def story(outcome: Outcome) -> RenderableType:
    """Return the results in sentences for a first-time reader."""
    if not outcome.is_good:
        text = Text("The demo failed. Please report it with the output above.", style="bold red")
        return indented(text)
    first = outcome.recoveries[0]
    workers = {1: "it", 2: "both workers"}.get(outcome.num_workers, "all workers")
    source = f"from the checkpoint of step {first.restored_step}" if first.restored_step else "from the beginning"
    victim, state = "worker", "model, optimizer, random number generators and position in the data"
    if outcome.num_servers:
        victim, workers, state = "parameter server", "all processes", f"tables, {state}"
    text = Text(
        f"A {victim} was killed without warning. Strata restarted {workers} {source}: {state}. No row was lost or "
        "counted twice, and the final model is exactly the one of the undisturbed run."
    )
    return indented(text)


def next_steps(commands: Sequence[tuple[str, str]]) -> RenderableType:
    lines: list[RenderableType] = [Text("\nNext steps", style="bold")]
    for what, how in commands:
        lines += [
            indented(Text(what, style="dim")),
            indented(Text(how, style="cyan", no_wrap=True, overflow="ignore"), "$ "),
        ]
    return Group(*lines)


def indented(what: RenderableType, mark: str = "") -> RenderableType:
    if not mark:
        return Padding(what, (0, 0, 0, INDENT), expand=False)
    line = Table.grid()
    line.add_column(no_wrap=True)
    line.add_column()
    line.add_row(" " * INDENT + mark, what)
    return line


def svg(shown: Sequence[RenderableType], width: int) -> str:
    """Return the output as an SVG picture, without the web fonts that rich makes a browser fetch."""
    console = Console(record=True, width=width, file=io.StringIO(), highlight=False)
    for each in shown:
        console.print(each)
    layout = re.sub(r"@font-face {{.*?}}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="strata demo", code_format=layout)
