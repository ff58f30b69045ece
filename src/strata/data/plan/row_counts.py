"""How many rows of each unit pass the filter.

What is decided by the values of a file's partition, and by columns that it lacks, needs no reading; of some units
statistics say that all rows pass, or none; of the others the filter's columns are decoded and counted. Where statistics
tell pages of a unit apart, only those are decoded of which they do not say all or none; and what they rule out need not
be read later.
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
from strata.data.plan.projection import PlainFit
from strata.data.plan.schema import keeps_values, retyped, unify
from strata.data.plan.survey import SurveyedFile, named_schemas, pack, unpack
from strata.data.source.partitions import partition_values

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from strata.data.filter.expression import Resolved
    from strata.data.filter.filter import Condition
    from strata.data.formats.base import Judged, Reader, Rows, Unit
    from strata.data.plan.probe import Looking
    from strata.data.plan.survey import Partition
    from strata.errors import DataError

_COUNT_AT_ONCE = 8
"""Units of one file that one thread counts before it takes others."""
MIN_SAVED = 0.25
"""Of a unit's bytes: less is not worth reading it in part."""
MAX_PARTS = 64
"""Of a unit; where there would be more, some rows between them are read as well."""


def bound_condition(
    looking: Looking, schemas: Sequence[pa.Schema], files: Sequence[SurveyedFile]
) -> tuple[Condition, pa.Schema]:
    """The filter, and its columns as all files agree on them. What is delivered is checked too, before the work of
    counting.

    Raises:
        SchemaMismatch: The filter does not fit the files, or files disagree on what is used of them.
    """
    assert looking.condition is not None
    partitions = [field.name for field in looking.partition_fields]
    decided = looking.schema.names if looking.schema is not None and is_keyed(looking.format) else []
    names = dict.fromkeys([*(name for schema in schemas for name in schema.names), *decided, *partitions])
    filters.check_names(looking.condition, list(names))
    unified = unify(
        named_schemas(schemas, files),
        columns=looking.columns,
        condition_columns=looking.condition.columns,
        partition_fields=looking.partition_fields,
        is_typed=looking.format.is_typed,
        is_keyed=is_keyed(looking.format),
        schema=looking.schema,
    )
    used = pa.schema([unified.schema.field(name) for name in looking.condition.columns])
    return filters.bind(looking.condition, used), used


@dataclass(frozen=True, slots=True)
class _Task:
    """Units of one file whose rows have to be counted."""

    number: int
    """Of the file."""
    left: Resolved
    """Of the filter, where the file's partition is known."""
    units: list[Unit]


@dataclass(frozen=True, slots=True)
class _Counted:
    """One unit."""

    num_passing: int
    is_decoded: bool
    parts: tuple[Rows, ...] = ()
    """Which rows to read; nothing: all."""
    saving: Saving = field(default_factory=Saving)


@dataclass(slots=True)
class _Tally:
    """What is known so far of the rows that pass, of files that were not counted before."""

    passing: dict[int, list[int]]
    """By the file's number, then by unit."""
    counted: dict[int, int]
    parts: dict[int, list[tuple[int, int, int]]]
    """By the file's number, as `SurveyedFile.parts` but in any order."""
    savings: dict[int, Saving]
    skipped: list[tuple[str, str]]
    num_units_skipped: int = 0


