"""Bytes that were read, as what they were when they were saved: torch tensors, numpy or JAX arrays, bytes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from strata.checkpoint.format import tree
from strata.checkpoint.format.buffers import array_over, tensor_over
from strata.checkpoint.format.dtypes import BY_NAME
from strata.errors import CheckpointInvalid, InvalidArgument, StrataError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from strata.checkpoint.format.buffers import Bytes
    from strata.checkpoint.format.dtypes import DType
    from strata.checkpoint.format.manifest import TensorEntry
    from strata.checkpoint.format.tree import Kind, Node


def rebuild(
    structure: Node, described: Iterable[TensorEntry], tensors: Mapping[str, Bytes], *, map_location: Any = None
) -> Any:
    """`map_location` is where torch tensors go, see `device_of`; without it they stay on the CPU."""
    entries = {tensor.name: tensor for tensor in described}

    def build(name: str, kind: Kind) -> Any:
        entry = entries[name]
        try:
            built = _as_it_was(tensors[name], BY_NAME[entry.dtype], entry.shape, kind)
        except (ValueError, OverflowError, RuntimeError) as error:  # an empty one may claim any other sides
            if isinstance(error, StrataError):
                raise
            raise CheckpointInvalid(
                f"tensor {name[:200]!r} of {entry.dtype} is said to be of {kind}, which cannot have the shape "
                f"{str(entry.shape)[:200]}: {error}"
            ) from None
        # Outside: that a device has no memory left is not the checkpoint's fault.
        return built if map_location is None or kind != "torch" else built.to(map_location)

    return tree.unflatten(structure, build)


def device_of(map_location: Any) -> Any:
    """Of what a caller says: a device, its name, or a dict with one for `"cpu"`, where tensors come from.

    Raises:
        InvalidArgument: There is no such device here.
    """
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu")
    torch = sys.modules.get("torch")
    if map_location is None or torch is None:
        return None
    try:
        return torch.empty(0, device=map_location).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InvalidArgument(
            f"map_location={map_location!r} is no device of this machine ({str(error).splitlines()[0]}); name one, as "
            "'cpu' or 'cuda:0'",
            field="map_location",
        ) from None


def _as_it_was(memory: Bytes, dtype: DType, shape: tuple[int, ...], kind: Kind) -> Any:
    if kind == "bytes":
        return memory.tobytes()
    if kind == "torch":
        return tensor_over(memory, dtype, shape)
    array = array_over(memory, dtype, shape)
    if kind == "scalar":
        return array[()]
    if kind == "jax":
        import jax.numpy as jnp  # noqa: PLC0415 - it was saved from JAX

        return jnp.asarray(array)
    return array
