"""`strata checkpoints`: list, inspect, verify, compare, export, compact, repair and remove checkpoints.

Names and metadata in a checkpoint are untrusted input. `shown` escapes them before they reach a terminal.
"""

import json
import math
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from strata.cli.exit_codes import ExitCode
from strata.printing import counted, printable
from strata.terminal import Console, echo, echo_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from strata.checkpoint.catalog import Catalog, CheckpointMetadata
    from strata.checkpoint.format.manifest import Manifest, TensorEntry
    from strata.checkpoint.load.statistics import Statistics
    from strata.checkpoint.tools.diff import Comparison, Difference
    from strata.checkpoint.tools.inspect import Files
    from strata.storage import Store

app = typer.Typer(help="List, verify, compare, export and remove checkpoints.", no_args_is_help=True)

Location = Annotated[
    str, typer.Argument(metavar="PATH|URL|RUN", help="Directory, s3://BUCKET/PREFIX, or the name of a run.")
]
Step = Annotated[int | None, typer.Option(help="Select the newest checkpoint of this step.", min=0)]
Id = Annotated[str | None, typer.Option("--id", help="Select the checkpoint with this id.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option", metavar="KEY=VALUE", help="Object store option, such as region=eu-west-1. Repeatable."
    ),
]
MAX_SHOWN = 100
"""Characters of a name or of metadata in a table."""
_WIDE = 400
"""Width in characters when the output is not a terminal."""
RETRY_TIMEOUT_S = 10
"""Seconds to retry requests to an object store, unless set by `--storage-option`; short, because a person waits."""


@app.callback()
def root() -> None:
    """List, verify, compare, export and remove checkpoints."""


# -- ls, show ------------------------------------------------------------------------------------------------------


@app.command()
def ls(location: Location, storage_option: Options = None, as_json: AsJson = False) -> None:
    """List the checkpoints, newest last.

    Also lists damaged and quarantined checkpoints, which loading skips. An empty
    directory is not an error; a location that does not exist is.
    """
    from strata.checkpoint.catalog import of_manifest  # noqa: PLC0415 (imports numpy)
    from strata.clock import SystemClock  # noqa: PLC0415

    with _opened(location, storage_option) as (store, catalog):
        manifests, now_s = catalog.manifests(), SystemClock().wall_s()
        if not manifests and "://" in store.url:
            _require_objects(store)
        rows = [(of_manifest(manifest, store.url), len(manifest.tensors)) for manifest in manifests]
    if as_json:
        listed = [asdict(c) | {"checkpoint_type": c.checkpoint_type.name, "num_tensors": n} for c, n in rows]
        echo_json({"checkpoints": listed, "passed_over": catalog.problems})
        return
    console = _console()
    table = Table(box=None, pad_edge=False)
    for heading in ("id", "step", "epoch", "type", "base", "size", "tensors", "took", "age", "metadata"):
        right = heading not in ("id", "type", "metadata")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    steps = {c.id: f"step {c.step}" for c, _ in rows}
    for c, num_tensors in rows:
        base = shown(steps.get(c.parent, c.parent)) or "–"
        times = (_took(c.duration_s), _duration(now_s - c.created_at_s))
        numbers = (_written(c.size_bytes, c.full_bytes), str(num_tensors), *times)
        metadata = shown(json.dumps(c.metadata, ensure_ascii=False)) if c.metadata else ""
        table.add_row(shown(c.id), str(c.step), str(c.epoch), c.checkpoint_type.name, base, *numbers, metadata)
    console.print(table if rows else f"no checkpoints in {shown(store.url)}")
    _print_skipped(console, catalog)


