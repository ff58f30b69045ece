"""`Study`: the result of tuning, and `tune`, which runs one.

A study has the directory of a run, with its journal and one folder per trial in it. Calling `tune` with the name of an
existing study continues it.
"""

from __future__ import annotations

import logging
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from strata.clock import SystemClock
from strata.errors import ConfigError, RunFailed
from strata.tune import analysis, export, plots
from strata.tune.callbacks import Callbacks
from strata.tune.journal import JOURNAL, StudyJournal, read_journal
from strata.tune.modes import Mode, find_mode
from strata.tune.packages import require
from strata.tune.schedulers import RunAll
from strata.tune.script import Script
from strata.tune.search import Search
from strata.tune.space import SearchSpace
from strata.tune.state import events as e
from strata.tune.state.actions import Finish, Handled
from strata.tune.state.growth import slots_per_trial
from strata.tune.state.objectives import Limit
from strata.tune.state.study import StudyState
from strata.tune.state.watch import Watch

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from strata.launch.record.directory import RunDirectory
    from strata.launch.spec import RunSpec
    from strata.tune.callbacks import StudyCallback
    from strata.tune.engine import Opening
    from strata.tune.state.trial import Trial

log = logging.getLogger(__name__)

WORKER = "strata.tune.worker"
PRELOAD = (WORKER, "cloudpickle")
"""Modules that every trial needs, imported once: they take longer than the fork."""
FIXED = ("space", "metrics", "directions", "constraints", "sampler", "scheduler", "scheduler_options", "seed")
"""What cannot change when a study is continued."""


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


def tune(
    train_fn: Callable[..., Any],
    *,
    space: SearchSpace,
    mode: object,
    options: Mapping[str, Any],
    num_trials: int,
    metrics: Sequence[str],
    directions: Sequence[str],
    workers: int,
    workers_per_trial: int,
    max_workers_per_trial: int | None,
    engine: Literal["local", "ray"],
    nnodes: int,
    coordinator: str,
    timeout_s: float | None,
    report_timeout_s: float | None,
    max_failures: int,
    name: str,
    seed: int,
    constraints: Sequence[str],
    warm_start: Sequence[Study | str | os.PathLike[str]],
    callbacks: Sequence[StudyCallback],
    quiet: bool,
) -> Study:
    """Run a study; `TrainingOrchestrator.tune` documents the arguments and the errors."""
    if not isinstance(space, SearchSpace) or not space.parameters:  # type: ignore[redundant-expr]
        raise ConfigError("space has no parameters; add some with SearchSpace().add_float(…)", field="space")
    for field, number in {"workers": workers, "workers_per_trial": workers_per_trial, "nnodes": nnodes}.items():
        if number < 1:
            raise ConfigError(f"{field}={number} must be 1 or more", field=field)
    if nnodes > 1 and not coordinator:
        raise ConfigError(
            "several machines need a coordinator; start one with `strata coordinator`, and pass its address: "
            "TrainingOrchestrator('HOST:PORT')",
            field="nnodes",
        )
    if nnodes > 1 and not name:
        raise ConfigError(
            "several machines need a name for the study; pass the same name= on all of them", field="name"
        )
    max_slots_per_trial = slots_per_trial(max_workers_per_trial, workers_per_trial)
    chosen = find_mode(mode)
    watch = _watch(report_timeout_s)
    Limit.parse_all(constraints)
    directory = _directory(
        train_fn,
        name,
        num_processes=workers * workers_per_trial,
        at_least=workers_per_trial,
        engine=engine,
        nnodes=nnodes,
        coordinator=coordinator,
    )
    spec = e.StudySpec(
        name=directory.name,
        space=space.to_dict(),
        metrics=tuple(metrics),
        directions=tuple(directions),  # type: ignore[arg-type] # checked by the caller
        constraints=tuple(constraints),
        num_trials=num_trials,
        max_failures=max_failures,
        sampler=chosen.sampler,
        scheduler=chosen.scheduler,
        scheduler_options=dict(options),
        seed=seed,
        ask_ahead=chosen.ask_ahead,
    )

    known = _known(warm_start, spec, space)

    def opened(journal: StudyJournal) -> tuple[Search, Handled | None]:
        search, recovered = _opened(journal, spec, chosen, known)
        search.watch = watch
        search.observers.append(Callbacks(callbacks, Study(directory.path, search.state)).note)
        return search, recovered

    return _carried_out(directory, opened, max_slots_per_trial=max_slots_per_trial, timeout_s=timeout_s, quiet=quiet)


