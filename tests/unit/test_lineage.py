"""The attempts that made a checkpoint and resumed from it."""

from __future__ import annotations

from test_recovery import event

from strata.coordinator.state.events import CheckpointKind, CheckpointRecord, CheckpointSpec
from strata.dashboard.lineage import Resume, descents


def record(step: int, at_s: float, *, kind: CheckpointKind = "FULL", name: str = "") -> CheckpointRecord:
    spec = CheckpointSpec(checkpoint_id=name or f"c{step}", step=step, epoch=0, path=f"/c{step}", type=kind)
    return CheckpointRecord(checkpoint=spec, generation=1, num_ranks=1, size_bytes=1, committed_at_s=at_s)


TIMELINE = [
    event(0.0, "started"),
    event(10.0, "failed", "rank 1: killed by signal 9"),
    event(10.5, "started", attempt=1),
    event(12.0, "restored", attempt=1, step=40),
    event(20.0, "started", attempt=2),
    event(21.0, "restored", attempt=2, step=40),
]


def test_a_checkpoint_belongs_to_the_attempt_that_ran_when_it_was_committed() -> None:
    found = descents([record(20, 3.0), record(40, 9.0), record(60, 19.0)], TIMELINE)

    assert [(each.record.checkpoint.step, each.attempt) for each in found] == [(20, 0), (40, 0), (60, 1)]


def test_every_attempt_that_resumed_from_a_checkpoint_is_listed() -> None:
    found = descents([record(20, 3.0), record(40, 9.0)], TIMELINE)

    assert [each.resumed_by for each in found] == [(), (Resume(1, 12.0), Resume(2, 21.0))]


def test_of_two_checkpoints_of_one_step_the_newest_before_the_load_was_resumed() -> None:
    again = record(40, 19.0, name="again")
    partial = record(40, 19.5, kind="MODEL_ONLY", name="weights")
    found = descents([record(40, 9.0), again, partial], TIMELINE)

    assert [each.resumed_by for each in found] == [(Resume(1, 12.0),), (Resume(2, 21.0),), ()]


def test_a_checkpoint_before_the_timeline_has_no_attempt() -> None:
    assert [each.attempt for each in descents([record(20, -5.0)], TIMELINE)] == [None]
    assert [each.attempt for each in descents([record(20, 3.0)], [])] == [None]
