"""`strata checkpoints`: what is in a place with checkpoints, whether it can be trusted, and putting it right.

Names in a checkpoint were written by whoever made it, so none reaches a terminal as it is: see `shown`.
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

    from strata.checkpoint.catalog import Catalog
    from strata.checkpoint.format.manifest import Manifest, TensorEntry
    from strata.checkpoint.load.statistics import Statistics
    from strata.checkpoint.tools.diff import Comparison, Difference
    from strata.checkpoint.tools.inspect import Files
    from strata.storage import Store

app = typer.Typer(help="Look at checkpoints, verify, compare, export, compact and remove them.", no_args_is_help=True)

Place = Annotated[
    str, typer.Argument(metavar="PATH|URL|RUN", help="A directory, s3://BUCKET/PREFIX, or the name of a run.")
]
Step = Annotated[int | None, typer.Option(help="The newest one of this step.", min=0)]
Id = Annotated[str | None, typer.Option("--id", help="The one with this id.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--storage-option", metavar="KEY=VALUE", help="For object stores, as region=eu-west-1. Repeatable."),
]
MAX_SHOWN = 100
"""Characters of a name or of metadata in a table."""
_WIDE = 400
"""Columns, where no terminal says how many there are."""
RETRY_TIMEOUT_S = 10
"""Of an object store, unless `--storage-option` says otherwise: somebody is waiting."""


@app.callback()
def root() -> None:
    """Look at checkpoints, verify, compare, export, compact and remove them."""


# -- looking -------------------------------------------------------------------------------------------------------


@app.command()
def ls(place: Place, storage_option: Options = None, as_json: AsJson = False) -> None:
    """List the checkpoints, the newest last, and what is passed over and why.

    The exit code is not 0 if there is no such place; an empty directory is one.
    """
    from strata.checkpoint.catalog import of_manifest  # noqa: PLC0415 (numpy is behind it)
    from strata.clock import SystemClock  # noqa: PLC0415

    with _opened(place, storage_option) as (store, catalog):
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
    for heading in ("id", "step", "epoch", "type", "base", "size", "tensors", "age", "metadata"):
        right = heading in ("step", "epoch", "base", "size", "tensors", "age")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    steps = {c.id: f"step {c.step}" for c, _ in rows}
    for c, num_tensors in rows:
        base = shown(steps.get(c.parent, c.parent)) or "–"
        numbers = (_written(c.size_bytes, c.full_bytes), str(num_tensors), _duration(now_s - c.created_at_s))
        metadata = shown(json.dumps(c.metadata, ensure_ascii=False)) if c.metadata else ""
        table.add_row(shown(c.id), str(c.step), str(c.epoch), c.checkpoint_type.name, base, *numbers, metadata)
    console.print(table if rows else f"there is no checkpoint in {shown(store.url)}")
    _tell_passed_over(console, catalog)


@app.command()
def show(
    place: Place,
    step: Step = None,
    id_: Id = None,
    compute: Annotated[
        bool, typer.Option("--statistics", help="Compute the tensors' statistics from the data, where none are stored.")
    ] = False,
    storage_option: Options = None,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint consists of (the newest, if none is named), without reading its data.

    Of each tensor shape, type, size and file, and its statistics, if they are stored beside it.
    """
    from strata.checkpoint.catalog import of_manifest  # noqa: PLC0415
    from strata.checkpoint.load import statistics  # noqa: PLC0415 (numpy is behind it)
    from strata.checkpoint.tools.inspect import files_holding  # noqa: PLC0415
    from strata.checkpoint.tools.progress import watching  # noqa: PLC0415

    with _opened(place, storage_option) as (store, catalog):
        manifest = catalog.find(**_one(step, id_))
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
    _summarize(console, manifest, info.path, info.model_hash or "")
    headings = ("min", "max", "mean", "norm", "nan", "inf") if known else ()
    rows = [
        (t.name, *_form(t), str(t.num_bytes), *(_numbers_of(known.get(t.name)) if known else ()), ", ".join(files))
        for t, files in tensors
    ]
    _print_columns([("tensor", "shape", "dtype", "bytes", *headings, "file"), *rows])
    if known is None and rows:
        console.print()
        console.print("no statistics are stored beside it; --statistics computes them by reading the data")
    _tell_passed_over(console, catalog)


