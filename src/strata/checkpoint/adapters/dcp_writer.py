"""`StrataStorageWriter`: save Strata checkpoints with torch.distributed.checkpoint.

Each rank writes one file; DCP's coordinator rank merges what the ranks wrote into a manifest and commits it.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from strata.checkpoint import arguments
from strata.checkpoint.adapters import dcp_names
from strata.checkpoint.adapters.dcp_names import KEY, StoreLocation
from strata.checkpoint.catalog import CheckpointMetadata, of_manifest
from strata.checkpoint.format import buffers, layout, tree
from strata.checkpoint.format import manifest as m
from strata.checkpoint.group.commit import publish
from strata.checkpoint.group.ranks import new_id
from strata.checkpoint.save.writer import file_name, write_file
from strata.clock import SystemClock
from strata.errors import CheckpointInvalid, InvalidArgument, ObjectMissing
from strata.storage import Watch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

    from strata.checkpoint.adapters.dcp_names import ItemPath
    from strata.checkpoint.format.layout import Layout
    from strata.checkpoint.format.tree import Leaf, Node
    from strata.clock import Clock
    from strata.storage import Store


@dataclass(frozen=True, slots=True)
class _Task:
    """What the coordinator rank sends to a rank."""

    id: str
    rank: int


class StrataStorageWriter(StorageWriter):
    """Writes checkpoints for `dcp.save` and `dcp.async_save`. Every save is a new checkpoint."""

    def __init__(
        self,
        place: str | os.PathLike[str] | Store,
        *,
        step: int = 0,
        epoch: int = 0,
        metadata: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Write to a directory, a URL or a store. `dcp.save(checkpoint_id="5000")` may also pass the step.

        Raises:
            InvalidArgument: `step`, `epoch` or `metadata` cannot be stored.
        """
        self._location = StoreLocation(place, storage_options)
        self._clock = clock or SystemClock()
        self.step = arguments.count(step, "step")
        """The step of the next save."""
        self.epoch = arguments.count(epoch, "epoch")
        self.metadata = arguments.checked_metadata(metadata)
        if KEY in self.metadata:
            raise InvalidArgument(f"metadata[{KEY!r}] is reserved for the adapter; use another key", field="metadata")
        self.saved: CheckpointMetadata | None = None
        """The last checkpoint, on the coordinator rank; on all ranks, `storage_meta` of `dcp.save` has its id."""
        self._id = ""
        self._called_s = 0.0

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.fspath(checkpoint_id).isdecimal()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save; `checkpoint_id` is its step.

        Raises:
            InvalidArgument: `checkpoint_id` is not a step.
        """
        if checkpoint_id is None:
            return
        if not self.validate_checkpoint_id(checkpoint_id):
            raise InvalidArgument(
                f"checkpoint_id={os.fspath(checkpoint_id)!r} is not a step; pass checkpoint_id='5000', or step=5000 to "
                "the StrataStorageWriter, whose path holds all checkpoints of a run",
                field="checkpoint_id",
            )
        self.step = arguments.count(int(os.fspath(checkpoint_id)), "checkpoint_id")

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Check the options of the save.

        Raises:
            InvalidArgument: Each rank would save on its own, and none could commit.
        """
        if not kwargs.get("use_collectives", True):
            raise InvalidArgument(
                "use_collectives=False is not supported: no rank could commit the files of all; leave it out",
                field="use_collectives",
            )
        self._called_s = time.monotonic()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._id = new_id(self.step)
        return [replace(plan, storage_data=_Task(self._id, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of this rank.

        Raises:
            InvalidArgument: A value cannot be stored; this rank wrote nothing.
        """
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write_items(plan, planner) if plan.items else [])
        return done

    def _write_items(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        task: _Task = plan.storage_data
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        objects = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        names = _names(tensors)
        flat = tree.flatten({name: planner.resolve_data(item) for name, item in zip(names, tensors, strict=True)})
        flat_objects = tree.flatten({item.index.fqn: _object(planner, item) for item in objects})
        leaves = [*flat.leaves, *flat_objects.leaves]
        _require_distinct(leaf.name for leaf in leaves)
        plan_of_file = layout.plan(leaves, {"strata": str(m.VERSION), "id": task.id, "rank": str(task.rank)})
        with self._location.opened() as store:
            data_file, slices = _write_file(store, task, plan_of_file, leaves)
        by_name = {leaf.name: leaf for leaf in leaves}
        results = []
        for (_, node), item in zip(flat.structure["dict"], tensors, strict=True):
            leaf = by_name[node["tensor"]]
            entry = _entry_of_item(item, leaf, slices[leaf.name])
            written = WrittenItem(id=task.id, file=data_file, entry=entry)
            results.append(WriteResult(item.index, leaf.num_bytes, written))
        for (_, node), item in zip(flat_objects.structure["dict"], objects, strict=True):
            held = [by_name[name] for name in tree.names_in(node)]
            entries = tuple(_entry(leaf.name, leaf, leaf.shape, slices[leaf.name]) for leaf in held)
            written = WrittenItem(id=task.id, file=data_file, node=node, tensors=entries)
            results.append(WriteResult(item.index, sum(leaf.num_bytes for leaf in held), written))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint.

        Raises:
            CheckpointInvalid: What the ranks wrote does not form the state; nothing was committed.
            InvalidArgument: The planner's data cannot be stored.
        """
        written = [(result.index.fqn, result.storage_data) for of_rank in results for result in of_rank]
        for name, item in written:
            if item.id != self._id:
                raise CheckpointInvalid(
                    f"{name!r} was written to checkpoint {item.id}, expected {self._id}: the planner reused an old "
                    "plan; use a planner with enable_plan_caching=False"
                )
        files, tensors, nodes = merged(written)
        in_order = {name: nodes[name] for name in metadata.state_dict_metadata if name in nodes}
        structure, planner_metadata = nested(in_order, metadata.planner_data)
        size_bytes = sum(file.size_bytes for file in files)
        manifest = m.Manifest(
            id=self._id,
            step=self.step,
            epoch=self.epoch,
            type=m.CheckpointType.FULL,
            created_at_s=self._clock.wall_s(),
            num_ranks=max(len(results), 1),
            chunk_bytes=layout.CHUNK_BYTES,
            files=files,
            tensors=tensors,
            structures=(structure,),
            structure_of_rank=(0,) * max(len(results), 1),
            metadata=self.metadata | planner_metadata,
            full_bytes=size_bytes,
            written_bytes=size_bytes,
            model_hash=m.model_hash(tensors),
            duration_s=round(time.monotonic() - self._called_s, 6),
        )
        with self._location.opened() as store:
            publish(store, manifest)
            self.saved = of_manifest(manifest, store.url)
        metadata.storage_meta = StorageMeta(checkpoint_id=self._id)


def _names(items: Sequence[WriteItem]) -> list[str]:
    """Return names in the file: several slices of one tensor get their offsets as a suffix."""
    several = {fqn for fqn, count in Counter(item.index.fqn for item in items).items() if count > 1}
    return [
        f"{item.index.fqn}@{','.join(map(str, item.index.offset or ()))}"
        if item.index.fqn in several
        else item.index.fqn
        for item in items
    ]


def _object(planner: SavePlanner, item: WriteItem) -> Any:
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise InvalidArgument(
            f"{type(planner).__name__} provides {item.index.fqn!r} only as a pickle, which a checkpoint cannot store; "
            "derive the planner from DefaultSavePlanner, or implement lookup_object(index)",
            field=item.index.fqn,
        )
    return lookup(item.index)


def _require_distinct(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidArgument(f"two tensors of the state have the name {name!r}; rename one of them", field=name)
        seen.add(name)


def _write_file(
    store: Store, task: _Task, plan: Layout, leaves: Sequence[Leaf]
) -> tuple[m.DataFile, dict[str, m.Slice]]:
    key = f"{task.id}/{file_name(task.rank)}"
    if _exists(store, key):
        raise InvalidArgument(
            f"{key} already exists: the planner reused an old plan; use a planner with enable_plan_caching=False"
        )
    memory = memoryview(buffers.aligned_memory(plan.size_bytes))[: plan.size_bytes]
    memory[: len(plan.header)] = plan.header
    target = np.frombuffer(memory, np.uint8)
    by_name = {leaf.name: leaf for leaf in leaves}
    for place in plan.places:
        _copy(by_name[place.name], target[place.offset : place.end])

    data_file, hashes = write_file(
        store, task.id, plan, memory, rank=task.rank, chunk_bytes=layout.CHUNK_BYTES, watch=Watch()
    )
    slices = {
        place.name: m.Slice(
            file=0,
            offset=place.offset,
            start=(0,) * len(place.shape),
            shape=place.shape,
            hashes=hashes[place.name],
        )
        for place in plan.places
    }
    return data_file, slices


def _exists(store: Store, key: str) -> bool:
    try:
        store.size(key)
    except ObjectMissing:
        return False
    return True


def _copy(leaf: Leaf, target: buffers.Bytes) -> None:
    if not leaf.num_bytes:
        return
    source = buffers.raw_bytes(leaf)
    if source is None:
        buffers.copy_strided(leaf, target)
    else:
        np.copyto(target, source)


def _entry(name: str, leaf: Leaf, shape: tuple[int, ...], part: m.Slice) -> m.TensorEntry:
    return m.TensorEntry(name=name, dtype=leaf.dtype.name, shape=shape, slices=(part,))


def _entry_of_item(item: WriteItem, leaf: Leaf, part: m.Slice) -> m.TensorEntry:
    """Return the manifest entry of a tensor item.

    Raises:
        InvalidArgument: The tensor has another shape than its plan.
    """
    planned = item.tensor_data
    assert planned is not None, "DCP's plans describe every tensor"
    if tuple(planned.chunk.sizes) != leaf.shape:
        raise InvalidArgument(
            f"{item.index.fqn!r} was planned with the shape {tuple(planned.chunk.sizes)}, but the planner provides "
            f"{leaf.shape}; they must be equal",
            field=item.index.fqn,
        )
    part = msgspec.structs.replace(part, start=tuple(planned.chunk.offsets))
    return _entry(item.index.fqn, leaf, tuple(planned.size), part)


# -- what the ranks wrote ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenItem:
    """What a rank reports of one item. Its slices refer to `file`, without an index yet."""

    id: str
    file: m.DataFile
    entry: m.TensorEntry | None = None
    """Of a tensor or a slice of one; it has only this slice."""
    node: Any = None
    """Of an object."""
    tensors: tuple[m.TensorEntry, ...] = ()
    """The tensors of an object."""


def merged(
    written: Sequence[tuple[str, WrittenItem]],
) -> tuple[tuple[m.DataFile, ...], tuple[m.TensorEntry, ...], dict[str, Node]]:
    """Merge what the ranks wrote; return the files, the tensors with all their slices, and a node for each DCP name."""
    files = list(dict.fromkeys(item.file for _, item in written))
    number = {file: i for i, file in enumerate(files)}
    entries: dict[str, m.TensorEntry] = {}
    owners: dict[str, str] = {}
    nodes: dict[str, Node] = {}
    for name, item in written:
        nodes[name] = item.node if item.entry is None else {"tensor": name, "as": "torch"}
        for entry in item.tensors if item.entry is None else (item.entry,):
            entry = msgspec.structs.replace(
                entry, slices=(msgspec.structs.replace(entry.slices[0], file=number[item.file]),)
            )
            if owners.setdefault(entry.name, name) != name:
                raise InvalidArgument(
                    f"{name!r} and {owners[entry.name]!r} both have a tensor {entry.name!r}; rename one of them",
                    field=name,
                )
            known = entries.get(entry.name)
            entries[entry.name] = entry if known is None else _joined(known, entry)
    _tie(entries, nodes)
    return tuple(files), tuple(entries.values()), nodes


def _joined(known: m.TensorEntry, more: m.TensorEntry) -> m.TensorEntry:
    """Join slices of one tensor.

    Raises:
        CheckpointInvalid: They belong to different tensors.
    """
    if (known.dtype, known.shape) != (more.dtype, more.shape):
        raise CheckpointInvalid(
            f"tensor {known.name!r} is {known.dtype} {known.shape} on one rank and {more.dtype} {more.shape} on "
            "another; save it under another name"
        )
    parts = {(part.start, part.shape): part for part in (*more.slices, *known.slices)}  # copies count once
    filled = [part for part in parts.values() if math.prod(part.shape)]
    kept = sorted(filled, key=lambda part: part.start) or known.slices
    return msgspec.structs.replace(known, slices=tuple(kept))


def _tie(entries: dict[str, m.TensorEntry], nodes: dict[str, Node]) -> None:
    """Merge tied tensors, which are the same bytes, into one."""
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
    """Return the nested structure, and the metadata that DCP's names and paths need, if any."""
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
        f"the planner's data is a {type(planner_data).__name__}, which a checkpoint cannot store; expected the paths "
        "of the state's entries, as DefaultSavePlanner returns them"
    )
