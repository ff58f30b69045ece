"""The protocol between the agent that leads a run and its nodes: orders to nodes, and what nodes report.

The vocabulary is the same for processes of this machine, agents on other machines and Ray actors; only the transport
differs. Every order names its attempt, so that one that arrives late does not hit the workers of the next attempt.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from strata.launch.environment import STOPPED, WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NOT_STARTED = 71
"""Exit code of a worker that could not be started (`EX_OSERR` of `sysexits.h`). Its log holds the reason."""
LOST = -signal.SIGKILL
"""Exit code of a worker whose node is lost: whatever happened to it came from outside."""
_ECHOES = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited"),
    "strata.transport.bulk.ConnectionLost: ",
)
"""Messages of gloo, NCCL, sockets and clients of parameter servers about a peer that has died."""

Outcome = Literal["done", "stopped", "failed"]
M = TypeVar("M", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """A worker's process has ended."""

    rank: int
    code: int
    """Exit code; below 0: the signal that ended the process."""
    last_words: str = ""
    """Last line of its log, which for Python is the exception. Known where the log is."""
    log_end: tuple[str, ...] = ()
    """Last lines of a failed worker's log, for readers without access to it; or lines that could not be written."""
    step: int | None = None
    """Last step that the worker reported, unless it was killed or made no step."""
    is_alone: bool = False
    """Whether the worker was at a point from which it can be restarted without the others."""
    is_node_lost: bool = False
    """Whether its node was lost, or had no room for it: the worker is not the cause."""
    is_killed: bool = False
    """Whether the run itself killed the worker while it was alive: another failure is the cause."""

    @property
    def is_failure(self) -> bool:
        return self.code not in (0, STOPPED)

    @property
    def is_echo(self) -> bool:
        """Whether the worker died because a peer did: its last words report a closed connection."""
        return any(sign in self.last_words for sign in _ECHOES)

    @property
    def how(self) -> str:
        """How the process ended, and its last words."""
        if self.code >= 0:
            how = f"exit code {self.code}"
        else:
            try:
                how = f"killed by {signal.Signals(-self.code).name}"
            except ValueError:
                how = f"killed by signal {-self.code}"
        return how + (f": {self.last_words}" if self.last_words else "")


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all orders and reports."""


# -- orders to a node --------------------------------------------------------------------------------------------------


class StartWorkers(Message, frozen=True):
    """Start these workers of one attempt."""

    worker: WorkerSpec
    """What they have in common."""
    ranks: tuple[tuple[int, int], ...]
    """Rank and local rank of each."""
    variables: dict[str, str] = {}
    """Further environment variables."""

    @classmethod
    def of(cls, workers: Sequence[WorkerSpec], variables: Mapping[str, str] | None = None) -> StartWorkers:
        """Return the order for workers of one node, which differ in nothing but their ranks."""
        ranks = tuple((worker.identity.rank, worker.identity.local_rank) for worker in workers)
        return cls(workers[0], ranks, dict(variables or {}))

    @property
    def attempt(self) -> int:
        return self.worker.identity.attempt

    def workers(self) -> list[WorkerSpec]:
        common = self.worker
        return [
            replace(common, identity=replace(common.identity, rank=rank, local_rank=local_rank))
            for rank, local_rank in self.ranks
        ]


class KillWorkers(Message, frozen=True):
    """Kill these workers now, with every process that they have started."""

    attempt: int
    ranks: tuple[int, ...]


class SignalWorker(Message, frozen=True):
    """Send a signal to one worker."""

    attempt: int
    rank: int
    number: int


class DumpStacks(Message, frozen=True):
    """Write the stacks of these workers to their logs, before anything that is ordered afterwards."""

    attempt: int
    ranks: tuple[int, ...]


class Release(Message, frozen=True):
    """To a node that wants to leave: it has no workers of the run any longer, and gets none."""


class RunOver(Message, frozen=True):
    """The run has ended."""

    outcome: Outcome
    reason: str


# -- reports of a node -------------------------------------------------------------------------------------------------


class WorkersExited(Message, frozen=True):
    """Workers of this node have exited."""

    attempt: int
    exits: tuple[WorkerExit, ...]


class NodeLeaving(Message, frozen=True):
    """The node asks to be freed of its workers."""

    reason: str


WorkerOrder = StartWorkers | KillWorkers | SignalWorker | DumpStacks
AnyMessage = WorkerOrder | Release | RunOver | WorkersExited | NodeLeaving


def encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[M]) -> M:
    return msgspec.msgpack.decode(data, type=kind)
