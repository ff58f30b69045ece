"""Iceberg tables as plans, which the same runtime reads as those of files.

    catalog (table, snapshot) → scan (manifests, locations) → deletes → survey (probe: footers, row counts) → planner

May import every folder of `data` but `runtime`. Only planning imports pyiceberg: `TableProjection`, which decode
processes use, depends on pyarrow alone.
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
    """Return the state of the table that `plan_table` would read with these arguments.

    Ranks that must read the same rows while others write to the table, or a run that resumes later, use one state: one
    rank calls this, and all plan with its `snapshot_id` and `schema_id`.

    Raises:
        InvalidArgument, ConfigError, NoData, StorageError: See `plan_table`.
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
    """Return the source and the plan of a table.

    Args:
        table: The name in the catalog (`db.clicks`), the path of its `….metadata.json`, or a table of pyiceberg.
        catalog_config: The arguments of `pyiceberg.catalog.load_catalog`, with `name`; None uses the configuration of
            pyiceberg.
        columns: The columns to deliver, in this order; None delivers all.
        scan_filter: The rows to deliver, as text (`x > 3 and y in ('a', 'b')`) or an expression of pyiceberg.
        filters: The rows to deliver, in a form for files: text (`x > 3`), tuples, or a pyarrow expression. With both,
            rows must pass both.
        snapshot_id: Read this snapshot, with its schema, instead of the current one.
        as_of: Read the snapshot that was current at this time: a datetime with a time zone, ISO text, or milliseconds
            since 1970.
        schema_id: The schema to use; None uses the current one, or that of the snapshot if one was requested.
        split_bytes: The approximate bytes of a split.
        split_rows: The maximum number of rows of a split.
        on_error: "skip" leaves out damaged or missing data files and lists them in `Plan.pruning`.
        on_empty: "empty" returns a plan without rows instead of raising NoData.
        num_threads: The number of files to inspect at once.
        cache: Stores the metadata found in files.
        progress: Called with the current task, the number of finished files, and their total.

    Raises:
        InvalidArgument: The table or snapshot does not exist, or an argument is invalid.
        ConfigError: pyiceberg, or a package for the catalog, is not installed.
        SchemaMismatch: A column does not exist, or a file does not fit the table's schema.
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
    """Import the planner late: pyiceberg is optional and slow to import."""
    try:
        return importlib.import_module("strata.data.iceberg.planner")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Iceberg tables need the package {error.name}; install it with: pip install 'strata-runtime[iceberg]'",
            field="table",
        ) from error
