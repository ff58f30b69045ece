"""From Arrow columns to the values that are counted, looked up and scaled.

Categories have three types: integers (also booleans, times, whole floats), text and bytes. Numbers are float64. All
conversions are exact or refused, and `portable.py` makes the same ones for Python objects, so a category or a number
is the same however it is stored: as int8 or int64, in a dictionary, as a view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from strata.data.arrow_types import is_list, of_numbers, physical, unit_of
from strata.errors import SchemaMismatch

if TYPE_CHECKING:
    import numpy.typing as npt

    Mask = npt.NDArray[np.bool_]

_UNIT_NS: Final = {"days": 86_400 * 10**9, "s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_INT64_END: Final = 2.0**63


@dataclass(frozen=True, slots=True)
class ValueType:
    """The type of a feature's categories."""

    kind: Literal["integer", "text", "bytes"]
    unit: str = ""
    """The unit of dates and times, which are integers; empty for others."""
    is_unsigned: bool = False
    """Whether integers from 2^63 to 2^64 may occur, as in a column of uint64."""

    @property
    def arrow(self) -> pa.DataType:
        """The Arrow type in which values are counted."""
        if self.kind == "integer":
            return pa.uint64() if self.is_unsigned else pa.int64()
        return pa.large_string() if self.kind == "text" else pa.large_binary()

    def __str__(self) -> str:
        return f"times in {self.unit}" if self.unit else {"integer": "integers"}.get(self.kind, self.kind)


@dataclass(frozen=True, slots=True)
class Integers:
    """A column of integer categories."""

    values: npt.NDArray[np.int64]
    """One per row, uint64 as the int64 of the same bits; arbitrary where there is none."""
    missing: Mask | None = None
    """Rows that are null or NaN; None if there are none."""
    not_whole: Mask | None = None
    """Rows of floats that are not an integer of 64 bits; None if there are none."""
    is_unsigned: bool = False

    @property
    def present(self) -> npt.NDArray[np.int64]:
        """The values that are not missing."""
        return self.values if self.missing is None else self.values[~self.missing]


# Types


def bare(array: pa.Array) -> pa.Array:
    """Remove extensions, runs and views; a dictionary stays one."""
    while True:
        kind = array.type
        if isinstance(kind, pa.BaseExtensionType):
            array = array.storage
        elif pat.is_run_end_encoded(kind):
            array = pc.run_end_decode(array)
        elif pat.is_string_view(kind):
            return array.cast(pa.large_string())
        elif pat.is_binary_view(kind) or pat.is_fixed_size_binary(kind):
            return array.cast(pa.large_binary())
        else:
            return array


