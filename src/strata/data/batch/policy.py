"""Column policies: how each column is delivered. They are decided when a dataset is planned, never during an epoch.

With `output_format` "torch" or "numpy":

| Arrow type | Delivered as | Nulls, by default |
|---|---|---|
| int8 … int64, uint8 | the same | refused |
| uint16, uint32 | torch: int32, int64; numpy: the same | refused |
| uint64 | torch: int64, values of 2⁶³ or more are refused; numpy: the same | refused |
| float16, float32, float64 | the same | NaN |
| bool | bool | refused |
| decimal, `decimals="float64"` (default) | float64: the nearest one up to 2⁵³, about 15 digits above | NaN |
| decimal, `decimals="int64"` | int64: value × 10^scale; refused if too large | refused |
| decimal, `decimals="python"`; `"error"` | `decimal.Decimal`; refused | None |
| timestamp, duration, time64, date64 | int64 in the column's own unit; timestamps are UTC | refused |
| time32, date32 | int32 in the column's own unit; date32 in days since 1970-01-01 | refused |
| string, binary, `strings="python"` (default) | list of str or bytes | None |
| string, binary, `strings="codes"` | int32 codes of a vocabulary, known values from 1 | code 0 |
| string, binary, `strings="bytes"` | (values, lengths): a uint8 matrix padded with zeros | refused |
| list of numbers, of strings as "codes" | (values, offsets) as for `torch.nn.EmbeddingBag` | refused; inside as above |
| list of other strings | list of lists | None |
| fixed_size_list of the same | matrix | as its values |
| struct | a column `parent.child` for each child | a null struct is null in all children |
| dictionary, run-end encoded, extension | as the type of its values | as the type of its values |
| map, union, interval, null, list of list or struct | refused; objects with `strings={"column": "python"}` | None |

The unit of times is in the policy (`unit`). With "arrow", "pandas" and "dict" every type is delivered unchanged, and
nulls stay nulls. Rows of several files are joined, so run-end encoded columns and views are delivered as plain ones,
and dictionary codes have at least 32 bits, also inside lists and structs. pandas gets a time64[ns] as the timedelta
since midnight, and fixed-size binaries in lists as binaries; a union is refused.

`strings="bytes"` makes the matrix as wide as the longest value of a batch, or `string_width` wide; longer values are
then cut, and `lengths` has their full length. `nulls=` is one of the following words, or a mapping from columns to
such words or to a fill value:

| `nulls=` | |
|---|---|
| "error" | nulls are refused: when planning if files have null counts, otherwise when they are read |
| "fill" | 0, 0.0, False, "" or the empty list replaces them |
| "mask" | the same, and a bool column `<name>_mask` is true where there was a value |
| "keep" | None, NaN or code 0, for columns that can hold them |

Python objects and codes keep None and 0 under a mask. The mask of a list is true if there was a list, and values
inside are treated as by default; that of a fixed-size list is true if none of its values was null.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from strata.data.arrow_types import (
    TORCH_DTYPES,
    for_pandas,
    gatherable,
    is_list,
    is_stringlike,
    of_numbers,
    physical,
    plain,
    unit_of,
    zero_of,
)
from strata.errors import InvalidArgument, NullsFound, SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


OUTPUT_FORMATS: Final = ("torch", "numpy", "arrow", "pandas", "dict")
STRINGS: Final = ("python", "codes", "bytes")
DECIMALS: Final = ("float64", "int64", "python", "error")
MAX_STRING_WIDTH: Final = 1 << 20


_SEQUENCES: Final = {"ragged": "values, offsets", "padded": "× longest, lengths", "packed": "values, cu_seqlens"}


class Kind(enum.StrEnum):
    """The form of a column until it becomes a batch."""

    DENSE = "dense"
    RAGGED = "ragged"
    BYTES = "bytes"
    PYTHON = "python"
    ARROW = "arrow"


class Nulls(enum.StrEnum):
    """How nulls are delivered."""

    ERROR = "error"
    FILL = "fill"
    MASK = "mask"
    KEEP = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How one column is delivered."""

    name: str
    """The name that it is delivered as."""
    path: tuple[str, ...]
    """The top-level column, and the children of structs that lead to this column."""
    type: pa.DataType
    """The Arrow type of the column."""
    value_type: pa.DataType
    """The type of a single value: inside lists, without dictionaries; strings and binaries are large."""
    kind: Kind
    dtype: np.dtype[Any] | None = None
    """The dtype of delivered values; None for Python objects and Arrow."""
    width: int | None = None
    """The width of the matrix that fixed-size lists become, or strings with `string_width`."""
    nulls: Nulls = Nulls.ERROR
    """How null rows are delivered."""
    value_nulls: Nulls = Nulls.ERROR
    """How nulls inside lists are delivered; without lists the same as `nulls`."""
    fill: pa.Scalar | None = None
    """The value that replaces a null, of type `value_type`."""
    sequences: str = "ragged"
    """How lists of numbers are delivered: ragged, padded or packed."""
    unit: str = ""
    """The unit of times: "s", "ms", "us", "ns" or "days"; of decimals as integers: "10^-scale"."""

    @property
    def mask(self) -> str:
        """The name of the mask column; empty if there is none."""
        return f"{self.name}_mask" if self.nulls is Nulls.MASK else ""

    @property
    def is_coded(self) -> bool:
        """Whether it needs a vocabulary."""
        return self.kind in (Kind.DENSE, Kind.RAGGED) and is_stringlike(self.value_type)

    @property
    def delivered(self) -> str:
        """The delivered type as readable text."""
        dtype = "" if self.dtype is None else str(self.dtype)
        what = f"{dtype} codes" if self.is_coded else f"{dtype} ({self.unit})" if self.unit else dtype
        match self.kind:
            case Kind.DENSE:
                return what if self.width is None else f"{what} × {self.width}"
            case Kind.RAGGED:
                return f"{what} {_SEQUENCES[self.sequences]}"
            case Kind.BYTES:
                return f"uint8 × {self.width or 'longest'}, lengths"
            case Kind.PYTHON:
                return "Python objects"
            case Kind.ARROW:
                return str(self.value_type)

    @property
    def nulls_text(self) -> str:
        """How nulls are delivered, as readable text."""
        fill = "" if self.fill is None else f" {self.fill.as_py()!r}"
        match self.nulls:
            case Nulls.ERROR:
                return "refused"
            case Nulls.FILL:
                return f"filled: []{fill and ' and' + fill}" if self.kind is Kind.RAGGED else f"filled:{fill}"
            case Nulls.MASK:
                return f"{self.mask}, filled:{fill}" if fill else self.mask
            case Nulls.KEEP:
                return "code 0" if self.is_coded else "null" if self.kind is Kind.ARROW else "None"


