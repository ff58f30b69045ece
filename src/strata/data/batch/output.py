"""Output formats: cuts a chunk of rows into the batches that users receive.

| output_format | a batch is |
|---|---|
| "torch" | a dict of contiguous tensors; `RaggedRows`, `PaddedRows` or `PackedRows` for lists; lists for objects |
| "numpy" | the same with arrays; arrays of objects for objects |
| "arrow" | a `pyarrow.RecordBatch` |
| "pandas" | a `pandas.DataFrame` |
| "dict" | a dict of lists |

Batches share memory blocks but no rows, so a caller may modify a batch. There is no work per row, except for Python
objects, and little per batch: all batches of a column are cut in one call.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.types as pat

from strata.data.arrow_types import of_numbers, recast
from strata.data.batch.columns import ArrowColumn, Dense, Ragged
from strata.data.batch.policy import OUTPUT_FORMATS, Kind
from strata.errors import ConfigError, InvalidArgument, LimitExceeded, SchemaMismatch, StrataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from strata.data.batch.columns import Chunk, Column
    from strata.data.batch.policy import Policy


class RaggedRows(NamedTuple):
    """Rows of variable length, as the arguments of `torch.nn.EmbeddingBag(…)(values, offsets)`."""

    values: Any
    """The values of all rows, concatenated."""
    offsets: Any
    """Where each row begins in `values`: one int64 per row."""


class PaddedRows(NamedTuple):
    """Strings as rows of UTF-8 bytes, or lists with `sequences="padded"`, padded with zeros."""

    values: Any
    """A matrix with one row per string or list; for strings uint8."""
    lengths: Any
    """The length of each row, of strings in bytes, int64; above the width of the matrix if a string was cut."""


class PackedRows(NamedTuple):
    """Lists with `sequences="packed"`: one after the other, without padding, as attention kernels need them."""

    values: Any
    """The values of all rows, concatenated."""
    cu_seqlens: Any
    """Where each row begins in `values`, and one more entry for the end: int32."""
    positions: Any
    """The position of each value in its row, int64."""
    max_seqlen: int
    """The length of the longest row."""


class Presenter:
    """Cuts chunks into batches of one format. Safe for use by several threads."""

    def __init__(self, output_format: str, policies: Sequence[Policy]) -> None:
        """
        Raises:
            InvalidArgument: The format is unknown.
            ConfigError: The format needs a package that is not installed.
        """
        if output_format not in OUTPUT_FORMATS:
            known = ", ".join(OUTPUT_FORMATS)
            raise InvalidArgument(
                f"output_format={output_format!r} is unknown; use one of {known}", field="output_format"
            )
        self._output_format = output_format
        self._as_torch = output_format == "torch"
        self._widths = {policy.name: policy.width for policy in policies if policy.kind is Kind.BYTES}
        self._cut_array: Callable[[npt.NDArray[Any], Sequence[int]], Sequence[Any]]
        self._cut_array = _torch_cutter() if self._as_torch else _cut
        self._sequences = {policy.name: policy.sequences for policy in policies if policy.kind is Kind.RAGGED}
        self._types = {policy.name: policy.value_type for policy in policies if policy.kind is Kind.ARROW}
        self._present = {"arrow": self._record_batches, "pandas": _frames, "dict": _dicts}.get(
            output_format, self._arrays
        )
        if output_format == "pandas":
            _require_pandas()

    def present(self, chunk: Chunk, sizes: Sequence[int]) -> list[Any]:
        """Return one batch per size; together they have all rows of the chunk."""
        assert sum(sizes) == chunk.num_rows, "batches must take all rows"
        try:
            return self._present(chunk.unpack(), list(sizes)) if len(sizes) else []
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OverflowError, ValueError) as error:
            if isinstance(error, StrataError):
                raise
            raise SchemaMismatch(
                f"a column has a value that output_format={self._output_format!r} cannot hold ({_shown(chunk)}): "
                f'{error}; leave it out with columns=, or use output_format="arrow"'
            ) from error

    def _record_batches(self, chunk: Chunk, sizes: Sequence[int]) -> list[Any]:
        """Return batches with the planned types: columns that needed a larger type when joined are narrowed again."""
        batches = _record_batches(chunk, sizes)
        if not batches or all(self._types.get(field.name, field.type) == field.type for field in batches[0].schema):
            return batches
        return [
            pa.RecordBatch.from_arrays(
                [
                    narrowed(array, self._types.get(field.name, field.type))
                    for field, array in zip(batch.schema, batch.columns, strict=True)
                ],
                batch.schema.names,
            )
            for batch in batches
        ]

    def _arrays(self, chunk: Chunk, sizes: Sequence[int]) -> list[Any]:
        names = tuple(chunk.columns)
        columns = [self._pieces(name, column, sizes) for name, column in chunk.columns.items()]
        if not columns:
            return [{} for _ in sizes]
        return [dict(zip(names, pieces, strict=True)) for pieces in zip(*columns, strict=True)]

    def _pieces(self, name: str, column: Column, sizes: Sequence[int]) -> Sequence[Any]:
        """Return the piece of a column for each batch."""
        if isinstance(column, Dense):
            return self._cut_array(_owned(column.values), sizes)
        if isinstance(column, Ragged):
            if name in self._widths:
                return self._padded(column, sizes, self._widths[name])
            match self._sequences.get(name):
                case "padded":
                    return self._padded(column, sizes, None)
                case "packed":
                    return self._packed(column, sizes)
            return self._ragged(column, sizes)
        assert isinstance(column, ArrowColumn)
        return _cut(objects(column.array) if self._as_torch else _object_array(column.array), sizes)

    def _ragged(self, column: Ragged, sizes: Sequence[int]) -> list[RaggedRows]:
        bounds = _bounds(sizes)
        firsts = column.offsets[bounds]
        offsets = column.offsets[:-1] - np.repeat(firsts[:-1], sizes)
        values = self._cut_array(_owned(column.rows), np.diff(firsts).tolist())
        return [RaggedRows(*pair) for pair in zip(values, self._cut_array(offsets, sizes), strict=True)]

    def _packed(self, column: Ragged, sizes: Sequence[int]) -> list[PackedRows]:
        bounds = _bounds(sizes)
        firsts = column.offsets[bounds]
        num_values = np.diff(firsts).tolist()
        within = np.arange(len(column.rows)) - np.repeat(column.offsets[:-1] - column.offsets[0], column.lengths)
        parts = zip(
            self._cut_array(_owned(column.rows), num_values),
            self._cut_array(within, num_values),
            itertools.pairwise(bounds.tolist()),
            strict=True,
        )
        return [self._packed_batch(column.slice(*pair), values, positions) for values, positions, pair in parts]

    def _packed_batch(self, column: Ragged, values: Any, positions: Any) -> PackedRows:
        ends = (column.offsets - column.offsets[0]).astype(np.int32)
        return PackedRows(values, self._cut_array(ends, [len(ends)])[0], positions, int(column.lengths.max(initial=0)))

    def _padded(self, column: Ragged, sizes: Sequence[int], width: int | None) -> list[PaddedRows]:
        lengths = self._cut_array(column.lengths, sizes)
        if width is not None:
            values = self._cut_array(pad(column, width), sizes)
        else:
            bounds = _bounds(sizes).tolist()
            rows = [column.slice(first, last) for first, last in itertools.pairwise(bounds)]
            matrices = [pad(part, int(part.lengths.max(initial=0))) for part in rows]
            values = [self._cut_array(matrix, [len(matrix)])[0] for matrix in matrices]
        return [PaddedRows(*pair) for pair in zip(values, lengths, strict=True)]


def pad(column: Ragged, width: int) -> npt.NDArray[Any]:
    """Return a matrix of this width; longer rows are cut, shorter rows are padded with zeros."""
    matrix = np.zeros((len(column), width), column.values.dtype)
    lengths = column.lengths
    places = np.arange(width)
    is_there = places < lengths[:, None]
    if lengths.max(initial=0) <= width:
        matrix[is_there] = column.rows
    else:
        matrix[is_there] = column.values[(column.offsets[:-1, None] + places)[is_there]]
    return matrix


def objects(array: pa.Array) -> list[Any]:
    """Return the values as Python objects, None for null."""
    if pat.is_large_string(array.type) or pat.is_large_binary(array.type) or _is_number(array):
        quick: list[Any] = array.to_numpy(zero_copy_only=False).tolist()
        return quick
    slow: list[Any] = array.to_pylist()
    return slow


def _is_number(array: pa.Array) -> bool:
    kind = array.type
    return not array.null_count and (
        pat.is_integer(kind) or pat.is_float32(kind) or pat.is_float64(kind) or pat.is_boolean(kind)
    )


def _object_array(array: pa.Array) -> npt.NDArray[np.object_]:
    values = np.empty(len(array), object)
    values[:] = objects(array)
    return values


def _owned(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return memory that the caller may write to; that of mapped files is copied."""
    return values if values.flags.writeable and values.flags.c_contiguous else values.copy()


