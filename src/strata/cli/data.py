"""`strata data`: plan a dataset, preview its rows, measure its throughput, index and pack tar shards."""

import importlib
import sys
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from strata.cli.checkpoints import shown
from strata.cli.exit_codes import ExitCode
from strata.printing import counted, printable
from strata.terminal import Console, echo, echo_json

if TYPE_CHECKING:
    from strata.data.plan.plan import Plan

app = typer.Typer(help="Plan, preview and measure datasets; index and pack tar shards.", no_args_is_help=True)

Path = Annotated[str, typer.Argument(metavar="PATH|URL", help="File, directory, glob pattern or s3://BUCKET/PATH.")]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="parquet, orc, csv, json, jsonl, arrow or webdataset. Default: detected from the file names.",
    ),
]
Columns = Annotated[str | None, typer.Option(help="Columns to read, such as a,b,c. Default: all.")]
Filter = Annotated[
    str | None, typer.Option("--filter", help="Read only rows that match, such as 'x > 3 and y in (1, 2)'.")
]
SplitBytes = Annotated[str, typer.Option(help="Target size of a split, such as 128MiB.")]
Workers = Annotated[int | None, typer.Option(help="Number of decode threads. Default: one per core.", min=1)]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option", metavar="KEY=VALUE", help="Object store option, such as region=eu-west-1. Repeatable."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

WIDE = 200
"""Width in characters when the output is not a terminal."""
MAX_CELL = 40


@app.callback()
def root() -> None:
    """Plan, preview and measure datasets; index and pack tar shards."""


@app.command()
def plan(
    path: Path,
    format_: Format = None,
    columns: Columns = None,
    condition: Filter = None,
    split_bytes: SplitBytes = "128MiB",
    workers: Workers = None,
    ranks: Annotated[int, typer.Option(help="Number of ranks (the world size).", min=1)] = 1,
    batch_size: Annotated[int, typer.Option(help="Rows per batch on each rank.", min=1)] = 1024,
    strategy: Annotated[
        str, typer.Option(help="How row groups are assigned to decode threads: lpt, round_robin or size_balanced.")
    ] = "lpt",
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Plan a shuffled epoch.")] = False,
    storage_option: Options = None,
    as_json: AsJson = False,
) -> None:
    """Show the splits, pruning, columns and load balance."""
    from strata.data.batch.policy import describe  # noqa: PLC0415
    from strata.data.order.assignment import Task, balance, by_name  # noqa: PLC0415
    from strata.data.plan import report  # noqa: PLC0415 (imports pyarrow)

    _, dataset = _load(
        path,
        **_choices(format_, columns, condition, split_bytes, workers, storage_option),
        batch_size=batch_size,
        shuffle=shuffle,
        split_strategy=strategy,
        rank=0,
        num_ranks=ranks,
        output_format="numpy",
    )
    made: Plan = dataset.plan
    num_workers = dataset.config.runtime.num_workers
    tasks = [Task(n, int(made.unit_bytes[n]), int(made.unit_rows[n])) for n in range(made.num_units)]
    spread = balance(by_name(strategy)(tasks, num_workers * ranks), tasks)
    policies = describe(dataset.policies or ())
    steps = {"ranks": ranks, "workers": num_workers, "batch_size": batch_size, "batches": len(dataset)}
    steps |= {"lanes": dataset.state_dict()["lanes"], "window": dataset.state_dict()["window"]}
    if as_json:
        found = {
            "num_rows": made.num_rows,
            "num_files": len(made.files),
            "num_units": made.num_units,
            "fingerprint": made.fingerprint,
            "splits": report.rows(made),
            "pruning": asdict(made.pruning),
            "columns": policies,
            "balance": {
                "strategy": strategy,
                "max_over_mean": spread.max_over_mean,
                "std_over_mean": spread.std_over_mean,
            },
            "delivery": steps,
        }
        echo_json(found)
        return
    console, all_workers = _console(), counted(ranks * num_workers, "decode thread")
    console.print(report.as_table(made))
    console.print(_as_table("Columns", policies))
    console.print(
        f"{counted(steps['batches'], 'batch', 'batches')} of {counted(batch_size, 'row')} on each of "
        f"{counted(ranks, 'rank')}, read in {counted(steps['lanes'], 'lane')}"
        + (f", shuffle buffer of {steps['window']:,} rows" if shuffle else "")
    )
    console.print(
        f"{strategy} over {all_workers}: the busiest has {spread.max_over_mean:.2f} × the mean load "
        f"(std/mean {spread.std_over_mean:.2f})"
    )
    if made.num_units < 2 * num_workers * ranks:
        console.print(
            f"only {counted(made.num_units, 'row group')} for {all_workers}: use fewer decode threads or write smaller "
            "row groups"
        )


@app.command()
def peek(
    path: Path,
    format_: Format = None,
    columns: Columns = None,
    condition: Filter = None,
    rows: Annotated[int, typer.Option("--rows", "-n", help="Number of rows to show.", min=1, max=10_000)] = 10,
    storage_option: Options = None,
    as_json: AsJson = False,
) -> None:
    """Show the first rows of a dataset."""
    loader, dataset = _load(
        path,
        **_choices(format_, columns, condition, "128MiB", 1, storage_option),
        batch_size=rows,
        rank=0,
        num_ranks=1,
        output_format="arrow",
    )
    first = next(iter(loader))
    dataset.close()
    listed = first.to_pylist()
    if as_json:
        echo_json({"num_rows": dataset.plan.num_rows, "rows": listed})
        return
    table = Table(box=None, pad_edge=False)
    for field in first.schema:
        heading = Text.assemble(printable(field.name), "\n", (printable(str(field.type)), "dim"))
        table.add_column(heading, overflow="fold")
    for row in listed:
        table.add_row(*(shown(str(value), max_shown=MAX_CELL) for value in row.values()))
    console = _console()
    console.print(table)
    console.print()
    console.print(f"{len(listed):,} of {counted(dataset.plan.num_rows, 'row')}, {counted(len(first.schema), 'column')}")


