"""Open a Lance dataset with `pylance`: its version, schema and fragments, and the rows of a fragment."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
from lance.file import LanceFileReader

from strata.data.formats.damage import CURE
from strata.data.source.filesystem import open_source
from strata.data.source.source import translate_error, without_secrets
from strata.errors import DataFileInvalid, DataFileMissing, ForkedProcess, InvalidArgument, StorageError, StrataError
from strata.lifecycle import Home, renewed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import TypeVar

    from strata.data.source.source import Source

    T = TypeVar("T")

FAILURES = (OSError, ValueError, RuntimeError, pa.ArrowException)
"""What pylance raises for files that are missing, unreachable or damaged; only the text distinguishes these."""
_NOT_FOUND = "was not found"
_PANIC = "PanicException"
_MAX_ERROR_CHARS = 500
_HOME = Home()
"""The process that imported pylance, whose threads do not exist in a forked child."""


@dataclass(frozen=True, slots=True)
class DataFileOf:
    """One of the files with the columns of a fragment."""

    name: str
    """Its path below the dataset."""
    num_bytes: int | None
    """None if the dataset does not state it."""
    columns: tuple[tuple[int, int], ...]
    """Field ids, and the index of each one's column in the file; without entries in files of the oldest format."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A horizontal part of a dataset. Its files never change: an update writes new ones."""

    id: int
    files: tuple[DataFileOf, ...]
    deletion_file: str | None
    """The path below the dataset of the file that lists deleted rows; each delete writes a new one."""
    overlays: str = ""
    """Files with changed values, as text."""


