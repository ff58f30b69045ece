"""`strata demo`: see it work."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from strata.cli.exit_codes import ExitCode
from strata.terminal import Console, echo_json


def demo(
    workers: Annotated[int, typer.Option(help="How many worker processes train.")] = 2,
    rows: Annotated[int, typer.Option(help="How many clicks the data has.")] = 200_000,
    kills: Annotated[int, typer.Option(help="How often a worker is killed.")] = 1,
    seed: Annotated[int, typer.Option(help="Who is killed and when, and what is in the data.")] = 7,
    keep: Annotated[Path | None, typer.Option(help="Keep data, logs and checkpoints in this new directory.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was found as one JSON object, nothing else.")
    ] = False,
    save_svg: Annotated[Path | None, typer.Option(help="Keep a picture of all that was shown in this file.")] = None,
) -> None:
    """Train a small model on 2 workers, kill one of them, and check that nothing came of it.

    Trains it twice, undisturbed and with kill -9 of a worker in the middle. Then every row was trained on exactly
    once in each epoch, and both models are the same, bit for bit; otherwise the exit code is 1. All in a temporary
    directory; about a minute on two cores.
    """
    from strata.demo.config import DemoConfig, check_installed  # noqa: PLC0415 (what is behind it takes a while)

    check_installed()
    config = DemoConfig(num_workers=workers, num_rows=rows, num_kills=kills, seed=seed, keep=keep)

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
