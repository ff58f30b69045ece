"""From what a user says, a name and how to reach the catalog, to the table."""

from __future__ import annotations

import contextlib
import difflib
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

from strata.errors import ConfigError, DataFileInvalid, InvalidArgument, StorageDenied, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyiceberg.catalog import Catalog

_MAX_LISTED = 10
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
    listed = ", ".join(sorted(names)[:_MAX_LISTED])
    return f"; there are: {listed}{' …' if len(names) > _MAX_LISTED else ''}"


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
