"""`IcebergDataset`: one snapshot of an Iceberg table to a loader. Only the planning differs from `structured.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from strata.config import parse_bytes
from strata.data import formats
from strata.data.config import (
    DEFAULT_CACHE_BYTES,
    DEFAULT_SHUFFLE_BUFFER_SIZE,
    BatchConfig,
    LoaderConfig,
    OrderConfig,
    PlanConfig,
    RuntimeConfig,
    default_output_format,
)
from strata.data.dataset import Dataset
from strata.data.iceberg import plan_table, table_state
from strata.data.loader import create
from strata.data.plan import cache as survey_cache
from strata.data.plan.probe import SurveyProgress
from strata.data.ranks import share
from strata.data.runtime.decoder import Recipe

if TYPE_CHECKING:
    import datetime as dt
    import os
    from collections.abc import Callable, Mapping, Sequence

    from strata.data.config import LongRows, OnEmpty, OnError, OutputFormat, Sequences, WorkerType
    from strata.data.loader import PlainLoader
    from strata.data.order.assignment import Strategy
    from strata.data.order.steps import Tail
    from strata.data.torch import Loader
    from strata.identity import Identity


class IcebergDataset(Dataset):
    """Streams one snapshot of an Iceberg table as batches of columns, exact to the row."""

    @classmethod
    def create_dataloader(
        cls,
        table: Any,
        catalog_config: Mapping[str, Any] | None = None,
        *,
        scan_filter: Any = None,
        filters: Any = None,
        snapshot_id: int | None = None,
        as_of: dt.datetime | str | int | None = None,
        columns: Sequence[str] | None = None,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        batch_bytes: int | str | None = None,
        length_column: str | None = None,
        length_buckets: bool = False,
        long_rows: LongRows = "raise",
        sequences: Sequences = "ragged",
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
        transform: Callable[[Any], Any] | None = None,
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
        """Create a loader over one snapshot of a table. `StructuredDataset` documents the other arguments.

        Args:
            table: Its name in the catalog (`db.clicks`), the path of its `….metadata.json`, or a pyiceberg table.
            catalog_config: The arguments of `pyiceberg.catalog.load_catalog`, and `name`; by default pyiceberg's own.
            scan_filter: Rows to keep, as text or as a pyiceberg expression.
            filters: Rows to keep, as for `StructuredDataset`; a row must pass both filters.
            snapshot_id: The snapshot to read, with the schema of that snapshot.
            as_of: The time whose current snapshot to read, instead of `snapshot_id`.

        Raises:
            NoData: There are no rows.
            DataError, StorageError, InvalidArgument: Anything else; the message names the cause and the cure.
        """
        config = LoaderConfig(
            name=name or _name_of(table),
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

        def look() -> bytes:
            found = table_state(table, catalog_config, snapshot_id=snapshot_id, as_of=as_of)
            return msgspec.json.encode((found.snapshot_id, found.schema_id))

        def plan(ranks: Identity) -> Recipe:
            # All ranks read the snapshot that rank 0 found, even if the table is written meanwhile.
            snapshot, schema = msgspec.json.decode(share(ranks, look), type=tuple[int, int])
            with SurveyProgress(is_shown=show_progress) as progress:
                source, planned = plan_table(
                    table,
                    catalog_config,
                    columns=columns,
                    scan_filter=scan_filter,
                    filters=filters,
                    snapshot_id=snapshot,
                    schema_id=schema,
                    split_bytes=config.plan.split_bytes,
                    split_rows=split_rows,
                    on_error=on_error,
                    on_empty=on_empty,
                    cache=survey_cache.default() if cache else None,
                    progress=progress,
                )
            used = {file.format for file in planned.files}
            return Recipe(source, planned, {format: formats.by_name(format) for format in used})

        return create(
            cls,
            plan,
            config,
            rank=rank,
            num_ranks=num_ranks,
            accelerator=accelerator,
            pin_memory=pin_memory,
        )


def _name_of(table: Any) -> str:
    """Return the name of a table that the user named or opened."""
    return table if isinstance(table, str) else ".".join(table.name())
