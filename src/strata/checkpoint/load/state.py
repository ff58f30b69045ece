"""Rebuild a state, or parts of one, from a checkpoint, and load it into modules and optimizers.

Values come back as the types that were saved: torch tensors, numpy or JAX arrays, bytes. A target that is spread over
ranks (a DTensor, or a `Shard` in the state dict of the target) loads only the slices that this rank holds.
"""

from __future__ import annotations

import fnmatch
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from strata.checkpoint.format import shards, tree
from strata.checkpoint.format.buffers import array_over, tensor_over
from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.format.shards import Box
from strata.checkpoint.load import integrity, reader
from strata.errors import CheckpointInvalid, InvalidArgument, StrataError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from strata.checkpoint.format.buffers import Bytes
    from strata.checkpoint.format.dtypes import DType
    from strata.checkpoint.format.manifest import Manifest, TensorEntry
    from strata.checkpoint.format.shards import Run
    from strata.checkpoint.format.tree import Kind, Node
    from strata.storage import Store, Watch

Slices = Mapping[str, tuple[Sequence[int], Sequence[int]]]
"""Tensor → (start, shape)."""
_OF_A_RANK = re.compile(r"@\d+(#\d+)?$")
"""The suffix of a name under which ranks hold different tensors; the name of the first rank has none."""


def structure_for(manifest: Manifest, rank: int, only: Iterable[str] | None = None) -> Any:
    """Return the structure of this rank's state, or of the tensors that match `only`. A new rank gets that of rank 0.

    Raises:
        InvalidArgument: No tensor matches a pattern.
        CheckpointInvalid: The structure is malformed.
    """
    structure = manifest.structures[manifest.structure_of_rank[rank if rank < manifest.num_ranks else 0]]
    names = tree.names_in(structure)  # checks the structure, which `select` trusts
    if only is None:
        return structure
    patterns = [only] if isinstance(only, str) else list(only)
    known_as = _rank_names(manifest, names)

    def matches(name: str, pattern: str) -> bool:
        return any(fnmatch.fnmatchcase(one, pattern) for one in {name, known_as[name]})

    unmatched = [pattern for pattern in patterns if not any(matches(name, pattern) for name in names)]
    if unmatched or not patterns:
        some = ", ".join(names[:5]) or "none"
        raise InvalidArgument(
            f"checkpoint {manifest.id} has no tensor that matches {', '.join(map(repr, unmatched)) or 'nothing'}; "
            f"its tensors are {some}{', …' if names[5:] else ''}",
            field="only",
        )
    return tree.select(structure, lambda name: any(matches(name, pattern) for pattern in patterns))


def own_files(manifest: Manifest, rank: int) -> list[int]:
    """Return the indices of the files that this rank wrote; for a new rank, those of rank 0."""
    owner = rank if rank < manifest.num_ranks else 0
    return [number for number, data_file in enumerate(manifest.files) if data_file.rank == owner]


def parts_for(manifest: Manifest, rank: int, keys: Iterable[str]) -> Any:
    """Return the structure of these entries of this rank's state, a dict; missing ones are left out.

    Entries are selected by key, because a tied tensor may be stored under the name of another entry.
    """
    structure, wanted = structure_for(manifest, rank), set(keys)
    tag = "odict" if isinstance(structure, dict) and "odict" in structure else "dict"
    pairs = structure.get(tag, []) if isinstance(structure, dict) else []
    return {tag: [[key, node] for key, node in pairs if isinstance(key, str) and key in wanted]}


def _rank_names(manifest: Manifest, names: Iterable[str]) -> dict[str, str]:
    """Map names in the manifest to the names that the rank used: `rng@3` is rank 3's `rng`."""
    own, known = set(names), {tensor.name for tensor in manifest.tensors}
    found = {}
    for name in own:
        original = _OF_A_RANK.sub("", name)
        found[name] = original if original in known and original not in own else name
    return found


def num_bytes_of(manifest: Manifest, structure: Any, slices: Slices | None = None) -> int:
    """Return the size of what a load returns."""
    entries = {tensor.name: tensor for tensor in manifest.tensors}
    names = tree.names_in(structure)
    num_bytes = sum(entries[name].num_bytes for name in names if name in entries)
    for name, (_, shape) in _renamed(manifest, names, slices).items():
        if name in entries and name in names:
            num_bytes += math.prod(shape) * BY_NAME[entries[name].dtype].itemsize - entries[name].num_bytes
    return num_bytes


def _renamed(manifest: Manifest, names: Iterable[str], slices: Slices | None) -> Slices:
    """Return the slices under the names of the manifest."""
    if not slices:
        return {}
    named = {rank_name: name for name, rank_name in _rank_names(manifest, names).items()}
    return {named.get(name, name): box for name, box in slices.items()}