@app.command()
def show(
    location: Location,
    step: Step = None,
    id_: Id = None,
    compute: Annotated[
        bool, typer.Option("--statistics", help="Compute tensor statistics from the data if none are stored.")
    ] = False,
    storage_option: Options = None,
    as_json: AsJson = False,
) -> None:
    """Show the metadata and tensors of a checkpoint.

    Shows the newest checkpoint unless --step or --id selects one. Lists shape,
    dtype, size and file of each tensor, and its statistics if they are stored.
    Does not read the tensor data.
    """
    from strata.checkpoint.catalog import of_manifest  # noqa: PLC0415
    from strata.checkpoint.load import statistics  # noqa: PLC0415 (imports numpy)
    from strata.checkpoint.tools.inspect import files_holding  # noqa: PLC0415
    from strata.checkpoint.tools.progress import watching  # noqa: PLC0415

    with _opened(location, storage_option) as (store, catalog):
        manifest = catalog.find(**_selection(step, id_))
        info = of_manifest(manifest, store.url)
        known = statistics.read(store, manifest)
        if known is None and compute:
            with watching("reading", manifest.full_bytes) as watch:
                known = statistics.compute(store, manifest, watch=watch)
    tensors = [(tensor, files_holding(manifest, tensor)) for tensor in manifest.tensors]
    if as_json:
        described = [
            {"name": t.name, "shape": t.shape, "dtype": t.dtype, "num_bytes": t.num_bytes, "files": files}
            | {"statistics": statistics.as_plain((known or {}).get(t.name))}
            for t, files in tensors
        ]
        summary = asdict(info) | {"checkpoint_type": info.checkpoint_type.name}
        echo_json({**summary, "data_cursor": manifest.data_cursor, "tensors": described})
        return
    console = _console()
    _print_summary(console, manifest, info)
    headings = ("min", "max", "mean", "norm", "nan", "inf") if known else ()
    rows = [
        (
            t.name,
            *_shape_and_dtype(t),
            str(t.num_bytes),
            *(_cells(known.get(t.name)) if known else ()),
            ", ".join(files),
        )
        for t, files in tensors
    ]
    _print_columns([("tensor", "shape", "dtype", "bytes", *headings, "file"), *rows])
    if known is None and rows:
        console.print()
        console.print("no statistics stored; --statistics computes them from the data")
    _print_skipped(console, catalog)


def _cells(one: "Statistics | None") -> tuple[str, ...]:
    if one is None:
        return ("–",) * 6
    numbers = ("–" if number is None else f"{number:.6g}" for number in (one.min, one.max, one.mean, one.norm))
    return (*numbers, str(one.num_nan), str(one.num_inf))


def _print_summary(console: Console, manifest: "Manifest", info: "CheckpointMetadata") -> None:
    lines = {
        "id": manifest.id,
        "path": info.path,
        "step": f"{manifest.step}, epoch {manifest.epoch}",
        "type": manifest.type.name + (f" ({manifest.why})" if manifest.why else ""),
        "base": manifest.parent,
        "size": f"{_written(manifest.written_bytes, manifest.full_bytes)} in {counted(len(manifest.files), 'file')}, "
        f"{counted(len(manifest.tensors), 'tensor')}",
        "took": _took_in_words(info),
        "hash": info.model_hash or "",
        "metadata": json.dumps(manifest.metadata, ensure_ascii=False) if manifest.metadata else "",
        "data": manifest.data_cursor,
    }
    for name, text in lines.items():
        if text:
            console.print(f"{name:<9} {shown(text, max_shown=1_000)}", soft_wrap=True)
    console.print()


# -- verify --------------------------------------------------------------------------------------------------------


