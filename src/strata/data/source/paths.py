"""From what a user writes as `path` to the files of a dataset.

A file, a directory, a pattern, or a list of these; `listing.py` looks, this chooses. Files are in plain code point
order of their names, which are relative to where the search began: to the directory; for a pattern, to the directory
before its first wildcard; for a list, to what all its parts have in common. So moving a dataset keeps names and order.
"""

from __future__ import annotations

import collections
import itertools
import operator
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from strata.data.source.filesystem import open_source, path_of, store_of
from strata.data.source.listing import GONE, Place, Search, Seen, common_directory, relative, search_all
from strata.data.source.partitions import hive_keys, hive_partition
from strata.data.source.source import DataFile, without_secrets
from strata.errors import DataFileMissing, InvalidArgument, NoData

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from strata.data.source.source import Source

HIDDEN = "hidden or marker"
SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "parquet": (".parquet", ".pq", ".parq"),
    "orc": (".orc",),
    "csv": (".csv", ".tsv"),
    "json": (".json",),
    "jsonl": (".jsonl", ".ndjson"),
    "arrow": (".arrow", ".feather", ".arrows", ".ipc"),
}
"""By format. `.csv.gz` and the like count as well, see `COMPRESSED`."""
COMPRESSED = (".gz", ".zst", ".bz2")
TEXT_FORMATS = ("csv", "json", "jsonl")
_BY_SUFFIX = {suffix: known for known, suffixes in SUFFIXES.items() for suffix in suffixes}
_MAGIC = {b"PAR1": "parquet", b"PARE": "parquet", b"ORC": "orc", b"ARROW1": "arrow"}


@dataclass(frozen=True, slots=True)
class Found:
    source: Source
    files: tuple[DataFile, ...]
    """At least one; sorted by name."""
    missing: tuple[tuple[str, str], ...] = ()
    """With on_error="skip": the names of links that lead nowhere, and the reason."""
    passed_over: Mapping[str, int] = field(default_factory=dict)
    """How many files were not taken, by suffix ("" for none); under `HIDDEN`, how many files and directories are so."""


def discover(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    suffixes: Sequence[str] | None,
    filesystem: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    partitioning: Literal["hive"] | None = "hive",
    on_error: Literal["raise", "skip"] = "raise",
) -> Found:
    """The files at `path`.

    Args:
        suffixes: What names end with, in any case, see `SUFFIXES`; compressed ones of text are to be named too. None:
            all that are known, or if there is none of these, every file.
        on_error: "skip" leaves out links that lead nowhere, and lists them in `Found.missing`.

    Raises:
        NoData: Nothing is there, or no file is taken; the message says what was found instead.
        InvalidArgument: The parts of a list are on different stores, or name a file twice.
        ConfigError: See `open_source`.
        StorageDenied, StorageUnavailable, StorageError: It cannot be looked at.
        DataFileMissing: A link leads nowhere.
        SchemaMismatch: A partition stands twice in a name.
    """
    if partitioning not in ("hive", None):
        raise InvalidArgument(f"partitioning={partitioning!r}; give 'hive' or None", field="partitioning")
    source, places = _places(path, filesystem, storage_options)
    searches = search_all(source, places)
    taken, passed_over = _choose(searches, suffixes)
    if not any(seen for _, seen in taken):
        raise _nothing_taken(searches, suffixes, passed_over)
    files = _data_files(taken, partitioning)
    _check_once(files)
    missing = [file for file in files if file.size_bytes == GONE]
    reasons = tuple((file.name, str(_leads_nowhere(file))) for file in missing)
    if missing and (on_error == "raise" or len(missing) == len(files)):
        raise _leads_nowhere(missing[0])
    return Found(source, tuple(file for file in files if file.size_bytes != GONE), reasons, passed_over)