def bare_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of single values or lists, without any encoding."""
    if isinstance(kind, pa.BaseExtensionType):
        return bare_type(kind.storage_type)
    return bare_type(kind.value_type) if pat.is_dictionary(kind) or pat.is_run_end_encoded(kind) else kind


def is_any_list(kind: pa.DataType) -> bool:
    return is_list(kind) or bool(pat.is_fixed_size_list(kind))


def category_type(kind: pa.DataType) -> ValueType | None:
    """Return the type of categories that a column of this Arrow type has; None if it has none."""
    kind = bare_type(kind)
    if pat.is_string(kind) or pat.is_large_string(kind) or pat.is_string_view(kind):
        return ValueType("text")
    if pat.is_binary(kind) or pat.is_large_binary(kind) or pat.is_binary_view(kind) or pat.is_fixed_size_binary(kind):
        return ValueType("bytes")
    if physical(kind) is None:
        return None
    return ValueType("integer", unit_of(kind), bool(pat.is_uint64(kind)))


def is_number(kind: pa.DataType) -> bool:
    """Return whether a column of this Arrow type has numbers."""
    kind = bare_type(kind)
    return bool(pat.is_decimal(kind) or physical(kind) is not None)


# Categories


def integers(array: pa.Array, wanted: ValueType, name: str) -> Integers:
    """Return a bare array without a dictionary as integers.

    Raises:
        SchemaMismatch: It has another type, or times that the unit cannot express.
    """
    kind = array.type
    if pat.is_null(kind):
        return Integers(np.zeros(len(array), np.int64), np.ones(len(array), np.bool_))
    dtype = physical(kind)
    if dtype is None or (pat.is_temporal(kind) and not wanted.unit):
        raise mismatch(name, kind, wanted)
    missing = _nulls(array)
    if pat.is_boolean(kind):
        array, dtype = array.cast(pa.uint8()), np.dtype(np.uint8)
    values = view(array, dtype)
    if dtype.kind == "f":
        return _whole_floats(values.astype(np.float64, copy=False), missing)
    if dtype == np.uint64:
        return Integers(values.view(np.int64), missing, is_unsigned=True)
    values = values.astype(np.int64, copy=False)
    return Integers(_in_unit(values, missing, unit_of(kind), wanted.unit, name), missing)


def strings(array: pa.Array, wanted: ValueType, name: str) -> pa.Array:
    """Return a bare array without a dictionary as large strings or large binaries.

    Raises:
        SchemaMismatch: It has another type.
    """
    if pat.is_null(array.type):
        return pa.nulls(len(array), wanted.arrow)
    if category_type(array.type) != wanted:
        raise mismatch(name, array.type, wanted)
    return array.cast(wanted.arrow)


def mismatch(name: str, found: pa.DataType, wanted: object) -> SchemaMismatch:
    """Return the error for a column whose type is not the one that was fitted."""
    return SchemaMismatch(
        f"column {name!r} is {found}, but the features were fitted on {wanted}; cast the column, or fit the features "
        "again"
    )


def _whole_floats(values: npt.NDArray[np.float64], missing: Mask | None) -> Integers:
    is_nan = np.isnan(values)
    if missing is not None:
        is_nan |= missing
    is_whole = (np.floor(values) == values) & (values >= -_INT64_END) & (values < _INT64_END)
    whole = np.where(is_whole, values, 0.0).astype(np.int64)
    not_whole = ~is_whole & ~is_nan
    return Integers(whole, is_nan if is_nan.any() else None, not_whole if not_whole.any() else None)


def _in_unit(
    values: npt.NDArray[np.int64], missing: Mask | None, own: str, wanted: str, name: str
) -> npt.NDArray[np.int64]:
    """Convert times to another unit, without loss; plain integers are in the wanted one."""
    if not own or own == wanted:
        return values
    if missing is not None:
        values = np.where(missing, 0, values)
    own_ns, wanted_ns = _UNIT_NS[own], _UNIT_NS[wanted]
    if own_ns >= wanted_ns:
        factor = own_ns // wanted_ns
        bound = (2**63 - 1) // factor
        is_exact = bool(len(values) == 0 or (values.max() <= bound and values.min() >= -bound))
        converted = values * factor
    else:
        converted, rest = np.divmod(values, wanted_ns // own_ns)
        is_exact = not rest.any()
    if not is_exact:
        raise SchemaMismatch(
            f"column {name!r} has times in {own} that are not 64-bit integers in {wanted}, the unit that the features "
            f"were fitted on; cast the column to {wanted}, or fit the features again"
        )
    return converted


# Numbers


def numbers(array: pa.Array, unit: str, name: str) -> npt.NDArray[np.float64]:
    """Return a column of numbers as floats, null as NaN. The result may be a view of Arrow's memory.

    Raises:
        SchemaMismatch: It has another type, or times that the unit cannot express.
    """
    array = bare(array)
    if pat.is_dictionary(array.type):
        known = np.append(numbers(array.dictionary, unit, name), np.nan)
        found: npt.NDArray[np.float64] = known[places(array)]
        return found
    kind = array.type
    if pat.is_null(kind):
        return np.full(len(array), np.nan)
    if pat.is_decimal(kind):
        array = array.cast(pa.string()).cast(pa.float64())  # the nearest float; the direct cast may be slightly off
    elif pat.is_boolean(kind):
        array = array.cast(pa.uint8())
    dtype = physical(array.type)
    if dtype is None or (pat.is_temporal(kind) and not unit):
        raise mismatch(name, kind, f"times in {unit}" if unit else "numbers")
    values = view(array, dtype)
    missing = _nulls(array)
    if unit_of(kind):
        values = _in_unit(values.astype(np.int64, copy=False), missing, unit_of(kind), unit, name)
    floats = values.astype(np.float64, copy=missing is not None)
    if missing is not None:
        floats[missing] = np.nan
    return floats


def number_rows(array: pa.Array, width: int, unit: str, name: str) -> npt.NDArray[np.float64]:
    """Return a column of lists of `width` numbers as one array, row after row; a null list has NaN.

    Raises:
        SchemaMismatch: A list has another length, or its values have another type.
    """
    array = bare(array)
    if pat.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pat.is_null(array.type):
        return np.full(len(array) * width, np.nan)
    if not is_any_list(array.type):
        raise mismatch(name, array.type, f"lists of {width} numbers")
    lengths = list_lengths(array)
    is_null = _nulls(array)
    wrong = lengths != width if is_null is None else (lengths != width) & ~is_null
    if wrong.any():
        raise SchemaMismatch(
            f"column {name!r} has a list of {int(lengths[np.argmax(wrong)])} numbers, but width={width}; declare "
            "DenseFeat with the length that all lists have"
        )
    found = numbers(array.flatten(), unit, name)
    if is_null is None:
        return found
    rows = np.full((len(array), width), np.nan)
    rows[~is_null] = found.reshape(-1, width)
    return rows.reshape(-1)


# Lists


def elements(array: pa.Array, separator: str | None, name: str) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Return the elements of all lists of a column, and the number of each list's elements.

    Strings are split at `separator`; empty parts are left out. Elements of lists may be null.

    Raises:
        SchemaMismatch: The column has neither lists nor, with a separator, strings.
    """
    array = bare(array)
    if pat.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pat.is_null(array.type):
        return array.slice(0, 0), np.zeros(len(array), np.int64)
    if separator is None:
        if not is_any_list(array.type):
            raise mismatch(name, array.type, "lists")
        return bare(array.flatten()), list_lengths(array)
    if category_type(array.type) != ValueType("text"):
        raise mismatch(name, array.type, f"text separated by {separator!r}")
    parts = pc.split_pattern(array, pattern=separator)
    words, lengths = parts.flatten(), list_lengths(parts)
    is_used = _whole(pc.binary_length(words), if_null=0) > 0
    return words.take(of_numbers(np.flatnonzero(is_used), pa.int64())), lengths_of(lengths, is_used)


