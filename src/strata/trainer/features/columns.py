"""Declarations: which columns are features, and how each of them is to be encoded.

A declaration holds only what the user decides. What the data decides (vocabularies, means, the longest list) is found
by `Features.fit`. This module imports only the standard library and our errors.
"""

from __future__ import annotations

import datetime as dt
import math
import operator
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from strata.errors import InvalidArgument
from strata.trainer.features.field import Combiner

Scale: TypeAlias = Literal["standard", "minmax", "log"]

RESERVED_NAMES: Final = ("sparse", "dense")
"""The names of the matrices in an encoded batch."""
MAX_VALUES: Final = 10_000_000
"""Distinct values of a column that fitting counts at most, unless `max_size` is larger."""
MAX_HASH_BUCKETS: Final = 1 << 31
MAX_WIDTH: Final = 1 << 16
"""Columns that one feature may take in a matrix, and the width of an embedding table."""
MAX_FITTED_LENGTH: Final = 64
"""The `max_length` of a VarLenFeat without one is the length of the longest list, but at most this."""

_CATEGORIES: Final = (str, bytes, int, dt.date, dt.time, dt.timedelta)  # a bool is an int, a datetime a date


@dataclass(frozen=True, slots=True)
class SparseFeat:
    """A categorical column: each value gets an id, the row of an embedding table.

    The values may be strings, binaries, integers, booleans (False is 0, True is 1), whole numbers stored as floats,
    dates and times (by their integer value). By default the vocabulary is fitted: all values of the data, the most
    frequent first.
    """

    name: str
    _: KW_ONLY
    vocabulary: Sequence[Any] | None = None
    """The known values in the order of their ids, instead of those of the data."""
    hash_buckets: int | None = None
    """Hash values into this many ids instead of a vocabulary: for columns with too many values to store."""
    min_count: int = 1
    """Values that occur less often are unknown."""
    max_size: int | None = None
    """Keep only this many values, the most frequent ones; by default all."""
    embedding_dim: int | Literal["auto"] = "auto"
    """Width of the embedding table; "auto" is 6 × num_ids^¼ as a multiple of 4, at most 128."""

    def __post_init__(self) -> None:
        _check_name(self)
        _check_categories(self)


@dataclass(frozen=True, slots=True)
class DenseFeat:
    """A numeric column, scaled to float32.

    The values may be numbers, decimals, booleans (0 and 1), dates and times (their integer value). A null or NaN gets
    the value `fill` before it is scaled. Infinite values, and those beyond ±1e150, get the largest or smallest value of
    the fitted data.
    """

    name: str
    _: KW_ONLY
    scale: Scale | None = "standard"
    """"standard": (x − mean) / standard deviation. "minmax": 0 is the smallest and 1 the largest value of the fitted
    data. "log": sign(x) × log(1 + |x|), then "standard". None: unchanged."""
    fill: float | Literal["mean"] = "mean"
    """The value of a missing one, in the column's own unit."""
    width: int = 1
    """Numbers per row; above 1 the column holds lists of this length, scaled as one to keep their geometry."""

    def __post_init__(self) -> None:
        _check_name(self)
        if self.scale is not None and self.scale not in get_args(Scale):
            raise InvalidArgument(
                f"scale={self.scale!r} of {self.name!r} is unknown; use {', '.join(get_args(Scale))} or None",
                field="scale",
            )
        _set_number(self, "width", 1, MAX_WIDTH)
        if self.fill != "mean":
            object.__setattr__(self, "fill", self._checked_fill())

    def _checked_fill(self) -> float:
        try:
            fill = float(self.fill)
        except (TypeError, ValueError):
            fill = math.nan
        if not abs(fill) <= 1e150:
            raise InvalidArgument(
                f'fill={self.fill!r} of {self.name!r} must be "mean" or a finite number up to 1e150', field="fill"
            )
        return fill


@dataclass(frozen=True, slots=True)
class VarLenFeat:
    """A column with a list of categories per row, such as tags or a history of items.

    Lists of strings or integers, or strings that `separator` splits. Missing elements are left out; a row has ids for
    its first `max_length` elements and is padded with 0. The other options are those of `SparseFeat`.
    """

    name: str
    _: KW_ONLY
    separator: str | None = None
    """Splits strings such as `Action|Comedy`; empty parts are left out."""
    max_length: int | None = None
    """Ids per row; by default the length of the longest list, at most 64."""
    combiner: Combiner = "mean"
    """How a model combines the embeddings of a row."""
    vocabulary: Sequence[Any] | None = None
    hash_buckets: int | None = None
    min_count: int = 1
    max_size: int | None = None
    embedding_dim: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        _check_name(self)
        _check_categories(self)
        if self.max_length is not None:
            _set_number(self, "max_length", 1, MAX_WIDTH)
        if self.combiner not in get_args(Combiner):
            raise InvalidArgument(
                f"combiner={self.combiner!r} of {self.name!r} is unknown; use {', '.join(get_args(Combiner))}",
                field="combiner",
            )
        separator: Any = self.separator
        if separator is not None and (not isinstance(separator, str) or not separator):
            raise InvalidArgument(
                f"separator={separator!r} of {self.name!r} must be text such as '|'; leave it out for a column "
                "of lists",
                field="separator",
            )


