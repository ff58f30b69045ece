"""Arrow types: their physical layout, their numpy and torch dtypes, and casts that Arrow lacks.

Shared by `plan`, which unifies the types of files, and `batch`, which delivers them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt


def plain(kind: pa.DataType) -> pa.DataType:
    """Return the type of the encoded values: without dictionaries, runs and extensions; strings become large."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain(kind.storage_type)
    if pat.is_dictionary(kind) or pat.is_run_end_encoded(kind):
        return plain(kind.value_type)
    if pat.is_string(kind) or pat.is_string_view(kind):
        return pa.large_string()
    if pat.is_binary(kind) or pat.is_binary_view(kind) or pat.is_fixed_size_binary(kind):
        return pa.large_binary()
    return kind


def filterable(kind: pa.DataType) -> pa.DataType:
    """Return a type whose values can be compared and filtered, at any depth: the type itself, if possible.

    Arrow has no kernels for views and run-end encoded types; they become the types of their values.
    """
    if isinstance(kind, pa.BaseExtensionType):
        storage = filterable(kind.storage_type)
        return kind if storage == kind.storage_type else storage
    if pat.is_run_end_encoded(kind) or pat.is_string_view(kind) or pat.is_binary_view(kind):
        return plain(filterable(plain(kind)))
    if pat.is_dictionary(kind):
        return pa.dictionary(kind.index_type, filterable(kind.value_type), kind.ordered)
    return with_children(kind, filterable)


def gatherable(kind: pa.DataType) -> pa.DataType:
    """Return a type in which rows can be concatenated and gathered, at any depth: the type itself, if possible.

    It is `filterable`, and dictionary codes have at least 32 bits, because the dictionaries of several files together
    have more values than each.
    """
    if isinstance(kind, pa.BaseExtensionType):
        storage = gatherable(kind.storage_type)
        return kind if storage == kind.storage_type else storage
    if (other := filterable(kind)) != kind:
        return gatherable(other)
    if pat.is_dictionary(kind):
        index = pa.int32() if kind.index_type.bit_width < 32 or kind.index_type == pa.int32() else pa.int64()
        return pa.dictionary(index, gatherable(kind.value_type), kind.ordered)
    return with_children(kind, gatherable)


def for_pandas(kind: pa.DataType, *, is_in_list: bool = False) -> pa.DataType:
    """Return the type to convert to pandas, because pyarrow cannot convert some values of some types.

    A time of day in nanoseconds becomes the time since midnight, because Python's `time` has microseconds. Fixed-size
    binaries and extensions in lists become their storage types.
    """
    if kind == pa.time64("ns"):
        return pa.duration("ns")
    if is_in_list and isinstance(kind, pa.BaseExtensionType):
        return for_pandas(kind.storage_type, is_in_list=True)
    if is_in_list and pat.is_fixed_size_binary(kind):
        return pa.binary()
    if pat.is_dictionary(kind):
        return pa.dictionary(kind.index_type, for_pandas(kind.value_type), kind.ordered)
    is_list_too = is_list(kind) or pat.is_fixed_size_list(kind)
    return with_children(kind, lambda child: for_pandas(child, is_in_list=is_list_too))


def enlarged(kind: pa.DataType) -> pa.DataType:
    """Return the type whose arrays may exceed 2 GiB; the type itself if there is none."""
    if pat.is_string(kind):
        return pa.large_string()
    if pat.is_binary(kind):
        return pa.large_binary()
    if pat.is_dictionary(kind):
        return pa.dictionary(kind.index_type, enlarged(kind.value_type), kind.ordered)
    if pat.is_list(kind):
        return pa.large_list(kind.value_field.with_type(enlarged(kind.value_type)))
    return with_children(kind, enlarged)


