"""Convert between the nested structure of a checkpoint and the flat names of torch.distributed.checkpoint. No torch.

DCP represents a state as items with dotted names. Its planner flattens dicts, and lists that hold tensors, dicts or
such lists; everything else is one item. The same rule applied to our structure gives the same items, so checkpoints
that were not saved through DCP can be read through it too.
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
"""Keys of dicts as strings, indices of lists as ints."""
KEY = "torch_dcp"
"""A key in the manifest's metadata, used only if the state cannot be nested as it was."""
_MAPPINGS = ("dict", "odict")


class DcpItem(NamedTuple):
    """One item of a state."""

    path: ItemPath
    node: Node


def items(structure: Node) -> dict[str, DcpItem]:
    """Return DCP's items of a valid structure by dotted name, in order.

    Raises:
        InvalidArgument: The state is not a dict, or two entries have the same dotted name.
    """
    if _pairs(structure) is None:
        raise InvalidArgument("the state of this checkpoint is not a dict, which DCP requires; use load()")
    found: dict[str, DcpItem] = {}
    for item in _walk(structure, ()):
        name = ".".join(map(str, item.path))
        if name in found:
            raise InvalidArgument(
                f"the state has two entries named {name!r} (a key with a dot, or keys that differ only in type), which "
                "DCP cannot distinguish; use load()"
            )
        found[name] = item
    return found


def top_items(structure: Node) -> dict[str, DcpItem]:
    """Return the items of a state that was saved with `flatten_state_dict=False`: its top-level keys."""
    return {_text(key): DcpItem((_text(key),), node) for key, node in _pairs(structure) or ()}


def nest(nodes: Mapping[str, Node], paths: Mapping[str, ItemPath]) -> Node | None:
    """Return the structure with these items; None if there is none, such as for a list with holes."""
    root: dict[str | int, Any] = {}
    for name, node in nodes.items():
        path, inner = paths.get(name, (name,)), root
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                return None  # one item is inside another
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
    """Return a flat dict of the items."""
    return {"dict": [[name, node] for name, node in nodes.items()]}


def _closed(inner: dict[str | int, Any]) -> Node | None:
    """Convert dicts with the keys 0, 1, … to lists."""
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
    """Return whether DCP flattens this list."""
    return (
        isinstance(node, dict)
        and "list" in node
        and any(_pairs(entry) is not None or is_tensor(entry) or _is_opened(entry) for entry in node["list"])
    )


def is_tensor(node: Node) -> bool:
    """Return whether the node is a torch tensor; other arrays are objects to DCP."""
    return isinstance(node, dict) and node.get("as") == "torch"


def _pairs(node: Node) -> list[list[Node]] | None:
    if isinstance(node, dict):
        for tag in _MAPPINGS:
            if tag in node:
                pairs: list[list[Node]] = node[tag]
                return pairs
    return None


def _text(key: Node) -> str:
    """Return a key as DCP spells it, with `str`."""
    return key if isinstance(key, str) else str(tree.unflatten(key, _no_tensor))


def _no_tensor(name: str, _kind: str) -> None:
    raise CheckpointInvalid(f"the structure has the tensor {name[:200]!r} as a key")


class StoreLocation:
    """The store of an adapter. A path or URL is opened for each use, so that the adapter can be pickled.

    `async_save` with `AsyncCheckpointerType.PROCESS` sends adapters to another process.
    """

    def __init__(self, location: str | os.PathLike[str] | Store, storage_options: Mapping[str, Any] | None) -> None:
        self._location = os.fspath(location) if isinstance(location, str | os.PathLike) else location
        self._options = storage_options

    @contextlib.contextmanager
    def opened(self) -> Iterator[Store]:
        """Open the store for the duration of the block."""
        if not isinstance(self._location, str):
            yield self._location
            return
        store = open_store(self._location, self._options)
        try:
            yield store
        finally:
            store.close()

    def __getstate__(self) -> dict[str, Any]:
        if not isinstance(self._location, str):
            raise InvalidArgument(
                f"a {type(self._location).__name__} cannot be sent to another process; pass a path or URL instead"
            )
        return self.__dict__
