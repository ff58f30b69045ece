"""Encode rows for a model with nothing but the standard library and torch.

This file stands alone: an exported model contains a copy of it next to the state of its features, so that predictions
need no other package. `PortableEncoder.from_state(state)` returns a function from columns to tensors:

    encoder = PortableEncoder.load("features.json")
    encoder({"carrier": ["AA", None], "distance": [733.0, 1020.0], "tags": [["red", "new"], []]})
    # {"sparse": int64 [2, 1], "dense": float32 [2, 1], "tags": int64 [2, max_length]}

Rules, the same as in training:

- Ids: 0 is missing (None, NaN) or padding, 1 is unknown, known values and hash buckets start at 2.
- Integers, booleans (0 and 1) and floats without a fraction are the same category; floats with a fraction are unknown.
- Dates and times may be objects of `datetime` (without a time zone: UTC) or integers in the unit of the fitted column.
- Text is compared by code points, without normalization. The empty text is a value, except between separators.
- A missing number becomes the fill value, an infinite one the largest or smallest number of the fitted data.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

FORMAT = "strata.features"
VERSION = 1
"""The version of the state that this file reads."""

MISSING, UNKNOWN, FIRST_ID = 0, 1, 2
LIMIT = 1e150
"""Larger magnitudes count as infinite."""
LARGEST_FLOAT32 = float(torch.finfo(torch.float32).max)
HASHED_BYTES = 256
"""Longer texts are hashed by their digest."""

_MASK = (1 << 64) - 1
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_UNIT_NS = {"days": 86_400 * 10**9, "s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_TIMES = (dt.date, dt.time, dt.timedelta)  # a datetime is a date
_TYPES = {"integer": int, "text": str, "bytes": str}
"""The type of a vocabulary's values in the state; bytes are written in hexadecimal digits."""


