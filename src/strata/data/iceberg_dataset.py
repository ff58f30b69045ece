"""`IcebergDataset`: an Iceberg table through the same loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import msgspec

from strata.data import formats
from strata.data.config import check_on_empty
from strata.data.dataset import Dataset
from strata.data.iceberg import plan_table, table_state
from strata.data.loader import Options, create
from strata.data.plan import cache as survey_cache
from strata.data.plan.progress import SurveyProgress
from strata.data.ranks import share
from strata.data.runtime.decoder import Recipe

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Mapping, Sequence

    from strata.data.config import OnEmpty, OnError, OutputFormat, WorkerType
    from strata.data.order.assignment import Strategy
    from strata.data.order.steps import Tail
    from strata.data.plain_loader import PlainLoader
    from strata.data.torch import Loader
    from strata.identity import Identity


class IcebergDataset(Dataset):
    """An Iceberg table as batches of columns: one snapshot of it, exact to the row."""

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
        batch_size: int = 1024,
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
        """A loader over one snapshot of a table. What is not listed is as for `StructuredDataset`.

        Args:
            table: Its name in the catalog (`db.clicks`), the path of its `….metadata.json`, or a table of pyiceberg.
            catalog_config: What `pyiceberg.catalog.load_catalog` takes, and `name`; left out, pyiceberg's own.
            scan_filter: Rows to keep, as text or as pyiceberg has it.
            filters: Rows to keep, as for `StructuredDataset`; with both, rows must pass both.
            snapshot_id: Read this state of the table, with the schema that it had.
            as_of: Or the one that was current then.

        Raises:
            NoData: There are no rows.
            DataError, StorageError, InvalidArgument: Something else is wrong; the message says what, and the cure.
        """

        check_on_empty(on_empty)

        def look() -> bytes:
            found = table_state(table, catalog_config, snapshot_id=snapshot_id, as_of=as_of)
            return msgspec.json.encode((found.snapshot_id, found.schema_id))

        def plan(ranks: Identity) -> Recipe:
            # All ranks read the state that rank 0 saw, whatever is written to the table meanwhile.
            snapshot, schema = msgspec.json.decode(share(ranks, look), type=tuple[int, int])
            with SurveyProgress(is_shown=show_progress) as progress:
                source, made = plan_table(
                    table,
                    catalog_config,
                    columns=columns,
                    scan_filter=scan_filter,
                    filters=filters,
                    snapshot_id=snapshot,
                    schema_id=schema,
                    split_bytes=split_bytes,
                    split_rows=split_rows,
                    on_error=on_error,
                    on_empty=on_empty,
                    cache=survey_cache.default() if cache else None,
                    progress=progress,
                )
            used = {file.format for file in made.files}
            return Recipe(source, made, {format: formats.by_name(format) for format in used})

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
            name=name or _name_of(table),
        )
        return create(cls, plan, options)


def _name_of(table: Any) -> str:
    """Of a table that the user named, or has opened."""
    return table if isinstance(table, str) else ".".join(table.name())
