"""`strata bench`: measure this machine, ourselves beside others."""

from typing import Annotated

import typer

from strata.terminal import echo


def bench(
    name: Annotated[str | None, typer.Argument(help="Which benchmark; see --list.", show_default=False)] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="How often to measure. Default: the benchmark's own choice.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: does it run? Not for quoting.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON; the tables go to stderr.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="Run this contender only; repeat it for more. Default: all.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A size or shape of the benchmark, such as gib=0.25 or tensors=64; repeat it for more. "
            "A name that it does not have is answered with those that it has.",
            show_default=False,
        ),
    ] = None,
    list_names: Annotated[bool, typer.Option("--list", help="List the benchmarks.")] = False,
    run_all: Annotated[bool, typer.Option("--all", help="Run every benchmark, one after the other.")] = False,
) -> None:
    """Measure Strata on this machine, beside others where they are installed."""
    if [name is not None, list_names, run_all].count(True) != 1:
        raise typer.BadParameter("give the name of one benchmark, or --all, or --list")

    from strata import bench as benchmarks  # noqa: PLC0415 (numpy and grpc are behind it)

    if list_names:
        echo(*benchmarks.names())
        return
    if run_all and settings:
        raise typer.BadParameter("--set is for one benchmark, not for --all")
    wanted = benchmarks.names() if name is None else [name]
    codes = [
        benchmarks.main(one, rounds=rounds, as_json=as_json, quick=quick, only=only or (), settings=settings or ())
        for one in wanted
    ]
    raise typer.Exit(max(codes))
