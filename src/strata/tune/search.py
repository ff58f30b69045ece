"""Sampler and state machine of a study, joined: what a driver calls, and what a resumed study is rebuilt from.

A sampler that takes long answers on another thread while trials end. Outcomes are therefore collected, and passed on
just before the next question: those that were known when the question arose, however long it waits for its turn. The
answer records their number. A replay makes the same calls in the same order, so a resumed study continues with the
configuration that it would have tried without the interruption.
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
    from strata.tune.state.trial import TrialState
    from strata.tune.state.watch import Watch

_FIRST_POINTS = 1
"""Distinguishes the random numbers of the first configurations from those of the sampler."""


class Search:
    """One study in memory. Belongs to one thread."""

    def __init__(self, spec: e.StudySpec, *, sampler: object = None, pruner: object = None) -> None:
        """
        Args:
            sampler: A sampler object of Optuna, instead of the one that `spec` names.
            pruner: A pruner object of Optuna, instead of the scheduler that `spec` names.

        Raises:
            ConfigError: The sampler or the scheduler does not fit the space, or needs a package that is missing.
        """
        self.space = SearchSpace.from_dict(spec.space)
        self.sampler: Sampler = make_sampler(
            spec.sampler if sampler is None else sampler,
            self.space,
            seed=spec.seed,
            directions=spec.directions,
            num_trials=spec.num_trials,
        )
        self.state = StudyState(spec, scheduler_of(spec, self.space, pruner))
        self._first = self.space.first_points(np.random.default_rng([spec.seed % 2**32, _FIRST_POINTS]))
        self._ended: list[tuple[int, Outcome]] = []
        """Trials that have ended or paused, in this order. One that pauses may end later: then it is in here again."""
        self._num_told = 0
        self.watch: Watch | None = None
        """Decides which trials have been silent for too long."""
        self.observers: list[Callable[[Sequence[e.Event]], None]] = []
        """Called with the facts of an event after its actions were carried out."""
        self._num_known: dict[int, int] = {}
        """Open question → outcomes that were known when it arose."""

    @classmethod
    def replay(cls, facts: Sequence[e.Event], *, sampler: object = None, pruner: object = None) -> Search:
        """Return the study that these facts lead to; the first one opens it."""
        opened = facts[0]
        assert isinstance(opened, e.Opened)
        search = cls(opened.spec, sampler=sampler, pruner=pruner)
        for fact in facts[1:]:
            search.state.apply(fact)
            search._collect(fact)
            if isinstance(fact, e.Asked):
                search._num_known.pop(fact.trial, None)
                search._tell(fact.num_told)
                (search.sampler.add if fact.is_given else search.sampler.replay)(fact.trial, fact.config)
        return search

    def answer(self, trial: int) -> e.Asked | e.Exhausted:
        """Answer an `Ask`: one at a time, in the order of the actions, perhaps on another thread."""
        self._tell(self._num_known.pop(trial))
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

    def carried_out(self, facts: Sequence[e.Event], *, now_s: float) -> None:
        """Take note that the actions which follow from these facts were carried out, at a monotonic time."""
        if self.watch is not None:
            self.watch.note(facts, now_s=now_s)
        for observer in self.observers:
            observer(facts)

    def _collected(self, handled: Handled) -> Handled:
        for fact in handled.facts:
            self._collect(fact)
        return handled

    def _collect(self, fact: e.Event) -> None:
        if isinstance(fact, e.Asking):
            self._num_known[fact.trial] = len(self._ended)
        elif isinstance(fact, e.Known):
            number = -self.state.num_known  # the study's own trials count from 0
            self.sampler.add(number, dict(fact.config))
            self.sampler.tell(number, self._outcome_of("finished", fact.values, None))
        elif isinstance(fact, e.Finished | e.Failed | e.Lost | e.Stopped | e.Pruned):
            trial = self.state.trials[fact.trial]
            if trial.is_over or trial.state == "paused":
                self._ended.append((trial.number, self._outcome_of(trial.state, trial.values, trial.step)))

    def _tell(self, num_ended: int) -> None:
        """Report outcomes to the sampler, up to this number of all."""
        for number, outcome in self._ended[self._num_told : num_ended]:
            self.sampler.tell(number, outcome)
        self._num_told = max(self._num_told, num_ended)

    def _outcome_of(self, state: TrialState, values: e.Values, step: int | None) -> Outcome:
        found = tuple(each for each in values if each is not None and math.isfinite(each))
        if len(found) != len(values):
            return Outcome("paused", step=step) if state == "paused" else FAILED
        if state not in ("finished", "paused", "pruned"):
            return FAILED
        objectives = self.state.objectives
        return Outcome(
            state,
            found[: len(objectives.metrics)],
            step,
            violations=objectives.violations(values) if found else (),
        )


def scheduler_of(spec: e.StudySpec, space: SearchSpace, pruner: object = None) -> Scheduler:
    """
    Raises:
        ConfigError: The scheduler or one of its options is unknown.
    """
    return make_scheduler(
        spec.scheduler if pruner is None else pruner,
        spec.scheduler_options,
        perturb=lambda config, rng: perturb(space, config, rng),
        seed=spec.seed,
        direction=spec.directions[0],
    )
