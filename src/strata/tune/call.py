"""Start a study or continue one: check the arguments, prepare its directory, run it to its end.

Nothing is created before everything is checked. The directory of a new study appears at once with its journal and its
function, so a kill at any moment leaves either nothing or a study that can be continued. Calling `tune` with the name
of an existing study continues it.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from strata.clock import SystemClock
from strata.errors import ConfigError, RunFailed
from strata.tune.callbacks import Callbacks
from strata.tune.journal import JOURNAL, StudyJournal, read_journal
from strata.tune.modes import Mode, find_mode
from strata.tune.script import Script
from strata.tune.search import Search
from strata.tune.space import SearchSpace
from strata.tune.state import events as e
from strata.tune.state.actions import Finish, Handled
from strata.tune.state.growth import slots_per_trial
from strata.tune.state.objectives import Limit
from strata.tune.state.watch import Watch
from strata.tune.study import Study
from strata.tune.warm_start import warm_start as collect_known

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from strata.launch.record.directory import RunDirectory
    from strata.launch.run import PageOf
    from strata.launch.spec import RunSpec
    from strata.tune.callbacks import StudyCallback
    from strata.tune.engine import Opening

log = logging.getLogger(__name__)

WORKER = "strata.tune.worker"
PRELOAD = (WORKER, "cloudpickle")
"""Modules that every trial needs, imported once: they take longer than the fork."""
FIXED = ("space", "metrics", "directions", "constraints", "sampler", "scheduler", "scheduler_options", "seed")
"""What cannot change when a study is continued."""


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
    page_of: PageOf | None = None,
) -> Study:
    """Run a study; `TrainingOrchestrator.tune` documents the arguments and the errors. `page_of` returns the page that
    is served meanwhile.
    """
    if not isinstance(train_fn, Script) and not callable(train_fn):
        raise ConfigError(
            f"train_fn={train_fn!r} is not a function; pass one, or start a script with `strata tune SCRIPT`",
            field="train_fn",
        )
    if not isinstance(space, SearchSpace):
        raise ConfigError(
            f"space is a {type(space).__name__}; build one with SearchSpace().add_float(…), or read it with "
            "SearchSpace.from_dict or SearchSpace.from_yaml",
            field="space",
        )
    if not space.parameters:
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
    from strata.launch.record import directory as runs  # noqa: PLC0415 - heavy

    max_slots_per_trial = slots_per_trial(max_workers_per_trial, workers_per_trial)
    chosen = find_mode(mode)
    watch = _watch(report_timeout_s)
    for each in metrics:
        e.check_metric(each, field="metric")
    for limit in Limit.parse_all(constraints):
        e.check_metric(limit.metric, field="constraints")
    spec = e.StudySpec(
        name=name or runs.new_name(SystemClock()),
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
    beginning = _beginning(spec, chosen, _known(warm_start, spec, space))
    directory = _directory(
        _run_spec(
            train_fn,
            spec.name,
            num_processes=workers * workers_per_trial,
            at_least=workers_per_trial,
            engine=engine,
            nnodes=nnodes,
            coordinator=coordinator,
        ),
        train_fn,
        beginning,
    )

    def opened(journal: StudyJournal) -> tuple[Search, Handled | None]:
        search, recovered = _opened(journal, spec, chosen, beginning)
        search.watch = watch
        search.observers.append(Callbacks(callbacks, Study(directory.path, search.state)).note)
        return search, recovered

    return _carried_out(
        directory,
        opened,
        max_slots_per_trial=max_slots_per_trial,
        timeout_s=timeout_s,
        quiet=quiet,
        page_of=page_of,
    )


def resume(
    name: str,
    *,
    num_trials: int | None = None,
    workers: int | None = None,
    max_workers_per_trial: int | None = None,
    timeout_s: float | None = None,
    report_timeout_s: float | None = None,
    quiet: bool = False,
    page_of: PageOf | None = None,
) -> Study:
    """Continue a study with the function or script that it was last run with, in the same place.

    Args:
        name: Its name, or a unique prefix.
        num_trials: New number of trials in all; None: as before.
        workers: Number of trials that run at the same time; None: as before.
        max_workers_per_trial: Workers that one trial may have once no other needs them; None: as before.
        page_of: Returns its page, as for `tune`.

    Raises:
        ConfigError: There is no such study, it cannot be continued like this, or a setting is invalid.
        JournalLocked: The study is running.
        RunFailed: All of the first trials failed.
    """
    import msgspec  # noqa: PLC0415

    from strata.launch.record import directory as runs  # noqa: PLC0415 - heavy
    from strata.launch.spec import Size  # noqa: PLC0415

    directory = runs.open_run(name)
    study = _loaded(directory)
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
        search, recovered = _opened(journal, spec, Mode(known.sampler, known.scheduler))
        search.watch = watch
        return search, recovered

    return _carried_out(
        directory,
        opened,
        max_slots_per_trial=max_slots_per_trial,
        timeout_s=timeout_s,
        quiet=quiet,
        page_of=page_of,
    )


def _loaded(directory: RunDirectory) -> Study:
    """
    Raises:
        ConfigError: It is a run, or a study that was killed before its journal began.
    """
    if _is_study(directory.spec) and not _has_begun(directory.path):
        raise ConfigError(
            f"study {directory.name} was killed before it began, so there is nothing to resume; start it again with "
            f"the same name: call tune with name={directory.name!r}, or strata tune SCRIPT --name {directory.name}",
            field="name",
        )
    return Study.load(directory.path)


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
    directory: RunDirectory,
    opened: Opening,
    *,
    max_slots_per_trial: int,
    timeout_s: float | None,
    quiet: bool,
    page_of: PageOf | None,
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
                page=None if page_of is None else page_of(directory),
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
    found = collect_known(studies, spec, space)
    log.log(logging.WARNING if found.skipped else logging.INFO, "study %s: %s", spec.name, found)
    return found.known


def _beginning(spec: e.StudySpec, mode: Mode, known: Sequence[e.Known]) -> Sequence[e.Event]:
    """Return the first facts of a new study.

    Raises:
        ConfigError: The sampler or the scheduler does not fit the space, or needs a package that is missing.
    """
    now_s = SystemClock().wall_s()
    search = Search(spec, sampler=mode.sampler_object, pruner=mode.pruner_object)
    learned = [fact for each in known for fact in search.handle(each, now_s=now_s).facts]
    return [e.Opened(spec=spec, at_s=now_s), *learned]


# -- the directory -----------------------------------------------------------------------------------------------------


def _run_spec(
    train_fn: Callable[..., Any],
    name: str,
    *,
    num_processes: int,
    at_least: int,
    engine: Literal["local", "ray"],
    nnodes: int,
    coordinator: str,
) -> RunSpec:
    """Return how the processes of trials are started."""
    from strata.launch.record import directory as runs  # noqa: PLC0415 - heavy
    from strata.launch.spec import RunSpec, Size  # noqa: PLC0415
    from strata.train.orchestrator import preload_of  # noqa: PLC0415

    place = runs.root() / name
    script = train_fn if isinstance(train_fn, Script) else None
    return RunSpec(
        name=name,
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


def _directory(spec: RunSpec, train_fn: Callable[..., Any], beginning: Sequence[e.Event]) -> RunDirectory:
    """Create or open the directory of a study, with its function.

    Raises:
        ConfigError: There is a run of this name, which is not a study, or the directory cannot be written.
        InvalidArgument: The function cannot be pickled.
        JournalLocked: The study is running.
    """
    from strata.launch.record import directory as runs  # noqa: PLC0415 - heavy
    from strata.train import function as remote  # noqa: PLC0415

    def write_function(place: Path) -> None:
        remote.write_call(place / "call" / remote.FUNCTION, remote.Call(train_fn, (), {}))

    def fill(place: Path) -> None:
        write_function(place)
        with StudyJournal(place / JOURNAL) as journal:
            journal.append(beginning)

    place = runs.root() / spec.name
    if not (place / JOURNAL).exists():
        try:
            return runs.create(spec, fill)
        except ConfigError:
            # Another machine has just created it, or its driver was killed before the journal began.
            if not (place.exists() and _is_study(runs.open_run(spec.name).spec)):
                raise
    if spec.num_nodes == 1:
        StudyJournal(place / JOURNAL).close()  # raises if the study is running
    directory = runs.RunDirectory(place, spec)
    if spec.num_nodes == 1:
        directory.write_spec(spec)  # perhaps called from another directory, with another function
    write_function(place)
    return directory


def _is_study(spec: RunSpec) -> bool:
    return spec.is_module and spec.script == WORKER


def _has_begun(place: Path) -> bool:
    """Return whether a study has a journal with at least one fact."""
    with contextlib.suppress(FileNotFoundError):
        return bool(read_journal(place / JOURNAL)[0])
    return False


def _opened(
    journal: StudyJournal, spec: e.StudySpec, mode: Mode, beginning: Sequence[e.Event] = ()
) -> tuple[Search, Handled | None]:
    facts = journal.load()
    if not facts:  # an earlier driver was killed before it wrote the first
        journal.append(beginning)
        facts = list(beginning)
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
    is_new = all(isinstance(fact, e.Opened | e.Known) for fact in facts)
    recovered = None if is_new else search.recover(now_s=SystemClock().wall_s())
    if spec.num_trials > search.state.num_trials:
        before = recovered or Handled()
        journal.append(before.facts)
        more = search.handle(e.Extended(num_trials=spec.num_trials), now_s=SystemClock().wall_s())
        recovered = Handled(more.facts, before.actions + more.actions)
    return search, recovered
