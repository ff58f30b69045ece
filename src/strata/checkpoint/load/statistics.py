"""Statistics of tensors: minimum, maximum, mean, norm, and the numbers of NaN and infinite elements.

They are computed from raw bytes in pieces that fit into the CPU cache, so they need little memory and can stop between
any two pieces. Sums are float64. They are stored in a file beside the manifest:

    {"strata_statistics": 1, "checkpoint": "<id>", "tensors": {"model.w": {"num_elements": 12, "min": …}, …}}

Loading does not need this file. It is written after the commit, if there is time; if it is missing or invalid, the
checkpoint has no statistics.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from strata.checkpoint.format import dtypes
from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.load import reader
from strata.errors import CheckpointInvalid, ObjectMissing, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from strata.checkpoint.format.buffers import Bytes
    from strata.checkpoint.format.dtypes import DType
    from strata.checkpoint.format.manifest import Manifest, TensorEntry
    from strata.storage import Store, Watch

log = logging.getLogger(__name__)

VERSION = 1
FILE_NAME = "statistics.json"
MAX_BYTES = 256 << 20
"""The maximum size of the file."""
PIECE_ELEMENTS = 1 << 16
"""Half a MiB as float64: a piece stays in the CPU cache while it is processed."""
WINDOW_BYTES = 64 << 20
"""Read from a store at a time."""
_HUGE, _TINY = 1e150, 1e-150
"""The squares of numbers beyond these overflow or lose precision in float64."""
_SCALE = 2.0**-64
"""Scales huge numbers down before they are summed."""

Array = np.ndarray[Any, Any]


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the finite elements of one tensor. Complex numbers count by magnitude."""

    num_elements: int
    min: float | int | None
    """None, like `max` and `mean`, if no element is finite."""
    max: float | int | None
    mean: float | None
    norm: float | None
    """The Euclidean norm; None if it overflows float64."""
    num_nan: int
    num_inf: int

    @property
    def num_finite(self) -> int:
        return self.num_elements - self.num_nan - self.num_inf


def of_bytes(data: Bytes, dtype: DType, *, stop: Callable[[], bool] = lambda: False) -> Statistics | None:
    """Compute the statistics of a tensor; return None if `stop`, called between pieces, returns true."""
    tally = Tally(dtype)
    return tally.result() if tally.add(data, stop=stop) else None


def merged(parts: Sequence[Statistics]) -> Statistics:
    """Merge the statistics of the slices of a tensor."""
    num_finite = sum(part.num_finite for part in parts)
    norms = [part.norm for part in parts]
    return Statistics(
        num_elements=sum(part.num_elements for part in parts),
        min=min((part.min for part in parts if part.min is not None), default=None),
        max=max((part.max for part in parts if part.max is not None), default=None),
        mean=math.fsum(part.mean * (part.num_finite / num_finite) for part in parts if part.mean is not None)
        if num_finite
        else None,
        norm=_finite(math.hypot(*(norm for norm in norms if norm is not None))) if None not in norms else None,
        num_nan=sum(part.num_nan for part in parts),
        num_inf=sum(part.num_inf for part in parts),
    )


def as_plain(one: Statistics | None) -> dict[str, Any] | None:
    """Return the statistics as a dict for JSON."""
    return msgspec.structs.asdict(one) if one is not None else None


class Tally:
    """Computes the statistics of a tensor whose bytes arrive in several parts, each of whole elements."""

    def __init__(self, dtype: DType) -> None:
        self._dtype = dtype
        self._wide = np.empty(PIECE_ELEMENTS, np.float64)
        self._num_elements = self._num_nan = self._num_inf = 0
        self._min: float | int | None = None
        self._max: float | int | None = None
        self._sum = 0.0
        self._sum_of_huge = 0.0
        """The scaled sum of numbers that would overflow the sum."""
        self._squares = 0.0
        self._norms: list[float] = []
        """Of pieces whose squares would overflow."""
        self._counts = np.zeros(256, np.int64) if dtype.itemsize == 1 else None
        """A byte has 256 values, so counting them suffices."""

    def add(self, data: Bytes, *, stop: Callable[[], bool] = lambda: False) -> bool:
        """Add bytes; return False if `stop` returned true and the rest was skipped."""
        size = self._dtype.itemsize
        assert data.nbytes % size == 0, f"{data.nbytes} bytes are not whole elements of {size}"
        data = data.reshape(-1)
        with np.errstate(all="ignore"):
            for start in range(0, data.nbytes, PIECE_ELEMENTS * size):
                if stop():
                    return False
                piece = data[start : start + PIECE_ELEMENTS * size]
                self._num_elements += piece.nbytes // size
                if self._counts is not None:
                    self._counts += np.bincount(piece, minlength=256)
                else:
                    self._add(numbers_in(piece, self._dtype))
        return True

    def result(self) -> Statistics:
        if self._counts is not None:
            return _of_counts(self._counts, _values(self._dtype.name))
        num_finite = self._num_elements - self._num_nan - self._num_inf
        norm = math.hypot(math.sqrt(self._squares), *self._norms)
        return Statistics(
            num_elements=self._num_elements,
            min=self._min,
            max=self._max,
            mean=self._sum / num_finite + self._sum_of_huge / num_finite / _SCALE if num_finite else None,
            norm=_finite(norm),
            num_nan=self._num_nan,
            num_inf=self._num_inf,
        )

    def _add(self, numbers: Array) -> None:
        low, high = numbers.min(), numbers.max()
        if numbers.dtype.kind == "f" and not (np.isfinite(low) and np.isfinite(high)):
            num_nan = int(np.count_nonzero(np.isnan(numbers)))
            finite = numbers[np.isfinite(numbers)]
            self._num_nan += num_nan
            self._num_inf += numbers.size - finite.size - num_nan
            if not finite.size:
                return
            numbers = finite
            low, high = numbers.min(), numbers.max()
        self._min = low.item() if self._min is None else min(self._min, low.item())
        self._max = high.item() if self._max is None else max(self._max, high.item())
        wide = self._wide[: numbers.size]
        np.copyto(wide, numbers, casting="unsafe")
        largest = max(abs(float(low)), abs(float(high)))
        if largest > _HUGE:
            self._sum_of_huge += float((wide * _SCALE).sum())
        else:
            self._sum += float(wide.sum())
        if largest > _HUGE or 0 < largest < _TINY:
            self._norms.append(largest * math.sqrt(float(np.square(wide / largest).sum())))
        else:
            self._squares += float(np.einsum("i,i->", wide, wide))  # not `dot`, which may use all CPUs


