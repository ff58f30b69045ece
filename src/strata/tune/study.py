"""`Study`: the result of tuning, and `tune`, which runs one.

A study has the directory of a run, with its journal and one folder per trial in it. Calling `tune` with the name of an
existing study continues it.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.clock import SystemClock
from strata.errors import ConfigError, RunFailed
from strata.lifecycle import interrupted
from strata.tune.journal import StudyJournal, read_journal
from strata.tune.modes import find_mode
from strata.tune.script import Script
from strata.tune.search import Search, scheduler_of
from strata.tune.space import SearchSpace
from strata.tune.state import events as e
from strata.tune.state.actions import Finish, Handled
from strata.tune.state.study import StudyState

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from strata.launch.record.directory import RunDirectory
    from strata.tune.state.trial import Trial
    from strata.tune.view import Silence, Watch

JOURNAL = "study.jsonl"
WORKER = "strata.tune.worker"
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
    def state(self) -> StudyState:
        """The state that its journal leads to, for `strata.tune.snapshot`."""
        return self._state

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
    timeout_s: float | None,
    max_failures: int,
    name: str,
    seed: int,
    quiet: bool,
) -> Study:
    """Run a study; `TrainingOrchestrator.tune` documents the arguments and the errors."""
    if not isinstance(space, SearchSpace) or not space.parameters:  # type: ignore[redundant-expr]
        raise ConfigError("space has no parameters; add some with SearchSpace().add_float(…)", field="space")
    if workers < 1:
        raise ConfigError(f"workers={workers} must be 1 or more", field="workers")
    chosen, sampler = find_mode(mode)
    directory = _directory(train_fn, name, workers)
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
    return _carried_out(directory, spec, sampler, workers=workers, timeout_s=timeout_s, quiet=quiet)


def resume(
    name: str,
    *,
    num_trials: int | None = None,
    workers: int | None = None,
    timeout_s: float | None = None,
    quiet: bool = False,
) -> Study:
    """Continue a study with the function or script that it was last run with.

    Args:
        name: Its name, or a unique prefix.
        num_trials: New number of trials in all; None: as before.
        workers: Number of trials that run at the same time; None: as before.

    Raises:
        ConfigError: There is no such study, it cannot be continued like this, or a setting is invalid.
        JournalLocked: The study is running.
        RunFailed: All of the first trials failed.
    """
    import msgspec  # noqa: PLC0415

    from strata.launch.record import directory as runs  # noqa: PLC0415 - heavy
    from strata.launch.spec import Size  # noqa: PLC0415
    from strata.train.function import FUNCTION  # noqa: PLC0415

    directory = runs.open_run(name)
    known = Study.load(directory.path)
    StudyJournal(directory.path / JOURNAL).close()  # raises if the study is running
    if known.state.spec.sampler.startswith("optuna/"):
        raise ConfigError(
            f"study {known.name} was started with a sampler object of Optuna, which no file has; call tune with "
            f"name={known.name!r} and such an object",
            field="name",
        )
    if not (directory.path / "call" / FUNCTION).exists():
        raise ConfigError(f"study {known.name} has no {FUNCTION}; call tune with name={known.name!r}", field="name")
    if num_trials is not None and num_trials < known.state.num_trials:
        raise ConfigError(
            f"num_trials={num_trials} is less than the {known.state.num_trials} trials of study {known.name}; pass the "
            "new number of trials in all",
            field="num_trials",
        )
    if workers is not None:
        directory.write_spec(msgspec.structs.replace(directory.spec, workers=Size(workers, workers)))
    spec = msgspec.structs.replace(known.state.spec, num_trials=num_trials or known.state.num_trials)
    num_slots = directory.spec.workers.at_most
    return _carried_out(directory, spec, None, workers=num_slots, timeout_s=timeout_s, quiet=quiet)


def _carried_out(
    directory: RunDirectory, spec: e.StudySpec, sampler: object, *, workers: int, timeout_s: float | None, quiet: bool
) -> Study:
    """Run a study to its end; in another thread if this one already has an event loop."""
    from strata.tune.view import watch  # noqa: PLC0415 - heavy

    def work() -> Finish:
        with watch(directory.path, quiet=quiet) as watching:
            return _run(directory, spec, workers, timeout_s, sampler, watching)

    if _is_in_loop():  # as in a notebook
        with ThreadPoolExecutor(1, thread_name_prefix="strata-tune") as pool:
            finish = pool.submit(work).result()
    else:
        finish = work()
    study = Study.load(directory.path)
    if not finish.is_complete and finish.reason.startswith("the first "):
        raise RunFailed(f"study {study.name}: {finish.reason}\nlogs: {directory.path / 'logs'}")
    return study


def _directory(train_fn: Callable[..., Any], name: str, workers: int) -> RunDirectory:
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
        arguments=(),
        is_module=True,
        workers=Size(workers, workers),
        directory=str(Path.cwd()),
        checkpoints=str(place / "trials"),
        preload=preload_of(train_fn) if script is None else script.imports(),
        function=getattr(train_fn, "__qualname__", type(train_fn).__name__),
        shown="" if script is None else script.shown,
        variables={} if script is None else script.variables,
    )
    if is_new:
        directory = runs.create(spec)
    else:
        StudyJournal(place / JOURNAL).close()  # raises if the study is running
        directory = runs.open_run(chosen)
        directory.write_spec(spec)  # perhaps called from another directory, with another function
    remote.write_call(place / "call" / remote.FUNCTION, remote.Call(train_fn, (), {}))
    return directory


def _run(
    directory: RunDirectory,
    spec: e.StudySpec,
    num_slots: int,
    timeout_s: float | None,
    sampler: object,
    watching: Watch | Silence,
) -> Finish:
    import msgspec  # noqa: PLC0415

    from strata.coordinator.config import CoordinatorConfig  # noqa: PLC0415 - heavy
    from strata.coordinator.embedded import EmbeddedCoordinator  # noqa: PLC0415
    from strata.launch.record.directory import RunDirectory, RunStatus  # noqa: PLC0415
    from strata.launch.run import LEASE  # noqa: PLC0415
    from strata.train.function import FUNCTION  # noqa: PLC0415
    from strata.transport import sockets  # noqa: PLC0415

    with (
        directory.lock(),
        StudyJournal(directory.path / JOURNAL) as journal,
        sockets.place() as place,
        EmbeddedCoordinator(
            CoordinatorConfig(state=str(directory.journal), lease=LEASE), listen=f"unix:{place.path}/coordinator.sock"
        ) as coordinator,
    ):
        search, recovered = _opened(journal, spec, sampler)
        watching.follow(search)
        arguments = (str(directory.path / "call" / FUNCTION), f"{place.path}/trials")
        here = RunDirectory(directory.path, msgspec.structs.replace(directory.spec, arguments=arguments))
        status = RunStatus.of_this_process(now_s=SystemClock().wall_s())
        here.write_status(msgspec.structs.replace(status, state="running"))
        outcome = "stopped"
        try:
            finish = asyncio.run(
                _drive(search, journal, here, coordinator.address, place.path, num_slots, timeout_s, recovered)
            )
            outcome = "done" if finish.is_complete else "stopped"
        except KeyboardInterrupt:
            raise interrupted(
                f"study {directory.name} was interrupted; call tune with name={directory.name!r} to continue it"
            ) from None
        except Exception:
            outcome = "failed"
            raise
        finally:
            ended = msgspec.structs.replace(status, state=outcome, updated_at_s=SystemClock().wall_s())
            here.write_status(ended)
        return finish


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


async def _drive(
    search: Search,
    journal: StudyJournal,
    directory: RunDirectory,
    coordinator: str,
    place: Path,
    num_slots: int,
    timeout_s: float | None,
    recovered: Handled | None,
) -> Finish:
    from strata.coordinator.client import AsyncCoordinatorClient  # noqa: PLC0415
    from strata.launch.nodes.local import LocalNode  # noqa: PLC0415
    from strata.tune.driver import Driver  # noqa: PLC0415

    ended = search.state.ended
    if ended is not None:
        return Finish(ended.reason, ended.is_complete)
    node = LocalNode(directory, slots=num_slots)
    await node.prepare()
    async with AsyncCoordinatorClient(coordinator) as client:
        driver = Driver(
            search,
            journal,
            node,
            client,
            coordinator=coordinator,
            directory=directory.path,
            num_slots=num_slots,
            timeout_s=timeout_s,
        )
        return await driver.run(place / "trials", recovered)


def _is_in_loop() -> bool:
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        return True
    return False
