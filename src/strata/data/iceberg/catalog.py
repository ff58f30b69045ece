"""Open a table by its name and its catalog, and choose the snapshot and the schema to read."""

from __future__ import annotations

import contextlib
import datetime as dt
import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import (
    ForbiddenError,
    NoSuchIdentifierError,
    NoSuchNamespaceError,
    NoSuchTableError,
    NotInstalledError,
    RESTError,
    UnauthorizedError,
)
from pyiceberg.table import StaticTable, Table
from sqlalchemy.exc import SQLAlchemyError

from strata.errors import ConfigError, DataFileInvalid, InvalidArgument, NoData, StorageDenied, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyiceberg.catalog import Catalog
    from pyiceberg.schema import Schema
    from pyiceberg.table.snapshots import Snapshot

_MAX_TABLES_LISTED = 10
_MAX_SNAPSHOTS_LISTED = 5
_NOT_SECRET = ("type", "name", "warehouse", "py-catalog-impl")


@contextlib.contextmanager
def opened(table: str | Table, catalog_config: Mapping[str, Any] | None = None) -> Iterator[Table]:
    """Open a table as `open_table` does, and close its catalog afterwards unless the user passed an open table."""
    found = open_table(table, catalog_config)
    try:
        yield found
    finally:
        if found is not table:
            found.catalog.close()


def open_table(table: str | Table, catalog_config: Mapping[str, Any] | None = None) -> Table:
    """Open a table of a catalog (`db.clicks`) or one without a catalog; an open table is returned unchanged.

    `catalog_config` holds the settings of pyiceberg: `type` (sql, rest, glue, hive, …), `uri`, credentials. They extend
    the catalog `name` of pyiceberg's own configuration (`.pyiceberg.yaml`, environment). A table without a catalog is
    given by the path of its `….metadata.json`, or its directory if it has a version hint; `catalog_config` then holds
    the settings of its storage.

    Raises:
        InvalidArgument: The table does not exist, or the settings of the catalog are wrong.
        ConfigError: A package for this kind of catalog is not installed.
        StorageDenied, StorageUnavailable: The catalog refuses access, or does not answer.
    """
    if isinstance(table, Table):
        if catalog_config is not None:
            raise InvalidArgument("the table is already open; omit catalog_config", field="catalog_config")
        return table
    config = dict(catalog_config or {})
    if "/" in table or table.endswith(".metadata.json"):
        return _open_static(table, config)
    with contextlib.ExitStack() as on_error:
        catalog = _open_catalog(config)
        on_error.callback(catalog.close)
        try:
            found = catalog.load_table(table)
        except (NoSuchTableError, NoSuchNamespaceError, NoSuchIdentifierError):
            cure = _suggest(catalog, table)
            raise InvalidArgument(f"the catalog has no table {table!r}{cure}", field="table") from None
        except (RESTError, SQLAlchemyError, OSError, ValueError) as error:
            raise _explain(error, config) from None
        on_error.pop_all()
        return found


def _open_catalog(config: dict[str, Any]) -> Catalog:
    settings = {key: value for key, value in config.items() if key != "name"}
    try:
        return load_catalog(config.get("name"), **settings)
    except (NotInstalledError, ImportError) as error:
        raise ConfigError(
            f"the catalog needs a package that is not installed ({error}); install it", field="catalog_config"
        ) from error
    except (RESTError, SQLAlchemyError, OSError, ValueError, KeyError) as error:
        raise _explain(error, config) from None


def _explain(error: Exception, config: Mapping[str, Any]) -> Exception:
    """Return the error for a failure of the catalog, without the passwords that library messages repeat."""
    text = _without_secrets(f"{type(error).__name__}: {error}", config)
    if isinstance(error, UnauthorizedError | ForbiddenError | PermissionError):
        return StorageDenied(f"the catalog denies access: {text}; check the credentials in catalog_config")
    if isinstance(error, RESTError | SQLAlchemyError | OSError):
        return StorageUnavailable(f"the catalog cannot be reached: {text}; check the uri in catalog_config")
    keys = ", ".join(sorted(config)) or "none"
    return InvalidArgument(
        f"the catalog cannot be opened with these settings ({keys}): {text}; examples are "
        "{'type': 'sql', 'uri': 'sqlite:////path/to/catalog.db'} and {'type': 'rest', 'uri': 'https://…'}",
        field="catalog_config",
    )


def _without_secrets(text: str, config: Mapping[str, Any]) -> str:
    for key, value in config.items():
        if key not in _NOT_SECRET and len(str(value)) > 3:
            text = text.replace(str(value), f"<{key}>")
    return text


