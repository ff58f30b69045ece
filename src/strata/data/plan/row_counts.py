"""Row counts: how many rows of each row group pass the filter.

Partition values, and columns that a file lacks, decide without reading. Statistics decide for row groups of which all
rows pass or none. In the others, the filter's columns are decoded and the rows that pass are counted. Where page
statistics exist, only the undecided pages are decoded, and pages that they rule out are not read later either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from strata.data.filter import expression
from strata.data.filter import filter as filters
from strata.data.filter.expression import Presence
from strata.data.formats.base import PagedReader, Saving, is_keyed, join_rows
from strata.data.plan.probe import UNREADABLE, attempts, known_values
from strata.data.plan.schema import PlainProjection, keeps_values, retyped, unify
from strata.data.plan.survey import SurveyedFile, named_schemas, pack, unpack
from strata.data.source.partitions import partition_values

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from strata.data.filter.expression import Resolved
    from strata.data.filter.filter import Condition
    from strata.data.formats.base import Judged, Reader, Rows, Unit
    from strata.data.plan.probe import Probe
    from strata.data.plan.survey import Partition
    from strata.errors import DataError

_COUNT_AT_ONCE = 8
"""Row groups of one file that a thread counts as one task."""
MIN_SAVED = 0.25
"""Minimum share of a row group's bytes that reading it in part must save."""
MAX_PARTS = 64
"""Maximum ranges of a row group that is read in part; above it, ranges are joined and rows between them are read."""


def bound_condition(
    probe: Probe, schemas: Sequence[pa.Schema], files: Sequence[SurveyedFile]
) -> tuple[Condition, pa.Schema]:
    """Return the filter and its columns with unified types. Delivered columns are checked too, before counting.

    Raises:
        SchemaMismatch: The filter does not fit the files, or files disagree on a column that is used.
    """
    assert probe.condition is not None
    partitions = [field.name for field in probe.partition_fields]
    decided = probe.schema.names if probe.schema is not None and is_keyed(probe.format) else []
    names = dict.fromkeys([*(name for schema in schemas for name in schema.names), *decided, *partitions])
    filters.check_names(probe.condition, list(names))
    unified = unify(
        named_schemas(schemas, files),
        columns=probe.columns,
        condition_columns=probe.condition.columns,
        partition_fields=probe.partition_fields,
        is_typed=probe.format.is_typed,
        is_keyed=is_keyed(probe.format),
        schema=probe.schema,
    )
    used = pa.schema([unified.schema.field(name) for name in probe.condition.columns])
    return filters.bind(probe.condition, used), used


@dataclass(frozen=True, slots=True)
class _Task:
    """Row groups of one file whose rows have to be counted."""

    number: int
    """The number of the file."""
    left: Resolved
    """What remains of the filter once the partition values of the file are filled in."""
    row_groups: list[Unit]


@dataclass(frozen=True, slots=True)
class _Counted:
    """The result for one row group."""

    num_passing: int
    is_decoded: bool
    parts: tuple[Rows, ...] = ()
    """The ranges of rows to read; empty means all."""
    saving: Saving = field(default_factory=Saving)


@dataclass(slots=True)
class _Tally:
    """The counts so far, for files that were not counted before."""

    passing: dict[int, list[int]]
    """Rows that pass, by the number of the file, then by row group."""
    counted: dict[int, int]
    parts: dict[int, list[tuple[int, int, int]]]
    """As `SurveyedFile.parts`, by the number of the file and in any order."""
    savings: dict[int, Saving]
    skipped: list[tuple[str, str]]
    num_units_skipped: int = 0