Declaration: TypeAlias = SparseFeat | DenseFeat | VarLenFeat


def check_declarations(columns: Any, passthrough: Sequence[str] = ()) -> None:
    """Check that each name stands for one column of an encoded batch.

    Raises:
        InvalidArgument: Something else than declarations, or one name twice.
    """
    if isinstance(columns, Declaration) or not isinstance(columns, Sequence) or not columns:
        raise InvalidArgument(
            f"columns={columns!r} is not a list of features; pass for example "
            '[SparseFeat("carrier"), DenseFeat("distance")]',
            field="columns",
        )
    for column in columns:
        if not isinstance(column, Declaration):
            raise InvalidArgument(
                f"columns has {column!r}, which is not a feature; declare it as SparseFeat({column!r}), DenseFeat(…) "
                "or VarLenFeat(…)",
                field="columns",
            )
    names = [column.name for column in columns]
    repeated = [name for place, name in enumerate(names) if name in names[:place]]
    if repeated:
        raise InvalidArgument(f"columns declares {repeated[0]!r} twice; declare each column once", field="columns")
    check_passthrough(names, passthrough)


def check_passthrough(names: Sequence[str], passthrough: Sequence[str]) -> None:
    """Check columns that are delivered unchanged, next to features of these names.

    Raises:
        InvalidArgument: One is a feature as well, or has the name of a matrix.
    """
    for name in passthrough:
        if name in names:
            raise InvalidArgument(
                f"{name!r} is a feature and also the label or another column to pass through; a model must not see its "
                "label: leave it out of columns",
                field="columns",
            )
        if name in RESERVED_NAMES:
            raise InvalidArgument(
                f"the passthrough column {name!r} has the name of a matrix in the encoded batch; rename it",
                field="passthrough",
            )


def _check_name(column: Declaration) -> None:
    name: Any = column.name
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"name={name!r} must be the name of a column", field="name")
    if name in RESERVED_NAMES:
        raise InvalidArgument(
            f"name={name!r} is the name of a matrix in the encoded batch; rename the column", field="name"
        )


def _check_categories(column: SparseFeat | VarLenFeat) -> None:
    _set_number(column, "min_count", 1, 1 << 62)
    if column.max_size is not None:
        _set_number(column, "max_size", 1, 1 << 31)
    if column.hash_buckets is not None:
        _set_number(column, "hash_buckets", 1, MAX_HASH_BUCKETS)
    if column.embedding_dim != "auto":
        _set_number(column, "embedding_dim", 1, MAX_WIDTH)
    given = [name for name in ("vocabulary", "hash_buckets") if getattr(column, name) is not None]
    if len(given) == 2:
        raise InvalidArgument(
            f"{column.name!r} has a vocabulary and hash_buckets; a vocabulary needs no hashing: leave out one of them",
            field="hash_buckets",
        )
    if given and (column.min_count != 1 or column.max_size is not None):
        raise InvalidArgument(
            f"min_count and max_size of {column.name!r} choose the values of a fitted vocabulary; leave them out with "
            f"{given[0]}=",
            field="min_count" if column.min_count != 1 else "max_size",
        )
    if column.vocabulary is not None:
        object.__setattr__(column, "vocabulary", _checked_vocabulary(column.name, column.vocabulary))


def _checked_vocabulary(name: str, vocabulary: Any) -> tuple[Any, ...]:
    if isinstance(vocabulary, str | bytes) or not hasattr(vocabulary, "__iter__"):
        raise InvalidArgument(
            f"vocabulary={vocabulary!r} of {name!r} is not a list of values; pass a list", field="vocabulary"
        )
    values = tuple(vocabulary.tolist() if hasattr(vocabulary, "tolist") else vocabulary)
    if not values or None in values:
        problem = "has None, which always has the id 0; leave it out" if values else "is empty; name the known values"
        raise InvalidArgument(f"the vocabulary of {name!r} {problem}", field="vocabulary")
    strange = next((value for value in values if not isinstance(value, _CATEGORIES)), None)
    if strange is not None:
        raise InvalidArgument(
            f"the vocabulary of {name!r} has {strange!r}; pass strings, bytes, integers, dates or times",
            field="vocabulary",
        )
    if (num_distinct := len(set(values))) != len(values):
        raise InvalidArgument(
            f"the vocabulary of {name!r} has {len(values)} values, {num_distinct} of them distinct; pass each once",
            field="vocabulary",
        )
    return values


def _set_number(column: Declaration, name: str, minimum: int, maximum: int) -> None:
    """Check a whole number, of numpy's types as well, and store it as an int."""
    value = getattr(column, name)
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not minimum <= number <= maximum:
        raise InvalidArgument(
            f"{name}={value!r} of {column.name!r} must be a whole number from {minimum:,} to {maximum:,}", field=name
        )
    object.__setattr__(column, name, number)
