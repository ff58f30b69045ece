"""`StructuredDataset`: from what a user writes to a loader."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import pyarrow as pa

from strata.data import formats
from strata.data.config import check_on_empty
from strata.data.dataset import Dataset
from strata.data.filter.filter import parse
from strata.data.formats.base import Guessing
from strata.data.loader import Options, create
from strata.data.plan import cache as survey_cache
from strata.data.plan import survey as surveys
from strata.data.plan.planner import build
from strata.data.plan.progress import SurveyProgress
from strata.data.plan.splits import parse_bytes
from strata.data.plan.surveyor import survey
from strata.data.ranks import share
from strata.data.runtime.decoder import Recipe
from strata.data.source.filesystem import open_source
from strata.data.source.partitions import partition_fields
from strata.data.source.paths import discover, guess_format, suffixes_of
from strata.data.source.source import without_secrets
from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from strata.data.config import OnEmpty, OnError, OutputFormat, WorkerType
    from strata.data.formats.base import Format
    from strata.data.order.assignment import Strategy
    from strata.data.order.steps import Tail
    from strata.data.plain_loader import PlainLoader
    from strata.data.torch import Loader
    from strata.identity import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Which files, and what of them."""

    path: Any
    format: str | None = None
    columns: Sequence[str] | None = None
    filters: Any = None
    partitioning: Literal["hive"] | None = "hive"
    filesystem: Any = None
    storage_options: Mapping[str, Any] | None = None
    format_options: Mapping[str, Any] | None = None
    schema: pa.Schema | None = None
    schema_mode: Literal["unify", "strict"] = "unify"
    split_bytes: int | str = "128MiB"
    split_rows: int | None = None
    on_error: OnError = "raise"
    on_empty: OnEmpty = "raise"
    cache: bool = True
    show_progress: bool = False

    def __post_init__(self) -> None:
        roots_of(self.path)
        if self.schema is not None and not isinstance(self.schema, pa.Schema):
            raise InvalidArgument(
                f"schema is a {type(self.schema).__name__}; give a pyarrow schema: pa.schema({{'x': pa.int32()}})",
                field="schema",
            )
        check_on_empty(self.on_empty)
        if isinstance(self.columns, str):
            raise InvalidArgument(f"columns={self.columns!r}; give a list: [{self.columns!r}]", field="columns")
        if self.columns is not None:
            twice = {name for name in self.columns if list(self.columns).count(name) > 1}
            if twice:
                raise InvalidArgument(f"columns names {min(twice)!r} twice; name each once", field="columns")
            if not self.columns:
                raise InvalidArgument(
                    "columns=[] delivers nothing; name some, or leave it out for all", field="columns"
                )


def plan_files(where: Where, ranks: Identity) -> Recipe:
    """Looks at the files, on rank 0 if ranks can talk, and plans from what was found."""
    condition = None if where.filters is None else parse(where.filters)
    split_bytes = parse_bytes(where.split_bytes)

    def look() -> bytes:
        found = discover(
            where.path,
            suffixes=None if where.format is None else suffixes_of(where.format),
            filesystem=where.filesystem,
            storage_options=where.storage_options,
            partitioning=where.partitioning,
            on_error=where.on_error,
        )
        name = where.format or guess_format(found.source, found.files)
        with SurveyProgress(is_shown=where.show_progress) as progress:
            looked = survey(
                found.source,
                found.files,
                _format(where, name),
                columns=where.columns,
                condition=condition,
                partition_fields=partition_fields(found.files),
                split_bytes=split_bytes,
                on_error=where.on_error,
                missing=found.missing,
                keeps_one=where.on_empty == "empty",
                cache=survey_cache.default() if where.cache else None,
                roots=roots_of(where.path),
                schema=where.schema,
                progress=progress,
            )
        return surveys.to_bytes(looked)

    if where.format is not None and where.format not in formats.NAMES:
        formats.by_name(where.format)
    looked = surveys.from_bytes(share(ranks, look))
    plan = build(
        looked,
        columns=where.columns,
        condition=condition,
        split_bytes=split_bytes,
        split_rows=where.split_rows,
        schema_mode=where.schema_mode,
        schema=where.schema,
        on_empty=where.on_empty,
    )
    source, _ = open_source(roots_of(where.path)[0], filesystem=where.filesystem, storage_options=where.storage_options)
    return Recipe(source, plan, {looked.format: _format(where, looked.format)})


def _format(where: Where, name: str) -> Format:
    found = formats.by_name(name, where.format_options)
    if not isinstance(found, Guessing):
        return found
    decided = () if where.schema is None else where.schema.names
    return found.informed(decided=decided, is_chosen=where.columns is not None)


