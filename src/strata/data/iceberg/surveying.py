"""Looks into the data files of a scan, several at once, and remembers what it found.

What a cache knows of a data file holds for ever: files of a table are written once, under names that are never used
again. The number of rows that a filter leaves holds as long as the same rows are deleted.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec
import pyarrow as pa

from strata.data import survey as surveys
from strata.data import survey_cache
from strata.data.iceberg.counting import UNREADABLE, Counted, Known, count
from strata.data.iceberg.equality import EqualityDeletes
from strata.data.iceberg.fitting import NO_ROWS
from strata.data.iceberg.looking import Looked, look
from strata.data.iceberg.table_types import is_wide

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from strata.data.formats.base import FileFacts
    from strata.data.iceberg.looking import Request
    from strata.data.iceberg.scanning import ScannedFile
    from strata.data.survey_cache import SurveyCache
    from strata.data.surveying import Progress

T = TypeVar("T")
S = TypeVar("S")

_DELETES = "deletes"
"""In the cache, where other datasets have the values of partitions: which rows were deleted when rows were counted."""


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    files: tuple[Counted, ...]
    wide: bool
    """Whether strings and lists have 64-bit offsets."""
    skipped: tuple[tuple[str, str], ...] = ()


def survey(
    request: Request,
    files: Sequence[ScannedFile],
    positions: Mapping[str, npt.NDArray[np.int64]],
    *,
    num_threads: int,
    cache: SurveyCache | None = None,
    progress: Progress | None = None,
) -> Survey:
    """Looks into all files.

    Raises:
        DataFileInvalid, DataFileMissing, StorageError: A file cannot be read, and is not to be skipped.
        SchemaMismatch: A file's columns cannot be read as the table's.
        DataError: A file is of a format that is not read.
    """
    memory = _Memory(request, cache)
    crew = _Crew(request.skips, num_threads, progress)
    looked = crew.each(
        lambda one: look(request, one, memory.facts(one)), files, "looking at files", lambda one: one.file.file_path
    )
    wide = is_wide(kind for one in looked for kind in one.source_types)
    equality = EqualityDeletes(request, wide=wide)
    for one in looked:
        equality.read(one.scanned.equality_deletes)

    def counted(one: Looked) -> Counted:
        path = one.scanned.file.file_path
        return count(request, one, positions.get(path, NO_ROWS), equality, wide=wide, known=memory.counts(one))

    found = crew.each(counted, looked, "counting rows", lambda one: one.file.name)
    memory.keep(found)
    bad = [(one.looked.file.name, reason) for one in found for reason in one.bad_units]
    return Survey(tuple(found), wide, (*crew.skipped, *bad))


class _Crew:
    """Does the same to many files, in threads; results come in the order of files."""

    def __init__(self, skips: bool, num_threads: int, progress: Progress | None) -> None:
        self._skips = skips
        self._num_threads = num_threads
        self._progress = progress
        self.skipped: list[tuple[str, str]] = []

    def each(self, work: Callable[[S], T], items: Sequence[S], what: str, name: Callable[[S], str]) -> list[T]:
        done: list[T] = []
        with ThreadPoolExecutor(max(1, min(self._num_threads, len(items))), "strata-survey") as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                for number, (item, future) in enumerate(zip(items, futures, strict=True), start=1):
                    try:
                        done.append(future.result())
                    except UNREADABLE as error:
                        if not self._skips:
                            raise
                        self.skipped.append((name(item), str(error)))
                    if self._progress is not None:
                        self._progress(what, number, len(items))
            finally:  # after an error or Ctrl-C nobody begins another file
                for future in futures:
                    future.cancel()
        return done


class _Memory:
    """What the cache knows of this table, seen with these columns and this filter."""

    def __init__(self, request: Request, cache: SurveyCache | None) -> None:
        self._cache = cache
        self._text = request.condition.text if request.condition is not None else ""
        self._key = survey_cache.key(
            source_kind="iceberg",
            roots=[str(request.table.metadata.table_uuid), request.table.location()],
            format_name="iceberg",
            columns=[f"{each.field_id} {each.name} {each.field_type}" for each in request.fields],
            condition_text=self._text,
            unit_bytes=0,
        )
        self._known = cache.load(self._key) if cache is not None else None
        self._files = {file.path: file for file in self._known.files} if self._known is not None else {}
        self._schemas = [surveys.schema_of(data) for data in self._known.schemas] if self._known is not None else []
        self._locate = request.locator.file

    def facts(self, scanned: ScannedFile) -> FileFacts | None:
        size_bytes = scanned.file.file_size_in_bytes
        kept = self._files.get(self._locate(scanned.file.file_path, size_bytes).path)
        if kept is None or kept.size_bytes != size_bytes:
            return None
        return kept.facts(self._schemas[kept.schema])

    def counts(self, looked: Looked) -> Known | None:
        kept = self._files.get(looked.file.path)
        if kept is None or kept.passing is None or kept.version != looked.facts.version:
            return None
        digest = dict(kept.partition).get(_DELETES) or ""
        return Known(digest, tuple(surveys.unpack(kept.passing).tolist()), kept.num_counted)

    def keep(self, found: Sequence[Counted]) -> None:
        """What is kept is what this run saw: files that are no longer in the table are forgotten."""
        if self._cache is None:
            return
        schemas: dict[bytes, int] = {}
        files = []
        for one in found:
            if not one.bad_units:
                number = schemas.setdefault(surveys.schema_bytes(one.looked.facts.schema), len(schemas))
                files.append(self._entry(one, number))
        made = surveys.Survey(
            format="iceberg",
            is_typed=True,
            schemas=tuple(schemas),
            partition_schema=surveys.schema_bytes(pa.schema([])),
            files=tuple(files),
            num_files=len(files),
            condition_text=self._text,
        )
        if self._known is None or made != self._known:
            self._cache.save(self._key, made)

    def _entry(self, one: Counted, schema: int) -> surveys.SurveyedFile:
        plain = surveys.facts_of(one.looked.file, one.looked.facts, schema)
        if not self._text:
            return plain
        return msgspec.structs.replace(
            plain,
            partition=((_DELETES, one.deleted_digest),),
            passing=surveys.pack(one.unit_rows),
            num_counted=one.num_units_counted,
        )