def numbers_in(piece: Bytes, dtype: DType) -> Array:
    """Return real numbers that numpy can compute with; for complex numbers their magnitude."""
    if dtype.name in ("BOOL", "F8_E8M0", *_EIGHT_BIT_FLOATS):
        return _table(dtype.name)[piece]
    if not piece.flags.aligned or piece.ctypes.data % min(dtype.itemsize, 8):
        piece = piece.copy()
    if dtype.name == "BF16":  # the upper half of a float32
        bits = piece.view(np.uint16).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    if dtype.name == "F16":
        return piece.view(np.float16).astype(np.float32)
    if dtype.name == "C32":
        parts = piece.view(np.float16).astype(np.float64)
        return np.hypot(parts[0::2], parts[1::2])
    numbers = piece.view(dtypes.to_numpy(dtype))
    return np.abs(numbers.astype(np.complex128)) if numbers.dtype.kind == "c" else numbers


# -- elements of one byte ------------------------------------------------------------------------------------------

_EIGHT_BIT_FLOATS = {"F8_E4M3": (3, 7), "F8_E5M2": (2, 15), "F8_E4M3FNUZ": (3, 8), "F8_E5M2FNUZ": (2, 16)}
"""The number of mantissa bits, and the bias of the exponent."""


@functools.cache
def _table(name: str) -> Array:
    return np.array(_values(name), np.uint8 if name == "BOOL" else np.float64)


@functools.cache
def _values(name: str) -> tuple[float | int, ...]:
    """Return the value of each of the 256 bytes."""
    if name == "BOOL":
        return (0, *[1] * 255)
    if name == "U8":
        return tuple(range(256))
    if name == "I8":
        return tuple(byte - 256 if byte >= 128 else byte for byte in range(256))
    if name == "F8_E8M0":
        return (*[2.0 ** (byte - 127) for byte in range(255)], math.nan)
    return tuple(_eight_bit_float(name, byte) for byte in range(256))


def _eight_bit_float(name: str, byte: int) -> float:
    num_bits, bias = _EIGHT_BIT_FLOATS[name]
    exponent, mantissa = (byte & 0x7F) >> num_bits, byte & ((1 << num_bits) - 1)
    if name.endswith("FNUZ"):  # "finite", "unsigned zero"
        if byte == 0x80:
            return math.nan
    elif name == "F8_E4M3":
        if byte & 0x7F == 0x7F:
            return math.nan
    elif exponent == 31:
        return math.nan if mantissa else math.copysign(math.inf, -1 if byte & 0x80 else 1)
    whole = mantissa + (1 << num_bits if exponent else 0)
    return math.copysign(math.ldexp(whole, max(exponent, 1) - bias - num_bits), -1 if byte & 0x80 else 1)


