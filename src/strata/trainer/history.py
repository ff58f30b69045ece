"""What a fit has achieved: one row per epoch, the best epoch, and whether to stop early. Pure, and part of checkpoints.

Early stopping compares with the best value so far, not with the previous epoch, and is decided from values that are the
same on all ranks, so that all ranks stop at the same epoch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strata.checkpoint import CheckpointMetadata

Better = Literal["lower", "higher"]
TIMINGS = ("seconds", "rows_per_s")
"""Keys of a history row that differ between two otherwise identical runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopping:
    """Stop when the monitored value has not improved for `patience` epochs."""

    monitor: str = ""
    """A key of the history, such as `valid_auc`; by default the first validation metric, else the validation loss."""
    patience: int = 3
    min_delta: float = 0.0
    """Smallest change that counts as an improvement."""

    def __post_init__(self) -> None:
        patience: object = self.patience
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
            raise InvalidArgument(f"patience={patience!r} must be a whole number, at least 1", field="patience")
        min_delta: object = self.min_delta
        if not isinstance(min_delta, int | float) or not min_delta >= 0.0:
            raise InvalidArgument(f"min_delta={min_delta!r} must be a number, 0 or more", field="min_delta")
        if not isinstance(self.monitor, str):
            raise InvalidArgument(
                f"monitor={self.monitor!r} must be a key of the history, such as 'valid_auc'", field="monitor"
            )


@dataclass(slots=True)
class History:
    """Rows of all epochs so far, and the best of them."""

    monitor: str
    better: Better
    early_stopping: EarlyStopping | None = None
    rows: list[dict[str, float]] = field(default_factory=list)
    best_epoch: int = -1
    stop_reason: str = ""
    """Why training ended before its last epoch; empty if it did not."""
    max_rows: int | None = None
    """Rows that are kept, of the newest epochs; None: all."""
    num_dropped: int = 0

    def add(self, row: Mapping[str, float]) -> bool:
        """Append the row of an epoch; return whether it is the best so far."""
        if self.monitor not in row:
            raise InvalidArgument(
                f"monitor={self.monitor!r} is not in the history; it has {', '.join(row)}", field="monitor"
            )
        self.rows.append(dict(row))
        is_best = self.best_epoch < 0 or self._improves(row[self.monitor])
        if is_best:
            self.best_epoch = len(self.rows) - 1
        patience = None if self.early_stopping is None else self.early_stopping.patience
        if patience is not None and len(self.rows) - 1 - self.best_epoch >= patience:
            self.stop_reason = f"{self.monitor} has not improved for {patience} epochs; best {self.best_value:g}"
        if self.max_rows is not None and len(self.rows) > self.max_rows:
            self._drop_oldest()
        return is_best

    def _drop_oldest(self) -> None:
        del self.rows[0]
        self.num_dropped += 1
        self.best_epoch -= 1
        if self.best_epoch < 0:  # the best of those that are left
            self.best_epoch = 0
            for number, row in enumerate(self.rows):
                if self._improves(row[self.monitor]):
                    self.best_epoch = number

    @property
    def best_value(self) -> float:
        return self.rows[self.best_epoch][self.monitor] if self.rows else math.nan

    @property
    def num_epochs(self) -> int:
        return self.num_dropped + len(self.rows)

    def _improves(self, value: float) -> bool:
        best = self.best_value
        if math.isnan(value) or math.isnan(best):
            return math.isnan(best) and not math.isnan(value)
        delta = self.early_stopping.min_delta if self.early_stopping is not None else 0.0
        return value < best - delta if self.better == "lower" else value > best + delta

    def state_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "best_epoch": self.best_epoch,
            "stop_reason": self.stop_reason,
            "num_dropped": self.num_dropped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rows = [dict(row) for row in state["rows"]]
        self.best_epoch, self.stop_reason = int(state["best_epoch"]), str(state["stop_reason"])
        self.num_dropped = int(state.get("num_dropped", 0))


NUM_ROWS_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What `Trainer.fit` returns."""

    history: list[dict[str, float]]
    """One row per epoch: losses, metrics, learning rate, rows and seconds."""
    steps: int
    best_epoch: int
    """Index of the best row of `history`, by `monitor`; -1 without an epoch."""
    monitor: str
    best: CheckpointMetadata | None
    """Checkpoint of the best epoch; the last one if there is no validation data."""
    checkpoints: str
    """Directory or URL of the checkpoints."""
    timings: dict[str, float]
    """Seconds: `start_s` until the first step, `train_s`, `valid_s`, `total_s`."""
    stop_reason: str = ""
    servers: list[dict[str, float]] = field(default_factory=list)
    """For each parameter server at the end: `rows`, `bytes` of memory, `evicted` rows; and if a table has rows in a
    file, `hits`, `misses` and their `hit_rate`.
    """
    lost_updates: int = 0
    """Pushes of workers to parameter servers that were lost with a server. 0 unless servers are asynchronous."""

    @property
    def metrics(self) -> dict[str, float]:
        """The row of the best epoch."""
        return self.history[self.best_epoch] if self.history else {}

    def __str__(self) -> str:
        """Return the newest epochs as a table, the best one marked, and where the checkpoints are."""
        lines = _table(self.history, marked=self.best_epoch) if self.history else []
        ended = f", {self.stop_reason}" if self.stop_reason else ""
        lines.append(f"{self.steps} steps in {self.timings.get('total_s', 0.0):.1f} s{ended}")
        lines.append(f"checkpoints: {self.checkpoints}")
        return "\n".join(lines)


def _table(rows: list[dict[str, float]], *, marked: int) -> list[str]:
    """Return aligned lines: the names, the newest rows, and the marked one if it is older."""
    shown = range(max(0, len(rows) - NUM_ROWS_SHOWN), len(rows))
    numbers = sorted({*shown, marked} if 0 <= marked < len(rows) else shown)
    names = list(rows[-1])
    cells = [names, *([_cell(rows[number].get(name, math.nan)) for name in names] for number in numbers)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    header, *lines = ("  ".join(map(str.rjust, row, widths)) for row in cells)
    return [
        header,
        *(f"{line}  best" if number == marked else line for number, line in zip(numbers, lines, strict=True)),
    ]


def _cell(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"