@app.command()
def bench(
    path: Path,
    format_: Format = None,
    columns: Columns = None,
    condition: Filter = None,
    workers: Workers = None,
    batch_size: Annotated[int, typer.Option(help="Rows per batch.", min=1)] = 4096,
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Shuffle the rows.")] = False,
    seconds: Annotated[
        float, typer.Option(help="Stop after this many seconds or at the end of the epoch.", min=0.1)
    ] = 30.0,
    output_format: Annotated[
        str | None,
        typer.Option(help="Batch type: torch, numpy, arrow, pandas or dict. Default: torch if installed, else numpy."),
    ] = None,
    storage_option: Options = None,
    as_json: AsJson = False,
) -> None:
    """Measure read throughput and show what limits it."""
    from strata.clock import SystemClock  # noqa: PLC0415
    from strata.data.runtime.metrics import describe  # noqa: PLC0415

    loader, dataset = _load(
        path,
        **_choices(format_, columns, condition, "128MiB", workers, storage_option),
        batch_size=batch_size,
        shuffle=shuffle,
        rank=0,
        num_ranks=1,
        output_format=output_format,
    )
    now_s = SystemClock.monotonic_s
    end_s = now_s() + seconds
    with _progress(is_shown=not as_json) as progress:
        task = progress.add_task("reading", total=dataset.plan.num_rows)
        for _ in loader:
            progress.update(task, completed=dataset.position)
            if now_s() >= end_s:
                break
    metrics = dataset.get_metrics()
    dataset.close()
    if as_json:
        echo_json(metrics.to_dict())
        return
    console = _console()
    console.print(describe(metrics))
    first = f"planned in {metrics.plan_s:.2f} s, first batch after {metrics.first_batch_s or 0.0:.2f} s"
    console.print(f"{first}, {metrics.rows_per_s:,.0f} rows/s")


@app.command()
def index(
    path: Path,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit with 1 if an index is needed.")] = False,
    storage_option: Options = None,
    as_json: AsJson = False,
) -> None:
    """Write an index beside each tar shard, so that planning need not walk it."""
    data = _imported("strata.data.indexer")
    with _progress(is_shown=not as_json) as progress:
        task = progress.add_task("indexing", total=None)

        def report(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        made = data.index_shards(
            path, storage_options=_storage_options(storage_option), writes=not check, on_progress=report
        )
    if as_json:
        echo_json(asdict(made))
    else:
        echo(
            f"{counted(made.num_shards, 'shard')}, {counted(made.num_samples, 'sample')}: "
            f"{made.num_written:,} {'without a valid index' if check else 'indexed'}, "
            f"{made.num_kept:,} already indexed, "
            f"{made.num_compressed:,} compressed"
        )
    if check and made.num_written:
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def pack(
    source: Annotated[str, typer.Argument(metavar="DIR", help="Directory of files, such as 0001.jpg and 0001.cls.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Directory for the shards.")],
    max_bytes: Annotated[str, typer.Option(help="Maximum size of a shard, such as 500MB.")] = "500MB",
    max_samples: Annotated[int | None, typer.Option(help="Maximum number of samples in a shard.", min=1)] = None,
    as_json: AsJson = False,
) -> None:
    """Pack a directory into tar shards with indexes; repeat it to resume."""
    packer = _imported("strata.data.packer")
    with _progress(is_shown=not as_json) as progress:
        task = progress.add_task("packing", total=None)

        def report(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        shards = packer.pack(source, target, max_bytes=max_bytes, max_samples=max_samples, on_progress=report)
    if as_json:
        listed = [{name: getattr(shard, name) for name in shard.__struct_fields__} for shard in shards]
        echo_json({"shards": listed})
        return
    num_samples = sum(shard.num_samples for shard in shards)
    echo(f"{counted(len(shards), 'shard')} with {counted(num_samples, 'sample')} in {printable(target)}")


def _load(path: str, **choices: Any) -> tuple[Any, Any]:
    dataset = _imported("strata.data").StructuredDataset
    made: tuple[Any, Any] = dataset.create_dataloader(path, show_progress=sys.stderr.isatty(), **choices)
    return made


def _imported(module: str) -> Any:
    """Import a module that needs pyarrow, or explain what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        echo(
            f"strata data needs the package {error.name}, which is not installed; "
            "run: pip install 'strata-runtime[data]'",
            err=True,
        )
        raise typer.Exit(ExitCode.USAGE) from error


def _choices(
    format_: str | None,
    columns: str | None,
    condition: str | None,
    split_bytes: str,
    workers: int | None,
    storage_option: list[str] | None,
) -> dict[str, Any]:
    return {
        "format": format_,
        "columns": None if columns is None else [name.strip() for name in columns.split(",") if name.strip()],
        "filters": condition,
        "split_bytes": split_bytes,
        "num_workers": workers,
        "storage_options": _storage_options(storage_option),
    }


def _storage_options(given: list[str] | None) -> dict[str, str] | None:
    if not given:
        return None
    for one in given:
        if "=" not in one:
            raise typer.BadParameter(f"{one!r} is not KEY=VALUE", param_hint="--storage-option")
    return dict(one.split("=", 1) for one in given)


def _as_table(title: str, rows: list[dict[str, str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in rows[0] if rows else ():
        table.add_column(heading, overflow="fold")
    for row in islice(rows, 200):
        table.add_row(*(shown(value) for value in row.values()))
    return table


def _progress(*, is_shown: bool) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not is_shown)


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