def resume(
    name: str,
    *,
    num_trials: int | None = None,
    workers: int | None = None,
    max_workers_per_trial: int | None = None,
    timeout_s: float | None = None,
    report_timeout_s: float | None = None,
    quiet: bool = False,
) -> Study:
    """Continue a study with the function or script that it was last run with, in the same place.

    Args:
        name: Its name, or a unique prefix.
        num_trials: New number of trials in all; None: as before.
        workers: Number of trials that run at the same time; None: as before.
        max_workers_per_trial: Workers that one trial may have once no other needs them; None: as before.

    Raises:
        ConfigError: There is no such study, it cannot be continued like this, or a setting is invalid.
        JournalLocked: The study is running.
        RunFailed: All of the first trials failed.
    """
    import msgspec  # noqa: PLC0415

    from strata.launch.record import directory as runs  # noqa: PLC0415 - heavy
    from strata.launch.spec import Size  # noqa: PLC0415

    directory = runs.open_run(name)
    study = Study.load(directory.path)
    if directory.spec.num_nodes == 1:
        StudyJournal(directory.path / JOURNAL).close()  # raises if the study is running
    _check_resumable(study, num_trials)
    per_trial = directory.spec.workers.at_least
    max_slots_per_trial = (
        study.state.max_slots_per_trial
        if max_workers_per_trial is None
        else slots_per_trial(max_workers_per_trial, per_trial)
    )
    if workers is not None:
        size = Size(per_trial, workers * per_trial)
        directory.write_spec(msgspec.structs.replace(directory.spec, workers=size))
    known = study.state.spec
    spec = msgspec.structs.replace(known, num_trials=num_trials or study.state.num_trials)
    watch = _watch(report_timeout_s)

    def opened(journal: StudyJournal) -> tuple[Search, Handled | None]:
        search, recovered = _opened(journal, spec, Mode(known.sampler, known.scheduler), ())
        search.watch = watch
        return search, recovered

    return _carried_out(directory, opened, max_slots_per_trial=max_slots_per_trial, timeout_s=timeout_s, quiet=quiet)


def _check_resumable(study: Study, num_trials: int | None) -> None:
    """
    Raises:
        ConfigError: The study cannot be continued by its name alone, or not with this number of trials.
    """
    from strata.train.function import FUNCTION  # noqa: PLC0415 - heavy

    spec, again = study.state.spec, f"call tune with name={study.name!r}"
    if spec.sampler.startswith("optuna/") or spec.scheduler.startswith("optuna/"):
        raise ConfigError(
            f"study {study.name} was started with an object of Optuna, which is in no file; {again} and such an object",
            field="name",
        )
    if not (study.path / "call" / FUNCTION).exists():
        raise ConfigError(f"study {study.name} has no {FUNCTION}; {again}", field="name")
    if num_trials is not None and num_trials < study.state.num_trials:
        raise ConfigError(
            f"num_trials={num_trials} is less than the {study.state.num_trials} trials of study {study.name}; pass the "
            "new number of trials in all",
            field="num_trials",
        )


def _watch(report_timeout_s: float | None) -> Watch | None:
    return Watch(report_timeout_s) if report_timeout_s is not None else None


def _carried_out(
    directory: RunDirectory, opened: Opening, *, max_slots_per_trial: int, timeout_s: float | None, quiet: bool
) -> Study:
    """Run a study to its end, in another thread if this one already has an event loop."""
    from strata.train.function_run import carry_out  # noqa: PLC0415 - heavy
    from strata.tune.engine import Engine  # noqa: PLC0415 - heavy
    from strata.tune.view import shown  # noqa: PLC0415

    workers_per_trial, num_processes = directory.spec.workers.at_least, directory.spec.workers.at_most

    def work() -> Finish:
        with shown(directory.path, quiet=quiet) as display:

            def followed(journal: StudyJournal) -> tuple[Search, Handled | None]:
                search, recovered = opened(journal)
                display.follow(search)
                return search, recovered

            return Engine(
                directory,
                followed,
                num_slots=num_processes // workers_per_trial,
                workers_per_trial=workers_per_trial,
                max_slots_per_trial=max_slots_per_trial,
                timeout_s=timeout_s,
            ).run()

    finish = carry_out(directory, work)
    study = Study.load(directory.path)
    if not finish.is_complete and finish.reason.startswith("the first "):
        raise RunFailed(f"study {study.name}: {finish.reason}\nlogs: {directory.path / 'logs'}")
    return study