def format_of(name: str) -> str | None:
    """The format that a name's suffix stands for."""
    stem, _, last = name.lower().rpartition(".")
    if stem and f".{last}" in COMPRESSED:
        stem, _, last = stem.rpartition(".")
        known = _BY_SUFFIX.get(f".{last}") if stem else None
        return known if known in TEXT_FORMATS else None
    return _BY_SUFFIX.get(f".{last}") if stem else None


def suffixes_of(format_name: str) -> tuple[str, ...]:
    """What names of this format end with, compressed ones too."""
    plain = SUFFIXES[format_name]
    if format_name not in TEXT_FORMATS:
        return plain
    return plain + tuple(suffix + compressed for suffix in plain for compressed in COMPRESSED)


def guess_format(source: Source, files: Sequence[DataFile]) -> str:
    """From the suffixes; a file without a known one is looked into.

    Raises:
        InvalidArgument: They are of several formats, or of one that nobody knows.
        StorageError, DataFileMissing: A file without a known suffix cannot be read.
    """
    example: dict[str, str] = {}
    for file in files:
        known = format_of(file.name) or _by_magic(source, file)
        if known is None:
            raise InvalidArgument(
                f"nobody knows what {file.name} is: neither its suffix nor its beginning tell; pass format=, "
                f"one of {', '.join(SUFFIXES)}",
                field="format",
            )
        example.setdefault(known, file.name)
        if len(example) > 1:
            listed = ", ".join(f"{name} is {known}" for known, name in example.items())
            raise InvalidArgument(
                f"files of several formats: {listed}; pass format= to take those of one, or a narrower path",
                field="format",
            )
    if not example:
        raise InvalidArgument("no files to guess the format of; pass format=", field="format")
    return next(iter(example))


def _by_magic(source: Source, file: DataFile) -> str | None:
    beginning = source.read(file, 0, 8).to_pybytes()
    return next((known for magic, known in _MAGIC.items() if beginning.startswith(magic)), None)


def _places(path: Any, filesystem: Any, storage_options: Mapping[str, Any] | None) -> tuple[Source, list[Place]]:
    written = list(path) if isinstance(path, Iterable) and not isinstance(path, (str, os.PathLike)) else [path]
    for one in written:
        if not isinstance(one, (str, os.PathLike)) or isinstance(os.fspath(one), bytes):
            raise InvalidArgument(f"path holds {one!r}; give paths or URLs as text", field="path")
    if not written:
        raise InvalidArgument("path=[] names no files; give at least one", field="path")
    first, *others = texts = [os.fspath(one) for one in written]
    source, found = open_source(first, filesystem=filesystem, storage_options=storage_options)
    places = [Place(without_secrets(first), found, is_directory=first.endswith("/"))]
    for text in others:
        if filesystem is None and store_of(text) != store_of(first):
            raise InvalidArgument(
                f"{without_secrets(first)} and {without_secrets(text)} are on different stores; read them as two "
                "datasets",
                field="path",
            )
        found = path_of(text, filesystem=filesystem, storage_options=storage_options)
        places.append(Place(without_secrets(text), found, is_directory=text.endswith("/")))
    assert len(places) == len(texts)
    return source, places


def _choose(
    searches: Sequence[Search], suffixes: Sequence[str] | None
) -> tuple[list[tuple[Search, list[Seen]]], dict[str, int]]:
    """Which of the files that were met are taken; and how many are not, by suffix."""
    fits = _fits(searches, suffixes)
    taken = []
    num_others: collections.Counter[str] = collections.Counter()
    for search in searches:
        fitting = [one.is_named or fits(one.name) for one in search.seen]
        taken.append((search, list(itertools.compress(search.seen, fitting))))
        num_others.update(_suffix(one.name) for one, is_taken in zip(search.seen, fitting, strict=True) if not is_taken)
    passed_over = dict(sorted(num_others.items()))
    if num_hidden := sum(search.num_hidden for search in searches):
        passed_over[HIDDEN] = num_hidden
    return taken, passed_over