def _of_counts(counts: Array, values: Sequence[float | int]) -> Statistics:
    there = [(value, int(count)) for value, count in zip(values, counts, strict=True) if count]
    finite = [(value, count) for value, count in there if math.isfinite(value)]
    num_finite = sum(count for _, count in finite)
    return Statistics(
        num_elements=int(counts.sum()),
        min=min((value for value, _ in finite), default=None),
        max=max((value for value, _ in finite), default=None),
        mean=math.fsum(value * count for value, count in finite) / num_finite if num_finite else None,
        norm=_finite(math.sqrt(math.fsum(value * value * count for value, count in finite))),
        num_nan=sum(count for value, count in there if math.isnan(value)),
        num_inf=sum(count for value, count in there if math.isinf(value)),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# -- beside a checkpoint -------------------------------------------------------------------------------------------


class _File(msgspec.Struct):
    strata_statistics: int
    checkpoint: str
    tensors: dict[str, Statistics]


_decoder = msgspec.json.Decoder(_File)


def encode(id: str, tensors: Mapping[str, Statistics]) -> bytes:
    return msgspec.json.encode(_File(VERSION, id, dict(tensors))) + b"\n"


def decode(data: bytes, manifest: Manifest) -> dict[str, Statistics]:
    """Decode and check statistics.

    Raises:
        CheckpointInvalid: They are malformed, or belong to another checkpoint.
    """
    try:
        found = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointInvalid(f"{FILE_NAME} is malformed: {error}") from None
    if found.strata_statistics != VERSION:
        raise CheckpointInvalid(f"{FILE_NAME} has format {found.strata_statistics}, this version reads {VERSION}")
    if found.checkpoint != manifest.id:
        raise CheckpointInvalid(f"{FILE_NAME} belongs to checkpoint {found.checkpoint[:200]!r}, expected {manifest.id}")
    shapes = {tensor.name: tensor.shape for tensor in manifest.tensors}
    for name, one in found.tensors.items():
        if problem := _problem(one, shapes.get(name)):
            raise CheckpointInvalid(f"{FILE_NAME}: tensor {name[:200]!r} {problem}")
    return found.tensors


def _problem(one: Statistics, shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return "is not in the checkpoint"
    if one.num_elements != math.prod(shape):
        return f"has {one.num_elements} elements, expected {math.prod(shape)}"
    if min(one.num_nan, one.num_inf, one.num_finite) < 0:
        return f"has {one.num_nan} NaN and {one.num_inf} infinite elements of {one.num_elements}"
    known = (one.min is None, one.max is None, one.mean is None)
    if known != (one.num_finite == 0,) * 3:
        return f"has {one.num_finite} finite elements, but min={one.min}, max={one.max}, mean={one.mean}"
    if one.min is not None and one.max is not None and one.min > one.max:
        return f"has min={one.min} above max={one.max}"
    return ""


def write(store: Store, id: str, tensors: Mapping[str, Statistics]) -> None:
    """Write the statistics file, unless it would be too large.

    Raises:
        StorageError: The store failed; the checkpoint is not affected.
    """
    data = encode(id, tensors)
    if len(data) > MAX_BYTES:
        log.warning("checkpoint %s gets no statistics: %d bytes, more than the limit of %d", id, len(data), MAX_BYTES)
        return
    store.put(f"{id}/{FILE_NAME}", data)


def read(store: Store, manifest: Manifest) -> dict[str, Statistics] | None:
    """Return the statistics of a checkpoint; None if they are missing or, with a warning, if they are invalid."""
    try:
        return decode(store.get(f"{manifest.id}/{FILE_NAME}", max_bytes=MAX_BYTES), manifest)
    except ObjectMissing:
        return None
    except CheckpointInvalid as error:
        log.warning("ignoring the statistics of checkpoint %s: %s", manifest.id, error)
        return None
    except StorageError as error:
        if type(error) is not StorageError:
            raise  # the store failed
        log.warning("ignoring the statistics of checkpoint %s: %s", manifest.id, error)
        return None


# -- from the data -------------------------------------------------------------------------------------------------


def compute(store: Store, manifest: Manifest, *, watch: Watch) -> dict[str, Statistics]:
    """Compute the statistics of a checkpoint: read and verify all of it, a window at a time.

    Raises:
        CheckpointInvalid: The checkpoint cannot be trusted.
    """
    found = {}
    for group in _groups(manifest.tensors):
        if len(group) == 1 and group[0].num_bytes > WINDOW_BYTES:
            found[group[0].name] = _of_large(store, manifest, group[0], watch)
            continue
        data = reader.read_tensors(store, manifest, [tensor.name for tensor in group], watch=watch)
        for tensor in group:
            tally = Tally(BY_NAME[tensor.dtype])
            tally.add(data[tensor.name])
            found[tensor.name] = tally.result()
    return {tensor.name: found[tensor.name] for tensor in manifest.tensors}


def _groups(tensors: Iterable[TensorEntry]) -> Iterator[list[TensorEntry]]:
    group: list[TensorEntry] = []
    num_bytes = 0
    for tensor in tensors:
        if group and num_bytes + tensor.num_bytes > WINDOW_BYTES:
            yield group
            group, num_bytes = [], 0
        group.append(tensor)
        num_bytes += tensor.num_bytes
    if group:
        yield group


def _of_large(store: Store, manifest: Manifest, tensor: TensorEntry, watch: Watch) -> Statistics:
    dtype = BY_NAME[tensor.dtype]
    tally = Tally(dtype)
    for part in tensor.slices:
        num_bytes = math.prod(part.shape) * dtype.itemsize
        for start in range(0, num_bytes, WINDOW_BYTES):  # whole elements: their sizes are powers of two
            end = min(start + WINDOW_BYTES, num_bytes)
            tally.add(reader.read_contents(store, manifest, tensor, part, start, end, watch=watch))
    return tally.result()
