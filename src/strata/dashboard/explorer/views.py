"""Turns what the explorer finds into the models of its answers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import UnsetType

from strata.checkpoint.load.statistics import as_plain
from strata.dashboard.explorer import models as m
from strata.dashboard.explorer import tree

if TYPE_CHECKING:
    from collections.abc import Iterable

    from strata.checkpoint.format.manifest import Manifest, TensorEntry
    from strata.checkpoint.load.statistics import Statistics
    from strata.dashboard.explorer.change import Change, PairedCheckpoints
    from strata.dashboard.explorer.explorer import Entry, Followed, OpenCheckpoint
    from strata.dashboard.explorer.histogram import Histogram
    from strata.dashboard.explorer.limits import Budget
    from strata.dashboard.explorer.scan import Scan
    from strata.dashboard.explorer.workroom import Task

Item = TypeVar("Item")


def checkpoint(entry: Entry) -> m.ExplorerCheckpoint:
    if entry.manifest is None:
        assert entry.file is not None
        size = entry.file.size_bytes
        return m.ExplorerCheckpoint(
            id=entry.id,
            kind="safetensors",
            step=None,
            epoch=None,
            type=None,
            created_at_s=entry.file.modified_at_s,
            size_bytes=size,
            full_bytes=size,
            num_tensors=len(entry.file.tensors),
            num_ranks=None,
            parent="",
            bases=[],
            children=[],
            branch=0,
            duration_s=None,
            stall_s=None,
            metadata=dict(entry.file.metadata),
            why="",
            model_hash="",
        )
    found, lineage = entry.manifest, entry.lineage
    assert lineage is not None
    return m.ExplorerCheckpoint(
        id=found.id,
        kind="strata",
        step=found.step,
        epoch=found.epoch,
        type=found.type,
        created_at_s=found.created_at_s,
        size_bytes=found.written_bytes,
        full_bytes=found.full_bytes,
        num_tensors=len(found.tensors),
        num_ranks=found.num_ranks,
        parent=found.parent,
        bases=list(found.bases),
        children=list(lineage.children),
        branch=lineage.branch,
        duration_s=_duration_s(found),
        stall_s=None if isinstance(found.stall_s, UnsetType) else found.stall_s,
        metadata=_finite_json(found.metadata),
        why=found.why,
        model_hash=found.model_hash,
    )


def _duration_s(found: Manifest) -> float | None:
    """Return how long the save took. Earlier versions did not measure it, but scripts put it into the metadata."""
    if not isinstance(found.duration_s, UnsetType):
        return found.duration_s
    noted = found.metadata.get("duration_s")
    return noted if isinstance(noted, float | int) and math.isfinite(noted) else None


def _finite_json(value: Any) -> Any:
    """Return metadata with text in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _finite_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_json(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def node(opened: OpenCheckpoint, node: tree.Node) -> m.TreeNode:
    return m.TreeNode(
        kind="group" if node.tensor is None else "tensor",
        label=node.label,
        path=node.path,
        num_tensors=node.num_tensors,
        num_bytes=node.num_bytes,
        num_elements=node.num_elements,
        num_nan=node.num_nan,
        num_inf=node.num_inf,
        tensor=tensor_of(opened, node.tensor) if node.tensor is not None else None,
    )


def tensor_of(opened: OpenCheckpoint, tensor: TensorEntry, pair: PairedCheckpoints | None = None) -> m.Tensor:
    return m.Tensor(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=list(tensor.shape),
        num_elements=math.prod(tensor.shape),
        num_bytes=tensor.num_bytes,
        statistics=_statistics(opened.statistics.get(tensor.name)),
        num_slices=max(len(tensor.slices), 1),
        num_patches=sum(len(part.patches) for part in tensor.slices),
        num_dead_rows=opened.num_dead_rows.get(tensor.name),
        change=change_of(pair.change(tensor.name)) if pair is not None else None,
    )


def _statistics(one: Statistics | None) -> m.TensorStatistics | None:
    plain = as_plain(one)
    return m.TensorStatistics(**plain, std=tree.std_of(one)) if one is not None and plain is not None else None


def change_of(one: Change) -> m.TensorChange:
    return m.TensorChange(
        state=one.state,
        relative_l2=or_none(one.relative_l2),
        l2=or_none(one.l2),
        max_abs=one.max_abs,
        num_different=one.num_different,
        num_not_finite=one.num_not_finite,
        at_least=or_none(one.at_least),
    )


def scan_state(scan: Scan, budget: Budget) -> m.ScanState:
    return m.ScanState(
        num_needed=scan.num_needed,
        num_done=scan.num_done,
        is_complete=scan.is_complete,
        read_bytes=budget.read_bytes,
        problems=dict(scan.problems),
    )


def or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def followed(one: Followed) -> m.FollowedTensor:
    manifest, file = one.entry.manifest, one.entry.file
    known = _statistics(one.statistics)
    return m.FollowedTensor(
        id=one.entry.id,
        step=manifest.step if manifest is not None else None,
        epoch=manifest.epoch if manifest is not None else None,
        created_at_s=manifest.created_at_s if manifest is not None else file.modified_at_s if file is not None else 0.0,
        is_present=one.tensor is not None,
        dtype=one.tensor.dtype if one.tensor is not None else None,
        shape=list(one.tensor.shape) if one.tensor is not None else None,
        statistics=known,
        changed=one.changed,
        source="none" if known is None else "stored" if one.is_stored else "computed",
    )


def compared(old: OpenCheckpoint, new: OpenCheckpoint, name: str, change: Change) -> m.ComparedTensor:
    sides = [_tensor_side(side, side.contents.tensors.get(name)) for side in (old, new)]
    return m.ComparedTensor(name=name, old=sides[0], new=sides[1], change=change_of(change))


def _tensor_side(side: OpenCheckpoint, tensor: TensorEntry | None) -> m.TensorSide | None:
    if tensor is None:
        return None
    known = _statistics(side.statistics.get(tensor.name))
    return m.TensorSide(dtype=tensor.dtype, shape=list(tensor.shape), statistics=known)


def side_histogram(one: Histogram) -> m.SideHistogram:
    return m.SideHistogram(
        counts=list(one.counts), num_nan=one.num_nan, num_inf=one.num_inf, num_elements=one.num_elements
    )


def task_of(one: Task) -> m.VerifyTask:
    return m.VerifyTask(
        task=one.id,
        kind="verify",
        place=one.place,
        id=one.checkpoint,
        state=one.state,
        done_bytes=min(one.done_bytes, one.total_bytes),
        total_bytes=one.total_bytes,
        problem=one.problem,
        started_at_s=one.started_at_s,
        ended_at_s=one.ended_at_s,
    )


def page_of(total: int, items: Iterable[Item], limit: int, offset: int) -> dict[str, Any]:
    found = list(items)
    end = offset + len(found)
    return {
        "items": found,
        "total": total,
        "limit": limit,
        "offset": offset,
        "next_offset": end if found and end < total else None,
    }
