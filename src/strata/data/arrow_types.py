"""What Arrow's types are to us: what lies in their buffers, and what numpy and torch call it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import pyarrow as pa
import pyarrow.types as pat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt


def plain(kind: pa.DataType) -> pa.DataType:
    """The type of what is encoded: without dictionaries, runs and extensions; strings and binaries are large."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain(kind.storage_type)
    if pat.is_dictionary(kind) or pat.is_run_end_encoded(kind):
        return plain(kind.value_type)
    if pat.is_string(kind) or pat.is_string_view(kind):
        return pa.large_string()
    if pat.is_binary(kind) or pat.is_binary_view(kind) or pat.is_fixed_size_binary(kind):
        return pa.large_binary()
    return kind


def gatherable(kind: pa.DataType) -> pa.DataType:
    """The type itself, or for those whose rows Arrow cannot take in another order, that of what is encoded."""
    return plain(kind) if pat.is_run_end_encoded(kind) or pat.is_string_view(kind) or pat.is_binary_view(kind) else kind


def is_stringlike(kind: pa.DataType) -> bool:
    return bool(pat.is_large_string(kind) or pat.is_large_binary(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether rows are lists of different lengths."""
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
"""Unsigned integers that torch can hardly compute with become the next larger signed ones."""


def physical(kind: pa.DataType) -> np.dtype[Any] | None:
    """How numpy calls what lies in Arrow's buffer; None if it is not one number per row."""
    return next((np.dtype(name) for is_it, name in _PHYSICAL if is_it(kind)), None)


def unit_of(kind: pa.DataType) -> str:
    """Of times; empty for everything else."""
    if pat.is_date32(kind):
        return "days"
    if pat.is_date64(kind):
        return "ms"
    return cast("str", kind.unit) if pat.is_temporal(kind) else ""


def zero_of(kind: pa.DataType) -> Any:
    """What stands in for a null of this type; None if there is no such thing."""
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
    """An array that holds these numbers where they lie. `pa.array` would import pandas to ask whether they are its."""
    buffer = pa.py_buffer(np.ascontiguousarray(values).view(np.uint8) if len(values) else b"")
    return pa.Array.from_buffers(kind, len(values), [None, buffer])
