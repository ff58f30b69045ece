"""What a checkpoint is known by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strata.checkpoint.format.manifest import CheckpointType  # noqa: TC001 - msgspec looks it up

if TYPE_CHECKING:
    from strata.checkpoint.format.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMetadata:
    id: str
    step: int
    epoch: int
    path: str
    """Where it lies, as a URL or a path."""
    size_bytes: int
    """Of its own files."""
    checkpoint_type: CheckpointType
    model_hash: str | None = None
    """Of its contents; known when it is durable."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The user's own."""
    parent: str = ""
    """The id of the checkpoint that it was compared with; empty if with none."""
    bases: tuple[str, ...] = ()
    """The ids of those whose files it needs: they stay as long as it does."""
    created_at_s: float = 0.0
    full_bytes: int = 0
    """Of the whole state; with an incremental checkpoint more than `size_bytes`."""
    num_ranks: int = 1
    data_cursor: str = ""
    """Where the data loader stood, as `save` was told."""
    why: str = ""
    """Why it is of this type, if another was asked for."""


def of_manifest(manifest: Manifest, url: str) -> CheckpointMetadata:
    return CheckpointMetadata(
        id=manifest.id,
        step=manifest.step,
        epoch=manifest.epoch,
        path=f"{url.rstrip('/')}/{manifest.id}",
        size_bytes=manifest.written_bytes,
        checkpoint_type=manifest.type,
        model_hash=manifest.model_hash,
        metadata=dict(manifest.metadata),
        parent=manifest.parent,
        bases=manifest.bases,
        created_at_s=manifest.created_at_s,
        full_bytes=manifest.full_bytes,
        num_ranks=manifest.num_ranks,
        data_cursor=manifest.data_cursor,
        why=manifest.why,
    )
