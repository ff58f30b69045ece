"""Read the log of a Delta table with `deltalake`: its version, schema, active files, deleted rows and statistics."""

from __future__ import annotations

import datetime as dt
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, DeltaProtocolError, TableNotFoundError

from strata.data.delta.columns import MODES, NO_MAPPING, FileColumns
from strata.data.delta.format import DeltaFormat, TableFile
from strata.data.filter import filter as row_filters
from strata.data.filter import pruning
from strata.data.filter.expression import Presence
from strata.data.plan.projection import NO_ROWS
from strata.data.source.filesystem import open_source
from strata.data.source.source import DataFile, translate_error, without_secrets
from strata.errors import DataError, DataFileInvalid, InvalidArgument, NoData, StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    import numpy.typing as npt

    from strata.data.filter.filter import Condition
    from strata.data.filter.pruning import Bounds
    from strata.data.source.source import Source

FEATURES = frozenset(
    ("columnMapping", "deletionVectors", "timestampNtz", "typeWidening", "v2Checkpoint", "vacuumProtocolCheck")
)
"""Reader features of tables that are read right."""
VARIANT = "variantType"
"""A reader feature that some writers declare for every table."""
_MAPPING = "delta.columnMapping.mode"
_CUT_CHARS = 32
"""Writers cut the bounds of longer text, and not all of them make an upper bound of what is left."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_MAX_ERROR_CHARS = 500


@dataclass(frozen=True, slots=True, eq=False)
class ScannedVersion:
    """One version of a table."""

    table_id: str
    version: int
    source: Source
    files: tuple[DataFile, ...]
    """The active files that may have rows which pass the filter, sorted by name; one file if there is none."""
    num_pruned: int
    """Active files that the log excludes."""
    is_excluded: bool
    """Whether the log excludes all files."""
    format: DeltaFormat


def find_version(
    table_uri: str, *, version: int | None, timestamp: dt.datetime | str | None, options: Mapping[str, Any]
) -> int:
    """Return the version to read: the given one, the one that was current at a time, or the latest.

    Raises:
        InvalidArgument: There is no table, or no such version.
        StorageError: The log cannot be read.
    """
    if version is not None and timestamp is not None:
        raise InvalidArgument("version and timestamp both select a version; pass one of them", field="timestamp")
    if version is not None:
        _check_version(version)
    table = _opened(table_uri, None, options)
    latest = table.version()
    if version is not None and version > latest:
        raise InvalidArgument(
            f"{without_secrets(table_uri)} has no version {version}; the latest is {latest}", field="version"
        )
    if version is not None:
        return version
    return latest if timestamp is None else _version_at(table, table_uri, timestamp)


def scan(
    table_uri: str,
    version: int,
    *,
    condition: Condition | None,
    options: Mapping[str, Any],
) -> ScannedVersion:
    """Read the log up to a version.

    Raises:
        InvalidArgument: The log no longer has this version.
        DataError: The table needs a feature that is not supported.
        DataFileInvalid: The log names a file outside the table, or one twice.
        SchemaMismatch: The filter does not fit the table's columns.
        NoData: The version has no files.
        StorageError: The log cannot be read.
    """
    table = _opened(table_uri, version, options)
    mapping = _check_protocol(table, table_uri)
    source, root = open_source(table_uri, storage_options=options)
    schema = pa.schema(table.schema().to_arrow())
    try:
        actions = pa.table(table.get_add_actions(flatten=False))
        vectors = pa.RecordBatchReader.from_stream(table.deletion_vectors()).read_all()
    except (DeltaError, OSError) as error:
        raise _explained(error, table_uri) from error
    if not actions.num_rows:
        raise NoData(f"{without_secrets(table_uri)}, version {version}, has no files; write rows to it first")
    locations = actions["path"].to_pylist()
    deleted = _deleted(vectors)
    named = table.table_uri
    found: list[DataFile] = []
    known: dict[str, TableFile] = {}
    for number, (location, size) in enumerate(zip(locations, actions["size_bytes"].to_pylist(), strict=True)):
        name = _name_of(location, table_uri)
        path = f"{root.rstrip('/')}/{name}"
        if path in known:
            raise DataFileInvalid(
                f"{without_secrets(table_uri)}: its log lists {name} twice, so its rows would be read twice; "
                "read another version with version=",
                path=path,
            )
        written_ms = actions["modification_time"][number].as_py()
        found.append(DataFile(path, name, size, _modified_ns(source, path, written_ms)))
        known[path] = TableFile(_constants(actions, number), deleted.pop(f"{named}{location}", NO_ROWS))
    if deleted:
        raise DataFileInvalid(
            f"{without_secrets(table_uri)}: the deletion vector of {next(iter(deleted))} belongs to no active file; "
            "read another version with version=",
            path=table_uri,
        )
    kept = np.ones(len(found), dtype=np.bool_)
    if condition is not None:
        kept = _may_pass(condition, schema, mapping, actions)
    chosen = [file for file, is_kept in zip(found, kept.tolist(), strict=True) if is_kept] or found[:1]
    return ScannedVersion(
        table_id=str(table.metadata().id),
        version=version,
        source=source,
        files=tuple(sorted(chosen, key=lambda file: file.name)),
        num_pruned=len(found) - len(chosen),
        is_excluded=not kept.any(),
        format=DeltaFormat(schema, {file.path: known[file.path] for file in chosen}, mapping),
    )


def _check_version(version: object) -> None:
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise InvalidArgument(f"version={version!r} is not a version; pass a whole number from 0 on", field="version")


# --- the table ---


def _opened(table_uri: str, version: int | None, options: Mapping[str, Any]) -> DeltaTable:
    source, root = open_source(table_uri, storage_options=options)
    location = root if source.is_local else table_uri
    own = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}
    try:
        return DeltaTable(location, version=version, storage_options=own or None)
    except (DeltaError, OSError, ValueError) as error:
        if version is not None:
            raise InvalidArgument(
                f"version {version} of {without_secrets(table_uri)} cannot be read: {_text_of(error)}; its log may "
                "have been cleaned up, so pass a later version=",
                field="version",
            ) from error
        if isinstance(error, TableNotFoundError):
            raise InvalidArgument(
                f"{without_secrets(table_uri)} is not a Delta table: it has no _delta_log; pass the directory that "
                "contains _delta_log",
                field="table_uri",
            ) from error
        raise _explained(error, table_uri) from error


def _explained(error: Exception, table_uri: str) -> DataError | StorageError:
    if isinstance(error, OSError):
        return translate_error(error, table_uri)
    if isinstance(error, DeltaProtocolError):
        return DataError(f"{without_secrets(table_uri)} needs a feature that is not supported: {_text_of(error)}")
    return StorageError(f"the log of {without_secrets(table_uri)} cannot be read: {_text_of(error)}")


def _text_of(error: Exception) -> str:
    text = without_secrets(str(error))
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]}…"


def _version_at(table: DeltaTable, table_uri: str, timestamp: dt.datetime | str) -> int:
    moment = _moment(timestamp)
    try:
        history = table.history()
    except (DeltaError, OSError, ValueError) as error:
        raise _explained(error, table_uri) from error
    # Not `load_as_version`: it goes by the times of the log's files, which copying a table changes, and returns the
    # earliest version for any time before it.
    made_ms = {int(entry["version"]): entry["timestamp"] for entry in history if entry.get("timestamp") is not None}
    if not made_ms:
        raise InvalidArgument(
            f"the log of {without_secrets(table_uri)} does not state when its versions were written; pass version= "
            "instead",
            field="timestamp",
        )
    found = [version for version, written_ms in made_ms.items() if written_ms <= moment.timestamp() * 1000]
    if not found:
        earliest = dt.datetime.fromtimestamp(min(made_ms.values()) / 1000, tz=dt.UTC).isoformat(timespec="milliseconds")
        raise InvalidArgument(
            f"{without_secrets(table_uri)} has no version as old as {timestamp}; its log begins at {earliest}, so pass "
            "a later time",
            field="timestamp",
        )
    return max(found)


def _moment(timestamp: object) -> dt.datetime:
    moment = timestamp
    if isinstance(moment, str):
        try:
            moment = dt.datetime.fromisoformat(moment)
        except ValueError as error:
            raise InvalidArgument(
                f"timestamp={timestamp!r} is not a time; write it as 2026-01-31T12:00:00+00:00", field="timestamp"
            ) from error
    if not isinstance(moment, dt.datetime) or moment.tzinfo is None:
        raise InvalidArgument(
            f"timestamp={timestamp!r} has no time zone; pass a datetime with one, or text such as "
            "2026-01-31T12:00:00+00:00",
            field="timestamp",
        )
    return moment


def _check_protocol(table: DeltaTable, table_uri: str) -> str:
    """Return the mode of the column mapping.

    Raises:
        DataError: The table has features that are not supported.
    """
    features = sorted(set(table.protocol().reader_features or ()) - FEATURES)
    if features and (features != [VARIANT] or _has_variant(json.loads(table.schema().to_json()))):
        raise DataError(
            f"{without_secrets(table_uri)} needs {', '.join(features)}, which is not supported; drop the feature "
            "(Spark: ALTER TABLE … DROP FEATURE), or read a version before it with version="
        )
    mode = table.metadata().configuration.get(_MAPPING) or NO_MAPPING
    if mode not in MODES:
        raise DataError(f"{without_secrets(table_uri)}: {_MAPPING}={mode!r} is unknown; use one of {', '.join(MODES)}")
    return mode


def _has_variant(kind: object) -> bool:
    """Return whether a type of the table's schema, in JSON, contains values of any type."""
    if isinstance(kind, dict):
        return any(_has_variant(kind.get(part)) for part in ("type", "fields", "elementType", "keyType", "valueType"))
    return any(map(_has_variant, kind)) if isinstance(kind, list) else kind == "variant"


