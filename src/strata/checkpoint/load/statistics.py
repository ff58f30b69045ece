"""What the numbers of a tensor look like: least, greatest, mean, norm, and how many are none.

They are computed from raw bytes in pieces that fit into a processor's cache, so they need next to no memory and can be
given up between any two pieces; sums are kept in float64. They stand in a file of their own beside the manifest,

    {"strata_statistics": 1, "checkpoint": "<id>", "tensors": {"model.w": {"num_elements": 12, "min": …}, …}}

which nobody needs in order to load: it is written after the commit, if there is time, and if it is missing or wrong,
there are no statistics.
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
"""Of the file."""
PIECE_ELEMENTS = 1 << 16
"""As float64 half a MiB: what is read once stays in the cache for the rest."""
WINDOW_BYTES = 64 << 20
"""Read from a store at a time."""
_HUGE, _TINY = 1e150, 1e-150
"""Numbers beyond these have squares that float64 does not hold, or only roughly."""
_SCALE = 2.0**-64
"""Sums of numbers near the greatest there is are taken of these so much smaller."""

Array = np.ndarray[Any, Any]


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Of one tensor. What is not finite is counted, and left out of the rest. Complex numbers count by magnitude."""

    num_elements: int
    min: float | int | None
    """None, as with `max` and `mean`: there is no finite element."""
    max: float | int | None
    mean: float | None
    norm: float | None
    """The root of the sum of the squares; None if float64 does not reach that far."""
    num_nan: int
    num_inf: int

    @property
    def num_finite(self) -> int:
        return self.num_elements - self.num_nan - self.num_inf


def of_bytes(data: Bytes, dtype: DType, *, stop: Callable[[], bool] = lambda: False) -> Statistics | None:
    """None: `stop` said so, which is asked between pieces."""
    tally = Tally(dtype)
    return tally.result() if tally.add(data, stop=stop) else None


def merged(parts: Sequence[Statistics]) -> Statistics:
    """Of a tensor whose slices were looked at apart."""
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
    """For `json`."""
    return msgspec.structs.asdict(one) if one is not None else None


class Tally:
    """Statistics of a tensor whose bytes come in several parts, each of whole elements."""

    def __init__(self, dtype: DType) -> None:
        self._dtype = dtype
        self._wide = np.empty(PIECE_ELEMENTS, np.float64)
        self._num_elements = self._num_nan = self._num_inf = 0
        self._min: float | int | None = None
        self._max: float | int | None = None
        self._sum = 0.0
        self._sum_of_huge = 0.0
        """Of what would not fit into the sum, scaled."""
        self._squares = 0.0
        self._norms: list[float] = []
        """Of pieces whose squares float64 does not hold."""
        self._counts = np.zeros(256, np.int64) if dtype.itemsize == 1 else None
        """One byte has 256 values: counting them tells all."""

    def add(self, data: Bytes, *, stop: Callable[[], bool] = lambda: False) -> bool:
        """False: `stop` said so, and the rest was left out."""
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
                    self._add(_numbers(piece, self._dtype))
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
            self._squares += float(np.einsum("i,i->", wide, wide))  # not `dot`, which may take every processor


def _numbers(piece: Bytes, dtype: DType) -> Array:
    """As real numbers that numpy computes in; of complex ones their magnitude."""
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
"""Bits of the mantissa, and what is taken from the exponent."""


@functools.cache
def _values(name: str) -> tuple[float | int, ...]:
    """What each of the 256 bytes stands for."""
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
    """
    Raises:
        CheckpointInvalid: They are none, or not of this checkpoint; the message says why.
    """
    try:
        found = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointInvalid(f"{FILE_NAME} holds no statistics: {error}") from None
    if found.strata_statistics != VERSION:
        raise CheckpointInvalid(f"{FILE_NAME} has format {found.strata_statistics}, this version reads {VERSION}")
    if found.checkpoint != manifest.id:
        raise CheckpointInvalid(f"{FILE_NAME} is of checkpoint {found.checkpoint[:200]!r}, not of {manifest.id}")
    shapes = {tensor.name: tensor.shape for tensor in manifest.tensors}
    for name, one in found.tensors.items():
        if problem := _problem(one, shapes.get(name)):
            raise CheckpointInvalid(f"{FILE_NAME}: tensor {name[:200]!r} {problem}")
    return found.tensors


def _problem(one: Statistics, shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return "is not in the checkpoint"
    if one.num_elements != math.prod(shape):
        return f"is said to have {one.num_elements} elements, {math.prod(shape)} are expected"
    if min(one.num_nan, one.num_inf, one.num_finite) < 0:
        return f"is said to have {one.num_nan} NaN and {one.num_inf} infinite of {one.num_elements} elements"
    known = (one.min is None, one.max is None, one.mean is None)
    if known != (one.num_finite == 0,) * 3:
        return f"has {one.num_finite} finite elements, and yet min={one.min}, max={one.max}, mean={one.mean}"
    if one.min is not None and one.max is not None and one.min > one.max:
        return f"is said to lie between {one.min} and {one.max}"
    return ""


def write(store: Store, id: str, tensors: Mapping[str, Statistics]) -> None:
    """Not for more tensors than the file may tell of: then there are none.

    Raises:
        StorageError: The store refuses it; the checkpoint is none the worse for it.
    """
    data = encode(id, tensors)
    if len(data) > MAX_BYTES:
        log.warning("checkpoint %s gets no statistics: %d bytes, at most %d are read", id, len(data), MAX_BYTES)
        return
    store.put(f"{id}/{FILE_NAME}", data)


def read(store: Store, manifest: Manifest) -> dict[str, Statistics] | None:
    """None: there are none, or none that can be true; the log says why."""
    try:
        return decode(store.get(f"{manifest.id}/{FILE_NAME}", max_bytes=MAX_BYTES), manifest)
    except ObjectMissing:
        return None
    except CheckpointInvalid as error:
        log.warning("the statistics of checkpoint %s are passed over: %s", manifest.id, error)
        return None
    except StorageError as error:
        if type(error) is not StorageError:
            raise  # the store's fault
        log.warning("the statistics of checkpoint %s are passed over: %s", manifest.id, error)
        return None


# -- from the data -------------------------------------------------------------------------------------------------


def compute(store: Store, manifest: Manifest, *, watch: Watch) -> dict[str, Statistics]:
    """Reads the whole checkpoint, a window at a time, verified on the way.

    Raises:
        CheckpointInvalid: Something is not as it was written.
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
        for start in range(0, num_bytes, WINDOW_BYTES):  # of whole elements: they have a power of two of bytes
            end = min(start + WINDOW_BYTES, num_bytes)
            tally.add(reader.read_contents(store, manifest, tensor, part, start, end, watch=watch))
    return tally.result()
