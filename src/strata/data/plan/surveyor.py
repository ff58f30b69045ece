"""The surveyor: reads the metadata of a dataset's files, once, as little as possible and in several threads.

Files whose partition values cannot pass the filter are not opened. The footers of the others list their row groups.
With a filter, statistics decide which row groups pass as a whole or not at all, and the rest are counted by decoding
only the filter's columns (`row_counts.py`). Results are cached for the next run.
"""

from __future__ import annotations

import dataclasses
import math
import os
import posixpath
import threading
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from strata.data.filter import expression, literals
from strata.data.filter.expression import Presence
from strata.data.formats.base import Together, is_keyed
from strata.data.plan import cache as survey_cache
from strata.data.plan.probe import Probe, Progress, attempts_together, known_values, log_skipped
from strata.data.plan.row_counts import bound_condition, count_passing
from strata.data.plan.survey import Survey, SurveyedFile, facts_of, schema_bytes, schema_of
from strata.data.source.partitions import partition_values
from strata.errors import DataError, StorageError
from strata.lifecycle import renewed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.data.config import OnError
    from strata.data.filter.filter import Condition
    from strata.data.formats.base import FileFacts, Format
    from strata.data.plan.cache import SurveyCache
    from strata.data.plan.survey import Partition
    from strata.data.source.source import DataFile, Source

__all__ = ["Progress", "survey"]

MAX_UNIT_BYTES = 16 << 20
"""Size of a row group in formats that have none (text): small enough that several are decoded at once in memory."""
MAX_THREADS = 64
MAX_TOGETHER = 64
"""Files that a format inspects in one call."""
MAX_ASKED_FOR_NULLS = 512
"""Files whose null counts are read, spread over all. In others, nulls are found when rows are read."""


def survey(
    source: Source,
    files: Sequence[DataFile],
    format: Format,
    *,
    columns: Sequence[str] | None = None,
    condition: Condition | None = None,
    partition_fields: Sequence[pa.Field] = (),
    split_bytes: int = 128 << 20,
    num_threads: int | None = None,
    on_error: OnError = "raise",
    missing: Sequence[tuple[str, str]] = (),
    keeps_one: bool = False,
    cache: SurveyCache | None = None,
    roots: Sequence[str] = (),
    schema: pa.Schema | None = None,
    progress: Progress | None = None,
) -> Survey:
    """Survey the files.

    Args:
        columns: The columns to deliver; None means all.
        num_threads: By default one per core, from 4 to 16 for local files, and 16 for remote files.
        on_error: "skip" leaves out damaged or missing files and lists them in `Survey.skipped`.
        missing: Names of missing files, with the reason; "skip" counts them as skipped.
        keeps_one: Whether to open one file even if partitions prune all, for the columns of an empty dataset.
        roots: The paths that the user gave, which identify the dataset in the cache; by default the files' directory.
        schema: Types that the user chose.

    Raises:
        DataFileInvalid, DataFileMissing: With on_error="raise", the first file that cannot be read.
        StorageError: The storage cannot be reached or denies access.
        SchemaMismatch: The filter does not fit the files.
    """
    wanted = None if columns is None else sorted({*columns, *(condition.columns if condition else ())})
    probe = Probe(
        source=source,
        format=format,
        columns=None if columns is None else list(columns),
        read_columns=wanted,
        schema=schema,
        condition=condition,
        partition_fields=list(partition_fields),
        unit_bytes=min(split_bytes, MAX_UNIT_BYTES),
        num_threads=max(1, min(num_threads or _default_threads(source), MAX_THREADS)),
        on_error=on_error,
        progress=progress,
    )
    key = survey_cache.key(
        source_kind=source.filesystem.type_name,
        roots=roots or _common(files),
        format_name=format_key(format),
        columns=wanted,
        condition_text=condition.text if condition else "",
        unit_bytes=probe.unit_bytes,
    )
    known = cache.load(key) if cache else None
    opened = _not_pruned(probe, files) or list(files[:keeps_one])
    schemas, found, skipped = _inspect(probe, opened, known)
    skipped = [*missing, *skipped]
    counted_as, num_files_skipped, num_units_skipped = b"", len(skipped), 0
    partition_schema = schema_bytes(pa.schema(probe.partition_fields))
    if condition is not None and found:
        condition, dataset = bound_condition(probe, schemas, found)
        probe = dataclasses.replace(probe, condition=condition)
        counted_as = schema_bytes(dataset)
        if known is None or (known.condition_schema, known.partition_schema) != (counted_as, partition_schema):
            found = [msgspec.structs.replace(file, passing=None, num_counted=0) for file in found]
        found, bad, num_units_skipped = count_passing(probe, schemas, found, dataset)
        skipped += bad
    log_skipped(skipped)
    made = Survey(
        format=format.name,
        is_typed=format.is_typed,
        is_keyed=is_keyed(format),
        schemas=tuple(map(schema_bytes, schemas)),
        partition_schema=partition_schema,
        files=tuple(found),
        num_files=len(files) + len(missing),
        num_files_pruned=len(files) - len(opened),
        condition_text=condition.text if condition else "",
        condition_schema=counted_as,
        skipped=tuple(skipped),
        num_files_skipped=num_files_skipped,
        num_units_skipped=num_units_skipped,
    )
    if cache:
        kept = _without_bad(made)
        if known is None or known != kept:
            cache.save(key, kept)
    return made


