"""How much the tensors of one checkpoint differ from those of another, and their ranking.

Which tensors differ follows from hashes, where both sides have them. By how much needs the data: `PairedCheckpoints`
keeps what was measured, so that a ranking can be completed over several requests.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from strata.checkpoint.tools import diff
from strata.checkpoint.tools.diff import Comparison, Side
from strata.dashboard.explorer.contents import SavedCheckpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from strata.checkpoint.format.buffers import Bytes
    from strata.checkpoint.format.manifest import TensorEntry
    from strata.checkpoint.load.statistics import Statistics
    from strata.checkpoint.tools.diff import Difference
    from strata.dashboard.explorer.contents import Contents, Piece
    from strata.dashboard.explorer.limits import Budget

ChangeState = Literal["changed", "same", "added", "removed", "reshaped"]
_RANKS: dict[ChangeState, int] = {"changed": 0, "added": 1, "removed": 2, "reshaped": 3, "same": 4}


@dataclass(frozen=True, slots=True)
class Change:
    """How one tensor differs."""

    state: ChangeState
    """`changed` until it is measured, if hashes cannot decide it."""
    relative_l2: float | None = None
    """‖new − old‖ / ‖old‖ over finite elements; None until it is measured, and if the old tensor is zero."""
    l2: float | None = None
    max_abs: float | int | None = None
    num_different: int | None = None
    num_not_finite: int | None = None
    at_least: float | None = None
    """A lower bound of `relative_l2` from the stored norms; None if they are not known."""

    @property
    def is_measured(self) -> bool:
        return self.num_different is not None or self.state != "changed"


def rank(change: Change) -> tuple[int, float]:
    """Return a key that sorts the largest relative change first."""
    if change.state != "changed":
        return _RANKS[change.state], 0.0
    if change.is_measured and change.relative_l2 is None:
        return 0, -math.inf  # from zero, or not finite
    size = change.relative_l2 if change.relative_l2 is not None else change.at_least
    return 0, -(size if size is not None else -1.0)


def at_least(old: Statistics | None, new: Statistics | None) -> float | None:
    """Return a lower bound of the relative change, from the triangle inequality of the norms."""
    if old is None or new is None or old.norm is None or new.norm is None or old.num_finite != new.num_finite:
        return None  # with other elements that are not finite, the norms are of different elements
    return abs(new.norm - old.norm) / old.norm if old.norm > 0 else None


def compare(old: Contents, new: Contents) -> Comparison:
    """Compare two checkpoints without reading data; a tensor without hashes counts as changed."""
    if isinstance(old, SavedCheckpoint) and isinstance(new, SavedCheckpoint):
        return diff.compare(old.manifest, new.manifest)
    both = [name for name in new.tensors if name in old.tensors]
    reshaped = [name for name in both if _form(old.tensors[name]) != _form(new.tensors[name])]
    apart = set(reshaped)
    return Comparison(
        added=tuple(name for name in new.tensors if name not in old.tensors),
        removed=tuple(name for name in old.tensors if name not in new.tensors),
        reshaped=tuple(reshaped),
        changed=tuple(name for name in both if name not in apart),
        num_same=0,
        same_structure=False,
    )


def _form(tensor: TensorEntry) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype, tensor.shape


class PairedCheckpoints:
    """Two checkpoints, and the differences that were measured."""

    def __init__(self, old: Contents, new: Contents) -> None:
        self.old, self.new = old, new
        self.comparison = compare(old, new)
        self.problems: dict[str, str] = {}
        """Tensor → why it cannot be measured."""
        self._lock = threading.Lock()
        listed: dict[ChangeState, tuple[str, ...]] = {
            "changed": self.comparison.changed,
            "added": self.comparison.added,
            "removed": self.comparison.removed,
            "reshaped": self.comparison.reshaped,
        }
        self._changes = {name: Change(state) for state, names in listed.items() for name in names}

    @property
    def names(self) -> list[str]:
        """All tensors of both sides: in the order of the new one, then those that were removed."""
        return [*self.new.tensors, *self.comparison.removed]

    def change(self, name: str) -> Change:
        with self._lock:
            return self._changes.get(name, Change("same"))

    def bound(self, old: Mapping[str, Statistics], new: Mapping[str, Statistics]) -> None:
        """Fill in the lower bounds from statistics."""
        with self._lock:
            for name, change in self._changes.items():
                if change.state == "changed" and change.at_least is None:
                    bound = at_least(old.get(name), new.get(name))
                    if bound is not None:
                        self._changes[name] = replace(change, at_least=bound)

    def measure(self, name: str, old_norm: float | None, budget: Budget) -> Change:
        """Read both sides of a changed tensor, and keep the result.

        Raises:
            CheckpointInvalid: The data of a side cannot be trusted.
            ReadTooLarge: The budget is used up.
        """
        found = self._difference(name, budget)
        relative = found.l2 / old_norm if found.l2 is not None and old_norm else None
        with self._lock:
            measured = replace(
                self._changes[name],
                state="changed" if found.num_different else "same",
                relative_l2=relative if found.num_different else 0.0,
                l2=found.l2,
                max_abs=found.max_abs,
                num_different=found.num_different,
                num_not_finite=found.num_not_finite,
            )
            self._changes[name] = measured
        return measured

    def _difference(self, name: str, budget: Budget) -> Difference:
        before, after = self.old.tensors[name], self.new.tensors[name]
        if isinstance(self.old, SavedCheckpoint) and isinstance(self.new, SavedCheckpoint):
            budget.charge(2 * before.num_bytes, f"comparing tensor {name[:200]!r}")
            old, new = (Side(side.store, side.manifest) for side in (self.old, self.new))
            return diff.difference(before, _checked(diff.pairs(old, new, before, after, watch=budget.watch), budget))
        pieces = (self.old.pieces(before, budget), self.new.pieces(after, budget))
        return diff.difference(before, aligned(*pieces))


def _checked(pairs: Iterator[tuple[Bytes, Bytes]], budget: Budget) -> Iterator[tuple[Bytes, Bytes]]:
    for pair in pairs:
        budget.check()
        yield pair


def aligned(one: Iterator[Piece], other: Iterator[Piece]) -> Iterator[tuple[Bytes, Bytes]]:
    """Yield equal ranges of two tensors whose pieces have different sizes."""
    a = b = None
    while True:
        if a is None or not a.nbytes:
            a = next(one, (0, None))[1]
        if b is None or not b.nbytes:
            b = next(other, (0, None))[1]
        if a is None or b is None:
            return
        size = min(a.nbytes, b.nbytes)
        yield a[:size], b[:size]
        a, b = a[size:], b[size:]
