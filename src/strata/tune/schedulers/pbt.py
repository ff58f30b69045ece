"""Population based training: all trials train together, and poor ones continue from copies of good ones.

At every `interval` steps a trial is compared with the last losses of the others, by the first objective. One in the
worst quarter continues from the checkpoint of a trial in the best quarter, with a perturbed copy of its configuration.
If the population is larger than the number of slots, trials take turns, the one with the fewest steps first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strata.errors import ConfigError
from strata.tune.schedulers.base import CONTINUE, Resume, Scheduler, StartNew, Verdict, Wait

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from strata.tune.schedulers.base import Decision, Losses
    from strata.tune.space.parameters import Config

    Perturb = Callable[[Config, np.random.Generator], Config]


@dataclass(slots=True)
class _Member:
    config: Config
    step: int = 0
    loss: float = math.inf
    compared_at: int = 0
    """Step of the last comparison."""
    num_turns: int = 0
    has_ended: bool = False


class PopulationBased(Scheduler):
    def __init__(self, perturb: Perturb, *, seed: int, interval: int = 1, fraction: float = 0.25) -> None:
        """
        Args:
            perturb: Returns a configuration near another one.
            interval: Steps between two comparisons of a trial.
            fraction: Part of the population that is replaced, and part that is copied from.
        """
        if interval < 1:
            raise ConfigError(f"interval={interval} must be 1 step or more", field="interval")
        if not 0 < fraction <= 0.5:
            raise ConfigError(f"fraction={fraction} must be above 0 and at most 0.5", field="fraction")
        self._perturb = perturb
        self._seed = seed
        self._interval = interval
        self._fraction = fraction
        self._members: dict[int, _Member] = {}

    def started(self, trial: int, config: Config) -> None:
        self._members[trial] = _Member(config)

    def reported(self, trial: int, step: int, losses: Losses, *, is_contended: bool) -> Verdict:
        member = self._members[trial]
        member.step, member.loss = step, losses[0]
        if step < member.compared_at + self._interval:
            return CONTINUE
        member.compared_at = step
        if self._donors(trial):
            return Verdict("pause", f"among the worst {self._fraction:.0%} at step {step}")
        return Verdict("pause", f"the others take their turn at step {step}") if is_contended else CONTINUE

    def resumed(self, trial: int, config: Config) -> None:
        member = self._members[trial]
        member.config = config
        member.num_turns += 1

    def ended(self, trial: int, *, is_failed: bool) -> None:
        if is_failed:
            del self._members[trial]
        else:
            self._members[trial].has_ended = True

    def choose(self, paused: Collection[int], running: Collection[int], *, has_new: bool) -> Decision:  # noqa: ARG002
        if has_new:
            return StartNew()
        if not paused:
            return Wait()
        trial = min(paused, key=lambda each: (self._members[each].step, each))
        member = self._members[trial]
        donors = self._donors(trial)
        if not donors:
            return Resume(trial, f"its turn at step {member.step}")
        rng = np.random.default_rng([self._seed % 2**32, trial, member.num_turns])
        donor = donors[int(rng.integers(len(donors)))]
        config = self._perturb(self._members[donor].config, rng)
        return Resume(trial, f"continues from trial {donor}, which has a better loss", donor=donor, config=config)

    def _donors(self, trial: int) -> list[int]:
        """Return the best trials that still train, if this one is among the worst; else an empty list."""
        ranked = sorted((member.loss, number) for number, member in self._members.items() if member.step)
        num = max(1, int(len(ranked) * self._fraction))
        if len(ranked) < 2 or trial not in (number for _, number in ranked[-num:]):
            return []
        return [
            number
            for loss, number in ranked[:num]
            if loss < self._members[trial].loss and not self._members[number].has_ended
        ]
