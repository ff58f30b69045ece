"""Inspect the data files of a scan, several at once, and cache the results.

The metadata of a data file stays valid forever, because a table's files are written once under unique names. The row
counts after a filter stay valid as long as the same rows are deleted.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec
import pyarrow as pa

from strata.data.iceberg.deletes import EqualityDeletes
from strata.data.iceberg.probe import CountedFile, FileLayouts, KnownCounts, ProbedFile, count, probe_file
from strata.data.plan import cache as survey_cache
from strata.data.plan import survey as surveys
from strata.data.plan.probe import UNREADABLE, log_skipped
from strata.data.plan.projection import NO_ROWS, is_wide

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from strata.data.formats.base import FileFacts
    from strata.data.iceberg.probe import Request
    from strata.data.iceberg.scan import ScannedFile
    from strata.data.plan.cache import SurveyCache
    from strata.data.plan.surveyor import Progress

T = TypeVar("T")
S = TypeVar("S")

_AT_ONCE = 32
"""Files that one thread inspects before it takes others."""
_DELETES = "deletes"
"""The key of the digest of deleted rows, which the cache stores in place of partition values."""


@dataclass(frozen=True, slots=True, eq=False)
class TableSurvey:
    files: tuple[CountedFile, ...]
    wide: bool
    """Whether strings and lists have 64-bit offsets."""
    skipped: tuple[tuple[str, str], ...] = ()
    """Skipped files, then skipped row groups of other files."""
    num_files_skipped: int = 0


def survey(
    request: Request,
    files: Sequence[ScannedFile],
    positions: Mapping[str, npt.NDArray[np.int64]],
    *,
    num_threads: int,
    cache: SurveyCache | None = None,
    progress: Progress | None = None,
) -> TableSurvey:
    """Inspect all files.

    Raises:
        DataFileInvalid, DataFileMissing: A file cannot be read, and errors are not skipped.
        StorageError: Storage is unreachable, or denies access.
        SchemaMismatch: A file's columns do not fit the table's.
        DataError: The format of a file is not supported.
    """
    cached = _CachedFiles(request, cache)
    tasks = _ThreadedTasks(request.skips, num_threads, progress)
    layouts = FileLayouts(request)
    probed = tasks.each(
        lambda one: probe_file(request, layouts, one, cached.facts(one)),
        files,
        "looking at files",
        name=lambda one: request.locator.file(one.file.file_path, 0).name,
        is_quick=cached.knows,
    )
    found_layouts = {id(one.layout): one.layout for one in probed}.values()
    wide = is_wide(source.type for layout in found_layouts for source in layout.sources.values())
    equality = EqualityDeletes(request, layouts, wide=wide)
    for one in probed:
        equality.read(one.scanned.equality_deletes)

    def counted(one: ProbedFile) -> CountedFile:
        path = one.scanned.file.file_path
        return count(request, one, positions.get(path, NO_ROWS), equality, wide=wide, known=cached.counts(one))

    found = tasks.each(
        counted,
        probed,
        "counting rows",
        name=lambda one: one.file.name,
        is_quick=lambda one: request.condition is None and not one.scanned.equality_deletes,
    )
    cached.keep(found)
    bad = [(one.probed.file.name, reason) for one in found for reason in one.bad_units]
    skipped = (*tasks.skipped, *bad)
    log_skipped(skipped)
    return TableSurvey(tuple(found), wide, skipped, len(tasks.skipped))


class _ThreadedTasks:
    """Runs a function on many files, in threads if it waits for storage, and keeps the order of files."""

    def __init__(self, skips: bool, num_threads: int, progress: Progress | None) -> None:
        self._skips = skips
        self._num_threads = num_threads
        self._progress = progress
        self.skipped: list[tuple[str, str]] = []

    def each(
        self,
        work: Callable[[S], T],
        items: Sequence[S],
        what: str,
        *,
        name: Callable[[S], str],
        is_quick: Callable[[S], bool],
    ) -> list[T]:
        """Return the results of `work` for all items.

        Raises:
            Exception: The error of the first file for which `work` raised, unless errors are skipped.
        """
        slow = [number for number, item in enumerate(items) if not is_quick(item)]
        results = dict(zip(slow, self._in_threads(work, [items[number] for number in slow], what), strict=True))
        done: list[T] = []
        for number, item in enumerate(items):
            result = results[number] if number in results else work(item)
            if isinstance(result, Exception):
                self.skipped.append((name(item), str(result)))
            else:
                done.append(result)
        return done

    def _in_threads(self, work: Callable[[S], T], items: Sequence[S], what: str) -> list[T | Exception]:
        def attempt(item: S) -> T | Exception:
            try:
                return work(item)
            except UNREADABLE as error:
                if self._skips:
                    return error
                raise

        done: list[T | Exception] = []
        size = max(1, min(_AT_ONCE, len(items) // (4 * self._num_threads)))
        chunks = [items[first : first + size] for first in range(0, len(items), size)]
        with ThreadPoolExecutor(max(1, min(self._num_threads, len(chunks))), "strata-survey") as pool:
            futures = [pool.submit(lambda chunk: [attempt(item) for item in chunk], chunk) for chunk in chunks]
            try:
                for future in futures:
                    done += future.result()
                    if self._progress is not None:
                        self._progress(what, len(done), len(items))
            finally:  # after an error or Ctrl-C no thread begins another chunk
                for future in futures:
                    future.cancel()
        return done


class _CachedFiles:
    """The cache entries of a table, for these columns and this filter."""

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

    def knows(self, scanned: ScannedFile) -> bool:
        return self._kept(scanned) is not None

    def facts(self, scanned: ScannedFile) -> FileFacts | None:
        kept = self._kept(scanned)
        return kept.facts(self._schemas[kept.schema]) if kept is not None else None

    def _kept(self, scanned: ScannedFile) -> surveys.SurveyedFile | None:
        if not self._files:
            return None
        file = self._locate(scanned.file.file_path, scanned.file.file_size_in_bytes)
        kept = self._files.get(file.path)
        return kept if kept is not None and kept.size_bytes == file.size_bytes else None

    def counts(self, probed: ProbedFile) -> KnownCounts | None:
        kept = self._files.get(probed.file.path)
        if kept is None or kept.passing is None or kept.version != probed.facts.version:
            return None
        return KnownCounts(
            self._digest(kept.path) or "", tuple(surveys.unpack(kept.passing).tolist()), kept.num_counted
        )

    def keep(self, found: Sequence[CountedFile]) -> None:
        """Save the files of this run; files that are no longer in the table are dropped."""
        if self._cache is None or self._is_all(found):
            return
        schemas: dict[bytes, int] = {}
        by_layout: dict[int, int] = {}
        files = []
        for one in found:
            if not one.bad_units:
                layout = one.probed.layout
                if id(layout) not in by_layout:
                    by_layout[id(layout)] = schemas.setdefault(surveys.schema_bytes(layout.schema), len(schemas))
                files.append(self._entry(one, by_layout[id(layout)]))
        made = surveys.Survey(
            format="iceberg",
            is_typed=True,
            is_keyed=False,
            schemas=tuple(schemas),
            partition_schema=surveys.schema_bytes(pa.schema([])),
            files=tuple(files),
            num_files=len(files),
            condition_text=self._text,
        )
        self._cache.save(self._key, made)

    def _is_all(self, found: Sequence[CountedFile]) -> bool:
        """Return whether the cache already contains everything."""
        if len(found) != len(self._files):
            return False
        return all(
            one.probed.file.path in self._files
            and (not self._text or self._digest(one.probed.file.path) == one.deleted_digest)
            for one in found
        )

    def _digest(self, path: str) -> str | None:
        return dict(self._files[path].partition).get(_DELETES)

    def _entry(self, one: CountedFile, schema: int) -> surveys.SurveyedFile:
        plain = surveys.facts_of(one.probed.file, one.probed.facts, schema)
        if not self._text:
            return plain
        return msgspec.structs.replace(
            plain,
            partition=((_DELETES, one.deleted_digest),),
            passing=surveys.pack(one.unit_rows),
            num_counted=one.num_units_counted,
        )
