"""`strata bench`: run the benchmarks of Strata and of comparable systems."""

from typing import Annotated

import typer

from strata.terminal import echo


def bench(
    name: Annotated[
        str | None, typer.Argument(help="Benchmark to run; --list prints the names.", show_default=False)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Number of rounds. Default: 3 or 5, depending on the benchmark.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run small sizes as a smoke test. Do not quote these figures.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON; print the tables to stderr.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="Run only this contender. Repeatable. Default: all contenders.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Set a size of the benchmark, such as gib=0.25 or tensors=64. Repeatable. "
            "An unknown name prints the available settings.",
            show_default=False,
        ),
    ] = None,
    list_names: Annotated[bool, typer.Option("--list", help="List the benchmarks.")] = False,
    run_all: Annotated[bool, typer.Option("--all", help="Run every benchmark in turn.")] = False,
) -> None:
    """Measure Strata and comparable systems on this machine.

    Systems that are not installed are skipped and listed.
    """
    if [name is not None, list_names, run_all].count(True) != 1:
        raise typer.BadParameter("give the name of one benchmark, --all or --list")

    from strata import bench as benchmarks  # noqa: PLC0415 (imports numpy and grpc)

    if list_names:
        echo(*benchmarks.names())
        return
    if run_all and settings:
        raise typer.BadParameter("--set applies to one benchmark and cannot be combined with --all")
    chosen = benchmarks.names() if name is None else [name]
    codes = [
        benchmarks.main(one, rounds=rounds, as_json=as_json, quick=quick, only=only or (), settings=settings or ())
        for one in chosen
    ]
    raise typer.Exit(max(codes))
