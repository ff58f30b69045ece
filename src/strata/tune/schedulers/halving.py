"""Successive halving without waiting: ASHA, and Hyperband as several of its brackets.

A bracket has rungs at steps r, r·η, r·η², … At each rung a trial is compared with all that reached it before. There are
two kinds:

- *promote*: the trial pauses unless it is among the best 1/η so far. Whenever a slot is free, the best paused trial of
  the highest rung that has since come into the best 1/η is resumed from its checkpoint, before any new trial starts.
- *stop*: the trial ends unless it is among the best 1/η so far. No trial is resumed, so no checkpoint is needed; but an
  early trial is compared with few others, and may go on for too long.

Hyperband runs brackets that start at r, r·η, r·η², …: the later ones protect trials whose first losses mislead. A new
trial joins the bracket that lacks most of its share; each bracket has the share of trials that gives all of them about
the same number of steps.

With several objectives, "among the best 1/η" means that fewer than 1/η of the trials at the rung dominate it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from strata.errors import ConfigError
from strata.printing import counted
from strata.tune.schedulers.base import CONTINUE, Resume, Scheduler, StartNew, Verdict, Wait, check_compare
from strata.tune.schedulers.rungs import OrderedRung, ParetoRung

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from strata.tune.schedulers.base import Compare, Decision, Losses
    from strata.tune.schedulers.rungs import Rung
    from strata.tune.space.parameters import Config

Kind = Literal["promote", "stop"]
MAX_RUNGS = 64
MAX_BRACKETS = 8


@dataclass(slots=True)
class _Bracket:
    weight: float
    first_factor: int
    rungs: list[Rung] = field(default_factory=list)
    num_trials: int = 0


@dataclass(slots=True)
class _Place:
    bracket: int
    num_rungs: int = 0
    """Rungs that the trial has reached."""


class Halving(Scheduler):
    def __init__(
        self,
        *,
        kind: Kind = "promote",
        eta: int = 4,
        min_step: int | None = None,
        max_step: int | None = None,
        num_brackets: int = 1,
        compare: Compare = "dominance",
    ) -> None:
        """
        Args:
            eta: One of this number of trials goes on at each rung.
            min_step: Step of the first rung; default: the first step that any trial reports.
            max_step: No rung at this step or later; default: rungs up to the end of the longest trial.
            num_brackets: 1 is ASHA, more are Hyperband.
            compare: "first" looks only at the first of several objectives.

        Raises:
            ConfigError: A value is out of range.
        """
        if kind not in ("promote", "stop"):
            raise ConfigError(f"kind={kind!r} is unknown; use 'promote' or 'stop'", field="kind")
        if not 2 <= eta <= 100:
            raise ConfigError(f"eta={eta} must be between 2 and 100; 3 or 4 is usual", field="eta")
        if not 1 <= num_brackets <= MAX_BRACKETS:
            raise ConfigError(f"num_brackets={num_brackets} must be between 1 and {MAX_BRACKETS}", field="num_brackets")
        if min_step is not None and min_step < 1:
            raise ConfigError(f"min_step={min_step} must be 1 or more", field="min_step")
        if max_step is not None and max_step <= (min_step or 1):
            raise ConfigError(f"max_step={max_step} must be above min_step={min_step or 1}", field="max_step")
        check_compare(compare)
        self._kind = kind
        self._is_first_only = compare == "first"
        self._eta = eta
        self._min_step = min_step
        self._max_step = max_step
        last = num_brackets - 1
        self._brackets = [
            _Bracket(weight=eta ** (last - each) / (last - each + 1), first_factor=eta**each)
            for each in range(num_brackets)
        ]
        self._places: dict[int, _Place] = {}
        """Of all trials that have not ended."""

    def started(self, trial: int, config: Config) -> None:  # noqa: ARG002 - the port
        # The bracket that has the fewest trials for its weight.
        index = min(
            range(len(self._brackets)),
            key=lambda each: ((self._brackets[each].num_trials + 1) / self._brackets[each].weight, each),
        )
        self._brackets[index].num_trials += 1
        self._places[trial] = _Place(index)

    def reported(self, trial: int, step: int, losses: Losses, *, is_contended: bool) -> Verdict:  # noqa: ARG002
        if self._min_step is None:
            self._min_step = max(1, step)
        losses = losses[:1] if self._is_first_only else losses
        place = self._places[trial]
        bracket = self._brackets[place.bracket]
        rung = None
        while (below := self._next_step(bracket, place.num_rungs)) is not None and below <= step:
            if rung is not None:
                rung.promote(trial)  # one report has passed several rungs
            rung = self._rung(bracket, place.num_rungs, len(losses))
            rung.add(trial, losses)
            place.num_rungs += 1
        if rung is None:
            return CONTINUE
        return self._decide(rung, trial, losses)

    def resumed(self, trial: int, config: Config) -> None:  # noqa: ARG002
        place = self._places[trial]
        if place.num_rungs:
            self._brackets[place.bracket].rungs[place.num_rungs - 1].promote(trial)

    def ended(self, trial: int, *, is_failed: bool) -> None:
        place = self._places.pop(trial, None)
        if place is None:
            return
        rungs = self._brackets[place.bracket].rungs[: place.num_rungs]
        if is_failed:
            for rung in rungs:
                rung.remove(trial)
        elif rungs:
            rungs[-1].withdraw(trial)

    def choose(self, paused: Collection[int], running: Collection[int], *, has_new: bool) -> Decision:
        if self._kind == "promote" and paused:
            for rung in self._from_highest():
                trial = rung.best(rung.num_trials // self._eta, paused)
                if trial is not None:
                    return Resume(trial, rung.describe(trial))
        if has_new:
            return StartNew()
        return self._finish(paused, running)

    def _finish(self, paused: Collection[int], running: Collection[int]) -> Decision:
        """Without new trials, rungs with fewer than η trials would promote none: let the best of each go on, once no
        other trial can reach the rung.
        """
        coming = [MAX_RUNGS] * len(self._brackets)
        for number in running:
            place = self._places[number]
            coming[place.bracket] = min(coming[place.bracket], place.num_rungs)
        for index, bracket in enumerate(self._brackets):
            for rung in bracket.rungs[: coming[index]]:
                if rung.promoted or not rung.num_trials:
                    continue
                trial = rung.best(1, paused)
                if trial is not None:
                    return Resume(trial, f"the best of {counted(rung.num_trials, 'trial')} at step {rung.step}")
                break
        return Wait()

    def _decide(self, rung: Rung, trial: int, losses: Losses) -> Verdict:
        num_best = rung.num_trials // self._eta
        if self._kind == "stop":
            num_best = max(1, num_best)
        is_number = max(losses) < math.inf
        if rung.rank(trial) < num_best and is_number:
            rung.promote(trial)
            return CONTINUE
        what: Literal["stop", "pause"] = "stop" if self._kind == "stop" else "pause"
        if not is_number:
            return Verdict(what, f"its metric is not a number at step {rung.step}")
        return Verdict(what, f"{rung.describe(trial)}; the best 1/{self._eta} go on")

    def _next_step(self, bracket: _Bracket, index: int) -> int | None:
        assert self._min_step is not None
        step = self._min_step * bracket.first_factor * self._eta**index
        if index >= MAX_RUNGS or (self._max_step is not None and step >= self._max_step):
            return None
        return int(step)

    def _rung(self, bracket: _Bracket, index: int, num_objectives: int) -> Rung:
        if index == len(bracket.rungs):
            step = self._next_step(bracket, index)
            assert step is not None
            bracket.rungs.append(OrderedRung(step) if num_objectives == 1 else ParetoRung(step, num_objectives))
        return bracket.rungs[index]

    def _from_highest(self) -> Iterator[Rung]:
        rungs = [rung for bracket in self._brackets for rung in bracket.rungs]
        return iter(sorted(rungs, key=lambda rung: -rung.step))


def asha(
    *,
    kind: Kind = "promote",
    eta: int = 4,
    min_step: int | None = None,
    max_step: int | None = None,
    compare: Compare = "dominance",
) -> Halving:
    return Halving(kind=kind, eta=eta, min_step=min_step, max_step=max_step, compare=compare)


def hyperband(
    *,
    kind: Kind = "promote",
    eta: int = 3,
    min_step: int | None = None,
    max_step: int | None = None,
    num_brackets: int = 3,
    compare: Compare = "dominance",
) -> Halving:
    """Return Hyperband. With `min_step` and `max_step`, no bracket starts beyond the last rung that they allow."""
    if min_step is not None and max_step is not None and max_step > min_step and eta >= 2:
        num_brackets = min(num_brackets, max(1, math.ceil(math.log(max_step / min_step, eta))))
    return Halving(kind=kind, eta=eta, min_step=min_step, max_step=max_step, num_brackets=num_brackets, compare=compare)
