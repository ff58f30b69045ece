"""The worker's side of a run: `strata.init()`, its context with data, checkpoints and coordinator in a few calls.

`context` is what a script uses, `membership` its connection to the coordinator, `orchestrator` the same calls without a
run. It may import `launch` and everything below, and starts no processes itself except through `launch`. A name is
loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata.train.context import Context as Context
    from strata.train.context import Progress as Progress
    from strata.train.orchestrator import TrainingOrchestrator as TrainingOrchestrator
    from strata.train.startup import init as init

_HOMES = {
    "Context": "context",
    "Progress": "context",
    "TrainingOrchestrator": "orchestrator",
    "init": "startup",
}

__all__ = [*sorted(_HOMES)]  # noqa: PLE0604 - they are strings


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'strata.train' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"strata.train.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
