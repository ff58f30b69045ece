"""The record of which rows each worker trained on, and a reader that follows it.

Each attempt of a worker writes one file: a header that identifies it, then one record per step. Records are written
without buffering, so a killed worker loses no finished step. A reader ignores an incomplete record at the end, which a
kill in the middle of a write leaves.
"""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from strata.checkpoint import Save
    from strata.train import Context

Rows = np.ndarray[Any, np.dtype[np.int64]]

_HEAD = struct.Struct("<qqqqd")
"""Attempt, rank, pid, restored step, time."""
_RECORD = struct.Struct("<qqqddq")
"""Kind, step, epoch, loss or stall, time, number of rows that follow."""
_TRAINED, _SAVED = 1, 2
_READ_BYTES = 1 << 20


class StepLog:
    """Written by a worker. Times are monotonic, a clock that all processes of a machine share."""

    def __init__(self, directory: str, ctx: Context, step: int) -> None:
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        name = path / f"attempt-{ctx.attempt:03}-rank-{ctx.rank:03}"
        self._fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.write(self._fd, _HEAD.pack(ctx.attempt, ctx.rank, os.getpid(), step, time.monotonic()))

    def trained(self, step: int, epoch: int, loss: float, rows: Any) -> None:
        """Record the rows of a step. Call it before the step is saved."""
        numbers = np.ascontiguousarray(rows, dtype=np.int64)
        head = _RECORD.pack(_TRAINED, step, epoch, loss, time.monotonic(), numbers.size)
        os.write(self._fd, head + numbers.tobytes())

    def saved(self, save: Save | None) -> None:
        """Record how long a checkpoint stalled training, if one was saved."""
        if save is not None:
            record = _RECORD.pack(_SAVED, save.step, save.epoch, save.stall_s, time.monotonic(), 0)
            os.write(self._fd, record)


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepRecord:
    step: int
    epoch: int
    loss: float
    at_s: float
    rows: Rows


@dataclass(frozen=True, slots=True)
class SaveRecord:
    step: int
    stall_s: float


@dataclass(slots=True)
class WorkerSteps:
    """What one attempt of a worker has written so far."""

    attempt: int
    rank: int
    pid: int
    restored_step: int
    restored_at_s: float
    trained: list[StepRecord] = field(default_factory=list)
    saved: list[SaveRecord] = field(default_factory=list)


class StepLogReader:
    """Reads new records on each call of `look`. The files stay open; there are few."""

    def __init__(self, directory: Path) -> None:
        self.entries: dict[tuple[int, int], WorkerSteps] = {}
        """By attempt and rank."""
        self._directory = directory
        self._files: dict[str, _File] = {}

    def look(self) -> None:
        if self._directory.is_dir():
            for name in os.listdir(self._directory):  # noqa: PTH208 (called several hundred times a second)
                if name not in self._files:
                    self._files[name] = _File(self._directory / name)
        for file in self._files.values():
            entry = file.look()
            if entry is not None:
                self.entries[entry.attempt, entry.rank] = entry

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class _File:
    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._rest = b""
        self._entry: WorkerSteps | None = None

    def look(self) -> WorkerSteps | None:
        """Return the records so far; None until the header is complete."""
        while block := os.read(self._fd, _READ_BYTES):
            self._rest += block
        if self._entry is None and len(self._rest) >= _HEAD.size:
            self._entry = WorkerSteps(*_HEAD.unpack_from(self._rest))
            self._rest = self._rest[_HEAD.size :]
        if self._entry is not None:
            self._rest = self._rest[_take_records(self._entry, self._rest) :]
        return self._entry

    def close(self) -> None:
        os.close(self._fd)


def _take_records(entry: WorkerSteps, data: bytes) -> int:
    """Add the complete records to the worker's steps and return their length in bytes."""
    start = 0
    while len(data) - start >= _RECORD.size:
        kind, step, epoch, number, at_s, num_rows = _RECORD.unpack_from(data, start)
        end = start + _RECORD.size + num_rows * 8
        if end > len(data):
            break
        if kind == _TRAINED:
            rows = np.frombuffer(data, np.int64, num_rows, start + _RECORD.size)
            entry.trained.append(StepRecord(step, epoch, number, at_s, rows))
        else:
            entry.saved.append(SaveRecord(step, number))
        start = end
    return start
