"""Lists and trees of tensors: which are below a node, which match a search, in which order.

A tensor's name is a path whose parts are separated by dots. Names are untrusted text: they are compared, never used as
file names.
"""

from __future__ import annotations

import fnmatch
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from strata.checkpoint.format.dtypes import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from strata.checkpoint.format.manifest import TensorEntry
    from strata.checkpoint.load.statistics import Statistics

Property = Literal["nan", "inf", "not_finite", "constant", "zero", "dead_rows", "changed"]
Sort = Literal["order", "name", "bytes", "norm", "max_abs", "std", "nan", "dead_rows", "change"]

_DIGITS = re.compile(r"(\d+)")


@dataclass(slots=True)
class Node:
    """A group of tensors, or one tensor."""

    label: str
    path: str
    tensor: TensorEntry | None = None
    """None for a group."""
    num_tensors: int = 0
    num_bytes: int = 0
    num_elements: int = 0
    num_nan: int | None = 0
    """None, like `num_inf`, if the statistics of a tensor are not known."""
    num_inf: int | None = 0

    def add(self, tensor: TensorEntry, known: Statistics | None) -> None:
        num_elements = math.prod(tensor.shape)
        self.num_tensors += 1
        self.num_bytes += num_elements * BY_NAME[tensor.dtype].itemsize
        self.num_elements += num_elements
        self.num_nan = None if known is None or self.num_nan is None else self.num_nan + known.num_nan
        self.num_inf = None if known is None or self.num_inf is None else self.num_inf + known.num_inf


def children(tensors: Iterable[TensorEntry], known: Mapping[str, Statistics], under: str | None) -> list[Node]:
    """Return the nodes directly below a group, or the top of the tree, in the order of the tensors."""
    prefix = "" if under is None else f"{under}."
    begin = len(prefix)
    found: dict[tuple[bool, str], Node] = {}
    for tensor in tensors:
        name = tensor.name
        if not name.startswith(prefix):
            continue
        dot = name.find(".", begin)
        is_tensor = dot < 0
        label = name[begin:] if is_tensor else name[begin:dot]
        node = found.get((is_tensor, label))
        if node is None:
            path = name if is_tensor else name[:dot]
            node = found[is_tensor, label] = Node(label, path, tensor if is_tensor else None)
        node.add(tensor, known.get(name))
    return list(found.values())


def natural_key(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Return a key that sorts `layers.2` before `layers.10`."""
    return tuple(
        (False, int(part), "") if part.isascii() and part.isdigit() and len(part) < 20 else (True, 0, part)
        for part in _DIGITS.split(name)
        if part
    )


def matches(name: str, *, search: str, under: str | None) -> bool:
    """Return whether a name contains the text, or matches the pattern if it has `*` or `?`, below a group."""
    if under is not None and not name.startswith(f"{under}."):
        return False
    if not search:
        return True
    if "*" in search or "?" in search:
        return fnmatch.fnmatchcase(name.casefold(), search.casefold())
    return search.casefold() in name.casefold()


def std_of(one: Statistics) -> float | None:
    """Return the standard deviation of the finite elements; None if it is not known."""
    if one.norm is None or one.mean is None or not one.num_finite:
        return None
    try:
        return math.sqrt(max((one.norm / math.sqrt(one.num_finite)) ** 2 - one.mean**2, 0.0))
    except OverflowError:
        return None


def max_abs_of(one: Statistics) -> float | None:
    low, high = as_float(one.min), as_float(one.max)
    return max(abs(low), abs(high)) if low is not None and high is not None else None


def as_float(value: float | None) -> float | None:
    """Return a finite float. The file of statistics is untrusted, and JSON has integers of any size."""
    try:
        return float(value) if value is not None and math.isfinite(value) else None
    except OverflowError:
        return None


def has_property(one: Statistics, wanted: Property) -> bool:
    """Return whether statistics show a property; those of `dead_rows` and `changed` are not in them."""
    match wanted:
        case "nan":
            return one.num_nan > 0
        case "inf":
            return one.num_inf > 0
        case "not_finite":
            return one.num_nan + one.num_inf > 0
        case "constant":
            return one.num_finite == one.num_elements > 1 and one.min == one.max
        case "zero":
            return one.num_finite == one.num_elements > 0 and one.min == 0 == one.max
        case "dead_rows" | "changed":
            raise AssertionError(f"statistics do not show {wanted}")
