"""The events of a study in words: what each fact means for people. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.launch.record.timeline import RunEvent
from strata.printing import counted, printable
from strata.tune.processes import NOTHING_TO_SAVE_S
from strata.tune.state import events as e

if TYPE_CHECKING:
    from strata.tune.space.parameters import Config
    from strata.tune.state.events import Event
    from strata.tune.state.study import StudyState
    from strata.tune.state.trial import Trial

MAX_TEXT_VALUE = 40
"""Characters of a value of a configuration that are shown."""


def event_of(fact: Event, state: StudyState) -> RunEvent | None:
    """Return what people need to know of a fact that was just applied; None if that is nothing."""
    found = _in_words(fact, state)
    if found is None:
        return None
    what, text = found
    return RunEvent(at_s=fact.at_s, monotonic_s=0.0, what=what, text=text)


def _in_words(fact: Event, state: StudyState) -> tuple[str, str] | None:
    match fact:
        case e.Leased(trial=number, lease=lease, step=step, reason=reason):
            trial = state.trials[number]
            if lease == 1:
                return "started", f"trial {number}, {config_in_words(trial.config)}"
            why = f": {reason}" if reason and reason != "continues" else ""
            return "resumed", f"trial {number} {f'at step {step}' if step else 'from the start'}{why}"
        case e.Finished(trial=number) | e.Stopped(trial=number) | e.Pruned(trial=number):
            trial = state.trials[number]
            return _outcome(trial, state)
        case e.Failed(trial=number, reason=reason):
            trial = state.trials[number]
            if trial.state in ("failed", "pruned", "paused"):
                return _outcome(trial, state)
            return "retried", f"trial {number} failed: {reason}"
        case e.Lost(trial=number, reason=reason):
            trial = state.trials[number]
            if trial.state in ("failed", "pruned", "paused"):
                return _outcome(trial, state)
            return "lost", f"the worker of trial {number}: {reason}"
        case e.Expired(trial=number, reason=reason):
            return "expired", f"trial {number}: {reason}"
        case e.Extended(num_trials=num_trials):
            return "continued", f"with {num_trials} trials in all"
        case e.StopRequested(reason=reason, wait_s=wait_s):
            return "stopping", f"{reason}; {_wait(len(state.running), wait_s)}"
        case e.Ended(reason=reason):
            return "ended", reason
    return None


def _wait(num_running: int, wait_s: float) -> str:
    """Return what a stopping study waits for, and how long."""
    if not num_running:
        return "no trial is running"
    if not wait_s:
        return "running trials save first"
    return (
        f"waiting up to {wait_s:g} s for {counted(num_running, 'running trial')} to save at the next report "
        f"({min(NOTHING_TO_SAVE_S, wait_s):g} s without strata.init()); a second signal or --now ends the study at once"
    )


def _outcome(trial: Trial, state: StudyState) -> tuple[str, str] | None:
    at = "" if trial.step is None else f" at step {trial.step}"
    match trial.state:
        case "finished":
            what = "best" if state.best is trial else "finished"
            return what, f"trial {trial.number}{_values(trial, state)}, {config_in_words(trial.config)}"
        case "failed":
            return "failed", f"trial {trial.number}: {trial.reason}"
        case "pruned" | "paused":
            why = f": {trial.reason}" if trial.reason else ""
            return trial.state, f"trial {trial.number}{at}{_values(trial, state)}{why}"
    return None


def _values(trial: Trial, state: StudyState) -> str:
    pairs = zip(state.objectives.names, trial.values, strict=False)
    return "".join(f", {name} {number_in_words(value)}" for name, value in pairs)


def number_in_words(value: float | None) -> str:
    """Return a value of an objective; `nan` if it is not a finite number."""
    return "nan" if value is None else f"{value:.4g}"


def config_in_words(config: Config) -> str:
    """Return `learning_rate=0.00312 batch_size=64`, each value without control characters and of bounded length."""
    return " ".join(f"{printable(name)}={value_in_words(value)}" for name, value in config.items())


def value_in_words(value: bool | float | str | None) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return printable(text, max_chars=MAX_TEXT_VALUE)
