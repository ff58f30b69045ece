"""How a batch becomes the arguments of a module's `forward`: decided once, before the first step, without running it.

    forward(self, user, item)      columns of these names, and only these are read
    forward(self, batch)           one parameter that is not a column: the whole batch, a mapping without the label
    forward(self, x), inputs=[…]   … with `inputs`, those columns as one float matrix
    forward(self, *tensors)        what a Dataset or tensors deliver, in their order

The decision is pure: a signature and the names of the columns in, a `Binding` out.
"""

from __future__ import annotations

import difflib
import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Mode = Literal["columns", "mapping", "stack", "sequence"]
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Binding:
    mode: Mode
    columns: tuple[str, ...] = ()
    """The columns to pass; empty with `mapping` and `sequence`, which pass everything."""
    is_positional: bool = False
    """Pass the columns in their order instead of by name."""
    parts: Mapping[str, tuple[str, int | slice]] = field(default_factory=dict)
    """Features that are columns of an encoded matrix: name → (matrix, columns of the matrix)."""

    def arguments(self, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments for `forward`."""
        if self.mode == "mapping":
            return (inputs,), {}
        if self.mode == "sequence":
            return tuple(inputs), {}
        found = {name: self._column(inputs, name) for name in self.columns}
        if self.mode == "stack":
            return (stacked(found),), {}
        return (tuple(found.values()), {}) if self.is_positional else ((), found)

    def _column(self, inputs: Mapping[str, Any], name: str) -> Any:
        if name in inputs or name not in self.parts:
            return inputs[name]
        matrix, where = self.parts[name]
        return inputs[matrix][:, where]


def bind(
    forward: Callable[..., Any],
    columns: Sequence[str] | None,
    *,
    inputs: Sequence[str] | None = None,
    parts: Mapping[str, tuple[str, int | slice]] | None = None,
) -> Binding:
    """Decide how batches are passed to `forward`.

    Args:
        columns: Names of the columns without the label; None if batches are sequences.
        inputs: The columns to pass, if the user named them.
        parts: See `Binding.parts`.

    Raises:
        InvalidArgument: A parameter is not a column, or an input does not exist.
    """
    parts = parts or {}
    if columns is None:
        if inputs is not None:
            raise InvalidArgument(
                "inputs= names columns, but the batches of this data are tuples without names; leave it out, or let "
                "the dataset return dictionaries",
                field="inputs",
            )
        return Binding("sequence")
    known = [*columns, *parts]
    required, optional, takes_any = _parameters(forward)
    if inputs is not None:
        return _bind_inputs(list(inputs), known, required, optional, parts=parts, takes_any=takes_any)
    if len(required) == 1 and required[0] not in known:
        return Binding("mapping", parts=parts)
    if takes_any and not required:
        return Binding("columns", (*columns,), parts=parts)
    missing = [name for name in required if name not in known]
    if missing:
        raise InvalidArgument(
            f"forward({', '.join([*required, *optional])}) has the parameter {missing[0]!r}, which is not a column of "
            f"the data{_nearest(missing[0], known)}; name the parameters after columns, give them defaults, take the "
            f"whole batch with forward(batch), or pass inputs=[…]. Columns: {', '.join(known)}",
            field="module",
        )
    chosen = [*required, *(name for name in optional if name in known)]
    return Binding("columns", tuple(chosen), parts=parts)


def _bind_inputs(
    inputs: list[str],
    known: list[str],
    required: list[str],
    optional: list[str],
    *,
    parts: Mapping[str, tuple[str, int | slice]],
    takes_any: bool,
) -> Binding:
    for name in inputs:
        if name not in known:
            raise InvalidArgument(
                f"inputs= names {name!r}, which is not a column of the data{_nearest(name, known)}; columns: "
                f"{', '.join(known)}",
                field="inputs",
            )
    if takes_any or set(required) <= set(inputs) <= {*required, *optional}:
        return Binding("columns", tuple(inputs), parts=parts)
    if len(required) == len(inputs) > 1:
        return Binding("columns", tuple(inputs), is_positional=True, parts=parts)
    if len(required) == 1 or (not required and optional):
        return Binding("stack", tuple(inputs), parts=parts)
    raise InvalidArgument(
        f"forward takes {len(required)} arguments ({', '.join(required)}), but inputs= names {len(inputs)} columns; "
        "name one column per argument, or let forward take one matrix",
        field="inputs",
    )


def stacked(columns: Mapping[str, Any]) -> torch.Tensor:
    """Join numeric columns of shapes [rows] and [rows, n] into one float matrix."""
    parts = []
    for name, column in columns.items():
        if not isinstance(column, torch.Tensor):
            raise InvalidArgument(
                f"column {name!r} is a {type(column).__name__}, not a tensor, so it cannot be part of a matrix; leave "
                "it out of inputs=, or encode it with SparseFeat in features=",
                field="inputs",
            )
        parts.append(column.reshape(len(column), -1).to(torch.get_default_dtype()))
    return torch.cat(parts, dim=1)


def feature_parts(fields: Iterable[Any]) -> dict[str, tuple[str, int | slice]]:
    """Return where each feature lies in the encoded matrices `sparse` and `dense`."""
    parts: dict[str, tuple[str, int | slice]] = {}
    num_sparse = num_dense = 0
    for each in fields:
        if each.kind == "sparse":
            parts[each.name] = "sparse", num_sparse
            num_sparse += 1
        elif each.kind == "dense":
            parts[each.name] = "dense", num_dense if each.width == 1 else slice(num_dense, num_dense + each.width)
            num_dense += each.width
    return parts


def describe(inputs: Any) -> str:
    """Describe a batch for messages: names, types and shapes."""
    if isinstance(inputs, dict):
        return ", ".join(f"{name}: {_describe_value(value)}" for name, value in inputs.items())
    if isinstance(inputs, list | tuple):
        return ", ".join(map(_describe_value, inputs))
    return _describe_value(inputs)


def _describe_value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{describe(value)}}}"
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list) and value:
        return f"a list of {len(value)} {type(value[0]).__name__}"
    return type(value).__name__


def _parameters(forward: Callable[..., Any]) -> tuple[list[str], list[str], bool]:
    """Return the names of required and optional parameters, and whether `forward` takes any keyword."""
    found = inspect.signature(forward).parameters.values()
    named = [each for each in found if each.kind in _NAMED or each.kind is inspect.Parameter.POSITIONAL_ONLY]
    required = [each.name for each in named if each.default is inspect.Parameter.empty]
    optional = [each.name for each in named if each.default is not inspect.Parameter.empty]
    return required, optional, any(each.kind is inspect.Parameter.VAR_KEYWORD for each in found)


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
