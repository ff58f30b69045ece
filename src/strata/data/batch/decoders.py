"""Decode the parts of samples: from the bytes of a file to a tensor, an array or an object, by its extension.

Bytes come from strangers, so no decoder of the default table can execute code, and each bounds what it allocates by
what it was given: arrays are views of their bytes, archives declare their size before it is allocated, and Pillow
refuses images that decompress to too many pixels. pickle must be requested for a column by name.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from strata.errors import ConfigError, DataFileInvalid, InvalidArgument, NullsFound

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from strata.data.config import Missing, OutputFormat

    Decoder = Callable[[bytes], Any]

MAX_UNPACKED_BYTES: Final = 1 << 30
"""The limit of all arrays of one npz file."""
KEY: Final = "__key__"
DECODED_FORMATS: Final = ("torch", "numpy", "dict")
KINDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("txt", "text", "transcript", "caption"), "text"),
    **dict.fromkeys(("cls", "cls2", "index", "inx"), "int"),
    **dict.fromkeys(("json", "jsn"), "json"),
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm", "pgm", "tif", "tiff"), "image"),
    **dict.fromkeys(("pt", "pth"), "torch"),
    "npy": "npy",
    "npz": "npz",
}
"""The default table: decoders by the last part of an extension. Other parts stay bytes."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """How the columns of a batch are decoded. Thread-safe."""

    decoders: Mapping[str, Decoder]
    """By column."""
    output_format: OutputFormat
    missing: Missing = "none"
    can_skip: bool = False
    """Whether rows that cannot be decoded are left out."""

    def value(self, column: str, data: Any, key: str) -> Any:
        """Decode one part; None stays None.

        Raises:
            NullsFound: The part is missing, and must not be.
            DataFileInvalid: It cannot be decoded; the message names the sample.
        """
        if data is None:
            if self.missing == "raise":
                raise NullsFound(
                    f"sample {key!r} has no part {column!r}; pass missing='none' to get None, or missing='skip' with "
                    "columns= to leave such samples out"
                )
            return None
        if not isinstance(data, bytes):
            return data
        try:
            return self.decoders[column](data)
        except MemoryError:
            raise
        except Exception as error:
            raise DataFileInvalid(
                f"part {column!r} of sample {key!r} ({len(data):,} bytes) cannot be decoded: {type(error).__name__}: "
                f"{str(error)[:300]}; repair it, pass on_error='skip', or decode={{{column!r}: False}} for its bytes"
            ) from error

    def stacked(self, values: list[Any]) -> Any:
        """Return one tensor or array if all values have one type and shape, else a list."""
        if self.output_format == "dict" or not values:
            return [_owned(value) for value in values]
        first = values[0]
        if any(type(value) is not type(first) for value in values):
            return self._listed(values)
        if isinstance(first, np.ndarray):
            if any(value.shape != first.shape or value.dtype != first.dtype for value in values):
                return self._listed(values)
            # Without `out`, the result would have the strides of its parts, such as those of transposed images.
            return self._tensor(np.stack(values, out=np.empty((len(values), *first.shape), first.dtype)))
        if isinstance(first, np.number | np.bool_):
            return self._tensor(np.array(values))
        if type(first) in (int, float, bool):
            try:
                return self._tensor(np.array(values, {int: np.int64, float: np.float64, bool: np.bool_}[type(first)]))
            except OverflowError:
                return values
        if self.output_format == "torch" and type(first).__module__ == "torch":
            if any(value.shape != first.shape or value.dtype != first.dtype for value in values):
                return values
            import torch  # noqa: PLC0415 - the values are tensors

            return torch.stack(values)
        return self._listed(values)

    def _listed(self, values: list[Any]) -> list[Any]:
        return [self._tensor(_owned(value)) if isinstance(value, np.ndarray) else value for value in values]

    def _tensor(self, values: Any) -> Any:
        if self.output_format != "torch" or values.dtype.kind not in "biufc" or values.dtype.byteorder == ">":
            return values
        import torch  # noqa: PLC0415 - only this format needs torch

        return torch.from_numpy(values)


def choose(
    columns: Collection[str],
    decode: Any,
    *,
    is_default: bool,
    output_format: OutputFormat,
    missing: Missing = "none",
    can_skip: bool = False,
) -> Decoding | None:
    """Return how to decode these columns, or None if none is decoded.

    Args:
        decode: As the argument of `create_dataloader`: None, False, or a mapping from columns to a function, to a name
            of the table, or to False.
        is_default: Whether columns are decoded by their extension if `decode` does not mention them.

    Raises:
        InvalidArgument: `decode` names a column or a decoder that does not exist, or batches are not decoded.
    """
    if decode is not None and decode is not False and not isinstance(decode, Mapping):
        raise InvalidArgument(
            f"decode={decode!r} must be False, or a mapping from columns to functions: decode={{'jpg': my_function}}",
            field="decode",
        )
    chosen: dict[str, Any] = {} if not decode else dict(decode)
    for column in chosen:
        if column not in columns:
            listed = ", ".join(sorted(columns))
            raise InvalidArgument(f"decode has {column!r}, but the columns are {listed}", field="decode")
    if output_format not in DECODED_FORMATS:
        if any(chosen.values()):
            raise InvalidArgument(
                f"output_format={output_format!r} delivers bytes unchanged; leave out decode=, or use one of "
                f"{', '.join(DECODED_FORMATS)}",
                field="decode",
            )
        return None
    if decode is False or not (is_default or chosen):
        return None
    made: dict[str, Decoder] = {}
    for column in columns:
        if column in chosen:
            how = chosen[column]
        elif is_default and column != KEY:
            how = KINDS.get(column.rpartition(".")[2], False)
        else:
            continue
        if how is not None:
            made[column] = _decoder(column, how, output_format)
    return Decoding(made, output_format, missing, can_skip)


def _decoder(column: str, how: Any, output_format: OutputFormat) -> Decoder:
    if callable(how):
        made: Decoder = how
        return made
    if how is False:
        return bytes
    name = KINDS.get(how, how) if isinstance(how, str) else ""
    if name == "image":
        _require_pillow(column)
        return _image_channels_first if output_format == "torch" else _image
    if name not in _BY_NAME:
        raise InvalidArgument(
            f"decode={{{column!r}: {how!r}}} is unknown; pass a function, False for bytes, or one of "
            f"{', '.join(sorted({*_BY_NAME, 'image'}))}",
            field="decode",
        )
    return _BY_NAME[name]


def _owned(value: Any) -> Any:
    """Return an array in memory of its own, in the usual order: decoders may return views of bytes."""
    if not isinstance(value, np.ndarray) or (value.flags.writeable and value.flags.c_contiguous):
        return value
    return value.copy()


def _require_pillow(column: str) -> None:
    try:
        import PIL.Image  # noqa: F401, PLC0415 - only a check
    except ImportError as error:
        raise ConfigError(
            f"decoding {column!r} needs Pillow: pip install pillow, or pass decode={{{column!r}: my_function}}, or "
            "False for its bytes",
            field="decode",
        ) from error


def _image(data: bytes) -> Any:
    """Return an image as an array of height × width × 3, uint8."""
    from PIL import Image  # noqa: PLC0415 - only for images

    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _image_channels_first(data: bytes) -> Any:
    """Return an image as an array of 3 × height × width, uint8."""
    return _image(data).transpose(2, 0, 1)  # stacking copies it in this order


def _npy(data: bytes) -> Any:
    """Return a view of the bytes as the array that they declare."""
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"npy version {version} is not supported")
    shape, is_fortran, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("the array holds pickled objects, which are refused because unpickling executes code")
    count = 1
    for size in shape:
        count *= int(size)
    if count < 0 or count * dtype.itemsize > len(data) - stream.tell():
        raise ValueError(f"an array of {shape} × {dtype} does not fit into {len(data):,} bytes")
    values = np.frombuffer(data, dtype, count, stream.tell())
    return values.reshape(shape[::-1]).T if is_fortran else values.reshape(shape)


def _npz(data: bytes) -> dict[str, Any]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        unpacked = sum(info.file_size for info in archive.infolist())
        if unpacked > MAX_UNPACKED_BYTES:
            raise ValueError(f"its arrays have {unpacked:,} bytes; the limit is {MAX_UNPACKED_BYTES:,}")
        return {info.filename.removesuffix(".npy"): _npy(archive.read(info)).copy() for info in archive.infolist()}


def _torch(data: bytes) -> Any:
    try:
        import torch  # noqa: PLC0415 - only for files of torch
    except ImportError as error:
        raise ConfigError("files of torch need torch: pip install torch", field="decode") from error
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _text(data: bytes) -> str:
    return data.decode()


def _int(data: bytes) -> int:
    if len(data) > 64:
        raise ValueError("it is not a number")
    return int(data)


_BY_NAME: Final[Mapping[str, Decoder]] = {
    "text": _text,
    "int": _int,
    "json": json.loads,
    "npy": _npy,
    "npz": _npz,
    "torch": _torch,
    "pickle": pickle.loads,  # only if the user names it
    "bytes": bytes,
}
