"""Find the files of a dataset from the `path` that a user passes.

`path` is a file, a directory, a pattern, or a list of these; `braces.py` expands `{000..999}`, `listing.py` lists
files, this module selects them. Files are sorted by name in code point order. Names are relative to the root of the
search: the directory itself, the directory before the first wildcard of a pattern, or the common directory of a list.
Moving a dataset therefore keeps names and order.
"""

from __future__ import annotations

import collections
import itertools
import operator
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from strata.data.source.braces import expand
from strata.data.source.filesystem import open_source, resolve_path, store_key
from strata.data.source.huggingface import saved_files
from strata.data.source.listing import (
    BROKEN_LINK,
    ListedFile,
    RequestedPath,
    Search,
    common_directory,
    relative,
    search_all,
)
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
    "webdataset": (".tar", ".tgz"),
}
"""File name suffixes by format. Compressed files such as `.csv.gz` count as well, see `COMPRESSED`."""
COMPRESSED = (".gz", ".zst", ".bz2")
COMPRESSED_FORMATS = ("csv", "json", "jsonl", "webdataset")
"""Formats that are also read from compressed files."""
_BY_SUFFIX = {suffix: known for known, suffixes in SUFFIXES.items() for suffix in suffixes}
_MAGIC = {b"PAR1": "parquet", b"PARE": "parquet", b"ORC": "orc", b"ARROW1": "arrow"}


@dataclass(frozen=True, slots=True)
class FoundFiles:
    source: Source
    files: tuple[DataFile, ...]
    """At least one, sorted by name."""
    missing: tuple[tuple[str, str], ...] = ()
    """With on_error="skip": the names of broken links, and the reason."""
    passed_over: Mapping[str, int] = field(default_factory=dict)
    """The number of files that were ignored, by suffix ("" for none), and of hidden entries under `HIDDEN`."""


def discover(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    suffixes: Sequence[str] | None,
    filesystem: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    partitioning: Literal["hive"] | None = "hive",
    on_error: Literal["raise", "skip"] = "raise",
    is_saved: bool | None = False,
) -> FoundFiles:
    """Return the files at `path`.

    Args:
        suffixes: Suffixes of the names to select, in any case, including those of compressed text; see `SUFFIXES`.
            None selects all known suffixes, or every file if no name has one.
        on_error: "skip" leaves out broken links and lists them in `FoundFiles.missing`.
        is_saved: Whether the paths are directories of Hugging Face's `save_to_disk`; None finds out.

    Raises:
        NoData: The path does not exist, or no file is selected; the message reports what was found instead.
        InvalidArgument: The parts of a list are on different stores, or contain a file twice.
        ConfigError: See `open_source`.
        StorageDenied, StorageUnavailable, StorageError: The path cannot be listed.
        DataFileMissing: A link is broken.
        SchemaMismatch: A name contains a partition key twice.
        DataFileInvalid: The metadata of a saved dataset is damaged.
    """
    if partitioning not in ("hive", None):
        raise InvalidArgument(f"partitioning={partitioning!r} is unknown; pass 'hive' or None", field="partitioning")
    source, requested = _resolve(path, filesystem, storage_options)
    searches = search_all(source, requested)
    if is_saved is not False:
        searches = saved_files(source, searches, is_required=is_saved is True)
    selected, passed_over = _select(searches, suffixes)
    if not any(listed for _, listed in selected):
        raise _nothing_selected(searches, suffixes, passed_over)
    files = _data_files(selected, partitioning)
    _check_unique(files)
    missing = [file for file in files if file.size_bytes == BROKEN_LINK]
    reasons = tuple((file.name, str(_broken_link(file))) for file in missing)
    if missing and (on_error == "raise" or len(missing) == len(files)):
        raise _broken_link(missing[0])
    return FoundFiles(source, tuple(file for file in files if file.size_bytes != BROKEN_LINK), reasons, passed_over)


