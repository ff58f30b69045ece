"""The results of the demo: checks of rows and weights, and measurements of the runs and recoveries.

Rows are counted from the workers' step logs. Steps trained after the last checkpoint before a kill are not in the final
model, because the next attempt repeats them. Only the last attempt of each step therefore counts.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.checkpoint.catalog import Catalog
from strata.checkpoint.load import reader
from strata.launch.record.timeline import recoveries
from strata.storage import Watch, open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from strata.checkpoint.format.buffers import Bytes
    from strata.demo.step_log import Rows, StepRecord, WorkerSteps
    from strata.launch.record.timeline import RunEvent

RUNTIME_PREFIX = "strata."
"""Prefix of tensors that the runtime adds, such as states of random generators that the script never seeded."""
MAX_NAMED = 3
_NUM_AVERAGED = 20
"""Steps over which the first and the last loss are averaged."""


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsCheck:
    num_rows: int
    """Rows in the data."""
    num_epochs: int
    num_exact: int
    """Rows trained on exactly once in every epoch."""
    num_lost: int
    """Pairs of a row and an epoch in which it was not trained on."""
    num_again: int
    """Surplus visits: times a row was trained on after the first time in an epoch."""
    num_unknown: int
    """Rows trained on that are not in the data."""
    num_rolled_back: int
    """Rows of steps that did not reach the final model and were repeated."""

    @property
    def is_good(self) -> bool:
        return self.num_rows > 0 and self.num_exact == self.num_rows and not self.num_unknown


def check_rows(entries: Iterable[WorkerSteps], in_data: Rows, *, num_epochs: int) -> RowsCheck:
    final, num_recorded = _final_steps(entries)
    by_epoch: dict[int, list[Rows]] = defaultdict(list)
    for records in final.values():
        for record in records:
            by_epoch[record.epoch].append(record.rows)
    known = np.sort(in_data)
    times = np.zeros((num_epochs, known.size), np.int64)
    num_unknown = 0
    for epoch, parts in by_epoch.items():
        rows = np.concatenate(parts)
        places = np.minimum(np.searchsorted(known, rows), max(known.size - 1, 0))
        is_known = (known[places] == rows) if known.size else np.zeros(rows.size, bool)
        if 0 <= epoch < num_epochs:
            times[epoch] += np.bincount(places[is_known], minlength=known.size)
        num_unknown += int(rows.size - is_known.sum()) if 0 <= epoch < num_epochs else rows.size
    return RowsCheck(
        num_rows=known.size,
        num_epochs=num_epochs,
        num_exact=int((times == 1).all(axis=0).sum()),
        num_lost=int((times == 0).sum()),
        num_again=int(np.maximum(times - 1, 0).sum()),
        num_unknown=num_unknown,
        num_rolled_back=num_recorded - sum(record.rows.size for records in final.values() for record in records),
    )


def _final_steps(entries: Iterable[WorkerSteps]) -> tuple[dict[int, list[StepRecord]], int]:
    """Return the records of all ranks that are in the final model, by step, and the number of rows recorded."""
    last: dict[int, int] = {}
    found: dict[tuple[int, int], list[StepRecord]] = defaultdict(list)
    num_recorded = 0
    for entry in entries:
        for record in entry.trained:
            found[entry.attempt, record.step].append(record)
            last[record.step] = max(last.get(record.step, 0), entry.attempt)
            num_recorded += record.rows.size
    return {step: found[attempt, step] for step, attempt in last.items()}, num_recorded


# -- weights -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    data: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsCheck:
    steps: tuple[int, int]
    """Steps of the final checkpoints of the undisturbed and the killed run."""
    num_tensors: int
    num_elements: int
    different: tuple[str, ...]
    """Tensors that differ in bytes, dtype or shape, or exist in only one run."""

    @property
    def is_good(self) -> bool:
        return self.num_tensors > 0 and not self.different and self.steps[0] == self.steps[1]


def check_weights(undisturbed: Path, killed: Path) -> WeightsCheck:
    """Compare the newest checkpoints in two directories; every byte is verified against its hash."""
    step, tensors = _read(undisturbed)
    other_step, others = _read(killed)
    return WeightsCheck(
        steps=(step, other_step),
        num_tensors=len(tensors),
        num_elements=sum(int(np.prod(tensor.shape)) for tensor in tensors.values()),
        different=different_tensors(tensors, others),
    )


def different_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the tensors that are not bit-identical: 0.0 and -0.0 differ, two equal NaNs do not."""
    return tuple(
        name
        for name in sorted({*one, *other})
        if name not in one or name not in other or not _is_same(one[name], other[name])
    )


