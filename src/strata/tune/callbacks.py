"""Callbacks: what a program wants to be called with while a study runs.

Callbacks run in the thread of the driver, after the facts are in the journal and their actions carried out, in the
order in which things happened. A slow one delays decisions. An error in a callback is logged and does not end the
study.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from strata.tune.state import events as e

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.tune.state.trial import Trial
    from strata.tune.study import Study

log = logging.getLogger(__name__)

MAX_ERRORS = 10
"""Errors of a callback after which it is not called again."""


class StudyCallback:
    """Derive from this class and define the methods that you need. Trials and studies are those of the running study:
    read them, and do not keep or change them.
    """

    def on_trial_start(self, study: Study, trial: Trial) -> None:
        """A trial starts; `trial.lease` is above 1 if it was started before, and continues."""

    def on_trial_report(self, study: Study, trial: Trial) -> None:
        """A trial has reported `trial.values` for `trial.step`."""

    def on_trial_end(self, study: Study, trial: Trial) -> None:
        """A trial has finished, failed or was pruned: see `trial.state` and `trial.reason`."""

    def on_study_end(self, study: Study) -> None:
        """The study has ended, or was stopped."""


class Callbacks:
    """Turns the facts of a study into calls."""

    def __init__(self, callbacks: Sequence[StudyCallback], study: Study) -> None:
        self._study = study
        self._num_errors = dict.fromkeys(range(len(callbacks)), 0)
        self._callbacks = callbacks

    def note(self, facts: Sequence[e.Event]) -> None:
        """Call what the program wants to be called with after these facts."""
        for fact in facts:
            match fact:
                case e.Leased():
                    self._call("on_trial_start", fact.trial)
                case e.Reported():
                    self._call("on_trial_report", fact.trial)
                case e.Finished() | e.Failed() | e.Lost() | e.Stopped() | e.Pruned():
                    if self._study.trial(fact.trial).is_over:
                        self._call("on_trial_end", fact.trial)
                case e.Ended():
                    self._call("on_study_end")

    def _call(self, method: str, trial: int | None = None) -> None:
        arguments = (self._study,) if trial is None else (self._study, self._study.trial(trial))
        for number, num_errors in self._num_errors.items():
            if num_errors >= MAX_ERRORS:
                continue
            callback = self._callbacks[number]
            try:
                getattr(callback, method)(*arguments)
            except Exception:
                self._num_errors[number] += 1
                what = "; it is not called again" if num_errors + 1 == MAX_ERRORS else ""
                log.exception("%s of %s failed%s", method, type(callback).__name__, what)
