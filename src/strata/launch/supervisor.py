"""What follows from what happens to the workers of a run. A machine without I/O: events in, orders out.

Workers run in attempts, all of them together. One that fails ends its attempt: a collective that has lost a member
cannot be mended from inside. The next attempt begins at once if the last one made progress, later if it did not, and
not at all if the same worker fails at the same place with the same words again and again, or if it is a mistake in the
program that shows before the first step. It has as many workers as there is room for; while that is less than the
least, it waits.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from strata.errors import ConfigError
from strata.launch.environment import STOPPED
from strata.launch.mistakes import is_mistake
from strata.launch.spec import ANY_NUMBER, PER_RANK, not_divisible
from strata.printing import counted

if TYPE_CHECKING:
    from collections.abc import Collection

    from strata.launch.spec import Size

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 30.0
END_AGAIN_S = 30.0
"""Who was killed and is not known to have ended by then is killed again: the order, or the news, may have been lost."""
EARLY_S = 60.0
"""A script that does not report steps has hardly made one by then."""
MAX_ALIKE = 3
"""Failures at the same place, of the same rank, with the same last words: it is the input, not the machine."""
_ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
"""What gloo, NCCL and sockets say of a peer that has died."""
_BY_SIGNAL = {"Ctrl-C": 128 + signal.SIGINT, "SIGTERM": 128 + signal.SIGTERM, "SIGHUP": 128 + signal.SIGTERM}
"""Exit codes, by the reason that a stop was asked for with."""
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes that say nothing of the program."""


# -- what happens ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker's process has ended."""

    rank: int
    code: int
    """Below 0: the signal that ended it."""
    last_words: str = ""
    """The last line of its log, which for Python is the exception."""

    @property
    def is_failure(self) -> bool:
        return self.code not in (0, STOPPED)

    @property
    def is_echo(self) -> bool:
        """Whether it died of another's death, as its last words tell: the connection to a peer was closed."""
        return any(sign in self.last_words for sign in _ECHOES)

    @property
    def in_words(self) -> str:
        if self.code >= 0:
            how = f"exit code {self.code}"
        else:
            try:
                how = f"killed by {signal.Signals(-self.code).name}"
            except ValueError:
                how = f"killed by signal {-self.code}"
        return f"rank {self.rank}: {how}" + (f": {self.last_words}" if self.last_words else "")


Told = Literal["started", "failed", "hung", "ending", "stopping", "scaling", "waiting", "nodes", "cause"]


# -- what to do --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Begin an attempt."""

    attempt: int
    world_size: int


@dataclass(frozen=True, slots=True)
class AskToStop:
    """Let the workers agree on a step, save there and exit."""

    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """Kill these workers now, with all that they have started."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DumpStacks:
    """Write down where these workers stand, before they are killed."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tell:
    """For the timeline and the terminal."""

    what: Told
    text: str
    attempt: int
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    outcome: Literal["done", "stopped", "failed"]
    reason: str

    @property
    def exit_code(self) -> int:
        """Of `strata run`: as shells expect it of a program that a signal has ended."""
        if self.outcome == "stopped":
            return next((code for said, code in _BY_SIGNAL.items() if self.reason.startswith(said)), 0)
        return 0 if self.outcome == "done" else 1


Order = Start | AskToStop | End | DumpStacks | Tell | Finish


class Phase(enum.Enum):
    NEW = "new"
    RUNNING = "running"
    ENDING = "ending"
    """One has failed; the others are being killed."""
    WAITING = "waiting"
    """Before the next attempt."""
    SHORT = "waiting for room"
    """There is room for fewer workers than the least."""
    STOPPING = "stopping"
    """The workers save and exit."""
    OVER = "over"


@dataclass(frozen=True, slots=True)
class _Failure:
    rank: int
    code: int
    last_words: str
    saved_step: int
    step: int | None
    """The last that was seen: the one it failed at, or a little before. None: none was."""


