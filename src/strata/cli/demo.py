"""`strata demo`: see it work."""

from pathlib import Path
from typing import Annotated

import typer


def demo(
    workers: Annotated[int, typer.Option(help="How many worker processes to start.")] = 4,
    shards: Annotated[int, typer.Option(help="How many shards the pretended dataset has.")] = 400,
    save_svg: Annotated[Path | None, typer.Option(help="Keep the picture of the takeover in this file.")] = None,
) -> None:
    """Watch workers share a dataset, meet at barriers, lose a member to kill -9, and go on.

    The coordinator, the processes, the barriers and the kill are real; the training is pretended.
    """
    from strata.demo import DemoConfig, run  # noqa: PLC0415 (grpc is behind it)

    raise typer.Exit(run(DemoConfig(num_workers=workers, num_shards=shards), save_svg=save_svg))
