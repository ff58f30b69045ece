"""Looking at a dataset's files, once, as little as possible and in several threads.

In order: files whose partition cannot pass the filter are not opened; the others are asked for their units; with a
filter, statistics say which units pass wholly or not at all; what remains is counted by decoding the filter's columns
alone. Each answer is kept for the next run.
"""

from __future__ import annotations

import os
import posixpath
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import msgspec
import pyarrow as pa

from strata.data import expressions, filters, survey_cache
from strata.data.fitting import PlainFit
from strata.data.formats.base import Presence
from strata.data.partitions import partition_values
from strata.data.schemas import retyped, unify
from strata.data.survey import (
    Survey,
    SurveyedFile,
    facts_of,
    named_schemas,
    pack,
    schema_bytes,
    schema_of,
    unpack,
)
from strata.errors import DataError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from strata.data.expressions import Resolved
    from strata.data.files import DataFile
    from strata.data.filters import Condition
    from strata.data.formats.base import Format, Unit
    from strata.data.source import Source
    from strata.data.survey import Partition
    from strata.data.survey_cache import SurveyCache

    T = TypeVar("T")
    R = TypeVar("R")

MAX_UNIT_BYTES = 16 << 20
"""Of a format that leaves the size of units open: small enough that several are decoded at once and fit in memory."""
MAX_THREADS = 64
_COUNT_AT_ONCE = 8
"""Units of one file that one thread counts before it takes others."""

OnError = Literal["raise", "skip"]


class Progress(Protocol):
    """Told what is being done, and how much of it is; from any thread, one at a time."""

    def __call__(self, what: str, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Looking:
    source: Source
    format: Format
    columns: list[str] | None
    """What is delivered."""
    read_columns: list[str] | None
    """Whose bytes count: the filter needs some too."""
    schema: pa.Schema | None
    condition: Condition | None
    partition_fields: list[pa.Field]
    unit_bytes: int
    num_threads: int
    on_error: OnError
    progress: Progress | None


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
    cache: SurveyCache | None = None,
    roots: Sequence[str] = (),
    schema: pa.Schema | None = None,
    progress: Progress | None = None,
) -> Survey:
    """Looks at the files.

    Args:
        columns: What will be delivered; None: all.
        num_threads: Left out: one per core, from 4 to 16; 16 where files are far away.
        on_error: "skip" leaves out what cannot be read, and says so in `Survey.skipped`.
        roots: The paths that the user gave: what a cache knows the dataset by. Left out: where the files are.
        schema: Types that the user has decided on.

    Raises:
        DataFileInvalid, DataFileMissing, StorageError: With on_error="raise", of the first file that cannot be read.
        SchemaMismatch: The filter does not fit the files.
    """
    wanted = None if columns is None else sorted({*columns, *(condition.columns if condition else ())})
    looking = _Looking(
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
        format_name=format.name,
        columns=wanted,
        condition_text=condition.text if condition else "",
        unit_bytes=looking.unit_bytes,
    )
    known = cache.load(key) if cache else None
    opened = _not_pruned(looking, files)
    schemas, found, skipped = _inspect(looking, opened, known)
    condition_schema = b""
    partition_schema = schema_bytes(pa.schema(looking.partition_fields))
    if condition is not None and found:
        dataset = _condition_schema(looking, schemas, found)
        condition_schema = schema_bytes(dataset)
        if known is None or (known.condition_schema, known.partition_schema) != (condition_schema, partition_schema):
            found = [msgspec.structs.replace(file, passing=None, num_counted=0) for file in found]
        found, bad = _count(looking, schemas, found, dataset)
        skipped += bad
    made = Survey(
        format=format.name,
        is_typed=format.is_typed,
        schemas=tuple(map(schema_bytes, schemas)),
        partition_schema=partition_schema,
        files=tuple(found),
        num_files=len(files),
        num_files_pruned=len(files) - len(opened),
        condition_text=condition.text if condition else "",
        condition_schema=condition_schema,
        skipped=tuple(skipped),
    )
    if cache:
        kept = _without_bad(made)
        if known is None or known != kept:
            cache.save(key, kept)
    return made


def _default_threads(source: Source) -> int:
    # Near, looking is mostly the interpreter's work and counting mostly the decoder's; far away, both are waiting.
    return max(4, min(os.cpu_count() or 1, 16)) if source.is_local else 16


def _common(files: Sequence[DataFile]) -> list[str]:
    places = {posixpath.dirname(file.path) for file in files}
    try:
        return [posixpath.commonpath(places)] if places else []
    except ValueError:  # some begin with a slash, some do not
        return sorted(places)


def _without_bad(made: Survey) -> Survey:
    """What could not be counted is not remembered: the next run shall find out by itself."""
    bad = {name for name, _ in made.skipped}
    return (
        msgspec.structs.replace(made, files=tuple(f for f in made.files if f.name not in bad), skipped=())
        if bad
        else made
    )


# --- partitions ---


