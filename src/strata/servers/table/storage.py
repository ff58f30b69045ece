"""`Storage`: weights and optimizer state by slot, the first slots in memory and the others in a file.

Both are arrays, so an update works on either. Rows that were pushed move to memory, in exchange for those without a
gradient for longest; a row has the same values wherever it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from strata.servers.table.memory import reserve
from strata.servers.table.snapshot import FILE, MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from mmap import mmap

    from numpy.typing import NDArray

    from strata.servers.table.index import Slots
    from strata.servers.table.optimizers import Rows
    from strata.servers.table.snapshot import Counts

    MapFile: TypeAlias = Callable[[int], mmap | bytearray]
    Positions: TypeAlias = slice | NDArray[np.int64]

_VICTIMS_FRACTION = 16
"""Looking for the oldest rows passes over all of them, so one in 16 is noted at a time."""


class Range(NamedTuple):
    """Consecutive slots."""

    name: str
    start: int
    weights: Rows
    state: Rows


class Share(NamedTuple):
    """Those of some slots that are in one range."""

    range: Range
    positions: Positions
    """Where they are among all."""
    slots: Slots
    """From the start of the range."""


class Storage:
    """Weights and state of `num_slots` slots, of which the first `num_in_memory` are in memory."""

    def __init__(
        self, num_slots: int, num_in_memory: int, *, width: int, state_width: int, map_file: MapFile | None
    ) -> None:
        self.num_in_memory = num_in_memory
        weights, state = ((num_in_memory, each) for each in (width, state_width))
        self.ranges = [Range(MEMORY, 0, reserve(weights, np.float32), reserve(state, np.float32))]
        if map_file is not None and num_in_memory < num_slots:
            num = num_slots - num_in_memory
            numbers: Rows = np.frombuffer(map_file(4 * num * (width + state_width)), np.float32)
            in_file = numbers[: num * width].reshape(num, width), numbers[num * width :].reshape(num, state_width)
            self.ranges.append(Range(FILE, num_in_memory, *in_file))
        self._victims: Slots = np.empty(0, np.int32)
        self._victim_versions: Counts = np.empty(0, np.uint32)

    @property
    def memory(self) -> Range:
        return self.ranges[0]

    def shares(self, slots: Slots) -> Iterator[Share]:
        """Split slots by range. Ranges without any are left out."""
        if len(self.ranges) == 1:
            yield Share(self.memory, slice(None), slots)
            return
        is_in_file = slots >= self.num_in_memory
        for each, is_here in zip(self.ranges, (~is_in_file, is_in_file), strict=True):
            positions = np.flatnonzero(is_here)
            if len(positions):
                yield Share(each, positions, slots[positions] - np.int32(each.start))

    def read(self, slots: Slots) -> tuple[Rows, Rows]:
        """Return a copy of the weights and the state of these slots."""
        weights, state = (np.empty((len(slots), each.shape[1]), np.float32) for each in self.memory[2:])
        for part, positions, own in self.shares(slots):
            weights[positions], state[positions] = part.weights[own], part.state[own]
        return weights, state

    def write(self, slots: Slots, weights: Rows, state: Rows) -> None:
        for part, positions, own in self.shares(slots):
            part.weights[own], part.state[own] = weights[positions], state[positions]

    def swap(self, in_file: Slots, in_memory: Slots) -> None:
        """Exchange the content of as many slots in the file and in memory."""
        slots, places = np.concatenate([in_file, in_memory]), np.concatenate([in_memory, in_file])
        self.write(places, *self.read(slots))

    def victims(self, num: int, pushed: Slots, used: NDArray[np.uint8], versions: Counts) -> Slots:
        """Return up to `num` slots of rows in memory without a gradient for longest, and none of `pushed`."""
        chosen = self._take(num, pushed, used, versions)
        if len(chosen) == num:
            return chosen
        is_candidate = used[: self.num_in_memory] == 1
        is_candidate[pushed[pushed < self.num_in_memory]] = False
        is_candidate[chosen] = False
        slots = np.flatnonzero(is_candidate).astype(np.int32)
        most = max(num, self.num_in_memory // _VICTIMS_FRACTION)
        if len(slots) > most:
            slots = slots[np.argpartition(versions[slots], most)[:most]]
        self._victims = slots[np.lexsort((slots, versions[slots]))]
        self._victim_versions = versions[self._victims]
        return np.concatenate([chosen, self._take(num - len(chosen), pushed, used, versions)])

    def _take(self, num: int, pushed: Slots, used: NDArray[np.uint8], versions: Counts) -> Slots:
        """Take noted slots, except those whose row was removed or has changed since."""
        is_due = (used[self._victims] == 1) & (versions[self._victims] == self._victim_versions)
        is_due &= ~np.isin(self._victims, pushed)
        due = np.flatnonzero(is_due)[:num]
        chosen = self._victims[due]
        num_passed = int(due[-1]) + 1 if len(due) == num and num else len(self._victims)
        self._victims, self._victim_versions = self._victims[num_passed:], self._victim_versions[num_passed:]
        return chosen
