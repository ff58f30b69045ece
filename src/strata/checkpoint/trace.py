"""The trace of a checkpoint, from the times that its manifest has. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.tracing import Span

if TYPE_CHECKING:
    from strata.checkpoint.catalog import CheckpointMetadata


def trace_of(found: CheckpointMetadata, *, ended_s: float, error: str = "") -> Span:
    """Return the trace of a save. `ended_s`: wall time of its end. `error`: why it failed."""
    attributes: dict[str, str | int | float | bool] = {
        "strata.checkpoint.id": found.id,
        "strata.checkpoint.path": found.path,
        "strata.checkpoint.type": found.checkpoint_type.name,
        "strata.checkpoint.size_bytes": found.size_bytes,
        "strata.step": found.step,
        "strata.epoch": found.epoch,
        "strata.num_ranks": found.num_ranks,
    }
    return Span(
        name="checkpoint",
        began_s=found.created_at_s,
        ended_s=ended_s,
        attributes=attributes,
        error=error,
        children=() if error else _parts(found, ended_s),
    )


def _parts(found: CheckpointMetadata, ended_s: float) -> tuple[Span, ...]:
    if found.stall_s is None or found.write_s is None or found.duration_s is None:
        return ()
    began_s = found.created_at_s
    staged_s = began_s + found.stall_s
    written_s = staged_s + found.write_s
    gathered_s = max(began_s + found.duration_s, written_s)
    parts = [("stage", began_s, staged_s), ("write", staged_s, written_s)]
    if found.num_ranks > 1:
        parts.append(("wait for ranks", written_s, gathered_s))
    parts.append(("commit", gathered_s, ended_s))
    return tuple(Span(name=name, began_s=start_s, ended_s=max(end_s, start_s)) for name, start_s, end_s in parts)
