"""Studies on simulated workers: Strata's and Optuna's search with the same problems, samplers and seeds.

Time is simulated: a trial takes as long as its problem declares, and a question to a sampler no time. So the values
that a study finds depend on its decisions alone, and 60 trials take a second.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from strata.tune import SearchSpace
from strata.tune.modes import find_mode
from strata.tune.search import Search
from strata.tune.state import events as e
from strata.tune.state.actions import Ask, Start

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from strata.bench.contenders.tune_problems import Config, Parameter, Problem
    from strata.tune.journal import StudyJournal


class Searcher(Protocol):
    """A search that proposes configurations and learns their losses."""

    def ask(self) -> tuple[Any, Config] | None:
        """Return a trial and its configuration; None if there is none for now."""

    def tell(self, trial: Any, loss: float) -> None: ...


def lowest(searcher: Searcher, problem: Problem, *, num_workers: int, num_trials: int, until_s: float) -> float:
    """Return the lowest loss among the trials that end within the time; each worker runs one trial after the other."""
    running: list[tuple[float, int, Any, Config]] = []
    numbers = itertools.count()
    best = float("inf")
    now_s = 0.0
    num_started = 0
    while True:
        while len(running) < num_workers and num_started < num_trials and (asked := searcher.ask()) is not None:
            trial, config = asked
            heapq.heappush(running, (now_s + problem.cost_s(config), next(numbers), trial, config))
            num_started += 1
        if not running:
            return best
        now_s, _, trial, config = heapq.heappop(running)
        if now_s > until_s:
            return best
        loss = problem.loss(config)
        best = min(best, loss)
        searcher.tell(trial, loss)


class StrataSearch:
    """The deciding part of a study, as `TrainingOrchestrator.tune` runs it, without processes."""

    def __init__(
        self,
        space: SearchSpace,
        mode: object,
        *,
        num_workers: int,
        num_trials: int,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
        journal: StudyJournal | None = None,
    ) -> None:
        chosen = find_mode(mode)
        spec = e.StudySpec(
            name="bench",
            space=space.to_dict(),
            num_trials=num_trials,
            sampler=chosen.sampler,
            scheduler=chosen.scheduler,
            scheduler_options=dict(options or {}),
            seed=seed,
            ask_ahead=chosen.ask_ahead,
        )
        self.search = Search(spec, sampler=chosen.sampler_object, pruner=chosen.pruner_object)
        self._journal = journal
        self._starts: deque[Start] = deque()
        if journal is not None:
            journal.append([e.Opened(spec=spec)])
        self._handle(e.Resized(num_slots=num_workers))

    def ask(self) -> tuple[Start, Config] | None:
        if not self._starts:
            return None
        start = self._starts.popleft()
        return start, dict(start.config)

    def report(self, trial: Start, step: int, loss: float) -> None:
        self._handle(e.Reported(trial=trial.trial, lease=trial.lease, step=step, values=(loss,)))

    def tell(self, trial: Start, loss: float) -> None:
        self._handle(e.Finished(trial=trial.trial, lease=trial.lease, values=(loss,)))

    def _handle(self, event: e.Event) -> None:
        events = deque([event])
        while events:
            handled = self.search.handle(events.popleft())
            if self._journal is not None:  # as the driver writes it
                is_durable = not all(isinstance(fact, e.Reported) for fact in handled.facts)
                self._journal.append(handled.facts, is_durable=is_durable)
            for action in handled.actions:
                if isinstance(action, Ask):
                    events.append(self.search.answer(action.trial))
                elif isinstance(action, Start):
                    self._starts.append(action)


class OptunaSearch:
    """Optuna alone, with its study in memory."""

    def __init__(self, parameters: Sequence[Parameter], sampler: Any) -> None:
        import optuna  # noqa: PLC0415

        logging.getLogger("optuna").setLevel(logging.ERROR)
        self._parameters = parameters
        self._study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.NopPruner())

    def ask(self) -> tuple[Any, Config]:
        trial = self._study.ask()
        config: Config = {}
        for each in self._parameters:
            if all(config.get(key) == value for key, value in each.when.items()):
                config[each.name] = _suggest(trial, each)
        return trial, config

    def tell(self, trial: Any, loss: float) -> None:
        self._study.tell(trial, loss)


def _suggest(trial: Any, parameter: Parameter) -> Any:
    if parameter.values:
        return trial.suggest_categorical(parameter.name, parameter.values)
    if parameter.is_int:
        return trial.suggest_int(parameter.name, int(parameter.low), int(parameter.high), log=parameter.log)
    return trial.suggest_float(parameter.name, parameter.low, parameter.high, log=parameter.log)


def space_of(parameters: Sequence[Parameter]) -> SearchSpace:
    """Return the space as a user of Strata writes it: listed whole numbers keep their order."""
    space = SearchSpace()
    for each in parameters:
        when = dict(each.when) or None
        if each.values and all(type(value) is int for value in each.values):
            space.add_int(each.name, values=list(each.values), when=when)
        elif each.values:
            space.add_categorical(each.name, list(each.values), when=when)
        elif each.is_int:
            space.add_int(each.name, min=int(each.low), max=int(each.high), log=each.log, when=when)
        else:
            space.add_float(each.name, min=each.low, max=each.high, log=each.log, when=when)
    return space
