"""Columns that stay Arrow arrays until a batch is delivered, because the output is Arrow or Python objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from strata.data.arrow_types import enlarged, of_numbers, recast
from strata.errors import LimitExceeded

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class ArrowColumn:
    array: pa.Array

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)

    def __len__(self) -> int:
        return len(self.array)

    def slice(self, first: int, last: int) -> ArrowColumn:
        return ArrowColumn(self.array.slice(first, last - first))

    @classmethod
    def gather(cls, pieces: Sequence[ArrowColumn], index: npt.NDArray[np.integer[Any]] | None) -> ArrowColumn:
        array = joined([piece.array for piece in pieces])
        if index is None:
            return ArrowColumn(array)
        return ArrowColumn(array.take(of_numbers(index.astype(np.int64, copy=False), pa.int64())))


def joined(arrays: Sequence[pa.Array]) -> pa.Array:
    """Concatenate arrays. Strings and lists of more than 2 GiB become large ones.

    Raises:
        LimitExceeded: Together they exceed what their type can address.
    """
    if len(arrays) == 1:
        return arrays[0]
    wide = enlarged(arrays[0].type)
    try:
        if all(array.type == arrays[0].type for array in arrays):
            return pa.concat_arrays(arrays)
    except (pa.ArrowInvalid, pa.ArrowCapacityError) as error:
        if wide == arrays[0].type:
            raise LimitExceeded(
                f"{sum(map(len, arrays)):,} rows of a {arrays[0].type} column do not fit into one array: {error}; "
                "lower shuffle_buffer_size or batch_size"
            ) from error
    return pa.concat_arrays([recast(array, wide) for array in arrays])