# --- files ---


def _name_of(location: str, table_uri: str) -> str:
    """Return the name of a data file below the table.

    Raises:
        DataFileInvalid: The log leads outside the table.
    """
    name = unquote(location)
    parts = name.split("/")
    if _SCHEME.match(location) or any(part in ("", ".", "..") for part in parts) or "\0" in name or "\\" in name:
        raise DataFileInvalid(
            f"{without_secrets(table_uri)}: its log names {without_secrets(location)!r}, which is not a file below the "
            "table. A shallow clone has such files: clone the table deeply, or read its origin",
            path=table_uri,
        )
    return name


def _modified_ns(source: Source, path: str, written_ms: int) -> int:
    """Return when a file was written. For local files, the node cache compares it with the file system."""
    if source.is_local:
        try:
            return Path(path).stat().st_mtime_ns
        except OSError:  # reading the footer reports the reason
            return 0
    return written_ms * 1_000_000


def _constants(actions: pa.Table, number: int) -> dict[str, pa.Scalar]:
    if "partition" not in actions.column_names:
        return {}
    values = actions["partition"][number]
    return {name: values[name] for name in values} if values.is_valid else {}


def _deleted(vectors: pa.Table) -> dict[str, npt.NDArray[np.int64]]:
    """Return the deleted rows by the location of the file."""
    found = {}
    for batch in vectors.to_batches():
        kept = batch.column("selection_vector")
        for number, location in enumerate(batch.column("filepath").to_pylist()):
            mask = kept[number].values
            found[location] = np.flatnonzero(~mask.to_numpy(zero_copy_only=False)).astype(np.int64)
    return found