def _not_pruned(looking: _Looking, files: Sequence[DataFile]) -> list[DataFile]:
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
        resolved = expressions.resolve(expressions.decode(looking.condition.expression), _known(fields, rows))
    except pa.ArrowException:  # compared with something of another type: `filters.check` will say so
        return list(files)
    return [file for file in files if resolved[places[file.partition]].presence is not Presence.NONE]


def _known(fields: Sequence[pa.Field], rows: Sequence[dict[str, object]]) -> pa.Table:
    arrays = [pa.array([row.get(field.name) for row in rows], field.type) for field in fields]
    return pa.Table.from_arrays(arrays, names=[field.name for field in fields])


# --- units ---


def _inspect(
    looking: _Looking, files: Sequence[DataFile], known: Survey | None
) -> tuple[list[pa.Schema], list[SurveyedFile], list[tuple[str, str]]]:
    """The different schemas, files in the order in which they were given, and what was skipped."""
    kept = {file.path: file for file in known.files} if known else {}
    numbers = _Numbers([] if known is None else [schema_of(data) for data in known.schemas])
    found: list[SurveyedFile | None] = [_recall(kept.get(file.path), file) for file in files]
    new = [number for number, file in enumerate(found) if file is None]

    def look(number: int) -> SurveyedFile:
        facts = looking.format.inspect(
            looking.source, files[number], columns=looking.read_columns, unit_bytes=looking.unit_bytes
        )
        return facts_of(files[number], facts, numbers.of(facts.schema))

    skipped = []
    for number, made in zip(new, _attempts(looking, look, new, "looking at files"), strict=True):
        if isinstance(made, Exception):
            skipped.append((files[number].name, str(made)))
        else:
            found[number] = made
    there = [file for file in found if file is not None]
    return *_renumbered(numbers.schemas, there), skipped


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
        self._lock = threading.Lock()

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


# --- rows that pass ---


def _condition_schema(looking: _Looking, schemas: Sequence[pa.Schema], files: Sequence[SurveyedFile]) -> pa.Schema:
    """The filter's columns, as all files agree on them. What is delivered is checked too, before the work of counting."""
    assert looking.condition is not None
    partitions = [field.name for field in looking.partition_fields]
    names = dict.fromkeys([*(name for schema in schemas for name in schema.names), *partitions])
    filters.check_names(looking.condition, list(names))
    unified = unify(
        named_schemas(schemas, files),
        columns=looking.columns,
        condition_columns=looking.condition.columns,
        partition_fields=looking.partition_fields,
        is_typed=looking.format.is_typed,
        schema=looking.schema,
    )
    used = pa.schema([unified.schema.field(name) for name in looking.condition.columns])
    filters.check(looking.condition, used)
    return used


@dataclass(frozen=True, slots=True)
class _Task:
    """Units of one file whose rows have to be counted."""

    number: int
    """Of the file."""
    units: list[Unit]


@dataclass(slots=True)
class _Tally:
    """What is known so far of the rows that pass, of files that were not counted before."""

    passing: dict[int, list[int]]
    """By the file's number, then by unit."""
    counted: dict[int, int]
    skipped: list[tuple[str, str]]


def _count(
    looking: _Looking, schemas: Sequence[pa.Schema], files: list[SurveyedFile], dataset: pa.Schema
) -> tuple[list[SurveyedFile], list[tuple[str, str]]]:
    """How many rows of each unit pass."""
    new = [number for number, file in enumerate(files) if file.passing is None]
    tally = _Tally({}, dict.fromkeys(new, 0), [])
    unsettled: list[tuple[int, Resolved]] = []
    for number, left in zip(new, _resolve(looking, schemas, [files[number] for number in new], dataset), strict=True):
        rows = unpack(files[number].rows).tolist()
        tally.passing[number] = rows if left.presence is Presence.ALL else [0] * len(rows)
        if left.presence is Presence.SOME and rows:
            unsettled.append((number, left))
    tasks = _ask_statistics(looking, schemas, files, unsettled, tally)
    _count_rows(looking, schemas, files, tasks, dataset, tally)
    made = list(files)
    for number in new:
        made[number] = msgspec.structs.replace(
            files[number], passing=pack(tally.passing[number]), num_counted=tally.counted[number]
        )
    return made, tally.skipped


def _ask_statistics(
    looking: _Looking,
    schemas: Sequence[pa.Schema],
    files: Sequence[SurveyedFile],
    unsettled: Sequence[tuple[int, Resolved]],
    tally: _Tally,
) -> list[_Task]:
    """What statistics leave to be counted."""

    def ask(each: tuple[int, Resolved]) -> list[Presence]:
        number, left = each
        return _presence(looking, files[number], schemas[files[number].schema], left)

    tasks = []
    answers = _attempts(looking, ask, unsettled, "asking statistics")
    for (number, _), answer in zip(unsettled, answers, strict=True):
        if isinstance(answer, Exception):
            tally.skipped.append((files[number].name, str(answer)))
            continue
        units = files[number].facts(schemas[files[number].schema]).units
        told = list(zip(units, answer, strict=True))
        tally.passing[number] = [unit.num_rows if presence is Presence.ALL else 0 for unit, presence in told]
        some = [unit for unit, presence in told if presence is Presence.SOME]
        tasks += [_Task(number, some[at : at + _COUNT_AT_ONCE]) for at in range(0, len(some), _COUNT_AT_ONCE)]
    return tasks


