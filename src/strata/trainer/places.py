"""Where a fit keeps its checkpoints.

By default each fit has its own new directory, `checkpoints/<script>/<name>`, so that a new fit never continues or mixes
with an old one by accident; `resume=True` continues the newest. A directory that the user names is used as it is.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.checkpoint import CheckpointManager
from strata.clock import SystemClock
from strata.errors import InvalidArgument
from strata.launch.record.directory import new_name

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)

ROOT = "checkpoints"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")
_MAX_NAME = 63


def choose(
    named: str | os.PathLike[str] | None,
    *,
    resume: bool,
    is_worker: bool,
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """Return the directory or URL for a fit.

    Args:
        is_worker: The launcher of this process has chosen a place.

    Raises:
        InvalidArgument: The named place has checkpoints, and the fit does not resume; or it cannot be a directory.
    """
    if is_worker:
        return "" if named is None else os.fspath(named)
    if named is not None:
        place = os.fspath(named)
        if "://" not in place:
            _make_directory(place)
        step = _last_step(place, storage_options)
        if step is not None and not resume:
            raise InvalidArgument(
                f"checkpoints={place!r} has a checkpoint of step {step}; pass resume=True to continue from it, or name "
                "another directory",
                field="checkpoints",
            )
        return place
    root = Path(ROOT).absolute() / _script()
    if resume:
        found = sorted((each for each in root.glob("*") if each.is_dir()), key=lambda each: each.stat().st_mtime_ns)
        newest = next((each for each in reversed(found) if _last_step(str(each)) is not None), None)
        if newest is not None:
            return str(newest)
        log.warning("resume=True, but %s has no checkpoint; starting from the beginning", root)
    return str(root / new_name(SystemClock()))


def _make_directory(place: str) -> None:
    """Create a directory now: the first save may be hours away."""
    try:
        Path(place).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(
            f"checkpoints={place!r} cannot be created as a directory ({error.strerror}); name another one",
            field="checkpoints",
        ) from error


def _script() -> str:
    path = Path(sys.argv[0])
    name = _NOT_IN_NAMES.sub("-", path.parent.name if path.stem == "__main__" else path.stem).lstrip("-._")[:_MAX_NAME]
    return name or "session"


def _last_step(place: str, storage_options: Mapping[str, Any] | None = None) -> int | None:
    if "://" not in place and not Path(place).is_dir():
        return None
    with CheckpointManager(place, storage_options=storage_options) as manager:
        latest = manager.latest()
    return None if latest is None else latest.step
