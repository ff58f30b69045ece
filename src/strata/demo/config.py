"""How large a demo is, and when its workers are killed. Pure, but for a look at what is installed."""

from __future__ import annotations

import importlib.util
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

NUM_EPOCHS = 2
BATCH_SIZE = 256
"""Rows of a step, on each worker."""
NUM_CHECKPOINTS = 30
"""About so many in a run."""
MIN_EVERY = 5
STEPS_PER_KILL = 20
"""With fewer there would be nothing to see between two of them."""
MAX_WORKERS = 16
MAX_KILLS = 10
MAX_ROWS = 10_000_000
_FIRST, _LAST = 0.3, 0.85
"""The part of the run in which workers are killed."""
NEEDED = ("torch", "pyarrow")


@dataclass(frozen=True, slots=True)
class PlannedKill:
    rank: int
    step: int
    """As soon as the worker has made it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    num_workers: int = 2
    num_rows: int = 200_000
    num_kills: int = 1
    seed: int = 7
    keep: Path | None = None
    """Where data, logs and checkpoints stay; None: they are removed."""
    timeout_s: float = 600.0
    """For each of the two runs."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_workers <= MAX_WORKERS:
            raise ConfigError(f"--workers must be from 1 to {MAX_WORKERS}", field="workers")
        if not 1 <= self.num_kills <= MAX_KILLS:
            raise ConfigError(f"--kills must be from 1 to {MAX_KILLS}", field="kills")
        least = math.ceil(STEPS_PER_KILL * self.num_kills / NUM_EPOCHS) * self.num_workers * BATCH_SIZE
        if not least <= self.num_rows <= MAX_ROWS:
            raise ConfigError(
                f"--rows must be from {least} (for {self.num_workers} workers, {self.num_kills} kills) to {MAX_ROWS}",
                field="rows",
            )
        if self.keep is not None and self.keep.exists() and not (self.keep.is_dir() and not any(self.keep.iterdir())):
            raise ConfigError(f"--keep {self.keep} is there already; name a new or an empty directory", field="keep")

    @property
    def num_steps(self) -> int:
        """As the loader counts: rows that are fewer than the ranks join the batch before."""
        full, rest = divmod(self.num_rows, self.num_workers * BATCH_SIZE)
        return (full + (rest >= self.num_workers)) * NUM_EPOCHS

    @property
    def every(self) -> int:
        """Steps between two checkpoints."""
        return max(self.num_steps // NUM_CHECKPOINTS, MIN_EVERY)

    @property
    def kills(self) -> tuple[PlannedKill, ...]:
        """One in each part of the middle of the run; who and when exactly, the seed decides."""
        chance = random.Random(self.seed)  # noqa: S311 - nobody shall be surprised twice
        width = (_LAST - _FIRST) / self.num_kills
        return tuple(
            PlannedKill(
                chance.randrange(self.num_workers),
                round(self.num_steps * (_FIRST + width * (number + 0.8 * chance.random()))),
            )
            for number in range(self.num_kills)
        )


def check_installed() -> None:
    """
    Raises:
        ConfigError: Something that the demo trains with is not there.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the demo trains a real model and needs {' and '.join(missing)}, not installed here; "
            'run: pip install "strata-runtime[torch,data]"'
        )
