"""Actions that the supervisor returns and the agent carries out, besides `KillWorkers` and `DumpStacks`, which go to
nodes as they are. Pure data.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from strata.launch.protocol import DumpStacks, KillWorkers

if TYPE_CHECKING:
    from strata.launch.protocol import Outcome

_BY_SIGNAL = {"Ctrl-C": 128 + signal.SIGINT, "SIGTERM": 128 + signal.SIGTERM, "SIGHUP": 128 + signal.SIGTERM}
"""Exit codes of `strata run`, by the reason for a stop."""

NoteKind = Literal[
    "started", "restarted", "failed", "hung", "ending", "stopping", "scaling", "waiting", "nodes", "cause"
]


@dataclass(frozen=True, slots=True)
class StartAttempt:
    """Start all workers of an attempt."""

    attempt: int
    world_size: int


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start one worker of this attempt again. The others keep running."""

    attempt: int
    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class AddServers:
    """Start more parameter servers in this attempt. The others keep running."""

    attempt: int
    ranks: tuple[int, ...]
    num_before: int
    layout: int


@dataclass(frozen=True, slots=True)
class MoveRows:
    """Let the workers agree on a step after which rows move to another number of parameter servers."""

    num_servers: int
    layout: int


@dataclass(frozen=True, slots=True)
class AskToStop:
    """Let the workers agree on a step, save there and exit."""

    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """Add an event to the timeline and show it in the terminal."""

    what: NoteKind
    text: str
    attempt: int
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """End the run."""

    outcome: Outcome
    reason: str

    @property
    def exit_code(self) -> int:
        """Exit code of `strata run`: the one that shells expect of a program ended by a signal."""
        if self.outcome == "stopped":
            return next((code for prefix, code in _BY_SIGNAL.items() if self.reason.startswith(prefix)), 0)
        return 0 if self.outcome == "done" else 1


Action = StartAttempt | StartWorker | AddServers | MoveRows | AskToStop | KillWorkers | DumpStacks | Note | Finish
