"""The tree of commands. Commands import heavy packages inside their functions, so that `--help` stays fast."""

from typing import Annotated

import typer

from strata._version import __version__
from strata.cli import (
    bench,
    certs,
    checkpoints,
    coordinator,
    dashboard,
    data,
    demo,
    doctor,
    events,
    exit_codes,
    jobs,
    journal,
    relay,
    run,
    runs,
    status,
    studies,
    top,
    tune,
)
from strata.terminal import echo

app = typer.Typer(
    name="strata",
    help="Run distributed PyTorch and JAX training that survives failures.",
    epilog=exit_codes.describe(),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        echo(f"strata {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


RUNS, TUNING, STATE, COORDINATOR = "Runs", "Tuning", "Checkpoints and data", "Coordinator"
MACHINE = "This machine"
"""Panels of `strata --help`."""

app.command("run", context_settings={"allow_interspersed_args": False}, rich_help_panel=RUNS)(run.run)
app.command("ps", rich_help_panel=RUNS)(runs.ps)
app.command("logs", rich_help_panel=RUNS)(runs.logs)
app.command("stop", rich_help_panel=RUNS)(run.stop)
app.command("scale", rich_help_panel=RUNS)(run.scale)
app.command("resume", rich_help_panel=RUNS)(run.resume)
app.command("rm", rich_help_panel=RUNS)(runs.rm)
app.command("tune", rich_help_panel=TUNING)(tune.tune)
app.add_typer(studies.app, name="studies", rich_help_panel=TUNING)
app.add_typer(checkpoints.app, name="checkpoints", rich_help_panel=STATE)
app.add_typer(data.app, name="data", rich_help_panel=STATE)
app.command("dashboard", rich_help_panel=STATE)(dashboard.dashboard)
app.command("coordinator", rich_help_panel=COORDINATOR)(coordinator.coordinator)
app.command("relay", rich_help_panel=COORDINATOR)(relay.relay)
app.command("status", rich_help_panel=COORDINATOR)(status.status)
app.command("top", rich_help_panel=COORDINATOR)(top.top)
app.command("events", rich_help_panel=COORDINATOR)(events.events)
app.add_typer(jobs.app, name="jobs", rich_help_panel=COORDINATOR)
app.add_typer(journal.app, name="journal", rich_help_panel=COORDINATOR)
app.command("certs", rich_help_panel=COORDINATOR)(certs.certs)
app.command("demo", rich_help_panel=MACHINE)(demo.demo)
app.command("doctor", rich_help_panel=MACHINE)(doctor.doctor)
app.command("bench", rich_help_panel=MACHINE)(bench.bench)
