"""The specification of a run: defined once, stored in the run's directory, and read again by `strata resume`."""

from __future__ import annotations

import math
import re
import shlex
from typing import Literal

import msgspec

from strata.errors import ConfigError

MIN_LOG_BYTES = 64 << 10
MAX_WORKERS = 4_096
"""A larger number is taken for a typing error."""
ANY_NUMBER = 1 << 20
"""Slots of a node without a limit."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


PER_RANK = "the state of an attached loader is per rank"


def not_divisible(workers: object, only: int) -> str:
    """Return why this number of workers cannot resume from a checkpoint of `only` workers, and the cure."""
    return (
        f"{workers} workers cannot resume from a checkpoint of {only} workers: {PER_RANK}. Keep {only} workers, or "
        "load a map-style dataset with ctx.dataloader(dataset, …), whose state any number of workers can load"
    )


class Size(msgspec.Struct, frozen=True):
    """The allowed number of workers."""

    at_least: int
    at_most: int

    def __post_init__(self) -> None:
        if not 1 <= self.at_least <= self.at_most <= MAX_WORKERS:
            raise ConfigError(
                f"workers={self} is invalid; pass a number from 1 to {MAX_WORKERS}, or a range such as 2:8",
                field="workers",
            )

    @classmethod
    def parse(cls, text: str) -> Size:
        """Parse `4`, or `2:8` for a run that may shrink and grow."""
        first, colon, last = text.partition(":")
        try:
            at_least = int(first)
            return cls(at_least, int(last) if colon else at_least)
        except ValueError:
            raise ConfigError(
                f"workers={text!r} is invalid; pass a number such as 4 or a range such as 2:8", field="workers"
            ) from None

    def plus(self, number: int) -> Size:
        """Return the size with more processes, or with fewer."""
        return Size(max(self.at_least + number, 1), max(self.at_most + number, 1))

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
    """A file, or with `is_module` the name of a module."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    workers: Size = Size(1, 1)
    """Processes, with the parameter servers."""
    num_servers: int = 0
    """How many of them are parameter servers, if that is known before they start."""
    scaled_servers: int = 0
    """Parameter servers after `strata scale --servers`, instead of those that the script asks for; 0: not scaled."""
    directory: str
    """Working directory of the script."""
    checkpoints: str
    """Directory or URL."""
    variables: dict[str, str] = {}
    """Environment variables of the workers, in addition to the agent's."""
    max_restarts: int = 3
    """Total number of attempts that may fail."""
    grace_s: float = 30.0
    """Time for workers to save a last checkpoint when they are asked to stop."""
    step_timeout_s: float = 600.0
    """Time without a step after which a worker counts as hung; 0: no limit."""
    is_start_watched: bool = False
    """Apply that limit from the start of an attempt instead of a worker's first step."""
    log_bytes: int = 64 << 20
    """Newest bytes of each worker's log to keep; 0: all."""
    function: str = ""
    """Name of the function, if the run calls one."""
    shown: str = ""
    """Command to show instead, if the script is not the user's own."""
    min_wait_s: float = 300.0
    """Time to wait while fewer than the minimum number of workers can be placed."""
    is_warm: bool = True
    """Fork workers from a process that has already imported what the script needs."""
    preload: tuple[str, ...] = ()
    """Modules to import there, in addition to the script's own imports."""
    coordinator: str = ""
    """Comma-separated addresses; empty: the agent runs its own coordinator."""
    num_nodes: int = 1
    """Number of machines that run this spec, each with its own agent."""
    node_address: str = ""
    """Address at which other machines reach this one; empty: the one used to reach the coordinator."""
    engine: Literal["local", "ray"] = "local"
    address: str = ""
    """Address of the Ray cluster, as for `ray.init`; empty: start one on this machine for the run."""
    cpus_per_worker: float = 1.0
    """CPUs that a worker reserves on a Ray cluster."""
    gpus_per_worker: float = 0.0
    ships: bool | None = None
    """Let Ray copy the working directory to the nodes; None: if the cluster has other machines."""

    @property
    def command(self) -> str:
        """The command as typed, without the directory of the script."""
        if self.shown:
            return self.shown
        if self.function:
            return f"{self.function}()"
        script = ["-m", self.script] if self.is_module else [self.script.rpartition("/")[2]]
        return shlex.join([*script, *self.arguments])

    def __post_init__(self) -> None:
        if not _is_name(self.name):
            raise ConfigError(
                f"name={self.name!r} is not a valid directory name; use up to 63 letters, digits, dots and dashes",
                field="name",
            )
        if not self.script:
            raise ConfigError("no script was given; pass the path of one", field="script")
        if not _is_count(self.max_restarts):
            raise ConfigError(
                f"max_restarts={self.max_restarts!r} is not a number of restarts; use a whole number, 0 for none",
                field="max_restarts",
            )
        for name in ("grace_s", "step_timeout_s", "min_wait_s", "cpus_per_worker", "gpus_per_worker"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}={value} is invalid; use a finite number, 0 or more", field=name)
        if self.log_bytes and self.log_bytes < MIN_LOG_BYTES:
            raise ConfigError(
                f"log_bytes={self.log_bytes} is too small to show why a worker failed; use at least 64KiB, or 0 for no "
                "limit",
                field="log_bytes",
            )
        if not 1 <= self.num_nodes <= self.workers.at_most:
            raise ConfigError(
                f"nnodes={self.num_nodes} is invalid; use 1 to the number of workers, {self.workers.at_most}: each "
                "node runs at least one",
                field="nnodes",
            )
        if self.num_nodes > 1 and not self.coordinator:
            raise ConfigError(
                "several nodes need a coordinator; start one with `strata coordinator`, and pass --coordinator "
                "HOST:PORT on each of them",
                field="coordinator",
            )
        if self.num_nodes > 1 and self.engine == "ray":
            raise ConfigError(
                "--nnodes does not apply to a Ray cluster, which has its own nodes; leave it out", field="nnodes"
            )


def _is_name(value: object) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
