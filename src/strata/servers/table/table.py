"""`Table`: the rows of one table on one server.

A pull only reads: a key without a row has its initial values, which anyone can compute. A row comes into being with its
first gradient, if the key is admitted. Hence an evaluation leaves no trace, and a table holds what was trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from strata.errors import InvalidArgument, LimitExceeded, StrataError
from strata.servers.table import native
from strata.servers.table.index import ABSENT, MAX_ROWS, KeyIndex
from strata.servers.table.initial import Initial
from strata.servers.table.memory import reserve
from strata.servers.table.optimizers import SGD
from strata.servers.table.sketch import CountSketch
from strata.servers.table.snapshot import Part, Saved, Snapshot, padded
from strata.servers.table.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from strata.servers.table.index import Slots
    from strata.servers.table.keys import Keys
    from strata.servers.table.optimizers import RowOptimizer, Rows
    from strata.servers.table.snapshot import Counts
    from strata.servers.table.storage import MapFile, Range

_SLOT_BYTES = 4 + 4 + 4
"""Bytes of a slot beside weights, state and index: version, count and mark."""
_INDEX_BYTES = 8 + 1 + 16
"""Bytes of a row in the index, at most: key, whether the slot is used, cells."""
_SAVED_BYTES = 8 + 4 + 4 + 1
"""Bytes of a slot in a checkpoint beside weights and state: key, version, count, whether it is used."""
_LOADED_ROWS = 1 << 16
"""Rows that are copied at a time when a snapshot is loaded."""


class NotFiniteGradient(StrataError):
    """A pushed gradient contains NaN or infinity; nothing of the push was applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """What a table is, the same on all servers."""

    name: str
    width: int
    optimizer: RowOptimizer = field(default_factory=SGD)
    initial: Initial = field(default_factory=Initial)
    max_rows: int = 1 << 20
    """Rows on one server."""
    admit_after: int = 1
    """Batches that must contain an id before it gets a row. Until then it keeps its initial values."""
    memory_rows: int | None = None
    """Rows on one server that are in memory; the others are in a file. None keeps all of them in memory."""
    evict_after: int | None = None
    """Clock ticks without a gradient after which a row may be evicted; None keeps rows for as long as there is room."""
    is_frozen: bool = False
    """Whether rows never change: the table refuses gradients. The default optimizer keeps no state for them."""

    def __post_init__(self) -> None:
        if self.width < 1:
            raise InvalidArgument(f"width={self.width} of table {self.name!r} is less than 1", field="width")
        if not 1 <= self.max_rows <= MAX_ROWS:
            raise InvalidArgument(
                f"max_rows={self.max_rows} of table {self.name!r} is not between 1 and {MAX_ROWS}; use more servers",
                field="max_rows",
            )
        if self.memory_rows is not None and self.memory_rows < 1:
            raise InvalidArgument(f"memory_rows={self.memory_rows} is less than 1", field="memory_rows")
        if self.admit_after < 1:
            raise InvalidArgument(f"admit_after={self.admit_after} is less than 1", field="admit_after")
        if self.evict_after is not None and self.evict_after < 1:
            raise InvalidArgument(f"evict_after={self.evict_after} is less than 1", field="evict_after")

    @property
    def row_bytes(self) -> int:
        """Memory that a row takes, with its state and its share of the index."""
        return self.content_bytes + _SLOT_BYTES + _INDEX_BYTES

    @property
    def content_bytes(self) -> int:
        """Bytes of the weights and the state of a row."""
        return 4 * (self.width + self.optimizer.state_width(self.width))

    @property
    def max_bytes(self) -> int:
        """Memory that a full table takes."""
        return self.max_rows * (self.row_bytes - self.content_bytes) + self.num_in_memory * self.content_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """Size of a full table in a checkpoint, and of the copy that its server keeps in memory to save it."""
        return self.max_rows * (self.content_bytes + _SAVED_BYTES)

    @property
    def file_bytes(self) -> int:
        """The size of the file, for rows that are not in memory."""
        return (self.max_rows - self.num_in_memory) * self.content_bytes

    @property
    def num_in_memory(self) -> int:
        return self.max_rows if self.memory_rows is None else min(self.memory_rows, self.max_rows)