def _numbers_of(one: "Statistics | None") -> tuple[str, ...]:
    if one is None:
        return ("–",) * 6
    numbers = ("–" if number is None else f"{number:.6g}" for number in (one.min, one.max, one.mean, one.norm))
    return (*numbers, str(one.num_nan), str(one.num_inf))


def _summarize(console: Console, manifest: "Manifest", path: str, model_hash: str) -> None:
    lines = {
        "id": manifest.id,
        "path": path,
        "step": f"{manifest.step}, epoch {manifest.epoch}",
        "type": manifest.type.name + (f" ({manifest.why})" if manifest.why else ""),
        "base": manifest.parent,
        "size": f"{_written(manifest.written_bytes, manifest.full_bytes)} in {counted(len(manifest.files), 'file')}, "
        f"{counted(len(manifest.tensors), 'tensor')}",
        "hash": model_hash,
        "metadata": json.dumps(manifest.metadata, ensure_ascii=False) if manifest.metadata else "",
        "data": manifest.data_cursor,
    }
    for name, text in lines.items():
        if text:
            console.print(f"{name:<9} {shown(text, max_shown=1_000)}", soft_wrap=True)
    console.print()


# -- verifying -----------------------------------------------------------------------------------------------------


@app.command()
def verify(
    place: Place,
    step: Step = None,
    id_: Id = None,
    all_: Annotated[bool, typer.Option("--all", help="All of them, also those whose manifest cannot be read.")] = False,
    storage_option: Options = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of a checkpoint (the newest, if none is named) and compare it with its hash.

    Those in quarantine are passed over, unless they are named. The exit code is 4 if something is wrong.
    """
    from strata.checkpoint.load import integrity  # noqa: PLC0415 (numpy is behind it)
    from strata.checkpoint.tools import inspect  # noqa: PLC0415 (numpy is behind it)
    from strata.checkpoint.tools.progress import watching  # noqa: PLC0415
    from strata.errors import CheckpointInvalid, NoCheckpoint  # noqa: PLC0415

    if all_ and (step is not None or id_ is not None):
        raise typer.BadParameter("say --all, --step or --id, one of them")
    wrong: dict[str, str] = {}
    with _opened(place, storage_option) as (store, catalog):
        if all_:
            manifests = catalog.manifests()
            quarantined = inspect.in_quarantine(store, catalog)
            wrong |= {one: why for one, why in catalog.problems.items() if one not in quarantined}
            if not manifests and not wrong:
                raise NoCheckpoint(f"there is no checkpoint in {store.url}")
        else:
            manifests = [catalog.find(**_one(step, id_))]
        with watching("verifying", sum(manifest.size_bytes for manifest in manifests)) as watch:
            for manifest in manifests:
                try:
                    integrity.verify(store, manifest, watch=watch)
                except CheckpointInvalid as error:
                    wrong[manifest.id] = error.message
    good = [manifest for manifest in manifests if manifest.id not in wrong]
    if as_json:
        found = {"good": [one.id for one in good], "wrong": wrong, "passed_over": catalog.problems}
        echo_json(found)
    else:
        console = _console()
        for manifest in good:
            console.print(f"{shown(manifest.id)} is as it was written, {_size(manifest.size_bytes)}", soft_wrap=True)
        for one, why in wrong.items():
            console.print(f"{shown(one)} is [bold red]damaged[/]: {shown(why, max_shown=2_000)}", soft_wrap=True)
        _tell_passed_over(console, catalog, but=wrong)
    if wrong:
        raise typer.Exit(ExitCode.STATE_DAMAGED)


# -- comparing -----------------------------------------------------------------------------------------------------


@app.command()
def diff(
    place: Place,
    old: Annotated[str, typer.Argument(metavar="A", help="A step or an id.")],
    new: Annotated[str, typer.Argument(metavar="B", help="A step or an id; with --against the same as A.")] = "",
    against: Annotated[
        str, typer.Option(metavar="PATH|URL|RUN", help="Where B is; left out, in the same place as A.")
    ] = "",
    storage_option: Options = None,
    as_json: AsJson = False,
) -> None:
    """Show which tensors differ between two checkpoints, and by how much. Only what differs is read."""
    from strata.checkpoint.tools import diff as comparing  # noqa: PLC0415 (numpy is behind it)
    from strata.checkpoint.tools import inspect  # noqa: PLC0415
    from strata.checkpoint.tools.diff import Side  # noqa: PLC0415

    if not new and not against:
        raise typer.BadParameter("name a second checkpoint, or another place with --against", param_hint="B")
    places = (place, against or place)
    is_any_far = any("://" in one for one in places)  # a directory beside it takes no options
    options = [storage_option if "://" in one or not is_any_far else None for one in places]
    with (
        _opened(places[0], options[0]) as (store, catalog),
        _opened(places[1], options[1]) as (other_store, other_catalog),
    ):
        before, after = inspect.choose(catalog, old), inspect.choose(other_catalog, new or old)
        found = comparing.compare(before, after)
        changed = comparing.measure(Side(store, before), Side(other_store, after), found.changed)
    if as_json:
        sides = [{t.name: t for t in manifest.tensors} for manifest in (before, after)]
        reshaped = {
            name: [{"shape": side[name].shape, "dtype": side[name].dtype} for side in sides] for name in found.reshaped
        }
        told = asdict(found) | {"reshaped": reshaped, "changed": {n: asdict(by) for n, by in changed.items()}}
        echo_json({"a": before.id, "b": after.id, **told})
        return
    _tell_difference(_console(), before, after, found, changed)


def _tell_difference(
    console: Console, before: "Manifest", after: "Manifest", found: "Comparison", changed: "dict[str, Difference]"
) -> None:
    console.print(f"{shown(before.id)} → {shown(after.id)}", soft_wrap=True)
    a, b = ({tensor.name: tensor for tensor in manifest.tensors} for manifest in (before, after))
    rows = [("removed", name, " ".join(_form(a[name]))) for name in found.removed]
    rows += [("added", name, " ".join(_form(b[name]))) for name in found.added]
    rows += [("reshaped", n, f"{' '.join(_form(a[n]))} → {' '.join(_form(b[n]))}") for n in found.reshaped]
    rows += [("changed", name, _in_words(by)) for name, by in changed.items()]
    _print_columns(rows)
    console.print(f"{counted(found.num_same, 'tensor is', 'tensors are')} the same")
    if not found.same_structure:
        console.print("the plain values beside the tensors, or their order, differ")


def _in_words(by: "Difference") -> str:
    if not by.num_different:
        return "the same elements, cut differently"
    words = f"{by.num_different} of {by.num_elements} elements"
    if by.max_abs is not None:
        words += f", by up to {by.max_abs:g}" if isinstance(by.max_abs, float) else f", by up to {by.max_abs}"
    return words + (f", {by.num_not_finite} infinite or not a number" if by.num_not_finite else "")


@app.command()
def export(
    place: Place,
    output: Annotated[Path, typer.Option(help="FILE.safetensors, or FILE.pt for torch.load.")],
    only: Annotated[list[str] | None, typer.Option(help="Tensors whose names match, as 'model.*'. Repeatable.")] = None,
    strip_prefix: Annotated[
        str, typer.Option(metavar="PREFIX", help="Only tensors whose names begin so, and without it, as 'model.'.")
    ] = "",
    step: Step = None,
    id_: Id = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    storage_option: Options = None,
) -> None:
    """Write the tensors of a checkpoint (the newest, if none is named) into one file, verified on the way.

    With --strip-prefix model. the file is what model.load_state_dict takes.
    """
    from strata.checkpoint.tools.export import export  # noqa: PLC0415 (numpy is behind it)
    from strata.checkpoint.tools.progress import watching  # noqa: PLC0415

    with _opened(place, storage_option) as (store, catalog):
        manifest = catalog.find(**_one(step, id_))
        with watching("exporting", None if only or strip_prefix else manifest.full_bytes) as watch:
            num_tensors = export(
                store, manifest, output, only=only or (), strip_prefix=strip_prefix, force=force, watch=watch
            )
    what = f"{counted(num_tensors, 'tensor')} of {shown(manifest.id)}, {_size(output.stat().st_size)}"
    _console().print(f"{shown(str(output))}: {what}", soft_wrap=True)


# -- putting right -------------------------------------------------------------------------------------------------


@app.command()
def rm(place: Place, step: Step = None, id_: Id = None, yes: Yes = False, storage_option: Options = None) -> None:
    """Remove a checkpoint: the newest one of a step, or the one of an id. A base that others refer to stays."""

    from strata.checkpoint.tools import inspect  # noqa: PLC0415 (numpy is behind it)

    if step is None and id_ is None:
        raise typer.BadParameter("say which: --step N or --id ID")
    with _opened(place, storage_option) as (store, catalog):
        files = inspect.removable(store, catalog, **_one(step, id_))
        _ask(f"Remove {_what(files)} from {store.url}?", yes=yes)
        inspect.remove(store, catalog, files)
    _console().print(f"{shown(_what(files))} is removed", soft_wrap=True)


@app.command()
def compact(place: Place, step: Step = None, id_: Id = None, storage_option: Options = None) -> None:
    """Write an incremental checkpoint anew, in full, and remove it: then it needs no base. A full one stays as it is.

    The newest one of a step, or the one of an id.
    """
    from strata.checkpoint import CheckpointManager  # noqa: PLC0415 (numpy is behind it)

    if step is None and id_ is None:
        raise typer.BadParameter("say which: --step N or --id ID")
    url, options = _located(place, storage_option)
    with CheckpointManager(url, storage_options=options, saver="thread") as manager:
        whole = manager.compact(**_one(step, id_))
    _console().print(f"{shown(whole.id)} needs no other, {_size(whole.size_bytes)}", soft_wrap=True)


@app.command()
def repair(
    place: Place,
    lift: Annotated[str | None, typer.Option(metavar="ID", help="Verify it, and take it out of quarantine.")] = None,
    collect: Annotated[
        bool, typer.Option("--collect", help="Remove what saves left that were given up over an hour ago.")
    ] = False,
    yes: Yes = False,
    storage_option: Options = None,
) -> None:
    """List what is in quarantine or damaged, and what saves left that were never committed; put it right."""
    from strata.checkpoint.tools import inspect  # noqa: PLC0415 (numpy is behind it)
    from strata.checkpoint.tools.progress import watching  # noqa: PLC0415
    from strata.clock import SystemClock  # noqa: PLC0415

    console = _console()
    with _opened(place, storage_option) as (store, catalog):
        if lift is not None:
            with watching("verifying", catalog.find(id=lift).size_bytes) as watch:
                lifted = inspect.lift(store, catalog, lift, watch=watch)
            console.print(f"{shown(lifted.id)} is as it was written, and out of quarantine", soft_wrap=True)
        catalog.manifests()
        _tell_passed_over(console, catalog)
        now_s = SystemClock().wall_s()
        left = inspect.leftovers(store)
        for files in left:
            state = "given up" if files.is_abandoned(now_s=now_s) else "perhaps still being written"
            age = _duration(now_s - files.modified_at_s)
            console.print(f"{shown(_what(files))} has no manifest: {state}, last written {age} ago", soft_wrap=True)
        if collect:
            _collect(console, store, [files for files in left if files.is_abandoned(now_s=now_s)], yes=yes)
        elif not left and not catalog.problems:
            console.print("there is nothing to repair")


def _collect(console: Console, store: "Store", given_up: "list[Files]", *, yes: bool) -> None:

    from strata.checkpoint.tools import inspect  # noqa: PLC0415 (numpy is behind it)

    if given_up:
        _ask(f"Remove the {len(given_up)} that were given up from {store.url}?", yes=yes)
    num_removed = sum(inspect.collect(store, files) for files in given_up)
    console.print(f"{counted(num_removed, 'leftover is', 'leftovers are')} removed")


# -- within --------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(place: str, storage_option: list[str] | None) -> "Iterator[tuple[Store, Catalog]]":
    import logging  # noqa: PLC0415

    from strata.checkpoint.catalog import Catalog  # noqa: PLC0415 (numpy is behind it)
    from strata.storage import open_store  # noqa: PLC0415

    logging.getLogger("strata.checkpoint.catalog").addHandler(logging.NullHandler())  # we show what is passed over
    store = open_store(*_located(place, storage_option))
    try:
        yield store, Catalog(store)
    finally:
        store.close()


def _located(place: str, storage_option: list[str] | None) -> tuple[str, dict[str, str]]:
    """The directory or URL that is meant, and the options for it. What is neither, nor a path, is a run's name.

    Raises:
        ConfigError: There is no such place.
    """
    from strata.errors import ConfigError  # noqa: PLC0415

    options = _pairs(storage_option)
    if "://" not in place:
        path = Path(place).expanduser()
        is_name = path.name == place and place not in (".", "..")
        if is_name and not path.exists():
            place, of_run = _of_run(place)
            options = of_run | options
        elif not path.is_dir():
            raise ConfigError(f"there is no directory {place}; name one, a URL, or a run", field="place")
    if "://" in place and not place.startswith(("file:", "memory:")):
        options.setdefault("retry_timeout_s", str(RETRY_TIMEOUT_S))
    return place, options


def _of_run(name: str) -> tuple[str, dict[str, str]]:
    """Where a run keeps its checkpoints."""
    from strata.errors import ConfigError  # noqa: PLC0415
    from strata.launch.environment import storage_options_in  # noqa: PLC0415
    from strata.launch.record.directory import open_run  # noqa: PLC0415

    try:
        run = open_run(name)
    except ConfigError as error:
        raise ConfigError(f"there is no directory {name} here, and {error.message}", field="place") from None
    status = run.status
    place_of_last = status.checkpoint.rpartition("/")[0] if status is not None else ""
    url = place_of_last or run.spec.checkpoints  # a script may name another
    if "://" not in url and not Path(url).is_dir():
        raise ConfigError(
            f"run {run.name} has no checkpoints: there is no {url}; if its script names another place "
            "(strata.init(checkpoints=…)), name that one",
            field="place",
        )
    return url, storage_options_in(run.spec.variables)


def _require_objects(store: "Store") -> None:
    """An object store has no empty directories: where there is nothing, there is no such place."""
    from strata.errors import NoCheckpoint  # noqa: PLC0415

    if next(iter(store.walk()), None) is None:
        raise NoCheckpoint(f"there is nothing at {store.url}; correct its name, or save a checkpoint there first")


def _pairs(storage_option: list[str] | None) -> dict[str, str]:
    pairs = [option.partition("=") for option in storage_option or ()]
    if not all(key and separator for key, separator, _ in pairs):
        raise typer.BadParameter("write it as KEY=VALUE", param_hint="--storage-option")
    return {key: value for key, _, value in pairs}


def _one(step: int | None, id_: str | None) -> dict[str, Any]:
    if step is not None and id_ is not None:
        raise typer.BadParameter("say --step or --id, not both")
    return {"step": step, "id": id_}


def _ask(question: str, *, yes: bool) -> None:
    if not yes:
        typer.confirm(printable(question), abort=True)


def _tell_passed_over(console: Console, catalog: "Catalog", *, but: Any = ()) -> None:
    for one, why in sorted(catalog.problems.items()):
        if one not in but:
            console.print(f"[yellow]passed over:[/] {shown(one)}: {shown(why, max_shown=2_000)}", soft_wrap=True)


def _print_columns(rows: "Sequence[Sequence[str]]") -> None:
    """Of thousands of tensors: a table of rich takes a second for each thousand."""
    clipped = [[printable(_clipped(cell, MAX_SHOWN)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*clipped, strict=True)]
    for row in clipped:
        echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def shown(text: str, *, max_shown: int = MAX_SHOWN) -> str:
    """As it may be printed: neither markup nor anything that a terminal would obey, and not without end."""
    return escape(printable(_clipped(text, max_shown)))


def _clipped(text: str, max_shown: int) -> str:
    return text if len(text) <= max_shown else f"{text[: max_shown - 1]}…"


def _console() -> Console:
    """A pipe has no width: nothing is folded there."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)


def _form(tensor: "TensorEntry") -> tuple[str, str]:
    return "×".join(map(str, tensor.shape)) or "scalar", tensor.dtype


def _what(files: "Files") -> str:
    return f"{files.id} ({counted(len(files.keys), 'file')}, {_size(files.size_bytes)})"


def _written(num_bytes: int, full_bytes: int) -> str:
    """Also of an incremental checkpoint, which holds only a part of the state."""
    return _size(num_bytes) if num_bytes >= full_bytes else f"{_size(num_bytes)} of {_size(full_bytes)}"


def _size(num_bytes: int) -> str:
    if num_bytes < 1024:
        return f"{num_bytes} B"
    num_bytes = min(num_bytes, 1 << 70)  # a manifest may claim anything
    power = min(int(math.log(num_bytes, 1024)), 5)
    return f"{num_bytes / 1024**power:.1f} {'KMGTP'[power - 1]}iB"


def _duration(seconds: float) -> str:
    """Also of a clock that runs ahead of ours, or of one that is a lie."""
    seconds = min(seconds, 36_500 * 86_400)
    for limit, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= limit:
            return f"{seconds / limit:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"