def count_passing(
    probe: Probe, schemas: Sequence[pa.Schema], files: list[SurveyedFile], dataset: pa.Schema
) -> tuple[list[SurveyedFile], list[tuple[str, str]], int]:
    """Return the files with their row counts, what was skipped, and the number of skipped row groups."""
    new = [number for number, file in enumerate(files) if file.passing is None]
    tally = _Tally({}, dict.fromkeys(new, 0), {number: [] for number in new}, dict.fromkeys(new, Saving()), [])
    unsettled: list[tuple[int, Resolved]] = []
    for number, left in zip(new, _resolve(probe, schemas, [files[number] for number in new], dataset), strict=True):
        rows = unpack(files[number].rows).tolist()
        tally.passing[number] = rows if left.presence is Presence.ALL else [0] * len(rows)
        if left.presence is Presence.SOME and rows:
            unsettled.append((number, left))
    tasks = _ask_statistics(probe, schemas, files, unsettled, dataset, tally)
    _count_rows(probe, schemas, files, tasks, dataset, tally)
    made = list(files)
    for number in new:
        saving = tally.savings[number]
        made[number] = msgspec.structs.replace(
            files[number],
            passing=pack(tally.passing[number]),
            num_counted=tally.counted[number],
            parts=pack([value for part in sorted(tally.parts[number]) for value in part]),
            num_pages=saving.num_pages,
            num_pages_skipped=saving.num_pages_skipped,
            bytes_skipped=saving.bytes_skipped,
        )
    return made, tally.skipped, tally.num_units_skipped


def _ask_statistics(
    probe: Probe,
    schemas: Sequence[pa.Schema],
    files: Sequence[SurveyedFile],
    unsettled: Sequence[tuple[int, Resolved]],
    dataset: pa.Schema,
    tally: _Tally,
) -> list[_Task]:
    """Return the row groups that statistics leave undecided."""

    def ask(each: tuple[int, Resolved]) -> list[Presence]:
        number, left = each
        return _presence(probe, files[number], schemas[files[number].schema], dataset, left)

    tasks = []
    answers = attempts(probe, ask, unsettled, "reading statistics")
    for (number, left), answer in zip(unsettled, answers, strict=True):
        if isinstance(answer, Exception):
            tally.skipped.append((files[number].name, str(answer)))
            tally.num_units_skipped += len(tally.passing[number])
            continue
        row_groups = files[number].facts(schemas[files[number].schema]).units
        judged = list(zip(row_groups, answer, strict=True))
        tally.passing[number] = [
            row_group.num_rows if presence is Presence.ALL else 0 for row_group, presence in judged
        ]
        some = [row_group for row_group, presence in judged if presence is Presence.SOME]
        tasks += [_Task(number, left, some[at : at + _COUNT_AT_ONCE]) for at in range(0, len(some), _COUNT_AT_ONCE)]
    return tasks


def _count_rows(
    probe: Probe,
    schemas: Sequence[pa.Schema],
    files: Sequence[SurveyedFile],
    tasks: Sequence[_Task],
    dataset: pa.Schema,
    tally: _Tally,
) -> None:
    def count(task: _Task) -> list[_Counted | DataError]:
        return _count_row_groups(probe, files[task.number], schemas[files[task.number].schema], dataset, task)

    for task, counts in zip(tasks, attempts(probe, count, tasks, "counting rows"), strict=True):
        name, passing = files[task.number].name, tally.passing[task.number]
        if isinstance(counts, Exception):
            tally.counted[task.number] += len(task.row_groups)
            tally.skipped.append((name, str(counts)))
            tally.num_units_skipped += len(task.row_groups)
            continue
        places = {index: place for place, index in enumerate(unpack(files[task.number].index).tolist())}
        for row_group, found in zip(task.row_groups, counts, strict=True):
            if isinstance(found, Exception):
                tally.counted[task.number] += 1
                tally.skipped.append((name, str(found)))
                tally.num_units_skipped += 1
                continue
            place = places[row_group.index]
            passing[place] = found.num_passing
            tally.counted[task.number] += found.is_decoded
            if found.parts:
                tally.parts[task.number] += [(place, first, num_rows) for first, num_rows in found.parts]
                tally.savings[task.number] += found.saving


def _resolve(
    probe: Probe, schemas: Sequence[pa.Schema], files: Sequence[SurveyedFile], dataset: pa.Schema
) -> list[Resolved]:
    """Return what remains of the filter for each file, given its partition values and missing columns."""
    assert probe.condition is not None
    tree = probe.condition.tree
    partitions = {field.name for field in probe.partition_fields}
    groups: dict[tuple[int, Partition], tuple[int, int]] = {}
    rows: dict[int, list[dict[str, object]]] = {}
    for file in files:
        if (file.schema, file.partition) not in groups:
            known = rows.setdefault(file.schema, [])
            groups[file.schema, file.partition] = (file.schema, len(known))
            known.append(partition_values(file.data_file(), probe.partition_fields) if partitions else {})
    resolved: dict[int, list[Resolved]] = {}
    for number, known in rows.items():
        there = set(_read_schema(probe, schemas[number], dataset).names) - partitions
        fields = [field for field in dataset if field.name not in there]
        if fields:
            resolved[number] = expression.resolve(tree, known_values(fields, known))
        else:
            left = expression.Resolved(Presence.SOME, tree, probe.condition.columns)
            resolved[number] = [left] * len(known)
    places = (groups[file.schema, file.partition] for file in files)
    return [resolved[number][place] for number, place in places]


