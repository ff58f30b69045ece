"""The processes of a run on one node, as the agent sees them. A port: `local.LocalWorkers` has them on this machine.

What every implementation promises (`tests/contract/workers_contract.py`):

- A worker is what `python script.py` would be: its arguments, search path, environment, exit code and traceback.
- Every worker that was to be started ends exactly once, also one that could not be started at all.
- A worker leads a session of its own. When it ends, however it ends, everything in its process group ends with it.
  What it has put into another session ends soon after the last worker has; but a process with
  `STRATA_OUTLIVES_WORKER=1` in its environment goes on: a saver must finish its checkpoint after its trainer's crash.
- If the agent dies, they all die.

The calls belong to one event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

NOT_STARTED = 71
"""The exit code of a worker that never was, as `sysexits.h` has it: no process, no memory. Its log says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrder:
    """All that a worker's process needs."""

    rank: int
    script: str
    """A file, or with `is_module` a module's name."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    directory: str
    """Where it runs."""
    variables: Mapping[str, str]
    """Its whole environment."""
    log: Path
    """Where stdout and stderr go, appended and at once: what a killed worker has printed is there."""
    log_bytes: int = 0
    """How much of the log is kept: the newest, up to half of it in a file of its own beside it. 0: all of it."""
    title: str = ""
    """What `ps` shows of the process; left out: script and arguments."""


@dataclass(frozen=True, slots=True)
class WorkerExit:
    rank: int
    code: int
    """Below 0: the signal that ended it."""
    last_words: str = ""
    """The last line of its log, which for Python is the exception; known where the log is."""
    log_end: tuple[str, ...] = ()
    """The last lines of the log of one that has failed, for those who do not have it; or those that could not be
    written to it.
    """
    step: int | None = None
    """The last that it reported, if it has left by itself."""


class Workers(Protocol):
    async def prepare(self) -> None:
        """Begins with what makes the first start quick, and does not wait for it. Starting works without it."""
        ...

    async def start(self, orders: Sequence[WorkerOrder]) -> None:
        """Returns when all of them run, or have ended already.

        Raises:
            InvalidArgument: A rank runs already, or its order is too large; nobody was started.
            ConfigError: A log cannot be written; nobody was started.
        """
        ...

    async def next_exit(self) -> WorkerExit:
        """Waits for the next worker that ends, in the order in which they do."""
        ...

    def kill(self, ranks: Iterable[int]) -> None:
        """Ends them at once, with everything in their process groups, also while they are being started. Who does not
        run is passed over.
        """
        ...

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        """To the worker alone, as soon as it is there if it is being started; to nobody if it does not run."""
        ...

    def pid_of(self, rank: int) -> int | None:
        """None for a worker that does not run."""
        ...

    async def close(self) -> None:
        """Nobody is left: no process, no socket. May be called again."""
        ...
