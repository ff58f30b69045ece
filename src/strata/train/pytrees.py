"""JAX pytrees as parts of a state. They are immutable, so a restored tree is a new one with the same structure, which
the script takes from `Progress.state`.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class Tree:
    """A placeholder for a pytree that provides `load_state_dict`."""

    def __init__(self, like: Any) -> None:
        self._like = like
        self._saved: Any = None
        self._is_there = False

    def load_state_dict(self, state: Any) -> None:
        self._saved, self._is_there = state, True

    def restored(self, *, strict: bool) -> Any:
        """Return the saved tree with the structure, types and shardings of the original; the original itself if the
        checkpoint did not contain it.

        Raises:
            InvalidArgument: The saved tree does not fit; the message names the leaf.
        """
        from strata.checkpoint.adapters.pytrees import from_state  # noqa: PLC0415 - imports jax

        return from_state(self._saved, like=self._like, strict=strict) if self._is_there else self._like


def stand_ins(parts: Mapping[str, Any]) -> dict[str, Tree]:
    """Return placeholders for the parts that are pytrees."""
    return {name: Tree(part) for name, part in parts.items() if is_tree(part)}


def is_tree(part: Any) -> bool:
    """Return whether a part holds JAX arrays or their shapes. Objects with `load_state_dict` do not count."""
    jax = sys.modules.get("jax")
    if jax is None or hasattr(part, "load_state_dict") or hasattr(part, "state_dict"):
        return False
    return any(isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) for leaf in jax.tree_util.tree_leaves(part))


def storable(part: Any) -> Any:
    """Return a part as checkpoints take it: modules and optimizers as state dicts, pytrees by the names of leaves."""
    if hasattr(part, "state_dict"):
        return part.state_dict()
    if is_tree(part):
        from strata.checkpoint.adapters.pytrees import to_state  # noqa: PLC0415 - imports jax

        return to_state(part)
    return part


def on_the_host(trees: Mapping[str, Tree]) -> contextlib.AbstractContextManager[Any]:
    """Read arrays into host memory, if there are trees: an accelerator may not have room for all of them at once."""
    if not trees:
        return contextlib.nullcontext()
    from strata.checkpoint.adapters import pytrees  # noqa: PLC0415 - imports jax

    return pytrees.on_the_host()