def count_passing(
    looking: Looking, schemas: Sequence[pa.Schema], files: list[SurveyedFile], dataset: pa.Schema
) -> tuple[list[SurveyedFile], list[tuple[str, str]], int]:
    """The files with how many rows of each unit pass, where that was not known; what was skipped, how many units."""
    new = [number for number, file in enumerate(files) if file.passing is None]
    tally = _Tally({}, dict.fromkeys(new, 0), {number: [] for number in new}, dict.fromkeys(new, Saving()), [])
    unsettled: list[tuple[int, Resolved]] = []
    for number, left in zip(new, _resolve(looking, schemas, [files[number] for number in new], dataset), strict=True):
        rows = unpack(files[number].rows).tolist()
        tally.passing[number] = rows if left.presence is Presence.ALL else [0] * len(rows)
        if left.presence is Presence.SOME and rows:
            unsettled.append((number, left))
    tasks = _ask_statistics(looking, schemas, files, unsettled, dataset, tally)
    _count_rows(looking, schemas, files, tasks, dataset, tally)
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
    looking: Looking,
    schemas: Sequence[pa.Schema],
    files: Sequence[SurveyedFile],
    unsettled: Sequence[tuple[int, Resolved]],
    dataset: pa.Schema,
    tally: _Tally,
) -> list[_Task]:
    """What statistics leave to be counted."""

    def ask(each: tuple[int, Resolved]) -> list[Presence]:
        number, left = each
        return _presence(looking, files[number], schemas[files[number].schema], dataset, left)

    tasks = []
    answers = attempts(looking, ask, unsettled, "asking statistics")
    for (number, left), answer in zip(unsettled, answers, strict=True):
        if isinstance(answer, Exception):
            tally.skipped.append((files[number].name, str(answer)))
            tally.num_units_skipped += len(tally.passing[number])
            continue
        units = files[number].facts(schemas[files[number].schema]).units
        told = list(zip(units, answer, strict=True))
        tally.passing[number] = [unit.num_rows if presence is Presence.ALL else 0 for unit, presence in told]
        some = [unit for unit, presence in told if presence is Presence.SOME]
        tasks += [_Task(number, left, some[at : at + _COUNT_AT_ONCE]) for at in range(0, len(some), _COUNT_AT_ONCE)]
    return tasks


def _count_rows(
    looking: Looking,
    schemas: Sequence[pa.Schema],
    files: Sequence[SurveyedFile],
    tasks: Sequence[_Task],
    dataset: pa.Schema,
    tally: _Tally,
) -> None:
    def count(task: _Task) -> list[_Counted | DataError]:
        return _count_units(looking, files[task.number], schemas[files[task.number].schema], dataset, task)

    for task, counts in zip(tasks, attempts(looking, count, tasks, "counting rows"), strict=True):
        name, passing = files[task.number].name, tally.passing[task.number]
        if isinstance(counts, Exception):
            tally.counted[task.number] += len(task.units)
            tally.skipped.append((name, str(counts)))
            tally.num_units_skipped += len(task.units)
            continue
        places = {index: place for place, index in enumerate(unpack(files[task.number].index).tolist())}
        for unit, found in zip(task.units, counts, strict=True):
            if isinstance(found, Exception):
                tally.counted[task.number] += 1
                tally.skipped.append((name, str(found)))
                tally.num_units_skipped += 1
                continue
            place = places[unit.index]
            passing[place] = found.num_passing
            tally.counted[task.number] += found.is_decoded
            if found.parts:
                tally.parts[task.number] += [(place, first, num_rows) for first, num_rows in found.parts]
                tally.savings[task.number] += found.saving


def _resolve(
    looking: Looking, schemas: Sequence[pa.Schema], files: Sequence[SurveyedFile], dataset: pa.Schema
) -> list[Resolved]:
    """What is left of the filter for each file, whose partition is known and which may lack columns."""
    assert looking.condition is not None
    tree = looking.condition.tree
    partitions = {field.name for field in looking.partition_fields}
    groups: dict[tuple[int, Partition], tuple[int, int]] = {}
    rows: dict[int, list[dict[str, object]]] = {}
    for file in files:
        if (file.schema, file.partition) not in groups:
            known = rows.setdefault(file.schema, [])
            groups[file.schema, file.partition] = (file.schema, len(known))
            known.append(partition_values(file.data_file(), looking.partition_fields) if partitions else {})
    resolved: dict[int, list[Resolved]] = {}
    for number, known in rows.items():
        there = set(_read_schema(looking, schemas[number], dataset).names) - partitions
        fields = [field for field in dataset if field.name not in there]
        if fields:
            resolved[number] = expression.resolve(tree, known_values(fields, known))
        else:
            left = expression.Resolved(Presence.SOME, tree, looking.condition.columns)
            resolved[number] = [left] * len(known)
    places = (groups[file.schema, file.partition] for file in files)
    return [resolved[number][place] for number, place in places]


