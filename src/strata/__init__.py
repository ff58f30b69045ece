"""Strata: distributed PyTorch and JAX training that survives failures.

Importing this package binds names and does nothing else; a module is imported when one of its names is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from strata._version import __version__

if TYPE_CHECKING:
    from strata.checkpoint import AsyncCheckpointManager as AsyncCheckpointManager
    from strata.checkpoint import CheckpointManager as CheckpointManager
    from strata.checkpoint import CheckpointMetadata as CheckpointMetadata
    from strata.checkpoint import CheckpointType as CheckpointType
    from strata.coordinator.client import AsyncCoordinatorClient as AsyncCoordinatorClient
    from strata.coordinator.client import CoordinatorClient as CoordinatorClient
    from strata.coordinator.registry import DatasetRegistry as DatasetRegistry
    from strata.data import DeltaDataset as DeltaDataset
    from strata.data import IcebergDataset as IcebergDataset
    from strata.data import LanceDataset as LanceDataset
    from strata.data import StructuredDataset as StructuredDataset
    from strata.errors import StrataError as StrataError
    from strata.train import Context as Context
    from strata.train import TrainingOrchestrator as TrainingOrchestrator
    from strata.train import init as init
    from strata.trainer.trainer import Trainer as Trainer
    from strata.tune.space import SearchSpace as SearchSpace
    from strata.tune.study import Study as Study

_HOMES = {
    "AsyncCheckpointManager": "strata.checkpoint",
    "AsyncCoordinatorClient": "strata.coordinator.client",
    "CheckpointManager": "strata.checkpoint",
    "CheckpointMetadata": "strata.checkpoint",
    "CheckpointType": "strata.checkpoint",
    "Context": "strata.train",
    "CoordinatorClient": "strata.coordinator.client",
    "DatasetRegistry": "strata.coordinator.registry",
    "DeltaDataset": "strata.data",
    "IcebergDataset": "strata.data",
    "LanceDataset": "strata.data",
    "SearchSpace": "strata.tune.space",
    "StrataError": "strata.errors",
    "StructuredDataset": "strata.data",
    "Study": "strata.tune.study",
    "Trainer": "strata.trainer.trainer",
    "TrainingOrchestrator": "strata.train",
    "init": "strata.train",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 (the keys are strings)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'strata' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
