"""The tree of commands. One module a command; what is heavy is imported inside the command, so that help is quick."""

from typing import Annotated

import typer

from strata._version import __version__
from strata.cli import (
    bench,
    certs,
    checkpoints,
    coordinator,
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
)
from strata.terminal import echo

app = typer.Typer(
    name="strata",
    help="A runtime for distributed training: deals out the data, keeps workers in step, brings a job back.",
    epilog=exit_codes.describe(),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        echo(f"strata {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command("run", context_settings={"allow_interspersed_args": False})(run.run)
app.command("ps")(runs.ps)
app.command("logs")(runs.logs)
app.command("rm")(runs.rm)
app.command("stop")(run.stop)
app.command("scale")(run.scale)
app.command("resume")(run.resume)
app.command("demo")(demo.demo)
app.command("coordinator")(coordinator.coordinator)
app.command("relay")(relay.relay)
app.command("status")(status.status)
app.add_typer(jobs.app, name="jobs")
app.command("events")(events.events)
app.add_typer(journal.app, name="journal")
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(data.app, name="data")
app.command("certs")(certs.certs)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)
