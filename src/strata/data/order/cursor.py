"""The cursor: the whole state of a loader, the same on every rank.

The state contains no buffer. Three ranks can save a state and five can load it: each computes from these numbers which
rows are left and which of them it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from strata.data.order.order import MAX_LANES, MAX_SEED
from strata.errors import InvalidArgument, PlanChanged

VERSION = 1
VERSION_OF_CUTS = 2
"""Version of states with `cuts`: an older version of Strata would ignore them and deliver other rows."""
MAX_COUNT = 1 << 53
_LIMITS = {
    "seed": MAX_SEED,
    "epoch": MAX_COUNT,
    "position": MAX_COUNT,
    "num_rows": MAX_COUNT,
    "lanes": MAX_LANES,
    "window": MAX_COUNT,
}


class Cuts(msgspec.Struct, frozen=True, kw_only=True):
    """How rows are cut into batches by bytes or tokens (`bins.py`). A position means other rows with other cuts."""

    unit: str
    limit: int
    columns: list[str]
    """The columns that decide the length of a row."""
    lengths: str
    """A hash of the lengths of all rows."""
    padded: bool
    length_buckets: bool
    long_rows: str
    tracks: int
    """Chosen at the start of an epoch, like `lanes`."""


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """A position in an epoch. The field names are the keys of `state_dict()`."""

    fingerprint: str
    """Identifies the plan that the position refers to."""
    seed: int
    shuffle: bool
    epoch: int
    position: int
    """Rows of the epoch delivered so far, summed over all ranks."""
    num_rows: int
    """Rows of an epoch."""
    lanes: int
    window: int
    """Rows of one lane's part of the shuffle buffer; 0 without shuffle. Constant within an epoch, like `lanes`."""
    plan: dict[str, Any] = {}
    """A summary of the plan, so that an error can name what changed."""
    cuts: Cuts | None = None
    """None: batches have a fixed number of rows."""
    version: int = VERSION
    """Always written; `read_cursor` refuses a state without it."""

    def to_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = msgspec.to_builtins(self)
        if self.cuts is None:
            del state["cuts"]
        return state


def check_version(state: Any, *, newest: int) -> None:
    """Check that this version of Strata, or an older one, wrote the state.

    Raises:
        InvalidArgument: The state is not a mapping, or no version of Strata wrote it.
        PlanChanged: A newer version of Strata wrote it.
    """
    if not isinstance(state, Mapping):
        raise InvalidArgument(
            f"state is a {type(state).__name__}, not a mapping; pass what state_dict() returned", field="state"
        )
    version = state.get("version")
    if isinstance(version, int) and version > newest:
        raise PlanChanged(
            f"the state has version {version}, and this version of Strata reads up to {newest}; upgrade Strata"
        )
    if version is None or (isinstance(version, int) and version < 1):
        found = "no version" if version is None else f"version {version}"
        raise InvalidArgument(
            f"the state has {found}, so it is not from a loader's state_dict(); load the dictionary as it was saved, "
            "or start an epoch with set_epoch()",
            field="state",
        )


def read_cursor(state: Mapping[str, Any]) -> Cursor:
    """Parse a loader's `state_dict()`.

    Raises:
        InvalidArgument: It is not the state of a loader, or its numbers are impossible.
        PlanChanged: A newer version of Strata wrote it.
    """
    check_version(state, newest=VERSION_OF_CUTS)
    try:
        cursor = msgspec.convert(dict(state), Cursor, strict=True)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidArgument(
            f"this is not a loader's state_dict() ({error}); if a mix saved it, load it into a mix of the same sources",
            field="state",
        ) from error
    for name, limit in _LIMITS.items():
        count = getattr(cursor, name)
        if not 0 <= count <= limit:
            raise InvalidArgument(f"the state has {name}={count}, which is not from 0 to {limit}", field="state")
    if cursor.lanes < 1 or cursor.position > cursor.num_rows or (cursor.shuffle and cursor.window < 1):
        raise InvalidArgument(
            f"the numbers of the state contradict each other: position {cursor.position} of {cursor.num_rows} rows, "
            f"{cursor.lanes} lanes, window {cursor.window}",
            field="state",
        )
    if (cuts := cursor.cuts) is not None and (cuts.tracks < 1 or cursor.lanes % cuts.tracks):
        raise InvalidArgument(
            f"the state has {cursor.lanes} lanes in {cuts.tracks} tracks, which is impossible", field="state"
        )
    if cursor.version != (VERSION if cuts is None else VERSION_OF_CUTS):
        raise InvalidArgument(
            f"the state has version {cursor.version} {'without' if cuts is None else 'with'} cuts, which no version of "
            "Strata writes; load the dictionary as it was saved",
            field="state",
        )
    return cursor
