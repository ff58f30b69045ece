"""Where an epoch stands: the whole state of a loader, the same on every rank.

No buffer is part of it. A state that was saved by three ranks is loaded by five: each of them works out what is left,
and who reads it, from these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from strata.data.order.order import MAX_LANES, MAX_SEED
from strata.errors import InvalidArgument, PlanChanged

VERSION = 1
MAX_COUNT = 1 << 53
_LIMITS = {
    "seed": MAX_SEED,
    "epoch": MAX_COUNT,
    "position": MAX_COUNT,
    "num_rows": MAX_COUNT,
    "lanes": MAX_LANES,
    "window": MAX_COUNT,
}


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    fingerprint: str
    """Of the plan that positions belong to."""
    seed: int
    shuffle: bool
    epoch: int
    position: int
    """Rows of the epoch that all ranks together have been given."""
    num_rows: int
    """Of an epoch."""
    lanes: int
    window: int
    """Of a lane; 0 when rows are not shuffled. This and `lanes` stay as they are until the epoch ends."""
    plan: dict[str, Any] = {}
    """What the plan was made of, so that a change can be named."""
    version: int = VERSION
    """Always written; `read_cursor` refuses a state without it."""

    def to_dict(self) -> dict[str, Any]:
        made: dict[str, Any] = msgspec.to_builtins(self)
        return made


def check_version(state: Any, *, newest: int) -> None:
    """Refuse a state that no version of Strata, or only a newer one, can have written.

    Raises:
        InvalidArgument: It is not a mapping, or its version never existed.
        PlanChanged: A newer version of Strata wrote it.
    """
    if not isinstance(state, Mapping):
        raise InvalidArgument(f"a loader's state is a mapping, not {type(state).__name__}", field="state")
    version = state.get("version")
    if isinstance(version, int) and version > newest:
        raise PlanChanged(f"the state has version {version}, and this Strata knows up to {newest}; upgrade it")
    if version is None or (isinstance(version, int) and version < 1):
        found = "no version" if version is None else f"version {version}"
        raise InvalidArgument(
            f"the state has {found}, so no loader's state_dict() gave it; load the dictionary as it was saved, or "
            "begin an epoch with set_epoch()",
            field="state",
        )


def read_cursor(state: Mapping[str, Any]) -> Cursor:
    """
    Raises:
        InvalidArgument: It is no state of a loader, or its numbers cannot be.
        PlanChanged: A newer version of Strata wrote it.
    """
    check_version(state, newest=VERSION)
    try:
        cursor = msgspec.convert(dict(state), Cursor, strict=True)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidArgument(f"this is not what a loader's state_dict() gives: {error}", field="state") from error
    for name, limit in _LIMITS.items():
        count = getattr(cursor, name)
        if not 0 <= count <= limit:
            raise InvalidArgument(f"the state's {name} is {count}; it must be from 0 to {limit}", field="state")
    if cursor.lanes < 1 or cursor.position > cursor.num_rows or (cursor.shuffle and cursor.window < 1):
        raise InvalidArgument(
            f"the state's numbers contradict each other: position {cursor.position} of {cursor.num_rows} rows, "
            f"{cursor.lanes} lanes, window {cursor.window}",
            field="state",
        )
    return cursor
