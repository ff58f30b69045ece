"""`Study`: the trials and the results of a study, read from its journal.

A study has the directory of a run, with its journal and one folder per trial in it. `call` starts studies.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.errors import ConfigError, RunFailed
from strata.tune import analysis, export, plots
from strata.tune.journal import JOURNAL, read_journal
from strata.tune.packages import require
from strata.tune.schedulers import RunAll
from strata.tune.space import SearchSpace
from strata.tune.state import events as e
from strata.tune.state.study import StudyState

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from strata.tune.state.trial import Trial


class Study:
    """The trials of a study and their results, as its journal has them."""

    def __init__(self, path: Path, state: StudyState) -> None:
        self.path = path
        self._state = state

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Study:
        """Read a study, which may be running.

        Raises:
            ConfigError: There is no study.
            JournalDamaged: Its journal cannot be read.
        """
        try:
            facts, _ = read_journal(Path(path) / JOURNAL)
        except FileNotFoundError:
            facts = []
        if not facts:
            raise ConfigError(f"{path} is not the directory of a study; it has no {JOURNAL}")
        opened = facts[0]
        assert isinstance(opened, e.Opened)
        return cls(Path(path), StudyState.replay(opened.spec, RunAll(), facts[1:]))  # nothing is decided here

    @property
    def state(self) -> StudyState:
        """The state that its journal leads to, for `strata.tune.snapshot`."""
        return self._state

    @property
    def name(self) -> str:
        return self._state.spec.name

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the objectives."""
        return self._state.spec.metrics

    @property
    def directions(self) -> tuple[str, ...]:
        """ "min" or "max", one per objective."""
        return self._state.spec.directions

    @property
    def constraints(self) -> tuple[str, ...]:
        """Limits of metrics, as they were passed to `tune`."""
        return self._state.spec.constraints

    @property
    def reported(self) -> tuple[str, ...]:
        """Names of the objectives and of the metrics in constraints: what `Trial.values` has."""
        return self._state.objectives.names

    @property
    def num_known(self) -> int:
        """Trials of other studies that a warm start has used."""
        return self._state.num_known

    @cached_property
    def space(self) -> SearchSpace:
        return SearchSpace.from_dict(self._state.spec.space)

    @property
    def trials(self) -> Sequence[Trial]:
        """All trials, in the order of their numbers."""
        return [trial for _, trial in sorted(self._state.trials.items())]

    @property
    def best(self) -> Trial:
        """The finished trial with the best value of the first objective, among those that meet all constraints.

        Raises:
            RunFailed: There is none; the message has the reason of the last failure.
        """
        found = self._state.best
        if found is None and any(each.state == "finished" for each in self.trials):
            raise RunFailed(f"no trial of study {self.name} meets {' and '.join(self.constraints)}")
        if found is None:
            failed = next((each for each in reversed(self.trials) if each.state == "failed"), None)
            why = f"; trial {failed.number} failed: {failed.reason}" if failed is not None else ""
            raise RunFailed(f"no trial of study {self.name} has finished{why}")
        return found

    @property
    def best_trials(self) -> Sequence[Trial]:
        """The Pareto front: the finished trials that meet all constraints and that no other one dominates."""
        return self._state.pareto

    @property
    def best_checkpoint(self) -> str:
        """Path of the last checkpoint of the best trial; empty if it has saved none."""
        return self.best.checkpoint

    @property
    def is_complete(self) -> bool:
        """Whether all trials have ended; a study that was stopped can be continued."""
        return self._state.ended is not None and self._state.ended.is_complete

    def trial(self, number: int) -> Trial:
        """Return a trial by its number."""
        return self._state.trials[number]

    def values_of(self, trial: Trial) -> dict[str, Any]:
        """Return the last values of a trial by name; empty if it has reported none."""
        return dict(zip(self.reported, trial.values, strict=True)) if trial.values else {}

    def is_feasible(self, trial: Trial) -> bool:
        """Return whether a trial meets all constraints."""
        return self._state.objectives.is_feasible(trial)

    # -- tables and plots ------------------------------------------------------------------------------------------

    def dataframe(self) -> Any:
        """Return one row per trial: number, state, metrics, configuration, step, duration, reason, checkpoint.

        Raises:
            ConfigError: pandas is not installed.
        """
        pandas = require("pandas", "dataframe()", "pip install pandas, or use export()")
        return pandas.DataFrame(export.rows(self))

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write a file: `.csv` and `.parquet` with one row per trial, `.json` with the space and all reports, too.

        Raises:
            ConfigError: The suffix is unknown, or pyarrow is missing for Parquet.
        """
        return export.export(self, path)

    def importances(self, *, objective: str | None = None) -> dict[str, float]:
        """Return how much each parameter matters for good values (PED-ANOVA), the largest first; the sum is 1.

        Args:
            objective: Name of an objective; default: all of them together.

        Raises:
            ConfigError: Optuna is not installed, or the objective is unknown.
            RunFailed: Fewer than two trials have finished.
        """
        return analysis.importances(self, objective)

    def plot_history(self, *, objective: str | None = None, ax: Any = None) -> Any:
        """Plot the result of every trial and the best so far. This and the other plots draw on `ax`, or on a new
        figure, and return the axes of matplotlib.

        Raises:
            ConfigError: matplotlib is not installed, or the objective is unknown.
        """
        return plots.history(self, objective, ax)

    def plot_importances(self, *, objective: str | None = None, ax: Any = None) -> Any:
        """Plot `importances` as bars."""
        return plots.importances(self, objective, ax)

    def plot_parallel_coordinates(self, *, objective: str | None = None, ax: Any = None) -> Any:
        """Plot each finished trial as a line through its parameters, colored by its result."""
        return plots.parallel_coordinates(self, objective, ax)

    def plot_intermediate_values(self, *, objective: str | None = None, ax: Any = None) -> Any:
        """Plot the reports of all trials over their steps."""
        return plots.intermediate_values(self, objective, ax)

    def plot_pareto(self, *, objectives: Sequence[str] = (), ax: Any = None) -> Any:
        """Plot two objectives of every trial, and the Pareto front of these two."""
        return plots.pareto(self, objectives, ax)

    def __repr__(self) -> str:
        states = [trial.state for trial in self.trials]
        counts = ", ".join(f"{states.count(each)} {each}" for each in dict.fromkeys(states))
        return f"Study({self.name!r}, {counts or 'no trials'})"