@app.command()
def verify(
    location: Location,
    step: Step = None,
    id_: Id = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Verify all checkpoints, including those with an unreadable manifest.")
    ] = False,
    storage_option: Options = None,
    as_json: AsJson = False,
) -> None:
    """Verify every byte of a checkpoint against its hashes.

    Verifies the newest checkpoint unless --step, --id or --all selects others.
    Skips quarantined checkpoints unless --id names one. The exit code is 4 if a
    checkpoint is damaged.
    """
    from strata.checkpoint.load import integrity  # noqa: PLC0415 (imports numpy)
    from strata.checkpoint.tools import inspect  # noqa: PLC0415 (imports numpy)
    from strata.checkpoint.tools.progress import watching  # noqa: PLC0415
    from strata.errors import CheckpointInvalid, NoCheckpoint  # noqa: PLC0415

    if all_ and (step is not None or id_ is not None):
        raise typer.BadParameter("give only one of --all, --step and --id")
    damaged: dict[str, str] = {}
    with _opened(location, storage_option) as (store, catalog):
        if all_:
            manifests = catalog.manifests()
            quarantined = inspect.in_quarantine(store, catalog)
            damaged |= {one: why for one, why in catalog.problems.items() if one not in quarantined}
            if not manifests and not damaged:
                raise NoCheckpoint(f"no checkpoints in {store.url}; check the location")
        else:
            manifests = [catalog.find(**_selection(step, id_))]
        with watching("verifying", sum(manifest.size_bytes for manifest in manifests)) as watch:
            for manifest in manifests:
                try:
                    integrity.verify(store, manifest, watch=watch)
                except CheckpointInvalid as error:
                    damaged[manifest.id] = error.message
    good = [manifest for manifest in manifests if manifest.id not in damaged]
    if as_json:
        found = {"good": [one.id for one in good], "wrong": damaged, "passed_over": catalog.problems}
        echo_json(found)
    else:
        console = _console()
        for manifest in good:
            console.print(f"{shown(manifest.id)} is intact, {_size(manifest.size_bytes)}", soft_wrap=True)
        for one, why in damaged.items():
            console.print(f"{shown(one)} is [bold red]damaged[/]: {shown(why, max_shown=2_000)}", soft_wrap=True)
        _print_skipped(console, catalog, but=damaged)
    if damaged:
        raise typer.Exit(ExitCode.STATE_DAMAGED)


# -- diff ----------------------------------------------------------------------------------------------------------


@app.command()
def diff(
    location: Location,
    old: Annotated[str, typer.Argument(metavar="A", help="Step or id of the first checkpoint.")],
    new: Annotated[
        str, typer.Argument(metavar="B", help="Step or id of the second checkpoint. Default with --against: A.")
    ] = "",
    against: Annotated[
        str, typer.Option(metavar="PATH|URL|RUN", help="Location of B. Default: the location of A.")
    ] = "",
    storage_option: Options = None,
    as_json: AsJson = False,
) -> None:
    """Show which tensors differ between two checkpoints.

    Shows by how much they differ. Compares hashes first and reads only data
    whose hashes differ.
    """
    from strata.checkpoint.tools import inspect  # noqa: PLC0415
    from strata.checkpoint.tools.diff import Side, compare, measure  # noqa: PLC0415 (imports numpy)

    if not new and not against:
        raise typer.BadParameter("give a second checkpoint, or another location with --against", param_hint="B")
    locations = (location, against or location)
    is_any_remote = any("://" in one for one in locations)  # a local directory next to a URL takes no options
    options = [storage_option if "://" in one or not is_any_remote else None for one in locations]
    with (
        _opened(locations[0], options[0]) as (store, catalog),
        _opened(locations[1], options[1]) as (other_store, other_catalog),
    ):
        before, after = inspect.choose(catalog, old), inspect.choose(other_catalog, new or old)
        found = compare(before, after)
        changed = measure(Side(store, before), Side(other_store, after), found.changed)
    if as_json:
        sides = [{t.name: t for t in manifest.tensors} for manifest in (before, after)]
        reshaped = {
            name: [{"shape": side[name].shape, "dtype": side[name].dtype} for side in sides] for name in found.reshaped
        }
        report = asdict(found) | {"reshaped": reshaped, "changed": {n: asdict(by) for n, by in changed.items()}}
        echo_json({"a": before.id, "b": after.id, **report})
        return
    _print_difference(_console(), before, after, found, changed)


def _print_difference(
    console: Console, before: "Manifest", after: "Manifest", found: "Comparison", changed: "dict[str, Difference]"
) -> None:
    console.print(f"{shown(before.id)} → {shown(after.id)}", soft_wrap=True)
    a, b = ({tensor.name: tensor for tensor in manifest.tensors} for manifest in (before, after))
    rows = [("removed", name, _form(a[name])) for name in found.removed]
    rows += [("added", name, _form(b[name])) for name in found.added]
    rows += [("reshaped", name, f"{_form(a[name])} → {_form(b[name])}") for name in found.reshaped]
    rows += [("changed", name, _describe(by)) for name, by in changed.items()]
    _print_columns(rows)
    console.print(counted(found.num_same, "identical tensor"))
    if not found.same_structure:
        console.print("values other than tensors, or the order of entries, differ")