def describe(policies: Sequence[Policy]) -> list[dict[str, str]]:
    """Return the policies as rows of a table."""
    return [
        {"column": policy.name, "type": str(policy.type), "delivered": policy.delivered, "nulls": policy.nulls_text}
        for policy in policies
    ]


def decide(
    schema: pa.Schema,
    null_counts: Mapping[str, int],
    *,
    output_format: str = "torch",
    strings: str | Mapping[str, str] = "python",
    string_width: int | None = None,
    nulls: str | Mapping[str, Any] | None = None,
    decimals: str | Mapping[str, str] | None = None,
) -> tuple[Policy, ...]:
    """Return a policy for every delivered column, in the order of the schema.

    `schema` has only the delivered columns. `null_counts` are lower bounds for the delivered rows; other nulls are
    found when they are read. `decimals=None` means "float64".

    Raises:
        InvalidArgument: An option is unknown or names no column, or a fill value has the wrong type.
        SchemaMismatch: A type has no policy, or two columns would have the same name.
        NullsFound: A column has nulls that its policy does not allow.
    """
    if output_format not in OUTPUT_FORMATS:
        raise InvalidArgument(
            f"output_format={output_format!r} is unknown; use one of {_listed(OUTPUT_FORMATS)}", field="output_format"
        )
    deciding = _Deciding(
        output_format=output_format,
        strings=_Choice("strings", strings, "python", STRINGS),
        decimals=_Choice("decimals", decimals, "float64", DECIMALS),
        nulls=_Choice("nulls", nulls, None, tuple(Nulls)),
        string_width=string_width,
    )
    deciding.check_options()
    policies = [policy for field in schema for policy in deciding.field(field, (field.name,), null_counts)]
    deciding.finish(policies)
    return tuple(policies)


