"""`strata journal`: what is in a coordinator's state, and how it came to be."""

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from strata.printing import counted
from strata.terminal import Console, echo, echo_json

if TYPE_CHECKING:
    from strata.coordinator.journal import Damage
    from strata.coordinator.replay import JobSummary, ReplayLine

app = typer.Typer(help="Look into a coordinator's state, also while it runs.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Look into a coordinator's state, also while it runs."""


@app.command()
def replay(
    state: Annotated[
        str, typer.Option(help="Path or database URL of the state. Default: in your state directory.")
    ] = "",
    job: Annotated[str | None, typer.Option(help="Tell of this job only.")] = None,
    until: Annotated[int | None, typer.Option(help="Stop after this entry, and show the state as it was then.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line; the last one is the state.")] = False,
) -> None:
    """Tell, entry by entry, how a state came to be, and show it."""
    from strata.coordinator.replay import Replay  # noqa: PLC0415 (numpy and sqlalchemy are behind it)

    console = Console(highlight=False)
    with Replay(state) as story:
        for line in story.lines(job_id=job, until=until):
            _tell(console, line, as_json=as_json)
        jobs, damage = story.summary(job_id=job, until=until)
    if as_json:
        found = {"jobs": [asdict(j) for j in jobs], "damage": asdict(damage) if damage else None}
        echo_json(found)
        return
    _show(console, jobs, damage)


@app.command()
def backup(
    target: Annotated[Path, typer.Argument(help="The file to make; it must not be there yet.")],
    state: Annotated[
        str, typer.Option(help="Path of the state, or sqlite:///PATH. Default: in your state directory.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Copy a SQLite state while its coordinator runs, and check the copy.

    A PostgreSQL state is backed up with pg_dump.
    """
    from strata.coordinator.backup import back_up  # noqa: PLC0415 (numpy and sqlalchemy are behind it)

    made = back_up(state, target)
    if as_json:
        found = {"path": str(made.path), "jobs": made.num_jobs, "last_seq": made.last_seq, "bytes": made.num_bytes}
        echo_json(found)
        return
    jobs, num_bytes = counted(made.num_jobs, "job"), counted(made.num_bytes, "byte")
    echo(f"{made.path}: {jobs}, up to entry {made.last_seq}, {num_bytes}, checked")


def _tell(console: Console, line: "ReplayLine", *, as_json: bool) -> None:
    if as_json:
        echo_json(asdict(line))
        return
    when = datetime.fromtimestamp(line.at_s, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")
    console.print(
        f"[dim]{line.seq:>6}  {when}[/dim]  [cyan]{escape(line.job_id)}[/cyan]  {escape(line.words)}", soft_wrap=True
    )


def _show(console: Console, jobs: "list[JobSummary]", damage: "Damage | None") -> None:
    if damage is not None:
        console.print(
            f"[bold red]damaged from entry {damage.seq} on[/bold red]: {escape(damage.reason)} "
            f"({counted(damage.num_lost, 'entry', 'entries')} lost, kept at {escape(damage.kept_at)})"
        )
    if not jobs:
        console.print("no jobs")
    for job in jobs:
        table = Table(title=f"job {escape(job.job_id)}, generation {job.generation}", title_justify="left")
        table.add_column("worker")
        for dataset in job.datasets:
            heading = f"{dataset.dataset_id} (epoch {dataset.epoch}, {dataset.num_done}/{dataset.num_shards} done)"
            table.add_column(escape(heading), justify="right")
        for worker in job.workers:
            table.add_row(escape(worker), *(str(d.shards_by_worker[worker]) for d in job.datasets))
        console.print(table)
        console.print(f"because: {escape(job.reason)}", soft_wrap=True)
        if job.checkpoint_id:
            console.print(f"checkpoint: {escape(job.checkpoint_id)} (step {job.checkpoint_step})")