def _fits(searches: Sequence[Search], suffixes: Sequence[str] | None) -> Callable[[str], bool]:
    if suffixes is not None:
        endings = tuple(suffix.lower() for suffix in suffixes)
        return lambda name: name.lower().endswith(endings)
    is_any_known = any(format_of(one.name) for search in searches for one in search.seen)
    return lambda name: not is_any_known or format_of(name) is not None


def _data_files(taken: Sequence[tuple[Search, list[Seen]]], partitioning: str | None) -> list[DataFile]:
    """Sorted by their names below what all searches have in common."""
    root = common_directory([search.base for search, _ in taken])
    above = _keys_above([search for search, _ in taken])
    partitions: dict[str, tuple[tuple[str, str | None], ...]] = {}
    files = []
    for search, seen in taken:
        base = search.base.strip("/")
        prefix = "" if base == root else f"{relative(base, root)}/"
        for one in seen:
            name = prefix + one.name
            if not name.isprintable():
                _check_utf8(name)
            directory = name.rpartition("/")[0]
            if directory not in partitions:
                partitions[directory] = hive_partition(name, above) if partitioning == "hive" else ()
            files.append(DataFile(one.path, name, one.size_bytes, one.mtime_ns, partitions[directory]))
    files.sort(key=operator.attrgetter("name"))
    return files


def _keys_above(searches: Sequence[Search]) -> dict[str, str | None]:
    """Hive keys in the paths that were written, above what they name: `split=train/data.parquet` has a split.

    As in pyarrow, a directory is the root of its partitions: keys in the path that leads to it are no columns. So it is
    for several paths that do not agree on such a key.
    """
    if any(search.is_directory for search in searches):
        return {}
    first, *others = [hive_keys(search.written) for search in searches]
    return {key: value for key, value in first.items() if all(key in keys and keys[key] == value for keys in others)}


def _leads_nowhere(file: DataFile) -> DataFileMissing:
    return DataFileMissing(f"{file.name} is a link to something that is not there; remove the link, or mend it")


def _check_utf8(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"the name {name!r} is not in UTF-8, as pyarrow wants names to be; rename the file", field="path"
        ) from error


def _check_once(files: Sequence[DataFile]) -> None:
    for one, other in itertools.pairwise(files):
        if one.name == other.name:
            raise InvalidArgument(
                f"{one.name} is named twice by path=, so its rows would be read twice; remove one", field="path"
            )


def _nothing_taken(
    searches: Sequence[Search], suffixes: Sequence[str] | None, passed_over: Mapping[str, int]
) -> NoData:
    where = ", ".join(search.written for search in searches[:3]) + (", …" if len(searches) > 3 else "")
    wanted = f" that end with {', '.join(suffixes)}" if suffixes is not None else ""
    found = [_counted(suffix, number) for suffix, number in list(passed_over.items())[:10]]
    formats = sorted({known for suffix in passed_over if (known := format_of(f"x{suffix}"))})
    if not found:
        cure = "nothing was found at all; check the path"
    elif formats:
        cure = f"found {', '.join(found)}; did you mean format={formats[0]!r}?"
    else:
        cure = f"found {', '.join(found)}; files of other names are taken when a pattern names them, such as DIR/part-*"
    return NoData(f"{where} has no files{wanted}: {cure}", field="path")


def _counted(suffix: str, number: int) -> str:
    if suffix == HIDDEN:
        return f"{number:,} that {'is' if number == 1 else 'are'} passed over (names with a leading _ or ., markers)"
    noun = "file" if number == 1 else "files"
    return f"{number:,} {suffix} {noun}" if suffix else f"{number:,} {noun} without a suffix"


def _suffix(path: str) -> str:
    """With the compression, where the suffix before it is of text; without a dot in the name, empty."""
    name = path.rpartition("/")[2].lower()
    stem, dot, last = name.rpartition(".")
    if not dot or not stem:
        return ""
    _, dot, before = stem.rpartition(".")
    return f".{before}.{last}" if dot and f".{last}" in COMPRESSED else f".{last}"
