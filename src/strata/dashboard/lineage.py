"""Which attempt made a checkpoint, and which attempts resumed from it. Pure.

The timeline of a run has the times at which attempts were started and at which rank 0 loaded a checkpoint, with its
step; the coordinator has the time of each commit. A checkpoint belongs to the attempt that ran when it was committed.
An attempt resumed from the newest restorable checkpoint of its step that was committed before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from strata.coordinator.state.checkpoints import RESTORABLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from strata.coordinator.state.events import CheckpointRecord
    from strata.launch.record.timeline import RunEvent


class Resume(NamedTuple):
    attempt: int
    at_s: float


class Descent(NamedTuple):
    """A committed checkpoint with its attempts."""

    record: CheckpointRecord
    attempt: int | None
    """The attempt that made it; None if the timeline does not reach back so far."""
    resumed_by: tuple[Resume, ...]


def descents(records: Sequence[CheckpointRecord], events: Iterable[RunEvent]) -> list[Descent]:
    """Return the checkpoints in their order, each with its attempts."""
    starts: list[RunEvent] = []
    loads: list[RunEvent] = []
    for event in events:
        if event.what == "started":
            starts.append(event)
        elif event.what == "restored" and event.step is not None:
            loads.append(event)
    resumed: dict[str, list[Resume]] = {}
    for load in loads:
        source = next(
            (
                each
                for each in reversed(records)
                if each.checkpoint.step == load.step
                and each.checkpoint.type in RESTORABLE
                and each.committed_at_s <= load.at_s
            ),
            None,
        )
        if source is not None:
            resumed.setdefault(source.checkpoint.checkpoint_id, []).append(Resume(load.attempt, load.at_s))
    return [
        Descent(
            record,
            next((start.attempt for start in reversed(starts) if start.at_s <= record.committed_at_s), None),
            tuple(resumed.get(record.checkpoint.checkpoint_id, ())),
        )
        for record in records
    ]