def lengths_of(lengths: npt.NDArray[np.int64], is_used: Mask) -> npt.NDArray[np.int64]:
    """Return how many elements of each list are used."""
    num_before = np.append(0, np.cumsum(is_used))
    found: npt.NDArray[np.int64] = np.diff(num_before[np.append(0, np.cumsum(lengths))])
    return found


def list_lengths(array: pa.Array) -> npt.NDArray[np.int64]:
    """Return the length of each list; 0 for null."""
    return _whole(pc.list_value_length(array), if_null=0)


# Arrow's memory. `to_numpy`, `pa.array` and scalars as arguments would import pandas, which takes half a second.


def view(array: pa.Array, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return a view of the values of an array of numbers; arbitrary where null."""
    if not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


def places(array: pa.DictionaryArray) -> npt.NDArray[np.int64]:
    """Return the place of each row's value in the dictionary; -1 for null."""
    return _whole(array.indices, if_null=-1)


def _whole(array: pa.Array, *, if_null: int) -> npt.NDArray[np.int64]:
    values = view(array.cast(pa.int64()), np.dtype(np.int64))
    nulls = _nulls(array)
    return values if nulls is None else np.where(nulls, if_null, values)


def mask(array: pa.BooleanArray) -> Mask:
    """Return booleans without nulls as an array of numpy."""
    return view(array.cast(pa.uint8()), np.dtype(np.bool_))


def _nulls(array: pa.Array) -> Mask | None:
    return mask(array.is_null()) if array.null_count else None
