"""What the ranks of a DCP save have written, put together into what a manifest tells. Pure; no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from strata.checkpoint.adapters import dcp_names
from strata.errors import CheckpointInvalid, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.checkpoint.adapters.dcp_names import ItemPath
    from strata.checkpoint.format import manifest as m
    from strata.checkpoint.format.tree import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a rank tells the coordinator of one item. Slices count no files yet: it is this one."""

    id: str
    file: m.DataFile
    entry: m.TensorEntry | None = None
    """Of a tensor, or of a slice of one: the entry has this slice alone."""
    node: Any = None
    """Of an object."""
    tensors: tuple[m.TensorEntry, ...] = ()
    """That the object holds."""


def merged(
    written: Sequence[tuple[str, Written]],
) -> tuple[tuple[m.DataFile, ...], tuple[m.TensorEntry, ...], dict[str, Node]]:
    """The files, the tensors with all their slices, and what each name of DCP stands for."""
    files = list(dict.fromkeys(told.file for _, told in written))
    number = {file: i for i, file in enumerate(files)}
    entries: dict[str, m.TensorEntry] = {}
    owners: dict[str, str] = {}
    nodes: dict[str, Node] = {}
    for name, told in written:
        nodes[name] = told.node if told.entry is None else {"tensor": name, "as": "torch"}
        for entry in told.tensors if told.entry is None else (told.entry,):
            entry = msgspec.structs.replace(
                entry, slices=(msgspec.structs.replace(entry.slices[0], file=number[told.file]),)
            )
            if owners.setdefault(entry.name, name) != name:
                raise InvalidArgument(
                    f"{name!r} and {owners[entry.name]!r} both have a tensor {entry.name!r}; give one another key",
                    field=name,
                )
            known = entries.get(entry.name)
            entries[entry.name] = entry if known is None else _joined(known, entry)
    _untangle(entries, nodes)
    return tuple(files), tuple(entries.values()), nodes


def _joined(known: m.TensorEntry, more: m.TensorEntry) -> m.TensorEntry:
    """
    Raises:
        CheckpointInvalid: They are not of the same tensor.
    """
    if (known.dtype, known.shape) != (more.dtype, more.shape):
        raise CheckpointInvalid(
            f"tensor {known.name!r} is of {known.dtype} {known.shape} on one rank and of {more.dtype} {more.shape} on "
            "another; save it under another name"
        )
    parts = {(part.start, part.shape): part for part in (*more.slices, *known.slices)}  # two copies are one
    filled = [part for part in parts.values() if math.prod(part.shape)]
    kept = sorted(filled, key=lambda part: part.start) or known.slices
    return msgspec.structs.replace(known, slices=tuple(kept))


def _untangle(entries: dict[str, m.TensorEntry], nodes: dict[str, Node]) -> None:
    """Tied tensors, which are the same bytes, become one."""
    first: dict[Any, str] = {}
    for name, node in nodes.items():
        if not dcp_names.is_tensor(node):
            continue
        entry = entries[name]
        if not entry.num_bytes:
            continue
        same = first.setdefault((entry.dtype, entry.shape, entry.slices), name)
        if same != name:
            nodes[name] = {"tensor": same, "as": "torch"}
            del entries[name]


def nested(nodes: Mapping[str, Node], planner_data: Any) -> tuple[Node, dict[str, Any]]:
    """Nested as the state was; what else must be known to give DCP its names and paths back."""
    if planner_data is None:
        return dcp_names.flat(nodes), {dcp_names.KEY: {"flattened": False}}
    paths = _paths(planner_data)
    in_order = {name: nodes[name] for name in (*(name for name in paths if name in nodes), *nodes)}
    structure = dcp_names.nest(in_order, paths)
    if structure is not None:
        return structure, {}
    return dcp_names.flat(in_order), {
        dcp_names.KEY: {"paths": {name: list(paths.get(name, (name,))) for name in in_order}}
    }


def _paths(planner_data: Any) -> dict[str, ItemPath]:
    if isinstance(planner_data, Mapping) and all(
        isinstance(name, str) and isinstance(path, tuple) and path and all(type(key) in (str, int) for key in path)
        for name, path in planner_data.items()
    ):
        return dict(planner_data)
    raise InvalidArgument(
        f"the planner's data is a {type(planner_data).__name__}, and not the paths of the state's entries as "
        "DefaultSavePlanner gives them; a checkpoint does not hold it"
    )
