"""Joining: makes one batch of parts from several sources, column by column, in any output format.

Parts are joined after they were converted and decoded, so each source may have its own format, transform and decoders,
as long as all of them deliver the same columns with the same types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from strata.data.batch.output import PackedRows, PaddedRows, RaggedRows
from strata.data.batch.policy import Kind
from strata.errors import SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import numpy.typing as npt

    from strata.data.batch.policy import Policy
    from strata.data.batch.vocabulary import Vocabulary

    Ints = npt.NDArray[np.int64]

_CURE = (
    "make them alike with columns=, decode=, nulls= or transform= of the sources, or pass mix_by='batch', whose "
    "batches have rows of one source only"
)


def delivered_types(
    policies: Sequence[Policy], vocabularies: Mapping[str, Vocabulary], decoded: Collection[str]
) -> dict[str, str]:
    """Return the types of delivered columns, as text; empty for one that a decoder determines."""
    found: dict[str, str] = {}
    for policy in policies:
        kind = f"{policy.delivered} ({policy.value_type})" if policy.kind is Kind.PYTHON else policy.delivered
        if policy.is_coded:
            kind += f" of vocabulary {vocabularies[policy.name].digest}"
        found[policy.name] = "" if policy.name in decoded else kind
        if policy.mask:
            found[policy.mask] = "bool"
    return found


def check_types(sources: Mapping[str, Mapping[str, str]]) -> None:
    """Check that batches of these sources can be joined. `sources`: the delivered types of each.

    Raises:
        SchemaMismatch: A column is missing, or has another type than in another source.
    """
    for (left, ours), (right, theirs) in _pairs(sources):
        _check_names(left, ours, right, theirs)
        for column, kind in ours.items():
            if kind and theirs[column] and kind != theirs[column]:
                raise _differs(column, left, kind, right, theirs[column])


def _pairs(known: Mapping[str, Any]) -> Sequence[tuple[tuple[str, Any], tuple[str, Any]]]:
    items = list(known.items())
    return [(items[0], other) for other in items[1:]]


def _check_names(left: str, ours: Mapping[str, Any], right: str, theirs: Mapping[str, Any]) -> None:
    for one, has, other, lacks in ((left, ours, right, theirs), (right, theirs, left, ours)):
        if missing := [column for column in has if column not in lacks]:
            raise SchemaMismatch(f"source {one!r} has a column {missing[0]!r}, and source {other!r} has not; {_CURE}")


def _differs(column: str, left: str, ours: str, right: str, theirs: str) -> SchemaMismatch:
    return SchemaMismatch(f"column {column!r} is {ours} in source {left!r} and {theirs} in source {right!r}; {_CURE}")


# -- batches -----------------------------------------------------------------------------------------------------------


def num_rows(batch: Any) -> int:
    """Return the rows of a batch in any output format."""
    if not isinstance(batch, dict):
        return int(batch.num_rows) if isinstance(batch, pa.RecordBatch) else len(batch)
    column = next(iter(batch.values()), ())
    match column:
        case RaggedRows():
            return len(column.offsets)
        case PaddedRows():
            return len(column.lengths)
        case PackedRows():
            return len(column.cu_seqlens) - 1
    return len(column)


def join(parts: Sequence[tuple[str, Any]], order: Ints | None) -> Any:
    """Return one batch of these batches, each with the name of its source, with its rows in this order.

    Raises:
        SchemaMismatch: A column has different types.
    """
    first, sample = parts[0]
    if len(parts) == 1:
        return sample if order is None else _ordered(sample, order)
    if isinstance(sample, dict):
        for name, batch in parts[1:]:
            _check_names(first, sample, name, batch)
        joined = {column: _joined(column, [(name, batch[column]) for name, batch in parts]) for column in sample}
        return joined if order is None else _ordered(joined, order)
    whole = _joined_records(parts) if isinstance(sample, pa.RecordBatch) else _joined_frames(parts)
    return whole if order is None else _ordered(whole, order)


def with_column(batch: Any, column: str, values: Ints, output_format: str) -> Any:
    """Return a batch with another column of numbers."""
    if output_format == "arrow":
        return pa.RecordBatch.from_arrays([*batch.columns, pa.array(values)], [*batch.schema.names, column])
    if output_format == "pandas":
        return batch.assign(**{column: values})
    if output_format == "torch":
        import torch  # noqa: PLC0415 - only this format needs torch

        return {**batch, column: torch.from_numpy(values)}
    return {**batch, column: values.tolist() if output_format == "dict" else values}


def columns_of(batch: Any) -> Sequence[str]:
    return batch.schema.names if isinstance(batch, pa.RecordBatch) else list(batch)


def _joined(column: str, parts: Sequence[tuple[str, Any]]) -> Any:
    """Join a column. Decoded values that form a tensor in one part and a list in another become a list."""
    first, sample = parts[0]
    values = [part for _, part in parts]
    if all(isinstance(part, list) or _is_array(part) for part in values):
        shapes = {tuple(part.shape[1:]) if _is_array(part) else None for part in values}
        if len(shapes) > 1 or None in shapes:
            return _listed(column, parts)
    for name, part in parts[1:]:
        if _described(part) != _described(sample):
            raise _differs(column, first, _described(sample), name, _described(part))
    if isinstance(sample, RaggedRows):
        sizes = np.cumsum([0, *(len(part.values) for part in values[:-1])]).tolist()
        offsets = [part.offsets + size for part, size in zip(values, sizes, strict=True)]
        return RaggedRows(_concatenated([part.values for part in values]), _concatenated(offsets))
    if isinstance(sample, PackedRows):
        return PackedRows(
            _concatenated([part.values for part in values]),
            _ends(sample, np.concatenate([np.diff(np.asarray(part.cu_seqlens)) for part in values])),
            _concatenated([part.positions for part in values]),
            max(part.max_seqlen for part in values),
        )
    if isinstance(sample, PaddedRows):
        width = max(part.values.shape[1] for part in values)
        return PaddedRows(
            _concatenated([_widened(part.values, width) for part in values]),
            _concatenated([part.lengths for part in values]),
        )
    return _concatenated(values)


def _listed(column: str, parts: Sequence[tuple[str, Any]]) -> list[Any]:
    """Join values that are in lists, or in tensors of different shapes.

    Raises:
        SchemaMismatch: Sources have values of different types.
    """
    joined: list[Any] = []
    known: tuple[str, str] | None = None
    for name, part in parts:
        rows = part if isinstance(part, list) else part.tolist() if part.ndim == 1 else list(part)
        kinds = sorted({_kind(value) for value in rows if value is not None})
        kind = kinds[0] if len(kinds) == 1 else ""  # objects of several types are the user's
        if kind and known is not None and kind != known[1]:
            raise _differs(column, *known, name, kind)
        known = (name, kind) if kind and known is None else known
        joined += rows
    return joined


def _kind(value: Any) -> str:
    return f"{type(value).__name__} of {value.dtype}" if _is_array(value) else type(value).__name__


def _is_array(values: Any) -> bool:
    return hasattr(values, "dtype") and hasattr(values, "shape")


def _described(part: Any) -> str:
    """Return what must be equal in all parts, as readable text."""
    if isinstance(part, RaggedRows):
        return f"{part.values.dtype} values, offsets"
    if isinstance(part, PackedRows):
        return f"{part.values.dtype} values, cu_seqlens"
    if isinstance(part, PaddedRows):
        return f"{part.values.dtype} × longest, lengths"
    return str(part.dtype) if _is_array(part) else type(part).__name__


def _concatenated(values: Sequence[Any]) -> Any:
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values)
    import torch  # noqa: PLC0415 - the values are tensors

    return torch.cat(list(values))


def _widened(matrix: Any, width: int) -> Any:
    if matrix.shape[1] == width:
        return matrix
    if isinstance(matrix, np.ndarray):
        return np.pad(matrix, ((0, 0), (0, width - matrix.shape[1])))
    wide = matrix.new_zeros((len(matrix), width))
    wide[:, : matrix.shape[1]] = matrix
    return wide


def _joined_records(parts: Sequence[tuple[str, pa.RecordBatch]]) -> pa.RecordBatch:
    first, sample = parts[0]
    for name, batch in parts[1:]:
        _check_names(first, dict.fromkeys(sample.schema.names), name, dict.fromkeys(batch.schema.names))
        for field in sample.schema:
            if batch.schema.field(field.name).type != field.type:
                raise _differs(field.name, first, str(field.type), name, str(batch.schema.field(field.name).type))
    names = sample.schema.names
    alike = [
        pa.RecordBatch.from_arrays([batch.column(name) for name in names], schema=_nullable(sample))
        for _, batch in parts
    ]
    return pa.concat_batches(alike)


def _nullable(batch: pa.RecordBatch) -> pa.Schema:
    return pa.schema([pa.field(field.name, field.type) for field in batch.schema])


def _joined_frames(parts: Sequence[tuple[str, Any]]) -> Any:
    import pandas as pd  # noqa: PLC0415 - only this format needs pandas

    first, sample = parts[0]
    for name, frame in parts[1:]:
        _check_names(first, dict.fromkeys(sample.columns), name, dict.fromkeys(frame.columns))
        for column in sample.columns:
            if frame[column].dtype != sample[column].dtype:
                raise _differs(column, first, str(sample[column].dtype), name, str(frame[column].dtype))
    return pd.concat([frame for _, frame in parts], ignore_index=True)


def _ordered(batch: Any, order: Ints) -> Any:
    if isinstance(batch, dict):
        return {column: _taken(values, order) for column, values in batch.items()}
    if isinstance(batch, pa.RecordBatch):
        return batch.take(pa.array(order))
    return batch.iloc[order].reset_index(drop=True)


def _taken(values: Any, order: Ints) -> Any:
    if isinstance(values, list):
        return [values[row] for row in order.tolist()]
    if isinstance(values, PaddedRows):
        return PaddedRows(*(part[order] for part in values))
    if isinstance(values, PackedRows):
        ends = np.asarray(values.cu_seqlens).astype(np.int64)
        lengths, places = _places(ends, order)
        return PackedRows(values.values[places], _ends(values, lengths), values.positions[places], values.max_seqlen)
    if not isinstance(values, RaggedRows):
        return values[order]
    lengths, places = _places(np.append(np.asarray(values.offsets), len(values.values)), order)
    made = np.cumsum(lengths) - lengths
    if isinstance(values.offsets, np.ndarray):
        return RaggedRows(values.values[places], made)
    return RaggedRows(values.values[places], values.offsets.new_tensor(made))


def _places(bounds: Ints, order: Ints) -> tuple[Ints, Ints]:
    """Return the lengths of rows in this order, and the places of their values."""
    lengths = np.diff(bounds)[order]
    made = np.cumsum(lengths) - lengths
    return lengths, np.arange(int(lengths.sum())) + np.repeat(bounds[:-1][order] - made, lengths)


def _ends(like: PackedRows, lengths: Ints) -> Any:
    """Return `cu_seqlens` of rows with these lengths."""
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return ends if isinstance(like.cu_seqlens, np.ndarray) else like.cu_seqlens.new_tensor(ends)