def format_of(name: str) -> str | None:
    """Return the format of a name's suffix."""
    stem, _, last = name.lower().rpartition(".")
    if stem and f".{last}" in COMPRESSED:
        stem, _, last = stem.rpartition(".")
        known = _BY_SUFFIX.get(f".{last}") if stem else None
        return known if known in COMPRESSED_FORMATS else None
    return _BY_SUFFIX.get(f".{last}") if stem else None


def suffixes_of(format_name: str) -> tuple[str, ...]:
    """Return the suffixes of a format, including those of compressed files.

    Raises:
        InvalidArgument: The format is unknown.
    """
    if format_name not in SUFFIXES:
        raise InvalidArgument(
            f"format={format_name!r} is not a format of files; use one of {', '.join(SUFFIXES)}", field="format"
        )
    plain = SUFFIXES[format_name]
    if format_name not in COMPRESSED_FORMATS:
        return plain
    return plain + tuple(suffix + compressed for suffix in plain for compressed in COMPRESSED)


def guess_format(source: Source, files: Sequence[DataFile]) -> str:
    """Return the format of the files by their suffixes, or by their first bytes where a suffix is unknown.

    Raises:
        InvalidArgument: The files have several formats, or an unknown one.
        StorageError, DataFileMissing: A file without a known suffix cannot be read.
    """
    example: dict[str, str] = {}
    for file in files:
        known = format_of(file.name) or _by_magic(source, file)
        if known is None:
            raise InvalidArgument(
                f"the format of {file.name} cannot be guessed from its suffix or its first bytes; pass format=, "
                f"one of {', '.join(SUFFIXES)}",
                field="format",
            )
        example.setdefault(known, file.name)
        if len(example) > 1:
            listed = ", ".join(f"{name} is {known}" for known, name in example.items())
            raise InvalidArgument(
                f"the files have several formats: {listed}; pass format= to select one, or a narrower path",
                field="format",
            )
    if not example:
        raise InvalidArgument("the format cannot be guessed without files; pass format=", field="format")
    return next(iter(example))


def _by_magic(source: Source, file: DataFile) -> str | None:
    beginning = source.read(file, 0, 8).to_pybytes()
    return next((known for magic, known in _MAGIC.items() if beginning.startswith(magic)), None)


def _resolve(
    path: Any, filesystem: Any, storage_options: Mapping[str, Any] | None
) -> tuple[Source, list[RequestedPath]]:
    written = list(path) if isinstance(path, Iterable) and not isinstance(path, (str, os.PathLike)) else [path]
    for one in written:
        if not isinstance(one, (str, os.PathLike)) or isinstance(os.fspath(one), bytes):
            raise InvalidArgument(f"path contains {one!r}; pass paths or URLs as strings", field="path")
    if not written:
        raise InvalidArgument("path=[] is empty; pass at least one path", field="path")
    first, *others = [path for one in written for path in _expanded(os.fspath(one))]
    source, found = open_source(first, filesystem=filesystem, storage_options=storage_options)
    requested = [RequestedPath(without_secrets(first), found, is_directory=first.endswith("/"))]
    for text in others:
        if filesystem is None and store_key(text) != store_key(first):
            raise InvalidArgument(
                f"{without_secrets(first)} and {without_secrets(text)} are on different stores; read them as two "
                "datasets",
                field="path",
            )
        found = resolve_path(text, filesystem=filesystem, storage_options=storage_options)
        requested.append(RequestedPath(without_secrets(text), found, is_directory=text.endswith("/")))
    return source, requested


def _expanded(text: str) -> list[str]:
    """Return the paths of a brace pattern; a local path that exists literally is not a pattern."""
    if "{" not in text or os.path.exists(text):  # noqa: PTH110 - also for URLs, which do not exist
        return [text]
    return expand(text)


