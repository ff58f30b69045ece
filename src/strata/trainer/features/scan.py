"""One pass over the data that features are fitted on, through the decode threads of `strata.data`.

Files are read by a loader whose transform observes each row group in the thread that decoded it and passes on nothing
but its number of rows: no row is copied, gathered or held. Tables in memory are cut into slices that a thread pool
observes. Only the columns that are needed are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from strata.data.batch.columns import join_arrays
from strata.data.config import MAX_DEFAULT_WORKERS
from strata.data.filter.filter import nearest, parse, passing
from strata.data.structured import StructuredDataset
from strata.errors import InvalidArgument, SchemaMismatch

if TYPE_CHECKING:
    from strata.data.dataset import Dataset

Observer: TypeAlias = Callable[[pa.RecordBatch], None]
Bind: TypeAlias = Callable[[pa.Schema], Observer]
"""Receives the schema of the columns before the first row, and returns the function that observes batches."""

_BATCH_ROWS: Final = 1 << 20
_SLICE_ROWS: Final = 1 << 18
_LOADER_OPTIONS: Final = (
    *(
        "cache",
        "cache_bytes",
        "cache_dir",
        "filesystem",
        "format_options",
        "name",
        "on_error",
        "partitioning",
        "prefetch_bytes",
    ),
    *("schema", "schema_mode", "shared_bytes", "split_bytes", "split_rows"),
)
"""What decides which rows there are and how they are read, but not how they are delivered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How to read data."""

    columns: Sequence[str]
    filters: Any = None
    format: str | None = None
    storage_options: Mapping[str, Any] | None = None
    num_workers: int | None = None
    show_progress: bool = False
    loader_options: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of `StructuredDataset.create_dataloader`."""

    def __post_init__(self) -> None:
        ours = [name for name in self.loader_options if name not in _LOADER_OPTIONS]
        if ours:
            raise InvalidArgument(
                f"loader_options has {ours[0]!r}, which does not apply to fitting features; it may have: "
                f"{', '.join(_LOADER_OPTIONS)}",
                field="loader_options",
            )

    def observe_all(self, data: Any, bind: Bind) -> int:
        """Observe each row once, from several threads; return the number of rows.

        Raises:
            SchemaMismatch: A column does not exist, or `bind` or an observer refused one.
            DataError, StorageError, InvalidArgument: The data cannot be read.
        """
        if is_path(data):
            return self._observe_files(data, bind)
        return self._observe_table(as_table(data, self._table_columns()), bind)

    def _observe_files(self, path: Any, bind: Bind) -> int:
        observers: list[Observer] = []

        def observe(batch: pa.RecordBatch) -> pa.RecordBatch:
            observers[0](batch)
            return pa.RecordBatch.from_arrays([pa.nulls(batch.num_rows, pa.bool_())], ["observed"])

        _, dataset = StructuredDataset.create_dataloader(
            path,
            self.format,
            batch_size=_BATCH_ROWS,
            columns=list(self.columns),
            filters=self.filters,
            storage_options=self.storage_options,
            num_workers=self.num_workers,
            output_format="arrow",
            transform=observe,
            rank=0,
            num_ranks=1,
            show_progress=self.show_progress,
            **self.loader_options,
        )
        try:
            observers.append(bind(dataset.plan.schema))
            return self._run(dataset)
        finally:
            dataset.close()

    def _run(self, dataset: Dataset) -> int:
        num_rows = 0
        bar = Progress(
            TextColumn("fitting features"), BarColumn(), TextColumn("{task.completed:,} rows"), TimeRemainingColumn(),
            console=Console(stderr=True), disable=not self.show_progress,
        )  # fmt: skip
        with bar:
            task = bar.add_task("", total=dataset.plan.num_rows)
            for batch in dataset:
                num_rows += batch.num_rows
                bar.update(task, completed=num_rows)
        return num_rows

    def _table_columns(self) -> list[str]:
        needed = () if self.filters is None else parse(self.filters).columns
        return list(dict.fromkeys([*self.columns, *needed]))

    def _observe_table(self, table: pa.Table, bind: Bind) -> int:
        if self.filters is not None:
            table = passing(parse(self.filters).expression, table, "the data")
        table = table.select(list(self.columns))
        observe = bind(table.schema)
        slices = [table.slice(first, _SLICE_ROWS) for first in range(0, table.num_rows, _SLICE_ROWS)]
        num_threads = self.num_workers or min(MAX_DEFAULT_WORKERS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(num_threads, thread_name_prefix="strata-features") as threads:
            for done in [threads.submit(lambda part: observe(one_batch(part)), part) for part in slices]:
                done.result()
        return int(table.num_rows)


def is_path(data: Any) -> bool:
    """Return whether data is a path, a URL or a list of them."""
    each = data if isinstance(data, list | tuple) else [data]
    return bool(each) and all(isinstance(one, str | os.PathLike) for one in each)


def as_table(data: Any, columns: Sequence[str]) -> pa.Table:
    """Return these columns of data in memory.

    Args:
        data: A pyarrow Table or RecordBatch, a DataFrame, or a mapping from names to arrays, lists or tensors.

    Raises:
        SchemaMismatch: A column does not exist, or Arrow cannot hold its values.
        InvalidArgument: It is something else.
    """
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    is_frame = hasattr(data, "columns") and hasattr(data, "__arrow_c_stream__")
    if not isinstance(data, pa.Table | Mapping) and not is_frame:
        raise InvalidArgument(
            f"data is a {type(data).__name__}; pass a path or URL, a pyarrow Table or RecordBatch, a DataFrame, or a "
            "mapping from column names to arrays",
            field="data",
        )
    names = list(data) if isinstance(data, Mapping) else list(getattr(data, "column_names", data.columns))
    for column in columns:
        if column not in names:
            raise SchemaMismatch(f"the data has no column {column!r}; {nearest(column, map(str, names))}")
    try:
        if isinstance(data, pa.Table):
            return data.select(list(columns))
        if isinstance(data, Mapping):
            return pa.table({column: _array(data[column]) for column in columns})
        return pa.table(data[list(columns)]).select(list(columns))
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise SchemaMismatch(
            f"a column cannot be converted to Arrow: {error}; give each column values of one type and length"
        ) from error


def one_batch(table: pa.Table) -> pa.RecordBatch:
    """Return the rows of a table as one batch."""
    columns = [join_arrays(column.chunks or [pa.nulls(0, column.type)]) for column in table.columns]
    return pa.RecordBatch.from_arrays(columns, table.column_names)


def _array(values: Any) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if hasattr(values, "detach"):  # a tensor
        values = values.detach().cpu().numpy()
    if getattr(values, "ndim", 1) == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
    return pa.array(values, from_pandas=True)