class OpenedDataset:
    """One version of a dataset. Thread-safe; every process that receives it opens the dataset again."""

    def __init__(self, uri: str, version: int, options: Mapping[str, Any]) -> None:
        self.uri = uri
        self.version = version
        self._options = dict(options)
        self._native: lance.LanceDataset | None = None
        self._lock = renewed(threading.Lock())

    def __reduce__(self) -> tuple[type[OpenedDataset], tuple[str, int, Mapping[str, Any]]]:
        return OpenedDataset, (self.uri, self.version, self._options)

    @property
    def native(self) -> lance.LanceDataset:
        """The dataset of pylance.

        Raises:
            ForkedProcess: This process was forked from one that uses pylance.
            InvalidArgument, StorageError: The version cannot be opened.
        """
        check_process()
        with self._lock:
            if self._native is None:
                self._native = open_native(self.uri, self.version, self._options)
            return self._native

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns as they are read: blobs are bytes."""
        delivered = self.native.scanner(blob_handling="all_binary").projected_schema
        return pa.schema([field.remove_metadata() for field in delivered])

    def fragments(self) -> list[Fragment]:
        """Return the fragments in the order of the dataset's rows.

        Raises:
            DataFileInvalid: A file is not below the dataset.
        """
        return [self._fragment(found) for found in self.native.get_fragments()]

    def _fragment(self, found: lance.LanceFragment) -> Fragment:
        metadata = found.metadata
        files = []
        for file in metadata.files:
            parts = file.path.split("/")
            if file.base_id is not None or any(part in ("", ".", "..") for part in parts):
                raise DataFileInvalid(
                    f"{without_secrets(self.uri)}: fragment {found.fragment_id} has the file "
                    f"{without_secrets(file.path)!r}, which is not below the dataset. Branches and shallow clones have "
                    "such files: copy the dataset with deep_clone, or read its origin",
                    path=self.uri,
                )
            columns = tuple(zip(file.fields, file.column_indices, strict=False))
            files.append(DataFileOf(f"data/{file.path}", file.file_size_bytes, columns))
        overlays = metadata.to_json().get("overlays")
        return Fragment(found.fragment_id, tuple(files), found.deletion_file(), str(overlays) if overlays else "")

    def num_rows(self, fragment: Fragment) -> int:
        """Return the rows of a fragment that are not deleted."""
        return int(self._native_fragment(fragment).count_rows())

    def num_bytes(self, fragment: Fragment, columns: Collection[str]) -> int:
        """Return about how many bytes these columns have, deleted rows left out."""
        found = self._native_fragment(fragment)
        wanted = self._field_ids(columns)
        stored = sum(self._stored_bytes(file, wanted) for file in fragment.files)
        stored = stored * found.count_rows() // max(1, found.physical_rows)
        return stored + self._blob_bytes(found, columns)

    def read(self, fragment: Fragment, columns: Sequence[str], first_row: int, num_rows: int) -> tuple[pa.Table, int]:
        """Return rows of a fragment, and the bytes that were read. Deleted rows are not counted."""
        native = self.native
        scans: list[Any] = []
        table = native.scanner(
            columns=list(columns),
            fragments=[self._native_fragment(fragment)],
            offset=first_row,
            limit=num_rows,
            scan_in_order=True,
            blob_handling="all_binary",
            scan_stats_callback=scans.append,
        ).to_table()
        return table, sum(scan.bytes_read for scan in scans)

    def _native_fragment(self, fragment: Fragment) -> lance.LanceFragment:
        found = self.native.get_fragment(fragment.id)
        assert found is not None  # it is one of this version's
        return found

    def _field_ids(self, columns: Collection[str]) -> set[int]:
        def below(field: Any) -> set[int]:
            return {field.id()}.union(*map(below, field.children()))

        return set().union(*(below(field) for field in self.native.lance_schema.fields() if field.name() in columns))

    def _stored_bytes(self, file: DataFileOf, wanted: set[int]) -> int:
        if not file.columns:
            return file.num_bytes or 0
        indexes = [index for field, index in file.columns if field in wanted and index >= 0]
        if not indexes:
            return 0
        reader = LanceFileReader(f"{self.uri}/{file.name}", storage_options=self._options or None)
        columns = reader.file_statistics().columns
        return sum(int(columns[index].size_bytes) for index in indexes)

    def _blob_bytes(self, fragment: lance.LanceFragment, columns: Collection[str]) -> int:
        """Return the bytes of blobs, which are not stored in the columns of a file."""
        described = self.native.scanner(fragments=[fragment], blob_handling="blobs_descriptions").projected_schema
        names = [name for name in columns if described.field(name).type != self.schema.field(name).type]
        if not names:
            return 0
        scanner = self.native.scanner(columns=names, fragments=[fragment], blob_handling="blobs_descriptions")
        return sum(
            _described_bytes(column, self.schema.field(name).type)
            for batch in scanner.to_batches()
            for name, column in zip(names, batch.columns, strict=True)
        )


def _described_bytes(described: pa.Array, delivered: pa.DataType) -> int:
    """Return the bytes of the blobs that a column describes."""
    if described.type == delivered or not pa.types.is_struct(described.type):
        return 0
    if pa.types.is_struct(delivered):
        members = zip(described.flatten(), delivered, strict=True)
        return sum(_described_bytes(member, field.type) for member, field in members)
    return int(pc.sum(pc.struct_field(described, "size")).as_py() or 0)


# --- versions ---


def location_of(uri: str, options: Mapping[str, Any]) -> tuple[Source, str, str]:
    """Return the file system of a dataset, the path in it, and the location for pylance."""
    source, root = open_source(uri, storage_options=options)
    root = root.rstrip("/")
    return source, root, root if source.is_local else uri.rstrip("/")


def as_text(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the options as pylance expects them."""
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}


def find_version(uri: str, *, version: int | None, tag: str | None, options: Mapping[str, Any]) -> int:
    """Return the version to read: the given one, that of a tag, or the latest.

    Raises:
        InvalidArgument: There is no dataset, or no such version.
        StorageError: The dataset cannot be read.
    """
    if version is not None and tag is not None:
        raise InvalidArgument("version and tag both select a version; pass one of them", field="tag")
    if version is not None:
        _check_version(version)
    if tag is not None:
        _check_tag(tag)
    latest = open_native(uri, None, options)
    if tag is not None:
        return _version_of(latest, uri, tag)
    if version is not None and version > latest.version:
        raise InvalidArgument(
            f"{without_secrets(uri)} has no version {version}; the latest is {latest.version}", field="version"
        )
    return int(latest.version) if version is None else version