def _select(
    searches: Sequence[Search], suffixes: Sequence[str] | None
) -> tuple[list[tuple[Search, list[ListedFile]]], dict[str, int]]:
    """Return the selected files of each search, and the number of the others by suffix."""
    has_suffix = _suffix_test(searches, suffixes)
    selected = []
    num_others: collections.Counter[str] = collections.Counter()
    for search in searches:
        fitting = [one.is_named or has_suffix(one.name) for one in search.listed]
        selected.append((search, list(itertools.compress(search.listed, fitting))))
        num_others.update(
            _suffix(one.name) for one, is_selected in zip(search.listed, fitting, strict=True) if not is_selected
        )
    passed_over = dict(sorted(num_others.items()))
    if num_hidden := sum(search.num_hidden for search in searches):
        passed_over[HIDDEN] = num_hidden
    return selected, passed_over


def _suffix_test(searches: Sequence[Search], suffixes: Sequence[str] | None) -> Callable[[str], bool]:
    if suffixes is not None:
        endings = tuple(suffix.lower() for suffix in suffixes)
        return lambda name: name.lower().endswith(endings)
    is_any_known = any(format_of(one.name) for search in searches for one in search.listed)
    return lambda name: not is_any_known or format_of(name) is not None


def _data_files(selected: Sequence[tuple[Search, list[ListedFile]]], partitioning: str | None) -> list[DataFile]:
    """Return the files, sorted by their names below the common directory of all searches."""
    root = common_directory([search.base for search, _ in selected])
    above = _keys_above([search for search, _ in selected])
    partitions: dict[str, tuple[tuple[str, str | None], ...]] = {}
    files = []
    for search, listed in selected:
        base = search.base.strip("/")
        prefix = "" if base == root else f"{relative(base, root)}/"
        for one in listed:
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
    """Return the Hive keys in the requested paths themselves: `split=train/data.parquet` has a column `split`.

    As in pyarrow, a requested directory is the root of its partitions, so keys in the path to it are not columns. Keys
    on which several paths disagree are not columns either.
    """
    if any(search.is_directory for search in searches):
        return {}
    first, *others = [hive_keys(search.written) for search in searches]
    return {key: value for key, value in first.items() if all(key in keys and keys[key] == value for keys in others)}


def _broken_link(file: DataFile) -> DataFileMissing:
    return DataFileMissing(f"{file.name} is a broken link; restore its target, or remove the link")


def _check_utf8(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"the file name {name!r} is not UTF-8, which pyarrow requires; rename the file", field="path"
        ) from error


def _check_unique(files: Sequence[DataFile]) -> None:
    for one, other in itertools.pairwise(files):
        if one.name == other.name:
            raise InvalidArgument(
                f"path= selects {one.name} twice, so its rows would be read twice; remove one", field="path"
            )


def _nothing_selected(
    searches: Sequence[Search], suffixes: Sequence[str] | None, passed_over: Mapping[str, int]
) -> NoData:
    where = ", ".join(search.written for search in searches[:3]) + (", …" if len(searches) > 3 else "")
    wanted = f" that end with {', '.join(suffixes)}" if suffixes is not None else ""
    found = [_describe_count(suffix, number) for suffix, number in list(passed_over.items())[:10]]
    formats = sorted({known for suffix in passed_over if (known := format_of(f"x{suffix}"))})
    if not found:
        cure = "no file was found; check the path"
    elif formats:
        cure = f"found {', '.join(found)}; did you mean format={formats[0]!r}?"
    else:
        cure = f"found {', '.join(found)}; select files with other names by a pattern, such as DIR/part-*"
    return NoData(f"{where} has no files{wanted}: {cure}", field="path")


def _describe_count(suffix: str, number: int) -> str:
    if suffix == HIDDEN:
        return f"{number:,} hidden or marker {'entry' if number == 1 else 'entries'} (names that start with _ or .)"
    noun = "file" if number == 1 else "files"
    return f"{number:,} {suffix} {noun}" if suffix else f"{number:,} {noun} without a suffix"


def _suffix(path: str) -> str:
    """Return the suffix, with the one before it for a compressed file; empty for a name without a dot."""
    name = path.rpartition("/")[2].lower()
    stem, dot, last = name.rpartition(".")
    if not dot or not stem:
        return ""
    _, dot, before = stem.rpartition(".")
    return f".{before}.{last}" if dot and f".{last}" in COMPRESSED else f".{last}"
