"""Element types, with their names in our manifest, in safetensors, numpy and torch.

`C64` is the only complex type of safetensors; other complex types are stored as real and imaginary parts in an extra
last dimension of two.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, slots=True)
class DType:
    """One element type."""

    name: str
    """In the manifest, and in the safetensors header unless `stored` is set."""
    itemsize: int
    numpy: str
    """The name in numpy or, with a dot, in the package `ml_dtypes`; empty if neither has the type."""
    torch: str = ""
    """The name in torch; empty if torch has no such type."""
    stored: str = ""
    """The type in the safetensors header, of each of two parts."""

    @property
    def in_file(self) -> str:
        return self.stored or self.name

    def shape_in_file(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape, 2) if self.stored else shape


DTYPES = (
    DType("BOOL", 1, "bool", "bool"),
    DType("U8", 1, "uint8", "uint8"),
    DType("I8", 1, "int8", "int8"),
    DType("U16", 2, "uint16", "uint16"),
    DType("I16", 2, "int16", "int16"),
    DType("U32", 4, "uint32", "uint32"),
    DType("I32", 4, "int32", "int32"),
    DType("U64", 8, "uint64", "uint64"),
    DType("I64", 8, "int64", "int64"),
    DType("F8_E4M3", 1, "ml_dtypes.float8_e4m3fn", "float8_e4m3fn"),
    DType("F8_E5M2", 1, "ml_dtypes.float8_e5m2", "float8_e5m2"),
    DType("F8_E8M0", 1, "ml_dtypes.float8_e8m0fnu", "float8_e8m0fnu"),
    DType("F8_E4M3FNUZ", 1, "ml_dtypes.float8_e4m3fnuz", "float8_e4m3fnuz"),
    DType("F8_E5M2FNUZ", 1, "ml_dtypes.float8_e5m2fnuz", "float8_e5m2fnuz"),
    DType("F16", 2, "float16", "float16"),
    DType("BF16", 2, "ml_dtypes.bfloat16", "bfloat16"),
    DType("F32", 4, "float32", "float32"),
    DType("F64", 8, "float64", "float64"),
    DType("C32", 4, "", "complex32", stored="F16"),
    DType("C64", 8, "complex64", "complex64"),
    DType("C128", 16, "complex128", "complex128", stored="F64"),
)
BY_NAME = {dtype.name: dtype for dtype in DTYPES}
_BY_NUMPY = {dtype.numpy.rpartition(".")[2]: dtype for dtype in DTYPES if dtype.numpy}
_BY_TORCH = {dtype.torch: dtype for dtype in DTYPES if dtype.torch}


@functools.lru_cache(maxsize=256)
def _by_numpy(dtype: np.dtype[Any]) -> DType | None:
    """Cache the lookup: numpy builds a dtype's name on every access."""
    return _BY_NUMPY.get(dtype.name)


def of_numpy(dtype: np.dtype[Any], path: str) -> DType:
    """Return our type of a numpy dtype.

    Raises:
        InvalidArgument: A checkpoint has no such type; the message names `path`.
    """
    found = _by_numpy(dtype)
    if found is None:
        raise InvalidArgument(
            f"{path} has the dtype {dtype}, which a checkpoint cannot store; convert it to one of "
            f"{', '.join(_BY_NUMPY)}",
            field=path,
        )
    return found


def of_torch(dtype: torch.dtype, path: str) -> DType:
    """Return our type of a torch dtype.

    Raises:
        InvalidArgument: A checkpoint has no such type; the message names `path`.
    """
    found = _BY_TORCH.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise InvalidArgument(
            f"{path} has the dtype {dtype}, which a checkpoint cannot store; convert it to one of "
            f"{', '.join(_BY_TORCH)}",
            field=path,
        )
    return found


@functools.cache
def to_numpy(dtype: DType) -> np.dtype[Any]:
    """Return the numpy dtype.

    Raises:
        InvalidArgument: numpy has no such type, and `ml_dtypes` is not installed or has none either.
    """
    import numpy as np  # noqa: PLC0415 - `strata checkpoints ls` needs none

    package, _, name = dtype.numpy.rpartition(".")
    if not package and name:
        return np.dtype(name)
    try:
        found: np.dtype[Any] = np.dtype(getattr(importlib.import_module(package or "ml_dtypes"), name))
    except (ImportError, AttributeError):
        raise InvalidArgument(
            f"numpy has no dtype for {dtype.name}; install ml_dtypes, or load the tensor with torch"
        ) from None
    return found


@functools.cache
def to_torch(dtype: DType) -> torch.dtype:
    """Return the torch dtype.

    Raises:
        InvalidArgument: This version of torch has no such type.
    """
    import torch  # noqa: PLC0415 - torch is optional

    found = getattr(torch, dtype.torch, None) if dtype.torch else None
    if not isinstance(found, torch.dtype):
        raise InvalidArgument(f"torch {torch.__version__} has no dtype for {dtype.name}; install a newer torch")
    return found