def with_children(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return a type with its child types changed; a type without children is returned unchanged."""
    if pat.is_struct(kind):
        made = pa.struct([field.with_type(change(field.type)) for field in kind])
    elif pat.is_map(kind):
        key, item = (field.with_type(change(field.type)) for field in (kind.key_field, kind.item_field))
        made = pa.map_(key, item, kind.keys_sorted)
    elif pat.is_fixed_size_list(kind):
        made = pa.list_(kind.value_field.with_type(change(kind.value_type)), kind.list_size)
    elif is_list(kind):
        values = kind.value_field.with_type(change(kind.value_type))
        is_large = pat.is_large_list(kind) or pat.is_large_list_view(kind)
        made = pa.large_list(values) if is_large else pa.list_(values)
        if values == kind.value_field:
            return kind
    else:
        return kind
    return kind if made == kind else made


def recast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast values to another type, at any depth. Types without a cast in Arrow are cast child by child.

    Lists always are: Arrow's cast of a slice of lists of lists of nulls returns wrong rows or crashes the process.

    Raises:
        pa.ArrowInvalid, pa.ArrowNotImplementedError: A value does not fit, or the types are incompatible.
    """
    own = array.type
    if own == kind:
        return array
    if pat.is_null(own):
        return pa.nulls(len(array), kind)
    if isinstance(own, pa.BaseExtensionType):
        return recast(array.storage, kind)
    if pat.is_run_end_encoded(own):
        return recast(pc.run_end_decode(array), kind)
    if pat.is_dictionary(own):
        if pat.is_dictionary(kind):
            values = recast(array.dictionary, kind.value_type)
            return pa.DictionaryArray.from_arrays(array.indices.cast(kind.index_type), values, ordered=kind.ordered)
        return recast(recast(array.dictionary, gatherable(own.value_type)).take(array.indices), kind)
    if own == pa.time64("ns") and kind == pa.duration("ns"):
        return array.view(kind)
    return _recast_nested(array, kind)


def _recast_nested(array: pa.Array, kind: pa.DataType) -> pa.Array:
    own = array.type
    nulls = array.is_null() if array.null_count else None
    if pat.is_struct(own) and pat.is_struct(kind) and own.names == kind.names:
        children = [recast(array.field(place), field.type) for place, field in enumerate(kind)]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=nulls)
    if pat.is_fixed_size_list(own) and pat.is_fixed_size_list(kind) and own.list_size == kind.list_size:
        values = array.values.slice(array.offset * own.list_size, len(array) * own.list_size)
        return pa.FixedSizeListArray.from_arrays(recast(values, kind.value_type), type=kind, mask=nulls)
    if pat.is_map(own) and pat.is_map(kind):
        offsets, first, last = _offsets(array, np.int32)
        keys, items = (each.slice(first, last - first) for each in (array.keys, array.items))
        keys, items = recast(keys, kind.key_type), recast(items, kind.item_type)
        return pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=nulls)
    if (is_list(own) or pat.is_fixed_size_list(own)) and (pat.is_list(kind) or pat.is_large_list(kind)):
        if pat.is_list(own) or pat.is_large_list(own):
            offsets, first, last = _offsets(array, np.int32 if pat.is_list(own) else np.int64)
            values = array.values.slice(first, last - first)
        else:
            lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
            offsets, values = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), array.flatten()
        made, width = (pa.ListArray, pa.int32()) if pat.is_list(kind) else (pa.LargeListArray, pa.int64())
        places = of_numbers(offsets, pa.int64()).cast(width) if offsets.dtype == np.int64 else pa.array(offsets, width)
        return made.from_arrays(places, recast(values, kind.value_type), type=kind, mask=nulls)
    return array.cast(kind)


def _offsets(array: pa.Array, dtype: type[np.signedinteger[Any]]) -> tuple[npt.NDArray[Any], int, int]:
    """Return the offsets of lists, starting at 0, and the range that they occupy in the values."""
    if not len(array):
        return np.zeros(1, dtype), 0, 0
    size = np.dtype(dtype).itemsize
    offsets = np.frombuffer(array.buffers()[1], dtype, len(array) + 1, array.offset * size)
    return offsets - offsets[0], int(offsets[0]), int(offsets[-1])


def is_stringlike(kind: pa.DataType) -> bool:
    return bool(pat.is_large_string(kind) or pat.is_large_binary(kind))


def is_list(kind: pa.DataType) -> bool:
    """Return whether rows are lists of variable length."""
    return bool(pat.is_list(kind) or pat.is_large_list(kind) or pat.is_list_view(kind) or pat.is_large_list_view(kind))


_PHYSICAL: Final[tuple[tuple[Callable[[pa.DataType], bool], str], ...]] = (
    *((getattr(pat, f"is_{name}"), name) for name in ("int8", "int16", "int32", "int64")),
    *((getattr(pat, f"is_{name}"), name) for name in ("uint8", "uint16", "uint32", "uint64")),
    *((getattr(pat, f"is_{name}"), name) for name in ("float16", "float32", "float64")),
    (pat.is_boolean, "bool"),
    *((is_time, "int32") for is_time in (pat.is_date32, pat.is_time32)),
    *((is_time, "int64") for is_time in (pat.is_timestamp, pat.is_duration, pat.is_time64, pat.is_date64)),
)

TORCH_DTYPES: Final[Mapping[np.dtype[Any], np.dtype[Any]]] = {
    np.dtype(np.uint16): np.dtype(np.int32),
    np.dtype(np.uint32): np.dtype(np.int64),
    np.dtype(np.uint64): np.dtype(np.int64),
}
"""Unsigned integers that torch barely supports become the next larger signed ones."""


def physical(kind: pa.DataType) -> np.dtype[Any] | None:
    """Return the numpy dtype of Arrow's buffer, or None if it does not hold one number per row."""
    return next((np.dtype(name) for is_it, name in _PHYSICAL if is_it(kind)), None)


def unit_of(kind: pa.DataType) -> str:
    """Return the unit of a time type; empty for other types."""
    if pat.is_date32(kind):
        return "days"
    if pat.is_date64(kind):
        return "ms"
    return cast("str", kind.unit) if pat.is_temporal(kind) else ""


def zero_of(kind: pa.DataType) -> Any:
    """Return the value that replaces a null of this type, or None if there is none."""
    kind = plain(kind)
    if pat.is_large_string(kind):
        return ""
    if pat.is_large_binary(kind):
        return b""
    if pat.is_boolean(kind):
        return False
    if pat.is_floating(kind):
        return 0.0
    return 0 if pat.is_decimal(kind) or physical(kind) is not None else None


def of_numbers(values: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Wrap numbers in an Arrow array without a copy. `pa.array` would import pandas to check their type."""
    buffer = pa.py_buffer(np.ascontiguousarray(values).view(np.uint8) if len(values) else b"")
    return pa.Array.from_buffers(kind, len(values), [None, buffer])