class StructuredDataset(Dataset):
    """Parquet, ORC, CSV, JSON or Arrow files as batches of columns, exact to the row."""

    @classmethod
    def create_dataloader(
        cls,
        path: Any,
        format: str | None = None,
        *,
        batch_size: int = 1024,
        columns: Sequence[str] | None = None,
        filters: Any = None,
        partitioning: Literal["hive"] | None = "hive",
        shuffle: bool = False,
        shuffle_seed: int = 0,
        shuffle_buffer_size: int | None = 100_000,
        split_bytes: int | str = "128MiB",
        split_rows: int | None = None,
        split_strategy: str | Strategy | None = None,
        num_workers: int | None = None,
        worker_type: WorkerType = "thread",
        output_format: OutputFormat | None = None,
        accelerator: Any = None,
        rank: int | None = None,
        num_ranks: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        filesystem: Any = None,
        storage_options: Mapping[str, Any] | None = None,
        format_options: Mapping[str, Any] | None = None,
        schema: pa.Schema | None = None,
        schema_mode: Literal["unify", "strict"] = "unify",
        strings: str | Mapping[str, str] = "python",
        string_width: int | None = None,
        nulls: str | Mapping[str, Any] | None = None,
        decimals: str | Mapping[str, str] | None = None,
        vocabularies: Mapping[str, Any] | None = None,
        max_vocabulary: int = 1_000_000,
        show_progress: bool = False,
        tail: Tail = "uneven",
        on_error: OnError = "raise",
        on_empty: OnEmpty = "raise",
        lanes: int | None = None,
        prefetch_bytes: int | str | None = None,
        pin_memory: bool = False,
        cache: bool = True,
        name: str | None = None,
    ) -> tuple[Loader | PlainLoader, Self]:
        """A loader over files, and the dataset behind it, which knows its plan, its state and its metrics.

        Args:
            path: A file, a directory (searched to the bottom), a pattern, or a list of these; local or a URL.
            format: parquet, orc, csv, json, jsonl or arrow; left out, it is guessed from the files.
            batch_size: Rows of a batch, on each rank.
            columns: What is delivered; left out, everything.
            filters: Rows to keep: a pyarrow expression, tuples as pyarrow.parquet takes them, or text: `x > 3`.
            shuffle_buffer_size: Rows that are shuffled among themselves, of all ranks together; None is the default.
            split_bytes: How large the pieces are, in bytes of the columns that are read, that a shuffle permutes.
            split_strategy: Who decodes what: lpt, round_robin, size_balanced, or a function.
            num_workers: Threads that decode, or processes with worker_type="process"; left out, one per core, up to 8.
            output_format: What a batch is: torch, numpy, arrow, pandas or dict.
            accelerator: Of Accelerate: ranks and the device are taken from it. Otherwise `rank` and `num_ranks`, or
                what torch.distributed, DeepSpeed, Horovod or the environment say.
            collate_fn: Is given each batch, and what it returns is delivered.
            transform: Is given what was decoded at once, as a RecordBatch, and returns as many rows.
            strings: What becomes of strings: python, codes or bytes, for all or by column; see the table of types.
            nulls: What becomes of nulls: error, fill, mask, keep, or a value, for all or by column.
            tail: What becomes of rows that do not fill a batch on every rank: uneven, pad or drop.
            on_error: "skip" leaves out what is damaged or missing, and counts it.
            on_empty: "empty" gives a loader without batches where no row passes the filter, instead of NoData.
            lanes: Fixes the order for any number of ranks; left out, it is chosen by the ranks at an epoch's start.
            prefetch_bytes: How much may be decoded and not yet taken; left out, half of split_bytes for each worker and
                as much again.
            cache: Whether to remember what files say of themselves for the next time.
            name: What metrics call the dataset; left out, the path.

        Raises:
            NoData: There are no files or no rows.
            DataError, StorageError, InvalidArgument: Something else is wrong; the message says what, and the cure.
        """
        where = Where(
            path=path,
            format=format,
            columns=columns,
            filters=filters,
            partitioning=partitioning,
            filesystem=filesystem,
            storage_options=storage_options,
            format_options=format_options,
            schema=schema,
            schema_mode=schema_mode,
            split_bytes=split_bytes,
            split_rows=split_rows,
            on_error=on_error,
            on_empty=on_empty,
            cache=cache,
            show_progress=show_progress,
        )
        options = Options(
            batch_size=batch_size,
            shuffle=shuffle,
            shuffle_seed=shuffle_seed,
            shuffle_buffer_size=shuffle_buffer_size,
            split_bytes=split_bytes,
            split_strategy=split_strategy,
            num_workers=num_workers,
            worker_type=worker_type,
            output_format=output_format,
            accelerator=accelerator,
            rank=rank,
            num_ranks=num_ranks,
            collate_fn=collate_fn,
            transform=transform,
            strings=strings,
            string_width=string_width,
            nulls=nulls,
            decimals=decimals,
            vocabularies=vocabularies,
            max_vocabulary=max_vocabulary,
            tail=tail,
            on_error=on_error,
            lanes=lanes,
            prefetch_bytes=prefetch_bytes,
            pin_memory=pin_memory,
            name=name or without_secrets(roots_of(path)[0]),
        )
        return create(cls, lambda ranks: plan_files(where, ranks), options)


def roots_of(path: Any) -> list[str]:
    """What the user wrote, as a list.

    Raises:
        InvalidArgument: It is no path, and no list of paths.
    """
    written = path if isinstance(path, list | tuple) else [path]
    if not written or not all(isinstance(one, str | os.PathLike) for one in written):
        raise InvalidArgument(f"path={path!r}; give a path or a URL as text, or a list of them", field="path")
    return [os.fspath(one) for one in written]
