"""Iceberg tables, read by the same runtime as files: a table becomes a `Plan`.

    catalogs → snapshots → scanning (manifests) → locating → deletes → surveying (footers, counts) → planning

What the runtime needs afterwards, `fitting.IcebergFit`, knows nothing of Iceberg and needs none of its packages.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from strata.errors import ConfigError

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Mapping, Sequence
    from types import ModuleType
    from typing import Any

    from pyiceberg.expressions import BooleanExpression
    from pyiceberg.table import Table

    from strata.data.config import OnEmpty, OnError
    from strata.data.iceberg.catalog import TableState
    from strata.data.plan.cache import SurveyCache
    from strata.data.plan.plan import Plan
    from strata.data.plan.surveyor import Progress
    from strata.data.source.source import Source

DEFAULT_THREADS = 16


def table_state(
    table: str | Table,
    catalog_config: Mapping[str, Any] | None = None,
    *,
    snapshot_id: int | None = None,
    as_of: dt.datetime | str | int | None = None,
) -> TableState:
    """Which state of the table `plan_table` would read with these arguments.

    For ranks that must all read the same while others write to the table, and for going on tomorrow with what was read
    today: one asks, all plan with its `snapshot_id` and `schema_id`.

    Raises:
        InvalidArgument, ConfigError, NoData, StorageError: As for `plan_table`.
    """
    state: TableState = _planning().state(table, catalog_config, snapshot_id=snapshot_id, as_of=as_of)
    return state


def plan_table(
    table: str | Table,
    catalog_config: Mapping[str, Any] | None = None,
    *,
    columns: Sequence[str] | None = None,
    scan_filter: str | BooleanExpression | None = None,
    filters: Any = None,
    snapshot_id: int | None = None,
    as_of: dt.datetime | str | int | None = None,
    schema_id: int | None = None,
    split_bytes: int | str = "128MiB",
    split_rows: int | None = None,
    on_error: OnError = "raise",
    on_empty: OnEmpty = "raise",
    num_threads: int = DEFAULT_THREADS,
    cache: SurveyCache | None = None,
    progress: Progress | None = None,
) -> tuple[Source, Plan]:
    """What there is to read in a table, and where it is.

    Args:
        table: Its name in the catalog (`db.clicks`), the path of its `….metadata.json`, or a table of pyiceberg.
        catalog_config: What `pyiceberg.catalog.load_catalog` takes, and `name`; None: as pyiceberg is configured.
        columns: What to deliver, in this order; None: all.
        scan_filter: Which rows to deliver, as text (`x > 3 and y in ('a', 'b')`) or as pyiceberg has it.
        filters: The same as for files: text (`x > 3`), tuples, or a pyarrow expression. With both, rows pass both.
        snapshot_id: Read this state of the table, with the schema it had, not the current one.
        as_of: Or the one that was current then: a datetime with a zone, ISO text, or milliseconds since 1970.
        schema_id: Which of the table's schemas; None: today's, or with the two before, the one the snapshot had.
        split_bytes: About how much a split reads.
        split_rows: At most how many rows a split delivers.
        on_error: "skip" leaves out data files that are damaged or missing, and tells which in `Plan.pruning`.
        on_empty: "empty" gives a plan without rows where none is left, instead of NoData.
        num_threads: How many files are looked into at once.
        cache: Where to keep what was found in files.
        progress: Told what is being done, how many files are done, and of how many.

    Raises:
        InvalidArgument: No such table or snapshot, or an argument is wrong.
        ConfigError: pyiceberg, or what the catalog needs, is not installed.
        SchemaMismatch: No such column, or a file cannot be read as the table's schema has it.
        NoData: No rows are left.
        DataError, StorageError: Files cannot be read; the message names them.
    """
    source, plan = _planning().plan(
        table,
        catalog_config,
        columns=columns,
        scan_filter=scan_filter,
        filters=filters,
        snapshot_id=snapshot_id,
        as_of=as_of,
        schema_id=schema_id,
        split_bytes=split_bytes,
        split_rows=split_rows,
        on_error=on_error,
        on_empty=on_empty,
        num_threads=num_threads,
        cache=cache,
        progress=progress,
    )
    return source, plan


def _planning() -> ModuleType:
    """Imported late: pyiceberg takes a while, and is not everybody's."""
    try:
        return importlib.import_module("strata.data.iceberg.planner")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Iceberg tables need the package {error.name}; install it with: pip install 'strata-runtime[iceberg]'",
            field="table",
        ) from error
