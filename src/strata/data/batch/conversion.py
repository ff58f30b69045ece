"""Conversion of decoded Arrow tables to the columns that batches are cut from.

A column's policy decides how; this module does it. Numbers without nulls are not copied: the column is a view of
Arrow's memory and keeps it alive. If that memory is shared (a mapped file, a part of a larger message, memory that a
transform keeps), the view is read-only, and is copied when it becomes a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from strata.data.arrow_types import physical, plain, recast
from strata.data.batch.columns import ArrowColumn, Chunk, Dense, Ragged
from strata.data.batch.policy import Kind, Nulls
from strata.errors import InvalidArgument, NullsFound, SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from strata.data.batch.columns import Column
    from strata.data.batch.policy import Policy
    from strata.data.batch.vocabulary import Vocabulary


class Converter:
    """Converts tables of one schema to chunks. Safe for use by several threads."""

    def __init__(
        self,
        policies: Sequence[Policy],
        vocabularies: Mapping[str, Vocabulary] | None = None,
        *,
        is_private: bool = True,
    ) -> None:
        """`vocabularies`: by name, for every policy that `is_coded`.

        `is_private`: whether the memory of the tables is not shared. The result of a user's transform may be; its
        columns are copied before they are delivered.

        Raises:
            InvalidArgument: A vocabulary is missing, or its type is not that of its column.
        """
        vocabularies = vocabularies or {}
        for policy in policies:
            if policy.is_coded:
                _check_vocabulary(policy, vocabularies.get(policy.name))
        self._makers = [
            _Maker(policy, vocabularies.get(policy.name), is_private, _direct(policy)) for policy in policies
        ]
        self._known: tuple[pa.Schema, list[int]] | None = None

    def convert(self, table: pa.Table, where: str) -> Chunk:
        """Convert all rows of a table; `where` names its origin in errors.

        Raises:
            NullsFound: A column has nulls that its policy does not allow.
            SchemaMismatch: A column is missing or has another type than planned, or a value does not fit.
        """
        columns: dict[str, Column] = {}
        for maker, place in zip(self._makers, self._places(table.schema, where), strict=True):
            chunks = table.column(place).chunks
            if len(chunks) == 1:
                maker.make(chunks[0], where, columns)
            else:
                maker.make_from_many(chunks, where, columns)
        return Chunk(columns, table.num_rows)

    def _places(self, schema: pa.Schema, where: str) -> list[int]:
        """Return the index of each policy's column; cached for the last schema."""
        known = self._known
        if known is not None and known[0].equals(schema):
            return known[1]
        places = [maker.place(schema, where) for maker in self._makers]
        self._known = (schema, places)
        return places


