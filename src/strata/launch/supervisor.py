"""The supervisor decides what to do when workers exit, hang or are asked to stop.

It is a state machine without I/O: events in, actions out. All workers of a run start and stop together as one
*attempt*, because a collective that has lost a member cannot recover; a failed worker therefore ends its attempt. A
worker that shares no collective with the others, as in an asynchronous run, is started again alone instead. The next
attempt starts at once if the last one made progress, and after a pause if it did not. The run fails if the same
worker fails repeatedly at the same step with the same message, or if a programming error shows before the first step.
An attempt has as many workers as the nodes can place; while that is below the minimum, the supervisor waits.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from strata.errors import ConfigError
from strata.identity import process_counts, process_name
from strata.launch.actions import AddServers, AskToStop, Finish, MoveRows, Note, StartAttempt, StartWorker
from strata.launch.environment import STOPPED
from strata.launch.failures import MAX_ALIKE, Failure, is_input_at_fault, is_programming_error, pause_s
from strata.launch.protocol import DumpStacks, KillWorkers
from strata.launch.spec import ANY_NUMBER, PER_RANK, not_divisible
from strata.printing import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from strata.launch.actions import Action, NoteKind
    from strata.launch.protocol import Outcome, WorkerExit
    from strata.launch.spec import Size

KILL_AGAIN_S = 30.0
"""Seconds to wait for a killed worker to exit before killing it again; either message may have been lost."""
EARLY_S = 60.0
"""Seconds within which a script that reports no steps has hardly made one."""


class Phase(enum.Enum):
    NEW = "new"
    RUNNING = "running"
    ENDING = "ending"
    """A worker has failed; the others are being killed."""
    WAITING = "waiting"
    """Pausing before the next attempt."""
    SHORT = "waiting for room"
    """Fewer workers than the minimum can be placed."""
    STOPPING = "stopping"
    """The workers save and exit."""
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Resizing:
    """A change of the number of parameter servers that is not complete."""

    num_before: int
    num_servers: int
    first_new: int
    """The first of the new ranks, if servers are added."""
    scaled_before: int
    """`scaled_servers` before the change."""


@dataclass(slots=True)
class Supervisor:
    size: Size
    max_restarts: int
    grace_s: float
    min_wait_s: float = 300.0
    room: int = ANY_NUMBER
    """Number of workers that the nodes can place."""
    only: int = 0
    """The one world size that can resume, because a loader's state is per rank; 0: any that `size` allows."""
    phase: Phase = Phase.NEW
    attempt: int = -1
    world_size: int = 0
    """World size of this attempt."""
    num_servers: int = 0
    """Parameter servers among the last ranks, as far as known."""
    scaled_servers: int = 0
    """The number of servers that was asked for, instead of the script's; 0: none was."""
    wanted_servers: int = 0
    """Number of servers wanted for the next attempt; 0: as many as now."""
    layout: int = 0
    """How often the number of servers has changed in this attempt."""
    resizing: Resizing | None = None
    wanted: int = 0
    """Number of workers wanted for the next attempt."""
    running: set[int] = field(default_factory=set)
    num_restarts: int = 0
    step: int = 0
    """Highest step that a worker has reported, in any attempt."""
    saved_step: int = 0
    """Step of the last known checkpoint."""
    cause: WorkerExit | None = None
    """The first failure of this attempt, not those that followed from it."""
    _exits: dict[int, WorkerExit] = field(default_factory=dict)
    _hung: dict[int, str] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    """Healthy workers that had to be killed: their exit is not a failure."""
    _signalled: set[int] = field(default_factory=set)
    """Workers without a context, which were asked to stop by a signal. Exit code 0 from them means that they obeyed,
    not that their work is done.
    """
    _doomed: set[int] = field(default_factory=set)
    """Workers that were killed, for whatever reason."""
    _kill_again_s: float = float("inf")
    _history: list[Failure] = field(default_factory=list)
    _has_context: bool = False
    """A worker of this attempt has called `strata.init()`, so we know whether it has made a step."""
    _has_stepped: bool = False
    """A worker has made a step in some attempt, so the program works in principle."""
    _began_s: float = 0.0
    """Start of this attempt."""
    _num_idle: int = 0
    """Failures in a row without a step between them."""
    _attempt_step: int | None = None
    """Last step of this attempt; None before its first."""
    _stride: int = 1
    """Most steps between two reports, which is how exactly we know the step of a failure."""
    _incarnations: dict[int, int] = field(default_factory=dict)
    """How often each worker of this attempt was started again alone."""
    _away: dict[int, float] = field(default_factory=dict)
    """Workers that are started again alone, and when."""
    _num_idle_alone: dict[int, int] = field(default_factory=dict)
    """Like `_num_idle`, for a worker that is restarted alone."""
    _stepped: set[int] = field(default_factory=set)
    """Workers that have made a step since they were started."""
    _deadline_s: float = float("inf")
    _is_stop_wanted: bool = False
    _is_scaling: bool = False
    """The workers were asked to stop in order to start others, perhaps as many as before."""
    _stop_reason: str = ""

    def begin(self, *, now_s: float) -> list[Action]:
        self.wanted = self.wanted or self.size.at_most
        if self.only and not self.size.allows(self.only):
            return self._finish("failed", not_divisible(self.size, self.only))
        return self._start(now_s)

    # -- events ----------------------------------------------------------------------------------------------------

    def advanced(self, step: int, rank: int | None = None) -> None:
        """A worker has reported this step."""
        self._has_stepped = True
        if rank is not None:
            self._stepped.add(rank)
        if self._attempt_step is not None:
            self._stride = max(self._stride, step - self._attempt_step)
        self._attempt_step = max(step, self._attempt_step or 0)
        self.step = max(step, self.step)

    def joined(self) -> None:
        """A worker of this attempt has called `strata.init()`."""
        self._has_context = True

    def saved(self, step: int) -> None:
        """A checkpoint of this step is committed."""
        self.saved_step = max(step, self.saved_step)

    def exited(self, event: WorkerExit, *, now_s: float) -> list[Action]:
        if event.rank not in self.running:
            return []
        self.running.discard(event.rank)
        if self._may_restart_alone(event, now_s):
            return self._restart_alone(event, now_s)
        self._exits[event.rank] = event
        actions: list[Action] = []
        obeyed = self.phase is Phase.STOPPING and event.code == -signal.SIGTERM  # a script without a context
        is_meant = obeyed or event.rank in self._ended
        if event.is_failure and not is_meant and self.phase in (Phase.RUNNING, Phase.STOPPING) and self.cause is None:
            self.cause = self._with_reason(event)
            actions.append(self._note("failed", self._describe(self.cause), rank=event.rank))
            if self.phase is Phase.RUNNING:
                self.phase = Phase.ENDING
            self._away = {}
            if self.running:
                actions.append(self._kill(self.running))
        if self.running or self._away:
            return actions
        return actions + self._attempt_ended(now_s)

    def signalled(self, ranks: Collection[int]) -> None:
        """These workers have no context and were asked to stop by a signal."""
        self._signalled |= self.running & set(ranks)

    def hung(self, ranks: Collection[int], silent_s: float) -> list[Action]:
        """Workers have stopped making steps: the one that hangs and, usually, those that wait for it."""
        found = sorted(rank for rank in ranks if rank in self.running and rank not in self._hung)
        if self.phase is not Phase.RUNNING or not found:
            return []
        self._hung.update(dict.fromkeys(found, f"no step for {silent_s:.0f} s"))
        text = f"no step for {silent_s:.0f} s on {self._names(found)}; see the stacks in the logs"
        return [self._note("hung", text), DumpStacks(self.attempt, tuple(found)), self._kill(found)]

    def stop(self, reason: str, *, now_s: float, is_now: bool = False) -> list[Action]:
        """Let the workers save and exit; with `is_now`, kill them. Asking again without it changes nothing."""
        if self.phase is Phase.OVER:
            return []
        again = self._is_stop_wanted
        self._is_stop_wanted, self._stop_reason = True, reason
        if not self.running:
            return self._finish("stopped", reason)
        if self._away and not is_now:
            return self._kill_all(f"{reason}: {self._cannot_save}; killing the workers")
        if again and not is_now:
            return []
        if is_now or self.phase is Phase.ENDING:
            return self._kill_all(f"{reason}: killing the workers")
        return self._ask(self._note("stopping", f"{reason}: saving a checkpoint first"), reason, now_s)

    def scale(self, workers: int | None = None, servers: int | None = None, *, now_s: float) -> list[Action]:
        """Restart with another number of workers after the next step, or move rows to another number of parameter
        servers while the workers continue.

        Args:
            workers: Without the servers; None keeps their number.

        Raises:
            ConfigError: A number is outside the allowed range, no other number can resume, or the number of servers
                cannot change now.
        """
        if servers is not None:
            self._check_servers(servers)
        num_servers = self.num_servers if servers is None else servers
        if workers is not None:
            self._check_workers(workers)
        num_workers = self._workers(self.wanted) if workers is None else workers
        if num_servers != self.num_servers and num_workers == self._workers(self.world_size):
            return self._resize(num_servers)
        self.wanted = num_workers + num_servers
        if num_servers == self.num_servers:
            return self._fit("", now_s)
        self.wanted_servers, self._is_scaling = num_servers, True
        crew = process_counts(self.wanted, num_servers)
        text = f"from {process_counts(self.world_size, self.num_servers)} to {crew}; saving a checkpoint first"
        return self._ask(self._note("scaling", text), f"scaling to {crew}", now_s)

    def _check_workers(self, workers: int) -> None:
        if self.only and workers != self._workers(self.only):
            raise ConfigError(not_divisible(workers, self._workers(self.only)), field="workers")
        if not self.size.allows(workers + self.num_servers):
            raise ConfigError(
                f"{workers} workers are outside {self.size.plus(-self.num_servers)}, the range that the run was "
                f"started with; resume it with --workers set to a range that includes {workers + self.num_servers}",
                field="workers",
            )

    def _check_servers(self, servers: int) -> None:
        problem = ""
        if servers < 1:
            problem = f"servers={servers} is less than 1"
        elif not self.num_servers:
            problem = "the run has no parameter servers, or has not made its first step yet; see `strata status`"
        elif self.resizing is not None:
            problem = f"rows are still moving to {counted(self.num_servers, 'server')}; try again when they have"
        elif self.phase is not Phase.RUNNING or self._attempt_step is None or self._away:
            problem = "the run does not train at the moment; try again after its next step"
        if problem:
            raise ConfigError(problem, field="servers")

    def _resize(self, servers: int) -> list[Action]:
        before, first_new = self.num_servers, self.world_size
        num_added = servers - before
        self.layout += 1
        self.resizing = Resizing(before, servers, first_new, self.scaled_servers)
        self._set_servers(servers)
        self.wanted += num_added
        self.world_size += num_added
        text = f"from {before} to {counted(servers, 'parameter server')}; training continues"
        if num_added < 0:
            return [self._note("scaling", text), MoveRows(servers, self.layout)]
        new = tuple(range(first_new, self.world_size))
        self.running |= set(new)
        return [self._note("scaling", text), AddServers(self.attempt, new, before, self.layout)]

    def _set_servers(self, servers: int) -> None:
        """Change the number of servers; that of the workers stays within the same range."""
        num_added = servers - self.num_servers
        self.size = self.size.plus(num_added)
        self.only += num_added if self.only else 0
        self.num_servers = servers
        if num_added:
            self.scaled_servers = servers

    def resized(self, num_rows: int) -> list[Action]:
        """All ranks use the new number of servers, to which as many rows have moved."""
        self.resizing = None
        crew = process_counts(self.world_size, self.num_servers)
        return [self._note("scaling", f"{crew}; {counted(num_rows, 'row has', 'rows have')} moved")]

    def _end_resizing(self) -> list[Action]:
        """Return to the old number of servers, because the attempt has ended before all ranks used the new one."""
        if self.resizing is None:
            return []
        before, servers = self.resizing.num_before, self.resizing.num_servers
        self._set_servers(before)
        self.scaled_servers, self.resizing = self.resizing.scaled_before, None
        self.wanted += before - servers
        text = f"rows have not moved to {counted(servers, 'parameter server')}; continuing with {before}"
        return [self._note("scaling", text)]

    def _workers(self, processes: int) -> int:
        """Return how many of as many processes train."""
        return max(processes - self.num_servers, 0)

    def room_changed(self, room: int, why: str, *, now_s: float, must_move: bool = False) -> list[Action]:
        """Nodes have joined or left. Workers of a lost node have exited before; `must_move`: workers are on a node
        that is leaving and must move, even if other nodes have room for all of them.
        """
        self.room = room
        return [self._note("nodes", why), *self._fit(why, now_s, must_move=must_move)]

    @property
    def is_waiting(self) -> bool:
        """Whether the passing of time alone may lead to actions. Otherwise, `tick` need not be called."""
        return self._deadline_s < float("inf") or bool(self._away) or not self._doomed.isdisjoint(self.running)

    def tick(self, *, now_s: float) -> list[Action]:
        return self._at_deadline(now_s) or self._start_away(now_s) or self._kill_again(now_s)

    # -- decisions -------------------------------------------------------------------------------------------------

    def _at_deadline(self, now_s: float) -> list[Action]:
        if now_s < self._deadline_s:
            return []
        self._deadline_s = float("inf")
        if self.phase is Phase.WAITING:
            return self._start(now_s)
        if self.phase is Phase.SHORT:
            return self._finish("failed", f"{self._shortage()}, and no more became available in {self.min_wait_s:g} s")
        if self.phase is Phase.STOPPING and self.running:
            kind = "processes" if self.num_servers else "workers"
            late = f"{len(self.running)} of {self.world_size} {kind} did not stop within {self.grace_s:g} s"
            return self._kill_all(f"{late}: killing them")
        return []

    def _may_restart_alone(self, event: WorkerExit, now_s: float) -> bool:
        """Whether this failure leaves the other workers as they are, and the run can afford another restart."""
        is_own = event.is_failure and event.is_alone and not event.is_echo and event.rank not in self._doomed
        if not is_own or self.phase is not Phase.RUNNING or self.resizing is not None:
            return False
        return not self._refusal([*self._history, self._failure_of(event)], event, now_s)

    def _restart_alone(self, event: WorkerExit, now_s: float) -> list[Action]:
        rank = event.rank
        self._history.append(self._failure_of(event))
        self.num_restarts += 1
        self._num_idle_alone[rank] = 0 if rank in self._stepped else self._num_idle_alone.get(rank, 0) + 1
        self._stepped.discard(rank)
        self._incarnations[rank] = self._incarnations.get(rank, 0) + 1
        self._away[rank] = now_s + pause_s(self._num_idle_alone[rank])
        return [self._note("failed", self._describe(event), rank=rank), *self._start_away(now_s)]

    def _start_away(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for rank in sorted(rank for rank, at_s in self._away.items() if at_s <= now_s):
            del self._away[rank]
            self.running.add(rank)
            actions += [
                self._note("restarted", f"{self._name(rank)} alone; the others continue", rank=rank),
                StartWorker(self.attempt, rank, self._incarnations[rank]),
            ]
        return actions

    @property
    def _cannot_save(self) -> str:
        return f"{self._names(self._away)} cannot save while restarting"

    def _kill(self, ranks: Collection[int]) -> KillWorkers:
        self._doomed.update(ranks)
        self._kill_again_s = float("inf")  # the next tick starts the clock
        return KillWorkers(self.attempt, tuple(sorted(ranks)))

    def _kill_again(self, now_s: float) -> list[Action]:
        left = self._doomed & self.running
        if not left:
            return []
        if self._kill_again_s == float("inf"):
            self._kill_again_s = now_s + KILL_AGAIN_S
        if now_s < self._kill_again_s:
            return []
        text = f"{self._names(left)} did not exit within {KILL_AGAIN_S:g} s of being killed; killing again"
        return [self._note("ending", text), self._kill(left)]

    def _ask(self, note: Note, reason: str, now_s: float) -> list[Action]:
        self.phase = Phase.STOPPING
        self._deadline_s = now_s + self.grace_s
        return [note, AskToStop(reason)]

    def _kill_all(self, text: str) -> list[Action]:
        self._ended |= self.running
        self._away = {}
        return [self._note("stopping", text), self._kill(self.running)]

    def _fit(self, why: str, now_s: float, *, must_move: bool = False) -> list[Action]:
        """Restart if another number of workers is wanted or can be placed."""
        target = min(self._target, self.room)
        if self.phase is Phase.SHORT:
            return self._start(now_s) if target >= self._minimum else []
        if self.phase is not Phase.RUNNING or (target == self.world_size and not must_move):
            return []
        self._is_scaling = True
        if self._away and self.running:
            return self._kill_all(f"{f'{why}: ' if why else ''}{self._cannot_save}; killing the workers")
        how = self._shortage()
        if target >= self._minimum:
            crew = process_counts(target, self.num_servers)
            is_same = target == self.world_size
            how = f"moving {crew} to other nodes" if is_same else f"from {self._workers(self.world_size)} to {crew}"
        note = self._note("scaling", f"{f'{why}: ' if why else ''}{how}; saving a checkpoint first")
        return self._ask(note, why or f"scaling to {process_counts(target, self.num_servers)}", now_s)

    def _start(self, now_s: float) -> list[Action]:
        self.running, self._exits, self._hung = set(), {}, {}
        self._ended, self._signalled, self._doomed = set(), set(), set()
        self._incarnations, self._away, self._num_idle_alone, self._stepped = {}, {}, {}, set()
        self.cause, self._attempt_step, self._is_scaling = None, None, False
        notes, self.layout = self._end_resizing(), 0
        self._set_servers(self.wanted_servers or self.num_servers)
        self.wanted_servers = 0
        self._has_context, self._began_s = False, now_s
        world_size = min(self._target, self.room)
        if world_size < self._minimum:
            self.phase = Phase.SHORT
            self._deadline_s = now_s + self.min_wait_s
            text = f"{self._shortage()}; waiting up to {self.min_wait_s:g} s for more"
            return [*notes, self._note("waiting", text)]
        self.attempt += 1
        self.world_size = world_size
        self.phase = Phase.RUNNING
        self.running = set(range(world_size))
        self._deadline_s = float("inf")
        fewer = ""
        if self.only and world_size != self.wanted:
            fewer = f", not {self._workers(self.wanted)}: {PER_RANK}"
        elif world_size < self.wanted:
            fewer = f", not {self._workers(self.wanted)}: no more can be placed"
        crew = process_counts(world_size, self.num_servers)
        note = self._note("started", f"attempt {self.attempt} with {crew}{fewer}")
        return [*notes, note, StartAttempt(self.attempt, world_size)]

    @property
    def _target(self) -> int:
        return self.only or self.wanted

    @property
    def _minimum(self) -> int:
        return self.only or self.size.at_least

    def _shortage(self) -> str:
        why = f" ({PER_RANK})" if self.only else ""
        room, minimum = self._workers(self.room), self._workers(self._minimum)
        return f"only {room} of at least {minimum} workers can be placed{why}"

    def _note(self, what: NoteKind, text: str, *, rank: int | None = None) -> Note:
        return Note(what, text, self.attempt, rank)

    def _attempt_ended(self, now_s: float) -> list[Action]:
        self._deadline_s = float("inf")
        is_done = all(each.code == 0 for each in self._exits.values())
        if is_done and not self._signalled:  # even if they were asked to stop a moment before
            num_workers = self.world_size - self.num_servers
            return self._finish("done", f"{counted(num_workers, 'worker is', 'workers are')} done")
        notes = self._find_cause()
        if self._is_stop_wanted:
            return [*notes, *self._finish("stopped", self._describe_stop())]
        if self.cause is not None:
            return [*notes, *self._failed(self.cause, now_s)]
        if self._is_scaling:
            return self._start(now_s)
        return self._finish("stopped", "the workers were asked to stop and have saved")

    def _find_cause(self) -> list[Action]:
        """Look for the real cause: another node may report a death later than those that followed from it."""
        if self.cause is None or not self.cause.is_echo:
            return []
        for event in self._exits.values():
            is_own = not event.is_killed or event.rank in self._hung
            if event.is_failure and is_own and not event.is_echo:
                self.cause = self._with_reason(event)
                return [self._note("cause", self._describe(self.cause), rank=event.rank)]
        return []

    def _failed(self, cause: WorkerExit, now_s: float) -> list[Action]:
        self._num_idle = self._num_idle + 1 if self._attempt_step is None else 0
        self._history.append(Failure(cause.rank, cause.code, cause.last_words, self.saved_step, self._attempt_step))
        if refusal := self._refusal(self._history, cause, now_s):
            return self._finish("failed", f"{self._describe(cause)} ({refusal})")
        self.num_restarts += 1
        wait_s = pause_s(self._num_idle)
        if not wait_s:
            return self._start(now_s)
        self.phase = Phase.WAITING
        self._deadline_s = now_s + wait_s
        return [self._note("waiting", f"next attempt in {wait_s:g} s: the last one made no step")]

    def _failure_of(self, event: WorkerExit) -> Failure:
        """Describe the failure of one worker among others that continue, whose steps say nothing about it."""
        step = self._attempt_step if event.step is None else event.step
        return Failure(event.rank, event.code, event.last_words, self.saved_step, step)

    def _refusal(self, history: Sequence[Failure], cause: WorkerExit, now_s: float) -> str:
        """Return why the run ends with this failure, the last of `history`; empty if workers are started again."""
        if self._is_programming_error(cause, now_s):
            return "not retried: it would fail the same way"
        if is_input_at_fault(history, stride=self._stride):
            return f"{MAX_ALIKE} times in a row at the same step"
        if self.num_restarts == self.max_restarts:
            return f"all {counted(self.max_restarts, 'restart')} used" if self.max_restarts else "no restarts allowed"
        return ""

    def _is_programming_error(self, cause: WorkerExit, now_s: float) -> bool:
        if self._has_stepped or not (self._has_context or now_s - self._began_s < EARLY_S):
            return False
        return is_programming_error(cause.code, cause.last_words)

    def _describe(self, event: WorkerExit) -> str:
        return f"{self._name(event.rank)}: {event.how}"

    def _name(self, rank: int) -> str:
        return process_name(rank, world_size=self.world_size, num_servers=self.num_servers)

    def _names(self, ranks: Iterable[int]) -> str:
        """Return `ranks 0, 1, server 0`."""
        found = [self._name(rank) for rank in sorted(ranks)]
        num_ranks = sum(each.startswith("rank ") for each in found)
        return ", ".join(found) if num_ranks < 2 else f"ranks {', '.join(each.removeprefix('rank ') for each in found)}"

    def _with_reason(self, event: WorkerExit) -> WorkerExit:
        """Return the exit of a hung worker, which we have killed, with the reason for the kill."""
        return replace(event, last_words=self._hung.get(event.rank, event.last_words))

    def _describe_stop(self) -> str:
        codes = [each.code for each in self._exits.values()]
        if self.cause is not None:
            return f"{self._stop_reason}; no checkpoint was saved: {self._describe(self.cause)}"
        if all(code in (0, STOPPED) for code in codes):
            is_saved = not self._signalled or all(code == STOPPED for code in codes)
            return f"{self._stop_reason}; the workers {'have saved' if is_saved else 'exited on request'}"
        num_killed = sum(code not in (0, STOPPED, -signal.SIGTERM) for code in codes)
        if num_killed:
            return f"{self._stop_reason}; {num_killed} of {self.world_size} workers had to be killed"
        return f"{self._stop_reason}; the workers exited without saving a checkpoint"

    def _finish(self, outcome: Outcome, reason: str) -> list[Action]:
        self.phase = Phase.OVER
        return [Finish(outcome, reason)]
