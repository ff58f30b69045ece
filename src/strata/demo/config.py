"""The size of a demo and the schedule of its kills. It imports nothing heavy, so it can refuse before torch loads."""

from __future__ import annotations

import importlib.util
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.errors import ConfigError
from strata.identity import process_name

if TYPE_CHECKING:
    from pathlib import Path

NUM_EPOCHS = 2
BATCH_SIZE = 256
"""Rows per step on each worker."""
NUM_CHECKPOINTS = 30
"""Approximate number of checkpoints in a run."""
MIN_EVERY = 5
STEPS_PER_KILL = 20
"""Minimum number of steps per kill, so that there is something to see between two kills."""
MAX_WORKERS = 16
MAX_KILLS = 10
MAX_ROWS = 10_000_000
_FIRST, _LAST = 0.3, 0.85
"""The part of the run in which workers are killed, as fractions of its steps."""
NEEDED = ("torch", "pyarrow")


@dataclass(frozen=True, slots=True)
class PlannedKill:
    rank: int
    step: int
    """The process is killed as soon as it has finished this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    num_workers: int = 2
    num_servers: int = 0
    """Parameter servers. With any, they are killed instead of workers."""
    num_rows: int = 200_000
    num_kills: int = 1
    seed: int = 7
    keep: Path | None = None
    """Directory in which data, logs and checkpoints stay; None removes them."""
    timeout_s: float = 600.0
    """Deadline of each of the two runs."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_workers <= MAX_WORKERS:
            raise ConfigError(f"--workers {self.num_workers} is out of range; use 1 to {MAX_WORKERS}", field="workers")
        if not 1 <= self.num_kills <= MAX_KILLS:
            raise ConfigError(f"--kills {self.num_kills} is out of range; use 1 to {MAX_KILLS}", field="kills")
        min_rows = math.ceil(STEPS_PER_KILL * self.num_kills / NUM_EPOCHS) * self.num_workers * BATCH_SIZE
        if not min_rows <= self.num_rows <= MAX_ROWS:
            raise ConfigError(
                f"--rows {self.num_rows} is out of range; with --workers {self.num_workers} and --kills "
                f"{self.num_kills}, use {min_rows} to {MAX_ROWS}",
                field="rows",
            )
        if self.keep is not None and self.keep.exists() and not (self.keep.is_dir() and not any(self.keep.iterdir())):
            raise ConfigError(f"--keep {self.keep} already exists; give a new or empty directory", field="keep")

    def name_of(self, rank: int) -> str:
        """Return `rank 0`, or `server 0`."""
        return process_name(rank, world_size=self.num_workers + self.num_servers, num_servers=self.num_servers)

    @property
    def num_steps(self) -> int:
        """Steps of a run, counted like the loader: fewer remaining rows than ranks join the last batch."""
        full, rest = divmod(self.num_rows, self.num_workers * BATCH_SIZE)
        return (full + (rest >= self.num_workers)) * NUM_EPOCHS

    @property
    def every(self) -> int:
        """Steps between two checkpoints."""
        return max(self.num_steps // NUM_CHECKPOINTS, MIN_EVERY)

    @property
    def kills(self) -> tuple[PlannedKill, ...]:
        """One kill in each part of the middle of the run; the seed decides the rank and the step."""
        chance = random.Random(self.seed)  # noqa: S311 (the same kills for the same seed)
        first, number = (self.num_workers, self.num_servers) if self.num_servers else (0, self.num_workers)
        width = (_LAST - _FIRST) / self.num_kills
        return tuple(
            PlannedKill(
                first + chance.randrange(number),
                round(self.num_steps * (_FIRST + width * (nth + 0.8 * chance.random()))),
            )
            for nth in range(self.num_kills)
        )


def check_installed() -> None:
    """Check that the packages that the demo trains with are installed.

    Raises:
        ConfigError: One of them is missing.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the demo needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; "
            'run: pip install "strata-runtime[torch,data]"'
        )
