"""Looking at a dataset's files, once, as little as possible and in several threads.

In order: files whose partition cannot pass the filter are not opened; the others are asked for their units; with a
filter, statistics say which units pass wholly or not at all; what remains is counted by decoding the filter's columns
alone. Each answer is kept for the next run.
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
from strata.data.plan.probe import Looking, Progress, attempts_together, known_values, tell_skipped
from strata.data.plan.row_counts import bound_condition, count_passing
from strata.data.plan.survey import Survey, SurveyedFile, facts_of, schema_bytes, schema_of
from strata.data.source.partitions import partition_values
from strata.errors import DataError, StorageError
from strata.lifecycle import renewed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.data.filter.filter import Condition
    from strata.data.formats.base import FileFacts, Format
    from strata.data.plan.cache import SurveyCache
    from strata.data.plan.probe import OnError
    from strata.data.plan.survey import Partition
    from strata.data.source.source import DataFile, Source

__all__ = ["Progress", "survey"]

MAX_UNIT_BYTES = 16 << 20
"""Of a format that leaves the size of units open: small enough that several are decoded at once and fit in memory."""
MAX_THREADS = 64
MAX_TOGETHER = 64
"""Files that a format looks at together."""
MAX_ASKED_FOR_NULLS = 512
"""Files that are asked how many nulls they have, spread over all. In others they are found when they are read."""


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
    """Looks at the files.

    Args:
        columns: What will be delivered; None: all.
        num_threads: Left out: one per core, from 4 to 16; 16 where files are far away.
        on_error: "skip" leaves out what is damaged or missing, and says so in `Survey.skipped`.
        missing: Names of files that are not there, and why; with "skip" they are counted as skipped.
        keeps_one: Whether to look into one file even if partitions rule out all: for the columns of an empty dataset.
        roots: The paths that the user gave: what a cache knows the dataset by. Left out: where the files are.
        schema: Types that the user has decided on.

    Raises:
        DataFileInvalid, DataFileMissing: With on_error="raise", of the first file that cannot be read.
        StorageError: Storage cannot be reached, or refuses.
        SchemaMismatch: The filter does not fit the files.
    """
    wanted = None if columns is None else sorted({*columns, *(condition.columns if condition else ())})
    looking = Looking(
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
        format_name=_told(format),
        columns=wanted,
        condition_text=condition.text if condition else "",
        unit_bytes=looking.unit_bytes,
    )
    known = cache.load(key) if cache else None
    opened = _not_pruned(looking, files) or list(files[:keeps_one])
    schemas, found, skipped = _inspect(looking, opened, known)
    skipped = [*missing, *skipped]
    counted_as, num_files_skipped, num_units_skipped = b"", len(skipped), 0
    partition_schema = schema_bytes(pa.schema(looking.partition_fields))
    if condition is not None and found:
        condition, dataset = bound_condition(looking, schemas, found)
        looking = dataclasses.replace(looking, condition=condition)
        counted_as = schema_bytes(dataset)
        if known is None or (known.condition_schema, known.partition_schema) != (counted_as, partition_schema):
            found = [msgspec.structs.replace(file, passing=None, num_counted=0) for file in found]
        found, bad, num_units_skipped = count_passing(looking, schemas, found, dataset)
        skipped += bad
    tell_skipped(skipped)
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
    # Near, looking is mostly the interpreter's work and counting mostly the decoder's; far away, both are waiting.
    return max(4, min(os.cpu_count() or 1, 16)) if source.is_local else 16


def _told(format: Format) -> str:
    """The format with its options, where it has any: another delimiter makes other rows."""
    made: object = format
    return repr(made) if dataclasses.is_dataclass(made) else format.name


def _common(files: Sequence[DataFile]) -> list[str]:
    places = {posixpath.dirname(file.path) for file in files}
    try:
        return [posixpath.commonpath(places)] if places else []
    except ValueError:  # some begin with a slash, some do not
        return sorted(places)


def _without_bad(made: Survey) -> Survey:
    """What could not be counted is not remembered: the next run shall find out by itself."""
    if not made.skipped:
        return made
    bad = {name for name, _ in made.skipped}
    kept = tuple(file for file in made.files if file.name not in bad)
    return msgspec.structs.replace(made, files=kept, skipped=(), num_files_skipped=0, num_units_skipped=0)


# --- partitions ---


def _not_pruned(looking: Looking, files: Sequence[DataFile]) -> list[DataFile]:
    """Files of which some row may pass, by what stands in their paths."""
    fields = [
        field for field in looking.partition_fields if looking.condition and field.name in looking.condition.columns
    ]
    if not fields or looking.condition is None:
        return list(files)
    places: dict[Partition, int] = {}
    rows: list[dict[str, object]] = []
    for file in files:
        if file.partition not in places:
            places[file.partition] = len(rows)
            rows.append(partition_values(file, looking.partition_fields))
    try:
        tree = literals.fit_literals(looking.condition.tree, pa.schema(fields))
        resolved = expression.resolve(tree, known_values(fields, rows))
    except pa.ArrowException:  # compared with something of another type: `filters.bind` will say so
        return list(files)
    return [file for file in files if resolved[places[file.partition]].presence is not Presence.NONE]


# --- units ---


def _inspect(
    looking: Looking, files: Sequence[DataFile], known: Survey | None
) -> tuple[list[pa.Schema], list[SurveyedFile], list[tuple[str, str]]]:
    """The different schemas, files in the order in which they were given, and what was skipped."""
    kept = {file.path: file for file in known.files} if known else {}
    numbers = _Numbers([] if known is None else [schema_of(data) for data in known.schemas])
    found: list[SurveyedFile | None] = [_recall(kept.get(file.path), file) for file in files]
    new = [number for number, file in enumerate(found) if file is None]

    every = math.ceil(len(files) / MAX_ASKED_FOR_NULLS) if files else 1

    def look(some: Sequence[int]) -> list[SurveyedFile | DataError | StorageError]:
        facts = _facts(looking, [files[number] for number in some], with_nulls=[n % every == 0 for n in some])
        return [
            each if isinstance(each, Exception) else facts_of(files[number], each, numbers.of(each.schema))
            for number, each in zip(some, facts, strict=True)
        ]

    skipped = []
    looked = attempts_together(looking, look, new, "looking at files", num_together=_num_together(looking, len(new)))
    for number, made in zip(new, looked, strict=True):
        if isinstance(made, Exception):
            skipped.append((files[number].name, str(made)))
        else:
            found[number] = made
    there = [file for file in found if file is not None]
    return *_renumbered(numbers.schemas, there), skipped


def _facts(
    looking: Looking, files: Sequence[DataFile], *, with_nulls: Sequence[bool]
) -> list[FileFacts | DataError | StorageError]:
    """What each says of itself, or why it does not."""
    format, columns = looking.format, looking.read_columns
    if isinstance(format, Together):
        return format.inspect_all(looking.source, files, columns=columns, with_nulls=with_nulls)

    def attempt(file: DataFile, with_nulls: bool) -> FileFacts | DataError | StorageError:
        try:
            return format.inspect(
                looking.source, file, columns=columns, unit_bytes=looking.unit_bytes, with_nulls=with_nulls
            )
        except (DataError, StorageError) as error:
            return error

    return [attempt(file, nulls) for file, nulls in zip(files, with_nulls, strict=True)]


def _num_together(looking: Looking, num_files: int) -> int:
    """How many files a thread looks at before it takes others: so few that all threads are at it until the end."""
    if not isinstance(looking.format, Together):
        return 1
    return max(1, min(MAX_TOGETHER, num_files // (4 * looking.num_threads)))


def _recall(kept: SurveyedFile | None, file: DataFile) -> SurveyedFile | None:
    """What the cache knows of the file, if it is still the same."""
    if kept is None or kept.size_bytes != file.size_bytes or kept.mtime_ns != file.mtime_ns or file.mtime_ns <= 0:
        return None
    if kept.partition != file.partition:  # then other rows may pass
        return msgspec.structs.replace(kept, name=file.name, partition=file.partition, passing=None, num_counted=0)
    return kept if kept.name == file.name else msgspec.structs.replace(kept, name=file.name)


class _Numbers:
    """Each schema once; in which order they come does not matter. Most files have that of the file before."""

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
    """Only schemas that a file has, in the order of files: the same whether or not a cache was there."""
    order = {old: new for new, old in enumerate(dict.fromkeys(file.schema for file in files))}
    if all(old == new for old, new in order.items()):
        return schemas[: len(order)], files
    renumbered = [msgspec.structs.replace(file, schema=order[file.schema]) for file in files]
    return [schemas[old] for old in order], renumbered