class _Choice:
    """An option that is set for all columns, or for some by name."""

    def __init__(self, option: str, given: Any, default: Any, allowed: Sequence[str]) -> None:
        self.option = option
        self.by_column: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
        self.general = default if given is None or isinstance(given, Mapping) else given
        self.used: set[str] = set()
        self._allowed = allowed
        self.is_given = given is not None and given != default

    def check(self, *, any_value: bool = False) -> None:
        """Check the values; with `any_value`, single columns may have other values than the allowed words."""
        values = [self.general, *([] if any_value else self.by_column.values())]
        for value in values:
            if value is not None and value not in self._allowed:
                raise InvalidArgument(
                    f"{self.option}={value!r} is unknown; use one of {_listed(self._allowed)}, "
                    f"or a mapping from columns to them",
                    field=self.option,
                )

    def own(self, name: str) -> Any:
        """Return what was set for this column by name, or None."""
        self.used.add(name)
        return self.by_column.get(name)

    def of(self, name: str) -> Any:
        return self.general if (own := self.own(name)) is None else own


class _Deciding:
    """The options, and the problems so far: all problems are reported in one error."""

    def __init__(
        self, *, output_format: str, strings: _Choice, decimals: _Choice, nulls: _Choice, string_width: int | None
    ) -> None:
        self._is_torch = output_format == "torch"
        self._as_is = output_format not in ("torch", "numpy")
        self._output_format = output_format
        self._strings = strings
        self._decimals = decimals
        self._nulls = nulls
        self._string_width = string_width
        self._refused: list[str] = []
        self._null_columns: list[str] = []

    def check_options(self) -> None:
        self._strings.check()
        self._decimals.check()
        self._nulls.check(any_value=True)
        if (width := self._string_width) is not None and not 1 <= width <= MAX_STRING_WIDTH:
            raise InvalidArgument(
                f"string_width={width} must be from 1 to {MAX_STRING_WIDTH:,}; leave it out for the longest value",
                field="string_width",
            )
        if self._as_is:
            for choice in (self._strings, self._decimals):
                if choice.is_given:
                    raise InvalidArgument(
                        f"output_format={self._output_format!r} delivers columns unchanged; "
                        f'leave out {choice.option}=, or use output_format="torch" or "numpy"',
                        field=choice.option,
                    )

    def field(
        self, field: pa.Field, path: tuple[str, ...], null_counts: Mapping[str, int], *, may_be_null: bool = False
    ) -> Iterator[Policy]:
        """Yield the policies of a column, or of all columns that a struct becomes."""
        name = ".".join(path)
        may_be_null = may_be_null or field.nullable
        is_python = self._strings.by_column.get(name) == "python"
        if is_python:
            self._strings.used.add(name)
        if pat.is_struct(field.type) and not self._as_is and not is_python:
            for child in field.type:
                yield from self.field(child, (*path, child.name), null_counts, may_be_null=may_be_null)
            return
        policy = self._column(name, path, field.type, is_python=is_python)
        if policy is None:
            return
        policy = self._with_nulls(policy)
        parents = (".".join(path[:depth]) for depth in range(1, len(path) + 1))
        num_nulls = max(null_counts.get(parent, 0) for parent in parents) if may_be_null else 0
        if policy.nulls is Nulls.ERROR and num_nulls:
            self._null_columns.append(f"{name} ({policy.type}), at least {num_nulls:,}")
        yield policy

    def _column(self, name: str, path: tuple[str, ...], kind: pa.DataType, *, is_python: bool) -> Policy | None:
        """Return the policy of a column without nulls, or None if it is refused."""
        value_type = plain(kind)
        policy = Policy(name=name, path=path, type=kind, value_type=value_type, kind=Kind.PYTHON)
        if self._as_is:
            return self._whole(replace(policy, kind=Kind.ARROW, value_type=gatherable(kind)))
        if is_python:
            return replace(policy, value_type=gatherable(kind))
        if is_list(value_type):
            policy = replace(policy, kind=Kind.RAGGED, value_type=plain(value_type.value_type))
        elif pat.is_fixed_size_list(value_type):
            width = value_type.list_size
            policy = replace(policy, kind=Kind.DENSE, width=width, value_type=plain(value_type.value_type))
        else:
            policy = replace(policy, kind=Kind.DENSE)
        return self._valued(policy)

    def _whole(self, policy: Policy) -> Policy | None:
        """Return the policy of a column that is delivered unchanged, if the format can hold it."""
        if self._output_format != "pandas":
            return policy
        policy = replace(policy, value_type=for_pandas(policy.value_type))
        try:
            pa.nulls(0, policy.value_type).to_pandas()
        except pa.ArrowNotImplementedError as error:
            self._refused.append(
                f"column {policy.name!r} has type {policy.type}, which pandas cannot hold ({error}): leave it out "
                'with columns=, or use output_format="arrow"'
            )
            return None
        return policy

    def _valued(self, policy: Policy) -> Policy | None:
        """Return the policy with the type of its values."""
        value_type = policy.value_type
        is_nested = policy.kind is Kind.RAGGED or policy.width is not None
        if is_stringlike(value_type):
            how = self._strings.of(policy.name)
            if how == "codes":
                return replace(policy, dtype=np.dtype(np.int32))
            if is_nested and self._strings.own(policy.name) == "bytes":
                raise InvalidArgument(
                    f'strings={{"{policy.name}": "bytes"}} is not possible: the column is {policy.type}, '
                    'and lists of strings are delivered as "codes" or "python" objects',
                    field="strings",
                )
            if how == "bytes" and not is_nested:
                return replace(policy, kind=Kind.BYTES, dtype=np.dtype(np.uint8), width=self._string_width)
            whole = gatherable(policy.type) if is_nested else value_type
            return replace(policy, kind=Kind.PYTHON, value_type=whole, width=None)
        if pat.is_decimal(value_type):
            return self._decimal(policy)
        if (dtype := physical(value_type)) is None:
            self._refused.append(
                f"column {policy.name!r} has type {policy.type}, which no tensor holds: leave it out with columns=, "
                f'get Python objects with strings={{"{policy.name}": "python"}}, or use output_format="arrow"'
            )
            return None
        if self._is_torch:
            dtype = TORCH_DTYPES.get(dtype, dtype)
        return replace(policy, dtype=dtype, unit=unit_of(value_type))

    def _decimal(self, policy: Policy) -> Policy | None:
        match self._decimals.of(policy.name):
            case "float64":
                return replace(policy, dtype=np.dtype(np.float64))
            case "int64":
                return replace(policy, dtype=np.dtype(np.int64), unit=f"10^{-policy.value_type.scale}")
            case "python":
                return replace(policy, kind=Kind.PYTHON, value_type=gatherable(policy.type), width=None)
        self._refused.append(
            f'column {policy.name!r} has type {policy.type} and decimals="error": '
            'choose "float64", "int64" or "python", or leave it out with columns='
        )
        return None

    def _with_nulls(self, policy: Policy) -> Policy:
        asked = self._nulls.of(policy.name)
        natural = _natural(policy)
        is_list = policy.kind is Kind.RAGGED
        own = self._nulls.by_column.get(policy.name)
        if own is not None and not (isinstance(own, str) and own in tuple(Nulls)):
            fill = _checked_fill(policy, own)
            return replace(policy, nulls=Nulls.FILL, value_nulls=Nulls.FILL, fill=fill)
        match asked:
            case None:
                inside = natural or Nulls.ERROR
                rows = Nulls.ERROR if is_list else inside
                return replace(
                    policy, nulls=rows, value_nulls=inside, fill=_nan(policy) if inside is Nulls.FILL else None
                )
            case Nulls.ERROR:
                return policy
            case Nulls.KEEP if natural is not None and not is_list:
                return replace(policy, nulls=natural, value_nulls=natural, fill=_nan(policy))
            case Nulls.KEEP:
                raise InvalidArgument(
                    f'nulls="keep" for column {policy.name!r} is not possible: {policy.delivered} has no null; '
                    f'use "fill", "mask", "error" or a value',
                    field="nulls",
                )
        return self._masked_or_filled(policy, Nulls(asked), natural)

    def _masked_or_filled(self, policy: Policy, nulls: Nulls, natural: Nulls | None) -> Policy:
        is_python = policy.kind in (Kind.PYTHON, Kind.ARROW)
        if nulls is Nulls.MASK and (is_python or policy.is_coded):
            return replace(policy, nulls=nulls, value_nulls=Nulls.KEEP)
        if nulls is Nulls.MASK and policy.kind is Kind.RAGGED:
            return replace(policy, nulls=nulls, value_nulls=natural or Nulls.ERROR, fill=_nan(policy))
        zero = zero_of(policy.value_type)
        if zero is None:
            raise InvalidArgument(
                f'nulls="fill" for column {policy.name!r} is not possible: type {policy.type} has no zero; '
                'use "mask", "error" or "keep", for this column alone with nulls={"column": …}',
                field="nulls",
            )
        return replace(policy, nulls=nulls, value_nulls=Nulls.FILL, fill=_checked_fill(policy, zero))

    def finish(self, policies: Sequence[Policy]) -> None:
        """Raise an error for all problems."""
        if self._refused:
            raise SchemaMismatch("; ".join(self._refused))
        self._check_names(policies)
        if self._string_width is not None and not any(policy.kind is Kind.BYTES for policy in policies):
            raise InvalidArgument(
                f'string_width={self._string_width} but no column has strings="bytes"; pass that, or leave it out',
                field="string_width",
            )
        if self._null_columns:
            raise NullsFound(
                f"columns that cannot hold nulls have some: {', '.join(self._null_columns)}; "
                'pass a fill value, as in nulls={"column": 0}, or nulls="fill" or "mask", '
                "or leave out the rows with filters="
            )

    def _check_names(self, policies: Sequence[Policy]) -> None:
        names = [name for policy in policies for name in (policy.name, policy.mask) if name]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise SchemaMismatch(
                f"more than one column would be named {_listed(twice)}: children of structs become parent.child "
                "and masks <name>_mask; rename one in the files, or leave one out with columns="
            )
        for choice in (self._strings, self._decimals, self._nulls):
            if unknown := sorted(set(choice.by_column) - choice.used):
                raise InvalidArgument(
                    f"{choice.option}= names {_listed(unknown)}, but it applies only to the columns "
                    f"{_listed(sorted(choice.used)) or 'none'}",
                    field=choice.option,
                )


