"""From categories to ids: vocabularies of integers or strings, and hash buckets.

Each class maps a whole column at once with vectorized operations that release the interpreter lock. Arrow's `index_in`
would build a hash table of the vocabulary for every batch; the tables here are built once, with the first batch. They
are not pickled: a process that only passes features on never builds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from strata.data.arrow_types import of_numbers
from strata.trainer.features.field import FIRST_ID, MISSING, UNKNOWN
from strata.trainer.features.hashing import hash_strings, mix
from strata.trainer.features.values import Integers, ValueType, bare, integers, mask, places, strings, view

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Ids = npt.NDArray[np.int64]

_MAX_SPARSITY: Final = 8
"""A table with one entry per possible integer is used if it has at most this many entries per key."""
_MIN_SPAN: Final = 1 << 16
"""… or at most this many entries."""
_CHUNK_ROWS: Final = 1 << 14


def encode_ids(id_map: IdMap, array: pa.Array, name: str) -> Ids:
    """Return an id for each row of a column, whose values are looked up once if they are in a dictionary."""
    array = bare(array)
    if pat.is_dictionary(array.type) and len(array.dictionary) > len(array):  # shared with other batches
        array = bare(array.dictionary_decode())
    if not pat.is_dictionary(array.type):
        return id_map.ids(array, name)
    known = np.append(encode_ids(id_map, array.dictionary, name), MISSING)
    found: Ids = known[places(array)]  # -1, null, takes the last one
    return found


# Hash buckets


@dataclass(frozen=True, slots=True)
class Buckets:
    """Ids by hash: no vocabulary, and values may share an id."""

    type: ValueType
    num_buckets: int

    @property
    def num_ids(self) -> int:
        """Rows that an embedding table needs."""
        return FIRST_ID + self.num_buckets

    def ids(self, array: pa.Array, name: str) -> Ids:
        """Return an id for each value of a bare array without a dictionary; `name` is the column, for errors."""
        if self.type.kind == "integer":
            found = integers(array, self.type, name)
            return _marked(self._buckets(mix(found.values)), found)
        return _by_distinct(array, lambda each: self._buckets(hash_strings(strings(each, self.type, name))))

    def _buckets(self, hashes: npt.NDArray[np.uint64]) -> Ids:
        return (hashes % np.uint64(self.num_buckets)).astype(np.int64) + FIRST_ID


# Vocabularies


@dataclass(frozen=True, eq=False)
class IntegerVocabulary:
    """The ids of integers."""

    type: ValueType
    values: npt.NDArray[np.int64]
    """In the order of ids; uint64 as the int64 of the same bits."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.type, self.values)

    @property
    def num_ids(self) -> int:
        return FIRST_ID + len(self.values)

    def ids(self, array: pa.Array, name: str) -> Ids:
        found = integers(array, self.type, name)
        ids = self._table.find(found.values)
        if found.is_unsigned != self.type.is_unsigned:
            ids[found.values < 0] = UNKNOWN  # the same bits, but another number
        return _marked(ids, found)

    @cached_property
    def _table(self) -> _SpanTable | _HashTable:
        return _table(self.values)

    def to_list(self) -> list[Any]:
        listed: list[Any] = (self.values.view(np.uint64) if self.type.is_unsigned else self.values).tolist()
        return listed


