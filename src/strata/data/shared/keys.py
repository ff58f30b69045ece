"""Keys of the node cache: two row groups have the same key only if decoding them gives the same table.

A key is a hash of everything that decides the rows and columns: the store, the file with its size, modification time
and version, the place of the row group in it, the format and its options, the projection onto the dataset's schema,
the filter, and the versions of Strata and pyarrow. What cannot be named in plain values is not shared: a file system
that is not known to mean the same files in every process, or a store that reports no modification times.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec
import pyarrow as pa
import pyarrow.fs as pafs

from strata._version import __version__
from strata.data.plan.schema import PlainProjection

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow.compute as pc

    from strata.data.formats.base import Format
    from strata.data.plan.plan import Plan, PlannedFile
    from strata.data.source.source import DataFile, Source

VERSION = 1
"""Changes with the contents of an entry, or with what a key covers."""
_SHARED_PROTOCOLS = {"abfs", "abfss", "az", "gcs", "gs", "hf", "http", "https", "s3", "s3a"}
"""fsspec protocols that mean the same files in every process of a machine."""


class Unshareable(Exception):
    """What cannot be part of a key; the message names it."""


@runtime_checkable
class Named(Protocol):
    """A projection that states what decides its result. It belongs to a table whose data files never change."""

    def identity(self, columns: Sequence[str]) -> object:
        """Return plain values that are equal for projections with the same result for these columns."""
        ...


def digest(*values: object) -> str:
    """Return a hash of plain values.

    Raises:
        Unshareable: A value is not plain.
    """
    encoded = msgspec.msgpack.encode(plain(values))
    return hashlib.blake2b(encoded, digest_size=20).hexdigest()


def plain(value: object) -> object:
    """Return a value as numbers, text, bytes and lists, the same in every process.

    Raises:
        Unshareable: It is an object whose contents are unknown.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return [type(value).__name__, value]
    if isinstance(value, pa.Schema):
        return ["schema", value.serialize().to_pybytes()]
    if isinstance(value, pa.DataType):
        return ["type", pa.schema([pa.field("", value)]).serialize().to_pybytes()]
    if isinstance(value, pa.Scalar):
        return ["scalar", plain(value.type), repr(value.as_py())]
    if isinstance(value, Mapping):
        return ["map", sorted(([plain(key), plain(each)] for key, each in value.items()), key=repr)]
    if isinstance(value, set | frozenset):
        return ["set", sorted((plain(each) for each in value), key=repr)]
    if isinstance(value, list | tuple):
        return ["list", [plain(each) for each in value]]
    if hasattr(value, "__array_interface__"):
        return ["array", str(value.dtype), list(value.shape), value.tobytes()]  # type: ignore[attr-defined]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return [type(value).__qualname__, plain(fields)]
    raise Unshareable(f"a {type(value).__name__} cannot be compared between processes")


class RowGroupKeys:
    """The keys of a plan's row groups."""

    def __init__(self, source: Source, plan: Plan, formats: Mapping[str, Format], columns: Sequence[str]) -> None:
        """
        Raises:
            Unshareable: The file system, or the filter, is unknown.
        """
        self._source = source
        self._plan = plan
        self._formats = formats
        self._columns = list(columns)
        self._common = digest(
            VERSION,
            __version__,
            pa.__version__,
            store_identity(source.filesystem),
            self._columns,
            pa.schema([plan.schema.field(name) for name in self._columns]),
            plan.columns,
            None if plan.condition is None else _serialized(plan.condition),
        )
        self._of_file = functools.lru_cache(maxsize=1 << 10)(self._file_digest)

    def key_of(self, number: int) -> str:
        """Return the key of a row group.

        Raises:
            Unshareable: Its file is not known to be the one that was planned, or has an unknown projection.
        """
        row_group = self._plan.unit(number)
        place = (row_group.index, row_group.num_rows, row_group.first_row, row_group.offset, row_group.num_bytes)
        parts = self._plan.parts_of(number)
        return digest(self._of_file(int(self._plan.unit_file[number])), place, parts, int(self._plan.unit_rows[number]))

    def _file_digest(self, file_number: int) -> str:
        planned = self._plan.files[file_number]
        format = self._formats[planned.format]
        return digest(
            self._common,
            file_identity(self._source, planned.file, never_changes=isinstance(planned.projection, Named)),
            planned.version,
            planned.schema,
            format.name,
            _options(format),
            _projection_identity(planned, self._columns),
        )


def store_identity(filesystem: pafs.FileSystem) -> object:
    """Return what distinguishes a file system from others that have the same paths.

    Raises:
        Unshareable: It is unknown whether another process has the same files.
    """
    if type(filesystem) is pafs.LocalFileSystem:
        return "local"
    handler = filesystem.handler if isinstance(filesystem, pafs.PyFileSystem) else None
    if isinstance(handler, pafs.FSSpecHandler):
        protocol = handler.fs.protocol
        names = {protocol} if isinstance(protocol, str) else set(protocol)
        if names & _SHARED_PROTOCOLS:
            try:
                return ["fsspec", handler.fs.to_json()]
            except (TypeError, ValueError) as error:
                raise Unshareable(f"the arguments of {min(names)}:// cannot be compared: {error}") from error
    elif filesystem.type_name in ("s3", "gcs", "abfs"):
        arguments = filesystem.__reduce__()[1]  # endpoint, region, credentials: other ones may show other files
        return [filesystem.type_name, plain(arguments)]
    raise Unshareable(f"another process may have other files in a file system of type {filesystem.type_name!r}")


def file_identity(source: Source, file: DataFile, *, never_changes: bool = False) -> object:
    """Return what distinguishes a file from others, and from itself before a change.

    Raises:
        Unshareable: The store reports no modification time, or the file has changed since it was planned.
    """
    if type(source.filesystem) is pafs.LocalFileSystem:
        try:
            status = Path(file.path).stat()
        except OSError as error:
            raise Unshareable(f"{file.name}: {error}") from error
        if status.st_size != file.size_bytes or (not never_changes and status.st_mtime_ns != file.mtime_ns):
            raise Unshareable(f"{file.name} has changed since it was planned")
        return [file.path, file.size_bytes, status.st_mtime_ns, status.st_dev, status.st_ino]
    if file.mtime_ns <= 0 and not never_changes:
        raise Unshareable(f"{file.name} has no modification time")
    return [file.path, file.size_bytes, file.mtime_ns]


def _serialized(condition: pc.Expression) -> bytes:
    """Return the bytes that pyarrow's expression would be pickled as. Its text leaves out the middle of long lists."""
    try:
        return bytes(condition.__reduce__()[1][0].to_pybytes())
    except (pa.ArrowException, AttributeError, IndexError, TypeError) as error:
        raise Unshareable(f"the filter cannot be compared between processes: {error}") from error


def _options(format: object) -> object:
    """Return the options of a format that has any."""
    return format if dataclasses.is_dataclass(format) else None


def _projection_identity(planned: PlannedFile, columns: Sequence[str]) -> object:
    projection: Any = planned.projection
    if isinstance(projection, PlainProjection):
        constants = {name: value for name, value in projection.constants.items() if name in columns}
        return [projection.file_schema, {name: repr(value) for name, value in constants.items()}]
    if isinstance(projection, Named):
        return projection.identity(columns)
    raise Unshareable(f"a {type(projection).__name__} cannot be compared between processes")
