"""`Study`: the result of tuning, and `tune`, which runs one.

A study has the directory of a run, with its journal and one folder per trial in it. Calling `tune` with the name of an
existing study continues it.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from strata.clock import SystemClock
from strata.errors import ConfigError, RunFailed
from strata.tune.journal import JOURNAL, StudyJournal, read_journal
from strata.tune.modes import find_mode
from strata.tune.search import Search, scheduler_of
from strata.tune.space import SearchSpace
from strata.tune.state import events as e
from strata.tune.state.actions import Finish, Handled
from strata.tune.state.study import StudyState

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from strata.launch.record.directory import RunDirectory
    from strata.launch.spec import RunSpec
    from strata.tune.state.trial import Trial

WORKER = "strata.tune.worker"
PRELOAD = (WORKER, "cloudpickle")
"""Modules that every trial needs, imported once: they take longer than the fork."""
FIXED = ("space", "metrics", "directions", "sampler", "scheduler", "scheduler_options", "seed")
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
        scheduler = scheduler_of(opened.spec, SearchSpace.from_dict(opened.spec.space))
        return cls(Path(path), StudyState.replay(opened.spec, scheduler, facts[1:]))

    @property
    def name(self) -> str:
        return self._state.spec.name

    @property
    def trials(self) -> Sequence[Trial]:
        """All trials, in the order of their numbers."""
        return [trial for _, trial in sorted(self._state.trials.items())]

    @property
    def best(self) -> Trial:
        """The finished trial with the best value of the first objective.

        Raises:
            RunFailed: No trial has finished; the message has the reason of the last failure.
        """
        found = self._state.best
        if found is None:
            failed = next((each for each in reversed(self.trials) if each.state == "failed"), None)
            why = f"; trial {failed.number} failed: {failed.reason}" if failed is not None else ""
            raise RunFailed(f"no trial of study {self.name} has finished{why}")
        return found

    @property
    def pareto(self) -> Sequence[Trial]:
        """The finished trials that no other one beats in all objectives."""
        return self._state.pareto

    @property
    def best_checkpoint(self) -> str:
        """Path of the last checkpoint of the best trial; empty if it has saved none."""
        return self.best.checkpoint

    @property
    def is_complete(self) -> bool:
        """Whether all trials have ended; a study that was stopped can be continued."""
        return self._state.ended is not None and self._state.ended.is_complete

    def dataframe(self) -> Any:
        """Return one row per trial: number, state, objectives, configuration, step, duration, reason.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas as pd  # noqa: PLC0415 - optional
        except ImportError:
            raise ConfigError("dataframe() needs pandas, which is not installed; pip install pandas") from None
        return pd.DataFrame([self._row(trial) for trial in self.trials])

    def _row(self, trial: Trial) -> dict[str, Any]:
        values = trial.values or (None,) * len(self._state.spec.metrics)
        has_ended = trial.started_s is not None and trial.ended_s is not None
        return {
            "number": trial.number,
            "state": trial.state,
            **dict(zip(self._state.spec.metrics, values, strict=True)),
            **{f"config.{name}": value for name, value in trial.config.items()},
            "step": trial.step,
            "duration_s": trial.ended_s - trial.started_s if has_ended else None,  # type: ignore[operator]
            "reason": trial.reason,
        }

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
    engine: Literal["local", "ray"],
    nnodes: int,
    coordinator: str,
    timeout_s: float | None,
    max_failures: int,
    name: str,
    seed: int,
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
    chosen, sampler = find_mode(mode)
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
        num_trials=num_trials,
        max_failures=max_failures,
        sampler=chosen.sampler,
        scheduler=chosen.scheduler,
        scheduler_options=dict(options),
        seed=seed,
        ask_ahead=chosen.ask_ahead,
    )

    def work() -> Finish:
        from strata.tune.engine import Engine  # noqa: PLC0415 - heavy

        return Engine(
            directory,
            lambda journal: _opened(journal, spec, sampler),
            num_slots=workers,
            workers_per_trial=workers_per_trial,
            timeout_s=timeout_s,
        ).run()

    if _is_in_loop():  # as in a notebook
        with ThreadPoolExecutor(1, thread_name_prefix="strata-tune") as pool:
            finish = pool.submit(work).result()
    else:
        finish = work()
    study = Study.load(directory.path)
    if not finish.is_complete and finish.reason.startswith("the first "):
        raise RunFailed(f"study {study.name}: {finish.reason}\nlogs: {directory.path / 'logs'}")
    return study


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
    spec = RunSpec(
        name=chosen,
        script=WORKER,
        arguments=(str(place / "call"),),
        is_module=True,
        workers=Size(at_least, num_processes),
        directory=str(Path.cwd()),
        checkpoints=str(place / "trials"),
        preload=(*preload_of(train_fn), *PRELOAD),
        function=getattr(train_fn, "__qualname__", type(train_fn).__name__),
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


def _opened(journal: StudyJournal, spec: e.StudySpec, sampler: object) -> tuple[Search, Handled | None]:
    facts = journal.load()
    if not facts:
        search = Search(spec, sampler=sampler)
        journal.append([e.Opened(spec=spec, at_s=SystemClock().wall_s())])
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
    search = Search.replay(facts, sampler=sampler)
    recovered = search.recover(now_s=SystemClock().wall_s())
    if spec.num_trials > search.state.num_trials:
        journal.append(recovered.facts)
        more = search.handle(e.Extended(num_trials=spec.num_trials), now_s=SystemClock().wall_s())
        recovered = Handled(more.facts, recovered.actions + more.actions)
    return search, recovered


def _is_in_loop() -> bool:
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        return True
    return False
