"""From what a user says, a name and how to reach the catalog, to the table."""

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
    """The table as `open_table` finds it; the connection to the catalog is closed afterwards, if it was made for it."""
    found = open_table(table, catalog_config)
    try:
        yield found
    finally:
        if found is not table:
            found.catalog.close()


def open_table(table: str | Table, catalog_config: Mapping[str, Any] | None = None) -> Table:
    """The table: one that is open already, one of a catalog (`db.clicks`), or one without a catalog.

    `catalog_config` is what pyiceberg takes: `type` (sql, rest, glue, hive, …), `uri`, credentials; `name` is which
    catalog of pyiceberg's own configuration (`.pyiceberg.yaml`, environment) these are added to. Without a catalog: the
    path of a `….metadata.json`, or of a table that has a version hint; `catalog_config` is then for its storage.

    Raises:
        InvalidArgument: There is no such table, or the catalog's settings are wrong.
        ConfigError: A package that this kind of catalog needs is not installed.
        StorageDenied, StorageUnavailable: The catalog refuses, or does not answer.
    """
    if isinstance(table, Table):
        if catalog_config is not None:
            raise InvalidArgument("the table is open already; leave catalog_config out", field="catalog_config")
        return table
    config = dict(catalog_config or {})
    if "/" in table or table.endswith(".metadata.json"):
        return _open_static(table, config)
    with contextlib.ExitStack() as on_error:
        catalog = _reach(config)
        on_error.callback(catalog.close)
        try:
            found = catalog.load_table(table)
        except (NoSuchTableError, NoSuchNamespaceError, NoSuchIdentifierError):
            cure = _nearest(catalog, table)
            raise InvalidArgument(f"there is no table {table!r} in the catalog{cure}", field="table") from None
        except (RESTError, SQLAlchemyError, OSError, ValueError) as error:
            raise _explain(error, config) from None
        on_error.pop_all()
        return found


def _reach(config: dict[str, Any]) -> Catalog:
    settings = {key: value for key, value in config.items() if key != "name"}
    try:
        return load_catalog(config.get("name"), **settings)
    except (NotInstalledError, ImportError) as error:
        raise ConfigError(
            f"the catalog needs a package that is not installed: {error}", field="catalog_config"
        ) from error
    except (RESTError, SQLAlchemyError, OSError, ValueError, KeyError) as error:
        raise _explain(error, config) from None


def _explain(error: Exception, config: Mapping[str, Any]) -> Exception:
    """What went wrong with the catalog, without the passwords that messages of libraries repeat."""
    text = _without_secrets(f"{type(error).__name__}: {error}", config)
    if isinstance(error, UnauthorizedError | ForbiddenError | PermissionError):
        return StorageDenied(f"the catalog refuses: {text}; check the credentials in catalog_config")
    if isinstance(error, RESTError | SQLAlchemyError | OSError):
        return StorageUnavailable(f"the catalog cannot be reached: {text}; check the uri in catalog_config")
    keys = ", ".join(sorted(config)) or "none"
    return InvalidArgument(
        f"no catalog can be opened with these settings ({keys}): {text}; a local one is "
        "{'type': 'sql', 'uri': 'sqlite:////path/to/catalog.db'}, a server {'type': 'rest', 'uri': 'https://…'}",
        field="catalog_config",
    )


def _without_secrets(text: str, config: Mapping[str, Any]) -> str:
    for key, value in config.items():
        if key not in _NOT_SECRET and len(str(value)) > 3:
            text = text.replace(str(value), f"<{key}>")
    return text


def _nearest(catalog: Catalog, table: str) -> str:
    """The cure for a table that is not there: what is."""
    try:
        names = [".".join(name) for space in catalog.list_namespaces() for name in catalog.list_tables(space)]
    except (RESTError, SQLAlchemyError, OSError, ValueError, NotImplementedError):
        return "; the catalog does not list what it has"
    if not names:
        return (
            ", which has no tables at all; check uri and name in catalog_config: a database can hold several catalogs"
        )
    near = difflib.get_close_matches(table, names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    listed = ", ".join(sorted(names)[:_MAX_TABLES_LISTED])
    return f"; there are: {listed}{' …' if len(names) > _MAX_TABLES_LISTED else ''}"


def _open_static(location: str, config: dict[str, Any]) -> Table:
    try:
        return StaticTable.from_metadata(location, config)
    except FileNotFoundError as error:
        raise InvalidArgument(
            f"there is no table's metadata at {location}: {error}; name a ….metadata.json, or a table of a catalog as "
            "'namespace.table'",
            field="table",
        ) from error
    except PermissionError as error:
        raise StorageDenied(
            f"{location} may not be read: {error}; check its permissions, or the credentials"
        ) from error
    except OSError as error:
        raise StorageUnavailable(f"{location} cannot be reached: {_without_secrets(str(error), config)}") from None
    except ValueError as error:
        raise DataFileInvalid(f"{location} is not the metadata of an Iceberg table: {error}") from error


# --- snapshots ---


@dataclass(frozen=True, slots=True, kw_only=True)
class TableState:
    """What has to be known of a table to read the same of it again, on another rank or on another day."""

    name: str
    table_uuid: str
    snapshot_id: int
    schema_id: int
    timestamp_ms: int
    """When the snapshot was made."""


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
    """The snapshot with this id, the one that was current at a time, or the current one.

    `as_of`: a datetime with a zone, the same as ISO text, or milliseconds since 1970.

    Raises:
        InvalidArgument: There is no such snapshot; the message names those that there are.
        NoData: Nothing was ever written to the table.
    """
    if snapshot_id is not None and as_of is not None:
        raise InvalidArgument("snapshot_id and as_of both say which snapshot to read; give one of them", field="as_of")
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
            raise InvalidArgument(f"{_name(table)} has no snapshot as old as {as_of}. {_known(table)}", field="as_of")
        return found
    found = table.current_snapshot()
    if found is None:
        raise NoData(f"{_name(table)} has no snapshot: nothing was ever written to it")
    return found


def find_schema(table: Table, snapshot: Snapshot, *, schema_id: int | None = None, travels: bool) -> Schema:
    """The table's schema today, or, when the past is asked for, the one that the snapshot was written with.

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
                f"as_of={moment!r} is no time; write it as 2026-01-31T12:00:00+00:00", field="as_of"
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
        return "It has none"
    listed = ", ".join(
        f"{each.snapshot_id} ({_readable(each.timestamp_ms)})" for each in latest[:_MAX_SNAPSHOTS_LISTED]
    )
    return f"The latest of its {len(latest)}: {listed}"


def _readable(timestamp_ms: int) -> str:
    return dt.datetime.fromtimestamp(timestamp_ms / 1000, tz=dt.UTC).isoformat(timespec="milliseconds")