def vocabulary_values(policy: Policy, table: pa.Table) -> list[pa.Array]:
    """Return the strings of a coded column, taken out of lists and structs, for `Vocabulary.found`."""
    return [_values(policy, _descend(policy, chunk)) for chunk in table.column(policy.path[0]).chunks]


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes one column and its mask."""

    policy: Policy
    vocabulary: Vocabulary | None
    is_private: bool
    direct: np.dtype[Any] | None
    """The numpy dtype, if Arrow's buffer can be delivered without conversion (and there are no nulls). Most columns are
    like this, so they must cost next to nothing."""

    def place(self, schema: pa.Schema, where: str) -> int:
        policy = self.policy
        place: int = schema.get_field_index(policy.path[0])
        if place < 0:
            raise SchemaMismatch(
                f"{where}: there is not exactly one column {policy.path[0]!r}; columns: {', '.join(schema.names)}"
            )
        found = schema.field(place).type
        for child in policy.path[1:]:
            if not pat.is_struct(found) or (child_place := found.get_field_index(child)) < 0:
                found = None
                break
            found = found.field(child_place).type
        if found != policy.type:
            raise SchemaMismatch(
                f"{where}: column {policy.name!r} is {found or 'missing'}, but was planned as {policy.type}; "
                "a transform must always return the same types, and files must not change"
            )
        return place

    def make_from_many(self, chunks: Sequence[pa.Array], where: str, columns: dict[str, Column]) -> None:
        made: list[dict[str, Column]] = []
        for chunk in chunks or [_empty(self.policy)]:
            made.append({})
            self.make(chunk, where, made[-1])
        for name, column in made[0].items():
            columns[name] = type(column).gather([one[name] for one in made], None)

    def make(self, array: pa.Array, where: str, columns: dict[str, Column]) -> None:
        """Add the column, and its mask if it has one, to `columns`."""
        policy = self.policy
        if self.direct is not None and not array.null_count:
            columns[policy.name] = Dense(self._shared(_view(array, self.direct)))
            return
        if len(policy.path) > 1:
            array = _descend(policy, array)
        # Decoded first, because encoded values may have nulls that the encoding does not count.
        if policy.kind in (Kind.ARROW, Kind.PYTHON):
            array = recast(array, policy.value_type)
        else:
            array = _unwrapped(array) if _is_nested(policy) else _decoded(array, policy.value_type)
        if policy.nulls is Nulls.ERROR:
            _refuse_nulls(policy, array, where)
        try:
            columns[policy.name] = self._column(array, where)
        except (pa.ArrowInvalid, OverflowError) as error:
            raise SchemaMismatch(
                f"{where}: column {policy.name!r} ({policy.type}) has a value that does not fit "
                f"{policy.delivered}: {error}; {_cure(policy)}"
            ) from error
        if policy.mask:
            columns[policy.mask] = self._mask(array)

    def _column(self, array: pa.Array, where: str) -> Column:
        policy = self.policy
        match policy.kind:
            case Kind.DENSE if policy.width is None:
                return Dense(self._numbers(array, where))
            case Kind.DENSE:
                return Dense(self._numbers(_flat(policy, array), where).reshape(len(array), policy.width or 0))
            case Kind.RAGGED:
                values, offsets = _list_parts(array)
                return Ragged(self._numbers(values, where), offsets)
            case Kind.BYTES:
                return _bytes(_filled(array, policy))
        return ArrowColumn(_filled(array, policy))

    def _numbers(self, array: pa.Array, where: str) -> npt.NDArray[Any]:
        """Return the values of the column, without the lists around them."""
        policy = self.policy
        array = _decoded(array, policy.value_type)
        if policy.value_nulls is Nulls.ERROR:
            _refuse_nulls(policy, array, where)
        if policy.is_coded:
            assert self.vocabulary is not None
            return self.vocabulary.encode(_filled(array, policy))
        if pat.is_decimal(policy.value_type):
            return _decimals(array, policy)
        array = _filled(array, policy)
        if pat.is_boolean(array.type):
            unpacked: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
            return _ours(unpacked)
        dtype = physical(array.type)
        assert dtype is not None
        assert policy.dtype is not None
        values = _view(array, dtype)
        return self._shared(values) if dtype == policy.dtype else _widened(values, policy.dtype)

    def _shared(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Mark shared memory as read-only."""
        if not self.is_private:
            values.flags.writeable = False
        return values

    def _mask(self, array: pa.Array) -> Column:
        policy = self.policy
        valid = array.is_valid()
        if policy.kind is Kind.ARROW:
            return ArrowColumn(valid)
        mask = _ours(valid.to_numpy(zero_copy_only=False))
        if policy.kind is Kind.DENSE and policy.width is not None:
            inside = _flat(policy, array).is_valid().to_numpy(zero_copy_only=False)
            mask = mask & inside.reshape(len(array), policy.width).all(axis=1)
        return Dense(mask)


def _direct(policy: Policy) -> np.dtype[Any] | None:
    is_flat = policy.kind is Kind.DENSE and policy.width is None and len(policy.path) == 1 and not policy.mask
    dtype = physical(policy.type)
    return dtype if is_flat and dtype == policy.dtype and dtype != np.bool_ else None


def _check_vocabulary(policy: Policy, vocabulary: Vocabulary | None) -> None:
    if vocabulary is None:
        raise InvalidArgument(
            f"column {policy.name!r} is delivered as codes but has no vocabulary; pass vocabularies=",
            field="vocabularies",
        )
    if len(vocabulary.values) and vocabulary.values.type != policy.value_type:
        raise InvalidArgument(
            f"the vocabulary of column {policy.name!r} is {vocabulary.values.type}, but the column is {policy.type}; "
            "pass str values for a string column, bytes for a binary one",
            field="vocabularies",
        )


def _refuse_nulls(policy: Policy, array: pa.Array, where: str) -> None:
    if num_nulls := array.null_count:
        raise NullsFound(
            f"{where}: column {policy.name!r} ({policy.type}) has {num_nulls:,} nulls, but none are allowed; "
            f'pass nulls={{"{policy.name}": …}} with a fill value, "fill" or "mask", '
            "or leave out the rows with filters="
        )


def _cure(policy: Policy) -> str:
    if pat.is_decimal(policy.value_type):
        return 'use decimals="float64" or "python"'
    return 'use output_format="numpy", which keeps unsigned integers, or change the column in a transform'


# Arrow arrays


def _empty(policy: Policy) -> pa.Array:
    """Return an empty array of the top-level column that contains the policy's column."""
    kind = policy.type
    for name in reversed(policy.path[1:]):
        kind = pa.struct([(name, kind)])
    return pa.array([], kind)


def _descend(policy: Policy, array: pa.Array) -> pa.Array:
    """Return the policy's column within a top-level column; children of a null are null."""
    for name in policy.path[1:]:
        array = pc.struct_field(array, [array.type.get_field_index(name)])
    return array


