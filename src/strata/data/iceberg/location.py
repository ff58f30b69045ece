"""Where a table's files are: one file system for all of them, from what the table's catalog says of its storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow.fs as pafs
from pyiceberg.io.pyarrow import PyArrowFileIO

from strata.data.source.source import DataFile, Source
from strata.errors import DataError, StorageError

if TYPE_CHECKING:
    from pyiceberg.table import Table


class Locator:
    """Finds files by the location that manifests give them."""

    def __init__(self, table: Table) -> None:
        self._base = table.location().rstrip("/") + "/"
        self._name = ".".join(table.name())
        self._io = table.io if isinstance(table.io, PyArrowFileIO) else PyArrowFileIO(table.io.properties)
        self._reached: dict[tuple[str, str], pafs.FileSystem] = {}
        self._files: dict[tuple[str, int], DataFile] = {}

    def source(self, locations: list[str]) -> Source:
        """The file system that all of these are on.

        Raises:
            DataError: They are on several.
            StorageError: It cannot be set up.
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
        """By its name below the table; in full if it is elsewhere. Files of a table never change: no time is needed."""
        found = self._files.get((location, size_bytes))
        if found is None:
            path = PyArrowFileIO.parse_location(location)[2]
            found = DataFile(path=path, name=location.removeprefix(self._base), size_bytes=size_bytes, mtime_ns=0)
            self._files[location, size_bytes] = found
        return found

    def _filesystem(self, location: str) -> pafs.FileSystem:
        scheme, host, _ = PyArrowFileIO.parse_location(location)
        if (scheme, host) not in self._reached:
            self._reached[scheme, host] = self._reach(scheme, host, location)
        return self._reached[scheme, host]

    def _reach(self, scheme: str, host: str, location: str) -> pafs.FileSystem:
        if scheme == "file":
            return pafs.LocalFileSystem()
        try:
            return self._io.fs_by_scheme(scheme, host)
        except (ValueError, ImportError, OSError) as error:
            raise StorageError(
                f"{location} cannot be reached: {error}; check the storage settings in catalog_config (s3.endpoint, "
                "s3.access-key-id, …)"
            ) from error
