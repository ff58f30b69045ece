"""When to save. Pure: what was saved so far and the time go in, a decision with its reason comes out.

A `Strategy` has no state and no clock. What it judges by is a `History`: the last few saves, when they began, how long
each held training up (the stall) and how long it was written. `Pacer` keeps that history and asks the clock.

Ranks of one job must decide alike. `EverySteps` does so by itself, since all count the same steps; where time decides,
one rank must decide for all, as no two clocks agree.
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
"""Saves that a history keeps. A stall that was an outlier is paid off over as many intervals."""
FIRST_S = 60.0
"""Until the first save of an adaptive strategy: nothing was measured yet."""


@dataclass(frozen=True, slots=True)
class Decision:
    save: bool
    reason: str

    def __bool__(self) -> bool:
        return self.save


@dataclass(frozen=True, slots=True, kw_only=True)
class PastSave:
    step: int
    began_s: float
    stall_s: float
    """How long training was held up."""
    write_s: float | None = None
    """From the end of the stall until it was durable, or had failed; None while it is being written."""

    @property
    def busy_s(self) -> float:
        """Of its interval, how long something was being done for it."""
        return self.stall_s + (self.write_s or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    last_step: int
    """The last one that is saved, or was restored; at the start the one before the first."""
    last_s: float
    """When that save began, or counting did."""
    saves: tuple[PastSave, ...] = ()
    """The last few and what they have cost, oldest first."""

    def with_save(self, save: PastSave) -> History:
        saves = (*self.saves, save)[-NUM_REMEMBERED:]
        return History(last_step=save.step, last_s=save.began_s, saves=saves)


class Strategy(Protocol):
    def decide(self, step: int, now_s: float, history: History) -> Decision:
        """Whether to save after `step`."""
        ...


@dataclass(frozen=True, slots=True)
class EverySteps:
    """At the multiples of a number of steps; after one that was passed over, at the next step that is asked about.

    So a job that was restored saves at the same steps as one that ran through.
    """

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"EverySteps({self.steps!r}) is not a number of steps; 1 is the least", field="steps")

    def decide(self, step: int, now_s: float, history: History) -> Decision:  # noqa: ARG002 - as the protocol has it
        reached = step // self.steps * self.steps
        if reached > 0 and reached > history.last_step:
            return Decision(True, f"step {reached} is a multiple of {self.steps}")
        return Decision(False, f"the next multiple of {self.steps} is step {reached + self.steps}")


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """So long after the last save has begun."""

    seconds: float

    def __post_init__(self) -> None:
        _require_seconds("EverySeconds", self.seconds, field="seconds")

    def decide(self, step: int, now_s: float, history: History) -> Decision:
        if step <= history.last_step:
            return Decision(False, f"step {step} is saved")
        past_s = now_s - history.last_s
        if past_s >= self.seconds:
            return Decision(True, f"the last save was {past_s:.1f} s ago, {self.seconds:g} s are wanted")
        return Decision(False, f"the next save is in {self.seconds - past_s:.1f} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive:
    """As often as it costs no more than a share of the time.

    The interval follows from what the last saves have cost:

    - Stalls take at most `max_overhead` of the time. Each is paid off over the next few intervals: their length is the
      mean of the last stalls over `max_overhead`. One slow save does not stop saving for long, and is still paid for.
    - Writing takes at most half of an interval, so saves never run back to back.
    - Never more often than every `min_s`, and at least every `max_s`, whatever it costs: then the reason says so. Only
      a save that is still being written is always waited for.
    """

    max_overhead: float = 0.01
    min_s: float = 10.0
    max_s: float = 3_600.0

    def __post_init__(self) -> None:
        if not 0 < self.max_overhead <= 1:
            raise ConfigError(
                f"max_overhead={self.max_overhead!r} is not a share of the time; 0.01 is one percent",
                field="max_overhead",
            )
        _require_seconds("min_s", self.min_s, field="min_s")
        if not self.max_s >= self.min_s:
            raise ConfigError(
                f"max_s={self.max_s!r} is less than min_s={self.min_s!r}; raise it to at least that", field="max_s"
            )

    def decide(self, step: int, now_s: float, history: History) -> Decision:
        writing = [save.step for save in history.saves if save.write_s is None]
        if writing:
            return Decision(False, f"the save of step {writing[-1]} is still being written")
        if step <= history.last_step:
            return Decision(False, f"step {step} is saved")
        wanted_s, why = self._interval(history)
        past_s = now_s - history.last_s
        if past_s < min(wanted_s, self.max_s):
            return Decision(False, f"the next save is in {min(wanted_s, self.max_s) - past_s:.1f} s: {why}")
        if past_s >= wanted_s:
            return Decision(True, f"the last save was {past_s:.1f} s ago, {wanted_s:.1f} s are wanted: {why}")
        told = f"the last save was {past_s:.1f} s ago, max_s={self.max_s:g}"
        return Decision(True, f"{told}; {wanted_s:.1f} s would keep to max_overhead: {why}")

    def _interval(self, history: History) -> tuple[float, str]:
        """From the beginning of the last save to that of the next one, and what it follows from."""
        if not history.saves:
            return min(max(FIRST_S, self.min_s), self.max_s), "nothing was measured yet"
        stall_s = math.fsum(save.stall_s for save in history.saves) / len(history.saves)
        last = history.saves[-1]
        return max(
            (self.min_s, f"min_s is {self.min_s:g} s"),
            (stall_s / self.max_overhead, f"a stall takes {stall_s:.3g} s, {self.max_overhead:.3g} of it are allowed"),
            (2 * last.busy_s, f"the last save took {last.busy_s:.3g} s, half of an interval at most"),
            key=lambda pair: pair[0],
        )


@dataclass(frozen=True, slots=True)
class Manual:
    """Never by itself."""

    def decide(self, step: int, now_s: float, history: History) -> Decision:  # noqa: ARG002 - as the protocol has it
        return Decision(False, "saved only when told to")


@dataclass(frozen=True, slots=True, init=False)
class AnyOf:
    """Whenever one of them wants to."""

    strategies: tuple[Strategy, ...]

    def __init__(self, *strategies: Strategy) -> None:
        if not strategies:
            raise ConfigError("AnyOf() has nothing to choose from; name at least one strategy", field="strategies")
        object.__setattr__(self, "strategies", strategies)

    def decide(self, step: int, now_s: float, history: History) -> Decision:
        decisions = [strategy.decide(step, now_s, history) for strategy in self.strategies]
        wanted = [decision.reason for decision in decisions if decision.save]
        return Decision(bool(wanted), "; ".join(wanted or [decision.reason for decision in decisions]))


def in_words(strategy: Strategy) -> str:
    """When it saves, for people."""
    match strategy:
        case EverySteps(steps):
            return f"every {steps} steps" if steps > 1 else "after every step"
        case EverySeconds(seconds):
            return f"every {seconds:g} s"
        case Adaptive():
            first_s = min(max(FIRST_S, strategy.min_s), strategy.max_s)
            bounds = f"every {strategy.min_s:g} to {strategy.max_s:g} s, first after {first_s:g} s"
            return f"as often as costs {strategy.max_overhead:.3g} of the time ({bounds})"
        case Manual():
            return "when the script says so"
        case AnyOf(strategies):
            return " and ".join(map(in_words, strategies))
        case _:
            return f"when {type(strategy).__name__} decides"


def not_before(strategy: Strategy, step: int) -> int:
    """A step before which it does not want to save, having declined at `step`; unless an earlier one is restored."""
    if isinstance(strategy, EverySteps):
        return (step // strategy.steps + 1) * strategy.steps
    if isinstance(strategy, AnyOf):
        return min(not_before(each, step) for each in strategy.strategies)
    return step + 1


class Pacer:
    """A strategy with the history that it judges by. Its methods may be called from any thread."""

    def __init__(self, strategy: Strategy, clock: Clock) -> None:
        self.strategy = strategy
        self._clock = clock
        self._lock = renewed(threading.Lock())
        self._history: History | None = None
        """None before the first step is known."""

    def should_save(self, step: int) -> Decision:
        """Whether to save after `step`. The first question, without a restored checkpoint, begins the count."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            if self._history is None:
                self._history = History(last_step=step - 1, last_s=now_s)
            history = self._history
        return self.strategy.decide(step, now_s, history)

    def restored(self, step: int) -> None:
        """The state of `step` is there already; time counts from now. What saves have cost is still known."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            self._history = History(last_step=step, last_s=now_s, saves=self._saves())

    def began(self, step: int, *, stall_s: float) -> None:
        """A save of `step` has just been staged; also one that nobody asked about before."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            self._add(PastSave(step=step, began_s=now_s - stall_s, stall_s=stall_s))

    def ended(self, step: int, *, write_s: float) -> None:
        """The save of `step` is durable, or has failed."""
        with self._lock:
            saves = list(self._saves())
            for number in reversed(range(len(saves))):
                if saves[number].step == step and saves[number].write_s is None:
                    saves[number] = dataclasses.replace(saves[number], write_s=write_s)
                    break
            if self._history is not None:
                self._history = dataclasses.replace(self._history, saves=tuple(saves))

    def saved(self, step: int, *, stall_s: float, write_s: float) -> None:
        """A save that has just become durable: `began` and `ended` in one."""
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
        raise ConfigError(f"{name}={value!r} is not a time in seconds; give a number above 0", field=field)
