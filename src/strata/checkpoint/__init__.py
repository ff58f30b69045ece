"""Checkpoints: saved in the background, never half there, readable by everybody."""

from __future__ import annotations

from strata.checkpoint.manager import CheckpointManager
from strata.checkpoint.manifest import CheckpointType
from strata.checkpoint.metadata import CheckpointMetadata
from strata.checkpoint.retention import KeepBest, KeepCount, KeepEvery
from strata.checkpoint.saving import Save

__all__ = ["CheckpointManager", "CheckpointMetadata", "CheckpointType", "KeepBest", "KeepCount", "KeepEvery", "Save"]