def _decoded(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Return the values without extensions, runs and dictionaries."""
    while array.type != wanted:
        if isinstance(array.type, pa.BaseExtensionType):
            array = array.storage
        elif pat.is_run_end_encoded(array.type):
            array = pc.run_end_decode(array)
        else:
            array = array.cast(plain(array.type))
    return array


def _filled(array: pa.Array, policy: Policy) -> pa.Array:
    return pc.fill_null(array, policy.fill) if policy.fill is not None and array.null_count else array


def _unwrapped(array: pa.Array) -> pa.Array:
    """Return lists without the encodings around them."""
    while True:
        if isinstance(array.type, pa.BaseExtensionType):
            array = array.storage
        elif pat.is_run_end_encoded(array.type):
            array = pc.run_end_decode(array)
        elif pat.is_dictionary(array.type):
            array = array.dictionary_decode()
        else:
            return array


def _flat(policy: Policy, array: pa.Array) -> pa.Array:
    """Return the values of fixed-size lists; those of a null list are null."""
    width = array.type.list_size
    values = array.values.slice(array.offset * width, len(array) * width)
    if array.null_count:
        values = _decoded(values, policy.value_type)
        valid = np.repeat(array.is_valid().to_numpy(zero_copy_only=False), width)
        values = pc.if_else(pa.array(valid), values, pa.scalar(None, values.type))
    return values


def _list_parts(array: pa.Array) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Return the values of lists, and the offsets of the lists in them; a null list is empty."""
    if array.null_count or not (pat.is_list(array.type) or pat.is_large_list(array.type)):
        # The lists of a view may be in any place, and a null may have values; `flatten` removes both.
        lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        return array.flatten(), Ragged.of(np.empty(0), lengths).offsets
    dtype = np.dtype(np.int32 if pat.is_list(array.type) else np.int64)
    if not len(array):
        return array.values.slice(0, 0), np.zeros(1, np.int64)
    offsets = np.frombuffer(array.buffers()[1], dtype, len(array) + 1, array.offset * dtype.itemsize).astype(np.int64)
    values = array.values.slice(offsets[0], offsets[-1] - offsets[0])
    offsets -= offsets[0]
    return values, offsets


def _is_nested(policy: Policy) -> bool:
    return policy.kind is Kind.RAGGED or (policy.kind is Kind.DENSE and policy.width is not None)


def _values(policy: Policy, array: pa.Array) -> pa.Array:
    if policy.kind is Kind.RAGGED:
        array, _ = _list_parts(_unwrapped(array))
    elif _is_nested(policy):
        array = _flat(policy, _unwrapped(array))
    return _decoded(array, policy.value_type)


# Numpy arrays


def _view(array: pa.Array, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return a view of Arrow's buffer, writable if the memory is: not in mapped files or parts of a message."""
    if not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


def _ours(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values if values.flags.writeable else values.copy()


def _widened(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if values.dtype == np.uint64 and len(values) and (largest := int(values.max())) > np.iinfo(dtype).max:
        raise OverflowError(f"{largest} is above {np.iinfo(dtype).max}")
    return values.astype(dtype)


def _decimals(array: pa.Array, policy: Policy) -> npt.NDArray[Any]:
    if policy.dtype == np.float64:
        return _decimals_as_floats(array, policy)
    array = _filled(array, policy)
    digits, fits = _digits(array)
    if not fits.all():
        first = array[int(np.argmin(fits))].as_py()
        raise OverflowError(f"the digits of {first} without the point do not fit into an int64")
    return digits


def _decimals_as_floats(array: pa.Array, policy: Policy) -> npt.NDArray[np.float64]:
    """Return the nearest floats if digits and scale are exact floats; otherwise Arrow's, which may be slightly off."""
    values = _ours(_view(array.cast(pa.float64()), np.dtype(np.float64)))
    if 0 <= (scale := array.type.scale) <= _EXACT_SCALE:
        digits, fits = _digits(array)
        np.divide(digits, 10.0**scale, out=values, where=fits & (np.abs(digits) <= _EXACT_DIGITS))
    if array.null_count:
        assert policy.fill is not None
        values[array.is_null().to_numpy(zero_copy_only=False)] = policy.fill.as_py()
    return values


_EXACT_DIGITS: Final = 2**53
_EXACT_SCALE: Final = 22
"""Limits up to which floats represent every integer, and every power of ten."""


def _digits(array: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return decimals without their point, and which of them fit; the others have lost their upper bits."""
    num_words = array.type.bit_width // 32  # two's complement, the lowest 32 bits first
    if not len(array):
        return np.empty(0, np.int64), np.empty(0, np.bool_)
    first = array.offset * num_words * 4
    words = np.frombuffer(array.buffers()[1], np.int32, len(array) * num_words, first).reshape(-1, num_words)
    if num_words == 1:
        return words[:, 0].astype(np.int64), np.ones(len(words), np.bool_)
    digits = words[:, :2].copy().view(np.int64)[:, 0]
    return digits, (words[:, 2:] == (digits >> 63)[:, None]).all(axis=1)


def _bytes(array: pa.Array) -> Ragged:
    """Return large strings or binaries as rows of bytes; nulls are empty."""
    if not len(array):
        return Ragged(np.empty(0, np.uint8), np.zeros(1, np.int64))
    _, places, data = array.buffers()
    offsets = np.frombuffer(places, np.int64, len(array) + 1, array.offset * 8)
    values = np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
    return Ragged(values, offsets)
