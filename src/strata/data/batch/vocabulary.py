"""Vocabularies: integer codes for the values of a string column.

Codes are made for embedding tables. Known values have the codes 1, 2, …; 0 is for null and unknown values. A table
therefore needs `num_codes` rows, and row 0 is the one to mask (`padding_idx=0`). A vocabulary found in the data is
sorted, so that codes do not depend on the order of files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from strata.errors import InvalidArgument, LimitExceeded

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

MAX_VALUES: Final = 1_000_000
UNKNOWN: Final = 0
"""The code of null and of values outside the vocabulary."""

_HASHED_VALUES: Final = 16_384
"""Size up to which a hash table per row group is cheap; above it, distinct values are found by binary search."""


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The codes of the values of one column."""

    column: str
    values: pa.Array
    """Value i has the code i + 1. Large strings or large binaries, distinct, without null."""
    _order: npt.NDArray[np.int64] = field(init=False)
    _sorted: pa.Array = field(init=False)

    def __post_init__(self) -> None:
        order = pc.sort_indices(self.values)
        object.__setattr__(self, "_order", order.to_numpy().astype(np.int64))
        object.__setattr__(self, "_sorted", self.values.take(order))

    @classmethod
    def given(cls, column: str, values: Sequence[str] | Sequence[bytes], max_values: int = MAX_VALUES) -> Vocabulary:
        """Make a vocabulary of the user's values, in their order.

        Raises:
            InvalidArgument: A value is repeated or null, or the values are neither all strings nor all bytes.
        """
        kind = pa.large_binary() if len(values) and isinstance(values[0], bytes) else pa.large_string()
        wanted: type = bytes if kind == pa.large_binary() else str
        for value in values:
            if not isinstance(value, wanted):
                raise InvalidArgument(
                    f"the vocabulary of column {column!r} has {value!r} among {wanted.__name__} values; "
                    f"pass only strings (only bytes for a binary column)",
                    field="vocabularies",
                )
        array = pa.array(values, kind)
        if (num_distinct := len(array.unique())) != len(array):
            raise InvalidArgument(
                f"the vocabulary of column {column!r} has {len(array)} values but only {num_distinct} distinct ones; "
                "pass each value once",
                field="vocabularies",
            )
        _check_size(column, len(array), max_values)
        return cls(column, array)

    @classmethod
    def found(cls, column: str, pieces: Iterable[pa.Array], max_values: int = MAX_VALUES) -> Vocabulary:
        """Make a sorted vocabulary of all values of the pieces, which are read one after another.

        Raises:
            LimitExceeded: There are more than `max_values`.
        """
        known: pa.Array | None = None
        for piece in pieces:
            new = large(piece.unique().drop_null())
            known = new if known is None else pa.concat_arrays([known, new]).unique()
            _check_size(column, len(known), max_values)
        if known is None:
            known = pa.array([], pa.large_string())
        return cls(column, known.take(pc.sort_indices(known)))

    @classmethod
    def merge(cls, column: str, parts: Sequence[Vocabulary], max_values: int = MAX_VALUES) -> Vocabulary:
        """Merge the vocabularies of several parts of the data."""
        return cls.found(column, (part.values for part in parts), max_values)

    @property
    def num_codes(self) -> int:
        """Rows that an embedding table needs."""
        return len(self.values) + 1

    def encode(self, array: pa.Array) -> npt.NDArray[np.int32]:
        """Return a code for every row; 0 for null and unknown values."""
        array = large(array)
        if not len(self.values):
            return np.zeros(len(array), np.int32)
        if len(self.values) <= _HASHED_VALUES or not hasattr(pc, "search_sorted"):
            places = pc.index_in(array, value_set=self.values).fill_null(-1)
            codes: npt.NDArray[np.int32] = places.to_numpy(zero_copy_only=False) + np.int32(1)
            return codes
        encoded = array.dictionary_encode()
        codes = np.append(self._search(encoded.dictionary), np.int32(UNKNOWN))
        places = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)  # -1 takes the appended code
        taken: npt.NDArray[np.int32] = codes[places]
        return taken

    def decode(self, codes: npt.NDArray[Any]) -> list[str | bytes | None]:
        """Return the values of codes; None for 0."""
        places = pa.array(np.asarray(codes, np.int64) - 1, mask=np.asarray(codes) == UNKNOWN)
        values: list[str | bytes | None] = self.values.take(places).to_pylist()
        return values

    @property
    def digest(self) -> str:
        """A hash of the values and their codes."""
        return str(xxhash.xxh3_128_hexdigest(to_bytes([self])))

    def _search(self, values: pa.Array) -> npt.NDArray[np.int32]:
        places = pc.search_sorted(self._sorted, values).to_numpy(zero_copy_only=False).astype(np.int64)
        places = np.minimum(places, len(self._sorted) - 1)
        is_known = pc.equal(self._sorted.take(pa.array(places)), values).to_numpy(zero_copy_only=False)
        return np.where(is_known, self._order[places] + 1, UNKNOWN).astype(np.int32)


def to_bytes(vocabularies: Iterable[Vocabulary]) -> bytes:
    """Encode vocabularies for other ranks: a table of one row, with a list of values per column."""
    made = {each.column: pa.LargeListArray.from_arrays([0, len(each.values)], each.values) for each in vocabularies}
    batch = pa.record_batch(made) if made else pa.record_batch([], names=[])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue())


def from_bytes(data: bytes) -> dict[str, Vocabulary]:
    """Decode the vocabularies of `to_bytes`, by column."""
    with pa.ipc.open_stream(pa.py_buffer(data)) as stream:
        table = stream.read_all()
    return {name: Vocabulary(name, table.column(name).combine_chunks().flatten()) for name in table.column_names}


def large(array: pa.Array) -> pa.Array:
    """Cast strings or binaries of any kind, including dictionaries, to large ones, which may exceed 2 GiB."""
    kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    wanted = pa.large_string() if is_text else pa.large_binary()
    return array if array.type == wanted else array.cast(wanted)


def _check_size(column: str, num_values: int, max_values: int) -> None:
    if num_values > max_values:
        raise LimitExceeded(
            f"column {column!r} has at least {num_values:,} distinct values, more than max_vocabulary={max_values:,}; "
            f'deliver it as strings={{"{column}": "bytes"}} or "python", hash it in a transform, '
            "or raise max_vocabulary",
            field="strings",
        )
