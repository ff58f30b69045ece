"""Whether the promise was kept: every row exactly once in each epoch, and the weights of a run that nobody disturbed.

Rows are counted from what the workers wrote down themselves. What they trained on after the last checkpoint before a
kill is not in the final model: those steps were made again, by the next attempt. So of each step only the last attempt
that made it counts.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strata.checkpoint.catalog import Catalog
from strata.checkpoint.load import reader
from strata.storage import Watch, open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from strata.checkpoint.format.buffers import Bytes
    from strata.demo.diary import Entry, Rows, Trained

NOT_GIVEN = "strata."
"""Tensors that the script did not give itself, as states of generators that it never used, and never seeded."""
MAX_NAMED = 3


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsCheck:
    num_rows: int
    """In the data."""
    num_epochs: int
    num_exact: int
    """Rows that were trained on exactly once in every epoch."""
    num_lost: int
    """Times that a row was not trained on in an epoch."""
    num_again: int
    """Times that a row was trained on once more than it should be in an epoch."""
    num_unknown: int
    """Rows that were trained on and are not in the data."""
    num_rolled_back: int
    """Rows of steps that did not reach the final model, and were made again."""

    @property
    def is_good(self) -> bool:
        return self.num_rows > 0 and self.num_exact == self.num_rows and not self.num_unknown


def check_rows(entries: Iterable[Entry], in_data: Rows, *, num_epochs: int) -> RowsCheck:
    counted, num_noted = _final_steps(entries)
    by_epoch: dict[int, list[Rows]] = defaultdict(list)
    for records in counted.values():
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
        num_rolled_back=num_noted - sum(record.rows.size for records in counted.values() for record in records),
    )


def _final_steps(entries: Iterable[Entry]) -> tuple[dict[int, list[Trained]], int]:
    """By step, what is in the final model, of all ranks; and how many rows were noted in all."""
    last: dict[int, int] = {}
    found: dict[tuple[int, int], list[Trained]] = defaultdict(list)
    num_noted = 0
    for entry in entries:
        for record in entry.trained:
            found[entry.attempt, record.step].append(record)
            last[record.step] = max(last.get(record.step, 0), entry.attempt)
            num_noted += record.rows.size
    return {step: found[attempt, step] for step, attempt in last.items()}, num_noted


# -- weights -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    data: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsCheck:
    steps: tuple[int, int]
    """Of the final checkpoints: of the undisturbed run, and of the other."""
    num_tensors: int
    num_elements: int
    different: tuple[str, ...]
    """Tensors of other bytes, another shape, or on one side only."""

    @property
    def is_good(self) -> bool:
        return self.num_tensors > 0 and not self.different and self.steps[0] == self.steps[1]


def check_weights(undisturbed: Path, killed: Path) -> WeightsCheck:
    """Of the newest checkpoints in two directories; every byte is read, and compared with its hash on the way."""
    step, tensors = _read(undisturbed)
    other_step, others = _read(killed)
    return WeightsCheck(
        steps=(step, other_step),
        num_tensors=len(tensors),
        num_elements=sum(int(np.prod(tensor.shape)) for tensor in tensors.values()),
        different=different_tensors(tensors, others),
    )


def different_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Bit for bit: 0.0 and -0.0 differ, the same NaN twice does not."""
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
        entries = {entry.name: entry for entry in manifest.tensors if not entry.name.startswith(NOT_GIVEN)}
        data = reader.read_tensors(store, manifest, entries, watch=Watch())
    finally:
        store.close()
    return manifest.step, {
        name: Tensor(dtype=entry.dtype, shape=entry.shape, data=data[name]) for name, entry in entries.items()
    }
