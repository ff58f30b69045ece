"""Checkpoints: saved in the background, committed atomically, stored as safetensors files that other tools can read.

Start with `manager.py`. `format/` is the file format; `save/`, `saver/` and `load/` are the two directions; `group/`
holds the commit; `tools/` and `adapters/` build on them. May import `storage` and the modules below it, never
`coordinator` or `data`. Names are imported on first use, because the saver process needs few of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata.checkpoint.aio import AsyncCheckpointManager as AsyncCheckpointManager
    from strata.checkpoint.catalog import CheckpointMetadata as CheckpointMetadata
    from strata.checkpoint.format.manifest import CheckpointType as CheckpointType
    from strata.checkpoint.format.shards import Shard as Shard
    from strata.checkpoint.group.ranks import Ranks as Ranks
    from strata.checkpoint.handle import Save as Save
    from strata.checkpoint.manager import CheckpointManager as CheckpointManager
    from strata.checkpoint.policy import Adaptive as Adaptive
    from strata.checkpoint.policy import AnyOf as AnyOf
    from strata.checkpoint.policy import Decision as Decision
    from strata.checkpoint.policy import EverySeconds as EverySeconds
    from strata.checkpoint.policy import EverySteps as EverySteps
    from strata.checkpoint.policy import History as History
    from strata.checkpoint.policy import Manual as Manual
    from strata.checkpoint.retention import KeepBest as KeepBest
    from strata.checkpoint.retention import KeepCount as KeepCount
    from strata.checkpoint.retention import KeepEvery as KeepEvery
    from strata.checkpoint.save.dirty_rows import RowTracker as RowTracker
    from strata.checkpoint.tools.progress import Progress as Progress

_HOMES = {
    "aio": ("AsyncCheckpointManager",),
    "manager": ("CheckpointManager",),
    "format.manifest": ("CheckpointType",),
    "catalog": ("CheckpointMetadata",),
    "tools.progress": ("Progress",),
    "group.ranks": ("Ranks",),
    "retention": ("KeepBest", "KeepCount", "KeepEvery"),
    "handle": ("Save",),
    "format.shards": ("Shard",),
    "policy": ("Adaptive", "AnyOf", "Decision", "EverySeconds", "EverySteps", "History", "Manual"),
    "save.dirty_rows": ("RowTracker",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [*sorted(_HOME_OF)]  # noqa: PLE0604 - strings


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'strata.checkpoint' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"strata.checkpoint.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