@dataclass(frozen=True, eq=False)
class StringVocabulary:
    """The ids of text or bytes, found by their 64-bit hash and compared in full."""

    type: ValueType
    values: pa.Array
    """In the order of ids; large strings or large binaries, distinct, without null."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.type, self.values)

    @property
    def num_ids(self) -> int:
        return FIRST_ID + len(self.values)

    def ids(self, array: pa.Array, name: str) -> Ids:
        return _by_distinct(array, lambda each: self._find(strings(each, self.type, name)))

    def to_list(self) -> list[Any]:
        listed: list[Any] = self.values.to_pylist()
        return [value.hex() for value in listed] if self.type.kind == "bytes" else listed

    @cached_property
    def _table(self) -> _SpanTable | _HashTable | None:
        """The ids by hash; None if two values have the same one."""
        hashes = hash_strings(self.values).view(np.int64)
        return _table(hashes) if len(np.unique(hashes)) == len(hashes) else None

    def _find(self, values: pa.Array) -> Ids:
        if self._table is None:
            found = pc.index_in(values, value_set=self.values)
            at = view(found, np.dtype(np.int32)).astype(np.int64)
            return np.where(mask(found.is_null()), UNKNOWN, at + FIRST_ID)
        ids = self._table.find(hash_strings(values).view(np.int64))
        candidates = self.values.take(of_numbers(np.maximum(ids - FIRST_ID, 0), pa.int64()))
        ids[mask(pc.not_equal(candidates, values))] = UNKNOWN
        return ids


IdMap: TypeAlias = Buckets | IntegerVocabulary | StringVocabulary
"""Maps categories to ids; used by several threads at a time."""


def _by_distinct(array: pa.Array, ids_of: Callable[[pa.Array], Ids]) -> Ids:
    """Return the ids of strings. Categories repeat, so looking up the distinct ones is less work."""
    if pat.is_null(array.type):
        return np.full(len(array), MISSING, np.int64)
    encoded = array.dictionary_encode()
    known = np.append(ids_of(encoded.dictionary), MISSING)
    ids: Ids = known[places(encoded)]  # -1, null, takes the last one
    return ids


def _marked(ids: Ids, found: Integers) -> Ids:
    if found.not_whole is not None:
        ids[found.not_whole] = UNKNOWN
    if found.missing is not None:
        ids[found.missing] = MISSING
    return ids


def _table(keys: npt.NDArray[np.int64]) -> _SpanTable | _HashTable:
    span = int(keys.max()) - int(keys.min()) + 1
    return _SpanTable(keys, span) if span <= max(_MIN_SPAN, _MAX_SPARSITY * len(keys)) else _HashTable(keys)


class _SpanTable:
    """An entry for every integer from the smallest key to the largest: one memory access per lookup."""

    def __init__(self, keys: npt.NDArray[np.int64], span: int) -> None:
        self._first = np.int64(keys.min())
        self._ids = np.full(span + 1, UNKNOWN, np.int64)  # the last entry is for all other integers
        self._ids[keys - self._first] = np.arange(FIRST_ID, FIRST_ID + len(keys))

    def find(self, keys: npt.NDArray[np.int64]) -> Ids:
        """Return the id of each key; 1 if there is none."""
        # Below the first key the difference wraps around to a huge number.
        at = (keys - self._first).view(np.uint64)
        np.minimum(at, np.uint64(len(self._ids) - 1), out=at)
        return self._ids[at.view(np.int64)]


class _HashTable:
    """Open addressing with linear probing, at most half full, probed for many keys at a time."""

    def __init__(self, keys: npt.NDArray[np.int64]) -> None:
        size = 1 << (2 * len(keys)).bit_length()
        self._last = np.int64(size - 1)
        self._keys = np.zeros(size, np.int64)
        self._ids = np.full(size, MISSING, np.int64)  # MISSING marks an empty slot
        ids = np.arange(FIRST_ID, FIRST_ID + len(keys))
        slots = self._slots(keys)
        while len(keys):
            is_free = self._ids[slots] == MISSING
            self._ids[slots[is_free]] = ids[is_free]  # of several keys for one slot, one wins
            is_placed = self._ids[slots] == ids
            self._keys[slots[is_placed]] = keys[is_placed]
            keys, ids, slots = keys[~is_placed], ids[~is_placed], slots[~is_placed]
            slots = (slots + 1) & self._last

    def find(self, keys: npt.NDArray[np.int64]) -> Ids:
        """Return the id of each key; 1 if there is none."""
        found = np.empty(len(keys), np.int64)
        for first in range(0, len(keys), _CHUNK_ROWS):
            self._find_chunk(keys[first : first + _CHUNK_ROWS], found[first : first + _CHUNK_ROWS])
        return found

    def _find_chunk(self, keys: npt.NDArray[np.int64], found: Ids) -> None:
        found[:] = UNKNOWN
        rows, slots = np.arange(len(keys)), self._slots(keys)
        while len(rows):
            ids = self._ids[slots]
            is_here = (self._keys[slots] == keys) & (ids != MISSING)
            found[rows[is_here]] = ids[is_here]
            goes_on = ~is_here & (ids != MISSING)
            rows, keys, slots = rows[goes_on], keys[goes_on], (slots[goes_on] + 1) & self._last

    def _slots(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return mix(keys).view(np.int64) & self._last