def _bounds(sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    bounds = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=bounds[1:])
    return bounds


def _cut(values: Any, sizes: Sequence[int]) -> list[Any]:
    bounds = _bounds(sizes).tolist()
    return [values[first:last] for first, last in itertools.pairwise(bounds)]


def _torch_cutter() -> Callable[[npt.NDArray[Any], Sequence[int]], Sequence[Any]]:
    try:
        import torch  # noqa: PLC0415 - only this format needs torch
    except ImportError as error:
        raise ConfigError(
            'output_format="torch" needs torch: pip install torch, or use output_format="numpy"'
        ) from error

    def cut(values: npt.NDArray[Any], sizes: Sequence[int]) -> Sequence[Any]:
        # Safe views refuse in-place changes that have a gradient, to protect the other views.
        pieces: Sequence[Any] = torch.unsafe_split_with_sizes(torch.from_numpy(values), sizes)
        return pieces

    return cut


# Formats that keep Arrow columns


def _whole(chunk: Chunk) -> pa.RecordBatch:
    arrays = []
    for column in chunk.columns.values():
        assert isinstance(column, ArrowColumn)
        arrays.append(column.array)
    if not arrays:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * chunk.num_rows, pa.struct([])))
    return pa.RecordBatch.from_arrays(arrays, list(chunk.columns))