def _presence(
    probe: Probe, file: SurveyedFile, schema: pa.Schema, dataset: pa.Schema, left: Resolved
) -> list[Presence]:
    facts = file.facts(schema)
    if not _can_be_asked(probe, schema, dataset, left):
        return [Presence.SOME] * len(facts.units)
    assert left.node is not None
    return probe.format.presence(probe.source, file.data_file(), facts, left.node, _compared(dataset, left.columns))


def _compared(dataset: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    return pa.schema([dataset.field(name) for name in columns])


def _can_be_asked(probe: Probe, schema: pa.Schema, dataset: pa.Schema, left: Resolved) -> bool:
    """Return whether a file's statistics can decide the remaining filter: they describe the file's own values."""
    partitions = {field.name for field in probe.partition_fields}
    return all(
        name in schema.names
        and name not in partitions
        and keeps_values(schema.field(name).type, dataset.field(name).type)
        for name in left.columns
    )


def _read_schema(probe: Probe, schema: pa.Schema, dataset: pa.Schema) -> pa.Schema:
    """Return the schema to read a file of this schema with."""
    if probe.format.is_typed:
        return schema
    partitions = [field.name for field in probe.partition_fields]
    return retyped(schema, dataset, is_keyed=is_keyed(probe.format), partitions=partitions)


def _count_row_groups(
    probe: Probe, file: SurveyedFile, schema: pa.Schema, dataset: pa.Schema, task: _Task
) -> list[_Counted | DataError]:
    data_file = file.data_file()
    constants = partition_values(data_file, probe.partition_fields) if probe.partition_fields else {}
    read_schema = _read_schema(probe, schema, dataset)
    projection = PlainProjection(read_schema, dataset, constants, file.name)
    reader = probe.format.open(probe.source, data_file, read_schema, file.version)
    counts: list[_Counted | DataError] = []
    try:
        judged: Mapping[int, Judged] = {}
        if (
            isinstance(reader, PagedReader)
            and task.left.node is not None
            and _can_be_asked(probe, schema, dataset, task.left)
        ):
            judged = reader.judge(task.row_groups, task.left.node, _compared(dataset, task.left.columns))
        for row_group in task.row_groups:
            try:
                counts.append(_count_row_group(probe, reader, projection, row_group, judged.get(row_group.index)))
            except UNREADABLE as error:
                if probe.on_error == "raise":
                    raise
                counts.append(error)
    finally:
        reader.close()
    return counts


def _count_row_group(
    probe: Probe, reader: Reader, projection: PlainProjection, row_group: Unit, judged: Judged | None
) -> _Counted:
    assert probe.condition is not None
    names = probe.condition.columns
    columns = projection.file_columns(names)

    def num_passing(table: pa.Table) -> int:
        assert probe.condition is not None
        place = f"{projection.name}, {probe.format.unit_name} {row_group.index}"
        return filters.count(probe.condition, projection.apply(table, row_group, names), place)

    if judged is None or not isinstance(reader, PagedReader):
        return _Counted(num_passing(reader.read(row_group, columns)), is_decoded=True)
    found = sum(num_rows for _, num_rows in judged.passing)
    if judged.open:
        found += num_passing(reader.read_rows(row_group, columns, judged.open))
    if not found:
        return _Counted(0, bool(judged.open))
    read = projection.file_columns(projection.file_schema.names if probe.read_columns is None else probe.read_columns)
    parts = join_rows([*judged.passing, *judged.open], MAX_PARTS)
    saving = reader.saving(row_group, read, parts)
    if saving.bytes_skipped < MIN_SAVED * max(1, saving.num_bytes):
        return _Counted(found, bool(judged.open))
    return _Counted(found, bool(judged.open), parts, saving)