def _default_threads(source: Source) -> int:
    # Inspecting local files is bound by the interpreter and counting by the decoder; remote, both mostly wait.
    return max(4, min(os.cpu_count() or 1, 16)) if source.is_local else 16


def format_key(format: Format) -> str:
    """Return the format with its options, if it has any: another delimiter gives other rows."""
    value: object = format
    return repr(value) if dataclasses.is_dataclass(value) else format.name


def _common(files: Sequence[DataFile]) -> list[str]:
    places = {posixpath.dirname(file.path) for file in files}
    try:
        return [posixpath.commonpath(places)] if places else []
    except ValueError:  # absolute and relative paths
        return sorted(places)


def _without_bad(made: Survey) -> Survey:
    """Return the survey without files that could not be counted: the next run tries them again."""
    if not made.skipped:
        return made
    bad = {name for name, _ in made.skipped}
    kept = tuple(file for file in made.files if file.name not in bad)
    return msgspec.structs.replace(made, files=kept, skipped=(), num_files_skipped=0, num_units_skipped=0)


# Partitions


def _not_pruned(probe: Probe, files: Sequence[DataFile]) -> list[DataFile]:
    """Return the files of which some row may pass, given the partition values in their paths."""
    fields = [field for field in probe.partition_fields if probe.condition and field.name in probe.condition.columns]
    if not fields or probe.condition is None:
        return list(files)
    places: dict[Partition, int] = {}
    rows: list[dict[str, object]] = []
    for file in files:
        if file.partition not in places:
            places[file.partition] = len(rows)
            rows.append(partition_values(file, probe.partition_fields))
    try:
        tree = literals.fit_literals(probe.condition.tree, pa.schema(fields))
        resolved = expression.resolve(tree, known_values(fields, rows))
    except pa.ArrowException:  # compared with another type: `filter.bind` raises the error
        return list(files)
    return [file for file in files if resolved[places[file.partition]].presence is not Presence.NONE]


# Row groups


