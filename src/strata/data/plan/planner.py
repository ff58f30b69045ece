"""From what looking found to what will be read: no I/O, the same result on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash

from strata.config import parse_bytes
from strata.data.filter.filter import bind
from strata.data.plan.plan import Plan, PlannedFile, Pruning
from strata.data.plan.schema import PlainFit, retyped, unify
from strata.data.plan.survey import named_schemas, schema_of, unpack, unpack_parts
from strata.data.source.partitions import partition_values
from strata.errors import InvalidArgument, NoData

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    import pyarrow as pa

    from strata.data.config import OnEmpty
    from strata.data.filter.filter import Condition
    from strata.data.plan.schema import SchemaMode, Unified
    from strata.data.plan.survey import Survey, SurveyedFile


_FINGERPRINT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """All units of all files, one entry each, in the order of files and of units in them."""

    file: npt.NDArray[np.int64]
    index: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    """To be delivered."""
    total_rows: npt.NDArray[np.int64]
    first_row: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    num_bytes: npt.NDArray[np.int64]
    parts: npt.NDArray[np.int64] | None = None
    """As `Plan.parts`, with the place of a unit among these."""


def build(
    survey: Survey,
    *,
    columns: Sequence[str] | None = None,
    condition: Condition | None = None,
    split_bytes: int | str = "128MiB",
    split_rows: int | None = None,
    schema_mode: SchemaMode = "unify",
    schema: pa.Schema | None = None,
    on_empty: OnEmpty = "raise",
) -> Plan:
    """The plan for what was found; `columns`, `condition` and `schema` as they were when it was looked for.

    `on_empty="empty"`: where files were read and no row is left, a plan without rows.

    Raises:
        NoData: There are no rows, or none that pass.
        SchemaMismatch: Files disagree on a column, or nobody has it.
    """
    if (condition.text if condition else "") != survey.condition_text:
        raise InvalidArgument(
            f"the survey was made for the filter {survey.condition_text or 'none'!r}, not for "
            f"{condition.text if condition else 'none'!r}; survey the dataset again",
            field="filters",
        )
    files = sorted(survey.files, key=lambda file: (file.name, file.version, file.path))
    units = _units(files)
    if not (units.rows > 0).any() and (on_empty == "raise" or not files):
        raise _no_data(survey, num_rows=int(units.total_rows.sum()))
    schemas = [schema_of(data) for data in survey.schemas]
    partition_fields = list(schema_of(survey.partition_schema))
    unified = unify(
        named_schemas(schemas, files),
        columns=columns,
        condition_columns=condition.columns if condition else (),
        partition_fields=partition_fields,
        mode=schema_mode,
        is_typed=survey.is_typed,
        is_keyed=survey.is_keyed,
        schema=schema,
    )
    bytes_pruned = sum(file.bytes_skipped for file in files)
    return assemble(
        files=_planned(survey, files, schemas, unified.schema, partition_fields),
        units=units,
        schema=unified.schema,
        columns=unified.columns,
        condition=bind(condition, unified.schema) if condition else None,
        null_counts=_null_counts(files, schemas, unified, partition_fields, is_keyed=survey.is_keyed),
        split_bytes=parse_bytes(split_bytes),
        split_rows=parse_rows(split_rows),
        pruning=Pruning(
            num_files=survey.num_files,
            num_files_pruned=survey.num_files_pruned,
            num_units=len(units.rows),
            num_units_pruned=int((units.rows == 0).sum()),
            num_units_counted=sum(file.num_counted for file in files),
            num_units_in_part=0 if units.parts is None else len(np.unique(units.parts[:, 0])),
            num_pages=sum(file.num_pages for file in files),
            num_pages_pruned=sum(file.num_pages_skipped for file in files),
            bytes_pages_pruned=bytes_pruned,
            num_rows=int(units.total_rows.sum()),
            bytes_total=sum(file.size_bytes for file in files),
            bytes_planned=int(units.num_bytes[units.rows > 0].sum()) - bytes_pruned,
            skipped=survey.skipped,
            num_files_skipped=survey.num_files_skipped,
            num_units_skipped=survey.num_units_skipped,
        ),
    )


def assemble(
    *,
    files: Sequence[PlannedFile],
    units: Units,
    schema: pa.Schema,
    columns: Sequence[str],
    condition: Condition | None,
    null_counts: Mapping[str, int],
    split_bytes: int,
    split_rows: int | None,
    pruning: Pruning,
) -> Plan:
    """Leaves out units without rows and files without units, packs splits, and takes the fingerprint."""
    kept = units.rows > 0
    used, unit_file = np.unique(units.file[kept], return_inverse=True)
    planned = tuple(files[number] for number in used.tolist())
    unit_file = unit_file.astype(np.int64).reshape(-1)
    rows, num_bytes, index = units.rows[kept], units.num_bytes[kept], units.index[kept]
    split_starts = pack_splits(unit_file, rows, num_bytes, split_bytes=split_bytes, split_rows=split_rows)
    return Plan(
        files=planned,
        unit_file=unit_file,
        unit_index=index,
        unit_rows=rows,
        unit_total_rows=units.total_rows[kept],
        unit_first_row=units.first_row[kept],
        unit_offset=units.offset[kept],
        unit_bytes=num_bytes,
        split_starts=split_starts,
        schema=schema,
        columns=tuple(columns),
        condition=condition.expression if condition else None,
        condition_columns=condition.columns if condition else (),
        condition_text=condition.text if condition else "",
        null_counts=dict(null_counts),
        fingerprint=fingerprint(
            [(file.file.name, file.version) for file in planned],
            [unit_file, index, rows, split_starts],
            condition.text if condition else "",
        ),
        pruning=pruning,
        parts=_renumbered(units.parts, kept),
    )


def _renumbered(parts: npt.NDArray[np.int64] | None, kept: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64] | None:
    """With the numbers that units have when some are left out."""
    if parts is None:
        return None
    parts = parts[kept[parts[:, 0]]]
    return np.column_stack([(np.cumsum(kept) - 1)[parts[:, 0]], parts[:, 1:]])


def fingerprint(files: Sequence[tuple[str, str]], numbers: Sequence[npt.NDArray[np.int64]], condition_text: str) -> str:
    """Of all that decides which row is the n-th. Where files are and when they were written does not."""
    packed = [array.astype("<i8", copy=False).tobytes() for array in numbers]
    told = msgspec.msgpack.encode([_FINGERPRINT_VERSION, files, packed, condition_text])
    return str(xxhash.xxh3_128_hexdigest(told))


def _units(files: Sequence[SurveyedFile]) -> Units:
    rows = unpack(b"".join(file.rows for file in files))
    return Units(
        file=np.repeat(np.arange(len(files), dtype=np.int64), [len(file.rows) // 8 for file in files]),
        index=unpack(b"".join(file.index for file in files)),
        rows=unpack(b"".join(file.rows if file.passing is None else file.passing for file in files)),
        total_rows=rows,
        first_row=unpack(b"".join(file.first_row for file in files)),
        offset=unpack(b"".join(file.offset for file in files)),
        num_bytes=unpack(b"".join(file.num_bytes for file in files)),
        parts=_parts(files),
    )


def _parts(files: Sequence[SurveyedFile]) -> npt.NDArray[np.int64] | None:
    parts = [unpack_parts(file.parts) for file in files]
    if not sum(map(len, parts)):
        return None
    before = np.cumsum([0, *(len(file.rows) // 8 for file in files)])[:-1]
    found = np.concatenate(parts)
    found[:, 0] += np.repeat(before, [len(each) for each in parts])
    return found


def _planned(
    survey: Survey,
    files: Sequence[SurveyedFile],
    schemas: Sequence[pa.Schema],
    dataset: pa.Schema,
    partition_fields: list[pa.Field],
) -> list[PlannedFile]:
    """Where the format does not state types, a file is read with the dataset's."""
    partitions = {field.name for field in partition_fields}
    read_as = schemas
    if not survey.is_typed:
        read_as = [retyped(schema, dataset, is_keyed=survey.is_keyed, partitions=partitions) for schema in schemas]
    used = [field for field in partition_fields if field.name in dataset.names]
    constants: dict[object, Mapping[str, object]] = {}
    planned = []
    for file in files:
        data_file = file.data_file()
        if file.partition not in constants:
            constants[file.partition] = partition_values(data_file, used) if used else {}
        schema = read_as[file.schema]
        fit = PlainFit(schema, dataset, constants[file.partition], file.name)
        planned.append(PlannedFile(data_file, survey.format, file.version, schema, fit))
    return planned


