"""`strata demo`: train a small model, kill a worker and verify the result."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from strata.cli.exit_codes import ExitCode
from strata.terminal import Console, echo_json

NUM_SERVERS = 2
"""Parameter servers of `strata demo --servers`."""


def demo(
    workers: Annotated[int, typer.Option(help="Number of worker processes.")] = 2,
    servers: Annotated[
        bool, typer.Option("--servers", help="Train with two parameter servers, and kill one of them.")
    ] = False,
    rows: Annotated[int, typer.Option(help="Number of rows in the generated dataset.")] = 200_000,
    kills: Annotated[int, typer.Option(help="Number of times a process is killed.")] = 1,
    seed: Annotated[int, typer.Option(help="Random seed for the data and for what is killed when.")] = 7,
    keep: Annotated[Path | None, typer.Option(help="Keep data, logs and checkpoints in this new directory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the results, as one JSON object.")] = False,
    save_svg: Annotated[Path | None, typer.Option(help="Save the output as a picture to this SVG file.")] = None,
) -> None:
    """Kill a worker or a parameter server and verify that no work is lost.

    Trains a small model twice: once undisturbed, once with a worker killed
    halfway (kill -9). Then checks that every row was trained on exactly once per
    epoch and that both models are bit-identical; the exit code is 1 if not. Uses
    a temporary directory and takes about a minute on two cores.
    """
    from strata.demo.config import DemoConfig, check_installed  # noqa: PLC0415 (slow to import)

    check_installed()
    num_servers = NUM_SERVERS if servers else 0
    config = DemoConfig(
        num_workers=workers, num_servers=num_servers, num_rows=rows, num_kills=kills, seed=seed, keep=keep
    )

    from strata.demo import view  # noqa: PLC0415
    from strata.demo.show import Interrupted, Stage, run  # noqa: PLC0415

    stage = Stage(None if as_json else Console(file=sys.stdout, highlight=False))
    try:
        outcome = run(config, stage)
    except Interrupted as interrupted:
        raise typer.Exit(128 + interrupted.number) from None
    if save_svg is not None:
        save_svg.write_text(view.svg(stage.shown, stage.width), encoding="utf-8")
    if as_json:
        echo_json(outcome.as_plain())
    raise typer.Exit(ExitCode.OK if outcome.is_good else ExitCode.FAILED)