def _inspect(
    probe: Probe, files: Sequence[DataFile], known: Survey | None
) -> tuple[list[pa.Schema], list[SurveyedFile], list[tuple[str, str]]]:
    """Return the distinct schemas, the files in the given order, and what was skipped."""
    kept = {file.path: file for file in known.files} if known else {}
    numbers = _Numbers([] if known is None else [schema_of(data) for data in known.schemas])
    found: list[SurveyedFile | None] = [_recall(kept.get(file.path), file) for file in files]
    new = [number for number, file in enumerate(found) if file is None]

    every = math.ceil(len(files) / MAX_ASKED_FOR_NULLS) if files else 1

    def inspect(some: Sequence[int]) -> list[SurveyedFile | DataError | StorageError]:
        facts = _facts(probe, [files[number] for number in some], with_nulls=[n % every == 0 for n in some])
        return [
            each if isinstance(each, Exception) else facts_of(files[number], each, numbers.of(each.schema))
            for number, each in zip(some, facts, strict=True)
        ]

    skipped = []
    results = attempts_together(probe, inspect, new, "reading metadata", num_together=_num_together(probe, len(new)))
    for number, result in zip(new, results, strict=True):
        if isinstance(result, Exception):
            skipped.append((files[number].name, str(result)))
        else:
            found[number] = result
    readable = [file for file in found if file is not None]
    return *_renumbered(numbers.schemas, readable), skipped


def _facts(
    probe: Probe, files: Sequence[DataFile], *, with_nulls: Sequence[bool]
) -> list[FileFacts | DataError | StorageError]:
    """Return the facts of each file, or the error."""
    format, columns = probe.format, probe.read_columns
    if isinstance(format, Together):
        return format.inspect_all(probe.source, files, columns=columns, with_nulls=with_nulls)

    def attempt(file: DataFile, with_nulls: bool) -> FileFacts | DataError | StorageError:
        try:
            return format.inspect(
                probe.source, file, columns=columns, unit_bytes=probe.unit_bytes, with_nulls=with_nulls
            )
        except (DataError, StorageError) as error:
            return error

    return [attempt(file, nulls) for file, nulls in zip(files, with_nulls, strict=True)]


def _num_together(probe: Probe, num_files: int) -> int:
    """Return how many files a thread inspects in one call: few enough that all threads stay busy until the end."""
    if not isinstance(probe.format, Together):
        return 1
    return max(1, min(MAX_TOGETHER, num_files // (4 * probe.num_threads)))


def _recall(kept: SurveyedFile | None, file: DataFile) -> SurveyedFile | None:
    """Return the cached survey of a file if the file is unchanged."""
    if kept is None or kept.size_bytes != file.size_bytes or kept.mtime_ns != file.mtime_ns or file.mtime_ns <= 0:
        return None
    if kept.partition != file.partition:  # other rows may pass
        return msgspec.structs.replace(kept, name=file.name, partition=file.partition, passing=None, num_counted=0)
    return kept if kept.name == file.name else msgspec.structs.replace(kept, name=file.name)


class _Numbers:
    """Numbers the distinct schemas, in any order. Most files have the schema of the file before."""

    def __init__(self, schemas: list[pa.Schema]) -> None:
        self.schemas = list(schemas)
        self._by_bytes = {schema_bytes(schema): number for number, schema in enumerate(schemas)}
        self._last: tuple[pa.Schema | None, int] = (None, -1)
        self._lock = renewed(threading.Lock())

    def of(self, schema: pa.Schema) -> int:
        last, number = self._last
        if last is not None and last.equals(schema):
            return number
        data = schema_bytes(schema)
        with self._lock:
            number = self._by_bytes.setdefault(data, len(self.schemas))
            if number == len(self.schemas):
                self.schemas.append(schema)
            self._last = (schema, number)
        return number


def _renumbered(schemas: list[pa.Schema], files: list[SurveyedFile]) -> tuple[list[pa.Schema], list[SurveyedFile]]:
    """Return only schemas that a file has, in the order of files, so that the result does not depend on the cache."""
    order = {old: new for new, old in enumerate(dict.fromkeys(file.schema for file in files))}
    if all(old == new for old, new in order.items()):
        return schemas[: len(order)], files
    renumbered = [msgspec.structs.replace(file, schema=order[file.schema]) for file in files]
    return [schemas[old] for old in order], renumbered