def _form(tensor: "TensorEntry") -> str:
    return " ".join(_shape_and_dtype(tensor))


def _describe(by: "Difference") -> str:
    if not by.num_different:
        return "identical elements, stored in different chunks"
    text = f"{by.num_different} of {by.num_elements} elements"
    if by.max_abs is not None:
        text += f", by up to {by.max_abs:g}" if isinstance(by.max_abs, float) else f", by up to {by.max_abs}"
    return text + (f", {by.num_not_finite} infinite or NaN" if by.num_not_finite else "")


# -- export --------------------------------------------------------------------------------------------------------


@app.command()
def export(
    location: Location,
    output: Annotated[Path, typer.Option(help="File to write: FILE.safetensors, or FILE.pt for torch.load.")],
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Export only tensors whose names match, such as 'model.*'. Repeatable."),
    ] = None,
    strip_prefix: Annotated[
        str,
        typer.Option(
            metavar="PREFIX", help="Export only tensors whose names start with PREFIX, and remove it from the names."
        ),
    ] = "",
    step: Step = None,
    id_: Id = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    storage_option: Options = None,
) -> None:
    """Write the tensors of a checkpoint to one file.

    Exports the newest checkpoint unless --step or --id selects one, and verifies
    all data it reads. With --strip-prefix model. the file is a state dict for
    model.load_state_dict.
    """
    from strata.checkpoint.tools.export import export  # noqa: PLC0415 (imports numpy)
    from strata.checkpoint.tools.progress import watching  # noqa: PLC0415

    with _opened(location, storage_option) as (store, catalog):
        manifest = catalog.find(**_selection(step, id_))
        with watching("exporting", None if only or strip_prefix else manifest.full_bytes) as watch:
            num_tensors = export(
                store, manifest, output, only=only or (), strip_prefix=strip_prefix, force=force, watch=watch
            )
    what = f"{counted(num_tensors, 'tensor')} of {shown(manifest.id)}, {_size(output.stat().st_size)}"
    _console().print(f"{shown(str(output))}: {what}", soft_wrap=True)


# -- rm, compact, repair -------------------------------------------------------------------------------------------


@app.command()
def rm(location: Location, step: Step = None, id_: Id = None, yes: Yes = False, storage_option: Options = None) -> None:
    """Remove one checkpoint, selected by step or id.

    Refuses to remove a checkpoint that is the base of incremental ones.
    """

    from strata.checkpoint.tools import inspect  # noqa: PLC0415 (imports numpy)

    if step is None and id_ is None:
        raise typer.BadParameter("select a checkpoint: --step N or --id ID")
    with _opened(location, storage_option) as (store, catalog):
        files = inspect.removable(store, catalog, **_selection(step, id_))
        _ask(f"Remove {_describe_files(files)} from {store.url}?", yes=yes)
        inspect.remove(store, catalog, files)
    _console().print(f"removed {shown(_describe_files(files))}", soft_wrap=True)


@app.command()
def compact(location: Location, step: Step = None, id_: Id = None, storage_option: Options = None) -> None:
    """Rewrite an incremental checkpoint as a full one.

    The full checkpoint replaces the incremental one and needs no base. A
    checkpoint that is full already is left unchanged.
    """
    from strata.checkpoint import CheckpointManager  # noqa: PLC0415 (imports numpy)

    if step is None and id_ is None:
        raise typer.BadParameter("select a checkpoint: --step N or --id ID")
    url, options = _locate(location, storage_option)
    with CheckpointManager(url, storage_options=options, saver="thread") as manager:
        full = manager.compact(**_selection(step, id_))
    _console().print(f"{shown(full.id)} is a full checkpoint, {_size(full.size_bytes)}", soft_wrap=True)


