"""Studies in memory whose trials have ended, for tests of what can be done with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strata.tune import SearchSpace
from strata.tune.schedulers import RunAll
from strata.tune.search import Search
from strata.tune.state import events as e
from strata.tune.state.actions import Ask, Start, Stop
from strata.tune.state.study import StudyState
from strata.tune.study import Study

Curve = Callable[[dict[str, Any], int], tuple[float | None, ...]]


def mixed_space() -> SearchSpace:
    return (
        SearchSpace()
        .add_float("learning_rate", min=1e-4, max=1.0, log=True)
        .add_int("layers", min=1, max=8)
        .add_categorical("optimizer", ["sgd", "adam"])
        .add_float("momentum", min=0.0, max=0.9, when={"optimizer": "sgd"})
        .add_fixed("epochs", 9)
    )


def quality(config: dict[str, Any], step: int) -> tuple[float, ...]:
    """A loss that falls with the steps, and a latency that grows with the layers."""
    error = abs(math.log10(config["learning_rate"]) + 2) + 0.3 * abs(config["layers"] - 5)
    error += 0.4 * abs(config.get("momentum", 0.7) - 0.7)
    return 0.05 + error + 1.5 / step, 1.0 + config["layers"] ** 1.5


def run_study(
    curve: Curve = quality,
    *,
    space: SearchSpace | None = None,
    num_steps: int = 9,
    num_slots: int = 4,
    known: tuple[e.Known, ...] = (),
    facts: list[e.Event] | None = None,
    **spec: Any,
) -> Study:
    """Run a study whose trials report what a function returns, one after the other in the order of their slots."""
    values: dict[str, Any] = {"name": "study", "num_trials": 24, "seed": 1}
    search = Search(e.StudySpec(space=(space or mixed_space()).to_dict(), **values | spec))
    journal = facts if facts is not None else []
    journal.append(e.Opened(spec=search.state.spec))
    running: dict[int, Start] = {}

    def do(event: e.Event) -> None:
        handled = search.handle(event, now_s=float(len(journal)))
        journal.extend(handled.facts)
        for action in handled.actions:
            match action:
                case Ask(number):
                    do(search.answer(number))
                case Start():
                    running[action.slot] = action
                case Stop():
                    del running[action.slot]
                    do(e.Stopped(trial=action.trial, lease=action.lease))

    for each in known:
        do(each)
    do(e.Resized(num_slots=num_slots))
    while running:
        for slot, start in sorted(running.items()):
            if running.get(slot) is not start:
                continue
            step = (search.state.trials[start.trial].step or 0) + 1
            if step > num_steps:
                del running[slot]
                do(e.Finished(trial=start.trial, lease=start.lease))
            else:
                found = curve(start.config, step)[: len(search.state.objectives.names)]
                do(e.Reported(trial=start.trial, lease=start.lease, step=step, values=found))
    state = StudyState.replay(search.state.spec, RunAll(), [e.decode(e.encode(fact)) for fact in journal[1:]])
    return Study(Path("study"), state)
