"""`StructuredDataset`: files to a loader. Finds the files, surveys them on rank 0, and plans from the survey."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from strata.config import parse_bytes
from strata.data import formats
from strata.data.batch.delivery import delivered_nulls
from strata.data.config import (
    DEFAULT_CACHE_BYTES,
    DEFAULT_SHUFFLE_BUFFER_SIZE,
    BatchConfig,
    FilesConfig,
    LoaderConfig,
    OrderConfig,
    PlanConfig,
    RuntimeConfig,
    default_output_format,
)
from strata.data.dataset import Dataset
from strata.data.filter.filter import parse
from strata.data.formats.base import Guessing, Sampled
from strata.data.loader import create
from strata.data.plan import cache as survey_cache
from strata.data.plan import survey as surveys
from strata.data.plan.planner import build
from strata.data.plan.probe import SurveyProgress
from strata.data.plan.surveyor import survey
from strata.data.ranks import share
from strata.data.runtime.decoder import Recipe
from strata.data.source import huggingface
from strata.data.source.filesystem import open_source
from strata.data.source.partitions import partition_fields
from strata.data.source.paths import discover, guess_format, suffixes_of
from strata.data.source.source import without_secrets
from strata.errors import InvalidArgument, NullsFound

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    import pyarrow as pa

    from strata.data.config import LongRows, Missing, OnEmpty, OnError, OutputFormat, Sequences, WorkerType
    from strata.data.formats.base import Format
    from strata.data.loader import PlainLoader
    from strata.data.order.assignment import Strategy
    from strata.data.order.steps import Tail
    from strata.data.plan.plan import Plan
    from strata.data.torch import Loader
    from strata.identity import Identity


def plan_files(files: FilesConfig, config: PlanConfig, ranks: Identity, missing: Missing = "raise") -> Recipe:
    """Survey the files, on rank 0 only if ranks can communicate, and plan from the survey.

    `missing`: What to do with samples of tar shards that lack a part.
    """
    condition = None if config.filters is None else parse(config.filters)
    is_saved = files.format == huggingface.NAME
    chosen = None if is_saved else files.format

    if missing == "skip" and config.columns is None:
        raise InvalidArgument(
            "missing='skip' needs columns=, the parts that a sample must have: columns=['__key__', 'jpg', 'cls']",
            field="missing",
        )

    def look() -> bytes:
        found = discover(
            files.path,
            suffixes=None if chosen is None else suffixes_of(chosen),
            filesystem=files.filesystem,
            storage_options=files.storage_options,
            partitioning=files.partitioning,
            on_error=config.on_error,
            is_saved=is_saved or (None if files.format is None else False),
        )
        name = chosen or guess_format(found.source, found.files)
        partitions = partition_fields(found.files)
        with SurveyProgress(is_shown=config.show_progress) as progress:
            surveyed = survey(
                found.source,
                found.files,
                _format(files, config, name, missing, [field.name for field in partitions]),
                columns=config.columns,
                condition=condition,
                partition_fields=partitions,
                split_bytes=config.split_bytes,
                on_error=config.on_error,
                missing=found.missing,
                keeps_one=config.on_empty == "empty",
                cache=survey_cache.default() if config.cache else None,
                roots=files.roots,
                schema=files.schema,
                progress=progress,
            )
        return surveys.to_bytes(surveyed)

    if chosen is not None and chosen not in formats.NAMES:
        formats.by_name(chosen)
    surveyed = surveys.from_bytes(share(ranks, look))
    plan = build(
        surveyed,
        columns=config.columns,
        condition=condition,
        split_bytes=config.split_bytes,
        split_rows=config.split_rows,
        schema_mode=files.schema_mode,
        schema=files.schema,
        on_empty=config.on_empty,
    )
    source, _ = open_source(files.roots[0], filesystem=files.filesystem, storage_options=files.storage_options)
    partitions = surveys.schema_of(surveyed.partition_schema).names
    format = _format(files, config, surveyed.format, missing, partitions)
    if isinstance(format, Sampled) and missing == "raise":
        _check_parts(plan)
    return Recipe(source, plan, {surveyed.format: format})


def _check_parts(plan: Plan) -> None:
    """Check that no sample lacks a part, unless a filter may remove the samples that do.

    Raises:
        NullsFound: A column lacks values.
    """
    lacking = {name: num for name, num in delivered_nulls(plan).items() if name in plan.columns}
    if lacking:
        listed = ", ".join(f"{num:,} of {plan.num_rows:,} samples have no {name!r}" for name, num in lacking.items())
        raise NullsFound(
            f"{listed}; pass missing='none' to get None for them, missing='skip' with columns= to leave these samples "
            "out, or select other columns. If the files have these parts, they may be out of order: those of a sample "
            "must follow each other in a tar (tar --sort=name)"
        )


def _format(files: FilesConfig, config: PlanConfig, name: str, missing: Missing, partitions: Sequence[str]) -> Format:
    found = formats.by_name(name, files.format_options)
    if isinstance(found, Sampled):
        parts = () if missing != "skip" else tuple(sorted(set(config.columns or ()) - set(partitions)))
        return found.requiring(parts)
    if missing != "raise":
        raise InvalidArgument(
            f"missing={missing!r} applies to samples of tar shards, and these files are {name}; use nulls= or filters=",
            field="missing",
        )
    if not isinstance(found, Guessing):
        return found
    decided = () if files.schema is None else files.schema.names
    return found.informed(decided=decided, is_chosen=config.columns is not None)


class StructuredDataset(Dataset):
    """Streams Parquet, ORC, CSV, JSON, Arrow or tar files as batches of columns, exact to the row."""

    @classmethod
    def create_dataloader(
        cls,
        path: Any,
        format: str | None = None,
        *,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        batch_bytes: int | str | None = None,
        length_column: str | None = None,
        length_buckets: bool = False,
        long_rows: LongRows = "raise",
        sequences: Sequences = "ragged",
        columns: Sequence[str] | None = None,
        filters: Any = None,
        partitioning: Literal["hive"] | None = "hive",
        shuffle: bool = False,
        shuffle_seed: int = 0,
        shuffle_buffer_size: int | None = DEFAULT_SHUFFLE_BUFFER_SIZE,
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
        decode: Mapping[str, Any] | Literal[False] | None = None,
        missing: Missing = "raise",
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
        shared_bytes: int | str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | str = DEFAULT_CACHE_BYTES,
        pin_memory: bool = False,
        cache: bool = True,
        name: str | None = None,
    ) -> tuple[Loader | PlainLoader, Self]:
        """Create a loader over files, and the dataset behind it, which has the plan, the state and the metrics.

        Args:
            path: A file, a directory (searched recursively), a glob or brace pattern, or a list of these, or URLs.
            format: parquet, orc, csv, json, jsonl, arrow, webdataset or huggingface (a directory of `save_to_disk`); by
                default it is guessed from the files.
            batch_size: Rows per batch on each rank; 1,024 by default.
            batch_tokens: Maximum tokens per batch on each rank, instead of a number of rows. See docs/token-batches.md.
            batch_bytes: The same in bytes; by default of all string and binary columns.
            length_column: The column with the length of a row: a list, or an integer that counts tokens or bytes. By
                default the only list column.
            length_buckets: Whether rows of similar length share a batch, which needs less padding.
            long_rows: What to do with rows that are longer than a batch: raise, skip or truncate.
            sequences: How lists of numbers are delivered: ragged, padded to the longest, or packed without padding.
            columns: The columns to deliver; all by default.
            filters: Rows to keep: a pyarrow expression, tuples as in pyarrow.parquet, or text such as `x > 3`.
            shuffle_buffer_size: Rows that are shuffled together, summed over all ranks; None is the default.
            split_bytes: Size of a split, the unit that a shuffle permutes, in bytes of the columns that are read.
            split_strategy: How row groups are assigned to workers: lpt, round_robin, size_balanced, or a function.
            num_workers: Decode threads, or processes with worker_type="process"; by default one per core, up to 8.
            output_format: The type of a batch: torch, numpy, arrow, pandas or dict.
            accelerator: An Accelerate `Accelerator`, which provides the rank and the device. By default `rank` and
                `num_ranks` do, or else torch.distributed, DeepSpeed, Horovod or the environment.
            collate_fn: Called with each batch; its result is delivered instead.
            decode: How binary columns are decoded: a function, the name of a decoder, or False for bytes, by column; or
                False for all columns. By default parts of tar shards are decoded by their extension, and others not.
            missing: What to do with samples of tar shards that lack a part: raise, skip (needs `columns`) or none.
            transform: Called with the decoded rows as a RecordBatch; must return the same number of rows.
            strings: How strings are delivered: python, codes or bytes, for all columns or by column.
            nulls: How nulls are delivered: error, fill, mask, keep, or a value, for all columns or by column.
            tail: What to do with rows that do not fill a batch on every rank: uneven, pad or drop.
            on_error: "skip" leaves out damaged or missing data and counts it.
            on_empty: "empty" returns a loader without batches if no row passes the filter, instead of raising NoData.
            lanes: Fixes the order for any number of ranks; by default it is chosen from them at an epoch's start.
            prefetch_bytes: Bytes that may be decoded ahead of the training loop; by default half of split_bytes per
                worker, and as much again.
            shared_bytes: Shares decoded row groups with the other processes of this machine that pass the same value,
                up to this size in shared memory: each is read and decoded once. See docs/data-sharing.md.
            cache_dir: Keeps the bytes of remote files on a local disk, for all processes and later runs.
            cache_bytes: Limit of `cache_dir`; the least recently used bytes make room.
            cache: Whether to keep the survey of the files for the next run.
            name: The name of the dataset in metrics; by default the path.

        Raises:
            NoData: There are no files or no rows.
            DataError, StorageError, InvalidArgument: Anything else; the message names the cause and the cure.
        """
        files = FilesConfig(
            path=path,
            format=format,
            partitioning=partitioning,
            filesystem=filesystem,
            storage_options=storage_options,
            format_options=format_options,
            schema=schema,
            schema_mode=schema_mode,
        )
        config = LoaderConfig(
            name=name or without_secrets(files.roots[0]),
            plan=PlanConfig(
                columns=columns,
                filters=filters,
                split_bytes=parse_bytes(split_bytes),
                split_rows=split_rows,
                on_error=on_error,
                on_empty=on_empty,
                cache=cache,
                show_progress=show_progress,
            ),
            order=OrderConfig.create(
                batch_size=batch_size,
                batch_tokens=batch_tokens,
                batch_bytes=batch_bytes,
                length_column=length_column,
                length_buckets=length_buckets,
                long_rows=long_rows,
                shuffle=shuffle,
                shuffle_seed=shuffle_seed,
                shuffle_buffer_size=shuffle_buffer_size,
                lanes=lanes,
                tail=tail,
            ),
            batch=BatchConfig(
                output_format=output_format or default_output_format(),
                strings=strings,
                string_width=string_width,
                nulls=nulls,
                decimals=decimals,
                vocabularies=vocabularies,
                max_vocabulary=max_vocabulary,
                transform=transform,
                collate_fn=collate_fn,
                decode=decode,
                missing=missing,
                sequences=sequences,
            ),
            runtime=RuntimeConfig.create(
                num_workers=num_workers,
                worker_type=worker_type,
                split_strategy=split_strategy,
                prefetch_bytes=prefetch_bytes,
                split_bytes=split_bytes,
                shared_bytes=shared_bytes,
                cache_dir=cache_dir,
                cache_bytes=cache_bytes,
            ),
        )
        return create(
            cls,
            lambda ranks: plan_files(files, config.plan, ranks, config.batch.missing),
            config,
            rank=rank,
            num_ranks=num_ranks,
            accelerator=accelerator,
            pin_memory=pin_memory,
        )
