"""Fitted features: each class encodes one column, and knows its place in the state.

`SparseColumn`, `VarLenColumn` and `DenseColumn` are what `Features.fit` makes of the declarations. Their encoding is
the same, value by value, as that of `portable.py`; the entries of the state are defined there (`check_state`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from strata.data.arrow_types import of_numbers
from strata.trainer.features.field import MISSING, Combiner, Field
from strata.trainer.features.moments import LIMIT, is_ordinary
from strata.trainer.features.portable import LARGEST_FLOAT32
from strata.trainer.features.values import ValueType, elements, lengths_of, number_rows, numbers
from strata.trainer.features.vocabulary import Buckets, IntegerVocabulary, StringVocabulary, encode_ids

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from strata.trainer.features.columns import Scale
    from strata.trainer.features.vocabulary import IdMap

_BLOCK_ROWS: Final = 1 << 12
"""Rows of a matrix that are filled at a time, so that they stay in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SparseColumn:
    """A column of categories."""

    name: str
    id_map: IdMap
    embedding_dim: int
    num_values: int
    """Values of the fitted data that were not missing."""
    num_missing: int
    num_unknown: int
    """Values of the fitted data that have the id 1."""

    @property
    def field(self) -> Field:
        return Field(name=self.name, kind="sparse", num_ids=self.id_map.num_ids, embedding_dim=self.embedding_dim)

    def encode(self, array: pa.Array) -> npt.NDArray[np.int64]:
        """Return the id of each row."""
        return encode_ids(self.id_map, array, self.name)

    def state(self) -> dict[str, Any]:
        id_map = self.id_map
        return {
            "kind": "sparse",
            "name": self.name,
            "values": id_map.type.kind,
            "unit": id_map.type.unit,
            "is_unsigned": id_map.type.is_unsigned,
            "vocabulary": None if isinstance(id_map, Buckets) else id_map.to_list(),
            "hash_buckets": id_map.num_buckets if isinstance(id_map, Buckets) else None,
            "embedding_dim": self.embedding_dim,
            "num_values": self.num_values,
            "num_missing": self.num_missing,
            "num_unknown": self.num_unknown,
        }

    @classmethod
    def from_state(cls, entry: Mapping[str, Any]) -> SparseColumn:
        kind = ValueType(entry["values"], entry["unit"], entry["is_unsigned"])
        counts = {name: entry[name] for name in ("embedding_dim", "num_values", "num_missing", "num_unknown")}
        return cls(name=entry["name"], id_map=_id_map(kind, entry), **counts)


