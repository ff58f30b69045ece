"""The checkpoints of a place as a timeline with lineage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from strata.checkpoint.format.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Lineage:
    """How a checkpoint relates to the others."""

    children: tuple[str, ...]
    """The ids of the checkpoints that are deltas against this one."""
    branch: int
    """How often training had gone back to an earlier step before this checkpoint was created."""


def lineage(manifests: Iterable[Manifest]) -> dict[str, Lineage]:
    """Return the lineage of each checkpoint by its id.

    A checkpoint that was created right after one with a later step begins a branch: the run was resumed from an earlier
    checkpoint. Equal steps do not: a compacted checkpoint has the step of its original.
    """
    found = sorted(manifests, key=lambda manifest: (manifest.created_at_s, manifest.step, manifest.id))
    children: dict[str, list[str]] = {}
    branch_of: dict[str, int] = {}
    branch, last_step = 0, -1
    for manifest in found:
        if manifest.parent:
            children.setdefault(manifest.parent, []).append(manifest.id)
        if manifest.step < last_step:
            branch += 1
        last_step = manifest.step
        branch_of[manifest.id] = branch
    return {id: Lineage(tuple(children.get(id, ())), number) for id, number in branch_of.items()}