def _is_same(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and np.array_equal(one.data, other.data)


def _read(directory: Path) -> tuple[int, dict[str, Tensor]]:
    store = open_store(str(directory))
    try:
        manifest = Catalog(store).find()
        entries = {entry.name: entry for entry in manifest.tensors if not entry.name.startswith(RUNTIME_PREFIX)}
        data = reader.read_tensors(store, manifest, entries, watch=Watch())
    finally:
        store.close()
    return manifest.step, {
        name: Tensor(dtype=entry.dtype, shape=entry.shape, data=data[name]) for name, entry in entries.items()
    }


# -- runs and recoveries -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kill:
    attempt: int
    rank: int
    name: str
    """`rank 0` or `server 0`."""
    pid: int
    step: int
    """The last step that the worker had finished; that of rank 0 for a server."""
    at_s: float
    """Monotonic time, as everywhere in this module."""

    @property
    def is_of_server(self) -> bool:
        return self.name.startswith("server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """From a kill to the first step after it. Times count from the kill; None means not reached yet."""

    rank: int
    name: str
    pid: int
    step: int
    detected_ms: float | None = None
    started_ms: float | None = None
    """The other workers have ended, and new ones start."""
    restored_ms: float | None = None
    """The last worker has restored its state; after the kill of a server, rank 0, as the run reports it."""
    first_step_ms: float | None = None
    """The last worker has finished a step; after the kill of a server, rank 0."""
    restored_step: int | None = None
    num_steps_again: int | None = None
    """Steps repeated: finished before the kill, but after the last checkpoint."""

    @property
    def is_complete(self) -> bool:
        return self.first_step_ms is not None


def recovery_of(kill: Kill, events: Iterable[RunEvent], entries: Sequence[WorkerSteps]) -> Recovery:
    found = next((each for each in recoveries(events) if each.attempt > kill.attempt), None)
    begun = Recovery(rank=kill.rank, name=kill.name, pid=kill.pid, step=kill.step)
    if found is None:
        return begun
    detected_ms = (found.detected_s - kill.at_s) * 1_000
    again = [entry for entry in entries if entry.attempt == found.attempt]
    before = [entry.trained[-1].step for entry in entries if entry.attempt == kill.attempt and entry.trained]
    has_stepped = bool(again) and all(entry.trained for entry in again)
    restored_step = again[0].restored_step if again else None
    restored_ms = (max(entry.restored_at_s for entry in again) - kill.at_s) * 1_000 if again else None
    first_step_ms = (max(entry.trained[0].at_s for entry in again) - kill.at_s) * 1_000 if has_stepped else None
    if kill.is_of_server:  # a Trainer writes the step log, within its steps
        restored_ms = None if found.restored_ms is None else detected_ms + found.restored_ms
        first_step_ms = None if found.first_step_ms is None else detected_ms + found.first_step_ms
    return Recovery(
        rank=kill.rank,
        name=kill.name,
        pid=kill.pid,
        step=kill.step,
        detected_ms=detected_ms,
        started_ms=detected_ms + found.started_ms,
        restored_ms=restored_ms,
        first_step_ms=first_step_ms,
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
    """Checkpoints started by rank 0, without the last one, for which the script waits."""
    median_stall_ms: float
    """Time for which a checkpoint stalled a worker."""
    longest_stall_ms: float


def run_figures(entries: Sequence[WorkerSteps], *, duration_s: float) -> RunFigures:
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


def losses_by_step(entries: Iterable[WorkerSteps]) -> list[float]:
    """Return the mean loss over the ranks, by step; a repeated step counts as in its last attempt."""
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


# -- the whole demo ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of the demo."""

    num_workers: int
    num_servers: int = 0
    servers: dict[str, float] | None = None
    """What the parameter servers of the killed run held at its end, together."""
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
        """Return the outcome for JSON."""
        checks: dict[str, RowsCheck | WeightsCheck]
        checks = {"rows": self.rows, "rows_undisturbed": self.rows_undisturbed, "weights": self.weights}
        checked = {name: {"is_good": check.is_good, **asdict(check)} for name, check in checks.items()}
        return {"is_good": self.is_good, **asdict(self), **checked}
