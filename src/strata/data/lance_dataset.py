"""`LanceDataset`: one version of a Lance dataset to a loader. Only finding the files differs from `structured.py`."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

from strata.config import parse_bytes
from strata.data.config import (
    DEFAULT_SHUFFLE_BUFFER_SIZE,
    BatchConfig,
    LoaderConfig,
    OrderConfig,
    PlanConfig,
    RuntimeConfig,
    default_output_format,
)
from strata.data.dataset import Dataset
from strata.data.lance import DatasetVersion, plan_dataset
from strata.data.loader import create
from strata.data.ranks import share
from strata.data.runtime.decoder import Recipe
from strata.data.source.source import without_secrets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from strata.data.config import LongRows, OnEmpty, OnError, OutputFormat, Sequences, WorkerType
    from strata.data.loader import PlainLoader
    from strata.data.order.assignment import Strategy
    from strata.data.order.steps import Tail
    from strata.data.torch import Loader
    from strata.identity import Identity


class LanceDataset(Dataset):
    """Streams one version of a Lance dataset as batches of columns, exact to the row."""

    @classmethod
    def create_dataloader(
        cls,
        uri: str | os.PathLike[str],
        *,
        version: int | None = None,
        tag: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        filters: Any = None,
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
        pin_memory: bool = False,
        cache: bool = True,
        name: str | None = None,
    ) -> tuple[Loader | PlainLoader, Self]:
        """Create a loader over one version of a dataset. `StructuredDataset` documents the other arguments.

        Args:
            uri: The directory of the dataset: a local path, or a URL such as `s3://bucket/images.lance`.
            version: The version to read, with its schema; by default the latest.
            tag: The tag whose version to read, instead of `version`.
            storage_options: For object stores: region, endpoint, credentials.
            filters: Rows to keep. Lance has no statistics for them, so their columns are read of every row.

        Raises:
            NoData: There are no rows.
            ConfigError: The package pylance is not installed.
            DataError, StorageError, InvalidArgument: Anything else; the message names the cause and the cure.
        """
        location = os.fspath(uri)
        config = LoaderConfig(
            name=name or without_secrets(location),
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
            ),
        )

        selected = DatasetVersion(location, version, tag, storage_options or {})

        def plan(ranks: Identity) -> Recipe:
            source, planned, format = plan_dataset(selected, config.plan, partial(share, ranks))
            return Recipe(source, planned, {format.name: format})

        return create(
            cls,
            plan,
            config,
            rank=rank,
            num_ranks=num_ranks,
            accelerator=accelerator,
            pin_memory=pin_memory,
        )
