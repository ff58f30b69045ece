"""The decoder: reads a row group, projects it onto the schema of the dataset, filters and transforms it."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import pyarrow as pa

from strata.data.batch.columns import join_arrays
from strata.data.filter import filter as filters
from strata.data.formats.base import Headed, PagedReader
from strata.data.plan.schema import PlainProjection
from strata.data.runtime.metrics import State
from strata.data.shared.cache import NodeCache, directory_for
from strata.data.shared.row_groups import SharedRowGroups
from strata.errors import DataFileChanged, StrataError, TransformFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from strata.data.formats.base import Format, Reader, Rows, Unit
    from strata.data.plan.plan import Plan, Projection
    from strata.data.runtime.metrics import WorkerRecorder
    from strata.data.runtime.prefetch import Fetcher
    from strata.data.source.source import Source

    Transform = Callable[[pa.RecordBatch], Any]

MAX_OPEN_FILES = 16
"""Files that a worker keeps open. Lanes read several files at once, and each footer should be parsed once."""


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """All that is needed to decode the row groups of a plan, in this process or another."""

    source: Source
    plan: Plan
    formats: Mapping[str, Format]
    transform: Transform | None = None
    shared_bytes: int = 0
    """Limit of the node cache that the row groups are shared through; 0: they are not shared."""

    @property
    def columns(self) -> list[str]:
        """The columns that are read: the delivered ones, and those that only the filter needs."""
        plan = self.plan
        return [*plan.columns, *(name for name in plan.condition_columns if name not in plan.columns)]


def open_shared(recipe: Recipe) -> SharedRowGroups | None:
    """Join the node cache of a recipe, if it has one."""
    if not recipe.shared_bytes:
        return None
    cache = NodeCache(directory_for(recipe.shared_bytes), max_bytes=recipe.shared_bytes)
    cache.join()  # now, because it may start a process, and the first row group may come with a lock held
    return SharedRowGroups(cache, recipe.source, recipe.plan, recipe.formats, recipe.columns)


class Decoder(Protocol):
    """Decodes for one worker; used by one thread at a time."""

    def decode(self, number: int) -> pa.Table:
        """Return the rows and columns of a row group that are delivered.

        Raises:
            DataError, StorageError: The message names the file and the row group.
        """
        ...

    def close(self) -> None:
        """Release open files; called by the decoder's thread at the end of a pass."""
        ...

    def abort(self) -> None:
        """Stop decoding; called by another thread when the pass is over."""
        ...


@runtime_checkable
class HeadDecoder(Decoder, Protocol):
    """A decoder that can read the first rows of a row group alone."""

    def decode_head(self, number: int, num_rows: int) -> pa.Table:
        """As `decode`, for the first rows of a row group that `has_head`. Metrics count them with the row group."""
        ...