def _natural(policy: Policy) -> Nulls | None:
    """Return how a null is delivered by default, or None if the column has nothing for it."""
    if policy.kind in (Kind.PYTHON, Kind.ARROW) or policy.is_coded:
        return Nulls.KEEP
    return Nulls.FILL if _nan(policy) is not None else None


def _nan(policy: Policy) -> pa.Scalar | None:
    """Return NaN for columns delivered as floats, else None. Decimals are filled after they became floats."""
    if policy.dtype is None or not np.issubdtype(policy.dtype, np.floating):
        return None
    is_decimal = pat.is_decimal(policy.value_type)
    kind = pa.float64() if is_decimal else policy.value_type
    return of_numbers(np.full(1, np.nan, kind.to_pandas_dtype()), kind)[0]


def _checked_fill(policy: Policy, value: Any) -> pa.Scalar:
    """Return a fill value with the type of the column.

    Raises:
        InvalidArgument: It does not have that type.
    """
    kind = policy.value_type
    base = plain(kind)
    expected = (str,) if pat.is_large_string(base) else (bytes,) if pat.is_large_binary(base) else None
    is_cut = isinstance(value, float) and not pat.is_floating(base)
    try:
        if is_cut or (expected and not isinstance(value, expected)):
            value_of = " or ".join(kind.__name__ for kind in expected or (int,))
            raise TypeError(f"{value_of} expected, got {type(value).__name__}")  # noqa: TRY301 - reported like Arrow's own
        if pat.is_decimal(base) and policy.dtype == np.float64:
            return pa.scalar(float(value), pa.float64())
        scalar = pa.scalar(value, kind)
        pc.fill_null(pa.nulls(1, kind), scalar)
    except (TypeError, ValueError, OverflowError, NotImplementedError, pa.ArrowException) as error:
        raise InvalidArgument(
            f"nulls: {value!r} cannot replace a null of column {policy.name!r} ({policy.type}): {error}; "
            'pass a value of this type, or one of "error", "fill", "mask", "keep"',
            field="nulls",
        ) from error
    return scalar


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(str(name)) for name in names)
