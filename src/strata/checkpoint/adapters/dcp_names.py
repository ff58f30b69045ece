"""Between the nested structure of a checkpoint and the flat names of torch.distributed.checkpoint. Pure; no torch.

DCP knows a state as items with dotted names. Its planner cuts a nested dict into items by a rule: dicts are opened, and
lists that hold tensors, dicts or such lists; all else is one item. The same rule, applied to our structure, gives the
same items, so a checkpoint that was saved otherwise can be read through DCP as well.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from strata.checkpoint.format import tree
from strata.errors import CheckpointInvalid, InvalidArgument
from strata.storage import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from strata.checkpoint.format.tree import Node

ItemPath = tuple[str | int, ...]
"""Keys of dicts as strings, places in lists as ints."""
KEY = "torch_dcp"
"""In the manifest's metadata, only where the state cannot be nested as it was."""
_MAPPINGS = ("dict", "odict")


class DcpItem(NamedTuple):
    path: ItemPath
    node: Node


def items(structure: Node) -> dict[str, DcpItem]:
    """What DCP takes a state for: dotted name → item, in the state's order.

    The structure must be one that `tree.names_in` accepts.

    Raises:
        InvalidArgument: It is no dict, or two of its entries have the same dotted name.
    """
    if _pairs(structure) is None:
        raise InvalidArgument("the state of this checkpoint is not a dict, and DCP knows no other; use load()")
    found: dict[str, DcpItem] = {}
    for item in _walk(structure, ()):
        name = ".".join(map(str, item.path))
        if name in found:
            raise InvalidArgument(
                f"the state has two entries named {name!r} (a key with a dot, or keys that differ in type only); "
                "DCP cannot tell them apart, use load()"
            )
        found[name] = item
    return found


def top_items(structure: Node) -> dict[str, DcpItem]:
    """The same of a state that was saved without cutting it (`flatten_state_dict=False`): its keys alone."""
    return {_text(key): DcpItem((_text(key),), node) for key, node in _pairs(structure) or ()}


def nest(nodes: Mapping[str, Node], paths: Mapping[str, ItemPath]) -> Node | None:
    """The structure whose items these are; None if there is none, such as for a list with holes."""
    root: dict[str | int, Any] = {}
    for name, node in nodes.items():
        path, inner = paths.get(name, (name,)), root
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                return None  # an item lies within another one
        if path[-1] in inner:
            return None
        inner[path[-1]] = DcpItem(path, node)
    structure = _closed(root)
    if structure is None or _pairs(structure) is None:
        return None
    try:
        found = items(structure)
    except InvalidArgument:
        return None
    wanted = {name: tuple(paths.get(name, (name,))) for name in nodes}
    return structure if {name: item.path for name, item in found.items()} == wanted else None


def flat(nodes: Mapping[str, Node]) -> Node:
    return {"dict": [[name, node] for name, node in nodes.items()]}


def _closed(inner: dict[str | int, Any]) -> Node | None:
    """Dicts of ints become lists, if nothing is missing."""
    closed = {key: value.node if isinstance(value, DcpItem) else _closed(value) for key, value in inner.items()}
    if any(value is None and not isinstance(inner[key], DcpItem) for key, value in closed.items()):
        return None
    if all(isinstance(key, str) for key in closed):
        return {"dict": [[key, node] for key, node in closed.items()]}
    if set(closed) == set(range(len(closed))):
        return {"list": [closed[number] for number in range(len(closed))]}
    return None


def _walk(node: Node, path: ItemPath) -> Iterator[DcpItem]:
    pairs = _pairs(node)
    if pairs is not None:
        for key, value in pairs:
            yield from _walk(value, (*path, _text(key)))
    elif _is_opened(node):
        for number, value in enumerate(node["list"]):
            yield from _walk(value, (*path, number))
    else:
        yield DcpItem(path, node)


def _is_opened(node: Node) -> bool:
    """Whether it is a list that DCP looks into."""
    return (
        isinstance(node, dict)
        and "list" in node
        and any(_pairs(entry) is not None or is_tensor(entry) or _is_opened(entry) for entry in node["list"])
    )


def is_tensor(node: Node) -> bool:
    """A torch tensor; arrays of others are objects to DCP."""
    return isinstance(node, dict) and node.get("as") == "torch"


def _pairs(node: Node) -> list[list[Node]] | None:
    if isinstance(node, dict):
        for tag in _MAPPINGS:
            if tag in node:
                pairs: list[list[Node]] = node[tag]
                return pairs
    return None


def _text(key: Node) -> str:
    """A key, as DCP spells it: `str` of it."""
    return key if isinstance(key, str) else str(tree.unflatten(key, _no_tensor))


def _no_tensor(name: str, _kind: str) -> None:
    raise CheckpointInvalid(f"the structure has the tensor {name[:200]!r} for a key")


class StoreLocation:
    """Where checkpoints lie. A store that is named is opened for each use, so that the adapters can go to another
    process, as `async_save` with `AsyncCheckpointerType.PROCESS` sends them.
    """

    def __init__(self, place: str | os.PathLike[str] | Store, storage_options: Mapping[str, Any] | None) -> None:
        self._place = os.fspath(place) if isinstance(place, str | os.PathLike) else place
        self._options = storage_options

    @contextlib.contextmanager
    def opened(self) -> Iterator[Store]:
        if not isinstance(self._place, str):
            yield self._place
            return
        store = open_store(self._place, self._options)
        try:
            yield store
        finally:
            store.close()

    def __getstate__(self) -> dict[str, Any]:
        if not isinstance(self._place, str):
            raise InvalidArgument(
                f"a {type(self._place).__name__} cannot go to another process; give the adapter the store's path or URL"
            )
        return self.__dict__
