"""A state, or parts of one, from a checkpoint."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from strata.checkpoint import boxes, mapping, reading, tree
from strata.checkpoint.boxes import Rectangle
from strata.checkpoint.rebuilding import rebuild
from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from strata.checkpoint.manifest import Manifest, TensorEntry
    from strata.storage import Store, Watch

Slices = Mapping[str, tuple[Sequence[int], Sequence[int]]]
"""Tensor → (start, shape)."""


def structure_for(manifest: Manifest, rank: int, only: Iterable[str] | None = None) -> Any:
    """Of this rank's state, or of what is wanted of it. A rank that was not there gets the first one's.

    Raises:
        InvalidArgument: There is nothing of what is wanted.
        CheckpointInvalid: It is no structure.
    """
    structure = manifest.structures[manifest.structure_of_rank[rank if rank < manifest.num_ranks else 0]]
    tree.names_in(structure)  # it is one, which `select` believes
    if only is None:
        return structure
    patterns = [only] if isinstance(only, str) else list(only)
    selected = tree.select(structure, lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))
    if selected is None:
        raise InvalidArgument(f"checkpoint {manifest.id} has no tensor that matches {patterns}", field="only")
    return selected


def num_bytes_of(manifest: Manifest, structure: Any) -> int:
    wanted = set(tree.names_in(structure))
    return sum(tensor.num_bytes for tensor in manifest.tensors if tensor.name in wanted)


def load(
    store: Store,
    manifest: Manifest,
    structure: Any,
    *,
    slices: Slices | None = None,
    map_location: Any = None,
    mmap: bool = False,
    watch: Watch,
) -> Any:
    """
    Raises:
        CheckpointInvalid: It cannot be trusted.
        InvalidArgument: A slice is not within its tensor, or of none.
    """
    names = tree.names_in(structure)
    entries = {tensor.name: tensor for tensor in manifest.tensors}
    if slices:
        wanted = {name: boxes.whole(entries[name]) for name in names if name in entries}
        wanted |= {name: _rectangle(name, *slices[name], wanted) for name in slices}
        tensors = reading.read_slices(store, manifest, wanted, watch=watch)
        entries |= {name: _resized(entries[name], wanted[name]) for name in slices}
    elif mmap:
        tensors = mapping.map_tensors(store, manifest, names, watch=watch)
    else:
        tensors = reading.read_tensors(store, manifest, names, watch=watch)
    return rebuild(structure, entries.values(), tensors, map_location=map_location)


def _rectangle(name: str, start: Sequence[int], shape: Sequence[int], wanted: Mapping[str, Rectangle]) -> Rectangle:
    if name not in wanted:
        raise InvalidArgument(f"slices={{{name!r}: …}}: there is no such tensor in what is loaded", field="slices")
    return Rectangle(tuple(start), tuple(shape))


def _resized(entry: TensorEntry, rectangle: Rectangle) -> TensorEntry:
    return msgspec.structs.replace(entry, shape=rectangle.shape)


# -- into what is there --------------------------------------------------------------------------------------------


def slices_held_by(targets: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Of targets whose state lies over several ranks (DTensor): what this rank has of each tensor."""
    if "torch.distributed.tensor" not in sys.modules:
        return {}
    found = {}
    for key, target in targets.items():
        if hasattr(target, "state_dict"):
            for leaf_name, value in _dtensors(target.state_dict(), key):
                found[leaf_name] = _local_rectangle(value)
    return found


def _dtensors(state: Any, path: str) -> Iterable[tuple[str, Any]]:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - it is loaded

    if isinstance(state, DTensor):
        yield path, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from _dtensors(value, f"{path}.{key}")
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from _dtensors(value, f"{path}.{number}")


def _local_rectangle(value: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415 - as above

    shape, start = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return tuple(start), tuple(shape)


def load_into(target: Any, part: Any, *, strict: bool, is_distributed: bool = False) -> None:
    """Only torch's modules know `strict`; optimizers, schedulers and loaders take all or nothing."""
    torch = sys.modules.get("torch")
    if is_distributed and hasattr(target, "state_dict"):
        part = _distributed(part, target.state_dict())
    if torch is not None and isinstance(target, torch.nn.Module):
        target.load_state_dict(part, strict=strict)
    else:
        target.load_state_dict(part)


def _distributed(part: Any, like: Any) -> Any:
    """Local tensors as what they are a part of, where the target has such."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - it is loaded

    if isinstance(like, DTensor):
        return DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    if isinstance(like, Mapping) and isinstance(part, Mapping):
        changed = {key: _distributed(value, like[key]) for key, value in part.items() if key in like}
        return {**part, **changed}
    if isinstance(like, list | tuple) and isinstance(part, list | tuple) and len(like) == len(part):
        return type(part)(_distributed(one, other) for one, other in zip(part, like, strict=True))
    return part
