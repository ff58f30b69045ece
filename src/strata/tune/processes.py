"""The processes of a trial under one lease, and what their ends mean for it. Nothing here performs I/O."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from strata.launch.environment import STOPPED, UNREACHABLE
from strata.tune.state import events as e

if TYPE_CHECKING:
    from strata.identity import Identity
    from strata.launch.protocol import WorkerExit
    from strata.tune import messages as m
    from strata.tune.endpoint import Connection
    from strata.tune.state.actions import Start

NOTHING_TO_SAVE_S = 5.0
"""Time for a trial that has nothing to save to stop by itself, at its next report; then it is killed."""


@dataclass(slots=True, eq=False)
class Process:
    rank: int
    """Rank within the trial."""
    connection: Connection | None = None
    number: int = 0
    """Number of its last message."""
    is_read: asyncio.Event = field(default_factory=asyncio.Event)
    """Its connection has ended, so all its messages were received."""
    exit: WorkerExit | None = None
    is_killed: bool = False
    """By us."""


@dataclass(slots=True, eq=False)
class ProcessGroup:
    """The processes of a trial: they start and end together."""

    start: Start
    launch: int
    """Number of this start among all starts of the study."""
    processes: dict[int, Process]
    """By rank at the nodes."""
    identities: tuple[Identity, ...] = ()
    """Of each rank; empty until it has a place."""
    stop: m.StopTrial | None = None
    result: m.Result | None = None
    failure: str = ""
    killer: asyncio.TimerHandle | None = None

    @property
    def exits(self) -> list[WorkerExit]:
        """In the order of the ranks."""
        return [each.exit for each in self.processes.values() if each.exit is not None]

    @property
    def is_over(self) -> bool:
        return len(self.exits) == len(self.processes)

    @property
    def running(self) -> list[int]:
        """Ranks at the nodes that have not ended."""
        return [rank for rank, each in self.processes.items() if each.exit is None]

    @property
    def others_follow(self) -> bool:
        """Whether the other processes end by themselves after those that have ended: all have succeeded, or save."""
        is_saving = self.stop is not None and self.stop.is_saving
        return all(each.code == 0 or (each.code == STOPPED and is_saving) or each.is_echo for each in self.exits)

    def outcome(self) -> e.Finished | e.Stopped | e.Failed | e.Lost:
        """Return what the ends of all processes mean for the trial.

        A worker that was killed from outside is lost, even if others failed because of it.
        """
        trial, lease = self.start.trial, self.start.lease
        exits = [each.exit for each in self.processes.values() if each.exit is not None and not each.is_killed]
        lost = [each for each in exits if each.code < 0 or each.code == UNREACHABLE]
        failed = [each for each in exits if each.code > 0 and each.code not in (STOPPED, UNREACHABLE)]
        if self.result is not None and all(each.code == 0 for each in exits):
            return e.Finished(trial=trial, lease=lease, values=self.result.values)
        if lost:
            return e.Lost(trial=trial, lease=lease, reason=lost[0].how, is_blameless=lost[0].is_node_lost)
        if failed:
            cause = next((each for each in failed if not each.is_echo), failed[0])
            return e.Failed(trial=trial, lease=lease, reason=self.failure or cause.how)
        if any(each.code == STOPPED for each in exits) or self.stop is not None:
            return e.Stopped(trial=trial, lease=lease)
        return e.Lost(trial=trial, lease=lease, reason="it ended without a result")