class ThreadDecoder:
    """Decodes in the calling thread."""

    def __init__(
        self,
        recipe: Recipe,
        recorder: WorkerRecorder,
        fetcher: Fetcher | None = None,
        shared: SharedRowGroups | None = None,
    ) -> None:
        self._recipe = recipe if fetcher is None else replace(recipe, source=fetcher.source)
        self._recorder = recorder
        self._fetcher = fetcher
        self._shared = shared
        self._readers: OrderedDict[int, Reader] = OrderedDict()
        self._is_aborted = False

    def decode(self, number: int) -> pa.Table:
        if self._fetcher is None:
            return self._decode(number)
        try:
            return self._decode(number)
        finally:
            self._fetcher.release(number)

    def _decode(self, number: int) -> pa.Table:
        bytes_read: int | None = None
        if self._shared is None:
            table, bytes_read = self._read(number)
        else:
            table, bytes_read = self._obtain(self._shared, number)
        if self._recipe.transform is not None:
            with self._recorder.during(State.TRANSFORM):
                table = transformed(self._recipe.transform, table, self._recipe.plan.describe(number))
        if bytes_read is not None:
            self._recorder.decoded_row_group(rows=table.num_rows, bytes_read=bytes_read, bytes_decoded=table.nbytes)
        return table

    def _obtain(self, shared: SharedRowGroups, number: int) -> tuple[pa.Table, int | None]:
        """Return the rows of a row group from the node cache, and the bytes that were read if it had to be decoded."""
        bytes_read: int | None = None

        def decode() -> pa.Table:
            nonlocal bytes_read
            self._recorder.enter(State.DECODE)  # until the rows are written for the others, too
            table, bytes_read = self._read(number)
            return table

        with self._recorder.during(State.IDLE):  # while another process decodes the row group
            found = shared.obtain(number, decode, lambda: self._is_aborted)
        if not found.is_decoded:
            self._recorder.shared_row_group(found.table.nbytes)
        elif not found.is_shared:
            self._recorder.unshared_row_group()
        elif self._fetcher is not None:
            self._fetcher.discard(number)
        return found.table, bytes_read

    def _read(self, number: int) -> tuple[pa.Table, int]:
        """Return the rows of a row group before the transform, and the bytes that were read."""
        if self._fetcher is not None:
            with self._recorder.during(State.READ):
                self._recorder.took_from_cache(self._fetcher.wait(number))
        plan, row_group = self._recipe.plan, self._recipe.plan.unit(number)
        file_number = int(plan.unit_file[number])
        planned = plan.files[file_number]
        wanted = self._recipe.columns
        reader = self._reader(file_number)
        before = reader.bytes_read
        parts = plan.parts_of(number)
        columns = planned.projection.file_columns(wanted)
        if parts and isinstance(reader, PagedReader):
            table = _project_parts(
                planned.projection, reader.read_rows(row_group, columns, parts), row_group, wanted, parts
            )
        else:
            table = planned.projection.apply(reader.read(row_group, columns), row_group, wanted)
        bytes_read = reader.bytes_read - before
        if plan.condition is not None:
            table = filters.passing(plan.condition, table, plan.describe(number)).select(list(plan.columns))
        expected = int(plan.unit_rows[number])
        if table.num_rows != expected:
            raise DataFileChanged(
                f"{plan.describe(number)} has {table.num_rows} rows to deliver, but had {expected} when planned; "
                "create the loader again, with cache=False if files were rewritten in place"
            )
        return table, bytes_read

    def decode_head(self, number: int, num_rows: int) -> pa.Table:
        plan, row_group = self._recipe.plan, self._recipe.plan.unit(number)
        planned = plan.files[int(plan.unit_file[number])]
        format = self._recipe.formats[planned.format]
        assert isinstance(format, Headed)
        wanted = self._recipe.columns
        reader = self._reader(int(plan.unit_file[number]))
        table = format.read_head(reader, row_group, planned.projection.file_columns(wanted), num_rows)
        return planned.projection.apply(table, replace(row_group, num_rows=num_rows), wanted)

    def close(self) -> None:
        while self._readers:
            self._readers.popitem()[1].close()

    def abort(self) -> None:
        """Stop waiting for other processes. Native code cannot be stopped, and soon returns."""
        self._is_aborted = True

    def _reader(self, file_number: int) -> Reader:
        if file_number in self._readers:
            self._readers.move_to_end(file_number)
            return self._readers[file_number]
        planned = self._recipe.plan.files[file_number]
        format = self._recipe.formats[planned.format]
        reader = format.open(self._recipe.source, planned.file, planned.schema, planned.version)
        self._recorder.opened_file()
        self._readers[file_number] = reader
        if len(self._readers) > MAX_OPEN_FILES:
            self._readers.popitem(last=False)[1].close()
        return reader


def has_head(recipe: Recipe, number: int) -> bool:
    """Return whether the first rows of a row group can be read alone, and are delivered unchanged.

    A filter or deletes decide which rows come first, and a transform may depend on all rows of a row group.
    """
    plan = recipe.plan
    planned = plan.files[int(plan.unit_file[number])]
    return (
        recipe.source.is_local
        and recipe.transform is None
        and plan.condition is None
        and plan.unit_rows[number] == plan.unit_total_rows[number]
        and isinstance(planned.projection, PlainProjection)
        and bool(planned.projection.file_columns(recipe.columns))
        and isinstance(recipe.formats[planned.format], Headed)
    )


def _project_parts(
    projection: Projection, table: pa.Table, row_group: Unit, wanted: Sequence[str], parts: Sequence[Rows]
) -> pa.Table:
    """Project each part as if it were a row group: a projection identifies rows by their place in the file."""
    ends = itertools.accumulate(num_rows for _, num_rows in parts)
    made = [
        projection.apply(
            table.slice(end - num_rows, num_rows),
            replace(row_group, num_rows=num_rows, first_row=row_group.first_row + first),
            wanted,
        )
        for (first, num_rows), end in zip(parts, ends, strict=True)
    ]
    return made[0] if len(made) == 1 else pa.concat_tables(made)


def transformed(transform: Transform, table: pa.Table, place: str) -> pa.Table:
    """Apply the user's function to the rows.

    Raises:
        TransformFailed: It raised, did not return columns, or returned another number of rows.
    """
    try:
        made = _as_table(transform(_one_batch(table)))
    except StrataError:
        raise
    except Exception as error:
        raise TransformFailed(f"transform raised {type(error).__name__} for {place}: {error}") from error
    if made is None:
        raise TransformFailed(
            f"transform must return a RecordBatch, a Table or a dict of columns; for {place} it did not"
        )
    if made.num_rows != table.num_rows:
        raise TransformFailed(
            f"transform returned {made.num_rows} rows for {table.num_rows} ({place}); it must keep their number, "
            "because positions are counted before it runs. To leave out rows, use filters="
        )
    return made


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    if len(batches) == 1:
        return batches[0]
    return pa.RecordBatch.from_arrays(
        [join_arrays(column.chunks or [pa.array([], column.type)]) for column in table.columns], table.column_names
    )


def _as_table(made: Any) -> pa.Table | None:
    if isinstance(made, pa.Table):
        return made
    if isinstance(made, pa.RecordBatch):
        return pa.Table.from_batches([made])
    if isinstance(made, dict):
        return pa.table(made)
    return None