def _null_counts(
    files: Sequence[SurveyedFile],
    schemas: Sequence[pa.Schema],
    unified: Unified,
    partition_fields: Sequence[pa.Field],
    *,
    is_keyed: bool,
) -> dict[str, int]:
    """Of files with rows that were asked: at least so many; before the filter."""
    by_schema: dict[int, list[SurveyedFile]] = {}
    for file in files:
        if file.rows:
            by_schema.setdefault(file.schema, []).append(file)
    totals = dict.fromkeys(unified.columns, 0)
    for number, group in by_schema.items():
        names = schemas[number].names
        counts = unpack(b"".join(file.null_counts for file in group)).reshape(len(group), len(names))
        sums = dict(zip(names, counts.clip(min=0).sum(axis=0).tolist(), strict=True))
        num_rows = int(unpack(b"".join(file.rows for file in group)).sum())
        for column in unified.columns:
            # A file that did not show a column has at least one row without it.
            totals[column] += sums.get(column, len(group) if is_keyed else num_rows)
    partitions = {field.name for field in partition_fields}
    return {column: total for column, total in totals.items() if total and column not in partitions}


def _no_data(survey: Survey, *, num_rows: int) -> NoData:
    skipped = ""
    if survey.skipped:
        name, reason = survey.skipped[0]
        skipped = f" {len(survey.skipped)} could not be read and were skipped, the first: {name}: {reason}."
    if survey.condition_text and (num_rows or survey.num_files_pruned):
        before = f"{num_rows} rows in {len(survey.files)} files" if survey.files else f"{survey.num_files} files"
        return NoData(
            f"no row passes the filter {survey.condition_text}: there were {before} before it "
            f"({survey.num_files_pruned} files were left out by their partition).{skipped} Widen the "
            "filter, or take an empty loader with on_empty='empty'"
        )
    if not survey.num_files:
        return NoData("there are no files; check the path")
    return NoData(
        f"there are no rows: {len(survey.files)} files were read and all are empty.{skipped} "
        "Check the path and the files"
    )