class PortableEncoder:
    """Encodes columns of Python values or tensors to the tensors that the model was trained on."""

    def __init__(self, columns: Iterable[Mapping[str, Any]]) -> None:
        """`columns`: checked entries of a state; use `from_state`."""
        columns = list(columns)
        self._sparse = [_Sparse(column) for column in columns if column["kind"] == "sparse"]
        self._dense = [_Dense(column) for column in columns if column["kind"] == "dense"]
        self._varlen = [_VarLen(column) for column in columns if column["kind"] == "varlen"]
        self.columns: list[str] = [column["name"] for column in columns]
        """The columns that rows must have; others are ignored."""

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PortableEncoder:
        """Create an encoder from what `Features.state()` returned.

        Raises:
            ValueError: It is not such a state, or a newer one; the message names the entry.
        """
        check_state(state)
        return cls(state["columns"])

    @classmethod
    def load(cls, path: str | Path) -> PortableEncoder:
        """Create an encoder from the file that `Features.save` wrote."""
        return cls.from_state(json.loads(Path(path).read_text(encoding="utf-8")))

    def __call__(self, rows: Mapping[str, Sequence[Any] | torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the matrices `sparse` and `dense`, where there are such features, and one per list feature.

        Raises:
            ValueError: A column is missing or has another length, or a value has the wrong type.
        """
        values = {name: self._column(rows, name) for name in self.columns}
        lengths = {name: len(column) for name, column in values.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns have different lengths: {lengths}; pass one value per row, None if missing")
        encoded: dict[str, torch.Tensor] = {}
        if self._sparse:
            encoded["sparse"] = torch.stack([column.encode(values[column.name]) for column in self._sparse], dim=1)
        if self._dense:
            encoded["dense"] = torch.cat([column.encode(values[column.name]) for column in self._dense], dim=1)
        for varlen in self._varlen:
            encoded[varlen.name] = varlen.encode(values[varlen.name])
        return encoded

    @staticmethod
    def _column(rows: Mapping[str, Any], name: str) -> Sequence[Any]:
        if name not in rows:
            raise ValueError(f"column {name!r} is missing; found: {', '.join(map(repr, rows)) or 'no columns'}")
        column = rows[name]
        if isinstance(column, str | bytes) or not hasattr(column, "__len__"):
            raise ValueError(f"column {name!r} is {column!r}; pass a list with one value per row")
        listed: Sequence[Any] = column.tolist() if hasattr(column, "tolist") else column
        return listed


class _Sparse:
    """The ids of one value per row."""

    def __init__(self, column: Mapping[str, Any]) -> None:
        self.name: str = column["name"]
        self._type: str = column["values"]
        self._unit: str = column["unit"]
        self._buckets: int | None = column["hash_buckets"]
        vocabulary = column["vocabulary"] or ()
        values = map(bytes.fromhex, vocabulary) if self._type == "bytes" else vocabulary
        self._ids = {value: place + FIRST_ID for place, value in enumerate(values)}
        self._key: Callable[[Any], Any] = self._integer if self._type == "integer" else self._string

    def encode(self, values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor([self.id_of(value) for value in values], dtype=torch.int64)

    def id_of(self, value: Any) -> int:
        value = plain(value)
        if value is None:
            return MISSING
        key = self._key(value)
        if key is None:
            return UNKNOWN
        if self._buckets is None:
            return self._ids.get(key, UNKNOWN)
        return FIRST_ID + (mix(key & _MASK) if self._type == "integer" else hash_bytes(key)) % self._buckets

    def _integer(self, value: Any) -> int | None:
        """Return a value as an integer; None for a number that is not one."""
        if isinstance(value, _TIMES):
            return time_value(value, self._unit, self.name)
        if isinstance(value, float):
            return int(value) if value.is_integer() and -(2.0**63) <= value < 2.0**63 else None
        if isinstance(value, int):
            return int(value)
        raise ValueError(f"column {self.name!r} has {value!r}, but the model knows integers; pass integers")

    def _string(self, value: Any) -> str | bytes:
        """Return a text, as bytes if it is to be hashed."""
        if self._type == "text" and isinstance(value, str):
            return value if self._buckets is None else value.encode("utf-8", "surrogatepass")
        if self._type == "bytes" and isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        raise ValueError(f"column {self.name!r} has {value!r}, but the model knows {self._type}; pass {self._type}")


class _VarLen:
    """The ids of a list per row."""

    def __init__(self, column: Mapping[str, Any]) -> None:
        self.name: str = column["name"]
        self._elements = _Sparse(column)
        self._separator: str | None = column["separator"]
        self._max_length: int = column["max_length"]

    def encode(self, rows: Sequence[Any]) -> torch.Tensor:
        ids = [self._ids(row) for row in rows]
        return torch.tensor(ids, dtype=torch.int64).reshape(len(ids), self._max_length)

    def _ids(self, row: Any) -> list[int]:
        ids: list[int] = []
        for value in self._split(row):
            if (found := self._elements.id_of(value)) != MISSING:
                ids.append(found)
            if len(ids) == self._max_length:
                break
        return ids + [MISSING] * (self._max_length - len(ids))

    def _split(self, row: Any) -> Iterable[Any]:
        if row is None or plain(row) is None:
            return ()
        if self._separator is not None:
            if not isinstance(row, str):
                raise ValueError(f"column {self.name!r} has {row!r}; pass text separated by {self._separator!r}")
            return filter(None, row.split(self._separator))
        if isinstance(row, str | bytes) or not hasattr(row, "__iter__"):
            raise ValueError(f"column {self.name!r} has {row!r}; pass a list per row")
        elements: Iterable[Any] = row.tolist() if hasattr(row, "tolist") else row
        return elements


class _Dense:
    """A number per row, or several, scaled to float32."""

    def __init__(self, column: Mapping[str, Any]) -> None:
        self.name: str = column["name"]
        self._unit: str = column["unit"]
        self._width: int = column["width"]
        self._is_log: bool = column["scale"] == "log"
        self._fill, self._min, self._max = column["fill"], column["min"], column["max"]
        self._offset, self._divisor = column["offset"], column["divisor"]

    def encode(self, rows: Sequence[Any]) -> torch.Tensor:
        numbers = [self._number(value) for value in self._flat(rows)]
        x = torch.tensor(numbers, dtype=torch.float64).reshape(len(rows), self._width)
        x = x.masked_fill(x.isnan(), self._fill)
        x = x.masked_fill(x > LIMIT, self._max).masked_fill(x < -LIMIT, self._min)
        if self._is_log:
            x = x.sign() * x.abs().log1p()
        x = (x - self._offset) / self._divisor
        scaled: torch.Tensor = x.clamp(-LARGEST_FLOAT32, LARGEST_FLOAT32).to(torch.float32)
        return scaled

    def _flat(self, rows: Sequence[Any]) -> Iterable[Any]:
        if self._width == 1:
            return rows
        flat: list[Any] = []
        for row in rows:
            if row is not None and (not hasattr(row, "__len__") or len(row) != self._width):
                raise ValueError(f"column {self.name!r} has {row!r}; pass {self._width} numbers per row")
            flat += [None] * self._width if row is None else row
        return flat

    def _number(self, value: Any) -> float:
        value = plain(value)
        if value is None:
            return math.nan
        if isinstance(value, _TIMES):
            return float(time_value(value, self._unit, self.name))
        try:
            return float(value if not isinstance(value, str | bytes) else "no number")
        except OverflowError:  # an integer beyond all floats
            return math.inf if value > 0 else -math.inf
        except (TypeError, ValueError) as error:
            raise ValueError(f"column {self.name!r} has {value!r}; pass numbers") from error


# Values


def plain(value: Any) -> Any:
    """Return a scalar of numpy or torch as a Python object, and a missing value (None, NaN, NaT) as None."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    return None if isinstance(value, float | dt.date) and value != value else value


def mix(value: int) -> int:
    """Hash an unsigned 64-bit integer (splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def hash_bytes(data: bytes) -> int:
    """Hash bytes to 64 bits: `mix` over the length and the words of 8 bytes, little-endian, padded with zeros."""
    if len(data) > HASHED_BYTES:
        data = hashlib.blake2b(data).digest()
    hashed = mix(len(data))
    for first in range(0, len(data), 8):
        hashed = mix(hashed ^ int.from_bytes(data[first : first + 8], "little"))
    return hashed


def time_value(value: Any, unit: str, name: str) -> int:
    """Return a date, a time of day, a timestamp or a duration as an integer in this unit.

    Raises:
        ValueError: The column has no times, or the unit is too coarse.
    """
    if not unit:
        raise ValueError(f"column {name!r} has {value!r}, but the model knows integers; pass integers")
    if isinstance(value, dt.datetime):
        aware = value if value.tzinfo is not None else value.replace(tzinfo=dt.UTC)
        passed = aware - _EPOCH
    elif isinstance(value, dt.date):
        passed = dt.timedelta(days=value.toordinal() - _EPOCH.toordinal())
    elif isinstance(value, dt.time):
        passed = dt.timedelta(
            hours=value.hour, minutes=value.minute, seconds=value.second, microseconds=value.microsecond
        )
    else:
        passed = value
    number, rest = divmod(passed // dt.timedelta(microseconds=1) * 1000, _UNIT_NS[unit])
    if rest:
        raise ValueError(f"column {name!r} has {value!r}, which is not a whole number of {unit}; truncate it")
    return number


# The state


def check_state(state: Mapping[str, Any]) -> None:
    """Check a state before it is used.

    Raises:
        ValueError: It is not what `Features.state()` returned; the message names the entry.
    """
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"this is not the state of features: its 'format' is not {FORMAT!r}; pass Features.state()")
    version: Any = state.get("version")
    if not _is_size(version) or version > VERSION:
        raise ValueError(
            f"the features have version {version!r}, but this code reads versions 1 to {VERSION}; use the version of "
            "Strata that wrote them, or a newer one"
        )
    columns = state.get("columns")
    if not isinstance(columns, list) or not columns:
        raise ValueError("the features have no 'columns'; pass the whole state")
    for column in columns:
        if not isinstance(column, dict) or type(column.get("name")) is not str:
            raise ValueError(f"an entry of 'columns' has no name: {column!r:.200}; pass the whole state")
        _check_column(column)
    names = [column["name"] for column in columns]
    if len(set(names)) != len(names):
        raise ValueError(f"the features have a column twice: {sorted(names)}; pass the state unchanged")


def _check_column(column: Mapping[str, Any]) -> None:
    kind, name = column.get("kind"), column["name"]
    if kind not in ("sparse", "dense", "varlen"):
        raise ValueError(f"feature {name!r} has the unknown kind {kind!r}; pass the state unchanged")
    checks = dict(_DENSE_CHECKS if kind == "dense" else _CATEGORY_CHECKS)
    if kind == "varlen":
        checks |= _LIST_CHECKS
    for entry, (is_valid, wanted) in checks.items():
        if entry not in column or not is_valid(column[entry]):
            raise ValueError(
                f"feature {name!r} has {entry}={column.get(entry)!r:.200}, but it must be {wanted}; pass the state "
                "unchanged"
            )
    if kind == "dense":
        if column["divisor"] == 0 or column["min"] > column["max"]:
            raise ValueError(f"feature {name!r} has a zero divisor or min > max; pass the state unchanged")
    else:
        _check_vocabulary(column, name)


def _check_vocabulary(column: Mapping[str, Any], name: str) -> None:
    vocabulary, wanted = column["vocabulary"], _TYPES[column["values"]]
    if (vocabulary is None) == (column["hash_buckets"] is None):
        raise ValueError(f"feature {name!r} must have either a vocabulary or hash_buckets; pass the state unchanged")
    if vocabulary is None:
        return
    wrong = next((value for value in vocabulary if type(value) is not wanted), None)
    if wrong is not None or None in vocabulary or len(set(vocabulary)) != len(vocabulary):
        problem = "a value twice or null" if wrong is None else f"{wrong!r:.200}"
        raise ValueError(
            f"the vocabulary of {name!r} has {problem}, but must have distinct values of type {wanted.__name__}; pass "
            "the state unchanged"
        )
    if column["values"] == "bytes":
        for value in vocabulary:
            bytes.fromhex(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= 1e300


_COUNT, _SIZE = (_is_count, "a whole number, 0 or more"), (_is_size, "a whole number, 1 or more")
_NUMBER = (_is_number, "a finite number")
_UNIT = (lambda value: value in ("", *_UNIT_NS), f"empty or one of {', '.join(_UNIT_NS)}")

_CATEGORY_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "values": (lambda value: value in tuple(_TYPES), f"one of {', '.join(_TYPES)}"),
    "unit": _UNIT,
    "is_unsigned": (lambda value: type(value) is bool, "true or false"),
    "vocabulary": (lambda value: value is None or isinstance(value, list), "a list or null"),
    "hash_buckets": (lambda value: value is None or _is_size(value), "a whole number, 1 or more, or null"),
    "embedding_dim": _SIZE,
    "num_values": _COUNT,
    "num_missing": _COUNT,
    "num_unknown": _COUNT,
}
_LIST_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "separator": (lambda value: value is None or (isinstance(value, str) and value != ""), "text or null"),
    "max_length": _SIZE,
    "combiner": (lambda value: value in ("mean", "sum", "max"), "mean, sum or max"),
}
_DENSE_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "unit": _UNIT,
    "width": _SIZE,
    "scale": (lambda value: value in ("standard", "minmax", "log", None), "standard, minmax, log or null"),
    **dict.fromkeys(("fill", "min", "max", "mean", "std", "offset", "divisor"), _NUMBER),
    "num_values": _COUNT,
    "num_missing": _COUNT,
}
