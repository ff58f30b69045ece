"""JAX pytrees as parts of a state. Nothing can be put into them, for arrays of JAX do not change: a restored tree is
another one, of the same structure, which the script takes from `Progress.state`.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class Tree:
    """Stands in for a pytree where something with `load_state_dict` is wanted."""

    def __init__(self, like: Any) -> None:
        self._like = like
        self._saved: Any = None
        self._is_there = False

    def load_state_dict(self, state: Any) -> None:
        self._saved, self._is_there = state, True

    def restored(self, *, strict: bool) -> Any:
        """With the structure, the types and the shardings of the one that it stands for; that one, if nothing of it was
        in the checkpoint.

        Raises:
            InvalidArgument: What was saved does not fit; the message says which leaf, and how.
        """
        from strata.checkpoint.adapters.pytrees import from_state  # noqa: PLC0415 - it imports jax

        return from_state(self._saved, like=self._like, strict=strict) if self._is_there else self._like


def stand_ins(parts: Mapping[str, Any]) -> dict[str, Tree]:
    """For those parts that are pytrees."""
    return {name: Tree(part) for name, part in parts.items() if is_tree(part)}


def is_tree(part: Any) -> bool:
    """Whether it holds arrays of JAX, or says what they would be like. What can be loaded into is none."""
    jax = sys.modules.get("jax")
    if jax is None or hasattr(part, "load_state_dict") or hasattr(part, "state_dict"):
        return False
    return any(isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) for leaf in jax.tree_util.tree_leaves(part))


def storable(part: Any) -> Any:
    """As a checkpoint takes it: modules and optimizers by their states, pytrees by the names of their leaves."""
    if hasattr(part, "state_dict"):
        return part.state_dict()
    if is_tree(part):
        from strata.checkpoint.adapters.pytrees import to_state  # noqa: PLC0415 - it imports jax

        return to_state(part)
    return part


def on_the_host(trees: Mapping[str, Tree]) -> contextlib.AbstractContextManager[Any]:
    """Where arrays are read to, if there are trees: an accelerator may have no room for all of them at once."""
    if not trees:
        return contextlib.nullcontext()
    from strata.checkpoint.adapters import pytrees  # noqa: PLC0415 - it imports jax

    return pytrees.on_the_host()