def load(
    store: Store,
    manifest: Manifest,
    structure: Any,
    *,
    slices: Slices | None = None,
    map_location: Any = None,
    mmap: bool = False,
    headers: Iterable[int] = (),
    watch: Watch,
) -> Any:
    """Load the state of a structure.

    Args:
        headers: Check the headers of these files too, beside those of the files that are read.

    Raises:
        CheckpointInvalid: The checkpoint cannot be trusted.
        InvalidArgument: A slice is not within its tensor, or the tensor does not exist.
    """
    integrity.check_manifest(manifest, [structure])
    names = tree.names_in(structure)
    entries = {tensor.name: tensor for tensor in manifest.tensors}
    slices = _renamed(manifest, names, slices)
    if slices:
        wanted = {name: shards.whole_box(entries[name]) for name in names if name in entries}
        wanted |= {name: _box(name, *slices[name], wanted) for name in slices}
        tensors = reader.read_slices(store, manifest, wanted, watch=watch, headers=headers)
        entries |= {name: _resized(entries[name], wanted[name]) for name in slices}
    elif mmap:
        tensors = reader.map_tensors(store, manifest, names, watch=watch, headers=headers)
    else:
        tensors = reader.read_tensors(store, manifest, names, watch=watch, headers=headers)
    return rebuild(structure, entries.values(), tensors, map_location=map_location)


def _box(name: str, start: Sequence[int], shape: Sequence[int], wanted: Mapping[str, Box]) -> Box:
    if name not in wanted:
        raise InvalidArgument(f"slices={{{name!r}: …}}: the load does not include this tensor", field="slices")
    return Box(tuple(start), tuple(shape))


def _resized(entry: TensorEntry, box: Box) -> TensorEntry:
    return msgspec.structs.replace(entry, shape=box.shape)


# -- into modules and optimizers -----------------------------------------------------------------------------------


class SplitTargets:
    """The DTensors and shards of some targets, of which each rank loads only its own slices.

    An optimizer that has made no step has no state yet; a tensor of its state with the shape of a parameter is placed
    like the parameter. A target whose state dict has a `Shard` receives the slice that the shard describes.
    """

    def __init__(self, targets: Mapping[str, Any]) -> None:
        self._known: dict[str, Any] = {}
        """Path → existing DTensor or shard."""
        self._parameters: dict[str, Any] = {}
        """Path of the optimizer state of a parameter → the parameter, a DTensor."""
        kinds: tuple[type, ...] = (shards.Shard,)
        if "torch.distributed.tensor" in sys.modules:
            from torch.distributed.tensor import DTensor  # noqa: PLC0415 - already imported

            kinds = (shards.Shard, DTensor)
        for key, target in targets.items():
            if hasattr(target, "state_dict"):
                self._known |= _split(target.state_dict(), key, kinds)
            if len(kinds) > 1:
                self._parameters |= _split(_parameters(target), f"{key}.state", kinds)

    def within(self, manifest: Manifest) -> dict[str, Any]:
        """Return, by path, the DTensor or shard whose place a tensor of the checkpoint gets."""
        if not self._parameters:
            return self._known
        found = {}
        for tensor in manifest.tensors:
            path, _, what = tensor.name.rpartition(".")
            parameter = self._parameters.get(path)
            if parameter is not None and what != "step" and tensor.shape == tuple(parameter.shape):
                found[tensor.name] = parameter
        return {**found, **self._known}


def _parameters(target: Any) -> dict[int, Any]:
    """Return the parameters of an optimizer, numbered as in its state dict."""
    torch = sys.modules["torch"]
    if not isinstance(target, torch.optim.Optimizer):
        return {}
    return dict(enumerate(parameter for group in target.param_groups for parameter in group["params"]))


def _split(state: Any, path: str, kinds: tuple[type, ...]) -> dict[str, Any]:
    """Return the values of these kinds in a nested state, by path."""
    if isinstance(state, kinds):
        return {path: state}
    found: dict[str, Any] = {}
    if isinstance(state, Mapping | list | tuple):
        for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            found |= _split(value, f"{path}.{key}", kinds)
    return found