def pack_splits(
    unit_file: npt.NDArray[np.int64],
    unit_rows: npt.NDArray[np.int64],
    unit_bytes: npt.NDArray[np.int64],
    *,
    split_bytes: int,
    split_rows: int | None = None,
) -> npt.NDArray[np.int64]:
    """Where splits begin, and at the end how many units there are.

    A split takes consecutive units of one file as long as they stay within the bounds; a unit that is larger than a
    bound is a split of its own. How far a split that begins at a unit reaches is found for all units at once; what is
    left to do one by one is to jump from split to split.
    """
    num_units = len(unit_file)
    ends = np.searchsorted(unit_file, unit_file, side="right")
    ends = np.minimum(ends, _reach(unit_bytes, split_bytes))
    if split_rows is not None:
        ends = np.minimum(ends, _reach(unit_rows, split_rows))
    jumps = np.maximum(ends, np.arange(1, num_units + 1)).tolist()
    starts = [0]
    while starts[-1] < num_units:
        starts.append(jumps[starts[-1]])
    return np.array(starts, np.int64)


def _reach(sizes: npt.NDArray[np.int64], limit: int) -> npt.NDArray[np.int64]:
    """For each unit, up to which one (not included) the sizes from here on stay within the limit."""
    # What is above the limit is so by however much; this keeps sums far from overflow.
    sums = np.concatenate([[0], np.cumsum(np.minimum(sizes, limit + 1))])
    return np.searchsorted(sums, sums[:-1] + limit, side="right") - 1


def parse_rows(rows: object, *, field: str = "split_rows") -> int | None:
    """
    Raises:
        InvalidArgument: It is not a number of rows.
    """
    if rows is None:
        return None
    if isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= 2**62:
        raise InvalidArgument(f"{field} is {rows!r}; give a number of rows from 1, or leave it out", field=field)
    return rows
