"""Which state of the table is read."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.errors import InvalidArgument, NoData

if TYPE_CHECKING:
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot

_MAX_LISTED = 5


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
    listed = ", ".join(f"{each.snapshot_id} ({_readable(each.timestamp_ms)})" for each in latest[:_MAX_LISTED])
    return f"The latest of its {len(latest)}: {listed}"


def _readable(timestamp_ms: int) -> str:
    return dt.datetime.fromtimestamp(timestamp_ms / 1000, tz=dt.UTC).isoformat(timespec="milliseconds")