def _count_rows(
    looking: _Looking,
    schemas: Sequence[pa.Schema],
    files: Sequence[SurveyedFile],
    tasks: Sequence[_Task],
    dataset: pa.Schema,
    tally: _Tally,
) -> None:
    def count(task: _Task) -> list[int | DataError | StorageError]:
        return _count_units(looking, files[task.number], schemas[files[task.number].schema], dataset, task.units)

    for task, counts in zip(tasks, _attempts(looking, count, tasks, "counting rows"), strict=True):
        name, passing = files[task.number].name, tally.passing[task.number]
        tally.counted[task.number] += len(task.units)
        if isinstance(counts, Exception):
            tally.skipped.append((name, str(counts)))
            continue
        places = {index: place for place, index in enumerate(unpack(files[task.number].index).tolist())}
        for unit, found in zip(task.units, counts, strict=True):
            if isinstance(found, Exception):
                tally.skipped.append((name, str(found)))
            else:
                passing[places[unit.index]] = found


def _resolve(
    looking: _Looking, schemas: Sequence[pa.Schema], files: Sequence[SurveyedFile], dataset: pa.Schema
) -> list[Resolved]:
    """What is left of the filter for each file, whose partition is known and which may lack columns."""
    assert looking.condition is not None
    tree = expressions.decode(looking.condition.expression)
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
        there = set(schemas[number].names) - partitions
        fields = [field for field in dataset if field.name not in there]
        if fields:
            resolved[number] = expressions.resolve(tree, _known(fields, known))
        else:
            left = expressions.Resolved(Presence.SOME, looking.condition.expression, looking.condition.columns)
            resolved[number] = [left] * len(known)
    places = (groups[file.schema, file.partition] for file in files)
    return [resolved[number][place] for number, place in places]


def _presence(looking: _Looking, file: SurveyedFile, schema: pa.Schema, left: Resolved) -> list[Presence]:
    facts = file.facts(schema)
    partitions = {field.name for field in looking.partition_fields}
    if not all(name in schema.names and name not in partitions for name in left.columns):
        return [Presence.SOME] * len(facts.units)
    return looking.format.presence(looking.source, file.data_file(), facts, left.expression, left.columns)


def _count_units(
    looking: _Looking, file: SurveyedFile, schema: pa.Schema, dataset: pa.Schema, units: Sequence[Unit]
) -> list[int | DataError | StorageError]:
    assert looking.condition is not None
    data_file = file.data_file()
    constants = partition_values(data_file, looking.partition_fields) if looking.partition_fields else {}
    fit = PlainFit(schema, dataset, constants, file.name)
    columns = fit.file_columns(looking.condition.columns)
    read_schema = schema if looking.format.is_typed else retyped(schema, dataset)
    reader = looking.format.open(looking.source, data_file, read_schema, file.version)
    counts: list[int | DataError | StorageError] = []
    try:
        for unit in units:
            try:
                table = fit.apply(reader.read(unit, columns), unit, looking.condition.columns)
                counts.append(expressions.count(table, looking.condition.expression))
            except (DataError, StorageError) as error:
                if looking.on_error == "raise":
                    raise
                counts.append(error)
    finally:
        reader.close()
    return counts


# --- threads ---


def _attempts(
    looking: _Looking, function: Callable[[T], R], items: Sequence[T], what: str
) -> list[R | DataError | StorageError]:
    """The function's result for each item, in order; with on_error="skip", the error where it failed."""
    results: list[Any] = [None] * len(items)
    failed: dict[int, BaseException] = {}
    lock = threading.Lock()
    stop = threading.Event()
    left = iter(range(len(items)))
    done = 0

    def attempt(number: int) -> None:
        try:
            results[number] = function(items[number])
        except (DataError, StorageError) as error:
            if looking.on_error == "raise":
                raise
            results[number] = error

    def work() -> None:
        nonlocal done
        while not stop.is_set():
            with lock:
                number = next(left, -1)
            if number < 0:
                return
            try:
                attempt(number)
                if looking.progress is not None:
                    with lock:
                        done += 1
                        looking.progress(what, done, len(items))
            except BaseException as error:
                stop.set()
                failed[number] = error
                raise

    _in_threads(work, min(looking.num_threads, len(items)), stop)
    if failed:
        raise failed[min(failed)]  # of several, the first file's
    return results


def _in_threads(work: Callable[[], None], num_threads: int, stop: threading.Event) -> None:
    """Until all are done. What they raise they have noted themselves."""
    if num_threads <= 1:
        work()
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="strata-survey") as pool:
        try:
            wait([pool.submit(work) for _ in range(num_threads)])
        except BaseException:  # Ctrl-C: nobody begins another file
            stop.set()
            raise