@dataclass(slots=True)
class Supervisor:
    size: Size
    max_restarts: int
    grace_s: float
    min_wait_s: float = 300.0
    room: int = ANY_NUMBER
    """For how many workers there is a place."""
    only: int = 0
    """The number of workers that alone can go on, as a loader's state is each rank's own; 0: any that `size` allows."""
    phase: Phase = Phase.NEW
    attempt: int = -1
    world_size: int = 0
    """Of this attempt."""
    wanted: int = 0
    """Of the next one."""
    running: set[int] = field(default_factory=set)
    num_restarts: int = 0
    step: int = 0
    """The last that a worker has told of, in any attempt."""
    saved_step: int = 0
    """Of the last checkpoint that is known."""
    cause: Exited | None = None
    """What ended this attempt: the first to fail, not those that died of it."""
    _exits: dict[int, Exited] = field(default_factory=dict)
    _hung: dict[int, str] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    """Workers that had to be killed although nothing was wrong with them: that they end so is no failure."""
    _signalled: set[int] = field(default_factory=set)
    """Workers that were asked to stop by a signal alone, which cannot say that they have. From them 0 means that they
    have obeyed, not that their work is done.
    """
    _doomed: set[int] = field(default_factory=set)
    """Workers that were ordered to be killed, for whatever reason."""
    _end_again_s: float = float("inf")
    _history: list[_Failure] = field(default_factory=list)
    _has_context: bool = False
    """Whether a worker of this attempt has called `strata.init()`: then it is known whether it has made a step."""
    _has_stepped: bool = False
    """Whether a worker has ever made a step, so that the program is known to work."""
    _began_s: float = 0.0
    """When this attempt was started."""
    _num_idle: int = 0
    """Failures in a row without a step between them."""
    _attempt_step: int | None = None
    """The last step of this attempt; None before its first."""
    _stride: int = 1
    """The most steps between two looks: so exactly is known at which one a worker failed."""
    _deadline_s: float = float("inf")
    _is_stop_wanted: bool = False
    _is_scaling: bool = False
    """The workers were asked to stop so that others begin, perhaps as many as before."""
    _stop_reason: str = ""

    def begin(self, *, now_s: float) -> list[Order]:
        self.wanted = self.wanted or self.size.at_most
        if self.only and not self.size.allows(self.only):
            return self._finish("failed", not_divisible(self.size, self.only))
        return self._start(now_s)

    # -- events ----------------------------------------------------------------------------------------------------

    def advanced(self, step: int) -> None:
        """Some worker has made this step."""
        self._has_stepped = True
        if self._attempt_step is not None:
            self._stride = max(self._stride, step - self._attempt_step)
        self._attempt_step = max(step, self._attempt_step or 0)
        self.step = max(step, self.step)

    def joined(self) -> None:
        """Some worker of this attempt has called `strata.init()`."""
        self._has_context = True

    def saved(self, step: int) -> None:
        """There is a checkpoint of this step."""
        self.saved_step = max(step, self.saved_step)

    def exited(self, event: Exited, *, now_s: float) -> list[Order]:
        if event.rank not in self.running:
            return []
        self.running.discard(event.rank)
        self._exits[event.rank] = event
        orders: list[Order] = []
        obeyed = self.phase is Phase.STOPPING and event.code == -signal.SIGTERM  # a script that knows nothing of us
        is_meant = obeyed or event.rank in self._ended
        if event.is_failure and not is_meant and self.phase in (Phase.RUNNING, Phase.STOPPING) and self.cause is None:
            self.cause = self._with_reason(event)
            orders.append(self._tell("failed", self.cause.in_words, rank=event.rank))
            if self.phase is Phase.RUNNING:
                self.phase = Phase.ENDING
            if self.running:
                orders.append(self._end(self.running))
        if self.running:
            return orders
        return orders + self._attempt_ended(now_s)

    def signalled(self, ranks: Collection[int]) -> None:
        """These have no context, and know of the stop only by a signal."""
        self._signalled |= self.running & set(ranks)

    def hung(self, ranks: Collection[int], silent_s: float) -> list[Order]:
        """Workers make no more steps: one that hangs and, mostly, those that wait for it; their stacks tell which."""
        found = sorted(rank for rank in ranks if rank in self.running and rank not in self._hung)
        if self.phase is not Phase.RUNNING or not found:
            return []
        self._hung.update(dict.fromkeys(found, f"no step for {silent_s:.0f} s"))
        which = f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
        text = f"no step for {silent_s:.0f} s on {which}; where they stand is in their logs"
        return [self._tell("hung", text), DumpStacks(tuple(found)), self._end(found)]

    def stop(self, reason: str, *, now_s: float, is_now: bool = False) -> list[Order]:
        """Asked once, the workers save first; asked again, or with `is_now`, they do not."""
        if self.phase is Phase.OVER:
            return []
        again = self._is_stop_wanted
        self._is_stop_wanted, self._stop_reason = True, reason
        if not self.running:
            return self._finish("stopped", reason)
        if is_now or again or self.phase is Phase.ENDING:
            return self._end_all(f"{reason}: at once")
        return self._ask(self._tell("stopping", f"{reason}: the workers save first"), reason, now_s)

    def scale(self, workers: int, *, now_s: float) -> list[Order]:
        """Another number of workers, from the next step on.

        Raises:
            ConfigError: Outside the allowed range, or no other number can go on.
        """
        if self.only and workers != self.only:
            raise ConfigError(not_divisible(workers, self.only), field="workers")
        if not self.size.allows(workers):
            raise ConfigError(
                f"{workers} workers are not within {self.size}, which the run was started with; "
                f"resume it with --workers that allow for {workers}",
                field="workers",
            )
        self.wanted = workers
        return self._fit("", now_s)

    def room_changed(self, room: int, why: str, *, now_s: float, must_move: bool = False) -> list[Order]:
        """Nodes have come or gone. Workers of those that are gone have exited before; those of one that is leaving
        must move, also if there is room for all of them elsewhere.
        """
        self.room = room
        return [self._tell("nodes", why), *self._fit(why, now_s, must_move=must_move)]

    def tick(self, *, now_s: float) -> list[Order]:
        return self._at_deadline(now_s) or self._end_again(now_s)

    # -- within ----------------------------------------------------------------------------------------------------

    def _at_deadline(self, now_s: float) -> list[Order]:
        if now_s < self._deadline_s:
            return []
        self._deadline_s = float("inf")
        if self.phase is Phase.WAITING:
            return self._start(now_s)
        if self.phase is Phase.SHORT:
            return self._finish("failed", f"{self._shortage()} and no more came within {self.min_wait_s:g} s")
        if self.phase is Phase.STOPPING and self.running:
            late = f"{len(self.running)} of {self.world_size} workers did not stop within {self.grace_s:g} s"
            return self._end_all(f"{late}: at once")
        return []

    def _end(self, ranks: Collection[int]) -> End:
        self._doomed.update(ranks)
        self._end_again_s = float("inf")  # the next tick begins to count
        return End(tuple(sorted(ranks)))

    def _end_again(self, now_s: float) -> list[Order]:
        """Nobody waits in silence for workers that were to be killed."""
        left = self._doomed & self.running
        if not left:
            return []
        if self._end_again_s == float("inf"):
            self._end_again_s = now_s + END_AGAIN_S
        if now_s < self._end_again_s:
            return []
        which = f"rank{'s' if len(left) > 1 else ''} {', '.join(map(str, sorted(left)))}"
        text = f"killed {END_AGAIN_S:g} s ago, and not known to have ended: {which}; killed again"
        return [self._tell("ending", text), self._end(left)]

    def _ask(self, tell: Tell, reason: str, now_s: float) -> list[Order]:
        self.phase = Phase.STOPPING
        self._deadline_s = now_s + self.grace_s
        return [tell, AskToStop(reason)]

    def _end_all(self, text: str) -> list[Order]:
        self._ended |= self.running
        return [self._tell("stopping", text), self._end(self.running)]

    def _fit(self, why: str, now_s: float, *, must_move: bool = False) -> list[Order]:
        """To what is wanted and to the room that there is."""
        target = min(self._target, self.room)
        if self.phase is Phase.SHORT:
            return self._start(now_s) if target >= self._at_least else []
        if self.phase is not Phase.RUNNING or (target == self.world_size and not must_move):
            return []
        self._is_scaling = True
        how = self._shortage()
        if target >= self._at_least:
            same = target == self.world_size
            workers = counted(target, "worker")
            how = f"{workers} as before, elsewhere" if same else f"from {self.world_size} to {workers}"
        tell = self._tell("scaling", f"{f'{why}: ' if why else ''}{how}: they save first")
        return self._ask(tell, why or f"scaling to {counted(target, 'worker')}", now_s)

    def _start(self, now_s: float) -> list[Order]:
        self.running, self._exits, self._hung = set(), {}, {}
        self._ended, self._signalled, self._doomed = set(), set(), set()
        self.cause, self._attempt_step, self._is_scaling = None, None, False
        self._has_context, self._began_s = False, now_s
        world_size = min(self._target, self.room)
        if world_size < self._at_least:
            self.phase = Phase.SHORT
            self._deadline_s = now_s + self.min_wait_s
            return [self._tell("waiting", f"{self._shortage()}; waiting up to {self.min_wait_s:g} s for more")]
        self.attempt += 1
        self.world_size = world_size
        self.phase = Phase.RUNNING
        self.running = set(range(world_size))
        self._deadline_s = float("inf")
        plural = "s" if world_size > 1 else ""
        fewer = ""
        if self.only and world_size != self.wanted:
            fewer = f", not {self.wanted}: {PER_RANK}"
        elif world_size < self.wanted:
            fewer = f" of {self.wanted} wanted: there is no room for more"
        tell = self._tell("started", f"attempt {self.attempt} with {world_size} worker{plural}{fewer}")
        return [tell, Start(self.attempt, world_size)]

    @property
    def _target(self) -> int:
        return self.only or self.wanted

    @property
    def _at_least(self) -> int:
        return self.only or self.size.at_least

    def _shortage(self) -> str:
        why = f" ({PER_RANK})" if self.only else ""
        return f"there is room for {self.room} of at least {self._at_least} workers{why}"

    def _tell(
        self,
        what: Told,
        text: str,
        *,
        rank: int | None = None,
    ) -> Tell:
        return Tell(what, text, self.attempt, rank)

    def _attempt_ended(self, now_s: float) -> list[Order]:
        self._deadline_s = float("inf")
        is_done = all(each.code == 0 for each in self._exits.values())
        if is_done and not self._signalled:  # also if they were asked to stop a moment before
            plural = "workers are" if self.world_size > 1 else "worker is"
            return self._finish("done", f"{self.world_size} {plural} done")
        told = self._find_cause()
        if self._is_stop_wanted:
            return [*told, *self._finish("stopped", self._stopped_how())]
        if self.cause is not None:
            return [*told, *self._failed(self.cause, now_s)]
        if self._is_scaling:
            return self._start(now_s)
        return self._finish("stopped", "the workers were asked to stop and have saved")

    def _find_cause(self) -> list[Order]:
        """From another node the news of a death may come later than that of those who died of it."""
        if self.cause is None or not self.cause.is_echo:
            return []
        for event in self._exits.values():
            if event.is_failure and not event.is_echo and event.code != -signal.SIGKILL:  # which may be our doing
                self.cause = self._with_reason(event)
                return [self._tell("cause", self.cause.in_words, rank=event.rank)]
        return []

    def _failed(self, cause: Exited, now_s: float) -> list[Order]:
        progressed = self._attempt_step is not None
        self._num_idle = 0 if progressed else self._num_idle + 1
        self._history.append(_Failure(cause.rank, cause.code, cause.last_words, self.saved_step, self._attempt_step))
        if self._is_mistake(cause, now_s):
            return self._finish("failed", f"{cause.in_words} (not retried: it would fail the same way)")
        if self._is_its_input():
            return self._finish("failed", f"{cause.in_words} ({MAX_ALIKE} times in a row at the same place)")
        if self.num_restarts == self.max_restarts:
            number = "1 restart is" if self.max_restarts == 1 else f"{self.max_restarts} restarts are"
            spent = f"{number} spent" if self.max_restarts else "no restarts are allowed"
            return self._finish("failed", f"{cause.in_words} ({spent})")
        self.num_restarts += 1
        pause_s = min(FIRST_PAUSE_S * 2 ** (self._num_idle - 1), LONGEST_PAUSE_S) if self._num_idle else 0.0
        if not pause_s:
            return self._start(now_s)
        self.phase = Phase.WAITING
        self._deadline_s = now_s + pause_s
        return [self._tell("waiting", f"{pause_s:g} s until the next attempt: the last one made no step")]

    def _is_mistake(self, cause: Exited, now_s: float) -> bool:
        if self._has_stepped or not (self._has_context or now_s - self._began_s < EARLY_S):
            return False
        return is_mistake(cause.code, cause.last_words)

    def _is_its_input(self) -> bool:
        last = self._history[-MAX_ALIKE:]
        if len(last) < MAX_ALIKE or last[0].code in _FROM_OUTSIDE:
            return False
        if len({(each.rank, each.code, each.last_words, each.saved_step) for each in last}) > 1:
            return False
        steps = [each.step for each in last if each.step is not None]
        return not steps or max(steps) - min(steps) <= 2 * self._stride

    def _with_reason(self, event: Exited) -> Exited:
        """A hung worker was killed by us; why is what counts."""
        return Exited(event.rank, event.code, self._hung.get(event.rank, event.last_words))

    def _stopped_how(self) -> str:
        codes = [each.code for each in self._exits.values()]
        if self.cause is not None:
            return f"{self._stop_reason}; without a last checkpoint: {self.cause.in_words}"
        if all(code in (0, STOPPED) for code in codes):
            is_saved = not self._signalled or all(code == STOPPED for code in codes)
            how = "saved" if is_saved else "ended as they were asked to"
            return f"{self._stop_reason}; the workers have {how}"
        num_killed = sum(code not in (0, STOPPED, -signal.SIGTERM) for code in codes)
        if num_killed:
            return f"{self._stop_reason}; {num_killed} of {self.world_size} workers had to be killed"
        return f"{self._stop_reason}; the workers have ended, without a last checkpoint"

    def _finish(self, outcome: Literal["done", "stopped", "failed"], reason: str) -> list[Order]:
        self.phase = Phase.OVER
        return [Finish(outcome, reason)]