def _presence(
    looking: Looking, file: SurveyedFile, schema: pa.Schema, dataset: pa.Schema, left: Resolved
) -> list[Presence]:
    facts = file.facts(schema)
    if not _can_be_asked(looking, schema, dataset, left):
        return [Presence.SOME] * len(facts.units)
    assert left.node is not None
    return looking.format.presence(looking.source, file.data_file(), facts, left.node, _compared(dataset, left.columns))


def _compared(dataset: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    return pa.schema([dataset.field(name) for name in columns])


def _can_be_asked(looking: Looking, schema: pa.Schema, dataset: pa.Schema, left: Resolved) -> bool:
    """Whether a file's statistics know what is left of the filter: they are of the file's own values."""
    partitions = {field.name for field in looking.partition_fields}
    return all(
        name in schema.names
        and name not in partitions
        and keeps_values(schema.field(name).type, dataset.field(name).type)
        for name in left.columns
    )


def _read_schema(looking: Looking, schema: pa.Schema, dataset: pa.Schema) -> pa.Schema:
    """What to read of a file whose schema this is."""
    if looking.format.is_typed:
        return schema
    partitions = [field.name for field in looking.partition_fields]
    return retyped(schema, dataset, is_keyed=is_keyed(looking.format), partitions=partitions)


def _count_units(
    looking: Looking, file: SurveyedFile, schema: pa.Schema, dataset: pa.Schema, task: _Task
) -> list[_Counted | DataError]:
    data_file = file.data_file()
    constants = partition_values(data_file, looking.partition_fields) if looking.partition_fields else {}
    read_schema = _read_schema(looking, schema, dataset)
    fit = PlainFit(read_schema, dataset, constants, file.name)
    reader = looking.format.open(looking.source, data_file, read_schema, file.version)
    counts: list[_Counted | DataError] = []
    try:
        judged: Mapping[int, Judged] = {}
        if (
            isinstance(reader, PagedReader)
            and task.left.node is not None
            and _can_be_asked(looking, schema, dataset, task.left)
        ):
            judged = reader.judge(task.units, task.left.node, _compared(dataset, task.left.columns))
        for unit in task.units:
            try:
                counts.append(_count_unit(looking, reader, fit, unit, judged.get(unit.index)))
            except UNREADABLE as error:
                if looking.on_error == "raise":
                    raise
                counts.append(error)
    finally:
        reader.close()
    return counts


def _count_unit(looking: Looking, reader: Reader, fit: PlainFit, unit: Unit, judged: Judged | None) -> _Counted:
    assert looking.condition is not None
    names = looking.condition.columns
    columns = fit.file_columns(names)

    def num_passing(table: pa.Table) -> int:
        assert looking.condition is not None
        place = f"{fit.name}, {looking.format.unit_name} {unit.index}"
        return filters.count(looking.condition, fit.apply(table, unit, names), place)

    if judged is None or not isinstance(reader, PagedReader):
        return _Counted(num_passing(reader.read(unit, columns)), is_decoded=True)
    found = sum(num_rows for _, num_rows in judged.passing)
    if judged.open:
        found += num_passing(reader.read_rows(unit, columns, judged.open))
    if not found:
        return _Counted(0, bool(judged.open))
    read = fit.file_columns(fit.file_schema.names if looking.read_columns is None else looking.read_columns)
    parts = join_rows([*judged.passing, *judged.open], MAX_PARTS)
    saving = reader.saving(unit, read, parts)
    if saving.bytes_skipped < MIN_SAVED * max(1, saving.num_bytes):
        return _Counted(found, bool(judged.open))
    return _Counted(found, bool(judged.open), parts, saving)
