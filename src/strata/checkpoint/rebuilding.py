"""Bytes that were read, as what they were when they were saved: torch tensors, numpy or JAX arrays, bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strata.checkpoint import tree
from strata.checkpoint.buffers import array_over, tensor_over
from strata.checkpoint.dtypes import BY_NAME
from strata.errors import CheckpointInvalid, StrataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from strata.checkpoint.buffers import Bytes
    from strata.checkpoint.dtypes import DType
    from strata.checkpoint.manifest import TensorEntry
    from strata.checkpoint.tree import Kind, Node


def rebuild(
    structure: Node, described: Iterable[TensorEntry], tensors: Mapping[str, Bytes], *, map_location: Any = None
) -> Any:
    """`map_location` is where torch tensors go, as in `torch.load`; they stay on the CPU without it."""
    entries = {tensor.name: tensor for tensor in described}

    def build(name: str, kind: Kind) -> Any:
        entry = entries[name]
        try:
            return _as_it_was(tensors[name], BY_NAME[entry.dtype], entry.shape, kind, name, map_location)
        except (ValueError, OverflowError, RuntimeError) as error:  # an empty one may claim any other sides
            if isinstance(error, StrataError):
                raise
            raise CheckpointInvalid(
                f"tensor {name[:200]!r} of {entry.dtype} is said to be of {kind}, which cannot have the shape "
                f"{str(entry.shape)[:200]}: {error}"
            ) from None

    return tree.unflatten(structure, build)


def _as_it_was(memory: Bytes, dtype: DType, shape: tuple[int, ...], kind: Kind, name: str, map_location: Any) -> Any:
    if kind == "bytes":
        return memory.tobytes()
    if kind == "torch":
        tensor = tensor_over(memory, dtype, shape)
        return tensor if map_location is None else tensor.to(map_location)
    if not dtype.numpy:
        raise CheckpointInvalid(f"tensor {name!r} is of type {dtype.name} and said to be of {kind}, which has none")
    array = array_over(memory, dtype, shape)
    if kind == "scalar":
        return array[()]
    if kind == "jax":
        import jax.numpy as jnp  # noqa: PLC0415 - it was saved from JAX

        return jnp.asarray(array)
    return array