def open_native(uri: str, version: int | None, options: Mapping[str, Any]) -> lance.LanceDataset:
    """Open a dataset.

    Raises:
        InvalidArgument: There is no dataset, or no such version.
        StorageError: The dataset cannot be read.
    """
    check_process()
    try:
        return lance.dataset(uri, version=version, storage_options=dict(options) or None)
    except FAILURES as error:
        if not isinstance(error, ValueError) or _NOT_FOUND not in str(error):
            raise explained(error, uri) from error
        if version is not None:
            raise InvalidArgument(
                f"{without_secrets(uri)} no longer has version {version}, which may have been cleaned up; pass a "
                "later version=",
                field="version",
            ) from error
        raise InvalidArgument(
            f"{without_secrets(uri)} is not a Lance dataset: it has no _versions; pass the directory that contains "
            "_versions",
            field="uri",
        ) from error


def _check_version(version: object) -> None:
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise InvalidArgument(f"version={version!r} is not a version; pass a whole number from 1 on", field="version")


def _check_tag(tag: object) -> None:
    if not isinstance(tag, str) or not tag:
        raise InvalidArgument(f"tag={tag!r} is not a name; pass the name of a tag", field="tag")


def _version_of(dataset: lance.LanceDataset, uri: str, tag: str) -> int:
    try:
        tags = dataset.tags.list()
    except FAILURES as error:
        raise explained(error, uri) from error
    if tag not in tags:
        names = ", ".join(sorted(tags)) or "none"
        raise InvalidArgument(f"{without_secrets(uri)} has no tag {tag!r}; its tags are: {names}", field="tag")
    if tags[tag].get("branch") is not None:
        raise InvalidArgument(
            f"the tag {tag!r} of {without_secrets(uri)} is a version of the branch {tags[tag]['branch']}, and branches "
            "are not supported; copy the branch with deep_clone",
            field="tag",
        )
    return int(tags[tag]["version"])


def explained(error: Exception, uri: str) -> DataFileMissing | StorageError:
    """Return the error for a dataset that cannot be opened."""
    if isinstance(error, OSError):
        return translate_error(error, uri)
    return StorageError(f"{without_secrets(uri)} cannot be opened: {text_of(error)}")


def text_of(error: BaseException) -> str:
    """Return what failed, without the places in pylance's sources."""
    text = without_secrets(str(error)).split(", /", 1)[0].strip()
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]}…"


def check_process() -> None:
    """
    Raises:
        ForkedProcess: This process was forked from one that uses pylance.
    """
    if not _HOME.is_here:
        raise ForkedProcess(
            f"process {os.getpid()} was forked from one that uses pylance, which does not support this; read in "
            "threads (num_workers=0 in torch's DataLoader), or start processes with "
            "multiprocessing.get_context('spawn')"
        )


# --- failures ---


def attempt(call: Callable[[], T], *, source: Source, root: str, fragment: Fragment, what: str) -> T:
    """Return the result of `call`, which reads a fragment; after a failure, find its cause, or call again.

    Raises:
        DataFileMissing: A file of the fragment does not exist.
        DataFileInvalid: The fragment's files can be read but not decoded.
        StorageError: The files cannot be reached.
    """
    try:
        return call()
    except BaseException as error:
        if not _is_failure(error):
            raise
        _check_files(source, root, fragment, what)
    try:
        return call()
    except BaseException as error:
        if not _is_failure(error):
            raise
        raise DataFileInvalid(
            f"{what} is damaged ({text_of(error)}); its files are {', '.join(_names(fragment))}; {CURE}",
            path=f"{root}/{_names(fragment)[0]}",
        ) from error


def _is_failure(error: BaseException) -> bool:
    """Return whether pylance failed. It panics over some damaged files, which is no `Exception` in Python."""
    return type(error).__name__ == _PANIC or (
        isinstance(error, FAILURES) and not isinstance(error, (pa.ArrowMemoryError, StrataError))
    )


def _names(fragment: Fragment) -> list[str]:
    return [file.name for file in fragment.files] + ([fragment.deletion_file] if fragment.deletion_file else [])


def _check_files(source: Source, root: str, fragment: Fragment, what: str) -> None:
    sizes = {file.name: file.num_bytes for file in fragment.files}
    for name in _names(fragment):
        path = f"{root}/{name}"
        info = source.info(path, name)
        if info.type is pafs.FileType.NotFound:
            raise DataFileMissing(
                f"{what}: its file {name} does not exist; restore it, or read a version that still exists with version="
            )
        expected = sizes.get(name)
        if expected is not None and info.size != expected:
            raise DataFileInvalid(
                f"{what} is damaged: its file {name} has {info.size} bytes instead of {expected}; {CURE}", path=path
            )
