"""`StrataStorageReader`: read any checkpoint whose state is a dict through torch.distributed.checkpoint."""

from __future__ import annotations

import io
import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from strata.checkpoint.adapters import dcp_names
from strata.checkpoint.adapters.dcp_names import StoreLocation
from strata.checkpoint.catalog import Catalog
from strata.checkpoint.format import buffers, dtypes, tree
from strata.checkpoint.format import manifest as m
from strata.checkpoint.format.shards import Box
from strata.checkpoint.load import fetch, integrity, reader
from strata.checkpoint.load.fetch import Source
from strata.checkpoint.load.state import rebuild
from strata.errors import CheckpointInvalid, InvalidArgument
from strata.storage import Store, Watch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

    from strata.checkpoint.adapters.dcp_names import DcpItem
    from strata.checkpoint.format.tree import Node

READ_BYTES = 256 << 20
"""Read before it is copied to its targets; at least one part."""


class StrataStorageReader(StorageReader):
    """Reads any checkpoint whose state is a dict for `dcp.load`, however it was saved. Every byte is verified."""

    def __init__(
        self,
        place: str | os.PathLike[str] | Store,
        *,
        step: int | None = None,
        id: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Read from a directory, a URL or a store. Without `step` or `id`, the newest checkpoint is read.

        `dcp.load(checkpoint_id=…)` may also pass a step or an id.
        """
        self._location = StoreLocation(place, storage_options)
        self._step = step
        self._id = id
        self._manifest: m.Manifest | None = None
        self._items: dict[str, DcpItem] = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return m.is_safe_name(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._manifest, self._items = None, {}
        if checkpoint_id is not None:
            name = os.fspath(checkpoint_id)
            self._step, self._id = (int(name), None) if name.isdecimal() else (None, name)

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """Return DCP's metadata of the checkpoint.

        Raises:
            NoCheckpoint: No such checkpoint exists.
            CheckpointInvalid: Its manifest cannot be trusted.
            InvalidArgument: DCP cannot represent its state.
        """
        with self._location.opened() as store:
            manifest = Catalog(store).find(step=self._step, id=self._id)
        structure = manifest.structures[manifest.structure_of_rank[0]]
        integrity.check_manifest(manifest, [structure])  # everything below trusts it
        self._manifest = manifest
        self._items, is_flattened = _items(manifest, structure)
        entries = {entry.name: entry for entry in manifest.tensors}
        return Metadata(
            state_dict_metadata={name: _described(item.node, entries) for name, item in self._items.items()},
            planner_data={name: item.path for name, item in self._items.items()} if is_flattened else None,
            storage_meta=StorageMeta(checkpoint_id=manifest.id),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `read_metadata` has set up the reader."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self._opened().id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks read the same checkpoint.

        Raises:
            CheckpointInvalid: They do not: a checkpoint was committed while they looked for the newest.
        """
        ids = sorted({plan.storage_data for plan in plans})
        if len(ids) > 1:
            raise CheckpointInvalid(
                f"the ranks would load different checkpoints ({', '.join(ids)}): one was committed meanwhile, or they "
                "read different stores; load again, or pass step= or id="
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan.

        Raises:
            CheckpointInvalid: The checkpoint cannot be trusted; the message names the file and the tensor.
        """
        with self._location.opened() as store:
            self._check_headers(store, plan.items)
            self._read_tensors(store, [item for item in plan.items if item.type == LoadItemType.TENSOR], planner)
            self._read_objects(store, [item for item in plan.items if item.type == LoadItemType.BYTE_IO], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _check_headers(self, store: Store, items: Sequence[ReadItem]) -> None:
        """Check the headers of the files that are read."""
        manifest = self._opened()
        names = {name for item in items for name in tree.names_in(self._items[item.storage_index.fqn].node)}
        files = fetch.files_of(tensor for tensor in manifest.tensors if tensor.name in names)
        integrity.check_headers(Source(store, manifest, Watch()), manifest, files)

    def _read_tensors(self, store: Store, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        manifest = self._opened()
        entries = {entry.name: entry for entry in manifest.tensors}
        for batch in _batches([_RequestedPart.of(item, entries[self._tensor_of(item)]) for item in items]):
            aliases = msgspec.structs.replace(manifest, tensors=tuple(part.entry for part in batch))
            wanted = {part.entry.name: part.box for part in batch}
            found = reader.read_slices(store, aliases, wanted, watch=Watch())
            for part in batch:
                dtype = dtypes.BY_NAME[part.entry.dtype]
                saved = buffers.tensor_over(found.pop(part.entry.name), dtype, part.box.shape)
                _deliver(part.item, saved, planner)

    def _read_objects(self, store: Store, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        manifest = self._opened()
        nodes = {item.storage_index.fqn: self._items[item.storage_index.fqn].node for item in items}
        held = dict.fromkeys(name for node in nodes.values() for name in tree.names_in(node))
        found = reader.read_tensors(store, manifest, held, watch=Watch())
        for item in items:
            value = rebuild(nodes[item.storage_index.fqn], manifest.tensors, found)
            pickled = io.BytesIO()
            torch.save(value, pickled)
            pickled.seek(0)
            planner.load_bytes(item, pickled)

    def _tensor_of(self, item: ReadItem) -> str:
        name: str = self._items[item.storage_index.fqn].node["tensor"]
        return name

    def _opened(self) -> m.Manifest:
        if self._manifest is None:
            raise InvalidArgument("the StrataStorageReader has not read its metadata yet; use dcp.load()")
        return self._manifest


def _items(manifest: m.Manifest, structure: Node) -> tuple[dict[str, DcpItem], bool]:
    """Return the items, and whether the state was flattened."""
    stored = manifest.metadata.get(dcp_names.KEY)
    if not isinstance(stored, dict):
        return dcp_names.items(structure), True
    found = dcp_names.top_items(structure)
    paths = stored.get("paths")
    if not isinstance(paths, dict):
        return found, False
    usable = {name: tuple(path) for name, path in paths.items() if isinstance(path, list) and path}
    return {name: item._replace(path=usable.get(name, item.path)) for name, item in found.items()}, True


def _described(node: Node, entries: Mapping[str, m.TensorEntry]) -> TensorStorageMetadata | BytesStorageMetadata:
    if not dcp_names.is_tensor(node):
        return BytesStorageMetadata()
    entry = entries.get(node["tensor"])
    if entry is None:
        raise CheckpointInvalid(
            f"the structure refers to tensor {node['tensor'][:200]!r}, which is not in the checkpoint"
        )
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtypes.to_torch(dtypes.BY_NAME[entry.dtype])),
        size=torch.Size(entry.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(part.start), sizes=torch.Size(part.shape))
            for part in entry.slices
            if math.prod(part.shape)
        ],
    )


@dataclass(frozen=True, slots=True)
class _RequestedPart:
    """The part that one item requests. Its tensor has a unique name, because several items may request parts of one."""

    item: ReadItem
    entry: m.TensorEntry
    box: Box

    @classmethod
    def of(cls, item: ReadItem, entry: m.TensorEntry) -> _RequestedPart:
        saved_at = item.storage_index.offset or (0,) * len(entry.shape)
        start = tuple(at + more for at, more in zip(saved_at, item.storage_offsets, strict=True))
        box = Box(start, tuple(item.lengths))
        name = f"{entry.name} for {item.dest_index.fqn} at {start}"
        return cls(item, msgspec.structs.replace(entry, name=name), box)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.box.shape) * dtypes.BY_NAME[self.entry.dtype].itemsize


def _batches(parts: Iterable[_RequestedPart]) -> Iterator[list[_RequestedPart]]:
    batch: list[_RequestedPart] = []
    num_bytes = 0
    for part in parts:
        if batch and num_bytes + part.num_bytes > READ_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(part)
        num_bytes += part.num_bytes
    if batch:
        yield batch


def _deliver(item: ReadItem, saved: torch.Tensor, planner: LoadPlanner) -> None:
    """Copy a tensor to the planner's target.

    Raises:
        InvalidArgument: The target has another shape.
    """
    target = planner.resolve_tensor(item).detach()
    if target.size() != saved.size():
        raise InvalidArgument(
            f"{item.dest_index.fqn!r}: the target has the shape {tuple(target.size())}, the planned part has "
            f"{tuple(saved.size())}",
            field=item.dest_index.fqn,
        )
    target.copy_(saved)
    planner.commit_tensor(item, target)