def _id_map(kind: ValueType, entry: Mapping[str, Any]) -> IdMap:
    if entry["hash_buckets"] is not None:
        return Buckets(kind, entry["hash_buckets"])
    listed = entry["vocabulary"]
    if kind.kind == "integer":
        return IntegerVocabulary(kind, np.array(listed, np.uint64 if kind.is_unsigned else np.int64).view(np.int64))
    return StringVocabulary(kind, pa.array(map(bytes.fromhex, listed) if kind.kind == "bytes" else listed, kind.arrow))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VarLenColumn:
    """A column of lists of categories."""

    elements: SparseColumn
    """The elements of all lists; its `num_missing` counts the rows without any."""
    separator: str | None
    max_length: int
    combiner: Combiner

    @property
    def name(self) -> str:
        return self.elements.name

    @property
    def field(self) -> Field:
        return Field(
            name=self.name,
            kind="varlen",
            num_ids=self.elements.id_map.num_ids,
            embedding_dim=self.elements.embedding_dim,
            max_length=self.max_length,
            combiner=self.combiner,
        )

    def encode(self, array: pa.Array) -> npt.NDArray[np.int64]:
        """Return the ids of each row as a matrix, padded with 0."""
        flat, lengths = elements(array, self.separator, self.name)
        ids = self.elements.encode(flat)
        is_present = ids != MISSING
        if not is_present.all():
            ids, lengths = ids[is_present], lengths_of(lengths, is_present)
        starts = np.cumsum(lengths) - lengths
        places = np.arange(self.max_length)
        matrix = np.zeros((len(array), self.max_length), np.int64)
        for first in range(0, len(array), _BLOCK_ROWS):  # bounds the memory of the indices
            block = slice(first, first + _BLOCK_ROWS)
            is_filled = places < lengths[block, None]
            matrix[block][is_filled] = ids[(starts[block, None] + places)[is_filled]]
        return matrix

    def state(self) -> dict[str, Any]:
        return {
            **self.elements.state(),
            "kind": "varlen",
            "separator": self.separator,
            "max_length": self.max_length,
            "combiner": self.combiner,
        }

    @classmethod
    def from_state(cls, entry: Mapping[str, Any]) -> VarLenColumn:
        own = {name: entry[name] for name in ("separator", "max_length", "combiner")}
        return cls(elements=SparseColumn.from_state(entry), **own)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseColumn:
    """A column of numbers: (x − offset) / divisor, where x is the number or its logarithm."""

    name: str
    unit: str
    """The unit of dates and times; empty for others."""
    width: int
    scale: Scale | None
    fill: float
    min: float
    max: float
    mean: float
    std: float
    offset: float
    divisor: float
    num_values: int
    num_missing: int

    @property
    def field(self) -> Field:
        return Field(name=self.name, kind="dense", width=self.width)

    def encode(self, array: pa.Array) -> npt.NDArray[np.float64]:
        """Return the scaled numbers, row after row, within the range of float32."""
        if self.width == 1:
            x = numbers(array, self.unit, self.name)
        else:
            x = number_rows(array, self.width, self.unit, self.name)
        if not is_ordinary(x):
            x = np.where(np.isnan(x), self.fill, x)
            x = np.where(x > LIMIT, self.max, np.where(x < -LIMIT, self.min, x))
        if self.scale == "log":
            x = signed_log(x)
        x = np.subtract(x, self.offset)
        np.divide(x, self.divisor, out=x)
        return np.clip(x, -LARGEST_FLOAT32, LARGEST_FLOAT32, out=x)

    def state(self) -> dict[str, Any]:
        return {"kind": "dense", **{name: getattr(self, name) for name in self.__slots__}}

    @classmethod
    def from_state(cls, entry: Mapping[str, Any]) -> DenseColumn:
        return cls(**{name: entry[name] for name in cls.__slots__})


Column: TypeAlias = SparseColumn | VarLenColumn | DenseColumn


def column_from_state(entry: Mapping[str, Any]) -> Column:
    kinds: dict[str, type[Column]] = {"sparse": SparseColumn, "varlen": VarLenColumn, "dense": DenseColumn}
    return kinds[entry["kind"]].from_state(entry)


def signed_log(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return sign(x) × log(1 + |x|), which is defined for all numbers and keeps their order."""
    logs = np.log1p(np.abs(values))
    return np.copysign(logs, values, out=logs)


def side_by_side(columns: Sequence[npt.NDArray[Any]], widths: Sequence[int], kind: pa.DataType) -> pa.Array:
    """Return columns side by side, as fixed-size lists of int64 or float32.

    `widths`: how many numbers of each column form a row.
    """
    num_rows, width = len(columns[0]) // widths[0], sum(widths)
    matrix = np.empty((num_rows, width), np.int64 if kind == pa.int64() else np.float32)
    for first in range(0, num_rows, _BLOCK_ROWS):
        last, place = min(first + _BLOCK_ROWS, num_rows), 0
        for column, own in zip(columns, widths, strict=True):
            matrix[first:last, place : place + own] = column[first * own : last * own].reshape(-1, own)
            place += own
    return rows_array(matrix, kind)


def rows_array(matrix: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Return the rows of a matrix of this Arrow type as fixed-size lists, without a copy."""
    return pa.FixedSizeListArray.from_arrays(of_numbers(matrix.reshape(-1), kind), matrix.shape[1])