def slices_held(manifest: Manifest, structure: Any, places: Mapping[str, Any]) -> Slices:
    """Return the slice of each DTensor or shard that this rank holds, where it is one box."""
    entries = {tensor.name: tensor for tensor in manifest.tensors}
    found: dict[str, tuple[Sequence[int], Sequence[int]]] = {}
    for name in tree.names_in(structure):
        if name in places and name in entries and entries[name].shape == tuple(places[name].shape):
            if isinstance(places[name], shards.Shard):
                found[name] = places[name].start, tuple(places[name].local.shape)
                continue
            runs = _runs(places[name], name)
            if runs is not None and all(len(along) <= 1 for along in runs):
                ends = [along[0] if along else (0, 0) for along in runs]
                found[name] = tuple(start for start, _ in ends), tuple(length for _, length in ends)
    return found


def _runs(like: Any, path: str) -> list[list[Run]] | None:
    """Return what this rank holds of each dimension of a DTensor; None if it is not in its mesh."""
    coordinate = like.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    runs: list[list[Run]] = [[(0, size)] for size in like.shape]
    for place, num, placement in zip(coordinate, like.device_mesh.shape, like.placements, strict=True):
        if placement.is_partial():
            raise InvalidArgument(
                f"the load target {path} is a DTensor with the placement {placement}, which is not reduced yet; "
                "redistribute it with Shard or Replicate first",
                field=path,
            )
        if not placement.is_replicate():
            split_factor = int(getattr(placement, "split_factor", 1))
            runs[placement.dim] = shards.cut_run(runs[placement.dim], num, place, split_factor)
    return [shards.joined(along) for along in runs]


def load_into(target: Any, part: Any, *, path: str, strict: bool, places: Mapping[str, Any]) -> None:
    """Load a part of a state into a target. Only torch modules support `strict`.

    Raises:
        InvalidArgument: A tensor does not have the shape of its target DTensor.
    """
    torch = sys.modules.get("torch")
    if places:
        part = _distributed(part, path, places)
    if torch is not None and isinstance(target, torch.nn.Module):
        target.load_state_dict(part, strict=strict)
    else:
        target.load_state_dict(part)


def _distributed(part: Any, path: str, places: Mapping[str, Any]) -> Any:
    """Convert tensors to DTensors where the target has DTensors."""
    if path in places and hasattr(part, "untyped_storage") and not isinstance(places[path], shards.Shard):
        return _as_dtensor(part, places[path], path)
    if isinstance(part, Mapping):
        return type(part)((key, _distributed(value, f"{path}.{key}", places)) for key, value in part.items())  # type: ignore[call-arg]
    if isinstance(part, list | tuple):
        return type(part)(_distributed(value, f"{path}.{number}", places) for number, value in enumerate(part))
    return part


def _as_dtensor(value: Any, like: Any, path: str) -> Any:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - already imported

    local, runs = like.to_local(), _runs(like, path)
    if runs is None:
        return like
    if value.shape != local.shape:
        if value.shape != like.shape:
            raise InvalidArgument(
                f"{path} has the shape {tuple(value.shape)} in the checkpoint, but its target DTensor has the shape "
                f"{tuple(like.shape)}",
                field=path,
            )
        for dimension, along in enumerate(runs):
            indices = [i for start, length in along for i in range(start, start + length)]
            value = value[(slice(None),) * dimension + (indices,)]
    return DTensor.from_local(
        value.to(local.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


# -- from bytes to values ------------------------------------------------------------------------------------------


def rebuild(
    structure: Node, described: Iterable[TensorEntry], tensors: Mapping[str, Bytes], *, map_location: Any = None
) -> Any:
    """Build the state of a structure. Torch tensors go to `map_location`, see `device_of`, or stay on the CPU."""
    entries = {tensor.name: tensor for tensor in described}

    def build(name: str, kind: Kind) -> Any:
        entry = entries[name]
        try:
            built = _as_it_was(tensors[name], BY_NAME[entry.dtype], entry.shape, kind)
        except (ValueError, OverflowError, RuntimeError) as error:  # an empty tensor may claim any other dimension
            if isinstance(error, StrataError):
                raise
            raise CheckpointInvalid(
                f"tensor {name[:200]!r} of {entry.dtype} with shape {str(entry.shape)[:200]} cannot be built with "
                f"{kind}: {error}"
            ) from None
        # Outside the try: a device without free memory is not the checkpoint's fault.
        return built if map_location is None or kind != "torch" else built.to(map_location)

    return tree.unflatten(structure, build)


def device_of(map_location: Any) -> Any:
    """Return the device of `map_location`: a device, its name, or a dict with an entry for `"cpu"`.

    Raises:
        InvalidArgument: This machine has no such device.
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
            f"map_location={map_location!r} is not a device of this machine ({str(error).splitlines()[0]}); use "
            "'cpu' or 'cuda:0', for example",
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
        import jax.numpy as jnp  # noqa: PLC0415 - JAX is optional

        return jnp.asarray(array)
    return array
