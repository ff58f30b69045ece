"""The planner: turns a survey into a plan. It does no I/O, and the result is the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash

from strata.config import parse_bytes
from strata.data.filter.filter import bind
from strata.data.plan.plan import Plan, PlannedFile, Pruning
from strata.data.plan.schema import PlainProjection, retyped, unify
from strata.data.plan.survey import named_schemas, schema_of, unpack, unpack_parts
from strata.data.source.partitions import partition_values
from strata.errors import InvalidArgument, NoData

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    import pyarrow as pa

    from strata.data.config import OnEmpty, SchemaMode
    from strata.data.filter.filter import Condition
    from strata.data.plan.schema import Unified
    from strata.data.plan.survey import Survey, SurveyedFile


_FINGERPRINT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowGroups:
    """The row groups of all files: one entry each, in the order of files and of row groups within them."""

    file: npt.NDArray[np.int64]
    index: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    """Rows to deliver."""
    total_rows: npt.NDArray[np.int64]
    first_row: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    num_bytes: npt.NDArray[np.int64]
    parts: npt.NDArray[np.int64] | None = None
    """As `Plan.parts`, with the index of a row group in these arrays."""


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
    """Make the plan of a survey; `columns`, `condition` and `schema` must be those of the survey.

    `on_empty="empty"` returns a plan without rows if files exist but no row passes.

    Raises:
        NoData: There are no rows, or none that pass.
        SchemaMismatch: Files disagree on a column, or no file has it.
    """
    if (condition.text if condition else "") != survey.condition_text:
        raise InvalidArgument(
            f"the survey is for the filter {survey.condition_text or 'none'!r}, not for "
            f"{condition.text if condition else 'none'!r}; survey the dataset again",
            field="filters",
        )
    files = sorted(survey.files, key=lambda file: (file.name, file.version, file.path))
    row_groups = _row_groups(files)
    if not (row_groups.rows > 0).any() and (on_empty == "raise" or not files):
        raise _no_data(survey, num_rows=int(row_groups.total_rows.sum()))
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
        row_groups=row_groups,
        schema=unified.schema,
        columns=unified.columns,
        condition=bind(condition, unified.schema) if condition else None,
        null_counts=_null_counts(files, schemas, unified, partition_fields, is_keyed=survey.is_keyed),
        split_bytes=parse_bytes(split_bytes),
        split_rows=parse_rows(split_rows),
        pruning=Pruning(
            num_files=survey.num_files,
            num_files_pruned=survey.num_files_pruned,
            num_units=len(row_groups.rows),
            num_units_pruned=int((row_groups.rows == 0).sum()),
            num_units_counted=sum(file.num_counted for file in files),
            num_units_in_part=0 if row_groups.parts is None else len(np.unique(row_groups.parts[:, 0])),
            num_pages=sum(file.num_pages for file in files),
            num_pages_pruned=sum(file.num_pages_skipped for file in files),
            bytes_pages_pruned=bytes_pruned,
            num_rows=int(row_groups.total_rows.sum()),
            bytes_total=sum(file.size_bytes for file in files),
            bytes_planned=int(row_groups.num_bytes[row_groups.rows > 0].sum()) - bytes_pruned,
            skipped=survey.skipped,
            num_files_skipped=survey.num_files_skipped,
            num_units_skipped=survey.num_units_skipped,
            num_rows_incomplete=sum(file.num_incomplete for file in files),
        ),
    )


def assemble(
    *,
    files: Sequence[PlannedFile],
    row_groups: RowGroups,
    schema: pa.Schema,
    columns: Sequence[str],
    condition: Condition | None,
    null_counts: Mapping[str, int],
    split_bytes: int,
    split_rows: int | None,
    pruning: Pruning,
) -> Plan:
    """Drop row groups without rows and files without row groups, pack splits, and compute the fingerprint."""
    kept = row_groups.rows > 0
    used, row_group_file = np.unique(row_groups.file[kept], return_inverse=True)
    planned = tuple(files[number] for number in used.tolist())
    row_group_file = row_group_file.astype(np.int64).reshape(-1)
    rows, num_bytes, index = row_groups.rows[kept], row_groups.num_bytes[kept], row_groups.index[kept]
    split_starts = pack_splits(row_group_file, rows, num_bytes, split_bytes=split_bytes, split_rows=split_rows)
    return Plan(
        files=planned,
        unit_file=row_group_file,
        unit_index=index,
        unit_rows=rows,
        unit_total_rows=row_groups.total_rows[kept],
        unit_first_row=row_groups.first_row[kept],
        unit_offset=row_groups.offset[kept],
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
            [row_group_file, index, rows, split_starts],
            condition.text if condition else "",
        ),
        pruning=pruning,
        parts=_renumbered(row_groups.parts, kept),
    )


def _renumbered(parts: npt.NDArray[np.int64] | None, kept: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64] | None:
    """Return the parts with the indices that row groups have after some are dropped."""
    if parts is None:
        return None
    parts = parts[kept[parts[:, 0]]]
    return np.column_stack([(np.cumsum(kept) - 1)[parts[:, 0]], parts[:, 1:]])


def fingerprint(files: Sequence[tuple[str, str]], numbers: Sequence[npt.NDArray[np.int64]], condition_text: str) -> str:
    """Hash all that decides the row order. The location and modification time of files do not."""
    packed = [array.astype("<i8", copy=False).tobytes() for array in numbers]
    encoded = msgspec.msgpack.encode([_FINGERPRINT_VERSION, files, packed, condition_text])
    return str(xxhash.xxh3_128_hexdigest(encoded))


def _row_groups(files: Sequence[SurveyedFile]) -> RowGroups:
    rows = unpack(b"".join(file.rows for file in files))
    return RowGroups(
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
    """Return the files of the plan. If the format has no types, files are read with those of the dataset."""
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
        projection = PlainProjection(schema, dataset, constants[file.partition], file.name)
        planned.append(PlannedFile(data_file, survey.format, file.version, schema, projection))
    return planned


def _null_counts(
    files: Sequence[SurveyedFile],
    schemas: Sequence[pa.Schema],
    unified: Unified,
    partition_fields: Sequence[pa.Field],
    *,
    is_keyed: bool,
) -> dict[str, int]:
    """Return a lower bound for the nulls of each delivered column, before the filter."""
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
            # A file whose sampled rows lack a column has at least one row without it.
            totals[column] += sums.get(column, len(group) if is_keyed else num_rows)
    partitions = {field.name for field in partition_fields}
    return {column: total for column, total in totals.items() if total and column not in partitions}


def _no_data(survey: Survey, *, num_rows: int) -> NoData:
    skipped = ""
    if survey.skipped:
        name, reason = survey.skipped[0]
        skipped = f" {len(survey.skipped)} were unreadable and skipped, the first: {name}: {reason}."
    if survey.condition_text and (num_rows or survey.num_files_pruned):
        before = f"{num_rows} rows in {len(survey.files)} files" if survey.files else f"{survey.num_files} files"
        return NoData(
            f"no row passes the filter {survey.condition_text}: there were {before} before it "
            f"({survey.num_files_pruned} files were pruned by their partition).{skipped} Widen the "
            "filter, or accept an empty loader with on_empty='empty'"
        )
    if not survey.num_files:
        return NoData("there are no files; check the path")
    return NoData(
        f"there are no rows: {len(survey.files)} files were read and all are empty.{skipped} "
        "Check the path and the files"
    )


def pack_splits(
    row_group_file: npt.NDArray[np.int64],
    row_group_rows: npt.NDArray[np.int64],
    row_group_bytes: npt.NDArray[np.int64],
    *,
    split_bytes: int,
    split_rows: int | None = None,
) -> npt.NDArray[np.int64]:
    """Return the first row group of each split, followed by the number of row groups.

    A split takes consecutive row groups of one file while they stay within the limits; a row group above a limit is
    a split of its own. How far a split would reach from each row group is computed for all of them at once, so only
    the jumps from split to split are a loop.
    """
    num_row_groups = len(row_group_file)
    ends = np.searchsorted(row_group_file, row_group_file, side="right")
    ends = np.minimum(ends, _reach(row_group_bytes, split_bytes))
    if split_rows is not None:
        ends = np.minimum(ends, _reach(row_group_rows, split_rows))
    jumps = np.maximum(ends, np.arange(1, num_row_groups + 1)).tolist()
    starts = [0]
    while starts[-1] < num_row_groups:
        starts.append(jumps[starts[-1]])
    return np.array(starts, np.int64)


def _reach(sizes: npt.NDArray[np.int64], limit: int) -> npt.NDArray[np.int64]:
    """Return, for each row group, the end (exclusive) of the run from it whose sizes stay within the limit."""
    # Sizes above the limit are clipped, which changes nothing and keeps sums far from overflow.
    sums = np.concatenate([[0], np.cumsum(np.minimum(sizes, limit + 1))])
    return np.searchsorted(sums, sums[:-1] + limit, side="right") - 1


def parse_rows(rows: object, *, field: str = "split_rows") -> int | None:
    """Check a number of rows.

    Raises:
        InvalidArgument: It is not a whole number of at least 1.
    """
    if rows is None:
        return None
    if isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= 2**62:
        raise InvalidArgument(f"{field}={rows!r} must be a whole number of at least 1; or leave it out", field=field)
    return rows