@app.command()
def repair(
    location: Location,
    lift: Annotated[
        str | None, typer.Option(metavar="ID", help="Verify this checkpoint and release it from quarantine.")
    ] = None,
    collect: Annotated[
        bool, typer.Option("--collect", help="Remove files of unfinished saves that are older than an hour.")
    ] = False,
    yes: Yes = False,
    storage_option: Options = None,
) -> None:
    """List and repair damaged checkpoints and unfinished saves.

    Lists quarantined and damaged checkpoints, and files of saves that were never
    committed. Changes nothing without --lift or --collect.
    """
    from strata.checkpoint.tools import inspect  # noqa: PLC0415 (imports numpy)
    from strata.checkpoint.tools.progress import watching  # noqa: PLC0415
    from strata.clock import SystemClock  # noqa: PLC0415

    console = _console()
    with _opened(location, storage_option) as (store, catalog):
        if lift is not None:
            with watching("verifying", catalog.find(id=lift).size_bytes) as watch:
                lifted = inspect.lift(store, catalog, lift, watch=watch)
            console.print(f"{shown(lifted.id)} is intact and released from quarantine", soft_wrap=True)
        catalog.manifests()
        _print_skipped(console, catalog)
        now_s = SystemClock().wall_s()
        left = inspect.leftovers(store)
        for files in left:
            state = "abandoned" if files.is_abandoned(now_s=now_s) else "perhaps still being written"
            age = _duration(now_s - files.modified_at_s)
            described = shown(_describe_files(files))
            console.print(f"{described} is an unfinished save: {state}, last written {age} ago", soft_wrap=True)
        if collect:
            _collect(console, store, [files for files in left if files.is_abandoned(now_s=now_s)], yes=yes)
        elif not left and not catalog.problems:
            console.print("nothing to repair")


def _collect(console: Console, store: "Store", abandoned: "list[Files]", *, yes: bool) -> None:
    from strata.checkpoint.tools import inspect  # noqa: PLC0415 (imports numpy)

    if abandoned:
        _ask(f"Remove {counted(len(abandoned), 'abandoned save')} from {store.url}?", yes=yes)
    num_removed = sum(inspect.collect(store, files) for files in abandoned)
    console.print(f"removed {counted(num_removed, 'abandoned save')}")


# -- locations -----------------------------------------------------------------------------------------------------


@contextmanager
def _opened(location: str, storage_option: list[str] | None) -> "Iterator[tuple[Store, Catalog]]":
    import logging  # noqa: PLC0415

    from strata.checkpoint.catalog import Catalog  # noqa: PLC0415 (imports numpy)
    from strata.storage import open_store  # noqa: PLC0415

    logging.getLogger("strata.checkpoint.catalog").addHandler(logging.NullHandler())  # `_print_skipped` shows the same
    store = open_store(*_locate(location, storage_option))
    try:
        yield store, Catalog(store)
    finally:
        store.close()


def _locate(location: str, storage_option: list[str] | None) -> tuple[str, dict[str, str]]:
    """Return the directory or URL, and its storage options; resolve the name of a run.

    Raises:
        ConfigError: Neither the directory nor a run of this name exists.
    """
    from strata.errors import ConfigError  # noqa: PLC0415

    options = _pairs(storage_option)
    if "://" not in location:
        path = Path(location).expanduser()
        is_name = path.name == location and location not in (".", "..")
        if is_name and not path.exists():
            location, options_of_run = _locate_run(location)
            options = options_of_run | options
        elif not path.is_dir():
            raise ConfigError(
                f"directory {location} does not exist; give a directory, a URL or a run", field="location"
            )
    return location, _impatient(location, options)


def located_options(location: str, storage_option: list[str] | None) -> dict[str, str]:
    """Return the storage options of a location; a local one takes none."""
    return _impatient(location, _pairs(storage_option)) if "://" in location else {}


def _impatient(location: str, options: dict[str, str]) -> dict[str, str]:
    if "://" in location and not location.startswith(("file:", "memory:")):
        options.setdefault("retry_timeout_s", str(RETRY_TIMEOUT_S))
    return options


def _locate_run(name: str) -> tuple[str, dict[str, str]]:
    """Return the directory or URL of a run's checkpoints, and its storage options."""
    from strata.errors import ConfigError  # noqa: PLC0415
    from strata.launch.environment import storage_options_in  # noqa: PLC0415
    from strata.launch.record.directory import open_run  # noqa: PLC0415

    try:
        run = open_run(name)
    except ConfigError as error:
        raise ConfigError(f"directory {name} does not exist, and {error.message}", field="location") from None
    return run.locate_checkpoints(), storage_options_in(run.spec.variables)


