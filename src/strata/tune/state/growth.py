"""Which trial is given the slots that no other trial needs, near the end of a study.

A trial cannot change its number of workers while it trains: it saves, stops, and continues from its checkpoint with
more of them. That costs a restart, so it is done only where it pays: for the most promising trial, if it gains many
workers, has made progress since its last start, and is not about to end. A trial never gives slots back to another
one; it keeps them until it stops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.errors import ConfigError
from strata.printing import counted
from strata.tune.state.events import MAX_SLOTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.tune.state.trial import Trial

MIN_REPORTS = 3
"""Reports of a trial since its last start before it is restarted with more slots."""
MIN_GAIN = 1.5
"""Least factor by which the slots of a running trial must grow."""
WHY = "no other trial needs them"
LAST_PART = 0.2
"""A trial in this last part of its training is about to end. How long it trains is known from finished trials."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Restart a running trial with more slots."""

    trial: int
    num_slots: int
    """In all."""
    reason: str


def next_growth(running: Sequence[Trial], *, num_free: int, max_slots: int, longest: int) -> Growth | None:
    """Return the most promising trial for which a restart with the free slots pays, if there is one.

    Args:
        num_free: Slots that no trial needs.
        max_slots: Largest number of slots of a trial.
        longest: Last step of the longest trial that has finished; 0 if none has.
    """
    if num_free <= 0 or any(each.stopping is not None for each in running):
        return None  # a trial that stops may free more slots in a moment
    found = [each for each in running if _pays(each, num_free, max_slots, longest)]
    if not found:
        return None
    trial = min(found, key=_promise)
    num_slots = min(trial.num_slots + num_free, max_slots)
    return Growth(trial.number, num_slots, f"it continues on {counted(num_slots, 'slot')}: {WHY}")


def slots_at_start(trial: Trial, running: Sequence[Trial], *, num_free: int, max_slots: int) -> int:
    """Return how many of the free slots a trial is started with, of which no other trial needs one.

    It costs nothing to start a trial that has stopped anyway with more workers. One that is less promising than another
    that could have them starts with one slot.
    """
    if not can_grow(trial):
        return 1
    is_best = trial.is_growing or all(_promise(trial) < _promise(each) for each in running if can_grow(each))
    return max(1, min(num_free, max_slots)) if is_best else 1


def can_grow(trial: Trial) -> bool:
    """Return whether a trial can continue with another number of workers: it has a checkpoint that any number of them
    can load, and has not failed with more workers before.
    """
    return bool(trial.checkpoint) and not trial.checkpoint_world_size and not trial.is_narrow


def slots_per_trial(max_workers: int | None, workers_per_trial: int) -> int:
    """Return how many slots one trial may take; None: those of every trial, one.

    Raises:
        ConfigError: A trial cannot have this number of workers.
    """
    num_slots, rest = divmod(workers_per_trial if max_workers is None else max_workers, workers_per_trial)
    if num_slots < 1 or rest:
        raise ConfigError(
            f"max_workers_per_trial={max_workers} must be a multiple of workers_per_trial={workers_per_trial}; pass "
            f"{max(num_slots, 1) * workers_per_trial} or {(num_slots + 1) * workers_per_trial}",
            field="max_workers_per_trial",
        )
    if num_slots > MAX_SLOTS:
        raise ConfigError(
            f"max_workers_per_trial={max_workers} must be at most {MAX_SLOTS * workers_per_trial:,}",
            field="max_workers_per_trial",
        )
    return num_slots


def _pays(trial: Trial, num_free: int, max_slots: int, longest: int) -> bool:
    num_slots = min(trial.num_slots + num_free, max_slots)
    return (
        can_grow(trial)
        and trial.best < math.inf
        and trial.num_lease_reports >= MIN_REPORTS
        and num_slots >= MIN_GAIN * trial.num_slots
        and not _is_about_to_end(trial.step or 0, longest)
    )


def _is_about_to_end(step: int, longest: int) -> bool:
    """A trial that has trained for longer than all others may go on for any time."""
    return longest * (1 - LAST_PART) <= step <= longest


def _promise(trial: Trial) -> tuple[float, int]:
    """The most promising trial has the lowest loss so far; of equal ones, the first."""
    return trial.best, trial.number
