"""Sampler and state machine of a study, joined: what a driver calls, and what a resumed study is rebuilt from.

A sampler that takes long answers on another thread while trials end. Outcomes are therefore collected, and passed on
just before the next question; the answer records how many the sampler knew of. A replay makes the same calls in the
same order, so a resumed study continues with the configuration that it would have tried without the interruption.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from strata.tune.samplers import FAILED, Outcome, make_sampler
from strata.tune.schedulers import make_scheduler
from strata.tune.space import SearchSpace
from strata.tune.space.neighbors import perturb
from strata.tune.state import events as e
from strata.tune.state.study import StudyState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from strata.tune.samplers import Sampler
    from strata.tune.schedulers import Scheduler
    from strata.tune.state.actions import Handled
    from strata.tune.state.trial import Trial

_FIRST_POINTS = 1
"""Distinguishes the random numbers of the first configurations from those of the sampler."""


class Search:
    """One study in memory. Belongs to one thread."""

    def __init__(self, spec: e.StudySpec, *, sampler: object = None) -> None:
        """
        Args:
            sampler: A sampler object of Optuna, instead of the one that `spec` names.

        Raises:
            ConfigError: The sampler or the scheduler does not fit the space, or needs a package that is missing.
        """
        self.space = SearchSpace.from_dict(spec.space)
        self.sampler: Sampler = make_sampler(
            spec.sampler if sampler is None else sampler, self.space, seed=spec.seed, directions=spec.directions
        )
        self.state = StudyState(spec, scheduler_of(spec, self.space))
        self._first = self.space.first_points(np.random.default_rng([spec.seed % 2**32, _FIRST_POINTS]))
        self._ended: list[int] = []
        """Trials that have ended, in this order."""
        self._num_told = 0
        self.listener: Callable[[Sequence[e.Event]], None] | None = None
        """Called with the facts of every event, for displays."""

    @classmethod
    def replay(cls, facts: Sequence[e.Event], *, sampler: object = None) -> Search:
        """Return the study that these facts lead to; the first one opens it."""
        opened = facts[0]
        assert isinstance(opened, e.Opened)
        search = cls(opened.spec, sampler=sampler)
        for fact in facts[1:]:
            search.state.apply(fact)
            search._collect(fact)
            if isinstance(fact, e.Asked):
                search._tell(fact.num_told)
                (search.sampler.add if fact.is_given else search.sampler.replay)(fact.trial, fact.config)
        return search

    def answer(self, trial: int) -> e.Asked | e.Exhausted:
        """Answer an `Ask`: one at a time, in the order of the actions, perhaps on another thread."""
        self._tell(len(self._ended))
        if trial < len(self._first):
            self.sampler.add(trial, self._first[trial])
            return e.Asked(trial=trial, config=self._first[trial], is_given=True, num_told=self._num_told)
        config = self.sampler.ask(trial)
        return (
            e.Exhausted(trial=trial) if config is None else e.Asked(trial=trial, config=config, num_told=self._num_told)
        )

    def handle(self, event: e.Event, *, now_s: float = 0.0) -> Handled:
        """Return what follows from an event; see `StudyState.handle`."""
        return self._collected(self.state.handle(event, now_s=now_s))

    def recover(self, *, now_s: float = 0.0) -> Handled:
        """Continue after a restart of the driver; see `StudyState.recover`."""
        return self._collected(self.state.recover(now_s=now_s))

    def _collected(self, handled: Handled) -> Handled:
        for fact in handled.facts:
            self._collect(fact)
        if self.listener is not None:
            self.listener(handled.facts)
        return handled

    def _collect(self, fact: e.Event) -> None:
        if isinstance(fact, e.Finished | e.Failed | e.Lost | e.Stopped | e.Pruned):
            trial = self.state.trials[fact.trial]
            if trial.is_over:
                self._ended.append(trial.number)

    def _tell(self, num_ended: int) -> None:
        """Report trials to the sampler, up to this number of all that have ended."""
        for number in self._ended[self._num_told : num_ended]:
            self.sampler.tell(number, _outcome(self.state.trials[number]))
        self._num_told = max(self._num_told, num_ended)


def _outcome(trial: Trial) -> Outcome:
    values = tuple(each for each in trial.values if each is not None and math.isfinite(each))
    if trial.state == "failed" or len(values) != len(trial.values):
        return FAILED
    return Outcome("finished" if trial.state == "finished" else "pruned", values, trial.step)


def scheduler_of(spec: e.StudySpec, space: SearchSpace) -> Scheduler:
    """
    Raises:
        ConfigError: The scheduler or one of its options is unknown.
    """
    return make_scheduler(
        spec.scheduler, spec.scheduler_options, perturb=lambda config, rng: perturb(space, config, rng), seed=spec.seed
    )
