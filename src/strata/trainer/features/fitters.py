"""Fitters: each observes the batches of one column, from several threads, and returns the fitted column.

A fitter checks the type of its column before the first batch. What it returns depends only on the rows, never on their
order: counts are sums of integers, and sums of floats are exact (`moments.py`).
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from strata.data.arrow_types import of_numbers, unit_of
from strata.errors import InvalidArgument, SchemaMismatch
from strata.trainer.features.columns import MAX_FITTED_LENGTH, MAX_VALUES, DenseFeat, SparseFeat, VarLenFeat
from strata.trainer.features.counts import ValueCounter, count_values
from strata.trainer.features.encoding import DenseColumn, SparseColumn, VarLenColumn, signed_log
from strata.trainer.features.field import UNKNOWN, auto_embedding_dim
from strata.trainer.features.moments import LIMIT, Moments, Summary, is_ordinary
from strata.trainer.features.values import (
    Integers,
    ValueType,
    bare,
    bare_type,
    category_type,
    elements,
    integers,
    is_any_list,
    is_number,
    lengths_of,
    mask,
    number_rows,
    numbers,
    places,
    strings,
    view,
)
from strata.trainer.features.vocabulary import Buckets, IntegerVocabulary, StringVocabulary, encode_ids

if TYPE_CHECKING:
    from strata.trainer.features.columns import Declaration
    from strata.trainer.features.encoding import Column
    from strata.trainer.features.vocabulary import IdMap


class Fitter(Protocol):
    """Fits one feature."""

    def observe(self, array: pa.Array) -> None:
        """Add the rows of a batch; called by several threads.

        Raises:
            SchemaMismatch, LimitExceeded: A value cannot be used, or there are too many.
        """
        ...

    def finish(self) -> Column:
        """Return the fitted column, after all rows.

        Raises:
            SchemaMismatch: The column has no values to fit.
        """
        ...


def make_fitter(declared: Declaration, kind: pa.DataType) -> Fitter:
    """Return the fitter of a column of this Arrow type.

    Raises:
        SchemaMismatch: The type does not fit the declaration; the message names the one that it fits.
        InvalidArgument: The declared vocabulary has values of another type.
    """
    if pat.is_null(bare_type(kind)):
        raise _nothing(declared.name)
    match declared:
        case DenseFeat():
            return DenseFitter(declared, kind)
        case VarLenFeat():
            return VarLenFitter(declared, kind)
        case SparseFeat():
            return SparseFitter(declared, kind)


# Categories


class SparseFitter:
    """Counts categories."""

    def __init__(self, declared: SparseFeat | VarLenFeat, kind: pa.DataType) -> None:
        self._declared = declared
        self._name = declared.name
        self._type = _checked_type(declared.name, kind)
        self._lock = threading.Lock()
        self._num_values = self._num_missing = self._num_unknown = 0
        self._id_map: IdMap | None = None
        if declared.hash_buckets is not None:
            self._id_map = Buckets(self._type, declared.hash_buckets)
        elif declared.vocabulary is not None:
            self._id_map = _given_vocabulary(declared, self._type)
        self._counter = ValueCounter(self._type.arrow, max(MAX_VALUES, declared.max_size or 0), declared.name)

    def observe(self, array: pa.Array) -> None:
        array = bare(array)
        num_unknown = 0
        if isinstance(self._id_map, Buckets):
            if pat.is_floating(array.type):
                self._integers(array)
            num_missing = _num_missing(array)
        elif self._id_map is not None:
            ids = encode_ids(self._id_map, array, self._name)
            num_missing, num_unknown = int(np.count_nonzero(ids == 0)), int(np.count_nonzero(ids == UNKNOWN))
        elif self._type.kind == "integer" and not pat.is_dictionary(array.type):
            num_missing = self._count_integers(array)
        else:
            num_missing = self._count_distinct(array)
        with self._lock:
            self._num_values += len(array) - num_missing
            self._num_missing += num_missing
            self._num_unknown += num_unknown

    def finish(self) -> SparseColumn:
        id_map, num_unknown = self._id_map, self._num_unknown
        if id_map is None:
            id_map, num_unknown = self._fitted_vocabulary()
        dim = self._declared.embedding_dim
        return SparseColumn(
            name=self._name,
            id_map=id_map,
            embedding_dim=auto_embedding_dim(id_map.num_ids) if dim == "auto" else dim,
            num_values=self._num_values,
            num_missing=self._num_missing,
            num_unknown=num_unknown,
        )

    def _count_integers(self, array: pa.Array) -> int:
        """Count the values of an array; return how many are missing."""
        present = self._integers(array).present
        self._counter.add_integers(present)
        return len(array) - len(present)

    def _count_distinct(self, array: pa.Array) -> int:
        """Count the values of strings or of a dictionary; return how many are missing."""
        if pat.is_dictionary(array.type):
            per_place = np.bincount(places(array) + 1, minlength=len(array.dictionary) + 1)[1:]
            used = np.flatnonzero(per_place)
            values, counts = bare(array.dictionary).take(of_numbers(used, pa.int64())), per_place[used]
        else:
            values, counts = count_values(array)
        if self._type.kind == "integer":
            whole = self._integers(values)
            values = of_numbers(whole.present, self._type.arrow)
            counts = counts if whole.missing is None else counts[~whole.missing]
        else:
            values = strings(values, self._type, self._name)
            if values.null_count:
                counts = counts[mask(values.is_valid())]
                values = values.drop_null()
        self._counter.add(values, counts)
        return len(array) - int(counts.sum())

    def _integers(self, array: pa.Array) -> Integers:
        """Return the values of an array, none of which may be a fraction."""
        found = integers(array, self._type, self._name)
        if found.not_whole is not None:
            row = int(np.argmax(found.not_whole))
            raise SchemaMismatch(
                f"column {self._name!r} ({array.type}) has the value {array[row].as_py()!r}, which is not a category; "
                "declare it as DenseFeat, or round the column to integers"
            )
        return found

    def _fitted_vocabulary(self) -> tuple[IdMap, int]:
        """Return the vocabulary, and the number of values that it does not contain."""
        declared = self._declared
        ranking = self._counter.ranking(min_count=declared.min_count, max_size=declared.max_size)
        if not ranking.num_counted:
            raise _nothing(self._name)
        if not len(ranking.values):
            raise SchemaMismatch(
                f"no value of column {self._name!r} occurs min_count={declared.min_count} times, so all of its "
                f"{ranking.num_distinct:,} values would be unknown; lower min_count, or use hash_buckets="
            )
        num_unknown = ranking.num_counted - ranking.num_kept
        if self._type.kind == "integer":
            return IntegerVocabulary(self._type, view(ranking.values, np.dtype(np.int64))), num_unknown
        return StringVocabulary(self._type, ranking.values), num_unknown


class VarLenFitter:
    """Counts the elements of lists, and measures the lists."""

    def __init__(self, declared: VarLenFeat, kind: pa.DataType) -> None:
        kind = bare_type(kind)
        if declared.separator is not None:
            if category_type(kind) != ValueType("text"):
                cure = "leave out separator=" if is_any_list(kind) else f"declare it as SparseFeat({declared.name!r})"
                raise SchemaMismatch(f"column {declared.name!r} is {kind}, which separator= cannot split; {cure}")
        elif not is_any_list(kind):
            cure = "pass separator= to split it, or " if category_type(kind) == ValueType("text") else ""
            raise SchemaMismatch(
                f"column {declared.name!r} is {kind}, not a list; {cure}declare it as SparseFeat({declared.name!r})"
            )
        self._declared = declared
        self._elements = SparseFitter(declared, kind.value_type if declared.separator is None else kind)
        self._lock = threading.Lock()
        self._num_empty = 0
        self._longest = 0

    def observe(self, array: pa.Array) -> None:
        declared = self._declared
        flat, lengths = elements(array, declared.separator, declared.name)
        self._elements.observe(flat)
        if flat.null_count:
            lengths = lengths_of(lengths, mask(flat.is_valid()))
        with self._lock:
            self._num_empty += int(np.count_nonzero(lengths == 0))
            self._longest = max(self._longest, int(lengths.max(initial=0)))

    def finish(self) -> VarLenColumn:
        declared = self._declared
        return VarLenColumn(
            elements=replace(self._elements.finish(), num_missing=self._num_empty),
            separator=declared.separator,
            max_length=declared.max_length or max(1, min(MAX_FITTED_LENGTH, self._longest)),
            combiner=declared.combiner,
        )


def _checked_type(name: str, kind: pa.DataType) -> ValueType:
    """Return the type of categories in a column of this Arrow type.

    Raises:
        SchemaMismatch: It has none.
    """
    found = category_type(kind)
    if found is not None:
        return found
    kind = bare_type(kind)
    if is_any_list(kind):
        cure = f"declare it as VarLenFeat({name!r})"
    elif pat.is_decimal(kind):
        cure = "declare it as DenseFeat, or cast it to an integer or a string"
    else:
        cure = "leave it out, or turn it into a string or an integer"
    raise SchemaMismatch(f"column {name!r} is {kind}, which has no categories; {cure}")


def _given_vocabulary(declared: SparseFeat | VarLenFeat, kind: ValueType) -> IdMap:
    assert declared.vocabulary is not None
    try:
        array = pa.array(list(declared.vocabulary))
        if kind.kind != "integer":
            return StringVocabulary(kind, strings(array, kind, declared.name))
        found = integers(array, kind, declared.name)
    except (pa.ArrowException, SchemaMismatch) as error:
        raise InvalidArgument(
            f"the vocabulary of {declared.name!r} does not fit its column, which has {kind}: {error}",
            field="vocabulary",
        ) from error
    if found.is_unsigned != kind.is_unsigned and (found.values < 0).any():
        raise InvalidArgument(
            f"the vocabulary of {declared.name!r} has integers that its column cannot hold; leave them out",
            field="vocabulary",
        )
    return IntegerVocabulary(kind, found.values)


def _num_missing(array: pa.Array) -> int:
    if pat.is_dictionary(array.type):
        is_missing = np.append(mask(array.dictionary.is_null()), True)
        return int(np.count_nonzero(is_missing[places(array)]))
    if pat.is_floating(array.type):
        return int(pc.sum(array.is_null(nan_is_null=True), min_count=0).as_py())
    return int(array.null_count)


# Numbers


class DenseFitter:
    """Sums numbers."""

    def __init__(self, declared: DenseFeat, kind: pa.DataType) -> None:
        values = bare_type(kind)
        if is_any_list(values) != (declared.width > 1):
            cure = "pass width=, the length of its lists" if is_any_list(values) else "leave out width="
            raise SchemaMismatch(f"column {declared.name!r} is {values}, but width={declared.width}; {cure}")
        values = bare_type(values.value_type) if declared.width > 1 else values
        if not is_number(values):
            raise SchemaMismatch(
                f"column {declared.name!r} is {values}, not a number; declare it as SparseFeat({declared.name!r}), or "
                "cast it to a number"
            )
        self._declared = declared
        self._unit = unit_of(values)
        self._lock = threading.Lock()
        self._moments = Moments()
        self._log_moments = Moments()
        self._num_values = self._num_missing = 0

    def observe(self, array: pa.Array) -> None:
        declared, num_missing = self._declared, 0
        if declared.width == 1:
            array = bare(array)
            if array.null_count:  # cheaper to drop here than as NaN below
                num_missing = array.null_count
                array = array.drop_null()
            found = numbers(array, self._unit, declared.name)
        else:
            found = number_rows(array, declared.width, self._unit, declared.name)
        num_numbers, usual = len(found), found
        if not is_ordinary(found):
            num_nan = int(np.count_nonzero(np.isnan(found)))
            num_missing, num_numbers = num_missing + num_nan, num_numbers - num_nan
            usual = found[np.abs(found) <= LIMIT]
        self._moments.add(usual)
        if declared.scale == "log":
            self._log_moments.add(signed_log(usual))
        with self._lock:
            self._num_values += num_numbers
            self._num_missing += num_missing

    def finish(self) -> DenseColumn:
        declared, summary = self._declared, self._moments.summary()
        if summary is None:
            if declared.fill == "mean" or declared.scale is not None:
                raise _nothing(declared.name)
            summary = Summary(count=0, mean=declared.fill, std=0.0, min=declared.fill, max=declared.fill)
        offset, divisor = self._scaling(summary)
        return DenseColumn(
            name=declared.name,
            unit=self._unit,
            width=declared.width,
            scale=declared.scale,
            fill=summary.mean if declared.fill == "mean" else declared.fill,
            min=summary.min,
            max=summary.max,
            mean=summary.mean,
            std=summary.std,
            offset=offset,
            divisor=divisor or 1.0,  # a constant column becomes 0
            num_values=self._num_values,
            num_missing=self._num_missing,
        )

    def _scaling(self, summary: Summary) -> tuple[float, float]:
        match self._declared.scale:
            case "standard":
                return summary.mean, summary.std
            case "minmax":
                return summary.min, summary.max - summary.min
            case "log":
                logs = self._log_moments.summary()
                assert logs is not None, "every usual value has a logarithm"
                return logs.mean, logs.std
            case None:
                return 0.0, 1.0


def _nothing(name: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"column {name!r} has no value in any row that was read; leave it out, or check the files and filters="
    )
