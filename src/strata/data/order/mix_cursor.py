"""The cursor of a mix: its whole state, the same on every rank."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from strata.data.order.cursor import MAX_COUNT, Cursor, check_version
from strata.data.order.mixture import MAX_ROWS
from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION = 1


class MixCursor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A position in a mix. The field names are the keys of `state_dict()`."""

    kind: Literal["mix"] = "mix"
    epoch: int
    position: int
    """Rows of the mix delivered so far, in all epochs and summed over all ranks."""
    mix_by: Literal["row", "batch"]
    batch_rows: int
    """Rows of a global batch."""
    weights: dict[str, float]
    since: int
    """Position at which the mix began, or from which these weights apply."""
    sources: dict[str, Cursor]
    """Each source at the position `since`; where it is now follows from the weights."""
    version: int = VERSION
    """Always written; `read_mix_cursor` refuses a state without it."""

    def to_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = msgspec.to_builtins(self)
        return state


def read_mix_cursor(state: Mapping[str, Any]) -> MixCursor:
    """Parse the `state_dict()` of a mix.

    Raises:
        InvalidArgument: It is not the state of a mix, or its numbers are impossible.
        PlanChanged: A newer version of Strata wrote it.
    """
    check_version(state, newest=VERSION)
    try:
        cursor = msgspec.convert(dict(state), MixCursor, strict=True)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidArgument(
            f"this is not the state of a mix ({error}); if another loader saved it, give each loader its own name",
            field="state",
        ) from error
    if (
        not 0 <= cursor.since <= cursor.position <= MAX_ROWS
        or not 0 <= cursor.epoch <= MAX_COUNT
        or not 1 <= cursor.batch_rows <= MAX_COUNT
        or not cursor.weights
        or not all(0 < weight < math.inf for weight in cursor.weights.values())
        or cursor.weights.keys() != cursor.sources.keys()
    ):
        raise InvalidArgument(
            f"the numbers of the state contradict each other: epoch {cursor.epoch}, position {cursor.position} since "
            f"{cursor.since}, {cursor.batch_rows} rows per batch, weights {cursor.weights}; load the dictionary as it "
            "was saved",
            field="state",
        )
    return cursor
