"""`Snapshot`: the content of a table by slot, for checkpoints.

Its arrays are those of the table: nothing is copied or sorted. Their length is rounded up, so that it rarely changes
while a table grows: an incremental save then writes the slots that changed, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from strata.servers.table.index import Slots
    from strata.servers.table.keys import Keys
    from strata.servers.table.optimizers import Rows

    Counts = NDArray[np.uint32]

MEMORY = "memory"
FILE = "file"
"""The parts of a snapshot: slots in memory, and those in a file, once there are any."""
_FEWEST_SLOTS = 1_024
_STEPS = 8
"""Lengths between a power of two and the next."""


def padded(num_slots: int) -> int:
    """Return the length of the arrays for as many slots: at most an eighth more, and at least 1,024."""
    if num_slots <= _FEWEST_SLOTS:
        return _FEWEST_SLOTS
    step = (1 << (num_slots - 1).bit_length()) // (2 * _STEPS)
    return -(-num_slots // step) * step


class Saved(NamedTuple):
    """Rows with everything that belongs to them."""

    keys: Keys
    weights: Rows
    state: Rows
    versions: Counts
    counts: Counts


class Part(NamedTuple):
    """Consecutive slots. Those that are not `used` hold nothing."""

    keys: Keys
    weights: Rows
    state: Rows
    versions: Counts
    counts: Counts
    used: NDArray[np.uint8]

    def at(self, slots: Slots | NDArray[np.int64]) -> Saved:
        """Return a copy of the rows at these positions."""
        return Saved(self.keys[slots], self.weights[slots], self.state[slots], self.versions[slots], self.counts[slots])


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Views of the arrays of a table: copy or save them before the table changes."""

    parts: Mapping[str, Part]
    num_updates: int
    seen: NDArray[np.uint8] | None = None
    """Counts of keys that are not admitted yet, if the table counts them."""
    mark: int = 0
    """For `Table.dirty_slots`, to find what changed after this snapshot."""

    def tree(self) -> dict[str, Any]:
        """Return the content as nested dictionaries of arrays, as checkpoints save them. Empty arrays are left out."""
        parts = {
            name: {field: array for field, array in part._asdict().items() if array.size or array.ndim == 1}
            for name, part in self.parts.items()
        }
        seen = {} if self.seen is None else {"seen": self.seen}
        return {"parts": parts, "num_updates": self.num_updates, **seen}

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Snapshot:
        """Return the snapshot of a `tree`.

        Raises:
            InvalidArgument: It does not have the arrays of a snapshot.
        """
        try:
            parts = {name: _part(arrays) for name, arrays in tree["parts"].items()}
            return cls(parts=parts, num_updates=int(tree["num_updates"]), seen=tree.get("seen"))
        except KeyError as error:
            raise InvalidArgument(f"this is not the snapshot of a table: it has no {error}", field="tree") from None

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts.values())


def _part(arrays: Mapping[str, Any]) -> Part:
    no_state = np.empty((len(arrays["keys"]), 0), np.float32)
    part = Part(*({"state": no_state, **arrays}[field] for field in Part._fields))
    lengths = {field: len(array) for field, array in part._asdict().items()}
    if len(set(lengths.values())) > 1:
        raise InvalidArgument(f"the arrays of a snapshot differ in length: {lengths}", field="tree")
    return part