def _require_objects(store: "Store") -> None:
    """Refuse an empty prefix: object stores have no empty directories, so it is probably a typo.

    Raises:
        NoCheckpoint: There are no objects under the prefix.
    """
    from strata.errors import NoCheckpoint  # noqa: PLC0415

    if next(iter(store.walk()), None) is None:
        raise NoCheckpoint(f"no objects at {store.url}; correct the location or save a checkpoint there first")


def _pairs(storage_option: list[str] | None) -> dict[str, str]:
    pairs = [option.partition("=") for option in storage_option or ()]
    if not all(key and separator for key, separator, _ in pairs):
        raise typer.BadParameter("must have the form KEY=VALUE", param_hint="--storage-option")
    return {key: value for key, _, value in pairs}


def _selection(step: int | None, id_: str | None) -> dict[str, Any]:
    if step is not None and id_ is not None:
        raise typer.BadParameter("give --step or --id, not both")
    return {"step": step, "id": id_}


def _ask(question: str, *, yes: bool) -> None:
    if not yes:
        typer.confirm(printable(question), abort=True)


# -- printing ------------------------------------------------------------------------------------------------------


def _print_skipped(console: Console, catalog: "Catalog", *, but: Any = ()) -> None:
    for one, why in sorted(catalog.problems.items()):
        if one not in but:
            console.print(f"[yellow]skipped:[/] {shown(one)}: {shown(why, max_shown=2_000)}", soft_wrap=True)


def _print_columns(rows: "Sequence[Sequence[str]]") -> None:
    """Print aligned columns. A rich table would take a second per thousand tensors."""
    clipped = [[printable(_clipped(cell, MAX_SHOWN)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*clipped, strict=True)]
    for row in clipped:
        echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def shown(text: str, *, max_shown: int = MAX_SHOWN) -> str:
    """Return untrusted text without markup and control characters, cut to `max_shown` characters."""
    return escape(printable(_clipped(text, max_shown)))


def _clipped(text: str, max_shown: int) -> str:
    return text if len(text) <= max_shown else f"{text[: max_shown - 1]}…"


def _console() -> Console:
    """Return a console that wraps lines only on a terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)


def _shape_and_dtype(tensor: "TensorEntry") -> tuple[str, str]:
    return "×".join(map(str, tensor.shape)) or "scalar", tensor.dtype


def _describe_files(files: "Files") -> str:
    return f"{files.id} ({counted(len(files.keys), 'file')}, {_size(files.size_bytes)})"


def _written(num_bytes: int, full_bytes: int) -> str:
    """Return the size; for an incremental checkpoint also the size of the full state."""
    return _size(num_bytes) if num_bytes >= full_bytes else f"{_size(num_bytes)} of {_size(full_bytes)}"


def _size(num_bytes: int) -> str:
    if num_bytes < 1024:
        return f"{num_bytes} B"
    num_bytes = min(num_bytes, 1 << 70)  # a manifest may claim anything
    power = min(int(math.log(num_bytes, 1024)), 5)
    return f"{num_bytes / 1024**power:.1f} {'KMGTP'[power - 1]}iB"


def _took(seconds: float | None) -> str:
    """Return `0.25s` or `12m`; a dash if it was not measured."""
    if seconds is None:
        return "–"
    return _duration(seconds) if seconds >= 100 else f"{seconds:.3g}s"


def _took_in_words(info: "CheckpointMetadata") -> str:
    if info.duration_s is None:
        return ""
    stall = "" if info.stall_s is None else f"; training was blocked for {_took(info.stall_s)} of it"
    return f"{_took(info.duration_s)}{stall}"


def _duration(seconds: float) -> str:
    """Return `5s`, `12m`, `3h` or `4d`, within 0 s and 100 years: the other clock may be wrong or forged."""
    seconds = min(seconds, 36_500 * 86_400)
    for limit, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= limit:
            return f"{seconds / limit:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"