def _record_batches(chunk: Chunk, sizes: Sequence[int]) -> list[Any]:
    whole = _whole(chunk)
    bounds = _bounds(sizes).tolist()
    return [whole.slice(first, size) for first, size in zip(bounds, sizes, strict=False)]


def _frames(chunk: Chunk, sizes: Sequence[int]) -> list[Any]:
    return [batch.to_pandas() for batch in _record_batches(chunk, sizes)]


def _dicts(chunk: Chunk, sizes: Sequence[int]) -> list[Any]:
    columns = {}
    for name, column in chunk.columns.items():
        assert isinstance(column, ArrowColumn)
        columns[name] = _cut(objects(column.array), sizes)
    return [{name: pieces[number] for name, pieces in columns.items()} for number in range(len(sizes))]


def narrowed(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast to the planned, smaller type.

    Raises:
        LimitExceeded: The type cannot address so many bytes.
    """
    if array.type == kind:
        return array
    try:
        return recast(array.take(of_numbers(np.arange(len(array)), pa.int64())), kind)  # a copy, with offsets from 0
    except pa.ArrowInvalid as error:
        raise LimitExceeded(
            f"{len(array):,} rows of a {kind} column do not fit into one batch: {error}; lower batch_size"
        ) from error


def _shown(chunk: Chunk) -> str:
    kinds = (
        f"{name} is {each.array.type}" for name, each in chunk.unpack().columns.items() if isinstance(each, ArrowColumn)
    )
    return ", ".join(kinds)


def _require_pandas() -> None:
    try:
        import pandas  # noqa: F401, ICN001, PLC0415 - only a check; pyarrow uses it
    except ImportError as error:
        raise ConfigError(
            'output_format="pandas" needs pandas: pip install pandas, or use output_format="arrow"'
        ) from error
