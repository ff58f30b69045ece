"""`Prefetch`: asks for the rows of a batch before the forward pass, and for those of the batches after it.

The ids are computed by recipes, which are learned from the first batches. All tables of a batch are pulled at once.
Rows for a later step are asked for with the clock of that step, so the servers keep the bound on staleness. Rows of
frozen tables never change, so they are asked for as soon as a batch is announced, whatever the staleness. At a lookup
the actual ids decide: a row that was not prefetched is pulled then.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils import _pytree

from strata.servers.table.keys import unique
from strata.trainer.strategy.recipes import Learner

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from strata.servers.table.keys import Keys, Unique
    from strata.servers.table.optimizers import Rows
    from strata.trainer.strategy.base import Upcoming
    from strata.trainer.strategy.recipes import Ids, Leaves

MAX_CALLS = 256
"""Calls of lookups in one forward pass whose ids are learned."""


class Asked(Protocol):
    def rows(self) -> dict[str, Rows]:
        """Wait for the rows; call it once."""
        ...


class RowSource(Protocol):
    def pull(self, wanted: Mapping[str, Keys]) -> dict[str, Rows]:
        """Return the current rows of these keys, which ascend, by table."""
        ...

    def ask(self, wanted: Mapping[str, Keys], steps_ahead: int = 0) -> Asked:
        """Ask for the rows of these keys, for the current step or a later one."""
        ...


class Call(NamedTuple):
    """A call of a lookup in a forward pass."""

    table: str
    number: int
    """Among the calls for this table."""


class _Guess(NamedTuple):
    ids: Ids
    groups: Unique


class _Batch:
    """A batch whose rows have been asked for, as far as their ids are known."""

    def __init__(self, batch: Any, learners: Mapping[Call, Learner]) -> None:
        self.batch = batch
        self.leaves = leaves_of(batch)
        self.guesses: dict[Call, _Guess] = {}
        for call, learner in learners.items():
            ids = None if learner.recipe is None else learner.recipe.ids(self.leaves)
            if ids is not None and (not ids.size or ids.min() >= 0):  # other ids are refused at the lookup
                self.guesses[call] = _Guess(ids, unique(ids.view(np.uint64)))
        by_table: dict[str, list[Keys]] = {}
        for call, guess in self.guesses.items():
            by_table.setdefault(call.table, []).append(guess.groups.keys)
        self.keys = {
            table: keys[0] if len(keys) == 1 else unique(np.concatenate(keys)).keys for table, keys in by_table.items()
        }
        self._left = set(self.keys)
        """Tables whose rows have not been asked for."""
        self._asked: list[Asked] = []
        self._rows: dict[str, Rows] = {}

    def ask(self, source: RowSource, tables: Collection[str], steps_ahead: int) -> None:
        """Ask for the rows of these tables, unless that was done before."""
        wanted = {name: keys for name, keys in self.keys.items() if name in tables and name in self._left}
        if wanted:
            self._left -= wanted.keys()
            self._asked.append(source.ask(wanted, steps_ahead))

    def rows(self, table: str) -> Rows:
        while self._asked:
            self._rows |= self._asked.pop(0).rows()
        return self._rows[table]


class Prefetch:
    """The rows of the current batch and of the next ones."""

    def __init__(
        self, source: RowSource, *, frozen: Collection[str] = frozenset(), num_ahead: int | None = None
    ) -> None:
        """
        Args:
            frozen: Tables whose rows never change.
            num_ahead: Batches for which rows that change are prefetched; None: all that are announced.
        """
        self._source = source
        self._frozen = frozen
        self._num_ahead = num_ahead
        self._learners: dict[Call, Learner] = {}
        self._current: _Batch | None = None
        self._following: deque[_Batch] = deque()
        self._num_calls: Counter[str] = Counter()

    def begin(self, batches: Sequence[Upcoming]) -> None:
        """Begin the forward pass of the first of these batches, and ask for the rows of all that are new."""
        self.end()
        can_guess = any(learner.recipe is not None for learner in self._learners.values())
        for number, (batch, steps_ahead) in enumerate(batches):
            known = self._following[number] if number < len(self._following) else None
            if known is None or known.batch is not batch or not (known.keys or not can_guess):
                while len(self._following) > number:  # other batches than expected, or from before there were recipes
                    self._following.pop()
                known = _Batch(batch, self._learners)
                self._following.append(known)
            if self._num_ahead is None or number <= self._num_ahead:
                known.ask(self._source, known.keys, steps_ahead)
            else:
                known.ask(self._source, self._frozen, 0)
        self._current = self._following.popleft()

    def end(self) -> None:
        """End the forward pass: its rows may be too old for what follows."""
        if self._current is not None:
            for call in self._current.guesses:  # lookups that were not called
                self._learners[call].guessed(is_right=False)
        self._current = None
        self._num_calls.clear()

    def rows_of(self, table: str, ids: Ids) -> tuple[Unique, Rows]:
        """Return the different ids of a lookup and their rows."""
        current = self._current
        if current is None:
            groups = unique(ids.view(np.uint64))
            return groups, self._source.pull({table: groups.keys})[table]
        groups = self._groups(current, Call(table, self._num_calls[table]), ids)
        self._num_calls[table] += 1
        if table not in current.keys:
            return groups, self._source.pull({table: groups.keys})[table]
        return groups, self._held(current, table, groups.keys)

    def _groups(self, current: _Batch, call: Call, ids: Ids) -> Unique:
        guess = current.guesses.pop(call, None)
        if call not in self._learners and len(self._learners) < MAX_CALLS:
            self._learners[call] = Learner()
        learner = self._learners.get(call)
        if learner is not None and guess is None:
            learner.observe(current.leaves, ids)
        if learner is None or guess is None:
            return unique(ids.view(np.uint64))
        is_right = np.array_equal(guess.ids, ids)
        learner.guessed(is_right=is_right)
        return guess.groups if is_right else unique(ids.view(np.uint64))

    def _held(self, current: _Batch, table: str, keys: Keys) -> Rows:
        """Return rows of which some or all have been prefetched."""
        held_keys, held = current.keys[table], current.rows(table)
        if keys is held_keys:
            return held
        if not len(held_keys):
            return self._source.pull({table: keys})[table]
        places = np.minimum(np.searchsorted(held_keys, keys), len(held_keys) - 1)
        missing = np.flatnonzero(held_keys[places] != keys)
        rows = held[places]
        if len(missing):
            rows[missing] = self._source.pull({table: keys[missing]})[table]
        return rows


def leaves_of(batch: Any) -> Leaves:
    """Return the arrays of whole numbers in a batch, by their places."""
    return {
        _pytree.keystr(place): leaf.detach().cpu().numpy()
        for place, leaf in _pytree.tree_flatten_with_path(batch)[0]
        if isinstance(leaf, torch.Tensor)
        and leaf.dim()
        and leaf.numel()
        and leaf.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    }
