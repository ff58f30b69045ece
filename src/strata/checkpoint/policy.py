"""When to save. Pure: the history of saves and the time in, a decision with its reason out.

Which checkpoints to keep is decided in `retention.py`.

A `Strategy` has no state and no clock. It decides by a `History`: when the last few saves began, how long each stalled
training, and how long it was written. `Pacer` keeps the history and reads the clock.

All ranks of a job must decide alike. `EverySteps` does, because all ranks count the same steps. A strategy that depends
on time must be evaluated on one rank for all, because no two clocks agree.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from strata.errors import ConfigError
from strata.lifecycle import renewed

if TYPE_CHECKING:
    from strata.clock import Clock

NUM_REMEMBERED = 8
"""The number of saves in a history. The cost of an outlier is spread over as many intervals."""
FIRST_S = 60.0
"""The interval before the first save of an adaptive strategy, which has no measurements yet."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to save, and why. True in an `if` when it is time to save."""

    save: bool
    reason: str

    def __bool__(self) -> bool:
        return self.save


@dataclass(frozen=True, slots=True, kw_only=True)
class PastSave:
    """A save and what it cost."""

    step: int
    began_s: float
    stall_s: float
    """How long training was stalled."""
    write_s: float | None = None
    """From the end of the stall until it was durable or failed; None while it is being written."""

    @property
    def busy_s(self) -> float:
        """The time spent on the save, by training and by the saver."""
        return self.stall_s + (self.write_s or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The recent saves."""

    last_step: int
    """The last step that was saved or restored; at first the step before the first one."""
    last_s: float
    """When that save or restore began, or the first decision was made."""
    saves: tuple[PastSave, ...] = ()
    """The last few saves, oldest first."""

    def with_save(self, save: PastSave) -> History:
        """Add a save and drop the oldest one beyond the limit."""
        saves = (*self.saves, save)[-NUM_REMEMBERED:]
        return History(last_step=save.step, last_s=save.began_s, saves=saves)


class Strategy(Protocol):
    """Decides when to save."""

    def decide(self, step: int, now_s: float, history: History) -> Decision:
        """Decide whether to save after `step`."""
        ...


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Save at multiples of a number of steps, or at the next step after a missed multiple.

    So a restored job saves at the same steps as one that was never interrupted.
    """

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"EverySteps({self.steps!r}) is invalid; use 1 or more steps", field="steps")

    def decide(self, step: int, now_s: float, history: History) -> Decision:  # noqa: ARG002 - required by the protocol
        reached = step // self.steps * self.steps
        if reached > 0 and reached > history.last_step:
            return Decision(True, f"step {reached} is a multiple of {self.steps}")
        return Decision(False, f"the next multiple of {self.steps} is step {reached + self.steps}")


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Save when this time has passed since the last save began."""

    seconds: float

    def __post_init__(self) -> None:
        _require_seconds("EverySeconds", self.seconds, field="seconds")

    def decide(self, step: int, now_s: float, history: History) -> Decision:
        if step <= history.last_step:
            return Decision(False, f"step {step} is already saved")
        past_s = now_s - history.last_s
        if past_s >= self.seconds:
            return Decision(True, f"the last save was {past_s:.1f} s ago, the interval is {self.seconds:g} s")
        return Decision(False, f"the next save is in {self.seconds - past_s:.1f} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive:
    """Save as often as possible while stalls cost at most a share of the training time.

    The interval follows from the cost of the last saves:

    - Stalls take at most `max_overhead` of the time: the interval is the mean of the last stalls divided by
      `max_overhead`. One slow save is thus paid off over several intervals and does not stop saving for long.
    - Writing takes at most half of an interval, so saves never run back to back.
    - The interval is at least `min_s` and at most `max_s`, whatever a save costs; the reason names the limit. A save
      that is still being written is always waited for.
    """

    max_overhead: float = 0.01
    min_s: float = 10.0
    max_s: float = 3_600.0

    def __post_init__(self) -> None:
        if not 0 < self.max_overhead <= 1:
            raise ConfigError(
                f"max_overhead={self.max_overhead!r} is not a share between 0 and 1; 0.01 is one percent",
                field="max_overhead",
            )
        _require_seconds("min_s", self.min_s, field="min_s")
        if not self.max_s >= self.min_s:
            raise ConfigError(
                f"max_s={self.max_s!r} is less than min_s={self.min_s!r}; raise max_s or lower min_s", field="max_s"
            )

    def decide(self, step: int, now_s: float, history: History) -> Decision:
        writing = [save.step for save in history.saves if save.write_s is None]
        if writing:
            return Decision(False, f"the save of step {writing[-1]} is still being written")
        if step <= history.last_step:
            return Decision(False, f"step {step} is already saved")
        wanted_s, why = self._interval(history)
        past_s = now_s - history.last_s
        if past_s < min(wanted_s, self.max_s):
            return Decision(False, f"the next save is in {min(wanted_s, self.max_s) - past_s:.1f} s: {why}")
        if past_s >= wanted_s:
            return Decision(True, f"the last save was {past_s:.1f} s ago, the interval is {wanted_s:.1f} s: {why}")
        reason = f"the last save was {past_s:.1f} s ago, max_s={self.max_s:g}"
        return Decision(True, f"{reason}; max_overhead would allow one every {wanted_s:.1f} s: {why}")

    def _interval(self, history: History) -> tuple[float, str]:
        """Return the time from the start of the last save to that of the next one, and its reason."""
        if not history.saves:
            return min(max(FIRST_S, self.min_s), self.max_s), "no save was measured yet"
        stall_s = math.fsum(save.stall_s for save in history.saves) / len(history.saves)
        last = history.saves[-1]
        return max(
            (self.min_s, f"min_s is {self.min_s:g} s"),
            (stall_s / self.max_overhead, f"a stall takes {stall_s:.3g} s, max_overhead is {self.max_overhead:.3g}"),
            (2 * last.busy_s, f"the last save took {last.busy_s:.3g} s, at most half of an interval"),
            key=lambda pair: pair[0],
        )


@dataclass(frozen=True, slots=True)
class Manual:
    """Never save automatically."""

    def decide(self, step: int, now_s: float, history: History) -> Decision:  # noqa: ARG002 - required by the protocol
        return Decision(False, "the script calls save() itself")


@dataclass(frozen=True, slots=True, init=False)
class AnyOf:
    """Save when any of several strategies does."""

    strategies: tuple[Strategy, ...]

    def __init__(self, *strategies: Strategy) -> None:
        if not strategies:
            raise ConfigError("AnyOf() has no strategies; pass at least one", field="strategies")
        object.__setattr__(self, "strategies", strategies)

    def decide(self, step: int, now_s: float, history: History) -> Decision:
        decisions = [strategy.decide(step, now_s, history) for strategy in self.strategies]
        wanted = [decision.reason for decision in decisions if decision.save]
        return Decision(bool(wanted), "; ".join(wanted or [decision.reason for decision in decisions]))


def in_words(strategy: Strategy) -> str:
    """Describe when a strategy saves."""
    match strategy:
        case EverySteps(steps):
            return f"every {steps} steps" if steps > 1 else "after every step"
        case EverySeconds(seconds):
            return f"every {seconds:g} s"
        case Adaptive():
            first_s = min(max(FIRST_S, strategy.min_s), strategy.max_s)
            bounds = f"every {strategy.min_s:g} to {strategy.max_s:g} s, first after {first_s:g} s"
            return f"as often as {strategy.max_overhead:.3g} overhead allows ({bounds})"
        case Manual():
            return "when the script calls save()"
        case AnyOf(strategies):
            return " and ".join(map(in_words, strategies))
        case _:
            return f"when {type(strategy).__name__} decides"


def not_before(strategy: Strategy, step: int) -> int:
    """Return the next step at which a strategy that declined at `step` may save, unless an earlier step is restored."""
    if isinstance(strategy, EverySteps):
        return (step // strategy.steps + 1) * strategy.steps
    if isinstance(strategy, AnyOf):
        return min(not_before(each, step) for each in strategy.strategies)
    return step + 1


class Pacer:
    """A strategy and its history. Thread-safe."""

    def __init__(self, strategy: Strategy, clock: Clock) -> None:
        self.strategy = strategy
        self._clock = clock
        self._lock = renewed(threading.Lock())
        self._history: History | None = None
        """None before the first step."""

    def should_save(self, step: int) -> Decision:
        """Decide whether to save after `step`. Without a restored checkpoint, the first call starts the interval."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            if self._history is None:
                self._history = History(last_step=step - 1, last_s=now_s)
            history = self._history
        return self.strategy.decide(step, now_s, history)

    def restored(self, step: int) -> None:
        """Note that `step` was restored: the interval starts now. The costs of earlier saves are kept."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            self._history = History(last_step=step, last_s=now_s, saves=self._saves())

    def began(self, step: int, *, stall_s: float) -> None:
        """Note that a save of `step` has just been staged, whether or not the strategy asked for it."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            self._add(PastSave(step=step, began_s=now_s - stall_s, stall_s=stall_s))

    def ended(self, step: int, *, write_s: float) -> None:
        """Note that the save of `step` is durable or has failed."""
        with self._lock:
            saves = list(self._saves())
            for number in reversed(range(len(saves))):
                if saves[number].step == step and saves[number].write_s is None:
                    saves[number] = dataclasses.replace(saves[number], write_s=write_s)
                    break
            if self._history is not None:
                self._history = dataclasses.replace(self._history, saves=tuple(saves))

    def saved(self, step: int, *, stall_s: float, write_s: float) -> None:
        """Note a save that has just become durable: `began` and `ended` in one."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            self._add(PastSave(step=step, began_s=now_s - stall_s - write_s, stall_s=stall_s, write_s=write_s))

    def _add(self, save: PastSave) -> None:
        history = self._history or History(last_step=save.step, last_s=save.began_s)
        self._history = history.with_save(save)

    def _saves(self) -> tuple[PastSave, ...]:
        return self._history.saves if self._history is not None else ()


def _require_seconds(name: str, value: float, *, field: str) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name}={value!r} is invalid; use a number of seconds above 0", field=field)
