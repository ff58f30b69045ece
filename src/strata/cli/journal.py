"""`strata journal`: replay and back up the state of a coordinator."""

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

app = typer.Typer(help="Replay and back up the state of a coordinator.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Replay and back up the state of a coordinator."""


@app.command()
def replay(
    state: Annotated[
        str, typer.Option(help="Path or database URL of the state. Default: a file in your state directory.")
    ] = "",
    job: Annotated[str | None, typer.Option(help="Print only this job.")] = None,
    until: Annotated[int | None, typer.Option(help="Stop after this entry and show the state at that point.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line; the last one is the state.")
    ] = False,
) -> None:
    """Print every journal entry and the state they lead to.

    The coordinator may keep running.
    """
    from strata.coordinator.replay import Replay  # noqa: PLC0415 (imports numpy and sqlalchemy)

    console = Console(highlight=False)
    with Replay(state) as replayed:
        for line in replayed.lines(job_id=job, until=until):
            _print_line(console, line, as_json=as_json)
        jobs, damage = replayed.summary(job_id=job, until=until)
    if as_json:
        found = {"jobs": [asdict(j) for j in jobs], "damage": asdict(damage) if damage else None}
        echo_json(found)
        return
    _print_state(console, jobs, damage)


@app.command()
def backup(
    target: Annotated[Path, typer.Argument(help="File to create; it must not exist.")],
    state: Annotated[
        str, typer.Option(help="Path of the state, or sqlite:///PATH. Default: a file in your state directory.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Copy a SQLite state and verify the copy.

    The coordinator may keep running. Back up a PostgreSQL state with pg_dump
    instead.
    """
    from strata.coordinator.backup import back_up  # noqa: PLC0415 (imports numpy and sqlalchemy)

    made = back_up(state, target)
    if as_json:
        found = {"path": str(made.path), "jobs": made.num_jobs, "last_seq": made.last_seq, "bytes": made.num_bytes}
        echo_json(found)
        return
    jobs, num_bytes = counted(made.num_jobs, "job"), counted(made.num_bytes, "byte")
    echo(f"{made.path}: {jobs}, entries up to {made.last_seq}, {num_bytes}, verified")


def _print_line(console: Console, line: "ReplayLine", *, as_json: bool) -> None:
    if as_json:
        echo_json(asdict(line))
        return
    when = datetime.fromtimestamp(line.at_s, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")
    console.print(
        f"[dim]{line.seq:>6}  {when}[/dim]  [cyan]{escape(line.job_id)}[/cyan]  {escape(line.words)}", soft_wrap=True
    )


def _print_state(console: Console, jobs: "list[JobSummary]", damage: "Damage | None") -> None:
    if damage is not None:
        console.print(
            f"[bold red]damaged from entry {damage.seq}[/bold red]: {escape(damage.reason)} "
            f"({counted(damage.num_lost, 'entry', 'entries')} lost; damaged state kept at {escape(damage.kept_at)})"
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
        console.print(f"last change: {escape(job.reason)}", soft_wrap=True)
        if job.checkpoint_id:
            console.print(f"checkpoint: {escape(job.checkpoint_id)} (step {job.checkpoint_step})")
