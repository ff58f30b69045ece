"""What is to be run: said once, kept in the run's directory, and read again by `strata resume`."""

from __future__ import annotations

import math
import re
import shlex
from typing import Literal

import msgspec

from strata.errors import ConfigError

MIN_LOG_BYTES = 64 << 10
MAX_WORKERS = 4_096
"""More processes than that are a slip of the keyboard."""
ANY_NUMBER = 1 << 20
"""The room of a node that sets no bound."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


PER_RANK = "the state of an attached loader is each rank's own and cannot be divided"


def not_divisible(workers: object, only: int) -> str:
    """Why so many workers cannot go on from where `only` stand, and the cure."""
    return (
        f"{workers} workers cannot go on from where {only} stand: {PER_RANK}. Keep {only} workers, or load a map-style "
        "dataset with ctx.dataloader(dataset, …), which any number of workers can go on with"
    )


class Size(msgspec.Struct, frozen=True):
    """How many workers there may be."""

    at_least: int
    at_most: int

    def __post_init__(self) -> None:
        if not 1 <= self.at_least <= self.at_most <= MAX_WORKERS:
            raise ConfigError(
                f"{self} workers make no sense; say a number from 1 to {MAX_WORKERS}, or two as in 2:8", field="workers"
            )

    @classmethod
    def parse(cls, text: str) -> Size:
        """`4`, or `2:8` for a job that may shrink and grow between them."""
        first, colon, last = text.partition(":")
        try:
            at_least = int(first)
            return cls(at_least, int(last) if colon else at_least)
        except ValueError:
            raise ConfigError(f"workers={text!r} is neither a number nor two as in 2:8", field="workers") from None

    @property
    def is_elastic(self) -> bool:
        return self.at_least != self.at_most

    def allows(self, workers: int) -> bool:
        return self.at_least <= workers <= self.at_most

    def __str__(self) -> str:
        return f"{self.at_least}:{self.at_most}" if self.is_elastic else str(self.at_least)


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    script: str
    """A file, or with `is_module` a module's name."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    workers: Size = Size(1, 1)
    directory: str
    """Where the script runs."""
    checkpoints: str
    """A directory or URL."""
    variables: dict[str, str] = {}
    """Set in the workers' environment, beside what the agent has in its own."""
    max_restarts: int = 3
    """Attempts that may fail, in all."""
    grace_s: float = 30.0
    """What workers that are asked to stop have for a last checkpoint."""
    step_timeout_s: float = 600.0
    """A worker that makes no step for so long is hung. 0: it may take any time."""
    is_start_watched: bool = False
    """Whether that counts from the start of an attempt; else from a worker's first step."""
    log_bytes: int = 64 << 20
    """How much of each worker's log is kept, the newest; 0: all of it."""
    function: str = ""
    """The name of the function that is run, if it is one."""
    min_wait_s: float = 300.0
    """How long to wait for workers while there are fewer than the least."""
    is_warm: bool = True
    """Fork workers from a process that has imported what the script will."""
    preload: tuple[str, ...] = ()
    """Modules to import there, beside those that the script names itself."""
    coordinator: str = ""
    """Addresses, with commas between them; empty: the agent has one inside."""
    num_nodes: int = 1
    """How many machines run this spec, each with an agent of its own."""
    node_address: str = ""
    """Where the other machines reach this one; empty: as seen on the way to the coordinator."""
    engine: Literal["local", "ray"] = "local"
    address: str = ""
    """Of the Ray cluster: `auto`, or as `ray.init` takes it; empty: one on this machine for as long as the run."""
    cpus_per_worker: float = 1.0
    """What a worker reserves on a Ray cluster."""
    gpus_per_worker: float = 0.0
    ships: bool | None = None
    """Whether Ray copies the working directory to the nodes; None: if there are others than this machine."""

    @property
    def command(self) -> str:
        """What is run, as one would type it, but for the directory of the script."""
        if self.function:
            return f"{self.function}()"
        script = ["-m", self.script] if self.is_module else [self.script.rpartition("/")[2]]
        return shlex.join([*script, *self.arguments])

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"name={self.name!r} cannot be a directory's; use up to 63 letters, digits, dots, dashes", field="name"
            )
        if not self.script:
            raise ConfigError("there is nothing to run; name a script", field="script")
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts={self.max_restarts} is below 0; 0 means none", field="max_restarts")
        for name in ("grace_s", "step_timeout_s", "min_wait_s", "cpus_per_worker", "gpus_per_worker"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}={value} must be a number, 0 or more", field=name)
        if self.log_bytes and self.log_bytes < MIN_LOG_BYTES:
            raise ConfigError(
                f"log_bytes={self.log_bytes} is too little to find a cause in; give at least 64KiB, or 0 for no limit",
                field="log_bytes",
            )
        if not 1 <= self.num_nodes <= self.workers.at_most:
            raise ConfigError(
                f"nnodes={self.num_nodes} must be from 1 to the number of workers, {self.workers.at_most}: each node "
                "has one at least",
                field="nnodes",
            )
        if self.num_nodes > 1 and not self.coordinator:
            raise ConfigError(
                "several nodes meet at a coordinator; start one (`strata coordinator`), and name it with "
                "--coordinator HOST:PORT on each of them",
                field="coordinator",
            )
        if self.num_nodes > 1 and self.engine == "ray":
            raise ConfigError("a Ray cluster has its own nodes; leave out --nnodes", field="nnodes")
