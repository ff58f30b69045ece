"""What was measured: of a run, of a recovery, of the whole demo. Pure: what was noted goes in, numbers come out."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from strata.launch.record.timeline import recoveries

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from strata.demo.diary import Entry
    from strata.demo.proof import RowsCheck, WeightsCheck
    from strata.launch.record.timeline import RunEvent

_NUM_AVERAGED = 20
"""Steps at either end, for the loss."""


@dataclass(frozen=True, slots=True)
class Kill:
    attempt: int
    rank: int
    pid: int
    step: int
    """The last that it had made."""
    at_s: float
    """Monotonic, as all moments here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """From a kill to the first step after it. Times count from the kill; None: it has not come to that yet."""

    rank: int
    pid: int
    step: int
    detected_ms: float | None = None
    started_ms: float | None = None
    """The others have ended, and new workers begin."""
    restored_ms: float | None = None
    """The last of them has its state back."""
    first_step_ms: float | None = None
    """The last of them has made a step."""
    restored_step: int | None = None
    num_steps_again: int | None = None
    """Made before the kill, not saved yet, and made again."""

    @property
    def is_complete(self) -> bool:
        return self.first_step_ms is not None


def recovery_of(kill: Kill, events: Iterable[RunEvent], entries: Sequence[Entry]) -> Recovery:
    found = next((each for each in recoveries(events) if each.attempt > kill.attempt), None)
    begun = Recovery(rank=kill.rank, pid=kill.pid, step=kill.step)
    if found is None:
        return begun
    detected_ms = (found.detected_s - kill.at_s) * 1_000
    again = [entry for entry in entries if entry.attempt == found.attempt]
    before = [entry.trained[-1].step for entry in entries if entry.attempt == kill.attempt and entry.trained]
    has_stepped = bool(again) and all(entry.trained for entry in again)
    restored_step = again[0].restored_step if again else None
    return Recovery(
        rank=kill.rank,
        pid=kill.pid,
        step=kill.step,
        detected_ms=detected_ms,
        started_ms=detected_ms + found.started_ms,
        restored_ms=(max(entry.restored_at_s for entry in again) - kill.at_s) * 1_000 if again else None,
        first_step_ms=(max(entry.trained[0].at_s for entry in again) - kill.at_s) * 1_000 if has_stepped else None,
        restored_step=restored_step,
        num_steps_again=max(before, default=0) - restored_step if restored_step is not None else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    duration_s: float
    num_steps: int
    first_loss: float
    last_loss: float
    num_checkpoints: int
    """Begun by rank 0, the last one not counted, which the script waits for."""
    median_stall_ms: float
    """How long a checkpoint held up a worker."""
    longest_stall_ms: float


def run_figures(entries: Sequence[Entry], *, duration_s: float) -> RunFigures:
    losses = losses_by_step(entries)
    stalls = [save.stall_s for entry in entries for save in entry.saved]
    return RunFigures(
        duration_s=duration_s,
        num_steps=max((record.step for entry in entries for record in entry.trained), default=0),
        first_loss=_mean(losses[:_NUM_AVERAGED]),
        last_loss=_mean(losses[-_NUM_AVERAGED:]),
        num_checkpoints=sum(len(entry.saved) for entry in entries if entry.rank == 0),
        median_stall_ms=statistics.median(stalls) * 1_000 if stalls else 0.0,
        longest_stall_ms=max(stalls, default=0.0) * 1_000,
    )


def losses_by_step(entries: Iterable[Entry]) -> list[float]:
    """The mean of the ranks, in the order of the steps; of a step that was made again, the last."""
    found: dict[int, tuple[int, list[float]]] = {}
    for entry in entries:
        for record in entry.trained:
            attempt, losses = found.get(record.step, (-1, []))
            if entry.attempt > attempt:
                found[record.step] = (entry.attempt, [record.loss])
            elif entry.attempt == attempt:
                losses.append(record.loss)
    return [_mean(losses) for _, (_, losses) in sorted(found.items())]


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All that the demo has found out."""

    num_workers: int
    num_rows: int
    num_epochs: int
    seed: int
    undisturbed: RunFigures
    killed: RunFigures
    recoveries: tuple[Recovery, ...]
    num_kills_planned: int
    rows: RowsCheck
    rows_undisturbed: RowsCheck
    weights: WeightsCheck
    duration_s: float

    @property
    def is_good(self) -> bool:
        return (
            self.rows.is_good
            and self.rows_undisturbed.is_good
            and self.weights.is_good
            and len(self.recoveries) == self.num_kills_planned
            and all(recovery.is_complete for recovery in self.recoveries)
        )

    def as_plain(self) -> dict[str, Any]:
        """For programs."""
        checks: dict[str, RowsCheck | WeightsCheck]
        checks = {"rows": self.rows, "rows_undisturbed": self.rows_undisturbed, "weights": self.weights}
        told = {name: {"is_good": check.is_good, **asdict(check)} for name, check in checks.items()}
        return {"is_good": self.is_good, **asdict(self), **told}