# --- pruning by the log ---


def _may_pass(condition: Condition, schema: pa.Schema, mapping: str, actions: pa.Table) -> npt.NDArray[np.bool_]:
    """Return for each file whether its partition and its statistics allow rows that pass.

    Raises:
        SchemaMismatch: The filter does not fit the table's columns.
    """
    bound = row_filters.bind(condition, schema.remove_metadata())
    names = FileColumns("", mapping)
    bounds: dict[str, Bounds] = {}
    for name in condition.columns:
        found = _partition_bounds(actions, name) or _file_bounds(
            actions, names.physical(schema.field(name)), schema, name
        )
        if found is not None:
            bounds[name] = found
    decided = pruning.presence(bound.tree, bounds, actions.num_rows)
    return np.array([each is not Presence.NONE for each in decided], dtype=np.bool_)


def _partition_bounds(actions: pa.Table, name: str) -> Bounds | None:
    values = _member(actions, "partition", name)
    if values is None:
        return None
    values = values.cast(pruning.comparison_type(values.type))
    is_null = values.is_null().to_numpy(zero_copy_only=False)
    return pruning.Bounds(values, values, is_null, ~is_null)


def _file_bounds(actions: pa.Table, physical: str, schema: pa.Schema, name: str) -> Bounds | None:
    """Return the bounds in the statistics, where these are exact: floats may hide NaN, and times are cut."""
    kind = schema.field(name).type
    if not (pat.is_integer(kind) or pat.is_date32(kind) or pat.is_string(kind)):
        return None
    lows, highs = _member(actions, "min", physical), _member(actions, "max", physical)
    if lows is None or highs is None or lows.type != kind or highs.type != kind:
        return None
    if pat.is_string(kind):
        is_whole = pc.less(pc.utf8_length(highs), _CUT_CHARS)
        highs = pc.if_else(is_whole, highs, pa.scalar(None, kind))
    nulls = _member(actions, "null_count", physical)
    num_nulls = np.full(actions.num_rows, -1) if nulls is None else pc.fill_null(nulls, -1).to_numpy()
    num_rows = pc.fill_null(actions["num_records"], -2).to_numpy()
    compared = pruning.comparison_type(kind)
    return pruning.Bounds(lows.cast(compared), highs.cast(compared), num_nulls != 0, num_nulls != num_rows)


def _member(actions: pa.Table, column: str, name: str) -> pa.Array | None:
    """Return a member of a struct column, null where the struct is; None if there is none."""
    if column not in actions.column_names or not pat.is_struct(actions[column].type):
        return None
    struct = actions[column].combine_chunks()
    struct = pa.concat_arrays(struct.chunks) if isinstance(struct, pa.ChunkedArray) else struct
    index = struct.type.get_field_index(name)
    return None if index < 0 else pc.struct_field(struct, [index])
