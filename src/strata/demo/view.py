"""What the demo shows: the workers, the epoch, and the story so far. Pure: facts in, something to print out."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from strata.coordinator.replay import ReplayLine
    from strata.coordinator.views import DatasetInfo, MembershipInfo

STORY_LINES = 9
SVG_WIDTH = 112
TOLD = {"GenerationStarted", "ShardsAssigned", "DatasetRegistered"}
"""Kinds of entries worth a line: a generation says who came and went; the rest comes by the dozen."""


@dataclass(slots=True)
class Facts:
    """Everything the picture is made of."""

    members: MembershipInfo
    dataset: DatasetInfo
    num_barriers: int
    left_by_worker: dict[str, int]
    story: Sequence[ReplayLine]
    started_at_s: float
    headline: str = ""
    killed: set[str] = field(default_factory=set)


def picture(facts: Facts) -> RenderableType:
    workers = Table(expand=True, box=None, header_style="bold")
    for heading in ("rank", "worker", "state", "step", "loss", "shards to go", "last heard"):
        workers.add_column(heading, justify="left" if heading in ("worker", "state") else "right")
    for w in facts.members.workers:
        dead = w.worker_id in facts.killed
        workers.add_row(
            str(w.rank),
            escape(w.worker_id),
            "[red]killed -9[/red]" if dead else w.state,
            str(w.step),
            f"{w.metrics['loss']:.3f}" if "loss" in w.metrics else "",
            str(facts.left_by_worker.get(w.worker_id, 0)),
            f"{w.silent_s:.1f} s" + (" [red]connection lost[/red]" if w.suspect else ""),
        )
    data = facts.dataset
    epoch = Table.grid(expand=True, padding=(0, 1))
    epoch.add_column(no_wrap=True)
    epoch.add_column(ratio=1)
    epoch.add_column(no_wrap=True)
    epoch.add_row(
        "epoch 0",
        ProgressBar(total=data.num_shards, completed=data.num_done),
        f"{data.num_done}/{data.num_shards} shards",
    )
    story = Group(*(_line(entry, facts.started_at_s) for entry in facts.story[-STORY_LINES:]))
    title = f"generation {facts.members.generation} · {len(facts.members.workers)} workers · "
    return Group(
        Panel(Group(workers, "", epoch), title=title + f"{facts.num_barriers} barriers passed", title_align="left"),
        Panel(story, title="what the journal says", title_align="left", height=STORY_LINES + 2),
        f"[bold]{facts.headline}[/bold]",
    )


def svg(facts: Facts) -> str:
    """The picture as a file; without the web fonts that rich would have a browser fetch."""
    console = Console(record=True, width=SVG_WIDTH, file=io.StringIO(), highlight=False)
    console.print(picture(facts))
    layout = re.sub(r"@font-face {{.*?}}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="make demo", code_format=layout)


def plain(entry: ReplayLine, started_at_s: float) -> str:
    return f"{entry.at_s - started_at_s:6.2f} s  {entry.words}"


def _line(entry: ReplayLine, started_at_s: float) -> Text:
    lost = entry.kind == "GenerationStarted" and "connection lost" in entry.words
    colour = "red" if lost else "green" if entry.kind == "GenerationStarted" else "white"
    line = Text(no_wrap=True, overflow="ellipsis")
    return line.append(f"{entry.at_s - started_at_s:6.2f} s  ", style="dim").append(entry.words, style=colour)
