"""The port for worker processes on one node; `local.LocalWorkers` implements it on this machine.

Every implementation guarantees (`tests/contract/workers_contract.py`):

- A worker is what `python script.py` would be: its arguments, search path, environment, exit code and traceback.
- Every worker ends exactly once, even one that could not be started.
- A worker leads a session. When it exits, for whatever reason, every process in its process group is killed. Processes
  that it put into other sessions are killed soon after the last worker has exited, except those with
  `STRATA_OUTLIVES_WORKER=1` in their environment: a saver must finish its checkpoint after its trainer's crash.
- If the agent dies, all workers die.

The calls belong to one event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from strata.launch.protocol import WorkerExit


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """Everything that a worker's process needs."""

    rank: int
    script: str
    """A file, or with `is_module` the name of a module."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    directory: str
    """Working directory."""
    variables: Mapping[str, str]
    """Its complete environment."""
    log: Path
    """File for stdout and stderr, appended to without buffering: it has everything that a killed worker printed."""
    log_bytes: int = 0
    """Bytes of the log to keep: the newest, up to half of them in a second file beside it. 0: keep everything."""
    title: str = ""
    """Name of the process in `ps`; empty: script and arguments."""


class Workers(Protocol):
    async def prepare(self) -> None:
        """Begin whatever makes the first start fast, without waiting for it. Starting works without this call."""
        ...

    async def start(self, specs: Sequence[ProcessSpec]) -> None:
        """Start workers; return when all of them run or have already ended.

        Raises:
            InvalidArgument: A rank is already running, or its spec is too large; no worker was started.
            ConfigError: A log cannot be written; no worker was started.
        """
        ...

    async def next_exit(self) -> WorkerExit:
        """Wait for the next worker to exit, and return the exits in the order in which they happen."""
        ...

    def kill(self, ranks: Iterable[int]) -> None:
        """Kill workers with everything in their process groups, even while they start. Ignore ranks that do not run."""
        ...

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to the worker alone; if it is starting, as soon as it runs. Ignore a rank that does not run."""
        ...

    def pid_of(self, rank: int) -> int | None:
        """Return the worker's process id, or None if it does not run."""
        ...

    async def close(self) -> None:
        """Leave no process and no socket behind. May be called more than once."""
        ...