def _known(
    studies: Sequence[Study | str | os.PathLike[str]], spec: e.StudySpec, space: SearchSpace
) -> Sequence[e.Known]:
    if not studies:
        return ()
    from strata.tune.warm_start import warm_start  # noqa: PLC0415 - it imports this module

    found = warm_start(studies, spec, space)
    log.log(logging.WARNING if found.skipped else logging.INFO, "study %s: %s", spec.name, found)
    return found.known


def _directory(
    train_fn: Callable[..., Any],
    name: str,
    *,
    num_processes: int,
    at_least: int,
    engine: Literal["local", "ray"],
    nnodes: int,
    coordinator: str,
) -> RunDirectory:
    """Create or open the directory of a study, with the function in it.

    Raises:
        JournalLocked: The study is running.
    """
    from strata.launch.record import directory as runs  # noqa: PLC0415 - heavy
    from strata.launch.spec import RunSpec, Size  # noqa: PLC0415
    from strata.train import function as remote  # noqa: PLC0415
    from strata.train.orchestrator import preload_of  # noqa: PLC0415

    chosen = name or runs.new_name(SystemClock())
    place = runs.root() / chosen
    is_new = not (place / JOURNAL).exists()
    script = train_fn if isinstance(train_fn, Script) else None
    spec = RunSpec(
        name=chosen,
        script=WORKER,
        arguments=(str(place / "call"),),
        is_module=True,
        workers=Size(at_least, num_processes),
        directory=str(Path.cwd()),
        checkpoints=str(place / "trials"),
        preload=(*(preload_of(train_fn) if script is None else script.imports()), *PRELOAD),
        function=getattr(train_fn, "__qualname__", type(train_fn).__name__),
        shown="" if script is None else script.shown,
        variables={} if script is None else script.variables,
        engine=engine,
        num_nodes=nnodes,
        coordinator=coordinator,
    )
    if nnodes > 1:
        directory = _shared_directory(spec)
    elif is_new:
        directory = runs.create(spec)
    else:
        StudyJournal(place / JOURNAL).close()  # raises if the study is running
        directory = runs.open_run(chosen)
        directory.write_spec(spec)  # perhaps called from another directory, with another function
    remote.write_call(place / "call" / remote.FUNCTION, remote.Call(train_fn, (), {}))
    return directory


def _shared_directory(spec: RunSpec) -> RunDirectory:
    """Create or open the directory of a study that several machines run; one of them may do so already."""
    from strata.launch.record import directory as runs  # noqa: PLC0415 - heavy

    try:
        return runs.create(spec)
    except ConfigError:
        if not (runs.root() / spec.name).exists():
            raise
        return runs.RunDirectory(runs.root() / spec.name, spec)


def _opened(
    journal: StudyJournal, spec: e.StudySpec, mode: Mode, known: Sequence[e.Known]
) -> tuple[Search, Handled | None]:
    facts = journal.load()
    now_s = SystemClock().wall_s()
    if not facts:
        search = Search(spec, sampler=mode.sampler_object, pruner=mode.pruner_object)
        learned = [fact for each in known for fact in search.handle(each, now_s=now_s).facts]
        journal.append([e.Opened(spec=spec, at_s=now_s), *learned])
        return search, None
    opened = facts[0]
    assert isinstance(opened, e.Opened)
    changed = [each for each in FIXED if getattr(opened.spec, each) != getattr(spec, each)]
    if changed:
        raise ConfigError(
            f"study {spec.name!r} exists with another {' and '.join(changed)}; choose another name, or pass what it "
            "was started with",
            field="name",
        )
    search = Search.replay(facts, sampler=mode.sampler_object, pruner=mode.pruner_object)
    recovered = search.recover(now_s=SystemClock().wall_s())
    if spec.num_trials > search.state.num_trials:
        journal.append(recovered.facts)
        more = search.handle(e.Extended(num_trials=spec.num_trials), now_s=SystemClock().wall_s())
        recovered = Handled(more.facts, recovered.actions + more.actions)
    return search, recovered
