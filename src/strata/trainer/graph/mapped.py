"""Arrays that stay on disk: a read-only memory map is pickled as its path and opened again on the other side.

Without this, sending a graph to a worker process would copy every byte of a file that the worker can map itself.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedFile:
    """Describes an array in a file."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    is_fortran: bool

    def open(self) -> npt.NDArray[Any]:
        """Map the file.

        Raises:
            InvalidArgument: The file is not readable on this machine.
        """
        try:
            found: Any = np.memmap(
                self.path,
                dtype=self.dtype,
                mode="r",
                offset=self.offset,
                shape=self.shape,
                order="F" if self.is_fortran else "C",
            )
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                f"cannot map {self.path} in this process ({error}); keep memory-mapped arrays on a file system that "
                "all workers share, under one path, and do not change them during a run",
                field="path",
            ) from error
        return plain(found)


def plain(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a view of an array, mapped or not, without the cost that `np.memmap` adds to every operation."""
    return array.view(np.ndarray)


def to_pickle(array: npt.NDArray[Any]) -> npt.NDArray[Any] | MappedFile:
    """Return what to pickle for the result of `plain`: the file if it is a whole read-only map, else the array."""
    mapped = array.base
    owner: object = getattr(mapped, "base", None)
    if (
        not isinstance(mapped, np.memmap)
        or not isinstance(owner, mmap.mmap)  # a slice, which has the attributes of the whole map, is owned by that
        or mapped.mode != "r"
        or (mapped.shape, mapped.dtype) != (array.shape, array.dtype)
    ):
        return array
    return MappedFile(
        path=str(mapped.filename),
        dtype=mapped.dtype.str,
        shape=mapped.shape,
        offset=mapped.offset,
        is_fortran=not mapped.flags.c_contiguous,
    )


def from_pickle(state: npt.NDArray[Any] | MappedFile) -> npt.NDArray[Any]:
    """Return the array for what `to_pickle` returned.

    Raises:
        InvalidArgument: Its file is not readable on this machine.
    """
    return state.open() if isinstance(state, MappedFile) else state
