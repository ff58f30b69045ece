"""Find the data files of a snapshot, the delete files that apply to each, and the file system they are on.

pyiceberg plans scans as well, but it rejects tables with equality deletes, and it evaluates filters with the current
schema when an older snapshot is read. So this module combines its manifests and evaluators as the section "Scan
Planning" of Iceberg's specification describes.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow.fs as pafs
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.expressions.visitors import (
    _InclusiveMetricsEvaluator,
    expression_evaluator,
    inclusive_projection,
    manifest_evaluator,
)
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import DataFileContent, ManifestContent
from pyiceberg.schema import Schema
from pyiceberg.transforms import VoidTransform

from strata.data.source.source import DataFile, Source, translate_errors
from strata.errors import DataError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pyiceberg.expressions import BooleanExpression
    from pyiceberg.manifest import DataFile as IcebergFile
    from pyiceberg.manifest import ManifestEntry, ManifestFile
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot
    from pyiceberg.typedef import Record

_PATH_ID = 2147483546
"""The field id of `file_path` in position delete files."""

_Key = tuple[int, str]
"""A partition: the id of its spec, and its values."""


@dataclass(frozen=True, slots=True)
class ScannedFile:
    """A data file, and the delete files that may delete rows of it."""

    file: IcebergFile
    sequence: int
    position_deletes: tuple[IcebergFile, ...] = ()
    equality_deletes: tuple[IcebergFile, ...] = ()


@dataclass(frozen=True, slots=True)
class Scan:
    files: tuple[ScannedFile, ...]
    """In the order in which they were added to the table, then by path."""
    num_pruned: int
    """Data files without rows that pass the filter."""


def scan(
    table: Table, snapshot: Snapshot, schema: Schema, row_filter: BooleanExpression | None, *, num_threads: int
) -> Scan:
    """Read the relevant manifests, and match delete files to data files.

    `schema` resolves the names in the filter.
    """
    pruner = _Pruner(table, schema, row_filter if row_filter is not None else AlwaysTrue())
    with translate_errors(f"the manifest list of snapshot {snapshot.snapshot_id}"):
        manifests = list(snapshot.manifests(table.io))
    wanted = [manifest for manifest in manifests if pruner.may_matter(manifest)]
    with ThreadPoolExecutor(max(1, min(num_threads, len(wanted)))) as pool:
        entries = [entry for found in pool.map(lambda one: _entries(table, one), wanted) for entry in found]
    data = [entry for entry in entries if entry.data_file.content == DataFileContent.DATA]
    kept = [entry for entry in data if pruner.may_have_rows(entry.data_file)]
    deletes = _Deletes(
        (entry for entry in entries if entry.data_file.content != DataFileContent.DATA),
        unpartitioned=frozenset(number for number, spec in table.specs().items() if not _partitions(spec)),
    )
    files = sorted((deletes.matched(entry) for entry in kept), key=lambda one: (one.sequence, one.file.file_path))
    read = {manifest.manifest_path for manifest in wanted}
    unread = [manifest for manifest in manifests if manifest.manifest_path not in read]
    return Scan(tuple(files), len(data) - len(kept) + sum(map(_num_data_files, unread)))


def _entries(table: Table, manifest: ManifestFile) -> list[ManifestEntry]:
    with translate_errors(manifest.manifest_path):
        return manifest.fetch_manifest_entry(table.io)


def _partitions(spec: PartitionSpec) -> bool:
    """Return whether a spec partitions. A field removed from a version 1 spec stays as a void transform."""
    return not all(isinstance(field.transform, VoidTransform) for field in spec.fields)


def _num_data_files(manifest: ManifestFile) -> int:
    if manifest.content != ManifestContent.DATA:
        return 0
    return (manifest.added_files_count or 0) + (manifest.existing_files_count or 0)


class _Pruner:
    """Decides the filter for manifests, by their partitions, and for data files, by partition and column bounds."""

    def __init__(self, table: Table, schema: Schema, row_filter: BooleanExpression) -> None:
        self._specs = table.specs()
        self._schema = schema
        self._filter = row_filter
        self._bounds = _InclusiveMetricsEvaluator(schema, row_filter).eval
        self._of_manifests: dict[int, Callable[[ManifestFile], bool]] = {}
        self._of_partitions: dict[int, Callable[[Record], bool]] = {}

    def may_matter(self, manifest: ManifestFile) -> bool:
        self._prepare(manifest.partition_spec_id)
        return self._of_manifests[manifest.partition_spec_id](manifest)

    def may_have_rows(self, file: IcebergFile) -> bool:
        return self._of_partitions[file.spec_id](file.partition) and self._bounds(file)

    def _prepare(self, spec_id: int) -> None:
        if spec_id in self._of_manifests:
            return
        spec = self._specs[spec_id]
        projected = inclusive_projection(self._schema, spec)(self._filter)
        self._of_manifests[spec_id] = manifest_evaluator(spec, self._schema, projected)
        partitions = Schema(*spec.partition_type(self._schema).fields)
        self._of_partitions[spec_id] = expression_evaluator(partitions, projected, case_sensitive=True)


class _Deletes:
    """Delete files, indexed by the data files they apply to.

    Position deletes apply to data of the same and earlier commits, equality deletes only to data of earlier commits.
    Both stay within their partition, except equality deletes written without one, which apply everywhere.
    `unpartitioned` holds the ids of specs without partitions.
    """

    def __init__(self, entries: Iterable[ManifestEntry], *, unpartitioned: frozenset[int]) -> None:
        self._unpartitioned = unpartitioned
        self._by_path: dict[bytes, list[tuple[int, IcebergFile]]] = defaultdict(list)
        self._by_partition: dict[_Key, list[tuple[int, IcebergFile]]] = defaultdict(list)
        self._equal: dict[_Key, list[tuple[int, IcebergFile]]] = defaultdict(list)
        self._equal_anywhere: list[tuple[int, IcebergFile]] = []
        for entry in entries:
            self._add(entry.sequence_number or 0, entry.data_file)

    def _add(self, sequence: int, file: IcebergFile) -> None:
        if file.content == DataFileContent.EQUALITY_DELETES:
            place = self._equal_anywhere if file.spec_id in self._unpartitioned else self._equal[_key(file)]
            place.append((sequence, file))
            return
        lower, upper = _path_bounds(file)
        if lower is not None and lower == upper:
            self._by_path[lower].append((sequence, file))
        else:
            self._by_partition[_key(file)].append((sequence, file))

    def matched(self, entry: ManifestEntry) -> ScannedFile:
        file, sequence, path = entry.data_file, entry.sequence_number or 0, entry.data_file.file_path.encode()
        positions = [
            delete
            for written, delete in self._by_path.get(path, []) + self._by_partition.get(_key(file), [])
            if written >= sequence and _may_name(delete, path)
        ]
        equal = [
            delete for written, delete in self._equal_anywhere + self._equal.get(_key(file), []) if written > sequence
        ]
        return ScannedFile(file, sequence, _by_name(positions), _by_name(equal))


def _by_name(files: list[IcebergFile]) -> tuple[IcebergFile, ...]:
    """Return unique files: one with the deletion vectors of many data files is listed for each of them."""
    return tuple(sorted({file.file_path: file for file in files}.values(), key=lambda file: file.file_path))


def _key(file: IcebergFile) -> _Key:
    return file.spec_id, repr(file.partition)


def _path_bounds(file: IcebergFile) -> tuple[bytes | None, bytes | None]:
    return (file.lower_bounds or {}).get(_PATH_ID), (file.upper_bounds or {}).get(_PATH_ID)


def _may_name(delete: IcebergFile, path: bytes) -> bool:
    """Return whether a delete file may refer to this path. Bounds may be truncated, so they only exclude."""
    lower, upper = _path_bounds(delete)
    return (lower is None or lower <= path) and (upper is None or path <= upper)


class Locator:
    """Maps locations in manifests to files and their file system."""

    def __init__(self, table: Table) -> None:
        self._base = table.location().rstrip("/") + "/"
        self._name = ".".join(table.name())
        self._io = table.io if isinstance(table.io, PyArrowFileIO) else PyArrowFileIO(table.io.properties)
        self._filesystems: dict[tuple[str, str], pafs.FileSystem] = {}
        self._files: dict[tuple[str, int], DataFile] = {}

    def source(self, locations: list[str]) -> Source:
        """Return the file system of all these locations.

        Raises:
            DataError: They are on several file systems.
            StorageError: The file system cannot be opened.
        """
        first: tuple[str, pafs.FileSystem] | None = None
        for location in locations:
            filesystem = self._filesystem(location)
            if first is None:
                first = location, filesystem
            elif filesystem is not first[1] and not filesystem.equals(first[1]):
                raise DataError(
                    f"{self._name} has files on more than one file system, for example {first[0]} and {location}; "
                    "rewrite its data files into one place (Spark: CALL system.rewrite_data_files)"
                )
        if first is None:
            return Source(pafs.LocalFileSystem(), is_local=True)
        return Source(first[1], is_local=isinstance(first[1], pafs.LocalFileSystem))

    def file(self, location: str, size_bytes: int) -> DataFile:
        """Return the file, named relative to the table. Files of a table never change, so no time is needed."""
        found = self._files.get((location, size_bytes))
        if found is None:
            path = PyArrowFileIO.parse_location(location)[2]
            found = DataFile(path=path, name=location.removeprefix(self._base), size_bytes=size_bytes, mtime_ns=0)
            self._files[location, size_bytes] = found
        return found

    def _filesystem(self, location: str) -> pafs.FileSystem:
        scheme, host, _ = PyArrowFileIO.parse_location(location)
        if (scheme, host) not in self._filesystems:
            self._filesystems[scheme, host] = self._open(scheme, host, location)
        return self._filesystems[scheme, host]

    def _open(self, scheme: str, host: str, location: str) -> pafs.FileSystem:
        if scheme == "file":
            return pafs.LocalFileSystem()
        try:
            return self._io.fs_by_scheme(scheme, host)
        except (ValueError, ImportError, OSError) as error:
            raise StorageError(
                f"{location} cannot be reached: {error}; check the storage settings in catalog_config (s3.endpoint, "
                "s3.access-key-id, …)"
            ) from error