class Table:
    """The rows of one table on one server."""

    def __init__(self, spec: TableSpec, map_file: MapFile | None = None) -> None:
        """
        Args:
            map_file: Return memory of as many bytes, zeros, which a file backs; for `memory_rows`.

        Raises:
            InvalidArgument: It is needed and missing.
            LimitExceeded: The address space of this process does not suffice.
        """
        if spec.file_bytes and map_file is None:
            raise InvalidArgument(
                f"memory_rows={spec.memory_rows} of table {spec.name!r} needs a file of {spec.file_bytes} bytes, but "
                "no directory for it was given",
                field="memory_rows",
            )
        self.spec = spec
        self.num_updates = 0
        """Updates applied so far, which optimizers with a schedule of their own count."""
        self.num_evicted = 0
        self.num_removed = 0
        """Rows that were evicted or removed."""
        self.num_hits = 0
        """Rows that were pulled from memory."""
        self.num_misses = 0
        """Rows that were pulled from the file."""
        self._index = KeyIndex(spec.max_rows)
        self._storage = Storage(
            spec.max_rows,
            spec.num_in_memory,
            width=spec.width,
            state_width=spec.optimizer.state_width(spec.width),
            map_file=map_file,
        )
        self._versions: Counts = reserve((spec.max_rows,), np.uint32)
        """The clock of a row's last gradient, by slot."""
        self._counts: Counts = reserve((spec.max_rows,), np.uint32)
        """Pushes that contained a row, by slot."""
        self._mark = 1
        """Snapshots so far, and 1."""
        self._marks: Counts = reserve((spec.max_rows,), np.uint32)
        """What `_mark` was at the last change of a slot. A version would not do: the clocks of workers differ."""
        self._seen = CountSketch() if spec.admit_after > 1 else None
        """Pushes that contained keys which are not admitted yet."""

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """Memory in use, without the file."""
        num_slots = self._index.num_slots
        content_bytes = min(num_slots, self.spec.num_in_memory) * self.spec.content_bytes
        sketch_bytes = 0 if self._seen is None else self._seen.num_bytes
        return content_bytes + num_slots * _SLOT_BYTES + self._index.num_bytes + sketch_bytes

    def __contains__(self, key: int) -> bool:
        return bool(self._index.find(np.array([key], np.uint64))[0] != ABSENT)

    def pull(self, keys: Keys, out: Rows | None = None) -> Rows:
        """Return the rows of these keys, into `out` if given.

        Raises:
            InvalidArgument: `out` has another shape.
        """
        rows = np.empty((len(keys), self.spec.width), np.float32) if out is None else out
        self._check_shape(keys, rows, "rows")  # compiled loops do not check bounds
        slots = self._index.find(keys)
        num_left = self._gather(slots, rows)
        self.num_hits += len(slots) - num_left
        if num_left:
            absent = np.flatnonzero(slots == ABSENT)
            self.spec.initial.fill(keys[absent], rows, absent)
            self.num_misses += num_left - len(absent)
            if num_left > len(absent):
                in_file = np.flatnonzero(slots >= self.spec.num_in_memory)
                rows[in_file] = self._storage.read(slots[in_file])[0]
        return rows

    def _gather(self, slots: Slots, rows: Rows) -> int:
        """Copy the weights of these slots; return how many are left, because they are absent or in the file."""
        weights = self._storage.memory.weights
        if native.pull is not None:
            return int(native.pull(weights, slots, rows))
        present = np.flatnonzero((slots != ABSENT) & (slots < len(weights)))
        if len(present) == len(slots):
            np.take(weights, slots, axis=0, out=rows, mode="clip")  # other modes copy twice
        else:
            rows[present] = weights[slots[present]]
        return len(slots) - len(present)

    def push(self, keys: Keys, gradients: Rows, clock: int, *, is_checked: bool = False) -> int:
        """Apply one gradient to each of these keys, which must differ; return how many were applied.

        Args:
            is_checked: Whether `check` has accepted these gradients already.

        Raises:
            NotFiniteGradient: A gradient is NaN or infinite. Nothing was applied.
            LimitExceeded: There is no room for a new row. Nothing was applied.
        """
        if is_checked:
            self._check_shape(keys, gradients, "gradients")
        else:
            self.check(keys, gradients)
        slots = self._index.find(keys)
        absent = np.flatnonzero(slots == ABSENT)
        if len(absent):
            admitted = absent[self._admit(keys[absent])]
            self._make_room(len(admitted), slots, clock)
            slots[admitted] = self._create(keys[admitted])
            if len(admitted) < len(absent):
                kept = np.flatnonzero(slots != ABSENT)
                slots, gradients = slots[kept], gradients[kept]
        self.num_updates += 1
        self._touch(slots, clock)
        for part, positions, own in self._storage.shares(slots):
            self.spec.optimizer.update(part.weights, part.state, own, gradients[positions], self.num_updates)
        if self.spec.file_bytes:
            self._promote(slots)
        return len(slots)

    def _promote(self, slots: Slots) -> None:
        """Move rows that were just pushed from the file to memory. Their next pull comes soon, if any does."""
        wanted = slots[slots >= self.spec.num_in_memory]
        if not len(wanted):
            return
        victims = self._storage.victims(len(wanted), slots, self._index.used, self._versions)
        wanted = wanted[: len(victims)]
        self._storage.swap(wanted, victims)
        self._index.swap(wanted, victims)
        places, sources = np.concatenate([victims, wanted]), np.concatenate([wanted, victims])
        self._versions[places], self._counts[places] = self._versions[sources], self._counts[sources]
        self._marks[places] = self._mark

    def _touch(self, slots: Slots, clock: int) -> None:
        if native.touch is not None:
            marks = self._marks, slots, np.uint32(clock), np.uint32(self._mark)
            native.touch(self._versions, self._counts, *marks)
        else:
            self._versions[slots] = clock
            self._counts[slots] += 1
            self._marks[slots] = self._mark

    def check(self, keys: Keys, gradients: Rows) -> None:
        """Refuse gradients of another shape, and those that are not finite.

        Raises:
            InvalidArgument, NotFiniteGradient: They are refused.
        """
        if self.spec.is_frozen:
            raise InvalidArgument(f"table {self.spec.name!r} is frozen and takes no gradients", field="gradients")
        self._check_shape(keys, gradients, "gradients")
        with np.errstate(over="ignore", invalid="ignore"):
            is_finite = np.isfinite(gradients.sum())  # NaN and infinity survive every sum
        if not is_finite:
            bad = np.flatnonzero(~np.isfinite(gradients).all(axis=1))
            if len(bad):
                raise NotFiniteGradient(
                    f"the gradient of id {keys[bad[0]]} of table {self.spec.name!r} is not finite (and of "
                    f"{len(bad) - 1} others); lower the learning rate, clip gradients, or check the data",
                    field="gradients",
                )

    def _check_shape(self, keys: Keys, rows: Rows, field: str) -> None:
        if rows.shape != (len(keys), self.spec.width):
            raise InvalidArgument(
                f"{field} of shape {list(rows.shape)} do not fit {len(keys)} keys of table {self.spec.name!r} with "
                f"width {self.spec.width}",
                field=field,
            )

    def _admit(self, keys: Keys) -> NDArray[np.bool_]:
        if self._seen is None:
            return np.ones(len(keys), np.bool_)
        return self._seen.add(keys) >= self.spec.admit_after

    def _make_room(self, num: int, pushed: Slots, clock: int) -> None:
        """Evict rows so that `num` new ones fit: those without a gradient for longest, then those with the fewest.

        Rows of the current push stay, and those younger than `evict_after`. If that does not suffice, adding fails.
        """
        num_over = len(self) + num - self.spec.max_rows
        if num_over <= 0 or self.spec.evict_after is None:
            return
        slots = self._index.slots()
        is_old = self._versions[slots].astype(np.int64) <= clock - self.spec.evict_after
        is_old &= ~np.isin(slots, pushed)
        slots = slots[is_old]
        if len(slots) < num_over:
            return
        # Evict more than needed: looking at all rows takes long.
        num_out = min(len(slots), max(num_over, self.spec.max_rows // 64))
        order = np.lexsort((self._index.keys[slots], self._counts[slots], self._versions[slots]))
        self.evict(slots[order[:num_out]])

    def evict(self, slots: Slots) -> None:
        """Forget rows: their keys have initial values again."""
        self._forget(slots)
        self.num_evicted += len(slots)

    def _forget(self, slots: Slots) -> None:
        self._versions[slots] = 0
        self._counts[slots] = 0
        self._marks[slots] = self._mark
        self._index.remove(slots)
        self.num_removed += len(slots)

    def _create(self, keys: Keys) -> Slots:
        slots = self._index.add(keys)
        for part, positions, own in self._storage.shares(slots):
            self.spec.initial.fill(keys[positions], part.weights, own)
            self.spec.optimizer.fill_state(part.weights, part.state, own)
        return slots

    # -- whole rows ------------------------------------------------------------------------------------------------

    def rows(self, *, since: int = -1, mark: int = 0, keep: Callable[[Keys], NDArray[np.bool_]] | None = None) -> Saved:
        """Return rows in the order of their keys.

        Args:
            since: Only those with a gradient after this clock.
            mark: Only those that changed after `marked` returned this number.
            keep: Return which of these keys to include; None includes all.
        """
        slots = self._index.slots()
        if since >= 0:
            slots = slots[self._versions[slots] > since]
        if mark:
            slots = slots[self._marks[slots] > mark]
        if keep is not None:
            slots = slots[keep(self._index.keys[slots])]
        slots = slots[np.argsort(self._index.keys[slots])]
        weights, state = self._storage.read(slots)
        return Saved(self._index.keys[slots], weights, state, self._versions[slots], self._counts[slots])

    def keys(self) -> Keys:
        """Return the keys of all rows, in no particular order."""
        return self._index.keys[self._index.slots()]

    def marked(self) -> int:
        """Begin a new period; return the number of the last one, by which `rows` and `dirty_slots` tell what changed
        since.
        """
        mark, self._mark = self._mark, self._mark + 1
        return mark

    @property
    def seen(self) -> NDArray[np.uint8] | None:
        """Counts of keys that are not admitted yet, if the table counts them."""
        return None if self._seen is None else self._seen.cells

    def merge(self, num_updates: int, seen: NDArray[np.uint8] | None) -> None:
        """Take over what another server knows about the whole table."""
        self.num_updates = max(self.num_updates, num_updates)
        if self._seen is not None and seen is not None:
            self._seen.merge(seen)

    def put(self, rows: Saved) -> None:
        """Add rows, or replace them.

        Raises:
            LimitExceeded: There is no room. Nothing was added.
        """
        slots = self._index.find(rows.keys)
        absent = np.flatnonzero(slots == ABSENT)
        slots[absent] = self._index.add(rows.keys[absent])
        self._storage.write(slots, rows.weights, rows.state)
        self._versions[slots], self._counts[slots] = rows.versions, rows.counts
        self._marks[slots] = self._mark

    def remove(self, keys: Keys) -> None:
        """Forget the rows of these keys, for example because another server owns them now."""
        slots = self._index.find(keys)
        self._forget(slots[slots != ABSENT])

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return the whole content by slot, without a copy."""
        parts = {each.name: self._part(each) for each in self._storage.ranges if self._has_slots(each)}
        return Snapshot(parts=parts, num_updates=self.num_updates, seen=self.seen, mark=self.marked())

    def _has_slots(self, part: Range) -> bool:
        return part.start == 0 or part.start < self._index.num_slots

    def _part(self, part: Range) -> Part:
        length = min(padded(self._index.num_slots - part.start), len(part.weights))
        slots = slice(part.start, part.start + length)
        return Part(
            self._index.keys[slots],
            part.weights[:length],
            part.state[:length],
            self._versions[slots],
            self._counts[slots],
            self._index.used[slots],
        )

    def dirty_slots(self, since: int) -> dict[str, Slots]:
        """Return the slots of each part of a snapshot that changed, ascending; evicted rows count as changes.

        Args:
            since: The `mark` of an earlier snapshot of this table; 0 returns all slots that were ever used.
        """
        is_dirty = self._marks[: self._index.num_slots] > since
        return {
            each.name: np.flatnonzero(is_dirty[each.start : each.start + len(each.weights)]).astype(np.int32)
            for each in self._storage.ranges
            if self._has_slots(each)
        }

    def load(self, snapshot: Snapshot, keep: Callable[[Keys], NDArray[np.bool_]] | None = None) -> None:
        """Add the rows of a snapshot, or replace them. Several can be loaded, for example those of all servers.

        Args:
            keep: Return which of these keys belong to this table; None keeps all.

        Raises:
            InvalidArgument: The snapshot is of a table with another width or optimizer. Nothing was loaded.
            LimitExceeded: There is no room. Nothing was loaded.
        """
        widths = self.spec.width, self.spec.optimizer.state_width(self.spec.width)
        for part in snapshot:
            if (found := (part.weights.shape[1], part.state.shape[1])) != widths:
                raise InvalidArgument(
                    f"the rows of a snapshot have {found[0]} weights and {found[1]} numbers of state, but table "
                    f"{self.spec.name!r} has {widths[0]} and {widths[1]}; use the width and the optimizer that were "
                    "saved",
                    field="snapshot",
                )
        kept = [_kept(part, keep) for part in snapshot]
        num_new = sum(
            int((self._index.find(part.keys[slots]) == ABSENT).sum())
            for part, slots in zip(snapshot, kept, strict=True)
        )
        if len(self) + num_new > self.spec.max_rows:
            raise LimitExceeded(
                f"table {self.spec.name!r} would have {len(self) + num_new} rows, more than "
                f"max_rows={self.spec.max_rows}; raise it, or use more servers",
                field="max_rows",
            )
        for part, slots in zip(snapshot, kept, strict=True):
            for start in range(0, len(slots), _LOADED_ROWS):
                self.put(part.at(slots[start : start + _LOADED_ROWS]))
        self.merge(snapshot.num_updates, snapshot.seen)


def _kept(part: Part, keep: Callable[[Keys], NDArray[np.bool_]] | None) -> NDArray[np.int64]:
    slots = np.flatnonzero(part.used)
    return slots if keep is None else slots[keep(part.keys[slots])]