def _suggest(catalog: Catalog, table: str) -> str:
    """Return a hint for a table that does not exist: similar tables, or all."""
    try:
        names = [".".join(name) for space in catalog.list_namespaces() for name in catalog.list_tables(space)]
    except (RESTError, SQLAlchemyError, OSError, ValueError, NotImplementedError):
        return "; the catalog does not list its tables"
    if not names:
        return "; it is empty: check uri and name in catalog_config, because a database can contain several catalogs"
    near = difflib.get_close_matches(table, names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    listed = ", ".join(sorted(names)[:_MAX_TABLES_LISTED])
    return f"; its tables are: {listed}{' …' if len(names) > _MAX_TABLES_LISTED else ''}"


def _open_static(location: str, config: dict[str, Any]) -> Table:
    try:
        return StaticTable.from_metadata(location, config)
    except FileNotFoundError as error:
        raise InvalidArgument(
            f"{location} is not the metadata of a table: {error}; pass a ….metadata.json, or a table of a catalog as "
            "'namespace.table'",
            field="table",
        ) from error
    except PermissionError as error:
        raise StorageDenied(f"{location}: access denied: {error}; check its permissions, or the credentials") from error
    except OSError as error:
        raise StorageUnavailable(
            f"{location} cannot be reached: {_without_secrets(str(error), config)}; check the storage settings in "
            "catalog_config"
        ) from None
    except ValueError as error:
        raise DataFileInvalid(
            f"{location} is not the metadata of an Iceberg table ({error}); pass a ….metadata.json", path=location
        ) from error


# --- snapshots ---


@dataclass(frozen=True, slots=True, kw_only=True)
class TableState:
    """Identifies a state of a table, so that another rank or a later run reads the same rows."""

    name: str
    table_uuid: str
    snapshot_id: int
    schema_id: int
    timestamp_ms: int
    """When the snapshot was created."""


def state_of(table: Table, snapshot: Snapshot, schema: Schema) -> TableState:
    return TableState(
        name=_name(table),
        table_uuid=str(table.metadata.table_uuid),
        snapshot_id=snapshot.snapshot_id,
        schema_id=schema.schema_id,
        timestamp_ms=snapshot.timestamp_ms,
    )


def find_snapshot(
    table: Table, *, snapshot_id: int | None = None, as_of: dt.datetime | str | int | None = None
) -> Snapshot:
    """Return the snapshot with this id, the one that was current at a time, or the current one.

    `as_of` is a datetime with a time zone, the same as ISO text, or milliseconds since 1970.

    Raises:
        InvalidArgument: The snapshot does not exist; the message lists the latest ones.
        NoData: The table has no snapshot.
    """
    if snapshot_id is not None and as_of is not None:
        raise InvalidArgument("snapshot_id and as_of both select a snapshot; pass one of them", field="as_of")
    if snapshot_id is not None:
        found = table.snapshot_by_id(snapshot_id)
        if found is None:
            raise InvalidArgument(
                f"{_name(table)} has no snapshot {snapshot_id}; it may have expired. {_known(table)}",
                field="snapshot_id",
            )
        return found
    if as_of is not None:
        found = table.snapshot_as_of_timestamp(_milliseconds(as_of))
        if found is None:
            raise InvalidArgument(
                f"{_name(table)} has no snapshot as old as {as_of}; pass a later time. {_known(table)}", field="as_of"
            )
        return found
    found = table.current_snapshot()
    if found is None:
        raise NoData(f"{_name(table)} has no snapshot; write rows to it first")
    return found


def find_schema(table: Table, snapshot: Snapshot, *, schema_id: int | None = None, travels: bool) -> Schema:
    """Return the current schema, or with `travels` the schema that the snapshot was written with.

    Raises:
        InvalidArgument: The table has no schema with this id.
    """
    schemas = table.schemas()
    if schema_id is not None:
        if schema_id not in schemas:
            known = ", ".join(map(str, sorted(schemas)))
            raise InvalidArgument(f"{_name(table)} has no schema {schema_id}; it has: {known}", field="schema_id")
        return schemas[schema_id]
    if travels and snapshot.schema_id in schemas:
        return schemas[snapshot.schema_id]
    return table.schema()


def _milliseconds(moment: dt.datetime | str | int) -> int:
    if isinstance(moment, int):
        return moment
    if isinstance(moment, str):
        try:
            moment = dt.datetime.fromisoformat(moment)
        except ValueError as error:
            raise InvalidArgument(
                f"as_of={moment!r} is not a time; write it as 2026-01-31T12:00:00+00:00", field="as_of"
            ) from error
    if moment.tzinfo is None:
        raise InvalidArgument(
            f"as_of={moment.isoformat()} has no time zone; add one, as in {moment.isoformat()}+00:00", field="as_of"
        )
    return int(moment.timestamp() * 1000)


def _name(table: Table) -> str:
    return ".".join(table.name())


def _known(table: Table) -> str:
    latest = sorted(table.snapshots(), key=lambda snapshot: snapshot.timestamp_ms, reverse=True)
    if not latest:
        return "It has no snapshots"
    listed = ", ".join(
        f"{each.snapshot_id} ({_readable(each.timestamp_ms)})" for each in latest[:_MAX_SNAPSHOTS_LISTED]
    )
    return f"The latest of its {len(latest)} snapshots: {listed}"


def _readable(timestamp_ms: int) -> str:
    return dt.datetime.fromtimestamp(timestamp_ms / 1000, tz=dt.UTC).isoformat(timespec="milliseconds")
