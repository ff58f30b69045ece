"""Structured data for training: files, Iceberg and Delta tables, and Lance datasets as batches, exact to the row.

The modules here are the public datasets, their configuration and the loaders; the folders follow the path of the data:
`source` → `formats` → `plan` (or `iceberg`, `delta`, `lance`) → `order` → `runtime`, which uses `batch`. May
import `storage` and the modules below it, never `coordinator` or `checkpoint`. A name is imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from strata.errors import ConfigError

if TYPE_CHECKING:
    from strata.data.batch.output import PackedRows as PackedRows
    from strata.data.batch.output import PaddedRows as PaddedRows
    from strata.data.batch.output import RaggedRows as RaggedRows
    from strata.data.batch.vocabulary import Vocabulary as Vocabulary
    from strata.data.delta_dataset import DeltaDataset as DeltaDataset
    from strata.data.iceberg_dataset import IcebergDataset as IcebergDataset
    from strata.data.indexer import Indexed as Indexed
    from strata.data.indexer import index_shards as index_shards
    from strata.data.lance_dataset import LanceDataset as LanceDataset
    from strata.data.mixer import Mix as Mix
    from strata.data.mixer import MixMetrics as MixMetrics
    from strata.data.mixer import SourceMetrics as SourceMetrics
    from strata.data.mixer import mix as mix
    from strata.data.order.assignment import Task as Task
    from strata.data.order.bins import padding_waste as padding_waste
    from strata.data.packer import PackedShard as PackedShard
    from strata.data.packer import pack as pack
    from strata.data.plan.plan import Plan as Plan
    from strata.data.runtime.metrics import LoaderMetrics as LoaderMetrics
    from strata.data.runtime.metrics import WorkerMetrics as WorkerMetrics
    from strata.data.runtime.metrics import between as between
    from strata.data.structured import StructuredDataset as StructuredDataset

_HOMES = {
    "delta_dataset": ("DeltaDataset",),
    "iceberg_dataset": ("IcebergDataset",),
    "indexer": ("Indexed", "index_shards"),
    "lance_dataset": ("LanceDataset",),
    "mixer": ("Mix", "MixMetrics", "SourceMetrics", "mix"),
    "packer": ("PackedShard", "pack"),
    "runtime.metrics": ("LoaderMetrics", "WorkerMetrics", "between"),
    "batch.output": ("PackedRows", "PaddedRows", "RaggedRows"),
    "plan.plan": ("Plan",),
    "order.assignment": ("Task",),
    "order.bins": ("padding_waste",),
    "structured": ("StructuredDataset",),
    "batch.vocabulary": ("Vocabulary",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [*sorted(_HOME_OF)]  # noqa: PLE0604 - they are strings


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'strata.data' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"strata.data.{_HOME_OF[name]}")
    except ModuleNotFoundError as error:
        if error.name not in ("pyarrow", "fsspec"):
            raise
        raise ConfigError(
            f"strata.data needs the package {error.name}; install it with: pip install 'strata-runtime[data]'"
        ) from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
