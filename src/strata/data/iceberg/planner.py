"""Plan an Iceberg table: the result is the same `Plan` as for directories of files, so the same runtime reads it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from strata.config import parse_bytes
from strata.data import formats
from strata.data.filter import filter as row_filters
from strata.data.iceberg.catalog import find_schema, find_snapshot, opened, state_of
from strata.data.iceberg.columns import arrow_type
from strata.data.iceberg.deletes import read_positions
from strata.data.iceberg.filter import parse as parse_filters
from strata.data.iceberg.probe import Request, digest_of
from strata.data.iceberg.scan import Locator, scan
from strata.data.iceberg.survey import survey
from strata.data.plan.plan import Plan, PlannedFile, Pruning
from strata.data.plan.planner import RowGroups, assemble, fingerprint, parse_rows
from strata.data.plan.projection import TableProjection
from strata.errors import InvalidArgument, NoData, SchemaMismatch

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    import numpy.typing as npt
    from pyiceberg.expressions import BooleanExpression
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table
    from pyiceberg.types import NestedField

    from strata.data.config import OnEmpty, OnError
    from strata.data.filter.filter import Condition
    from strata.data.formats.base import FileFacts, Format
    from strata.data.iceberg.catalog import TableState
    from strata.data.iceberg.probe import CountedFile
    from strata.data.iceberg.scan import Scan
    from strata.data.iceberg.survey import TableSurvey
    from strata.data.plan.cache import SurveyCache
    from strata.data.plan.projection import ColumnProjection
    from strata.data.plan.surveyor import Progress
    from strata.data.source.source import Source

FORMATS: Mapping[str, Format] = {name: formats.by_name(name) for name in ("parquet", "orc")}


def state(
    table: str | Table,
    catalog_config: Mapping[str, Any] | None,
    *,
    snapshot_id: int | None,
    as_of: dt.datetime | str | int | None,
) -> TableState:
    """Return the state of a table; see `strata.data.iceberg.table_state`."""
    with opened(table, catalog_config) as found:
        snapshot = find_snapshot(found, snapshot_id=snapshot_id, as_of=as_of)
        travels = snapshot_id is not None or as_of is not None
        return state_of(found, snapshot, find_schema(found, snapshot, travels=travels))


def plan(
    table: str | Table,
    catalog_config: Mapping[str, Any] | None,
    *,
    columns: Sequence[str] | None,
    scan_filter: str | BooleanExpression | None,
    filters: Any,
    snapshot_id: int | None,
    as_of: dt.datetime | str | int | None,
    schema_id: int | None,
    split_bytes: int | str,
    split_rows: int | None,
    on_error: OnError,
    on_empty: OnEmpty,
    num_threads: int,
    cache: SurveyCache | None,
    progress: Progress | None,
) -> tuple[Source, Plan]:
    """Plan a table; see `strata.data.iceberg.plan_table`."""
    num_split_bytes, num_split_rows = parse_bytes(split_bytes), parse_rows(split_rows)
    if num_threads < 1:
        raise InvalidArgument(f"num_threads={num_threads} is below 1; pass 1 or more", field="num_threads")
    with opened(table, catalog_config) as found:
        snapshot = find_snapshot(found, snapshot_id=snapshot_id, as_of=as_of)
        travels = snapshot_id is not None or as_of is not None
        schema = find_schema(found, snapshot, schema_id=schema_id, travels=travels)
        delivered = choose(schema, columns)
        row_filter = parse_filters(scan_filter, filters, schema)
        scanned = scan(
            found, snapshot, schema, row_filter.expression if row_filter is not None else None, num_threads=num_threads
        )
        source, request = _request(
            found, schema, scanned, delivered, row_filter.condition if row_filter is not None else None, on_error
        )
        positions = read_positions(scanned.files, source, request.locator, num_threads=num_threads)
        seen = survey(request, scanned.files, positions, num_threads=num_threads, cache=cache, progress=progress)
        made = _assemble(
            request,
            f"{'.'.join(found.name())}, snapshot {snapshot.snapshot_id}",
            seen,
            scanned,
            columns=tuple(each.name for each in delivered),
            split_bytes=num_split_bytes,
            split_rows=num_split_rows,
            on_empty=on_empty,
        )
        return source, made


def _request(
    table: Table,
    schema: Schema,
    scanned: Scan,
    delivered: tuple[NestedField, ...],
    condition: Condition | None,
    on_error: OnError,
) -> tuple[Source, Request]:
    used = [schema.find_field(name) for name in condition.columns] if condition is not None else []
    if condition is not None:
        condition = row_filters.bind(condition, _arrow_schema(used, wide=False))
    locator = Locator(table)
    source = locator.source(_locations(scanned))
    request = Request(
        table=table,
        fields=(*delivered, *(each for each in used if each not in delivered)),
        condition=condition,
        source=source,
        locator=locator,
        formats=FORMATS,
        skips=on_error == "skip",
    )
    return source, request


def choose(schema: Schema, columns: Sequence[str] | None) -> tuple[NestedField, ...]:
    """Return the columns to deliver, in the requested order.

    Raises:
        SchemaMismatch: The table has no such column.
        InvalidArgument: `columns` is empty or contains a column twice.
    """
    if columns is None:
        return schema.fields
    if not columns or len(set(columns)) < len(columns):
        raise InvalidArgument(
            f"columns={list(columns)} is empty or has duplicates; list at least one column, each once", field="columns"
        )
    by_name = {each.name: each for each in schema.fields}
    for name in columns:
        if name not in by_name:
            raise SchemaMismatch(
                f"the table has no column {name!r}; {row_filters.nearest(name, by_name)}", field="columns"
            )
    return tuple(by_name[name] for name in columns)


def _locations(found: Scan) -> list[str]:
    files = [each.file.file_path for each in found.files]
    deletes = {delete.file_path for each in found.files for delete in (*each.position_deletes, *each.equality_deletes)}
    return files + sorted(deletes)


def _arrow_schema(fields: Sequence[NestedField], *, wide: bool) -> pa.Schema:
    kinds = [(each, arrow_type(each.field_type, wide=wide)) for each in fields]
    for each, kind in kinds:
        if kind is None:
            raise SchemaMismatch(
                f"column {each.name} has the type {each.field_type}, which is not supported; exclude it with columns=",
                field="columns",
            )
    return pa.schema([pa.field(each.name, kind, nullable=each.optional) for each, kind in kinds])


def _assemble(
    request: Request,
    name: str,
    seen: TableSurvey,
    found: Scan,
    *,
    columns: tuple[str, ...],
    split_bytes: int,
    split_rows: int | None,
    on_empty: OnEmpty,
) -> Plan:
    schema = _arrow_schema(request.fields, wide=seen.wide)
    units = _units(seen.files)
    is_lost = bool(seen.skipped) and not seen.files
    if not units.rows.any() and (on_empty == "raise" or is_lost):
        raise NoData(_why_nothing(name, seen, found, request.condition))
    made = assemble(
        files=[_planned(each) for each in seen.files],
        row_groups=units,
        schema=schema,
        columns=columns,
        condition=request.condition,
        null_counts=_null_counts(seen.files, columns),
        split_bytes=split_bytes,
        split_rows=split_rows,
        pruning=_pruning(seen, found, units),
    )
    return replace(made, fingerprint=_fingerprint(request.table, made))


def _planned(counted: CountedFile) -> PlannedFile:
    probed = counted.probed
    return PlannedFile(probed.file, probed.format.name, probed.facts.version, probed.facts.schema, counted.projection)


def _units(files: Sequence[CountedFile]) -> RowGroups:
    units = [
        (number, unit, rows)
        for number, each in enumerate(files)
        for unit, rows in zip(each.probed.facts.units, each.unit_rows, strict=True)
    ]

    def numbers(values: Iterable[int]) -> npt.NDArray[np.int64]:
        return np.fromiter(values, dtype=np.int64, count=len(units))

    return RowGroups(
        file=numbers(number for number, _, _ in units),
        index=numbers(unit.index for _, unit, _ in units),
        rows=numbers(rows for _, _, rows in units),
        total_rows=numbers(unit.num_rows for _, unit, _ in units),
        first_row=numbers(unit.first_row for _, unit, _ in units),
        offset=numbers(unit.offset for _, unit, _ in units),
        num_bytes=numbers(unit.num_bytes for _, unit, _ in units),
    )


def _why_nothing(name: str, seen: TableSurvey, found: Scan, condition: Condition | None) -> str:
    if seen.skipped and not seen.files:
        file, reason = seen.skipped[0]
        return f"{name}: none of its {len(seen.skipped)} files can be read; the first is {file}: {reason}"
    if condition is not None and (found.files or found.num_pruned):
        return (
            f"{name}: no row passes the filter {condition.text} ({found.num_pruned} files were pruned by their "
            f"metadata, {len(found.files)} were inspected); check its values, or accept an empty loader with "
            "on_empty='empty'"
        )
    return f"{name} has no rows; read another snapshot with snapshot_id= or as_of="


def _null_counts(files: Sequence[CountedFile], columns: Sequence[str]) -> dict[str, int]:
    """Return the null counts that files state, before deletes and the filter."""
    totals = dict.fromkeys(columns, 0)
    for alike in _alike(files):
        facts = [each.probed.facts for each in alike]
        for name in columns:
            totals[name] += _nulls(alike[0].projection.columns[name], facts)
    return {name: total for name, total in totals.items() if total}


def _alike(files: Sequence[CountedFile]) -> list[list[CountedFile]]:
    """Group files by their layout."""
    groups: dict[int, list[CountedFile]] = {}
    for each in files:
        groups.setdefault(id(each.probed.layout), []).append(each)
    return list(groups.values())


def _nulls(column: ColumnProjection, facts: Sequence[FileFacts]) -> int:
    """Return the number of nulls that these files state."""
    if column.source is None:
        return 0 if column.constant is not None else sum(unit.num_rows for each in facts for unit in each.units)
    return sum(each.null_counts.get(column.source, 0) for each in facts) if column.is_plain else 0


def _fingerprint(table: Table, plan: Plan) -> str:
    """Return the fingerprint of the table and its rows. A snapshot that only reorganizes manifests keeps it."""
    files = [
        (f"{table.metadata.table_uuid} {each.file.name}", f"{each.version} {digest_of(each.projection.deleted)}")
        for each in plan.files
        if isinstance(each.projection, TableProjection)
    ]
    numbers = [plan.unit_file, plan.unit_index, plan.unit_rows, plan.split_starts]
    return fingerprint(files, numbers, plan.condition_text)


def _pruning(seen: TableSurvey, found: Scan, units: RowGroups) -> Pruning:
    return Pruning(
        num_files=len(found.files) + found.num_pruned,
        num_files_pruned=found.num_pruned,
        num_units=len(units.rows),
        num_units_pruned=int((units.rows == 0).sum()),
        num_units_counted=sum(each.num_units_counted for each in seen.files),
        num_rows=int(units.total_rows.sum()),
        bytes_total=sum(each.probed.file.size_bytes for each in seen.files),
        bytes_planned=int(units.num_bytes[units.rows > 0].sum()),
        skipped=seen.skipped,
        num_files_skipped=seen.num_files_skipped,
        num_units_skipped=len(seen.skipped) - seen.num_files_skipped,
    )
